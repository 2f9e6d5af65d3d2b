"""Local records in a shared store: offline for long, then all of them, in order, none twice."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from sqlalchemy import func, select
from typer.testing import CliRunner

from belljar.cli import records as cli_records
from belljar.core import errors
from belljar.core.result import Result
from belljar.protocol.records import Alert, RunRecord, Sample, new_id
from belljar.service.store import sync, tables
from belljar.service.store.store import Store
from belljar.service.store.sync import Syncer
from postgres_server import PostgresServer
from store_records import a_line, a_run, until


@pytest.fixture
def shared_url(url: str) -> str:
    return url


@pytest.fixture
def local_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/local/records.db"


async def live(store: Store, count: int = 1, **fields: Any) -> list[RunRecord]:
    """Runs with all that happens to one."""
    runs = [a_run(**fields) for _ in range(count)]
    for run in runs:
        await store.begin(run)
        await store.change(run.id, state="running", started=1.0)
        store.add(*[a_line(run.id, number, f"{number} \0") for number in range(1, 6)])
        store.add(Alert(container_id=run.id, timestamp=1.0, kind="cpu", message="hot"))
        store.add(Sample(container_id=run.id, timestamp=1.0, cpu_percent=0, memory_mb=0, uptime_seconds=0))
        await store.change(run.id, state="finished", ended=2.0, result=Result(status="success", stdout=run.id))
    return runs


async def everything(store: Store) -> list[Any]:
    """All that is pushed, of every run."""
    found = []
    async for run in store.history():
        found.append((run, await store.lines(run.id), await store.alerts(run.id)))
    return sorted(found, key=lambda item: item[0].id)


async def nothing_waits(store: Store) -> bool:
    count = select(func.count()).select_from(tables.outbox)
    return await store.read(lambda db: db.scalar(count)) == 0


async def pushed(store: Store, shared_url: str) -> int:
    syncer = Syncer(store, shared_url)
    try:
        return await syncer.push()
    finally:
        await syncer.close()


def copy(file: Path, to: Path) -> None:
    with sqlite3.connect(file) as source, sqlite3.connect(to) as target:
        source.backup(target)


async def test_what_was_recorded_offline_is_there_afterwards_as_it_was(local_url: str, shared_url: str) -> None:
    async with Store(local_url, outbox=True) as local:
        await live(local, 50)
        syncer = Syncer(local, shared_url)
        assert await syncer.push() > 0
        assert (syncer.status, syncer.behind) == ("", 0)
        assert await syncer.push() == 0
        await live(local, 3)  # and goes on from there
        await syncer.push()
        await syncer.close()
        async with Store(shared_url) as shared:
            assert await everything(shared) == await everything(local)
            assert len(await everything(shared)) == 53


async def test_a_large_result_arrives_whole(local_url: str, shared_url: str) -> None:
    result = Result(status="success", stdout="\x00\u20ac\n" * 400_000)
    async with Store(local_url, outbox=True) as local:
        run = a_run()
        await local.begin(run)
        await local.change(run.id, state="finished", ended=2.0, result=result)
        await pushed(local, shared_url)
        async with Store(shared_url) as shared:
            arrived = await shared.run(run.id)
            assert arrived is not None and arrived.result == result
            assert await everything(shared) == await everything(local)


async def test_changes_arrive_in_their_order(local_url: str, shared_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[str, str]] = []
    take = sync._take

    def watched(db: Any, origin: str, parcel: sync.Parcel) -> None:
        taken.append((parcel.id, parcel.body.get("state", "") if isinstance(parcel.body, dict) else parcel.kind))
        take(db, origin, parcel)

    monkeypatch.setattr(sync, "_take", watched)
    monkeypatch.setattr(sync, "_PARCELS", 7)  # so that they come in many transactions
    async with Store(local_url, outbox=True) as local:
        runs = await live(local, 10)
        await pushed(local, shared_url)
    for run in runs:
        states = [what for id, what in taken if id == run.id and what in ("queued", "running", "lines", "finished")]
        assert [state for state in states if state != "lines"] == ["queued", "running", "finished"]
        assert "lines" in states
        assert states[-1] == "finished"  # who sees that it ended sees all its lines


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_syncer_that_dies_between_push_and_acknowledgement_pushes_nothing_twice(
    local_url: str, shared_url: str, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    monkeypatch.setattr(sync, "_PARCELS", 10)
    taken: list[int] = []
    take, acknowledge = sync._take, Syncer._acknowledge

    def watched(db: Any, origin: str, parcel: sync.Parcel) -> None:
        take(db, origin, parcel)
        taken.append(parcel.number)

    async def die(self: Syncer, number: int) -> None:
        if moment == "after":
            await acknowledge(self, number)
        raise errors.Aborted("killed here")

    monkeypatch.setattr(sync, "_take", watched)
    async with Store(local_url, outbox=True) as local:
        await live(local, 10)
        for _ in range(3):
            dying = Syncer(local, shared_url)
            with monkeypatch.context() as patch, pytest.raises(errors.Aborted):
                patch.setattr(Syncer, "_acknowledge", die)
                await dying.push()
            await dying.close()  # as the kernel closes its sockets
        await pushed(local, shared_url)
        assert taken == sorted(set(taken))
        async with Store(shared_url) as shared:
            assert await everything(shared) == await everything(local)


async def push_at_once(*syncers: Syncer) -> None:
    async with anyio.create_task_group() as group:
        for syncer in syncers:
            group.start_soon(syncer.push)


async def test_two_stores_push_into_one_without_getting_in_each_others_way(tmp_path: Path, shared_url: str) -> None:
    urls = [f"sqlite:///{tmp_path}/{name}/records.db" for name in ("a", "b")]
    async with Store(urls[0], outbox=True) as one, Store(urls[1], outbox=True) as other:
        assert one.origin != other.origin
        syncers = [Syncer(one, shared_url), Syncer(other, shared_url)]
        for _ in range(3):
            await live(one, 5)
            await live(other, 5)
            await push_at_once(*syncers)
        for syncer in syncers:
            await syncer.close()
        async with Store(shared_url) as shared:
            mine, theirs = await everything(one), await everything(other)
            assert await everything(shared) == sorted(mine + theirs, key=lambda item: item[0].id)


async def test_two_syncers_of_one_store_push_everything_once(local_url: str, shared_url: str) -> None:
    async with Store(local_url, outbox=True) as local:
        await live(local, 60)
        syncers = [Syncer(local, shared_url) for _ in range(3)]
        await push_at_once(*syncers)
        for syncer in syncers:
            await syncer.close()
        async with Store(shared_url) as shared:
            assert await everything(shared) == await everything(local)


async def test_a_shared_store_that_is_down_is_said_waited_for_and_caught_up(
    local_url: str, postgres: PostgresServer
) -> None:
    url = postgres.new_url()
    async with Store(local_url, outbox=True) as local, anyio.create_task_group() as group:
        syncer = Syncer(local, url, poll=0.05)
        await live(local, 3)
        group.start_soon(syncer.run)
        await until(partial(nothing_waits, local))
        postgres.kill()
        try:
            await live(local, 20)  # nothing here waits for what is down there
            await until(lambda: syncer.status)
            assert syncer.behind > 0
            assert local.status == ""
        finally:
            postgres.start()
        await until(lambda: not syncer.status and not syncer.behind)
        async with Store(url) as shared:
            assert await everything(shared) == await everything(local)
        group.cancel_scope.cancel()


async def test_what_was_lost_is_pushed_too_and_not_by_others(local_url: str, shared_url: str) -> None:
    async with Store(local_url, outbox=True) as local:
        run = RunRecord(id=new_id(), caller="ann", instance="dead", state="running", created=1.0)
        await local.begin(run)
        syncer = Syncer(local, shared_url)
        await syncer.push()
        async with Store(shared_url) as shared:
            assert await shared.lose(lambda instance: True) == []  # it is for its own store to say
            await local.lose(lambda instance: True)
            await syncer.push()
            found = await shared.run(run.id)
            assert found is not None and found.state == "lost"
        await syncer.close()


async def test_what_waits_to_be_pushed_is_not_pruned(local_url: str, shared_url: str) -> None:
    async with Store(local_url, outbox=True) as local:
        await live(local, 5, created=1.0)
        assert (await local.prune(60))["runs"] == 0
        await pushed(local, shared_url)
        gone = await local.prune(60)
        assert (gone["runs"], gone["logs"]) == (5, 25)
        assert await nothing_waits(local)
        async with Store(shared_url) as shared:
            assert len(await everything(shared)) == 5


@pytest.mark.parametrize("later", [2, 20, 40], ids=["fewer", "as many", "more"])
async def test_a_store_put_back_to_an_earlier_day_has_all_that_it_records_from_then_on_pushed(
    tmp_path: Path, local_url: str, shared_url: str, later: int, caplog: pytest.LogCaptureFixture
) -> None:
    """However many numbers it has used again before it first reaches the shared store."""
    file, kept = tmp_path / "local/records.db", tmp_path / "kept.db"
    async with Store(local_url, outbox=True) as local:
        await live(local, 2)
        await pushed(local, shared_url)
    copy(file, kept)
    async with Store(local_url, outbox=True) as local:
        await live(local, 20)
        await pushed(local, shared_url)
        lost = [run for run, *_ in await everything(local)]
    assert "earlier day" not in caplog.text
    copy(kept, file)
    async with Store(local_url, outbox=True) as local:
        await live(local, later)
        await pushed(local, shared_url)
        await live(local, 1)
        await pushed(local, shared_url)
        mine = await everything(local)
    assert caplog.text.count("earlier day") == 1
    async with Store(shared_url) as shared:
        found = await everything(shared)
        assert [item for item in found if item in mine] == mine
        assert {run.id for run, *_ in found} == {run.id for run, *_ in mine} | {run.id for run in lost}


async def test_without_an_outbox_nothing_is_laid_into_it(local_url: str, shared_url: str) -> None:
    async with Store(local_url) as local:
        await live(local)
        assert await pushed(local, shared_url) == 0


# --- the command line --------------------------------------------------------------------------


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs a command and returns what it says, or why it failed."""
    for name, value in (("DATA_DIR", str(tmp_path)), ("SHARED_STORE", f"sqlite:///{tmp_path}/shared/records.db")):
        monkeypatch.setenv(f"BELLJAR_{name}", value)

    def run(*words: str) -> str:
        done = CliRunner().invoke(cli_records.app, words)
        assert done.exception is None or isinstance(done.exception, errors.BelljarError), done.exception
        return str(done.exception or done.stdout)

    return run


