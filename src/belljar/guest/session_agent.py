"""The guest's side of a session: one interpreter, one turn for each line of JSON on stdin.

    in   {"turn": 1, "code": "x + 1", "timeout": 30.0}
    out  {"stream": "stdout", "text": "..."}                 as it is printed, by this process or a child
    out  {"display": {"text/plain": "2"}}                    the last expression, and each open figure
    out  {"done": 1, "ok": true, "exit_code": 0, "timeout": false}
    in   {"interrupt": 1}                                    while that turn runs: it gets a KeyboardInterrupt
    in   {"turn": 0, "complete": "os.pa", "timeout": 1.0}    nothing is run: {"names": ["path", ...]}, then done

It runs as the guest, so whatever it says is the guest's claim: the host believes it about this turn and nothing else.

On wasm there is no stdin: the worker calls `take_turn`, which asks the host for its request by `_host.call`, and what
is printed goes to the worker directly.
"""

import ast
import base64
import builtins
import codecs
import io
import json
import linecache
import os
import signal
import sys
import threading
import traceback
import warnings
from itertools import islice

TYPE_CHECKING = False  # to import `typing` would slow down every session; and turns would inherit a `__future__` import
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, BinaryIO

TEXT_LIMIT = 1_000_000
DEPTH_LIMIT = 64  # of a JSON form; the host reads little more than this
VALUE_LIMIT = 100_000
NAME_LIMIT = 1000  # names that a half-typed one may become
INTERRUPTED = 130  # exit code of a turn that was interrupted, as a shell has it
_HOOKS = {
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
    "_repr_latex_": "text/latex",
    "_repr_svg_": "image/svg+xml",
    "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg",
    "_repr_json_": "application/json",
}


class TurnTimeout(BaseException):
    """Raised inside a turn when its time is over. It is not an Exception, so that `except Exception` lets it pass."""


class Channel:
    """The private pipes to the host: copies of the first stdin and stdout, which guest code then cannot see."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.lines: BinaryIO = os.fdopen(os.dup(0), "rb")
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)

    def send(self, **frame: "Any") -> None:
        line = json.dumps(frame).encode() + b"\n"
        with self._lock:
            view = memoryview(line)
            while view:
                view = view[self._out.write(view) :]


class Requests:
    """Reads the host's lines in a thread: a turn can be interrupted while it runs."""

    def __init__(self, channel: Channel) -> None:
        from _queue import SimpleQueue  # not on wasm, where nothing waits

        self._lines = channel.lines
        self._waiting: SimpleQueue[Any] = SimpleQueue()
        self._lock = threading.Lock()
        self._turn = 0  # under way
        signal.signal(signal.SIGINT, self._interrupt)
        threading.Thread(target=self._read, daemon=True).start()

    def next(self) -> "Any":
        """Returns the next request; None at the end."""
        request = self._waiting.get()
        with self._lock:
            self._turn = request["turn"] if request else 0
        return request

    def over(self) -> None:
        """Notes that the turn has ended: an interrupt that comes now is too late."""
        with self._lock:
            self._turn = 0

    def _read(self) -> None:
        for line in self._lines:
            request = json.loads(line)
            if "interrupt" not in request:
                self._waiting.put(request)
                continue
            with self._lock:
                main = threading.main_thread().ident
                if main and self._turn and self._turn == request["interrupt"]:
                    signal.pthread_kill(main, signal.SIGINT)
        self._waiting.put(None)

    def _interrupt(self, signum: int, frame: object) -> None:
        if self._turn:  # it may have ended since the signal was sent
            raise KeyboardInterrupt


