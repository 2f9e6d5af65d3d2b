"""The store on a real SQLite and a real PostgreSQL: the same promises for both."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from belljar.core import errors
from belljar.core.result import File, Result, Status
from belljar.core.values import MIB
from belljar.protocol.records import Alert, Key, LogLine, RunRecord, Sample
from belljar.service.store import migrate, statements, tables
from belljar.service.store.statements import Claim
from belljar.service.store.store import Store
from store_records import a_line, a_run, until


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    async with Store(url) as opened:
        yield opened


# --- runs --------------------------------------------------------------------------------------


async def test_a_run_that_was_begun_is_seen_by_another_process_at_once(store: Store, url: str) -> None:
    run = a_run(language="python", sha256="ab", session="s", position=3)
    await store.begin(run)
    async with Store(url) as other:
        assert await other.run(run.id) == run
        assert await other.run("bj-nothing") is None


async def test_a_result_comes_back_as_it_was_byte_for_byte(store: Store) -> None:
    run = a_run()
    await store.begin(run)
    result = Result(
        status=Status.SUCCESS, exit_code=0, stdout="nul \0, é, 🛎\n",
        files=(File(path="a.bin", content=bytes(range(256))),),
        results=({"text/plain": "nul \0"},), reasons=("because",), denied=("no",), left_out=("a link",),
        warnings=("hm",),
    )  # fmt: skip
    problem = {"kind": "x", "message": "nul \0"}
    await store.change(run.id, state="finished", started=1.5, ended=2.5, backend="wasm", result=result, problem=problem)
    found = await store.run(run.id)
    assert found is not None
    assert (found.state, found.started, found.ended, found.backend) == ("finished", 1.5, 2.5, "wasm")
    assert found.result == result
    assert found.problem == problem
    assert found.caller == run.caller


async def test_half_a_surrogate_pair_that_a_guest_displayed_does_not_cost_the_record(store: Store) -> None:
    run = a_run()
    await store.begin(run)
    await store.change(run.id, state="finished", result=Result(status="success", results=({"text/plain": "a\ud800b"},)))
    found = await store.run(run.id)
    assert found is not None and found.result is not None
    assert found.result.results == ({"text/plain": "a?b"},)


async def test_a_change_of_what_is_not_there_is_refused(store: Store) -> None:
    with pytest.raises(errors.NotFound):
        await store.change("bj-nothing", state="running")
    with pytest.raises(errors.InvalidRequest, match="colour"):
        await store.change("bj-nothing", colour="red")
    with pytest.raises(errors.InvalidRequest, match="sleeping"):
        await store.change("bj-nothing", state="sleeping")


async def test_one_bad_write_does_not_take_the_others_of_its_transaction_along(store: Store) -> None:
    first = a_run()
    await store.begin(first)
    runs = [a_run() for _ in range(20)]
    told: list[Exception] = []

    async def begin(run: RunRecord) -> None:
        try:
            await store.begin(run)
        except errors.BelljarError as error:
            told.append(error)

    async with anyio.create_task_group() as group:
        for run in [*runs[:10], first, *runs[10:]]:
            group.start_soon(begin, run)
    assert [type(error) for error in told] == [errors.InvalidRequest]
    assert {run.id for run in await store.runs()} == {run.id for run in [first, *runs]}
    assert store.status == ""


async def test_a_hundred_callers_share_a_few_commits(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = 0
    write = store.database.write

    async def counted(work: Any) -> Any:
        nonlocal commits
        commits += 1
        return await write(work)

    monkeypatch.setattr(store.database, "write", counted)
    runs = [a_run() for _ in range(100)]
    async with anyio.create_task_group() as group:
        for run in runs:
            group.start_soon(store.begin, run)
    assert len(await store.runs(limit=200)) == 100
    async with anyio.create_task_group() as group:
        for run in runs:
            group.start_soon(partial(store.change, run.id, state="finished"))
    assert len(await store.runs(limit=200, state="finished")) == 100
    assert commits <= 10


async def test_the_end_of_a_run_takes_its_lines_along_and_sqlites_journal_stays_small(tmp_path: Path) -> None:
    async with Store(f"sqlite:///{tmp_path}/records.db") as store:
        for _ in range(1500):
            await store.begin(run := a_run())
            store.add(a_line(run.id, 1, "x" * 4000))
            await store.change(run.id, state="finished", result=Result(status="success"))
            assert store.buffered == 0
        assert (tmp_path / "records.db-wal").stat().st_size < 40 * MIB  # of some 90 that were written
        assert len(await store.lines(run.id)) == 1


async def test_runs_are_listed_newest_first_by_what_was_asked_and_without_results(store: Store) -> None:
    for number in range(6):
        run = a_run(
            created=1000.0 + number, caller="ann" if number % 2 else "bob", language="python" if number < 3 else "bash",
            state="finished", result=Result(status="success", stdout="x"),
        )  # fmt: skip
        await store.begin(run)
    found = await store.runs()
    assert [run.created for run in found] == [1005, 1004, 1003, 1002, 1001, 1000]
    assert all(run.result is None for run in found)
    assert [run.created for run in await store.runs(caller="ann", language="python")] == [1001]
    assert [run.created for run in await store.runs(before=1003, limit=2)] == [1002, 1001]
    assert await store.runs(state="running") == []
    assert [run.created async for run in store.history()] == [1000, 1001, 1002, 1003, 1004, 1005]
    assert [run.result.stdout async for run in store.history() if run.result] == ["x"] * 6


async def test_the_same_run_is_found_by_its_fingerprint_if_it_succeeded(store: Store) -> None:
    for number, status in enumerate(["success", "success", "error"]):
        run = a_run(
            fingerprint="f", state="finished", ended=float(number), result=Result(status=status, stdout=str(number))
        )
        await store.begin(run)
    await store.begin(a_run(fingerprint="g", state="running"))
    found = await store.same("f", run.caller)
    assert found is not None and found.result is not None and found.result.stdout == "1"
    assert await store.same("g", run.caller) is None
    assert await store.same("", run.caller) is None
    assert await store.same("f", "somebody else") is None


async def test_what_a_dead_process_left_open_is_lost_and_nothing_else(store: Store) -> None:
    queued, running = a_run(instance="dead", position=2), a_run(instance="dead", state="running")
    others = [a_run(instance="dead", state="finished", ended=1.0), a_run(instance="alive", state="running")]
    for run in (queued, running, *others):
        await store.begin(run)
    assert sorted(await store.lose(lambda instance: instance == "dead")) == sorted([queued.id, running.id])
    for run in (queued, running):
        found = await store.run(run.id)
        assert found is not None and found.state == "lost" and found.position is None
        assert found.ended is not None and time.time() - found.ended < 60
    for run in others:
        assert await store.run(run.id) == run
    assert await store.lose(lambda instance: instance == "dead") == []


# --- lines, samples, alerts --------------------------------------------------------------------


async def test_lines_come_back_in_order_from_where_one_left_off_and_none_twice(store: Store) -> None:
    lines = [a_line("bj-1", number, f"line {number} \0 é") for number in range(1, 2501)]
    store.add(*lines)
    store.add(*lines[:10])  # a second time
    store.add(a_line("bj-2", 1))
    await store.flush()
    assert await store.lines("bj-1", limit=5000) == lines
    assert await store.lines("bj-1", after=2400, limit=7) == lines[2400:2407]
    assert await store.lines("bj-2", after=1) == []
    assert store.dropped == 0


async def test_lines_are_written_soon_without_anybody_asking(store: Store) -> None:
    store.add(a_line("bj-1", 1))
    assert await until(lambda: store.lines("bj-1"), 5)


async def test_who_sees_that_a_run_ended_sees_all_its_lines(store: Store) -> None:
    for _ in range(20):
        run = a_run()
        await store.begin(run)
        store.add(*[a_line(run.id, number) for number in range(1, 51)])
        await store.change(run.id, state="finished", ended=1.0)
        assert len(await store.lines(run.id)) == 50


async def test_one_run_that_floods_keeps_neither_the_lines_of_another_back_nor_who_asks_for_its_own(
    store: Store,
) -> None:
    async def flood(scope: anyio.CancelScope) -> None:
        number = 0
        while not scope.cancel_called:
            if store.buffered < 20_000:  # there is room for the others, so none of theirs is dropped
                store.add(*[a_line("bj-flood", number + step) for step in range(1, 201)])
                number += 200
            await anyio.sleep(0.001)

    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(flood, scope)
            await until(lambda: store.lines("bj-flood"))
            store.add(a_line("bj-quiet", 1))
            await store.flush("bj-quiet")
            assert len(await store.lines("bj-quiet")) == 1
            store.add(a_line("bj-calm", 1))
            await until(lambda: store.lines("bj-calm"))
            await store.flush()
            scope.cancel()


async def test_samples_and_alerts_are_kept(store: Store) -> None:
    samples = [
        Sample(
            container_id="bj-1",
            timestamp=float(at),
            cpu_percent=1.5,
            memory_mb=2.0,
            uptime_seconds=at,
            network_rx_bytes=2**40,
        )
        for at in range(1, 6)
    ]
    alerts = [
        Alert(container_id="bj-1", timestamp=1.0, kind="cpu", message="hot"),
        Alert(container_id="bj-2", timestamp=2.0, kind="cpu", message="hot", over=True),
    ]
    store.add(*samples, *alerts)
    await store.flush()
    assert await store.samples("bj-1", after=2.0, limit=2) == samples[2:4]
    assert await store.alerts() == alerts[::-1]
    assert await store.alerts("bj-1") == alerts[:1]


async def test_what_does_not_fit_is_counted_and_nobody_waits(url: str) -> None:
    async with Store(url, buffer_items=100) as store:
        store.add(*[a_line("bj-1", number) for number in range(1, 151)])
        assert store.dropped == 50
        await store.flush()
        store.add(a_line("bj-1", 151))
        await store.flush()
        assert [line.number for line in await store.lines("bj-1")] == [*range(1, 101), 151]
    async with Store(url, buffer_bytes=10_000) as store:
        store.add(a_line("bj-2", 1, "x" * 9_000), a_line("bj-2", 2, "x" * 9_000))
        assert store.dropped == 1


async def test_an_item_that_the_database_refuses_is_counted_and_the_others_are_written(store: Store) -> None:
    lines = [a_line("bj-1", number) for number in range(1, 101)]
    store.add(*lines[:50], a_line("bj-1", 2**70), *lines[50:])
    run = a_run()
    await store.begin(run)
    await store.flush()
    assert await store.lines("bj-1") == lines
    assert store.dropped == 1
    assert store.status == ""


async def test_what_was_handed_over_is_written_when_the_store_is_closed_even_by_a_cancellation(url: str) -> None:
    run = a_run()
    with anyio.CancelScope() as scope:
        async with Store(url) as store:
            await store.begin(run)
            store.add(a_line(run.id, 1))
            scope.cancel()
            await anyio.sleep_forever()
    async with Store(url) as store:
        assert len(await store.lines(run.id)) == 1


# --- claims, keys, images ----------------------------------------------------------------------

_CLAIMS = """
import anyio, json, sys
from belljar.protocol.records import RunRecord
from belljar.service.store.statements import Claim
from belljar.service.store.store import Store

