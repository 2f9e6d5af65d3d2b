"""What is told of sandboxes that have ended, for a day: also of those whose service died, or was started again.

Each open one has a small file below the data folder, which names the server that holds it; its end replaces it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

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


class EndedSandboxes:
    """The files of sandboxes that servers of one data folder hold, or held."""

    def __init__(self, data_dir: Path, instance: ServerInstance) -> None:
        self._folder = data_dir / "sandboxes"
        self._instance = instance
        self._told: dict[str, SandboxRecord] = {}
        self._writing = anyio.Lock()

    def settle(self) -> int:
        """Has what dead servers held told as lost, and forgets what is old; returns how many were lost."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lost = 0
        for path, instance, known in self._read():
            record = known
            if record.state in ("running", "paused") and self._instance.is_dead(instance):
                how = {"state": "lost", "reason": LOST, "expires": None, "features": (), "interpreters": ()}
                record = known.model_copy(update=how)
                self._write(record)
                lost += 1
            if record.state in ("ended", "lost"):
                self._told[record.id] = record
            if time.time() - path.stat().st_mtime > _KEEP_SECONDS:
                self._forget(record)
        self._shorten()
        return lost

    async def began(self, record: SandboxRecord) -> None:
        """Notes one that was opened."""
        async with self._writing:
            if record.id not in self._told:  # else it has ended meanwhile
                await anyio.to_thread.run_sync(self._write, record)

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

    def _write(self, record: SandboxRecord) -> None:
        text = json.dumps({"instance": self._instance.name, "sandbox": record.model_dump(mode="json")})
        draft = self._folder / f".{record.id}.{os.getpid()}"
        with suppress(OSError):  # a full disk must not keep anybody from closing a sandbox
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
                file.write(text)
            os.replace(draft, self._folder / f"{record.id}.json")

    def _read(self) -> Iterator[tuple[Path, str, SandboxRecord]]:
        for path in sorted(self._folder.glob("bs-*.json")):
            with suppress(OSError, ValueError, KeyError, TypeError):
                if path.stat().st_size > _MOST_FILE_BYTES:
                    continue
                said = json.loads(path.read_text())
                yield path, str(said["instance"]), SandboxRecord.model_validate(said["sandbox"])
