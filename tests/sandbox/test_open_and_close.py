"""Sandboxes, sessions and streams, blocking and async: opened by a block, or by `open` and `close`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import anyio
import pytest

import belljar
from belljar.backends.fake import Fake
from belljar.core import errors
from belljar.engine.engine import Engine
from belljar.host.lifetime import LifetimeTask

pytestmark = [pytest.mark.anyio, pytest.mark.engine]
OPENED: dict[str, Callable[[Engine], Any]] = {
    "Sandbox": lambda engine: belljar.Sandbox(engine=engine, backend="native"),
    "Session": lambda engine: belljar.Session(engine=engine, backend="native"),
}
TWINS: dict[str, Any] = {"Sandbox": belljar.AsyncSandbox, "Session": belljar.AsyncSession}


@pytest.mark.parametrize("kind", OPENED)
def test_a_blocking_object_blocks_whether_it_has_a_name_before_its_block_or_not(engine: Engine, kind: str) -> None:
    opened = OPENED[kind](engine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "coroutine was never awaited"
        with opened as entered:
            assert entered is opened
            result = opened.run("print(1)")
    assert not inspect.isawaitable(result)
    assert result.stdout == "1\n"


@pytest.mark.parametrize("kind", OPENED)
def test_open_and_close_do_what_a_block_does(engine: Engine, kind: str) -> None:
    opened = getattr(belljar, kind).open(engine=engine, backend="native")
    assert opened.run("print(2)").stdout == "2\n"
    opened.close()
    opened.close()
    with pytest.raises(errors.InvalidRequest, match="not open"):
        opened.run("print(2)")
    with getattr(belljar, kind).open(engine=engine, backend="native") as again:
        assert again.run("print(3)").stdout == "3\n"
    with pytest.raises(errors.InvalidRequest, match="not open"):
        again.run("print(3)")


@pytest.mark.parametrize("kind", TWINS)
async def test_async_objects_are_opened_and_closed_in_any_order_and_by_any_task(engine: Engine, kind: str) -> None:
    one = await TWINS[kind].open(engine=engine, backend="native")
    two = await TWINS[kind].open(engine=engine, backend="native")
    assert (await one.run("print(1)")).stdout == "1\n"
    await one.close()
    with pytest.raises(errors.InvalidRequest, match="not open"):
        await one.run("print(1)")
    async with anyio.create_task_group() as tasks:
        assert (await two.run("print(2)")).stdout == "2\n"
        tasks.start_soon(two.close)
    async with await TWINS[kind].open(engine=engine, backend="native") as three:
        assert (await three.run("print(3)")).stdout == "3\n"
    await three.close()


@pytest.mark.parametrize("kind", OPENED)
async def test_what_is_open_cannot_be_opened_again(engine: Engine, kind: str) -> None:
    opened, twin = OPENED[kind](engine), TWINS[kind](engine=engine, backend="native")
    with opened, pytest.raises(errors.InvalidRequest, match="already open"), opened:
        pass
    async with twin:
        with pytest.raises(errors.InvalidRequest, match="already open"):
            await twin.__aenter__()
        with pytest.raises(errors.InvalidRequest, match="already open"):
            await twin


async def test_an_object_that_could_not_be_opened_says_why_and_can_be_tried_again(engine: Engine) -> None:
    for _ in range(2):
        with pytest.raises(errors.BelljarError, match="no-such-backend"):
            await belljar.AsyncSandbox.open(engine=engine, backend="no-such-backend")
    box = belljar.AsyncSandbox(engine=engine, backend="no-such-backend")
    for _ in range(2):
        with pytest.raises(errors.BelljarError, match="no-such-backend"):
            await box


async def test_a_context_in_a_task_of_its_own_is_left_when_its_opener_is_cancelled() -> None:
    told: list[str] = []

    class Slow:
        async def __aenter__(self) -> None:
            told.append("entering")
            try:
                await anyio.sleep(60)
            finally:
                told.append("given up")

        async def __aexit__(self, *error: object) -> None:
            told.append("left")

    with anyio.move_on_after(0.05) as scope:
        await LifetimeTask(Slow()).open()
    assert scope.cancelled_caught
    assert told == ["entering", "given up"]


async def test_what_goes_wrong_in_an_open_context_is_raised_when_it_is_closed() -> None:
    class Broken:
        async def __aenter__(self) -> None:
            pass

        async def __aexit__(self, *error: object) -> None:
            raise ValueError("on the way out")

    task = LifetimeTask(Broken())
    await task.open()
    with pytest.raises(ValueError, match="on the way out"):
        await task.close()
    await task.close()


# --- streams ---


def test_a_blocking_stream_tells_events_as_they_come_and_then_has_the_result() -> None:
    with belljar.stream("for i in range(3): print(i)", backend="native") as run:
        assert run.result is None
        events = list(run)
    assert "".join(event.text for event in events if event.kind == "stdout") == "0\n1\n2\n"
    assert run.result is not None and run.result.ok and events[-1].result == run.result


def test_a_blocking_stream_can_be_cancelled_or_left() -> None:
    endless = "import time\nwhile True: print('on', flush=True); time.sleep(0.01)"
    with belljar.stream(endless, backend="native", timeout=60) as run:
        for event in run:
            if event.kind == "stdout":
                run.cancel()
    assert run.result is not None and run.result.status == "aborted"
    with belljar.stream(endless, backend="native", timeout=60) as left:
        next(iter(left))
    assert left.result is None


# --- branches ---


def test_a_branch_of_a_blocking_session_is_open_at_once() -> None:
    with belljar.Session(backend="wasm") as session:
        session.run("x = 1")
        branch = session.fork()
        session.run("x = 2")
        assert branch.run("x").results == ({"text/plain": "1"},)
        branch.close()
        with session.fork() as again:
            assert again.run("x").results == ({"text/plain": "2"},)


async def test_a_branch_of_an_async_session_is_opened_by_await_or_by_its_block() -> None:
    session = await belljar.AsyncSession.open(backend="wasm")
    await session.run("x = 1")
    branch = await session.fork()
    assert (await branch.run("x")).results == ({"text/plain": "1"},)
    late = session.fork()
    await session.close()
    await branch.close()
    with pytest.raises(errors.InvalidRequest, match="not open"):
        await late


def test_the_blocking_api_in_a_callback_is_refused_instead_of_waiting_for_itself() -> None:
    told: list[errors.InvalidRequest] = []

    def hear(text: str) -> None:
        for attempt in (lambda: belljar.run("1"), lambda: belljar.Sandbox.open(backend=Fake({}))):
            with pytest.raises(errors.InvalidRequest, match="from a callback") as refused:
                attempt()
            told.append(refused.value)

    assert belljar.run("print(1)", backend="native", on_stdout=hear).ok
    assert len(told) >= 2