async def main():
    name = sys.argv[2]
    async with Store(sys.argv[1]) as store:
        runs = [RunRecord(id=f"{name}-{n}", caller="ann", instance="i", created=1.0) for n in range(100)]
        print(json.dumps([await store.begin(run, Claim("ann", f"key{n}", name)) for n, run in enumerate(runs)]))

anyio.run(main)
"""


async def test_of_two_processes_exactly_one_gets_a_claim_and_the_other_is_told_whose_it_is(url: str) -> None:
    """Both begin with a store that is not there yet: its tables are made once, too."""
    line = [sys.executable, "-c", _CLAIMS, url]
    racers = [subprocess.Popen([*line, name], stdout=subprocess.PIPE) for name in ("a", "b")]
    told = [json.loads(racer.communicate(timeout=60)[0]) for racer in racers]
    assert told[0] == told[1]
    assert len(told[0]) == 100
    assert all(id == f"{fingerprint}-{number}" for number, (id, fingerprint) in enumerate(told[0]))
    async with Store(url) as store:
        recorded = {run.id for run in await store.runs(limit=1000)}
    assert recorded == {id for id, _ in told[0]}, "who does not get the key is not recorded, either"


async def test_a_claim_belongs_to_its_caller_and_is_there_together_with_its_run(store: Store) -> None:
    first, second, third = a_run(), a_run(), a_run()
    assert await store.owner("ann", "k") is None
    assert await store.begin(first, Claim("ann", "k", "f")) == (first.id, "f")
    assert await store.begin(second, Claim("ann", "k", "g")) == (first.id, "f")
    assert await store.begin(third, Claim("bob", "k", "g")) == (third.id, "g")
    assert await store.owner("ann", "k") == (first.id, "f")
    assert await store.owner("bob", "k") == (third.id, "g")
    assert await store.run(second.id) is None
    await store.release("ann", "k", first.id)
    assert await store.owner("ann", "k") is None
    assert await store.begin(second, Claim("ann", "k", "g")) == (second.id, "g")


async def test_a_claim_without_a_run_is_nobody_s_after_a_minute(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of an earlier version claimed keys before it recorded runs, and may have died in between."""
    first, second = a_run(), a_run()
    await store.write(lambda db: statements.claim_key(db, Claim("ann", "k", "f"), "bj-never"))
    assert await store.owner("ann", "k") is None
    assert await store.begin(first, Claim("ann", "k", "f")) == ("bj-never", "f")
    monkeypatch.setattr(statements, "_STALE_SECONDS", -1.0)
    assert await store.begin(second, Claim("ann", "k", "f")) == (second.id, "f")


