"""The suite on the fake and on every backend that works here, and the suite itself on trial."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, get_args

import anyio
import anyio.lowlevel
import pytest

from belljar.backends.fake import Fake
from belljar.core import errors
from belljar.core.box_snapshot import BoxSnapshot
from belljar.core.capabilities import Capabilities, LanguageSupport
from belljar.core.plan import Plan
from belljar.core.process import Chunk, Feature, FileStat
from belljar.core.result import Result, Status
from belljar.engine.backends import NAMES
from belljar.engine.engine import Engine
from belljar.settings import load
from belljar.testing import conformance
from belljar.testing.conformance import Bench, Check, CheckVerdict
from engines import FLAVOURS, engines
from living_saboteurs import LIVING_SABOTEURS, LivingSaboteur
from saboteurs import SABOTEURS, Saboteur
from suites import SUITE_SECONDS, assert_passed, checked

pytestmark = pytest.mark.anyio
CHECKS = conformance.checks()
_HOLLOW_SECONDS = 2.0
_TRIALS_AT_ONCE = 20
BACKENDS = [name for name in NAMES if name not in ("docker", "podman")]


def named(check: Check) -> str:
    return check.name


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[Engine]:
    """One for all checks: each new engine would prove its backends again."""
    with tempfile.TemporaryDirectory(prefix="belljar-test-") as folder:
        Path(folder).chmod(0o711)
        yield Engine(load(state_dir=f"{folder}/state"))


# --- backends on trial ---


@cache
def on_the_fake() -> dict[str, tuple[CheckVerdict, int]]:
    """The verdict on each check, on a fake of its own, and how many boxes were open afterwards.

    Most of it is waiting, so they run at the same time; those that measure time, after the others.
    """
    found: dict[str, tuple[CheckVerdict, int]] = {}
    turns = anyio.CapacityLimiter(_TRIALS_AT_ONCE)

    async def judge(check: Check) -> None:
        async with turns:
            fake = Fake(conformance.scripts())
            [verdict] = await conformance.conform(fake, only=[check.name])
        found[check.name] = verdict, fake.open_boxes

    async def judge_all() -> None:
        for alone in (False, True):
            async with anyio.create_task_group() as tasks:
                for check in CHECKS:
                    if check.alone is alone:
                        tasks.start_soon(judge, check)

    anyio.run(judge_all)
    return found


@pytest.mark.parametrize("check", CHECKS, ids=named)
def test_the_fake_conforms(check: Check) -> None:
    verdict, open_boxes = on_the_fake()[check.name]
    assert_passed(verdict)
    assert open_boxes == 0


class Crowd(Fake):
    """Counts how many of its boxes are open at the same time."""

    most_at_once = 0

    @asynccontextmanager
    async def open(self, plan: Plan) -> AsyncIterator[Any]:
        async with super().open(plan) as box:
            self.most_at_once = max(self.most_at_once, self.open_boxes)
            yield box


class CodeOnly(Fake):
    """Like an interpreter without a system around it: python, and no programs, processes or signals."""

    async def probe(self) -> Capabilities:
        offer = await super().probe()
        return offer.model_copy(
            update={"commands": False, "processes": False, "living": None, "languages": frozenset({"python"})},
        )

    async def languages(self) -> tuple[LanguageSupport, ...]:
        return tuple(support for support in await super().languages() if support.name == "python")


async def test_a_backend_that_runs_only_code_is_held_to_all_that_code_can_show() -> None:
    """A check that starts a program without saying that it needs to is denied here, and fails."""
    verdicts = await conformance.conform(CodeOnly(conformance.scripts()))
    assert [(verdict.name, verdict.detail) for verdict in verdicts if verdict.status == "failed"] == []
    assert sum(verdict.status == "passed" for verdict in verdicts) >= 115
    assert {verdict.detail for verdict in verdicts if verdict.status == "skipped"} == {
        "fake runs code, not commands", "fake has no processes beside the guest", "fake cannot run bash here",
        "fake is no POSIX system to its guests", "fake cannot run javascript here", "fake cannot run typescript here",
        "fake has no python sessions", "fake does not limit cpus here", "fake cannot be granted a folder of the host",
        "fake cannot copy a session", "fake cannot count fuel or fix clock and seed", "fake has no living sandboxes",
    }  # fmt: skip


@pytest.mark.timeout(SUITE_SECONDS)
@pytest.mark.engine
@pytest.mark.containers
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("check", CHECKS, ids=named)
def test_a_container_engine_that_was_started_for_this_conforms(check: Check, flavour: str) -> None:
    engine = engines().engine(flavour)
    assert_passed(checked(engine.settings.backend, engine)[check.name])


@pytest.mark.timeout(SUITE_SECONDS)
@pytest.mark.engine
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("check", CHECKS, ids=named)
def test_a_backend_that_works_here_conforms(check: Check, backend: str, shared_engine: Engine) -> None:
    offer = anyio.run(shared_engine.capabilities, backend)
    if not offer.available:
        pytest.skip(f"NOTHING of {backend} was checked: {offer.why_not} (fix: {offer.fix})")
    assert_passed(checked(backend, shared_engine)[check.name])


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found |= {child} | descendants(child)
    return found


@pytest.mark.engine
async def test_after_runs_that_were_cancelled_and_crowded_no_process_of_native_is_left(shared_engine: Engine) -> None:
    offer = await shared_engine.capabilities("native")
    if not offer.available:
        pytest.skip(f"native: {offer.why_not}")
    before = descendants(os.getpid())
    verdicts = await conformance.conform("native", only=["cancel", "concurrency", "life"], engine=shared_engine)
    skipped = {verdict.detail for verdict in verdicts if verdict.status == "skipped"}
    assert skipped <= {"living sandboxes of native cannot be paused"}
    deadline = time.monotonic() + 10
    while (left := descendants(os.getpid()) - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == set()


# --- the suite on trial ---


@cache
def caught() -> dict[type[Saboteur | LivingSaboteur], list[CheckVerdict]]:
    """The verdicts on all of them, which run at the same time: they start nothing, and most of it is waiting."""
    found: dict[type[Saboteur | LivingSaboteur], list[CheckVerdict]] = {}

    async def judge(saboteur: type[Saboteur | LivingSaboteur]) -> None:
        found[saboteur] = await conformance.conform(saboteur(), only=saboteur.caught_by)

    async def judge_all() -> None:
        async with anyio.create_task_group() as tasks:
            for saboteur in (*SABOTEURS, *LIVING_SABOTEURS):
                tasks.start_soon(judge, saboteur)

    anyio.run(judge_all)
    return found


@pytest.mark.parametrize("saboteur", (*SABOTEURS, *LIVING_SABOTEURS), ids=lambda kind: kind.__name__)
def test_a_backend_that_breaks_the_contract_is_caught(saboteur: type[Saboteur | LivingSaboteur]) -> None:
    verdicts = caught()[saboteur]
    assert {verdict.name: verdict.status for verdict in verdicts} == dict.fromkeys(saboteur.caught_by, "failed")
    assert all(verdict.detail for verdict in verdicts)


class HollowProcess:
    """A process that does nothing, and ends when it is looked at."""

    pid = 0
    running = False
    labels: Mapping[str, str] = {}
    command = ""

    def __init__(self, answer: Result) -> None:
        self._answer = self.result = answer

    async def output(self, since: int = 0) -> AsyncIterator[Chunk]:
        for chunk in ():
            yield chunk

    def kept(self, since: int = 0) -> tuple[Chunk, ...]:
        return ()

    async def write(self, *_: object) -> None:
        return None

    close_stdin = resize = write

    async def signal(self, *_: object) -> bool:
        return True

    async def wait(self, *_: object) -> Result:
        return self._answer

    kill = wait


class HollowStream:
    """A connection on which nothing comes."""

    async def __aenter__(self) -> HollowStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def send(self, *_: object) -> None:
        return None

    async def receive(self, *_: object) -> bytes:
        raise anyio.EndOfStream

    async def send_eof(self) -> None:
        return None


class HollowFiles:
    """Files that take everything and have nothing."""

    async def write(self, *_: object, **__: object) -> None:
        return None

    unpack = upload = move = copy = remove = write

    async def make_dir(self, *_: object) -> bool:
        return True

    async def read(self, *_: object) -> bytes:
        return b""

    async def read_text(self, *_: object) -> str:
        return ""

    async def list(self, *_: object, **__: object) -> tuple[()]:
        return ()

    download = list

    async def stat(self, path: str) -> FileStat:
        return FileStat(path=path, kind="file")

    async def exists(self, *_: object) -> bool:
        return False

    @asynccontextmanager
    async def open(self, *_: object, **__: object) -> AsyncIterator[AsyncIterator[Any]]:
        yield HollowProcess(Result(status=Status.SUCCESS)).output()

    pack = watch = open


class HollowBox:
    """A sandbox, or a session, in which nothing ever happens."""

    paused = False
    ended = ""
    expires = None
    home = ""
    started: tuple[()] = ()
    labels: Mapping[str, str] = {}
    files = HollowFiles()

    def __init__(self, answer: Result) -> None:
        self._answer = answer

    async def __aenter__(self) -> HollowBox:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def __await__(self) -> Generator[Any, None, HollowBox]:
        yield from anyio.lowlevel.checkpoint().__await__()
        return self

    async def snapshot(self, *_: object, **__: object) -> BoxSnapshot:
        return BoxSnapshot(id=f"snap-{'0' * 16}", created=0.0)

    async def run(self, *_: object, **__: object) -> Result:
        return self._answer

    exec = run

    async def write(self, *_: object, **__: object) -> None:
        return None

    async def read(self, path: str) -> bytes:
        return b""

    async def list(self) -> tuple[()]:
        return ()

    async def start(self, *_: object, **__: object) -> HollowProcess:
        return HollowProcess(self._answer)

    def process(self, *_: object) -> HollowProcess:
        return HollowProcess(self._answer)

    async def processes(self) -> tuple[()]:
        return ()

    async def wait_for_port(self, *_: object, **__: object) -> None:
        return None

    pause = resume = close = wait_for_port

    async def dial(self, *_: object) -> HollowStream:
        return HollowStream()

    def extend(self, *_: object) -> None:
        return None

    def interrupt(self) -> bool:
        return False

    def interpreter(self, *_: object, **__: object) -> HollowBox:
        return self

    fork = interpreter

    async def checkpoint(self, *_: object) -> None:
        return None

    rollback = checkpoint


class HollowBench(Bench):
    """A bench on which every request, however wrong, gets one and the same answer."""

    answer: Result

    async def run(self, guest: object, **_: object) -> Result:
        return self.answer

    async def watch(self, guest: object, **_: object) -> Any:
        return self.answer, []

    def sandbox(self, **_: object) -> Any:
        return HollowBox(self.answer)

    session = sandbox


@cache
def can_fail() -> dict[str, bool | AttributeError]:
    """Whether each check fails where nothing ever happens, or what it asked for that is not even there."""
    found: dict[str, bool | AttributeError] = {}
    answers = [Result(status=Status.SUCCESS, exit_code=0), Result(status=Status.ERROR, exit_code=None)]
    turns = anyio.CapacityLimiter(_TRIALS_AT_ONCE)

    async def judge(check: Check) -> None:
        async with turns:
            try:
                found[check.name] = any([await fails_on(answer, check) for answer in answers])
            except AttributeError as error:
                found[check.name] = error

    async def judge_all() -> None:
        async with anyio.create_task_group() as tasks:
            for check in CHECKS:
                tasks.start_soon(judge, check)

    anyio.run(judge_all)
    return found


async def fails_on(answer: Result, check: Check) -> bool:
    mute = Fake({})  # for the few checks that reach past the bench: it knows no program
    offer: Capabilities = await mute.probe()
    bench = HollowBench(Engine(load(), extra=(mute,)), mute.name, offer, await mute.languages())
    bench.answer = answer
    try:
        with anyio.fail_after(_HOLLOW_SECONDS):  # one that waits for what never comes fails, too: see `_judge`
            await check.body(bench)
    except AttributeError:
        raise  # it asked what a hollow sandbox does not even have: that proves nothing
    except Exception:
        return True
    return False


@pytest.mark.parametrize("check", CHECKS, ids=named)
def test_every_check_can_fail(check: Check) -> None:
    assert can_fail()[check.name] is True


def test_the_contract_has_at_least_sixty_checks_and_covers_every_area() -> None:
    assert len(CHECKS) >= 60
    areas = {
        "streams", "stdin", "arguments", "environment", "working directory", "files in", "files out", "sandbox",
        "exit codes", "signals", "errors", "languages", "timeout", "memory", "processes", "disk", "cpu", "caps",
        "fuel", "checkpoints",
        "cancel", "concurrency", "state", "result", "figures", "network", "walls", "sessions",
        "living processes", "living output", "terminals", "ports", "living files", "transfer", "interpreters", "life",
        "machine", "living limits", "snapshots",
    }  # fmt: skip
    assert {check.area for check in CHECKS} == areas


async def test_verdicts_are_told_as_they_fall_and_returned_in_the_order_of_the_checks() -> None:
    told: list[CheckVerdict] = []
    verdicts = await conformance.conform(Fake(conformance.scripts()), only=["exit codes"], on_verdict=told.append)
    assert sorted(told) == sorted(verdicts)
    assert [verdict.name for verdict in verdicts] == [check.name for check in CHECKS if check.area == "exit codes"]
    assert [verdict.as_dict()["area"] for verdict in verdicts] == ["exit codes"] * 4


async def test_no_more_checks_run_at_once_than_was_said_and_beside_one_that_measures_none() -> None:
    fake = Crowd(conformance.scripts())
    await conformance.conform(fake, only=["exit codes", "stdin"], at_once=3)
    assert fake.most_at_once == 3
    fake = Crowd(conformance.scripts())
    await conformance.conform(fake, only=["timeout"], at_once=8)
    assert sum(check.alone for check in CHECKS if check.area == "timeout") == 3
    assert fake.most_at_once == 1


async def test_a_skip_names_the_capability_that_is_missing() -> None:
    verdicts = await conformance.conform(Fake(conformance.scripts()), only=["sessions", "cpu"])
    assert {verdict.status for verdict in verdicts} == {"skipped"}
    assert {verdict.detail for verdict in verdicts} == {"fake has no python sessions", "fake does not limit cpus here"}


@pytest.mark.parametrize("need", ["commands", "processes", "posix", "living", *get_args(Feature)])
async def test_a_need_is_lacking_only_where_the_capability_is(need: str) -> None:
    for fake, lacking in ((Fake({}), False), (CodeOnly({}), True)):
        bench = Bench(Engine(load(), extra=(fake,)), fake.name, await fake.probe(), await fake.languages())
        assert bool(bench.lacks(need)) is lacking


async def test_a_need_that_nobody_knows_is_a_mistake_of_the_check() -> None:
    fake = Fake({})
    bench = Bench(Engine(load(), extra=(fake,)), fake.name, await fake.probe(), await fake.languages())
    with pytest.raises(ValueError, match="'tea' is not something a check can need"):
        bench.lacks("tea")


async def test_a_check_or_area_that_does_not_exist_is_refused() -> None:
    with pytest.raises(errors.InvalidRequest, match="no check or area 'strems'"):
        await conformance.conform(Fake({}), only=["strems"])


async def test_a_backend_that_does_not_work_here_is_not_said_to_pass() -> None:
    class Absent(Fake):
        async def probe(self) -> Capabilities:
            return Capabilities(backend="fake", available=False, why_not="it is not there", fix="bring it")

    with pytest.raises(errors.NotAvailable, match="it is not there"):
        await conformance.conform(Absent({}))


async def test_a_failure_inside_a_task_group_is_told_by_its_cause() -> None:
    class Wrong(Saboteur):
        def result(self, result: Result) -> Result:
            raise errors.ExecutionFailed("the daemon went away")

    [verdict] = await conformance.conform(
        Wrong(), only=["eight runs at once mix neither output nor files of the same name"]
    )
    assert (verdict.status, verdict.detail) == ("failed", "ExecutionFailed: the daemon went away")
