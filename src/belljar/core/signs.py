"""What guests print when they fail: patterns, the kind of failure each stands for, and what to do about it.

The first row that fits wins. Advice is written in Python's words (`net=[...]`); `spelling` turns them into those of
other surfaces. Patterns read hostile text, so none of them can backtrack far.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from belljar.core.result import ErrorType

_E = ErrorType
_MISSING = ErrorType.MISSING_PACKAGE

MEMORY = 'hold less in memory at once (read in chunks, stream, use generators), or ask for more with memory="<size>"'
MEMORY_AND_FILES = (  # where /workspace and /tmp are kept in memory
    "hold less at once: read in chunks, stream, use generators, and delete files (disk is memory here: what lies in "
    '/workspace and /tmp counts); or ask for more with memory="<size>"'
)
FILES_ARE_MEMORY = (  # where files took most of it
    "disk is memory here, and files in /workspace, /tmp and the home take {files} of it: delete what is no longer "
    'needed, or ask for more with memory="<size>"'
)
DISK = 'write less, delete what is no longer needed in /workspace and /tmp, or ask for more with disk="<size>"'
DISK_IN_MEMORY = f'{DISK} (disk is memory here: a larger one wants memory="<size>" as well)'
WRITABLE = "only /workspace and /tmp are writable here: write there"
_EXECUTABLE = "make it executable (chmod +x) or start it by its interpreter: `bash {program}`, `python3 {program}`"
READ_ONLY = (
    "/workspace is a folder that was granted read-only: grant it for writing with write=True, or write to /tmp instead"
)
NETWORK = (
    "there is no network in {place}: give it what it needs with files={{...}}, start what it talks to inside the same "
    "run, or ask for the hosts with net=[...] on a backend that offers them"
)
REGISTRY = (
    "there is no network in {place}: allow {hosts} with net=[...], or grant a folder or a Python "
    "environment in which it is installed already"
)
_PROCESSES = "start fewer processes or threads at once, or ask for more with pids=<number>"
PYTHON_PACKAGE = (
    "{package} is not installed in {place}: {elsewhere}{remedy}, use only the standard library, or, if it is a file "
    "of yours, pass it with files={{...}}"
)
_NO_NAME = "the installed {package} has no such name: check the spelling and the version"
NODE_PACKAGE = (
    "{package} is not installed in {place}: {remedy}use only the modules of Node.js, or pass the module with "
    "files={{...}} and import it as ./name"
)
_GO_PACKAGE = "{package} is not in {place}: use only Go's standard library, or grant a workspace with a vendor folder"
_CRATE = "{package} is not in {place}: crates cannot be fetched, so use only Rust's std, or write the part you need"
_PROGRAM = "{package} is not installed in {place}: use a program that is there, or write that step in Python"
_FILES = "the guest sees only /workspace, /tmp and the system: pass the file with files={{...}}, or create it first"
_STDIN = "the program wants input: pass it with stdin=..."
_UNBOUND = "give the variable a value{where}, pass it with env={{...}}, or write a default such as ${{NAME:-}}"
_RECURSION = "the recursion has no end or is too deep{where}: use a loop, or a base case that is reached"
_TYPES_ONLY = "Node only strips types: replace enum, namespace and parameter properties by plain objects and fields"
_DEADLOCK = "every goroutine waits for another: close the channel, or send from a goroutine of its own"


class Sign(NamedTuple):
    kind: ErrorType
    pattern: re.Pattern[str]
    advice: str


def _signs(*rows: tuple[ErrorType, str, str]) -> tuple[Sign, ...]:
    return tuple(Sign(kind, re.compile(pattern, re.IGNORECASE), advice) for kind, pattern, advice in rows)


NAME = r"(?P<package>[\w.@/+~-]{1,120})"

# Kind, pattern (tried on the headline first, then on what belongs to it), advice. The first that fits wins.
ANY_LANGUAGE = _signs(
    (_MISSING, rf"(?:^|: ){NAME}: (?:command )?not found$", _PROGRAM),
    (_MISSING, rf"^env: \W?{NAME}\W?: No such file or directory$", _PROGRAM),
    (_MISSING, rf"^\S{{0,200}}python[\d.]*: No module named {NAME}$", PYTHON_PACKAGE),
    (_E.NETWORK_ERROR, r"ERROR: No matching distribution found for |suitable TLS CA certificate bundle", REGISTRY),
    (_E.NETWORK_ERROR, r"\bnpm (?:error|ERR!) (?:code )?(?:EAI_AGAIN|ENOTFOUND|ECONNREFUSED|network)", REGISTRY),
    (_E.NETWORK_ERROR, r"unable to resolve host address", NETWORK),
    (_E.DISK_LIMIT, r"no space left on device|disk quota exceeded|\bENOSPC\b", DISK),
    (_E.PERMISSION_DENIED, r"read-only file ?system|permission ?denied|operation not permitted", WRITABLE),
    (_E.NETWORK_ERROR,
     r"could ?n[o']t resolve|failure in name resolution|network ?(?:is )?unreachable|connection ?refused|"
     r"no such host|no route to host|failed to lookup address|name or service not known|dial tcp", NETWORK),
    (_E.PROCESS_LIMIT, r"resource temporarily unavailable|cannot fork|can't fork|failed to create new OS thread|"
     r"failed to spawn thread", _PROCESSES),
    (_E.OOM_KILLED, r"cannot allocate memory|out of memory|memory allocation of \d+ bytes failed|bad_alloc", MEMORY),
)  # fmt: skip

BY_LANGUAGE: dict[str, tuple[Sign, ...]] = {
    "python": _signs(
        (_MISSING, rf"^ModuleNotFoundError: No module named '{NAME}'", PYTHON_PACKAGE),
        (_MISSING, rf"^ImportError: cannot import name '[^']{{1,200}}' from (?:[a-z ]{{1,40}})?'{NAME}'", _NO_NAME),
        (_MISSING, rf"^ImportError: {NAME}: cannot open shared object file", _PROGRAM),
        (_MISSING, r"^ImportError\b", "check the spelling and the version of what is imported{where}"),
        (_E.SYNTAX_ERROR, r"^(?:SyntaxError|IndentationError|TabError)\b", "correct the syntax{where}; nothing ran"),
        (_E.OOM_KILLED, r"^(?:MemoryError|[\w.]+\._ArrayMemoryError)\b", MEMORY),
        (_E.OOM_KILLED, r"^OSError: \[Errno 12\]", MEMORY),
        (_E.PROCESS_LIMIT, r"^(?:(?:BlockingIO|OS)Error: \[Errno 11\]|RuntimeError: can't start new)", _PROCESSES),
        (_E.DISK_LIMIT, r"^OSError: \[Errno (?:28|122|27)\]", DISK),
        (_E.PERMISSION_DENIED, r"^(?:PermissionError|OSError: \[Errno (?:30|1|13)\])", WRITABLE),
        (_E.NETWORK_ERROR, r"^(?:socket\.)?(?:gaierror|ConnectionRefusedError|ConnectionResetError)\b", NETWORK),
        (_E.NETWORK_ERROR, r"^(?:OSError|TimeoutError): \[Errno (?:-[235]|99|10[01]|11[013])\]", NETWORK),
        (_E.NETWORK_ERROR, r"^(?:urllib\.error\.URLError|[\w.]*\b(?:ConnectionError|ConnectError|ConnectTimeout|"
         r"ClientConnector\w{0,20}Error|NameResolutionError|NewConnectionError|MaxRetryError))\b", NETWORK),
        (_E.RUNTIME_ERROR, r"^FileNotFoundError\b", _FILES),
        (_E.RUNTIME_ERROR, r"^EOFError\b", _STDIN),
        (_E.RUNTIME_ERROR, r"^RecursionError\b", _RECURSION),
    ),
    "javascript": _signs(
        (_MISSING, rf"Cannot find (?:module|package) '{NAME}'", NODE_PACKAGE),
        (_E.SYNTAX_ERROR, r"ERR_UNSUPPORTED_TYPESCRIPT_SYNTAX", _TYPES_ONLY),
        (_E.SYNTAX_ERROR, r"^SyntaxError\b", "correct the syntax{where}; nothing ran"),
        (_E.OOM_KILLED, r"heap out of memory|Array buffer allocation failed", MEMORY),
        (_E.NETWORK_ERROR, r"\b(?:ENOTFOUND|ECONNREFUSED|EAI_AGAIN|ENETUNREACH|EHOSTUNREACH|ETIMEDOUT)\b", NETWORK),
        (_E.DISK_LIMIT, r"\b(?:ENOSPC|EDQUOT|EFBIG)\b", DISK),
        (_E.PERMISSION_DENIED, r"\b(?:EROFS|EACCES|EPERM)\b", WRITABLE),
        (_E.PROCESS_LIMIT, r"\bEAGAIN\b", _PROCESSES),
        (_MISSING, rf"\bspawn(?:Sync)? {NAME} ENOENT\b", _PROGRAM),
        (_E.RUNTIME_ERROR, r"\bENOENT\b", _FILES),
        (_E.RUNTIME_ERROR, r"^RangeError: Maximum call stack", _RECURSION),
    ),
    "bash": _signs(
        (_MISSING, rf"^{NAME}: command not found", _PROGRAM),
        (_E.SYNTAX_ERROR, r"^syntax error|^unexpected EOF while looking for", "correct the syntax{where}"),
        (_E.RUNTIME_ERROR, r": unbound variable", _UNBOUND),
    ),
    "go": _signs(
        (_MISSING, rf'(?:no required module provides|cannot find module providing|cannot find) package "?{NAME}',
         _GO_PACKAGE),
        (_MISSING, rf"package {NAME} is not in (?:GOROOT|std)", _GO_PACKAGE),
        (_E.RUNTIME_ERROR, r"all goroutines are asleep", _DEADLOCK),
        (_E.RUNTIME_ERROR, r"stack overflow|goroutine stack exceeds", _RECURSION),
    ),
    "rust": _signs(
        (_MISSING, rf"\[E0432\]: unresolved import `(?!(?:std|core|alloc|crate|self|super)::){NAME}", _CRATE),
        (_MISSING, rf"\[E0433\]: .{{0,80}}(?:crate or module|or unlinked crate|missing crate) `{NAME}`", _CRATE),
        (_MISSING, rf"\[E0463\]: can't find crate for `{NAME}`", _CRATE),
        (_E.RUNTIME_ERROR, r"stack overflow", _RECURSION),
    ),
}  # fmt: skip
REFUSED_FORK = re.compile(r"fork: (?:retry: )?Resource temporarily unavailable")

# What a shell says by its exit code, where its words said less.
BY_EXIT = {
    126: (_E.PERMISSION_DENIED, _EXECUTABLE),
    127: (
        _E.MISSING_PACKAGE,
        "{package} is not there: check its name and path, or pass it with files={{...}}",
    ),
}

# --- what only the wasm runtime lacks ---

NATIVE = "ask for backend=native, or"
ON_WASM = _signs(
    (_MISSING, rf"^ModuleNotFoundError: No module named '{NAME}'", PYTHON_PACKAGE),
    (_MISSING, rf"^ModuleNotFoundError: (?:Unsupported platform for s|S)tandard library module '{NAME}'",
     f"{{package}} is not in {{place}}: {NATIVE} do without it"),
    (_E.PROCESS_LIMIT, r"^OSError: \[Errno 58\] \w{1,20} does not support processes|"
     r"^NotImplementedError: This Python build lacks multiprocessing",
     f"there are no processes in {{place}}: {NATIVE} do it in this one"),
    (_E.PROCESS_LIMIT, r"^RuntimeError: (?:can't start new|unable to start watchdog) thread",
     f"there are no threads in {{place}}: {NATIVE} do one thing after the other"),
    (_E.NETWORK_ERROR, r"^AttributeError: module '_?socket' has no attribute '\w{1,40}'",
     f"there are no sockets in {{place}}: {NATIVE} give it what it needs with files={{{{...}}}}"),
    (_E.RUNTIME_ERROR, r"^OSError: (?:\[Errno 5[28]\]|(?:ctypes|mmap) is unavailable)",
     f"{{place}} has no sockets (nor event loops, which need them), pipes, memory maps or C libraries: {NATIVE} do "
     "without"),
    (_E.RUNTIME_ERROR, r"^RecursionError: Stack overflow|wasm trap: call stack exhausted",
     f"the stack of {{place}} is small where C code calls back, as functools.cache does: {NATIVE} use a loop"),
    (_E.RUNTIME_ERROR, r"wasm trap: wasm `unreachable`",
     f"the interpreter gave up, as it does in {{place}} for a wait on another thread or for a signal: {NATIVE} do "
     "without"),
    (_E.RUNTIME_ERROR, r"^FileNotFoundError: \[Errno 44\] [^:]{1,80}: '/(?:bin|dev|etc|lib|opt|proc|run|sys|usr|var)/",
     f"there are no files of a system in {{place}}: {NATIVE} pass the file with files={{{{...}}}}"),
)  # fmt: skip
