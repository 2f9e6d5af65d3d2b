"""The audit log: a line of JSON for whatever happened, each bound to the one before it by a hash. No record, no run.

A line is on the disk before what it tells of goes on. Several processes may share a log. Beside it lies its head, the
number and hash of the last line, so that lines missing at the end are found too. Who can write to both files can still
make up a whole history: keep a copy of the head elsewhere (`belljar audit verify` prints it and takes it back).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

import anyio.to_thread

from belljar.core import errors
from belljar.core.request import RunRequest
from belljar.engine.audit_chain import (
    RESUMED,
    AuditEntry,
    AuditReport,
    Head,
    conclude,
    examine,
    head_of,
    is_torn,
    sealed,
)  # fmt: skip

_MAX_LINE_BYTES = 1 << 20  # what is longer is read in parts, and cannot be verified
_TAIL_BYTES = 1 << 12  # of the end of a log, where the last line is looked for first
_APPEND = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
caller: ContextVar[str] = ContextVar("caller")  # who asks, where a service knows better than the operating system


class _LogEnd(NamedTuple):
    """Where a log goes on: from which line, and what has to be done about what comes after that one.

    Attributes:
        last: the line to go on from.
        kept: the head beside the log; None if there is none that can be read.
        torn: how many bytes at the end a crash left of a line.
        open: whether the end of the last line is missing.
    """

    last: Head
    kept: Head | None
    torn: int
    open: bool


class Audit:
    """An audit log: a file, those that it was rotated to, and its head."""

    def __init__(self, path: str | Path) -> None:
        self.path: Path = Path(path)
        self._head = self.path.with_name(f"{self.path.name}.head")

    @property
    def begun(self) -> bool:
        """Whether anything was ever recorded. The file itself may be missing: `rotate` moved it away, or somebody."""
        return self.path.exists() or self._head.exists()

    async def record(self, kind: str, **facts: Any) -> None:
        """Returns when it is on the disk; otherwise raises, so that nothing happens that nobody knows of."""
        facts = {"kind": kind, "caller": caller.get("") or _user(), **facts}
        try:
            await anyio.to_thread.run_sync(self._append, facts, abandon_on_cancel=False)
        except OSError as error:
            raise errors.NotAvailable(
                f"the audit log {self.path} cannot be written: {error.strerror or error}",
                fix="make it writable, or make room; without a record nothing is run",
            ) from None

    def _append(self, facts: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._locked(_APPEND, fcntl.LOCK_EX) as fd:
            if not os.fstat(fd).st_size and self._kept() is None:
                self._keep(Head())  # before the first line: a head that is missing later was taken away
            end = self._end(fd)
            _mend(fd, end)
            last = end.last
            if end.torn or end.kept != last:
                last = self._add(fd, last, _resumption(end, facts))
            self._add(fd, last, facts)

    def _add(self, fd: int, last: Head, facts: Mapping[str, Any]) -> Head:
        """Writes a line and its head to the disk, or nothing."""
        size = os.fstat(fd).st_size
        rest, head = sealed(last, facts)
        try:
            while rest:  # a disk that is nearly full takes a part
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
            self._keep(head)
        except OSError:
            with suppress(OSError):
                os.ftruncate(fd, size)
            raise
        return head

    def _keep(self, head: Head) -> None:
        """Writes the head in place, always of the same length: a disk that is full has room for that."""
        fd = os.open(self._head, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.pwrite(fd, f"{head.number:020}:{head.hash}\n".encode(), 0)
            os.fdatasync(fd)
        finally:
            os.close(fd)

    @contextmanager
    def _locked(self, flags: int, lock: int) -> Iterator[int]:
        while True:
            fd = os.open(self.path, flags | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, lock)
                if self._is_current(fd):
                    yield fd
                    return
            finally:
                os.close(fd)

    def _is_current(self, fd: int) -> bool:
        """False: it was moved away while we waited for its lock."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(fd), os.stat(self.path))
        return False

    def rotate(self) -> Path | None:
        """Moves what there is to a file of its own; the chain goes on. None: there was nothing."""
        with self._locked(_APPEND, fcntl.LOCK_EX) as fd:
            end = self._end(fd)
            _mend(fd, end)
            if not os.fstat(fd).st_size:
                return None
            old = self.path.with_name(f"{self.path.name}.{end.last.number:012}")
            self.path.replace(old)
            return old

    def _end(self, fd: int) -> _LogEnd:
        """Looks for the line to go on from.

        Where the head knows of later lines, they were moved away by `rotate`, or taken: going on from the head keeps
        the first in one chain, and lets `verify` find the second."""
        kept, size, lines, last, torn = self._kept(), os.fstat(fd).st_size, list[bytes](), None, 0
        for reach in (_TAIL_BYTES, 2 * _MAX_LINE_BYTES):
            lines = _tail(fd, size, reach)
            torn = len(lines.pop()) if lines and is_torn(lines[-1]) else 0
            if last := _newest(lines):
                break
        last = max(last or Head(), kept or Head(), key=lambda head: head.number)
        return _LogEnd(last, kept, torn, open=bool(lines) and not lines[-1].endswith(b"\n"))

    def lines(self) -> Iterator[dict[str, Any]]:
        """What was recorded, oldest first; lines that cannot be read are left out (`verify` tells of them)."""
        return (entry.facts for entry in examine(self.raw()) if entry.facts)

    def raw(self) -> Iterator[bytes]:
        """The lines as they are in the files, up to the last one that is there now."""
        with self._opened() as (lines, _):
            yield from lines

    def verify(self, known: Head | None = None, each: Callable[[AuditEntry], object] | None = None) -> AuditReport:
        """Looks at every line, and at the head.

        Args:
            known: a head that was kept elsewhere.
            each: is called with every line, oldest first.
        """
        with self._opened() as (lines, kept):
            return conclude(examine(lines), kept, known, each)

    @contextmanager
    def _opened(self) -> Iterator[tuple[Iterator[bytes], Head | None]]:
        """All lines and the head, of one moment: whoever writes meanwhile is not kept waiting."""
        with ExitStack() as stack:
            with ExitStack() as lock:
                with suppress(FileNotFoundError):
                    lock.enter_context(self._locked(os.O_RDONLY, fcntl.LOCK_SH))
                files = [stack.enter_context(path.open("rb")) for path in self._files()]
                sizes = [os.fstat(file.fileno()).st_size for file in files]
                kept = self._kept()
            yield chain.from_iterable(map(_lines, files, sizes)), kept

    def _files(self) -> list[Path]:
        old = sorted(self.path.parent.glob(f"{self.path.name}.{'[0-9]' * 12}"))
        return [*old, self.path] if self.path.exists() else old

    def _kept(self) -> Head | None:
        with suppress(OSError, ValueError, errors.InvalidRequest):
            return Head.parse(self._head.read_text("ascii"))
        return None


