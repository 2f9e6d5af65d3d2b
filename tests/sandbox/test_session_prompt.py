"""What a prompt needs of a session: a turn that is interrupted, and names that a half-typed one may become."""

from __future__ import annotations

import anyio
import pytest

import belljar
from belljar.core.result import Event, Result
from belljar.engine.engine import Engine

pytestmark = pytest.mark.anyio
BEGUN = "print('begun', flush=True)\n"
WAITS = {
    "asleep": "import time\ntime.sleep(600)",
    "busy": "while True: pass",
    "waiting for a child": "import subprocess\nsubprocess.run(['sleep', '600'])",
    "deaf to exceptions": "while True:\n    try:\n        while True: pass\n    except Exception: pass",
}


async def interrupted(session: belljar.AsyncSession, code: str) -> Result:
    """Runs a turn, and interrupts it when it says that it has begun."""

    def hear(event: Event) -> None:
        if event.kind == "stdout" and "begun" in event.text:
            assert session.interrupt()

    with anyio.fail_after(60):
        return await session.run(code, on_event=hear)


async def test_a_turn_that_is_interrupted_ends_as_aborted_and_the_state_survives(engine: Engine) -> None:
    async with belljar.AsyncSession(engine=engine, backend="native", timeout=300) as session:
        await session.run("kept = 1")
        assert not session.interrupt(), "there is no turn to interrupt"
        for code in WAITS.values():
            cut = await interrupted(session, BEGUN + code)
            assert (cut.status, cut.exit_code, cut.stdout) == ("aborted", 130, "begun\n"), cut.stderr
            assert "KeyboardInterrupt" in cut.stderr and "session_agent" not in cut.stderr
            assert not session.ended
        assert (await session.run("kept")).results == ({"text/plain": "1"},)


async def test_a_turn_that_goes_on_in_spite_of_it_ends_its_session(engine: Engine) -> None:
    async with belljar.AsyncSession(engine=engine, backend="native", timeout=300) as session:
        deaf = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        cut = await interrupted(session, deaf + BEGUN + "while True: pass")
        assert cut.status == "aborted" and "aborted" in session.ended


async def test_a_turn_that_catches_the_interrupt_and_ends_well_is_a_success(engine: Engine) -> None:
    async with belljar.AsyncSession(engine=engine, backend="native", timeout=300) as session:
        code = f"import time\ntry:\n    {BEGUN}    time.sleep(600)\nexcept KeyboardInterrupt:\n    print('caught')"
        caught = await interrupted(session, code)
        assert (caught.status, caught.stdout) == ("success", "begun\ncaught\n"), caught.stderr


async def test_an_interrupt_that_comes_late_does_not_hit_the_next_turn(engine: Engine) -> None:
    async with belljar.AsyncSession(engine=engine, backend="native") as session:
        for number in range(30):
            said = await session.run(f"print({number}, flush=True)", on_event=lambda _: session.interrupt() and None)
            assert said.status in ("success", "aborted"), said.stderr
            assert (await session.run(f"{number}")).results == ({"text/plain": str(number)},)


COMPLETED = {
    "known_na": ("known_name",),
    "os.path.basen": ("basename",),
    "box.alp": ("alpha",),
    "box.inner.be": ("beta",),
    "Box.met": ("method",),
    "prin": ("print",),
    "box.lazy.": (),
    "nobody.x": (),
    "1 + known_na": (),
    "known_na\n": (),
}
SET_UP = """
import os
known_name = 1
class Box:
    beta = 2
    def method(self): pass
    @property
    def lazy(self): raise SystemExit("code was run")
    def __getattr__(self, name): raise SystemExit("code was run")
box = Box(); box.alpha = 3; box.inner = Box()
"""


@pytest.mark.parametrize("backend", ["native", "wasm"])
async def test_names_are_completed_by_what_the_session_has_and_no_code_of_it_runs(engine: Engine, backend: str) -> None:
    async with belljar.AsyncSession(engine=engine, backend=backend) as session:
        turns = [await session.run(SET_UP), await session.run("1")]
        assert all(turn.ok for turn in turns)
        for text, names in COMPLETED.items():
            assert await session.complete(text) == names, text
        assert (await session.run("_")).results == ({"text/plain": "1"},), "a completion is no turn"


async def test_what_a_hostile_guest_says_its_names_are_is_checked(engine: Engine) -> None:
    lies = "['good_name', 'good name', '\\x1b[2J', 'good_\\n', 5, None, 'good_' + 'x' * 1000] + ['good_a'] * 10**5"
    async with belljar.AsyncSession(engine=engine, backend="native") as session:
        assert (await session.run(f"import sys\nsys.modules['__main__'].part('names').names = lambda *a: {lies}")).ok
        said = await session.complete("good")
        assert set(said) == {"good_name", "good_a"} and len(said) <= 1000
        await session.run("sys.modules['__main__'].part('names').names = lambda *a: 1 / 0")
        assert await session.complete("good") == ()
        assert (await session.run("2 + 2")).results == ({"text/plain": "4"},)


def test_the_blocking_twin_completes_too_and_says_how_it_ended() -> None:
    with belljar.Session(backend="native") as session:
        session.run("word_of_ours = 1")
        assert session.complete("word_of") == ("word_of_ours",)
        assert session.ended == "" and not session.interrupt()
        session.run("import os; os._exit(3)")
        assert "exit code 3" in session.ended
