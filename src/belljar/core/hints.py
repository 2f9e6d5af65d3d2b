"""What a snippet seems to need, read from its text, for `auto` to choose a backend by.

A hint for routing, never a security control: code that hides what it does (`exec`, `getattr`, a name made at run
time) runs where its text seemed to fit, behind walls that do not depend on this, and fails there at worst. In doubt
something counts as needed, because the more able backend also runs what the other one could have run. What our own
parser does not know is not analysed: a guest's Python may be newer than ours, or the code is wrong everywhere.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from belljar.core.model import ours
from belljar.core.plan import Needs
from belljar.core.values import KIB

_LONGEST = 32 * KIB  # of all text together: parsing takes 1 to 8 microseconds for each byte, in our process
_LONG_CHAIN = re.compile(r"(?:\.[\s\\]*+\w++[\s\\]*+){64}")  # `import a.a.a.…`: CPython's parser is quadratic in it
_WORTH_READING = re.compile(r"import|[\"']/")  # the rest can reach nothing but builtins
_PYTHON = re.compile(r"python(3(\.\d{1,2})?)?")
_SYSTEM_FILE = re.compile(r"/(?:bin|dev|etc|lib|opt|proc|run|sbin|sys|usr|var)(?:/|$)")
_NODE = re.compile(  # modules of Node.js that take a system, or more of Node.js than a bare engine with the usual names
    r"(?:require *\(|\bfrom|\bimport *\(?) *[\"'](?:node:)?"
    r"(async_hooks|child_process|cluster|dgram|dns|https?|http2|inspector|module|net|repl|sqlite|stream|test|tls|tty|v8|vm|"
    r"wasi|worker_threads|zlib)(?:/\w{1,20})?[\"']"
)
_NAMED = 3  # examples given for each need

_PROCESSES = "may start processes"
_THREADS = "may start threads"
_SOCKETS = "may use sockets"
_SIGNALS = "may use signals"
_LOW = "may use memory or C code directly"
_SYSTEM = "may ask the operating system"
_DEEP = "may recurse deeply"
_UNCLEAR = "does what its text does not tell"

# Dotted names, each with all that is below it; the longest that fits decides, and "" is harmless.
_WATCHED: dict[str, str] = {
    "subprocess": _PROCESSES, "multiprocessing": _PROCESSES, "multiprocessing.cpu_count": "", "pty": _PROCESSES,
    "concurrent.futures.ProcessPoolExecutor": _PROCESSES, "_posixsubprocess": _PROCESSES,
    "threading": _THREADS, "_thread": _THREADS, "concurrent.futures.ThreadPoolExecutor": _THREADS,
    "concurrent.futures.thread": _THREADS, "concurrent.futures.process": _PROCESSES,
    "concurrent.interpreters": _THREADS, "faulthandler.dump_traceback_later": _THREADS,
    **{f"threading.{name}": "" for name in (
        "Lock RLock local current_thread main_thread get_ident get_native_id active_count enumerate excepthook "
        "settrace setprofile gettrace getprofile stack_size TIMEOUT_MAX ThreadError").split()},
    # An event loop wakes itself through a pair of sockets.
    "asyncio": _SOCKETS, "asyncio.iscoroutine": "", "asyncio.iscoroutinefunction": "",
    **dict.fromkeys(
        ("socket", "_socket", "ssl", "http.client", "http.server", "urllib.request", "urllib.robotparser", "ftplib",
         "smtplib", "poplib", "imaplib", "socketserver", "xmlrpc.client", "xmlrpc.server", "wsgiref.simple_server",
         "logging.handlers", "select.epoll", "selectors.EpollSelector"), _SOCKETS),
    **{f"signal.{name}": _SIGNALS for name in (
        "alarm setitimer getitimer pause raise_signal siginterrupt sigpending sigtimedwait sigwait sigwaitinfo "
        "pthread_kill pthread_sigmask pidfd_send_signal set_wakeup_fd valid_signals").split()},
    "ctypes": _LOW, "mmap": _LOW,
    **{f"os.{name}": _PROCESSES for name in (
        "execl execle execlp execlpe execv execve execvp execvpe fork forkpty kill killpg nice pidfd_open "
        "popen posix_spawn posix_spawnp register_at_fork spawnl spawnle spawnlp spawnlpe spawnv spawnve spawnvp "
        "spawnvpe system wait wait3 wait4 waitid waitpid waitstatus_to_exitcode").split()},
    **{f"os.{name}": _SYSTEM for name in (
        "chown chroot copy_file_range ctermid devnull dup dup2 eventfd eventfd_read eventfd_write fchdir fchmod fchown "
        "fstatvfs fwalk get_terminal_size getegid geteuid getgid getgrouplist getgroups getloadavg getlogin getpgid "
        "getpgrp getppid getpriority getrandom getresgid getresuid getsid getuid getxattr initgroups lchown listxattr "
        "lockf login_tty major makedev memfd_create minor mkfifo mknod openpty pipe posix_fallocate preadv pwritev "
        "readv removexattr sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getparam "
        "sched_getscheduler sched_param sched_rr_get_interval sched_setaffinity sched_setparam sched_setscheduler "
        "sendfile setegid seteuid setgid setgroups setpgid setpgrp setpriority setregid setresgid setresuid setreuid "
        "setsid setuid setxattr splice statvfs sync tcgetpgrp tcsetpgrp ttyname umask writev").split()},
    **dict.fromkeys(("shutil.disk_usage", "time.thread_time", "time.thread_time_ns", "time.tzset"), _SYSTEM),
    # Python functions may call each other a million deep anywhere, but what calls back from C has a small stack.
    "sys.setrecursionlimit": _DEEP,
}  # fmt: skip
_WATCHED |= {name.replace("os.", "posix.", 1): need for name, need in _WATCHED.items() if name.startswith("os.")}
_PARTLY = frozenset({"os", "posix", "signal"})  # harmless but for many of their names
_SOFT = frozenset({_DEEP})  # often met anyway: a backend that lacks it is better than one without a module
_CACHES = frozenset({"functools.cache", "functools.lru_cache"})


def analyse(code: str, language: str = "python", files: Mapping[str, bytes] | None = None) -> Needs:
    """What the code and the Python files given with it seem to need. Never raises."""
    if language in ("javascript", "typescript"):
        used = sorted(set(_NODE.findall(code[:_LONGEST])))
        return ours(Needs)(system=(_phrase("may need all of Node.js", used),) if used else ())
    if not _PYTHON.fullmatch(language):
        return ours(Needs)()
    beside = {name: data for name, data in (files or {}).items() if name.endswith(".py")}
    texts = [code, *(data.decode(errors="replace") for data in beside.values())]
    texts = [text for text in texts if _WORTH_READING.search(text)]
    if sum(map(len, texts)) > _LONGEST:
        return ours(Needs)(system=("is too long to be looked at",))
    reader = _Reader()
    for text in texts:
        if (tree := _parse(text)) is not None:
            reader.read(tree)
    needs = dict(sorted(reader.found()))
    return ours(Needs)(
        modules=frozenset(reader.modules - _local(beside)),
        system=tuple(told for need, told in needs.items() if need not in _SOFT),
        soft=tuple(told for need, told in needs.items() if need in _SOFT),
    )


def _phrase(need: str, names: Sequence[str]) -> str:
    return f"{need} ({', '.join(names[:_NAMED])}{', …' if len(names) > _NAMED else ''})"


def _parse(text: str) -> ast.Module | None:
    if _LONG_CHAIN.search(text):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the guest's escapes and comparisons: not ours to tell
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested too deeply
        return None
    except SystemError:  # CPython 3.11 loses count of the depth when the collector formats a traceback meanwhile
        return None


def _local(files: Mapping[str, bytes]) -> set[str]:
    """The modules that files may satisfy, whatever folder of theirs the code puts on its path."""
    return {part.removesuffix(".py") for name in files for part in PurePosixPath(name).parts}


class _Reader:
    """Gathers imports and uses of dotted names. Scopes are not told apart: a name means what it was imported as."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self._found: dict[str, set[str]] = {}
        self._meaning: dict[str, str] = {}
        self._used: set[str] = set()
        self._calls: list[ast.Call] = []
        self._functions: list[ast.FunctionDef] = []

    def found(self) -> Iterator[tuple[str, str]]:
        """Yields each need, and the same with examples."""
        for need, names in self._found.items():
            yield need, _phrase(need, sorted(names))

    def read(self, tree: ast.Module) -> None:
        self._meaning, self._used = {"__import__": "__import__"}, set()
        self._calls, self._functions = [], []
        self._gather(tree)
        for used in self._used:
            self._judge(self._means(used))
        for call in self._calls:
            self._call(call)
        for function in self._functions:
            if not _CACHES.isdisjoint(map(self._means, _decorators(function))) and _calls_itself(function):
                self._note(_DEEP, f"{function.name} with a cache")

    def _gather(self, tree: ast.Module) -> None:
        inner: set[int] = set()  # nodes that are part of a longer name; parents are walked before their children
        for node in ast.walk(tree):
            match node:
                case ast.Import() | ast.ImportFrom():
                    self._import(node)
                case ast.Attribute() | ast.Name():
                    if isinstance(node, ast.Attribute):
                        inner.add(id(node.value))
                    if id(node) not in inner:
                        self._used.add(_dotted(node))
                case ast.Call():
                    self._calls.append(node)
                    if _dotted(node.func) == "__import__":
                        inner.add(id(node.func))
                case ast.Constant(value=str(text)) if _SYSTEM_FILE.match(text):
                    self._note(_SYSTEM, text[:40])
                case ast.FunctionDef(decorator_list=[_, *_]):
                    self._functions.append(node)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                self.modules.add(top)
                self._meaning[alias.asname or top] = alias.name if alias.asname else top
        elif node.module and not node.level:
            self.modules.add(node.module.partition(".")[0])
            for alias in node.names:
                self._meaning[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                if alias.name == "*":
                    self._all_of(node.module)

    def _all_of(self, module: str) -> None:
        if any(need and name.startswith(f"{module}.") for name, need in _WATCHED.items()):
            self._note(_UNCLEAR, f"all of {module}")
        else:
            self._judge(module)

    def _call(self, node: ast.Call) -> None:
        """`importlib.import_module("x")` and `__import__("x")`: the module is then used in ways we do not follow."""
        name = self._means(_dotted(node.func))
        if name not in ("importlib.import_module", "__import__"):
            return
        match node.args:
            case [ast.Constant(value=str(module)), *_] if not module.startswith("."):
                self.modules.add(module.partition(".")[0])
                self._judge(module)
            case _:
                self._note(_UNCLEAR, name)

    def _means(self, used: str) -> str:
        first, dot, rest = used.partition(".")
        return self._meaning[first] + dot + rest if first in self._meaning else ""

    def _judge(self, name: str) -> None:
        if name in _PARTLY or name == "__import__":
            self._note(_UNCLEAR, name)
            return
        parts = name.split(".")[:4]
        for length in range(len(parts), 0, -1):
            need = _WATCHED.get(".".join(parts[:length]))
            if need is not None:
                if need:
                    self._note(need, ".".join(parts))
                return

    def _note(self, need: str, name: str) -> None:
        self._found.setdefault(need, set()).add(name)


def _dotted(node: ast.expr) -> str:
    """`a.b.c` as text; what does not begin with a name has none."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _decorators(node: ast.FunctionDef) -> list[str]:
    return [_dotted(each.func if isinstance(each, ast.Call) else each) for each in node.decorator_list]


def _calls_itself(function: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Name) and node.id == function.name for node in ast.walk(function))