def test_the_commands_list_show_export_push_and_prune(tmp_path: Path, records: Callable[..., str]) -> None:
    async def record() -> list[RunRecord]:
        async with Store(f"sqlite:///{tmp_path}/records.db", outbox=True) as store:
            return await live(store, 3, created=1000.0, language="python")

    runs = anyio.run(record)
    assert {run["id"] for run in json.loads(records("list", "--json"))} == {run.id for run in runs}
    assert runs[0].id in records("list")
    assert "no run" in records("list", "--state", "running")
    shown = json.loads(records("show", runs[0].id, "--json"))
    assert shown["result"]["stdout"] == runs[0].id
    assert [line["number"] for line in shown["lines"]] == [1, 2, 3, 4, 5]
    assert "success" in records("show", runs[0].id)
    assert "there is no run" in records("show", "bj-nothing")
    exported = [json.loads(line) for line in records("export", "--logs").splitlines()]
    assert len(exported) == 3 and all(len(run["lines"]) == 5 for run in exported)
    assert json.loads(records("prune", "--older-than", "30d", "--json"))["removed"]["runs"] == 0  # not pushed yet
    assert json.loads(records("sync", "--json"))["pushed"] > 0
    assert "removed 2 runs" in records("prune", "--older-than", "30d", "--keep", "1")
    assert "no duration" in records("prune", "--older-than", "soon")


def test_a_look_at_records_that_are_not_there_makes_none(tmp_path: Path, records: Callable[..., str]) -> None:
    assert "there are no records" in records("list")
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_loads_no_database_before_it_is_asked_for_records() -> None:
    code = "import sys, belljar.cli.records; assert not {'sqlalchemy', 'alembic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
