"""Turns what a guest printed, and how it ended, into `{error_type, message, suggestion, context}`.

The status decides first: it was measured from outside. Only then is the guest's own text read, and that
text is hostile: no more than its end, line by line, by patterns that cannot backtrack far, and nothing of it
reaches a suggestion but what looks like a name. A guest can lie here and mislead its reader about why it
failed; it can never turn a limit that struck into something else. `stronger` in the context says that another
backend has what this one lacks: a guest that forges it is run by another backend under the same policy, no more.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from belljar.core.request import Egress, Limits
from belljar.core.result import ErrorType, Failure, Result, Status
from belljar.core.tracebacks import READ_OUTPUT, SHELLS, ReportedError, find
from belljar.core.values import covers, few, format_size

_E = ErrorType
_MISSING = ErrorType.MISSING_PACKAGE
_NO_EGRESS = Egress()
_TAIL = 20_000  # characters of stderr that are looked at
_LINE = 1_000
_MESSAGE = 500
_ESCAPES = re.compile(r"\x1b\[[0-9;?]{0,32}[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def diagnose(result: Result, *, language: str, limits: Limits, processes: bool, egress: Egress = _NO_EGRESS) -> Failure:
    """Says why a run did not succeed, so that an agent can act on it. Never raises.

    Args:
        result: what the backend measured, with the guest's own output.
        language: of the code; empty for a command.
        limits: those that the run had.
        processes: as `Capabilities.processes` says. Without them there is no operating system around the guest: then
            what it lacked may be found on another backend.
        egress: what the guest was granted of the network.

    Returns:
        The kind of failure, a message, a suggestion, and the facts behind them.
    """
    facts: dict[str, Any] = {"exit_code": result.exit_code, "signal": _signal(result.exit_code)}
    if verdict := _VERDICTS.get(result.status):
        return _from_status(verdict, result, limits, facts)
    lines = _lines(result.stderr)
    finding = find(lines, language) or _from_exit(lines, facts, language)
    kind, advice, seen = _classify(finding, result.exit_code, shell=language in SHELLS, bare=not processes)
    facts |= {"language": language} | finding.facts | seen
    if refusal := _refusal(result.denied, kind, finding, "\n".join(lines)):
        return _failure(_E.NETWORK_ERROR, refusal["message"], refusal["fix"], facts | {"host": refusal["host"]})
    if kind in _LIMIT_BEHIND and "stronger" not in facts:
        facts |= _limit(_LIMIT_BEHIND[kind], limits)
    words = defaultdict(str, {name: str(value) for name, value in facts.items() if value is not None})
    words |= {"place": "this sandbox" if processes else "the wasm runtime"}
    words |= {"where": _where(finding.facts), "pip": _pip_name(words["package"])}
    if kind is _E.NETWORK_ERROR and egress.mode != "none":
        advice, asked = _network_advice(egress, finding)
        words |= asked
    words |= {"elsewhere": "" if processes else "ask for backend=native, or "}
    message = f"{finding.headline} ({facts['cause']})" if "cause" in facts else finding.headline
    return _failure(kind, message, advice.format_map(words), facts)


def _failure(kind: ErrorType, message: str, suggestion: str, facts: dict[str, Any]) -> Failure:
    context = {name: value for name, value in facts.items() if value not in (None, "")}
    return Failure(error_type=kind, message=message[:_MESSAGE], suggestion=suggestion, context=context)


# --- what the status says ----------------------------------------------------------------------


class _Verdict(NamedTuple):
    kind: ErrorType
    limit: str
    message: str
    suggestion: str


_MEMORY = 'hold less in memory at once (read in chunks, stream, use generators), or ask for more with memory="<size>"'
_DISK = 'write less, delete what is no longer needed in /workspace and /tmp, or ask for more with disk="<size>"'
_VERDICTS = {
    Status.SUCCESS: _Verdict(_E.RUNTIME_ERROR, "", "the run succeeded", "nothing needs to be done"),
    Status.TIMEOUT: _Verdict(
        _E.TIMEOUT, "timeout", "stopped after {limit}, the time limit of this run",
        "do less work at once, look for an endless loop or a wait for input, or ask for more with timeout=<seconds>",
    ),
    Status.OOM_KILLED: _Verdict(
        _E.OOM_KILLED, "memory", "killed for using more than {limit} of memory, the limit of this run",
        _MEMORY,
    ),
    Status.DISK_LIMIT: _Verdict(
        _E.DISK_LIMIT, "disk", "found no space left: /workspace and /tmp hold {limit} each, /dev/shm 64M",
        _DISK,
    ),
    Status.OUTPUT_LIMIT: _Verdict(
        _E.OUTPUT_LIMIT, "output", "printed more than {limit}, the output limit of this run; the middle was cut",
        'write it to a file and collect it with collect=["<name>"], or print less',
    ),
    Status.FUEL_EXHAUSTED: _Verdict(
        _E.FUEL_EXHAUSTED, "", "used up its fuel: it executed more instructions than this run allows",
        "do less work at once, look for an endless loop, or ask for more with fuel=<instructions>",
    ),
    Status.KILLED: _Verdict(
        _E.RUNTIME_ERROR, "", "ended from outside: neither the program nor a limit of this run stopped it",
        "run it again; if that happens again, the machine itself may be short of memory",
    ),
    Status.ABORTED: _Verdict(
        _E.RUNTIME_ERROR, "", "cancelled by the caller; the output up to then is in the result",
        "run it again if the answer is still wanted",
    ),
}  # fmt: skip


def _from_status(verdict: _Verdict, result: Result, limits: Limits, facts: dict[str, Any]) -> Failure:
    limit = _limit(verdict.limit, limits)
    last = _last(_lines(result.stderr)) or _last(_lines(result.stdout))
    facts |= limit | {"last_output": last[:_MESSAGE], "memory_used_mb": result.memory_used_mb}
    suggestion = verdict.suggestion
    if result.status is Status.TIMEOUT and _REFUSED_FORK.search(last):
        suggestion = (
            f"it waited for processes it was refused: start fewer than {limits.pids}, or ask for more with pids="
        )
    return _failure(verdict.kind, verdict.message.format(limit=limit.get("limit", "")), suggestion, facts)


_LIMIT_BEHIND = {_E.OOM_KILLED: "memory", _E.PROCESS_LIMIT: "pids", _E.DISK_LIMIT: "disk", _E.TIMEOUT: "timeout"}


def _limit(name: str, limits: Limits) -> dict[str, Any]:
    if not name:
        return {}
    value = getattr(limits, name)
    shown = {"timeout": f"{value:g} s", "pids": f"{value} processes"}.get(name) or format_size(value)
    return {"limit_name": name, "limit": shown}


# --- what the exit code says -------------------------------------------------------------------

_SIGNALS = {
    "SIGSEGV": (_E.RUNTIME_ERROR, "crashed by an access to memory that is not its own",
                "look at native extensions, ctypes, unsafe code or very deep recursion"),
    "SIGABRT": (_E.RUNTIME_ERROR, "aborted itself", "an assertion or a check of the runtime failed: see its output"),
    "SIGILL": (_E.RUNTIME_ERROR, "executed an instruction this processor does not have",
               "use a build for a plainer processor, or look for memory corruption"),
    "SIGFPE": (_E.RUNTIME_ERROR, "crashed by an arithmetic error such as a division by zero", "check the divisors"),
    "SIGBUS": (_E.RUNTIME_ERROR, "crashed by an access beyond the end of a mapped file", "check memory maps"),
    "SIGSYS": (_E.PERMISSION_DENIED, "used a system call that the sandbox refuses",
               "mounts, ptrace, namespaces, keyrings, bpf and the like are closed here: do without them"),
    "SIGTERM": (_E.RUNTIME_ERROR, "was asked to end (SIGTERM), and not by Belljar", "look for `kill` in the program"),
    "SIGKILL": (_E.RUNTIME_ERROR, "was killed, and not by a limit of this run", "look for `kill -9` in the program"),
    "SIGXFSZ": (_E.DISK_LIMIT, "wrote a file larger than allowed", "write less, or ask for more with disk="),
    "SIGXCPU": (_E.TIMEOUT, "used up its processor time", "do less work at once"),
    "SIGPIPE": (_E.RUNTIME_ERROR, "wrote to a pipe whose reader had gone", "let the reader read to the end"),
}  # fmt: skip


def _signal(code: int | None) -> str | None:
    """The name behind 128 + n (a shell's or bubblewrap's way to tell) or -n (Python's)."""
    number = -code if code is not None and code < 0 else (code or 0) - 128
    return next((s.name for s in signal.Signals if s.value == number), None)


def _from_exit(lines: Sequence[str], facts: dict[str, Any], language: str) -> ReportedError:
    code, name, last = facts["exit_code"], facts["signal"], _last(lines)
    if name in _SIGNALS and not (language in SHELLS and last):
        kind, meaning, advice = _SIGNALS[name]
        said = f": {last}" if last else ""
        return ReportedError(
            0, f"{name}: the program {meaning}{said}", language, {}, "\n".join(lines[-12:]), advice, kind
        )
    ended = "the program ended" if code is None else f"exit code {code}"
    if not last:
        advice = "look at stdout: the program chose this exit code itself" if code else "run it again"
        return ReportedError(0, f"{ended}, and nothing was printed to stderr", language, {}, "", advice)
    return ReportedError(0, f"{ended}: {last}", language, {}, "\n".join(lines[-12:]), READ_OUTPUT)


# --- what it means -----------------------------------------------------------------------------

_WRITABLE = "only /workspace and /tmp are writable here: write there"
_EXECUTABLE = "make it executable (chmod +x) or start it by its interpreter: `bash {program}`, `python3 {program}`"
_NETWORK = (
    "there is no network in {place}: give it what it needs with files={{...}}, start what it talks to inside the same "
    "run, or ask for the hosts with net=[...] on a backend that offers them"
)
_PROCESSES = "start fewer processes or threads at once, or ask for more with pids="
_PYTHON_PACKAGE = (
    "{package} is not installed in {place}: {elsewhere}grant a Python environment that has it with "
    'packages="/path/to/venv"'
    "{pip}, use only the standard library, or, if it is a file of yours, pass it with files={{...}}"
)
_NO_NAME = "the installed {package} has no such name: check the spelling and the version"
_NODE_PACKAGE = (
    "{package} is not installed in {place}: use only the modules of Node.js, or pass the module with files={{...}} "
    "and import it as ./name"
)
_GO_PACKAGE = "{package} is not in {place}: use only Go's standard library, or grant a workspace with a vendor folder"
_CRATE = "{package} is not in {place}: crates cannot be fetched, so use only Rust's std, or write the part you need"
_PROGRAM = "{package} is not installed in {place}: use a program that is there, or write that step in Python"
_FILES = "the guest sees only /workspace, /tmp and the system: pass the file with files={{...}}, or create it first"
_STDIN = "the program wants input: pass it with stdin="
_UNBOUND = "give the variable a value{where}, pass it with env={{...}}, or write a default such as ${{NAME:-}}"
_RECURSION = "the recursion has no end or is too deep{where}: use a loop, or a base case that is reached"
_TYPES_ONLY = "Node only strips types: replace enum, namespace and parameter properties by plain objects and fields"
_DEADLOCK = "every goroutine waits for another: close the channel, or send from a goroutine of its own"


class _Sign(NamedTuple):
    kind: ErrorType
    pattern: re.Pattern[str]
    advice: str


def _signs(*rows: tuple[ErrorType, str, str]) -> tuple[_Sign, ...]:
    return tuple(_Sign(kind, re.compile(pattern, re.IGNORECASE), advice) for kind, pattern, advice in rows)


_NAME = r"(?P<package>[\w.@/+~-]{1,120})"

# Kind, pattern (tried on the headline first, then on what belongs to it), advice. The first that fits wins.
_ANY = _signs(
    (_MISSING, rf"(?:^|: ){_NAME}: (?:command )?not found$", _PROGRAM),
    (_MISSING, rf"^env: \W?{_NAME}\W?: No such file or directory$", _PROGRAM),
    (_E.DISK_LIMIT, r"no space left on device|disk quota exceeded|\bENOSPC\b", _DISK),
    (_E.PERMISSION_DENIED, r"read-only file ?system|permission ?denied|operation not permitted", _WRITABLE),
    (_E.NETWORK_ERROR,
     r"could ?n[o']t resolve|failure in name resolution|network ?(?:is )?unreachable|connection ?refused|"
     r"no such host|no route to host|failed to lookup address|name or service not known|dial tcp", _NETWORK),
    (_E.PROCESS_LIMIT, r"resource temporarily unavailable|cannot fork|can't fork|failed to create new OS thread|"
     r"failed to spawn thread", _PROCESSES),
    (_E.OOM_KILLED, r"cannot allocate memory|out of memory|memory allocation of \d+ bytes failed|bad_alloc", _MEMORY),
)  # fmt: skip

_BY_LANGUAGE: dict[str, tuple[_Sign, ...]] = {
    "python": _signs(
        (_MISSING, rf"^ModuleNotFoundError: No module named '{_NAME}'", _PYTHON_PACKAGE),
        (_MISSING, rf"^ImportError: cannot import name '[^']{{1,200}}' from (?:[a-z ]{{1,40}})?'{_NAME}'", _NO_NAME),
        (_MISSING, rf"^ImportError: {_NAME}: cannot open shared object file", _PROGRAM),
        (_MISSING, r"^ImportError\b", "check the spelling and the version of what is imported{where}"),
        (_E.SYNTAX_ERROR, r"^(?:SyntaxError|IndentationError|TabError)\b", "correct the syntax{where}; nothing ran"),
        (_E.OOM_KILLED, r"^(?:MemoryError|[\w.]+\._ArrayMemoryError)\b", _MEMORY),
        (_E.OOM_KILLED, r"^OSError: \[Errno 12\]", _MEMORY),
        (_E.PROCESS_LIMIT, r"^(?:(?:BlockingIO|OS)Error: \[Errno 11\]|RuntimeError: can't start new)", _PROCESSES),
        (_E.DISK_LIMIT, r"^OSError: \[Errno (?:28|122|27)\]", _DISK),
        (_E.PERMISSION_DENIED, r"^(?:PermissionError|OSError: \[Errno (?:30|1|13)\])", _WRITABLE),
        (_E.NETWORK_ERROR, r"^(?:socket\.)?(?:gaierror|ConnectionRefusedError|ConnectionResetError)\b", _NETWORK),
        (_E.NETWORK_ERROR, r"^(?:OSError|TimeoutError): \[Errno (?:-[235]|99|10[01]|11[013])\]", _NETWORK),
        (_E.NETWORK_ERROR, r"^(?:urllib\.error\.URLError|[\w.]*\b(?:ConnectionError|ConnectError|ConnectTimeout|"
         r"ClientConnector\w{0,20}Error|NameResolutionError|NewConnectionError|MaxRetryError))\b", _NETWORK),
        (_E.RUNTIME_ERROR, r"^FileNotFoundError\b", _FILES),
        (_E.RUNTIME_ERROR, r"^EOFError\b", _STDIN),
        (_E.RUNTIME_ERROR, r"^RecursionError\b", _RECURSION),
    ),
    "javascript": _signs(
        (_MISSING, rf"Cannot find (?:module|package) '{_NAME}'", _NODE_PACKAGE),
        (_E.SYNTAX_ERROR, r"ERR_UNSUPPORTED_TYPESCRIPT_SYNTAX", _TYPES_ONLY),
        (_E.SYNTAX_ERROR, r"^SyntaxError\b", "correct the syntax{where}; nothing ran"),
        (_E.OOM_KILLED, r"heap out of memory|Array buffer allocation failed", _MEMORY),
        (_E.NETWORK_ERROR, r"\b(?:ENOTFOUND|ECONNREFUSED|EAI_AGAIN|ENETUNREACH|EHOSTUNREACH|ETIMEDOUT)\b", _NETWORK),
        (_E.DISK_LIMIT, r"\b(?:ENOSPC|EDQUOT|EFBIG)\b", _DISK),
        (_E.PERMISSION_DENIED, r"\b(?:EROFS|EACCES|EPERM)\b", _WRITABLE),
        (_E.PROCESS_LIMIT, r"\bEAGAIN\b", _PROCESSES),
        (_MISSING, rf"\bspawn(?:Sync)? {_NAME} ENOENT\b", _PROGRAM),
        (_E.RUNTIME_ERROR, r"\bENOENT\b", _FILES),
        (_E.RUNTIME_ERROR, r"^RangeError: Maximum call stack", _RECURSION),
    ),
    "bash": _signs(
        (_MISSING, rf"^{_NAME}: command not found", _PROGRAM),
        (_E.SYNTAX_ERROR, r"^syntax error|^unexpected EOF while looking for", "correct the syntax{where}"),
        (_E.RUNTIME_ERROR, r": unbound variable", _UNBOUND),
    ),
    "go": _signs(
        (_MISSING, rf'(?:no required module provides|cannot find module providing|cannot find) package "?{_NAME}',
         _GO_PACKAGE),
        (_MISSING, rf"package {_NAME} is not in (?:GOROOT|std)", _GO_PACKAGE),
        (_E.RUNTIME_ERROR, r"all goroutines are asleep", _DEADLOCK),
        (_E.RUNTIME_ERROR, r"stack overflow|goroutine stack exceeds", _RECURSION),
    ),
    "rust": _signs(
        (_MISSING, rf"\[E0432\]: unresolved import `(?!(?:std|core|alloc|crate|self|super)::){_NAME}", _CRATE),
        (_MISSING, rf"\[E0433\]: .{{0,80}}(?:crate or module|or unlinked crate|missing crate) `{_NAME}`", _CRATE),
        (_MISSING, rf"\[E0463\]: can't find crate for `{_NAME}`", _CRATE),
        (_E.RUNTIME_ERROR, r"stack overflow", _RECURSION),
    ),
}  # fmt: skip
_REFUSED_FORK = re.compile(r"fork: (?:retry: )?Resource temporarily unavailable")

# What a shell says by its exit code, where its words said less.
_BY_EXIT = {
    126: (_E.PERMISSION_DENIED, _EXECUTABLE),
    127: (
        _E.MISSING_PACKAGE,
        "{package} is not there: check its name and path, or pass it with files={{...}}",
    ),
}


def _classify(
    finding: ReportedError, code: int | None, *, shell: bool, bare: bool
) -> tuple[ErrorType, str, dict[str, Any]]:
    sign, names = _sign_of(finding, bare)
    kind, advice = (sign.kind, sign.advice) if sign else (finding.kind, finding.advice)
    if finding.kind is _E.SYNTAX_ERROR and kind is not _E.MISSING_PACKAGE:
        kind, advice = _E.SYNTAX_ERROR, finding.advice  # a compiler's words about types are not the kernel's
    if shell and code in _BY_EXIT and kind in (_E.RUNTIME_ERROR, _E.PERMISSION_DENIED):
        kind, advice = _BY_EXIT[code]
        program = re.match(rf"{_NAME}:", finding.headline)
        names = {"package" if code == 127 else "program": program["package"] if program else "the program"}
    return kind, advice, names


def _sign_of(finding: ReportedError, bare: bool) -> tuple[_Sign | None, dict[str, Any]]:
    if bare and (lacking := _lacking(finding.headline)):
        return lacking
    table = _BY_LANGUAGE.get(finding.reader, ())
    if finding.reader != "python":  # a traceback names its exception; words inside its message mean nothing more
        table += _ANY
    for text in (finding.headline, finding.block):
        for sign in table:
            if match := sign.pattern.search(text):
                names = {name: value for name, value in match.groupdict().items() if value}
                cause = text[text.rfind("\n", 0, match.start()) + 1 :].partition("\n")[0].strip()
                return sign, names if cause in finding.headline else names | {"cause": cause}
    return None, {}


# --- the network that was granted ---------------------------------------------------------------

_REFUSED = re.compile(
    r"network: (?P<host>\S{1,300}) was refused: (?P<why>.{1,2000}) — (?P<fix>.{1,1000})"
)  # by our proxy
_BY_PROXY = re.compile(r"tunnel connection failed|connect tunnel failed|network: \S{1,300} was refused", re.IGNORECASE)
_PERHAPS_BY_PROXY = re.compile(r"\bE?403\b|\btunnel|proxy|no matching distribution found", re.IGNORECASE)
_LOOKED_UP = re.compile(r"(?:EAI_AGAIN|ENOTFOUND|resolve host:?|lookup) '?(?P<host>[A-Za-z0-9.-]{1,253})")
_ASK_PROXY = "a client that asks the proxy which https_proxy names (Node.js does from version 24 on)"
_LISTED = f"only {{hosts}} can be reached here, by https: allow others with net=[...], and use {_ASK_PROXY}"
_UNLISTED = f'allow it with net=["{{host}}"] (--net {{host}}), and use {_ASK_PROXY}'
_UNASKED = f"{{host}} is on the list, but the program did not ask for it in the way that is open: use {_ASK_PROXY}"
_OPEN = "check the host's name and port, and that the network which the administrator set up for guests reaches it"


def _refusal(denied: Sequence[str], kind: ErrorType, finding: ReportedError, printed: str) -> dict[str, str] | None:
    """The host that our proxy refused, if that seems to be what the guest failed of: it may have gone on without."""
    refused = [match.groupdict() for match in map(_REFUSED.fullmatch, denied) if match]
    text = finding.block if finding.reader == "python" else printed
    named = [one for one in refused if one["host"].rpartition(":")[0] in text]
    sure = kind is _E.NETWORK_ERROR or not printed.strip() or _BY_PROXY.search(printed)
    if not refused or not (sure or named or _PERHAPS_BY_PROXY.search(text)):
        return None
    last = (named or refused)[-1]
    return last | {"message": f"{last['host']} was refused: {last['why']}"}


def _network_advice(egress: Egress, finding: ReportedError) -> tuple[str, dict[str, str]]:
    """What to do about a failure of which our proxy heard nothing."""
    if egress.mode == "open":
        return _OPEN, {}
    asked = _LOOKED_UP.search(finding.block) or _LOOKED_UP.search(finding.headline)
    if not asked:
        return _LISTED, {"hosts": few(egress.hosts)}
    host = asked["host"].lower().rstrip(".")
    listed = any(covers(pattern, host) for pattern in egress.hosts)
    return _UNASKED if listed else _UNLISTED, {"host": host}


# --- what only the wasm runtime lacks ----------------------------------------------------------

_NATIVE = "ask for backend=native, or"
_ON_WASM = _signs(
    (_MISSING, rf"^ModuleNotFoundError: No module named '{_NAME}'", _PYTHON_PACKAGE),
    (_MISSING, rf"^ModuleNotFoundError: (?:Unsupported platform for s|S)tandard library module '{_NAME}'",
     f"{{package}} is not in {{place}}: {_NATIVE} do without it"),
    (_E.PROCESS_LIMIT, r"^OSError: \[Errno 58\] \w{1,20} does not support processes|"
     r"^NotImplementedError: This Python build lacks multiprocessing",
     f"there are no processes in {{place}}: {_NATIVE} do it in this one"),
    (_E.PROCESS_LIMIT, r"^RuntimeError: (?:can't start new|unable to start watchdog) thread",
     f"there are no threads in {{place}}: {_NATIVE} do one thing after the other"),
    (_E.NETWORK_ERROR, r"^AttributeError: module '_?socket' has no attribute '\w{1,40}'",
     f"there are no sockets in {{place}}: {_NATIVE} give it what it needs with files={{{{...}}}}"),
    (_E.RUNTIME_ERROR, r"^OSError: (?:\[Errno 5[28]\]|(?:ctypes|mmap) is unavailable)",
     f"{{place}} has no sockets (nor event loops, which need them), pipes, memory maps or C libraries: {_NATIVE} do "
     "without"),
    (_E.RUNTIME_ERROR, r"^RecursionError: Stack overflow|wasm trap: call stack exhausted",
     f"the stack of {{place}} is small where C code calls back, as functools.cache does: {_NATIVE} use a loop"),
    (_E.RUNTIME_ERROR, r"wasm trap: wasm `unreachable`",
     f"the interpreter gave up, as it does in {{place}} for a wait on another thread or for a signal: {_NATIVE} do "
     "without"),
    (_E.RUNTIME_ERROR, r"^FileNotFoundError: \[Errno 44\] [^:]{1,80}: '/(?:bin|dev|etc|lib|opt|proc|run|sys|usr|var)/",
     f"there are no files of a system in {{place}}: {_NATIVE} pass the file with files={{{{...}}}}"),
)  # fmt: skip
_NO_SUCH_NAME = re.compile(
    r"AttributeError: module '(?P<module>\w{1,20})' has no attribute '(?P<name>\w{1,60})'|"
    r"ImportError: cannot import name '(?P<name2>\w{1,60})' from '(?P<module2>\w{1,20})'"
)
_UNEQUAL = {module.__name__: module for module in (os, select, shutil, signal, time)}  # larger on a whole system


def _lacking(headline: str) -> tuple[_Sign, dict[str, Any]] | None:
    """A failure that another backend would not have had."""
    for sign in _ON_WASM:
        if match := sign.pattern.search(headline):
            return sign, match.groupdict() | {"stronger": True}
    if match := _NO_SUCH_NAME.match(headline):
        module, name = match["module"] or match["module2"], match["name"] or match["name2"]
        # What our own Python has there, a native one has too; anything else is a slip of the guest's.
        if module in _UNEQUAL and hasattr(_UNEQUAL[module], name):
            advice = f"{module}.{name} is not in {{place}}: {_NATIVE} do without it"
            return _Sign(_E.RUNTIME_ERROR, _NO_SUCH_NAME, advice), {"stronger": True}
    return None


# --- small things ------------------------------------------------------------------------------

# Modules whose package has another name.
_DISTRIBUTIONS = {
    "PIL": "pillow", "bs4": "beautifulsoup4", "cv2": "opencv-python", "dateutil": "python-dateutil",
    "dotenv": "python-dotenv", "skimage": "scikit-image", "sklearn": "scikit-learn", "yaml": "pyyaml",
}  # fmt: skip


def _pip_name(module: str) -> str:
    name = _DISTRIBUTIONS.get(module.partition(".")[0])
    return f" (its package is {name})" if name else ""


def _where(facts: dict[str, Any]) -> str:
    if not facts.get("line"):
        return ""
    file = str(facts.get("file", "")).rpartition("/")[2]
    named = f" of {file}" if re.fullmatch(r"[\w.-]{1,100}", file) else ""
    return f" at line {facts['line']}{named}"


def _lines(text: str) -> list[str]:
    """The end of what was printed, without colours and control characters, in lines of a sane length."""
    tail = _ESCAPES.sub("", text[-_TAIL:].replace("\r\n", "\n"))
    return [line[:_LINE] for line in tail.split("\n")]


def _last(lines: Sequence[str]) -> str:
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
