"""Processes that meet at one empty store prepare it one after the other, and none is told that it is locked."""

from __future__ import annotations

import fcntl
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import anyio
import pytest

from belljar.service.store import sqlite
from belljar.service.store.store import Store
from belljar.service.store.sync import Syncer
from store_records import a_run

PROCESSES = 4
OPEN = """
import sys, anyio
from belljar.service.store.store import Store


async def main():
    async with Store(sys.argv[1]):
        print("opened")


print("ready", flush=True)
sys.stdin.readline()
anyio.run(main)
"""


@contextmanager
def preparing(path: Path) -> Iterator[None]:
    """What another process holds while it prepares an empty store: the lock beside it, and the file itself."""
    with (
        Path(f"{path}.lock").open("w") as lock,
        closing(sqlite3.connect(path, isolation_level=None)) as connection,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection.execute("BEGIN EXCLUSIVE")
        yield
        connection.execute("ROLLBACK")


@pytest.mark.anyio
async def test_a_syncer_waits_for_another_process_that_prepares_the_shared_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared.db"
    done = anyio.Event()

    async def push(store: Store) -> None:
        syncer = Syncer(store, f"sqlite:///{shared}")
        assert await syncer.push() > 0
        await syncer.close()
        done.set()

    async with Store(f"sqlite:///{tmp_path}/local.db", outbox=True) as store, anyio.create_task_group() as tasks:
        await store.begin(a_run())
        # SQLite itself waits for a while, but not where two begin the same change: so it is kept from waiting here.
        monkeypatch.setattr(sqlite, "BUSY_SECONDS", 0.05)
        with preparing(shared):
            tasks.start_soon(push, store)
            await anyio.sleep(0.5)  # long enough for who would not wait
            assert not done.is_set()
        with anyio.fail_after(60):
            await done.wait()


def test_processes_that_open_one_empty_store_at_once_all_open_it(tmp_path: Path) -> None:
    line = [sys.executable, "-c", OPEN, f"sqlite:///{tmp_path}/new/records.db"]
    pipe = subprocess.PIPE
    started = [subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(PROCESSES)]
    assert {process.stdout.readline() for process in started if process.stdout} == {"ready\n"}
    said = [process.communicate("\n", timeout=120) for process in started]
    assert [out for out, _ in said] == ["opened\n"] * PROCESSES, said
