"""The guest's side of a session: one interpreter, one turn for each line of JSON on stdin.

    in   {"turn": 1, "code": "x + 1", "timeout": 30.0}
    out  {"stream": "stdout", "text": "..."}                 as it is printed, by this process or a child
    out  {"display": {"text/plain": "2"}}                    what `display` is given, the last expression, open figures
    out  {"done": 1, "ok": true, "exit_code": 0, "timeout": false, "exception": {"name", "value", "traceback"} or null}
    in   {"interrupt": 1}                                    while that turn runs: it gets a KeyboardInterrupt
    in   {"turn": 0, "complete": "os.pa", "timeout": 1.0}    nothing is run: {"names": ["path", ...]}, then done

It runs as the guest, so whatever it says is the guest's claim: the host believes it about this turn and nothing else.

On wasm there is no stdin: the worker calls `take_turn`, which asks the host for its request by `_host.call`, and what
is printed goes to the worker directly.

The other files of this folder are parts that few turns need: the host puts their text in front of this one as `PARTS`,
and they are loaded when they are needed.
"""

import ast
import builtins
import codecs
import json
import linecache
import os
import signal
import sys
import threading
import traceback
import types
import warnings

TYPE_CHECKING = False  # to import `typing` would slow down every session; and turns would inherit a `__future__` import
if TYPE_CHECKING:
    from typing import Any, BinaryIO

PARTS: "dict[str, str]" = globals().get("PARTS") or {}
INTERRUPTED = 130  # exit code of a turn that was interrupted, as a shell has it
VALUE_LIMIT, TRACEBACK_LIMIT = 10_000, 100_000  # characters of an exception
_COROUTINE = 0x80  # of a code object's flags: it awaits


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


_loaded: "dict[str, Any]" = {}


def part(name: str) -> "Any":
    """Returns one of the agent's parts as a module."""
    if name not in _loaded:
        module = types.ModuleType(f"_belljar_{name}")
        exec(compile(PARTS[name], part.__code__.co_filename, "exec"), module.__dict__)
        _loaded[name] = module
    return _loaded[name]


def evaluate(code: str, name: str, scope: "dict[str, Any]") -> "tuple[Any, ...]":
    """Runs the code; the value of a last expression is returned in a tuple, so that None can be told from nothing."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    tree = parsed(code, name, scope)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    codes = [compile(tree, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)]
    if last is not None:
        codes.append(compile(ast.Expression(last.value), name, "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
    if any(code.co_flags & _COROUTINE for code in codes):
        value = part("awaiting").run(codes, scope)
    else:
        value = [eval(code, scope) for code in codes][-1]
    return (value,) if value is not None and last is not None else ()


def parsed(code: str, name: str, scope: "dict[str, Any]") -> ast.Module:
    """Returns the code's tree. What Python does not understand may be a notebook's `!ls` or `%pip install`."""
    try:
        return ast.parse(code, name)
    except SyntaxError:
        if "!" not in code and "%" not in code:
            raise
    magics = part("magics")
    tree = ast.parse(magics.plain(code, name), name)
    magics.Magics(scope)
    return tree


_channels: "list[Channel | HostCalls]" = []  # that of the turn under way


def display(*values: "Any", raw: bool = False) -> None:
    """Shows values as results of the turn, each in all the forms it has.

    Args:
        *values: What to show.
        raw: They are dictionaries from MIME types to forms already, such as {"text/html": "<b>bold</b>"}.
    """
    for value in values:
        forms = part("values")
        shown = forms.sendable(value) if raw else forms.bundle(value)
        if _channels:
            _channels[0].send(display=shown)


def _set_alarm(seconds: float) -> None:
    if hasattr(signal, "setitimer"):  # on wasm the worker interrupts the turn
        signal.setitimer(signal.ITIMER_REAL, seconds)


def end_turn(signum: int, frame: object) -> None:
    """Handles SIGALRM: the turn's time is over."""
    raise TurnTimeout


def turn(channel: "Channel | HostCalls", request: "dict[str, Any]", scope: "dict[str, Any]") -> "dict[str, Any]":
    """Runs one turn, sends what it displays, and returns how it ended. Tracebacks show the guest's frames only."""
    name = f"turn-{request['turn']}.py"
    _channels[:] = [channel]
    try:
        _set_alarm(request["timeout"])
        try:
            if "complete" in request:
                channel.send(names=part("names").names(request["complete"], scope))
                return _verdict(0)
            for value in evaluate(request["code"], name, scope):
                scope["_"] = value
                display(value)
            if "matplotlib.pyplot" in sys.modules:
                display(*part("values").figures(), raw=True)
        finally:
            _set_alarm(0)
    except TurnTimeout:
        return _verdict(124, timeout=True)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        if not isinstance(stop.code, (int, type(None))):
            print(stop.code, file=sys.stderr)
        return _verdict(code)
    except BaseException as error:
        exception = show(error, name)
        return _verdict(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1, exception)
    return _verdict(0)


def _verdict(code: int, exception: "dict[str, str] | None" = None, *, timeout: bool = False) -> "dict[str, Any]":
    return {"ok": code == 0, "exit_code": code & 0xFF, "timeout": timeout, "exception": exception}


def show(error: BaseException, name: str) -> "dict[str, str]":
    """Prints a traceback that begins at the turn's own code, and returns it with the exception's name and value."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename != name:
        trace = trace.tb_next
    last = step = trace
    while step:  # how an interrupt comes, or a `!ls` is run, is none of the guest's code
        last = step if step.tb_frame.f_code.co_filename != show.__code__.co_filename else last
        step = step.tb_next
    if last:
        last.tb_next = None
    text = "".join(traceback.format_exception(type(error), error.with_traceback(trace), trace))
    print(text, end="", file=sys.stderr)
    try:
        value = str(error)
    except Exception:
        value = "<its text cannot be told>"
    kept = text if len(text) <= TRACEBACK_LIMIT else f"…{text[-TRACEBACK_LIMIT:]}"
    return {"name": type(error).__name__, "value": value[:VALUE_LIMIT], "traceback": kept}


class HostCalls:
    """The way to the host on wasm, where the worker keeps the interpreter and calls it for every turn."""

    def __init__(self) -> None:
        import _host  # of the interpreter itself

        self._call = _host.call

    def send(self, **frame: "Any") -> None:
        self._call(json.dumps(frame).encode())

    def request(self) -> "Any":
        return json.loads(self._call(b"turn?"))


builtins.display = display  # type: ignore[attr-defined]
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
            verdict = _verdict(124, timeout=True)
        except KeyboardInterrupt:  # it came after the turn's last instruction
            verdict = _verdict(INTERRUPTED)
        requests.over()
        if os.getpid() != home:  # the turn forked, and this is the child: the pipe is not its own
            os._exit(verdict["exit_code"])
        _flush()
        for stream in streams:
            stream.settle()
        channel.send(done=request["turn"], **verdict)


if __name__ == "__main__":
    main()
