"""Stateful sessions on a real interpreter: what stays, what is shown, how a turn can go wrong."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import anyio
import pytest

import belljar
from belljar.core import errors
from belljar.engine.engine import Engine

pytestmark = pytest.mark.anyio


async def test_variables_imports_and_files_stay_and_the_last_expression_is_echoed(engine: Engine) -> None:
    async with belljar.AsyncSession(engine=engine) as session:
        assert (await session.run("import math\nx = 20")).results == ()
        await session.run("open('kept.txt', 'w').write('kept')")
        turn = await session.run("print('side'); math.floor(x + 1.5)")
        assert turn.results == ({"text/plain": "21"},)
        assert turn.stdout == "side\n"
        assert await session.read("kept.txt") == b"kept"
        assert [entry.path for entry in await session.list()] == ["kept.txt"]
        assert (await session.run("None")).results == ()


def test_the_blocking_twin_does_the_same() -> None:
    with belljar.Session() as s:
        s.run("x = 1")
        assert s.run("x + 1").results == ({"text/plain": "2"},)
        s.write("in.txt", "hello")
        assert s.run("open('in.txt').read()").results[0]["text/plain"] == "'hello'"


async def test_an_exception_is_a_result_with_the_guests_frames_only_and_the_session_lives_on(engine: Engine) -> None:
    async with belljar.AsyncSession(engine=engine) as session:
        await session.run("def f():\n    return 1 / 0")
        turn = await session.run("f()")
        assert turn.status == "error"
        assert turn.error is not None
        assert "ZeroDivisionError" in turn.error.message
        assert "session_agent" not in turn.stderr
        assert "return 1 / 0" in turn.stderr, "the source line of an earlier turn is shown"
        broken = await session.run("def (")
        assert broken.error is not None
        assert broken.error.error_type == "SYNTAX_ERROR"
        assert (await session.run("1")).ok


async def test_sys_exit_ends_the_turn_not_the_session(engine: Engine) -> None:
    async with belljar.AsyncSession(engine=engine) as session:
        turn = await session.run("import sys; sys.exit(3)")
        assert (turn.status, turn.exit_code) == ("error", 3)
        assert (await session.run("'alive'")).results == ({"text/plain": "'alive'"},)


async def test_a_turn_over_its_time_is_interrupted_and_the_state_survives(engine: Engine) -> None:
    async with belljar.AsyncSession(backend="native", engine=engine) as session:
        await session.run("x = 5")
        turn = await session.run("print('partial', flush=True)\nwhile True: pass", timeout=0.5)
        assert turn.status == "timeout"
        assert turn.stdout == "partial\n"
        assert (await session.run("x")).results == ({"text/plain": "5"},)


async def test_a_turn_that_ignores_the_bell_costs_the_session_and_says_so(engine: Engine) -> None:
    stubborn = "import signal; signal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass"
    async with belljar.AsyncSession(engine=engine) as session:
        assert (await session.run(stubborn, timeout=0.5)).status == "timeout"
        with pytest.raises(errors.ExecutionFailed, match="open a new one"):
            await session.run("1")


async def test_a_session_out_of_memory_says_so_and_is_over(engine: Engine) -> None:
    async with belljar.AsyncSession(backend="native", engine=engine, memory="64M") as session:
        turn = await session.run("x = bytearray(10**9)")
        assert turn.status == "oom_killed"
        with pytest.raises(errors.ExecutionFailed):
            await session.run("1")


async def test_output_of_child_processes_and_undecodable_bytes_are_seen(engine: Engine) -> None:
    async with belljar.AsyncSession(backend="native", engine=engine) as session:
        turn = await session.run("import os, subprocess\nsubprocess.run(['echo', 'child'])\nos.write(1, b'\\xff\\n')")
        assert turn.stdout == "child\n\ufffd\n"


async def test_output_over_the_limit_is_cut_and_flagged_and_the_next_turn_is_whole(engine: Engine) -> None:
    async with belljar.AsyncSession(engine=engine, output="10K") as session:
        turn = await session.run("print('x' * 50_000)")
        assert (turn.status, turn.truncated) == ("output_limit", True)
        assert (await session.run("print('ok')")).stdout == "ok\n"


async def test_rich_values_come_back_as_mime_bundles(engine: Engine) -> None:
    async with belljar.AsyncSession(engine=engine) as session:
        await session.run("class T:\n    def _repr_html_(self): return '<b>t</b>'\n    def __repr__(self): return 'T'")
        assert (await session.run("T()")).results == ({"text/plain": "T", "text/html": "<b>t</b>"},)
        assert (await session.run("{'a': [1, 2]}")).results[0]["application/json"] == {"a": [1, 2]}
        assert (await session.run("class Bad:\n    def __repr__(self): raise ValueError\nBad()")).ok


async def test_a_guest_that_writes_into_the_conversation_harms_only_itself(engine: Engine) -> None:
    forged = (
        "import os\nfor fd in range(3, 20):\n"
        "    try: os.write(fd, b'{\"done\": 99}\\nnot json\\n[1]\\n')\n    except OSError: pass"
    )
    async with belljar.AsyncSession(engine=engine) as session:
        await session.run(forged, timeout=2)
        assert (await session.run("6 * 7")).results == ({"text/plain": "42"},)


async def test_turns_are_taken_one_at_a_time_in_order(engine: Engine) -> None:
    async with belljar.AsyncSession(engine=engine) as session:
        await session.run("seen = []")
        async with anyio.create_task_group() as tasks:
            for number in range(10):
                tasks.start_soon(session.run, f"seen.append({number})")
        assert (await session.run("seen == list(range(10))")).results == ({"text/plain": "True"},)


async def test_two_sessions_share_nothing(engine: Engine) -> None:
    async with belljar.AsyncSession(engine=engine) as one, belljar.AsyncSession(engine=engine) as two:
        await one.run("x = 1; open('/tmp/mine', 'w').write('x')")
        assert (await two.run("'x' in globals(), __import__('os').path.exists('/tmp/mine')")).results == (
            {"text/plain": "(False, False)"},
        )


async def test_an_idle_session_ends_by_itself(engine: Engine) -> None:
    async with belljar.AsyncSession(engine=engine, idle=0.3) as session:
        assert (await session.run("1")).ok
        with anyio.fail_after(10):
            while not session._conversation.ended:
                await anyio.sleep(0.02)
        with pytest.raises(errors.ExecutionFailed, match="timeout"):
            await session.run("1")


async def test_a_session_outlives_the_limit_on_a_single_run_but_not_its_lifetime(engine: Engine) -> None:
    async with belljar.AsyncSession(engine=engine, lifetime=1.5, timeout=1) as session:
        assert (await session.run("1")).ok
        with anyio.fail_after(10):
            while not session._conversation.ended:
                await anyio.sleep(0.02)


def test_bad_options_name_the_field() -> None:
    with pytest.raises(errors.InvalidRequest, match="idle"):
        belljar.Session(idle=-1)
    with pytest.raises(errors.InvalidRequest, match="memory"):
        belljar.Session(memory="lots")


@pytest.fixture(scope="module")
def plotting() -> Iterator[str]:
    """A real environment with matplotlib, where an unprivileged uid can read it."""
    with tempfile.TemporaryDirectory(prefix="belljar-venv-") as folder:
        Path(folder).chmod(0o755)
        venv = Path(folder, "venv")
        ours = ["--without-pip"] if find_spec("pip") else []  # which takes longer to install than matplotlib
        system = os.geteuid() == 0 and os.path.exists("/usr/bin/python3")  # guests of root cannot read one at home
        subprocess.run(["/usr/bin/python3" if system else sys.executable, "-m", "venv", *ours, str(venv)], check=True)
        pip = ["pip", "--python", str(venv / "bin/python")] if ours else ["pip"]
        line = [sys.executable if ours else str(venv / "bin/python"), "-m", *pip, "install", "--quiet"]
        subprocess.run([*line, "--disable-pip-version-check", "matplotlib"], check=True, stderr=subprocess.DEVNULL)
        yield str(venv)


async def test_figures_of_matplotlib_come_back_as_png_without_the_guest_asking(engine: Engine, plotting: str) -> None:
    try:
        session = belljar.AsyncSession(engine=engine, packages=plotting, timeout=60)
        async with session:
            turn = await session.run("import matplotlib.pyplot as plt\nplt.plot([1, 2, 3]); plt.show(); None")
            assert turn.ok, turn.stderr
            assert turn.stderr == ""
            pictures = [base64.b64decode(bundle["image/png"]) for bundle in turn.results if "image/png" in bundle]
            assert [picture[:8] for picture in pictures] == [b"\x89PNG\r\n\x1a\n"]
            again = await session.run("1")
            assert again.results == ({"text/plain": "1"},), "a figure is shown once"
    except errors.PolicyDenied as refused:
        pytest.skip(f"no interpreter that the guest may read fits this environment: {refused}")


# --- figures of a single run ---

DRAW = """import matplotlib.pyplot as plt
plt.plot([1, 2, 3])
plt.show()
plt.plot([3, 2, 1])
print("drawn")
"""


def assert_two_figures(result: belljar.Result) -> None:
    assert result.ok and result.stdout == "drawn\n" and result.stderr == "", result.stderr
    assert [bundle["text/plain"] for bundle in result.results] == ["<figure 1>", "<figure 2>"]
    pictures = [base64.b64decode(bundle["image/png"]) for bundle in result.results]
    assert all(picture.startswith(b"\x89PNG\r\n\x1a\n") for picture in pictures)
    assert pictures[0] != pictures[1], "what was shown is not drawn on"


async def test_what_a_program_shows_and_what_it_leaves_open_are_among_its_results_on_native(
    engine: Engine, plotting: str
) -> None:
    try:
        told = list[str]()
        result = await belljar.arun(
            DRAW, engine=engine, backend="native", packages=plotting, timeout=60, collect=["**"],
            on_event=lambda event: told.append(event.text) if event.kind == "display" else None,
        )  # fmt: skip
    except errors.PolicyDenied as refused:
        pytest.skip(f"no interpreter that the guest may read fits this environment: {refused}")
    assert_two_figures(result)
    assert told == ["<figure 1>", "<figure 2>"]
    assert result.files == (), "they are no files of the guest's"
