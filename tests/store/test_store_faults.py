"""The store when something is in the way: a full disk, a lock, a database that is killed or hangs."""

from __future__ import annotations

import math
import os
import signal
import sqlite3
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from sqlalchemy import func, select

from belljar.core import errors
from belljar.core.result import Result
from belljar.service.store import tables, writer
from belljar.service.store.store import Store
from postgres_server import PostgresServer
from store_records import a_line, a_run, until

# --- one who writes much -----------------------------------------------------------------------


async def test_a_run_that_begins_goes_before_lines_of_a_flood_and_parts_of_a_large_result(tmp_path: Path) -> None:
    async with Store(f"sqlite:///{tmp_path}/records.db") as store, anyio.create_task_group() as tasks:
        flooding, large, held = a_run(), a_run(), threading.Event()
        await store.begin(flooding)
        await store.begin(large)
        tasks.start_soon(store.write, lambda db: held.wait(10))
        await anyio.lowlevel.checkpoint()  # it has asked
        store.add(*(a_line(flooding.id, number) for number in range(1, 3001)))
        tasks.start_soon(store.flush, flooding.id)
        result = Result(status="success", stdout="x" * 4_000_000)
        tasks.start_soon(partial(store.change, large.id, state="finished", result=result))
        await until(lambda: len(store._writer._waiting) == 2)
        tasks.start_soon(_count_down, store, begun := list[int]())
        await until(lambda: len(store._writer._waiting) == 3)
        held.set()
        await until(lambda: begun)
        assert begun[0] > 2000, "lines of a flood were written first"
    async with Store(f"sqlite:///{tmp_path}/records.db") as store:
        assert len(await store.lines(flooding.id, limit=5000)) == 3000
        found = await store.run(large.id)
        assert found and found.result and len(found.result.stdout) == 4_000_000


async def _count_down(store: Store, begun: list[int]) -> None:
    await store.begin(a_run())
    begun.append(store.buffered)


async def test_short_writes_that_never_end_do_not_keep_a_large_result_from_being_written(tmp_path: Path) -> None:
    async with Store(f"sqlite:///{tmp_path}/records.db") as store, anyio.create_task_group() as tasks:

        async def write_for_ever() -> None:
            while True:
                await store.write(lambda db: None)

        for _ in range(5):
            tasks.start_soon(write_for_ever)
        await store.begin(run := a_run())
        store.add(*(a_line(run.id, number) for number in range(1, 1001)))
        with anyio.fail_after(10):
            await store.change(run.id, state="finished", result=Result(status="success", stdout="x" * 4_000_000))
        assert store.buffered == 0
        tasks.cancel_scope.cancel()


async def test_what_was_committed_gets_into_the_database_s_own_file_soon(tmp_path: Path) -> None:
    async with Store(f"sqlite:///{tmp_path}/records.db") as store:
        await store.begin(run := a_run())
        await until(lambda: run.id.encode() in (tmp_path / "records.db").read_bytes())


# --- faults of SQLite --------------------------------------------------------------------------


async def test_the_file_is_ours_alone(tmp_path: Path) -> None:
    async with Store(f"sqlite:///{tmp_path}/data/records.db") as store:
        await store.begin(a_run())
        for path in (tmp_path / "data").iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert len(list((tmp_path / "data").iterdir())) == 4  # and the lock of who prepares it
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700


async def test_a_file_that_is_no_database_is_said_to_be_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PATIENCE", 0.2)  # it is waited for: somebody may be copying it
    (tmp_path / "records.db").write_text("these are not the records you are looking for" * 100)
    with pytest.raises(errors.NotAvailable, match="not a database"):
        async with Store(f"sqlite:///{tmp_path}/records.db"):
            pass


async def test_pruning_gives_the_disk_its_room_back(tmp_path: Path) -> None:
    file = tmp_path / "records.db"
    async with Store(f"sqlite:///{file}") as store:
        for _ in range(20):
            result = Result(status="success", stdout="x" * 500_000)
            await store.begin(a_run(created=1.0, ended=1.0, state="finished", result=result))
    before = file.stat().st_size
    async with Store(f"sqlite:///{file}") as store:
        await store.prune(60)
    assert before > 10_000_000
    assert file.stat().st_size < 1_000_000