class OutputPipe:
    """Turns fd 1 or 2 into a pipe back to us, so that output of child processes is seen too."""

    def __init__(self, channel: Channel, name: str, fd: int) -> None:
        self._channel = channel
        self._name = name
        self._fd = fd
        self._read, write = os.pipe()
        os.dup2(write, fd)
        os.close(write)
        self._mark = b""
        self._marked = threading.Event()
        threading.Thread(target=self._pump, daemon=True).start()

    def settle(self) -> None:
        """Returns when all that was written before this call has been sent."""
        self._marked.clear()
        self._mark = b"\0belljar:" + os.urandom(16).hex().encode() + b"\0"
        os.write(self._fd, self._mark)
        self._marked.wait(5)

    def _pump(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pending = b""
        while True:
            pending += os.read(self._read, 65536)
            mark = self._mark
            found = pending.find(mark) if mark else -1
            if found >= 0:
                self._send(decoder, pending[:found])
                pending = pending[found + len(mark) :]
                self._mark = b""
                self._marked.set()
            keep = _overlap(pending, self._mark)
            self._send(decoder, pending[: len(pending) - keep])
            pending = pending[len(pending) - keep :]

    def _send(self, decoder: codecs.IncrementalDecoder, data: bytes) -> None:
        if text := decoder.decode(data):
            self._channel.send(stream=self._name, text=text)


def _overlap(data: bytes, mark: bytes) -> int:
    """Returns how many bytes at the end of data could be the beginning of the mark."""
    for size in range(min(len(mark) - 1, len(data)), 0, -1):
        if data.endswith(mark[:size]):
            return size
    return 0


def bundle(value: object) -> "dict[str, Any]":
    """Returns a value as a MIME bundle: its repr, and whatever richer forms it offers."""
    data: dict[str, Any] = {}
    try:
        data["text/plain"] = repr(value)[:TEXT_LIMIT]
    except Exception as error:
        data["text/plain"] = f"<repr failed: {type(error).__name__}>"
    for hook, mime in _HOOKS.items():
        try:
            method = getattr(value, hook, None)
            shown = method() if callable(method) and not isinstance(value, type) else None
        except Exception:
            continue
        if shown is not None:
            shown = shown[0] if isinstance(shown, tuple) else shown
            data[mime] = base64.b64encode(shown).decode() if isinstance(shown, bytes) else shown
    if isinstance(value, (dict, list)) and "application/json" not in data:
        text = json_text(value)
        if text and len(text) <= TEXT_LIMIT:
            data["application/json"] = json.loads(text)
    return {mime: shown for mime, shown in data.items() if isinstance(shown, str) or json_text(shown)}


def json_text(value: object) -> str:
    """Returns a value as JSON; nothing for what JSON cannot say, or what is too deep or too much for the host."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return ""
    small = sum(map(text.count, ",[{")) <= VALUE_LIMIT
    return text if small and is_shallow(value, DEPTH_LIMIT) else ""


def is_shallow(value: object, depth: int) -> bool:
    """Says whether no more than so many lists and dicts are in each other."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return depth > 0 and all(is_shallow(item, depth - 1) for item in inner)


def figures() -> "Iterator[dict[str, str]]":
    """Yields every open matplotlib figure as a PNG; then they are closed, so that the next turn starts clean."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return
    for number in pyplot.get_fignums():
        figure, image = pyplot.figure(number), io.BytesIO()
        figure.savefig(image, format="png", bbox_inches="tight")
        yield {"image/png": base64.b64encode(image.getvalue()).decode(), "text/plain": repr(figure)}
    pyplot.close("all")


def evaluate(code: str, name: str, scope: "dict[str, Any]") -> "tuple[Any, ...]":
    """Runs the code; the value of a last expression is returned in a tuple, so that None can be told from nothing."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), scope)
    if last is None:
        return ()
    value = eval(compile(ast.Expression(last.value), name, "eval"), scope)
    return (value,) if value is not None else ()


def names(text: str, scope: "dict[str, Any]") -> "list[str]":
    """Returns what a half-typed name may become: names of the scope, or of what is before its last dot.

    It looks at what is there and runs no code of the guest: no property, no `__getattr__`, no `__dir__`.
    """
    *path, last = text.split(".")
    spaces = [scope, vars(builtins)]
    for number, name in enumerate(path):
        place = next((place for place, space in enumerate(spaces) if name in space), None)
        if place is None:
            return []
        value = spaces[place][name]
        if number and place and any("__get__" in owner.__dict__ for owner in type.mro(type(value))):
            return []  # a property of the class, say: what it would come to is not known without calling it
        spaces = _spaces(value)
    found = {name for space in spaces for name in islice(space, 100_000) if type(name) is str}
    wanted = {name for name in found if name.startswith(last) and name.isidentifier() and len(name) <= 100}
    if not last.startswith("_"):
        wanted = {name for name in wanted if not name.startswith("_")}
    return sorted(wanted)[:NAME_LIMIT]


def _spaces(value: object) -> "list[dict[str, Any]]":
    """Returns the dictionaries in which the attributes of a value are found."""
    spaces = []
    classes = type.mro(value) if issubclass(type(value), type) else ()
    for owner in (value, *classes, *type.mro(type(value))):
        try:
            space = object.__getattribute__(owner, "__dict__")
        except AttributeError:
            continue
        spaces.append(dict(islice(space.items(), 100_000)))
    return spaces


def _set_alarm(seconds: float) -> None:
    if hasattr(signal, "setitimer"):  # on wasm the worker interrupts the turn
        signal.setitimer(signal.ITIMER_REAL, seconds)


def end_turn(signum: int, frame: object) -> None:
    """Handles SIGALRM: the turn's time is over."""
    raise TurnTimeout


def turn(channel: "Channel | HostCalls", request: "dict[str, Any]", scope: "dict[str, Any]") -> "dict[str, Any]":
    """Runs one turn, sends what it displays, and returns how it ended. Tracebacks show the guest's frames only."""
    name = f"turn-{request['turn']}.py"
    verdict = {"ok": True, "exit_code": 0, "timeout": False}
    try:
        _set_alarm(request["timeout"])
        try:
            if "complete" in request:
                channel.send(names=names(request["complete"], scope))
                return verdict
            for value in evaluate(request["code"], name, scope):
                scope["_"] = value
                channel.send(display=bundle(value))
            for picture in figures():
                channel.send(display=picture)
        finally:
            _set_alarm(0)
    except TurnTimeout:
        verdict = {"ok": False, "exit_code": 124, "timeout": True}
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        if not isinstance(stop.code, (int, type(None))):
            print(stop.code, file=sys.stderr)
        verdict = {"ok": code == 0, "exit_code": code & 0xFF, "timeout": False}
    except BaseException as error:
        show(error, name)
        code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        verdict = {"ok": False, "exit_code": code, "timeout": False}
    return verdict


def show(error: BaseException, name: str) -> None:
    """Prints a traceback that begins at the turn's own code."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename != name:
        trace = trace.tb_next
    last = trace
    while last and last.tb_next and last.tb_next.tb_frame.f_code is not Requests._interrupt.__code__:
        last = last.tb_next
    if last:
        last.tb_next = None  # how an interrupt comes is none of the guest's code
    traceback.print_exception(type(error), error.with_traceback(trace), trace)


class HostCalls:
    """The way to the host on wasm, where the worker keeps the interpreter and calls it for every turn."""

    def __init__(self) -> None:
        import _host  # of the interpreter itself

        self._call = _host.call

    def send(self, **frame: "Any") -> None:
        self._call(json.dumps(frame).encode())

    def request(self) -> "Any":
        return json.loads(self._call(b"turn?"))


_scope: "dict[str, Any]" = {"__name__": "__main__", "__builtins__": __builtins__}


def take_turn() -> None:
    """Runs one turn on wasm."""
    host = HostCalls()
    request = host.request()
    verdict = turn(host, request, _scope)
    _flush()
    host.send(done=request["turn"], **verdict)


def _flush() -> None:
    for text in (sys.stdout, sys.stderr):
        try:
            text.flush()
        except Exception:
            continue


def main() -> None:
    """Runs turns until the host closes the pipe."""
    channel = Channel()
    streams = [OutputPipe(channel, "stdout", 1), OutputPipe(channel, "stderr", 2)]
    signal.signal(signal.SIGALRM, end_turn)
    sys.stdout.reconfigure(line_buffering=True)  # who watches sees each line when it is printed
    warnings.filterwarnings("ignore", message=".*non-interactive.*")
    sys.path[0] = os.getcwd()
    home = os.getpid()
    requests = Requests(channel)
    channel.send(ready=True)
    while request := requests.next():
        try:
            verdict = turn(channel, request, _scope)
            requests.over()
        except TurnTimeout:  # the alarm came between the end of the turn and the stopping of the clock
            verdict = {"ok": False, "exit_code": 124, "timeout": True}
        except KeyboardInterrupt:  # it came after the turn's last instruction
            verdict = {"ok": False, "exit_code": INTERRUPTED, "timeout": False}
        requests.over()
        if os.getpid() != home:  # the turn forked, and this is the child: the pipe is not its own
            os._exit(verdict["exit_code"])
        _flush()
        for stream in streams:
            stream.settle()
        channel.send(done=request["turn"], **verdict)


if __name__ == "__main__":
    main()