def asked(request: RunRequest) -> dict[str, Any]:
    """What a request is about, without its secrets: code and command by their hash, variables by their names."""
    code = request.code if request.code is not None else "\0".join(request.command or ())
    facts: dict[str, Any] = {
        "language": request.language if request.code is not None else None,
        "program": request.command[0][:200] if request.command else None,
        "sha256": hashlib.sha256(code.encode()).hexdigest(),
        "files": len(request.files) or None, "env": sorted(request.env) or None, "image": request.image,
        "workspace": request.workspace.model_dump() if request.workspace else None,
        "packages": list(request.packages) if isinstance(request.packages, tuple) else request.packages,
        "network": sorted(request.egress.hosts) or (None if request.egress.mode == "none" else request.egress.mode),
    }  # fmt: skip
    return {name: value for name, value in facts.items() if value is not None}


def _resumption(end: _LogEnd, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The line that tells that a log did not end as its head says, before the next one is written."""
    kept = str(end.kept) if end.kept else None
    return {"kind": RESUMED, "caller": facts["caller"], "head": kept, "torn_bytes": end.torn}


def _mend(fd: int, end: _LogEnd) -> None:
    """Takes away what a crash left of a line, or ends a line that lacks its end."""
    if end.torn:
        os.ftruncate(fd, os.fstat(fd).st_size - end.torn)
    if end.open:
        os.write(fd, b"\n")


def _tail(fd: int, size: int, reach: int) -> list[bytes]:
    """The last lines of a file, as many as begin within the reach of its end."""
    start = max(0, size - reach)
    *whole, rest = os.pread(fd, reach, start).split(b"\n")
    lines = [*(line + b"\n" for line in whole), *((rest,) if rest else ())]
    return lines[1:] if start else lines


def _newest(lines: Sequence[bytes]) -> Head | None:
    """The last line that is Belljar's; it may lack its end."""
    return next((head for line in reversed(lines) if (head := head_of(line.removesuffix(b"\n") + b"\n"))), None)


def _lines(file: IO[bytes], size: int) -> Iterator[bytes]:
    """The lines of a file up to this size."""
    while line := file.readline(min(size, _MAX_LINE_BYTES)):
        size -= len(line)
        yield line


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return f"uid {os.geteuid()}"
