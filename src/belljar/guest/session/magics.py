"""Part of the session's agent: lines of notebooks that are no Python, such as `!ls`, `x = !ls`, `%pip install x`.

Code that Python understands is never touched. Where it stops at a line that begins in one of these ways, that line
becomes a call of `__belljar__`, and Python is asked again.
"""

import ast
import builtins
import importlib.util
import os
import re
import signal
import site
import subprocess
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_MOST_LINES = 1000  # that are rewritten in one turn
_LINE = re.compile(
    r"(?P<indent>[ \t]*)(?:(?P<to>[A-Za-z_][\w., \t\[\]'\"]{0,200}?)[ \t]*=[ \t]*)?(?P<how>!!?|%(?!%))(?P<rest>.*)"
)
_CELL = re.compile(r"\s*%%(?P<name>\w+)[ \t]*(?P<rest>[^\n]*)\n?(?P<body>.*)", re.DOTALL)
_BRACES = re.compile(r"\{([^{}\n]{1,500})\}")
_VARIABLE = re.compile(r"\$([A-Za-z_]\w{0,100})")
_SHELLS = ("bash", "sh")
_NO_PROCESSES = "[Errno 58] wasm does not support processes: `!` and `%pip` start some"


def plain(code: str, name: str) -> str:
    """Returns the code as Python, line for line; raises the SyntaxError of code that is none in any case."""
    if cell := _CELL.fullmatch(code):
        lines = "\n" * code.count("\n")
        return f"__belljar__.cell({cell['name']!r}, {cell['rest']!r}, {cell['body']!r}){lines}"
    lines = code.split("\n")
    for _ in range(_MOST_LINES):
        try:
            ast.parse("\n".join(lines), name)
        except SyntaxError as error:
            if not _rewrite(lines, (error.lineno or 0) - 1):
                raise
        else:
            break
    return "\n".join(lines)


def _rewrite(lines: "list[str]", at: int) -> bool:
    """Makes a call of a line, and of those that continue it; False: it is no such line."""
    if not 0 <= at < len(lines):
        return False
    while at and lines[at - 1].endswith("\\") and _LINE.fullmatch(lines[at - 1]):
        at -= 1
    found = _LINE.fullmatch(lines[at])
    if not found:
        return False
    rest, last = found["rest"], at
    while rest.endswith("\\") and last + 1 < len(lines):
        last += 1
        rest = rest[:-1] + lines[last]
    how = {"!": "line", "!!": "lines", "%": "magic"}[found["how"]]
    if found["to"] and how == "line":
        how = "lines"
    given = f"{found['to']} = " if found["to"] else ""
    lines[at] = f"{found['indent']}{given}__belljar__.{how}({rest!r})"
    lines[at + 1 : last + 1] = [""] * (last - at)
    return True


class Magics:
    """What the rewritten lines call; it is found as `__belljar__`."""

    def __init__(self, scope: "dict[str, Any]") -> None:
        self._scope = scope
        builtins.__belljar__ = self  # type: ignore[attr-defined]

    def line(self, command: str) -> None:
        """`!command`: its output is the turn's, its exit code `_exit_code`."""
        self._scope["_exit_code"] = self._start(self._filled(command))

    def lines(self, command: str) -> "list[str]":
        """`x = !command`: its output, line by line."""
        said: list[bytes] = []
        self._scope["_exit_code"] = self._start(self._filled(command), said)
        return b"".join(said).decode("utf-8", "replace").splitlines()

    def magic(self, text: str) -> "Any":
        """`%name words`."""
        name, _, words = text.strip().partition(" ")
        return self._known(name, f"%{name}")(self._filled(words.strip()))

    def cell(self, name: str, words: str, body: str) -> None:
        """`%%name words` with all lines below it."""
        if name in _SHELLS:
            self._scope["_exit_code"] = code = self._start(body, shell=name)
            if code:
                raise subprocess.CalledProcessError(code, [name])
        elif name == "writefile":
            with open(words.strip(), "w") as file:
                file.write(body)
        elif name in ("time", "capture"):
            self._time(body)
        else:
            raise _unknown(f"%%{name}", ["%%bash", "%%sh", "%%time", "%%writefile"])

    def _known(self, name: str, said: str) -> "Callable[[str], Any]":
        magics = {
            "pip": self._pip, "cd": self._cd, "pwd": lambda _: os.getcwd(), "env": self._env, "time": self._time,
            "matplotlib": lambda _: None, "ls": lambda words: self.line(f"ls {words}"), "sx": self.lines,
        }  # fmt: skip
        if name not in magics:
            raise _unknown(said, sorted(f"%{magic}" for magic in magics))
        return magics[name]

    def _pip(self, words: str) -> None:
        """Installs where this session finds it at once: the system's folders are read-only."""
        _require_processes()
        if not importlib.util.find_spec("pip"):
            raise ModuleNotFoundError("No module named 'pip'", name="pip")
        place = site.getusersitepackages()
        if re.match(r"install\b", words) and not re.search(r"--(?:target|user|prefix|root)\b|-t ", words):
            words += f" --target {place!r} --upgrade" if sys.prefix != sys.base_prefix else " --user"
        code = self._start(f"PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore '{sys.executable}' -m pip {words}")
        if place not in sys.path and os.path.isdir(place):
            sys.path.append(place)
        importlib.invalidate_caches()
        if code:
            raise subprocess.CalledProcessError(code, ["pip", *words.split()])

    def _cd(self, words: str) -> str:
        os.chdir(os.path.expanduser(words.strip("'\"") or "~"))
        return os.getcwd()

    def _env(self, words: str) -> "Any":
        name, given, value = words.replace(" ", "=", 1).partition("=")
        if not name:
            return dict(os.environ)
        if given:
            os.environ[name] = value
        return os.environ.get(name)

    def _time(self, words: str) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        exec(compile(words, "<timed>", "exec"), self._scope)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        print(f"CPU time: {cpu * 1000:.1f} ms; wall time: {wall * 1000:.1f} ms")

    def _filled(self, command: str) -> str:
        """Puts values in: `{expression}`, and `$name` where the session has such a variable; else the shell's own."""

        def value(found: "re.Match[str]") -> str:
            try:
                return str(eval(found[1], self._scope))
            except Exception:
                return found[0]

        def variable(found: "re.Match[str]") -> str:
            return str(self._scope[found[1]]) if found[1] in self._scope else found[0]

        return _VARIABLE.sub(variable, _BRACES.sub(value, command))

    def _start(self, command: str, said: "list[bytes] | None" = None, shell: str = "bash") -> int:
        """Runs a shell to its end, in a group of its own that dies with an interrupt; `said` takes its output."""
        _require_processes()
        sys.stdout.flush()
        path = next((path for path in (f"/bin/{shell}", "/bin/sh") if os.path.exists(path)), "/bin/sh")
        pipe = subprocess.PIPE if said is not None else None
        child = subprocess.Popen([path, "-c", command], stdin=subprocess.DEVNULL, stdout=pipe, start_new_session=True)
        try:
            if said is not None:
                said.append(child.communicate()[0])
            return child.wait()
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise


def _require_processes() -> None:
    if sys.platform == "wasi":
        raise OSError(_NO_PROCESSES)


def _unknown(name: str, known: "list[str]") -> SyntaxError:
    return SyntaxError(f"there is no {name} here; there are {', '.join(known)}")
