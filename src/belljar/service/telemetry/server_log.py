"""The server's own log: what `belljar serve` writes to stderr, a line for each request and for whatever else happens.

Whoever logs only puts a line into a queue, which a thread writes in batches: the event loop never waits for a terminal,
a slow disk or a pipe that nobody reads. A queue that is full drops lines, and the next that is written says how many.
structlog is imported when a log is opened: `belljar mcp` has none, and does not wait for it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from belljar.core.display import neutralise
from belljar.core.settings import ServiceSettings

QUEUE_LINES = 10_000
CLOSE_SECONDS = 1.0  # that the last lines have to be written
_BATCH_SECONDS = 0.1  # that a line waits for others: a system call and a wake-up for each would cost more than all else
_RETRY_SECONDS = 0.05
_STDERR = 2
_TALKATIVE = ("alembic", "mcp", "uvicorn")  # of these, only warnings
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

Line = dict[str, Any]
Write = Callable[[bytes], None]

request_id: ContextVar[str] = ContextVar("request_id", default="")


class LineQueue:
    """Takes lines from any thread without waiting, and has a thread of its own write them.

    Args:
        render: Makes text of a line; called in the thread.
        write: Writes bytes, and may wait as long as it likes.
    """

    def __init__(self, render: Callable[[Line], str], write: Write) -> None:
        self.dropped: int = 0  # lines, since the start
        self._told = 0  # of these
        self._render = render
        self._write = write
        self._lines: deque[Line] = deque()
        self._lock = threading.Lock()  # of the counters
        self._some = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="belljar-log", daemon=True)
        self._thread.start()

    def put(self, **line: Any) -> None:
        """Takes a line, or counts it as dropped."""
        if len(self._lines) >= QUEUE_LINES or self._closing.is_set():
            self._drop(1)
            return
        self._lines.append(line)
        if not self._some.is_set():
            self._some.set()

    # What a logger of structlog calls.

    def debug(self, **line: Any) -> None:
        """Takes a line."""
        self.put(**line)

    def info(self, **line: Any) -> None:
        """Takes a line."""
        self.put(**line)

    def warning(self, **line: Any) -> None:
        """Takes a line."""
        self.put(**line)

    def error(self, **line: Any) -> None:
        """Takes a line."""
        self.put(**line)

    def close(self) -> bool:
        """Has the rest written; returns whether that was done within `CLOSE_SECONDS`."""
        self._closing.set()
        self._some.set()
        self._thread.join(CLOSE_SECONDS)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while not (self._closing.is_set() and not self._lines):
            self._some.wait()
            self._closing.wait(_BATCH_SECONDS)
            self._some.clear()
            self._write_batch()

    def _write_batch(self) -> None:
        batch = [self._lines.popleft() for _ in range(len(self._lines))]
        missing = self.dropped - self._told
        if missing:
            text = "lines of this log were dropped: nobody read it"
            batch.append(_line("warning", text, lines=missing))
        data = "".join(f"{self._render(line)}\n" for line in batch).encode("utf-8", "backslashreplace")
        try:
            self._write(data)
            self._told += missing
        except OSError:  # nobody is there to be told
            self._drop(len(batch) - bool(missing))

    def _drop(self, lines: int) -> None:
        with self._lock:
            self.dropped += lines


class QueueHandler(logging.Handler):
    """Puts what the standard library's loggers are told into the queue."""

    def __init__(self, lines: LineQueue) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        line = _line(record.levelname.lower(), record.getMessage(), at=record.created, logger=record.name)
        if current := request_id.get():
            line["request_id"] = current
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["exception"] = logging.Formatter().formatException(record.exc_info)
        self._lines.put(**line)


class ServerLog:
    """The log of one server: `line("info", "request", status=200)`.

    Args:
        settings: Say from which level on, and how lines look.
        write: Writes bytes; else they go to stderr.
    """

    def __init__(self, settings: ServiceSettings, write: Write | None = None) -> None:
        import structlog

        renderer = _json() if settings.log_format == "json" else _console()
        self.lines: LineQueue = LineQueue(renderer, write or _to_stderr)
        self.level: int = LEVELS[settings.log_level]
        bound = structlog.make_filtering_bound_logger(self.level)
        self._logger: Any = structlog.wrap_logger(self.lines, [_in_order], wrapper_class=bound)

    def wants(self, level: str) -> bool:
        """Whether lines of this level are written."""
        return LEVELS[level] >= self.level

    def line(self, level: str, event: str, **facts: Any) -> None:
        """Puts one line into the log, if its level is wanted."""
        self._logger.log(LEVELS[level], event, **facts)

    @property
    def dropped(self) -> int:
        return self.lines.dropped

    @contextmanager
    def installed(self) -> Iterator[ServerLog]:
        """While the block runs, everything that is logged in this process goes here; at its end the rest is written."""
        root, handler = logging.getLogger(), QueueHandler(self.lines)
        before = root.level
        root.setLevel(self.level)
        root.addHandler(handler)
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(max(self.level, logging.WARNING))
        try:
            yield self
        finally:
            root.removeHandler(handler)
            root.setLevel(before)
            self.lines.close()


def _line(level: str, event: str, *, at: float | None = None, **facts: Any) -> Line:
    return {"timestamp": time.time() if at is None else at, "level": level, "event": event, **facts}


def _in_order(logger: Any, method: str, line: Any) -> Any:
    """A processor of structlog: the time, the level and what happened come first."""
    return _line(method, line.pop("event"), **line)


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _json() -> Callable[[Line], str]:
    from structlog.processors import JSONRenderer

    render = JSONRenderer(default=str)
    return lambda line: str(render(None, "", line | {"timestamp": _iso(line["timestamp"])}))


def _console() -> Callable[[Line], str]:
    """For people: no line can forge another, or do anything to a terminal, whatever a caller wrote into it."""
    from structlog.dev import ConsoleRenderer

    render = ConsoleRenderer(colors=os.isatty(_STDERR), pad_event_to=0, sort_keys=False)

    def text(line: Line) -> str:
        shown = {name: _visible(name, value) for name, value in line.items()}
        return str(render(None, line["level"], shown | {"timestamp": _iso(line["timestamp"])}))

    return text


def _visible(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = neutralise(value)
    return text if name == "exception" else text.replace("\n", "\\n")


def _to_stderr(data: bytes) -> None:
    """Not by sys.stderr, whose lock an ending interpreter would wait for."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(_STDERR, rest) :]
        except BlockingIOError:  # somebody has set it so
            time.sleep(_RETRY_SECONDS)


def facts(**named: Any) -> dict[str, Any]:
    """What a line of the standard library's loggers says besides its text: `_log.info("…", extra=facts(run=id))`."""
    return {"facts": named}
