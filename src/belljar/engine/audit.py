"""The audit log: a line of JSON for whatever happened, each bound to the one before it by a hash. No record, no run.

A line is on the disk before what it tells of goes on. Several processes may share a log. Beside it lies its head, the
number and hash of the last line, so that lines missing at the end are found too. Who can write to both files can still
make up a whole history: keep a copy of the head elsewhere (`belljar audit verify` prints it and takes it back).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import anyio.to_thread

from belljar.core import errors
from belljar.core.request import RunRequest

_FIRST = "0" * 64
_LONGEST = 1 << 20  # bytes that a line has at most
caller: ContextVar[str] = ContextVar("caller")  # who asks, where a service knows better than the operating system


class Head(NamedTuple):
    """The last line: its number and its hash."""

    number: int = 0
    hash: str = _FIRST

    def __str__(self) -> str:
        return f"{self.number}:{self.hash}"

    @classmethod
    def parse(cls, text: str) -> Head:
        number, _, digest = text.strip().partition(":")
        if not number.isdigit() or len(digest) != 64:
            raise errors.InvalidRequest(f"{text[:80]!r} is no head of an audit log", fix="write it as NUMBER:HASH")
        return cls(int(number), digest)


class AuditReport(NamedTuple):
    head: Head
    problems: tuple[str, ...]  # none: every line is what it was, and none is missing
    torn: int  # lines that a crash cut short: what they were about never ran


class Audit:
    def __init__(self, path: str | Path) -> None:
        self.path: Path = Path(path)
        self._head = self.path.with_name(f"{self.path.name}.head")

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
        with self._locked() as fd:
            last, whole = self._last(fd)
            line = {"number": last.number + 1, "at": round(time.time(), 3), **facts, "before": last.hash}
            digest = _hash(line)
            text = json.dumps(line | {"hash": digest}, separators=(",", ":"), ensure_ascii=True) + "\n"
            rest = (text if whole else f"\n{text}").encode()
            while rest:  # a disk that is nearly full takes a part
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
            draft = self._head.with_suffix(".draft")
            draft.write_text(f"{Head(last.number + 1, digest)}\n")
            draft.replace(self._head)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
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
        with self._locked() as fd:
            last, _ = self._last(fd)
            if not os.fstat(fd).st_size:
                return None
            old = self.path.with_name(f"{self.path.name}.{last.number:012}")
            self.path.replace(old)
            return old

    def _last(self, fd: int) -> tuple[Head, bool]:
        """The line to go on from, and whether nothing comes after it.

        Where the head knows of later ones, they were moved away by `rotate`, or taken: going on from the head keeps
        the first in one chain, and lets `verify` find the second."""
        kept = self._kept() or Head()
        size = os.fstat(fd).st_size
        tail = os.pread(fd, _LONGEST, max(0, size - _LONGEST))
        for line in reversed(tail.split(b"\n")):
            if head := _head_of(line):
                return max(head, kept), tail.endswith(b"\n")
        return kept, not tail or tail.endswith(b"\n")

    def lines(self) -> Iterator[dict[str, Any]]:
        """What was recorded, oldest first; lines that cannot be read are left out (`verify` tells of them)."""
        for line in self.raw():
            with suppress(ValueError):
                yield json.loads(line)

    def raw(self) -> Iterator[bytes]:
        for path in (*sorted(self.path.parent.glob(f"{self.path.name}.{'[0-9]' * 12}")), self.path):
            with suppress(FileNotFoundError), path.open("rb") as file:
                yield from file

    def verify(self, known: Head | None = None) -> AuditReport:
        """Looks at every line; `known` is a head that was kept elsewhere."""
        last, torn, problems = Head(), 0, list[str]()
        seen: dict[int, str] = {}
        wanted = [head for head in (known, self._kept()) if head]
        for place, line in enumerate(self.raw(), 1):
            head = _head_of(line)
            if head is None:
                torn += 1
            elif (wrong := _wrong(json.loads(line), last)) and len(problems) < 20:
                problems.append(f"line {place}: {wrong}")
            if head:
                last = head
                if any(head.number == each.number for each in wanted):
                    seen[head.number] = head.hash
        for each in wanted:
            if each.number and each.number > last.number:
                problems.append(f"{each.number - last.number} lines are missing at the end")
            elif each.number and seen.get(each.number) != each.hash:
                problems.append(f"line number {each.number} is not what it was when its head was kept")
        return AuditReport(last, tuple(dict.fromkeys(problems)), torn)

    def _kept(self) -> Head | None:
        with suppress(OSError, errors.InvalidRequest):
            return Head.parse(self._head.read_text())
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
        "network": sorted(request.egress.hosts) or (None if request.egress.mode == "none" else request.egress.mode),
    }  # fmt: skip
    return {name: value for name, value in facts.items() if value is not None}


def _head_of(line: bytes) -> Head | None:
    with suppress(ValueError, KeyError, TypeError):
        said = json.loads(line)
        return Head(int(said["number"]), str(said["hash"]))
    return None


def _wrong(line: dict[str, Any], last: Head) -> str:
    told = line.pop("hash", None)
    if told != _hash(line):
        return "it was changed"
    if line.get("before") != last.hash or line.get("number") != last.number + 1:
        return "lines before it are missing, or were put in another order"
    return ""


def _hash(line: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(line, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return f"uid {os.geteuid()}"