async def test_keys_are_kept_and_revoked_once(store: Store) -> None:
    key = Key(
        id="k1",
        name="ci",
        digest="d" * 64,
        scopes=frozenset({"run", "read"}),
        created=1.0,
        expires=9.0,
        rate="1/minute",
    )
    await store.add_key(key)
    assert await store.keys() == [key]
    with pytest.raises(errors.InvalidRequest):
        await store.add_key(key)
    assert await store.revoke_key("k1")
    assert not await store.revoke_key("k1")
    assert not await store.revoke_key("k2")
    assert (await store.keys())[0].revoked is not None


async def test_an_image_is_kept_once_with_what_was_last_said_of_it(store: Store) -> None:
    await store.add_image("docker", "python:3", "sha256:a", {"size": 1})
    await store.add_image("docker", "python:3", "sha256:a", {"size": 2})
    await store.add_image("docker", "python:3", "sha256:b", {})
    found = {image["digest"]: image["facts"] for image in await store.images()}
    assert found == {"sha256:a": {"size": 2}, "sha256:b": {}}


# --- age ---------------------------------------------------------------------------------------


async def test_what_is_old_goes_with_all_that_belongs_to_it_and_what_is_under_way_stays(store: Store) -> None:
    old = [a_run(created=1000.0 + number, state="finished", ended=2000.0) for number in range(250)]
    open_runs = [a_run(created=1.0, state="running"), a_run(created=1.0)]
    young = a_run(state="failed", ended=time.time())
    async with anyio.create_task_group() as group:
        for run in (*old[1:], *open_runs, young):
            group.start_soon(store.begin, run)
    await store.begin(old[0], Claim("ann", "k", "f"))
    for run in (old[0], open_runs[0], young):
        store.add(
            a_line(run.id, 1), Sample(container_id=run.id, timestamp=1.0, cpu_percent=0, memory_mb=0, uptime_seconds=0)
        )
    session = LogLine(container_id="session", number=1, timestamp=5.0, stream="stdout", message="x")
    store.add(session, Alert(container_id="session", timestamp=5.0, kind="cpu", message="x"))
    await store.flush()
    gone = await store.prune(86400)
    assert gone == {"runs": 250, "logs": 2, "samples": 1, "alerts": 1, "claims": 1, "outbox": 0}
    assert {run.id for run in await store.runs()} == {run.id for run in (*open_runs, young)}
    assert await store.lines(open_runs[0].id) and await store.lines(young.id)
    assert set((await store.prune(86400)).values()) == {0}


async def test_the_newest_so_many_stay_however_old(store: Store) -> None:
    for number in range(10):
        await store.begin(a_run(created=float(number), state="finished", ended=float(number)))
    assert (await store.prune(60, keep=20))["runs"] == 0
    assert (await store.prune(60, keep=3))["runs"] == 7
    assert [run.created for run in await store.runs()] == [9, 8, 7]


# --- tables ------------------------------------------------------------------------------------


async def test_the_migrations_make_the_tables_that_the_code_expects(store: Store) -> None:
    differences = await store.database.read(
        lambda db: compare_metadata(MigrationContext.configure(db), tables.metadata)
    )
    assert differences == []
    folder = Path(migrate.__file__).parent / "migrations"
    assert ScriptDirectory(str(folder)).get_heads() == [tables.HEAD]


async def test_a_store_of_a_newer_belljar_is_left_alone(url: str) -> None:
    async with Store(url) as store:
        await store.write(lambda db: db.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'") and None)
    with pytest.raises(errors.NotAvailable, match="newer Belljar"):
        async with Store(url):
            pass


@pytest.mark.parametrize("wrong", ["", "records.db", "mysql://x/y", "sqlite://", "sqlite:///:memory:"])
def test_an_address_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="no address"):
        Store(wrong)
