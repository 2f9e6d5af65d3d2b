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

from belljar.core.net_entries import covered
from belljar.core.package_names import package, refused
from belljar.core.request import Egress, Limits
from belljar.core.result import ErrorType, Failure, Result, Status
from belljar.core.signs import (
    ANY_LANGUAGE,
    BY_EXIT,
    BY_LANGUAGE,
    DISK,
    DISK_IN_MEMORY,
    FILES_ARE_MEMORY,
    MEMORY,
    MEMORY_AND_FILES,
    NAME,
    NATIVE,
    NETWORK,
    NODE_PACKAGE,
    ON_WASM,
    READ_ONLY,
    REFUSED_FORK,
    REGISTRY,
    WRITABLE,
    Sign,
)
from belljar.core.tracebacks import READ_OUTPUT, SHELLS, ReportedError, find
from belljar.core.values import few, format_size

_E = ErrorType
_MISSING = ErrorType.MISSING_PACKAGE
_NO_EGRESS = Egress()
_TAIL = 20_000  # characters of stderr that are looked at
_LINE = 1_000
_MESSAGE = 500
_LAST_LINES = 6  # of stderr, among which a shell's last words are
_ESCAPES = re.compile(r"\x1b\[[0-9;?]{0,32}[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_CURLS_METER = re.compile(r"^[\s\d:.kMG-]{1,120}(?=curl: \()")  # ends without a new line before what curl complains of


class Around(NamedTuple):
    """What a run had around it, and what there is elsewhere: it decides which advice is right."""

    egress: Egress = _NO_EGRESS
    read_only: bool = False  # /workspace is a granted folder that the guest may not write to
    counts_fuel: bool = False
    disk_in_memory: bool = False  # what the guest writes counts against its memory
    files: int = 0  # bytes of memory that its files take, where that is known
    wasm: str = ""  # how to get to the wasm runtime from here: "ask for backend=wasm"; empty: it is no way out
    wasm_modules: frozenset[str] = frozenset()
    installs: bool = True  # packages can be had by their names where it ran; else on native alone
    packages: tuple[str, ...] = ()  # patterns of those that may be installed for a guest
    memory: int = 0  # bytes that the guest and its files may take together, where that is known

    @property
    def files_prevail(self) -> bool:
        """Whether its files take at least half of the memory."""
        return 0 < self.memory <= 2 * self.files


NOTHING_AROUND = Around()


def diagnose(
    result: Result, *, language: str, limits: Limits, processes: bool, around: Around = NOTHING_AROUND
) -> Failure:
    """Says why a run did not succeed, so that an agent can act on it. Never raises.

    Args:
        result: what the backend measured, with the guest's own output.
        language: of the code; empty for a command.
        limits: those that the run had.
        processes: as `Capabilities.processes` says. Without them there is no operating system around the guest: then
            what it lacked may be found on another backend.
        around: what else it had, such as a network.

    Returns:
        The kind of failure, a message, a suggestion, and the facts behind them.
    """
    facts: dict[str, Any] = {"exit_code": result.exit_code, "signal": _signal(result.exit_code)}
    if verdict := _VERDICTS.get(result.status):
        return _from_status(verdict, result, limits, facts, _suggestion_of(result, language, limits, around))
    lines = _lines(result.stderr)
    finding = find(lines, language) or _from_exit(lines, facts, language)
    kind, advice, seen = _classify(finding, result.exit_code, shell=language in SHELLS, bare=not processes)
    if child := _of_child(finding, lines):
        kind, advice = child.kind, child.advice
    facts |= {"language": language} | finding.facts | seen
    if refusal := _refusal(result.denied, kind, finding, "\n".join(lines)):
        return _failure(_E.NETWORK_ERROR, refusal["message"], refusal["fix"], facts | {"host": refusal["host"]})
    if kind in _LIMIT_BEHIND and "stronger" not in facts:
        facts |= _limit(_LIMIT_BEHIND[kind], limits)
    words = defaultdict(str, {name: str(value) for name, value in facts.items() if value is not None})
    words |= {"place": "this sandbox" if processes else "the wasm runtime"}
    words |= {"where": _where(finding.facts)}
    advice, more = _fitted(advice, finding, around)
    remedy = _remedy(words["package"], advice, around)
    elsewhere = "" if "backend=native" in remedy else "ask for backend=native, or "
    words |= more | {"elsewhere": _elsewhere(words["package"], around) if processes else elsewhere, "remedy": remedy}
    message = f"{finding.headline} ({facts['cause']})" if "cause" in facts else finding.headline
    return _failure(kind, message, advice.format_map(words), facts)


def _fitted(advice: str, finding: ReportedError, around: Around) -> tuple[str, dict[str, str]]:
    """The advice as it is right for what the run had around it, and the words it needs."""
    if advice in (NETWORK, REGISTRY) and around.egress.mode != "none":
        return _network_advice(around.egress, finding)
    if advice == REGISTRY:
        return advice, {"hosts": _REGISTRIES["npm" if "npm " in finding.block else "pip"]}
    if advice == WRITABLE and around.read_only:
        return READ_ONLY, {}
    if around.disk_in_memory:
        return _in_memory(advice, around), {"files": format_size(around.files)}
    return advice, {}


# What has to be reached; hosts that an administrator may have others for are not named.
_REGISTRIES = {"pip": "the package index and where its files are", "npm": "the registry"}


def _elsewhere(package: str, around: Around) -> str:
    """Where a package that is missing here is to be had."""
    if around.wasm and package.partition(".")[0] in around.wasm_modules:
        return f"the wasm runtime has it: {around.wasm}, or "
    return ""


def _failure(kind: ErrorType, message: str, suggestion: str, facts: dict[str, Any]) -> Failure:
    context = {name: value for name, value in facts.items() if value not in (None, "")}
    return Failure(error_type=kind, message=message[:_MESSAGE], suggestion=suggestion, context=context)


# --- what the status says ----------------------------------------------------------------------


class _Verdict(NamedTuple):
    kind: ErrorType
    limit: str
    message: str
    suggestion: str


_VERDICTS = {
    Status.SUCCESS: _Verdict(_E.RUNTIME_ERROR, "", "the run succeeded", "nothing needs to be done"),
    Status.TIMEOUT: _Verdict(
        _E.TIMEOUT, "timeout", "stopped after {limit}, the time limit of this run",
        "do less work at once, look for an endless loop or a wait for input, or ask for more with timeout=<seconds>",
    ),
    Status.OOM_KILLED: _Verdict(
        _E.OOM_KILLED, "memory", "killed for using more than {limit} of memory, the limit of this run",
        MEMORY,
    ),
    Status.DISK_LIMIT: _Verdict(
        _E.DISK_LIMIT, "disk", "found no space left: /workspace and /tmp hold {limit} each, /dev/shm 64M",
        DISK,
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


_FASTER = "Python computes several times as fast with backend=native"
_FUEL = "fuel=400000000 ends an endless loop after about a second (for all runs: BELLJAR_DEFAULT_FUEL)"


def _suggestion_of(result: Result, language: str, limits: Limits, around: Around) -> str:
    """What to do about a limit that struck."""
    advice = _VERDICTS[result.status].suggestion
    if result.status is Status.TIMEOUT and around.counts_fuel:
        more = [_FASTER] if language.startswith("python") else []
        return "; ".join([advice, *more, *([] if limits.fuel else [_FUEL])])
    if around.disk_in_memory:
        return _in_memory(advice, around).replace("{files}", format_size(around.files))
    return advice


def _in_memory(advice: str, around: Around) -> str:
    """The same advice where disk is memory: if files took most of it, the program need not hold less."""
    if advice == MEMORY and around.files_prevail:
        return FILES_ARE_MEMORY
    return {MEMORY: MEMORY_AND_FILES, DISK: DISK_IN_MEMORY}.get(advice, advice)


def _from_status(verdict: _Verdict, result: Result, limits: Limits, facts: dict[str, Any], suggestion: str) -> Failure:
    limit = _limit(verdict.limit, limits)
    last = _last(_lines(result.stderr)) or _last(_lines(result.stdout))
    facts |= limit | {"last_output": last[:_MESSAGE], "memory_used_mb": result.memory_used_mb}
    if result.status is Status.TIMEOUT and REFUSED_FORK.search("\n".join(_lines(result.stderr)[-_LAST_LINES:])):
        refused = f"it waited for processes it was refused: start fewer than {limits.pids}"
        suggestion = f"{refused}, or ask for more with pids=<number>"
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
    "SIGXFSZ": (_E.DISK_LIMIT, "wrote a file larger than allowed", 'write less, or ask for more with disk="<size>"'),
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


def _classify(
    finding: ReportedError, code: int | None, *, shell: bool, bare: bool
) -> tuple[ErrorType, str, dict[str, Any]]:
    sign, names = _sign_of(finding, bare)
    kind, advice = (sign.kind, sign.advice) if sign else (finding.kind, finding.advice)
    if finding.kind is _E.SYNTAX_ERROR and kind is not _E.MISSING_PACKAGE:
        kind, advice = _E.SYNTAX_ERROR, finding.advice  # a compiler's words about types are not the kernel's
    if shell and code in BY_EXIT and kind in (_E.RUNTIME_ERROR, _E.PERMISSION_DENIED):
        kind, advice = BY_EXIT[code]
        program = re.match(rf"{NAME}:", finding.headline)
        names = {"package" if code == 127 else "program": program["package"] if program else "the program"}
    return kind, advice, names


def _of_child(finding: ReportedError, lines: Sequence[str]) -> Sign | None:
    """Why a program failed that Python code started and checked: a client without a network says so before."""
    if not _CHECKED_CHILD.match(finding.headline):
        return None
    unreachable = [sign for sign in ANY_LANGUAGE if sign.kind is _E.NETWORK_ERROR]
    return next((sign for line in lines for sign in unreachable if sign.pattern.search(line)), None)


_CHECKED_CHILD = re.compile(r"(?:subprocess\.)?CalledProcessError: ")


def _sign_of(finding: ReportedError, bare: bool) -> tuple[Sign | None, dict[str, Any]]:
    if bare and (lacking := _lacking(finding.headline)):
        return lacking
    table = BY_LANGUAGE.get(finding.reader, ())
    if finding.reader != "python":  # a traceback names its exception; words inside its message mean nothing more
        table += ANY_LANGUAGE
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
_UNLISTED = f'allow it with net=["{{host}}"], and use {_ASK_PROXY}'
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
    listed = covered(host, egress.hosts)
    return _UNASKED if listed else _UNLISTED, {"host": host}


# --- what only the wasm runtime lacks ----------------------------------------------------------

_NO_SUCH_NAME = re.compile(
    r"AttributeError: module '(?P<module>\w{1,20})' has no attribute '(?P<name>\w{1,60})'|"
    r"ImportError: cannot import name '(?P<name2>\w{1,60})' from '(?P<module2>\w{1,20})'"
)
_UNEQUAL = {module.__name__: module for module in (os, select, shutil, signal, time)}  # larger on a whole system


def _lacking(headline: str) -> tuple[Sign, dict[str, Any]] | None:
    """A failure that another backend would not have had."""
    for sign in ON_WASM:
        if match := sign.pattern.search(headline):
            return sign, match.groupdict() | {"stronger": True}
    if match := _NO_SUCH_NAME.match(headline):
        module, name = match["module"] or match["module2"], match["name"] or match["name2"]
        # What our own Python has there, a native one has too; anything else is a slip of the guest's.
        if module in _UNEQUAL and hasattr(_UNEQUAL[module], name):
            advice = f"{module}.{name} is not in {{place}}: {NATIVE} do without it"
            return Sign(_E.RUNTIME_ERROR, _NO_SUCH_NAME, advice), {"stronger": True}
    return None


# --- small things ------------------------------------------------------------------------------

# Modules whose package has another name.
_DISTRIBUTIONS = {
    "PIL": "pillow", "bs4": "beautifulsoup4", "cv2": "opencv-python", "dateutil": "python-dateutil",
    "dotenv": "python-dotenv", "skimage": "scikit-image", "sklearn": "scikit-learn", "yaml": "pyyaml",
}  # fmt: skip


def _remedy(module: str, advice: str, around: Around) -> str:
    """How a package is to be had that the code wants: by its name, where it may be installed."""
    if advice == NODE_PACKAGE:
        parts = module.split("/")[: 2 if module.startswith("@") else 1]
        name = "npm:" + "/".join(parts)
        return f"{_installed(name, around)}, " if _installable(name, around) else ""
    top = module.partition(".")[0]
    name = _DISTRIBUTIONS.get(top, top)
    if _installable(name, around):
        return _installed(name, around)
    told = f" (its package is {name})" if top in _DISTRIBUTIONS else ""
    return f'grant a Python environment that has it with packages="/path/to/venv"{told}'


def _installable(name: str, around: Around) -> bool:
    try:
        return package(name) == name and not refused([name], around.packages)
    except ValueError:  # a file of the guest's, or a name that no registry has
        return False


def _installed(name: str, around: Around) -> str:
    where = "" if around.installs else "on backend=native "
    return f'have it installed {where}with packages=["{name}"]'


def _where(facts: dict[str, Any]) -> str:
    if not facts.get("line"):
        return ""
    file = str(facts.get("file", "")).rpartition("/")[2]
    named = f" of {file}" if re.fullmatch(r"[\w.-]{1,100}", file) else ""
    return f" at line {facts['line']}{named}"


def _lines(text: str) -> list[str]:
    """The end of what was printed, without colours and control characters, in lines of a sane length."""
    lines = text[-_TAIL:].replace("\r\n", "\n").split("\n")
    shown = (line.rstrip("\r").rpartition("\r")[2] for line in lines)  # a progress bar is written over
    return [_CURLS_METER.sub("", _ESCAPES.sub("", line))[:_LINE] for line in shown]


def _last(lines: Sequence[str]) -> str:
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