async def test_a_lock_that_another_process_holds_is_waited_for_and_not_for_ever(tmp_path: Path) -> None:
    file = tmp_path / "records.db"
    async with Store(f"sqlite:///{file}") as store:
        other = sqlite3.connect(file, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        begun = time.monotonic()
        with pytest.raises(errors.NotAvailable):
            await store.begin(a_run())
        assert time.monotonic() - begun < 9
        assert "locked" in store.status
        other.execute("ROLLBACK")
        other.close()
        run = a_run()
        await store.begin(run)
        assert [found.id for found in await store.runs(state="queued")] == [run.id]
        assert store.status == ""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    line = ["mount", "-t", "tmpfs", "-o", "size=3m", "belljar-test-small", str(disk)]
    if os.geteuid() != 0 or subprocess.run(line, check=False, capture_output=True).returncode != 0:
        pytest.skip("NOTHING of a full disk was checked: it takes the right to mount a small one")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


async def test_on_a_full_disk_nothing_is_begun_and_all_goes_on_when_there_is_room(small_disk: Path) -> None:
    async with Store(f"sqlite:///{small_disk}/records.db") as store:
        early = a_run(state="running")
        await store.begin(early)
        filler = small_disk / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(b"x" * 4096)
        refused = await _fill(store)
        assert "full" in refused.message or "I/O" in refused.message
        assert str(small_disk) in refused.fix
        assert store.status
        store.add(*[a_line(early.id, number) for number in range(1, 2001)])
        with pytest.raises(errors.NotAvailable):  # it is told, and yet not forgotten
            await store.change(
                early.id, state="finished", ended=2.0, result=Result(status="success", stdout="y" * 50_000)
            )
        with pytest.raises(errors.NotAvailable):
            await store.begin(a_run(id="bj-refused"))
        filler.unlink()
        await until(lambda: store.status == "" and not store.buffered)
        await store.begin(a_run())
        assert len(await store.lines(early.id, limit=5000)) == 2000
        found = await store.run(early.id)
        assert found is not None and found.state == "finished"
        assert found.result is not None and len(found.result.stdout) == 50_000
        assert await store.run("bj-refused") is None
        assert store.dropped == 0


async def _fill(store: Store) -> errors.NotAvailable:
    """SQLite's journal has some room of its own, which comes to an end."""
    with anyio.fail_after(30):
        while True:
            try:
                await store.begin(a_run(sha256="x" * 4000))
            except errors.NotAvailable as error:
                return error


async def test_ends_of_runs_are_written_however_large_and_however_late(tmp_path: Path) -> None:
    file = tmp_path / "records.db"
    runs = [a_run(state="running") for _ in range(4)]
    async with Store(f"sqlite:///{file}") as store:
        for run in runs:
            await store.begin(run)
        other = sqlite3.connect(file, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        async with anyio.create_task_group() as tasks:
            for run in runs:
                tasks.start_soon(_end, store, run.id)
            await until(lambda: "locked" in store.status)
            other.execute("ROLLBACK")
            other.close()
        assert store.status == "" and store.dropped == 0
        for run in runs:
            found = await store.run(run.id)
            assert found is not None and found.state == "finished"
            assert found.result is not None and len(found.result.stdout) == _LARGE


_LARGE = 20_000_000  # characters: four of them are more than the writer holds for callers who have given up


async def _end(store: Store, id: str, size: int = _LARGE) -> None:
    result = Result(status="success", stdout="x" * size)
    await store.change(id, state="finished", ended=2.0, result=result, patience=math.inf)


async def test_a_large_result_is_kept_in_parts_and_goes_with_its_run(tmp_path: Path) -> None:
    file = tmp_path / "records.db"
    result = Result(status="success", stdout="\x00\u20ac\n" * 500_000, stderr="e", results=({"text/plain": "1"},))
    async with Store(f"sqlite:///{file}") as store:
        run = a_run(created=1.0, state="running")
        await store.begin(run)
        await store.change(run.id, state="finished", ended=1.0, result=result)
        record, large = await store.brief_run(run.id)
        assert record is not None and record.result is not None and record.result.stdout == ""
        assert large is not None
        sizes = [len(part) async for part in large.parts()]
        assert len(sizes) > 5 and max(sizes) <= 512 * 1024
        whole = await store.run(run.id)
        assert whole is not None and whole.result == result
        assert [found async for found in store.history()] == [whole]
        await store.prune(60)
        assert await store.read(lambda db: db.scalar(select(func.count()).select_from(tables.result_parts))) == 0
        with pytest.raises(errors.NotAvailable, match="is not whole"):  # to whoever had begun to read it
            _ = [part async for part in large.parts()]


# --- faults of PostgreSQL ----------------------------------------------------------------------


async def test_postgresql_killed_and_started_again_loses_nothing_that_was_acknowledged(
    postgres: PostgresServer,
) -> None:
    acknowledged: list[str] = []
    refused = 0
    async with Store(postgres.new_url()) as store:

        async def keep_beginning(scope: anyio.CancelScope) -> None:
            nonlocal refused
            while not scope.cancel_called:
                run = a_run()
                try:
                    await store.begin(run)
                    acknowledged.append(run.id)
                except errors.NotAvailable:
                    refused += 1
                    await anyio.sleep(0.05)

        early = a_run(state="running")
        await store.begin(early)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                for _ in range(10):
                    group.start_soon(keep_beginning, scope)
                await until(lambda: len(acknowledged) > 100)
                postgres.kill()
                try:
                    begun = time.monotonic()
                    with pytest.raises(errors.NotAvailable) as told:
                        await store.begin(a_run(id="bj-refused"))
                    assert time.monotonic() - begun < 7
                    assert "PostgreSQL" in told.value.fix
                    assert store.status
                    group.start_soon(_end, store, early.id, 2_000_000)
                    store.add(*[a_line("bj-1", number) for number in range(1, 101)])
                    with pytest.raises(errors.NotAvailable):
                        await store.run("bj-1")
                finally:
                    postgres.start()
                before = len(acknowledged)
                await until(lambda: len(acknowledged) > before + 100)
                scope.cancel()
        await until(lambda: not store.status and not store.buffered)
        assert len(await store.lines("bj-1")) == 100
        known = {run.id for run in await store.runs(limit=100_000)}
        assert set(acknowledged) <= known
        assert "bj-refused" not in known
        assert refused > 0
        over = await store.run(early.id)
        assert over is not None and over.result is not None and len(over.result.stdout) == 2_000_000


async def test_postgresql_that_hangs_keeps_nobody_waiting_for_ever(postgres: PostgresServer) -> None:
    async with Store(postgres.new_url()) as store:
        await store.begin(a_run())
        pids = [
            int(pid)
            for pid in postgres.sql("SELECT pid FROM pg_stat_activity WHERE application_name = 'belljar'").split()
        ]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            begun = time.monotonic()
            with pytest.raises(errors.NotAvailable):
                await store.begin(a_run(id="bj-late"))
            assert time.monotonic() - begun < 7
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        await store.begin(a_run(id="bj-next"))
        await store.flush()
        late = await store.run("bj-late")
        assert late is None or late.state == "failed"  # its caller was told that it was not begun
