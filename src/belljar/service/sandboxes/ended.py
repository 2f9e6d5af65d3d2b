"""What is told of sandboxes that have ended, for a day: also of those whose service died, or was started again.

Each open one has a small file below the data folder, which names the server that holds it; its end replaces it. One
that goes on without its server is nobody's then, and the next server takes it (`claim`).
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread

from belljar.protocol.living import SandboxRecord
from belljar.protocol.records import Caller
from belljar.service.instances import ServerInstance
from belljar.service.queries import sees

_KEEP_SECONDS = 86_400.0
_MOST = 1000  # that have ended and are still told of
_MOST_FILE_BYTES = 256 * 1024
LOST = "the service that held it has ended"
NOBODY = ""  # the name of the server that holds what goes on without one
_SLACK_SECONDS = 60.0

Again = Mapping[str, Any]  # what the next server needs to go on with it


class _Known(NamedTuple):
    path: Path
    instance: str
    record: SandboxRecord
    again: Again | None  # None: it has ended with its server


class EndedSandboxes:
    """The files of sandboxes that servers of one data folder hold, or held."""

    def __init__(self, data_dir: Path, instance: ServerInstance) -> None:
        self._folder = data_dir / "sandboxes"
        self._instance = instance
        self._told: dict[str, SandboxRecord] = {}
        self._writing = anyio.Lock()

    def settle(self) -> int:
        """Has what dead servers held told as lost, and forgets what is old; returns how many were lost."""
        lost = 0
        with self._locked():
            for known in self._read():
                record, age = known.record, time.time() - known.path.stat().st_mtime
                if record.state in ("running", "paused") and self._is_over(known, age):
                    how = {"state": "lost", "reason": LOST, "expires": None, "features": (), "interpreters": ()}
                    record = record.model_copy(update=how)
                    self._write(record)
                    lost += 1
                elif known.again and self._instance.is_dead(known.instance):
                    self._write(record, known.again, NOBODY)  # before the dead server is forgotten
                if record.state in ("ended", "lost"):
                    self._told[record.id] = record
                    if age > _KEEP_SECONDS:
                        self._forget(record)
            self._shorten()
        return lost

    def _is_over(self, known: _Known, age: float) -> bool:
        if known.instance == NOBODY:  # nobody has come for it, and it has ended by itself
            return known.again is None or (
                known.record.state == "running" and age > 2 * float(known.again.get("absence", 0)) + _SLACK_SECONDS
            )
        return known.again is None and self._instance.is_dead(known.instance)

    def claim(self) -> list[tuple[SandboxRecord, Again]]:
        """Takes those that go on without a server: no other one gets them then."""
        with self._locked():
            found = [known for known in self._read() if known.instance == NOBODY and known.again]
            for known in found:
                self._write(known.record, known.again)
        return [(known.record, known.again) for known in found if known.again]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One server at a time looks at what others hold."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(self._folder / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    async def began(self, record: SandboxRecord, again: Again | None = None, *, left: bool = False) -> None:
        """Notes one that was opened, or that has changed.

        Args:
            record: as it is told.
            again: what the next server needs to go on with it, if it can.
            left: it goes on, and this server does not.
        """
        async with self._writing:
            if record.id not in self._told:  # else it has ended meanwhile
                await anyio.to_thread.run_sync(self._write, record, again, NOBODY if left else None)

    async def ended(self, record: SandboxRecord) -> None:
        """Notes how one ended."""
        self._told[record.id] = record
        self._shorten()
        async with self._writing:
            await anyio.to_thread.run_sync(self._write, record)

    def find(self, id: str, caller: Caller) -> SandboxRecord | None:
        """Returns how a caller's sandbox ended, if that is known."""
        record = self._told.get(id)
        return record if record is not None and sees(caller, record.caller) else None

    def _shorten(self) -> None:
        for id in list(self._told)[: max(0, len(self._told) - _MOST)]:
            self._forget(self._told[id])

    def _forget(self, record: SandboxRecord) -> None:
        self._told.pop(record.id, None)
        with suppress(OSError):
            (self._folder / f"{record.id}.json").unlink()

    def _write(self, record: SandboxRecord, again: Again | None = None, instance: str | None = None) -> None:
        holder = self._instance.name if instance is None else instance
        told = {"instance": holder, "sandbox": record.model_dump(mode="json")}
        text = json.dumps(told | ({"again": again} if again else {}))
        if len(text) > _MOST_FILE_BYTES:  # a sandbox of so many words ends with its server
            text = json.dumps(told)
        draft = self._folder / f".{record.id}.{os.getpid()}"
        with suppress(OSError):  # a full disk must not keep anybody from closing a sandbox
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
                file.write(text)
            os.replace(draft, self._folder / f"{record.id}.json")

    def _read(self) -> Iterator[_Known]:
        for path in sorted(self._folder.glob("bs-*.json")):
            with suppress(OSError, ValueError, KeyError, TypeError):
                if path.stat().st_size > _MOST_FILE_BYTES:
                    continue
                said = json.loads(path.read_text())
                record, again = SandboxRecord.model_validate(said["sandbox"]), said.get("again")
                yield _Known(path, str(said["instance"]), record, again if isinstance(again, dict) else None)
