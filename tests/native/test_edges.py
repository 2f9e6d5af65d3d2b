"""The edges where a tool shows its manners: odd streams, odd calls, forks, signals, hostile conversations."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import belljar
from belljar.core import errors
from belljar.engine.engine import Engine
from belljar.settings import load
from witness import Traces, eventually

BELLJAR = [sys.executable, "-m", "belljar"]


def shell(line: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, "BELLJAR": " ".join(BELLJAR), "COLUMNS": "200"}
    return subprocess.run(["bash", "-c", line], capture_output=True, timeout=120, env=env, check=False, **options)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("printf '\\xff' | $BELLJAR run -", 125),
        ("$BELLJAR run - <&-", 125),
        ("$BELLJAR run -c 'print(1)' >&-", 0),
        ("$BELLJAR run -c 'import sys; sys.exit(5)' 2>&-", 5),
        ("PYTHONIOENCODING=ascii $BELLJAR run --json -c 'print(\"\\u00e9\")'", 0),
        ("PYTHONIOENCODING=ascii $BELLJAR doctor", 0),
        ("$BELLJAR run --json --bogus", 125),
        ("$BELLJAR run --collect '*' --out /dev/null -c 1", 125),
        ("set -o pipefail; $BELLJAR run -c 'for i in range(10**6): print(i)' | head -1", 141),
        ("LANG=C LC_ALL=C $BELLJAR run -c 'print(\"\\u00e9\")'", 0),
        ("env -u HOME $BELLJAR run -c 'print(1)'", 0),
        ("$BELLJAR exec --memory 64G -- echo --json", 126),
    ],
)
def test_no_odd_stream_or_flag_ends_in_a_traceback(line: str, code: int) -> None:
    done = shell(line)
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    assert done.returncode == code, (done.stdout, done.stderr)
    if "--json --bogus" in line:
        assert json.loads(done.stdout)["error"]["kind"] == "invalid_request"
    if "echo --json" in line:
        assert not done.stdout, "the guest's own arguments are not ours"


def test_it_runs_from_a_folder_that_was_removed(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    assert shell(f"cd {gone} && rmdir {gone} && $BELLJAR run -c 'print(1)'").stdout == b"1\n"


def test_an_interrupted_run_still_tells_what_there_is_as_json(traces: Traces) -> None:
    line = [*BELLJAR, "exec", "--json", "--", "python3", "-c", "import time; time.sleep(60)", traces.word]
    process = subprocess.Popen(line, stdout=subprocess.PIPE)
    assert eventually(lambda: any(_is_inside(pid) for pid in traces.processes()))
    for _ in range(3):  # impatience changes nothing
        process.send_signal(signal.SIGINT)
    stdout, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert json.loads(stdout)["status"] == "aborted"


def _is_inside(pid: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
    except OSError:
        return False


def test_under_nohup_a_hangup_is_ignored() -> None:
    line = "nohup $BELLJAR run -c 'import time; time.sleep(1); print(7)' 2>/dev/null & sleep 0.6; kill -HUP $!; wait $!"
    assert shell(line).stdout == b"7\n"


def test_the_blocking_api_works_in_a_forked_child() -> None:
    code = (
        "import belljar, os\nbelljar.run('1')\npid = os.fork()\n"
        "if pid == 0:\n    print(belljar.run('print(2)').stdout, end='', flush=True)\n    os._exit(0)\n"
        "os.waitpid(pid, 0); print(belljar.run('print(3)').stdout, end='')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "2\n3\n", done.stderr


def test_the_blocking_api_inside_a_callback_is_refused_with_a_way_out() -> None:
    seen: list[BaseException] = []

    def callback(text: str) -> None:
        try:
            belljar.run("1")
        except errors.InvalidRequest as error:
            seen.append(error)

    belljar.run("print(1)", on_stdout=callback)
    assert "callback" in str(seen[0])


@pytest.mark.anyio
async def test_async_callbacks_are_awaited_and_a_box_can_be_cancelled(engine: Engine) -> None:
    heard: list[str] = []
    stop = belljar.Cancel()

    async def hear(text: str) -> None:
        heard.append(text)
        stop.cancel()

    async with belljar.AsyncSandbox(engine=engine) as box:
        result = await box.run("import time; print('x', flush=True); time.sleep(30)", on_stdout=hear, cancel=stop)
        assert (result.status, "".join(heard).strip()) == ("aborted", "x")
        assert (await box.run("print('still here')")).ok
        with pytest.raises(errors.InvalidRequest, match="already open"):
            async with box:
                pass


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"command": "ls -l"}, "command: must be a list"),
        ({"net": "example.org"}, "net: must be a list"),
        ({"net": 5}, "net: must be a list"),
        ({"files": ["a"]}, "files: a list names files below workspace"),
        ({"backend": 5}, "backend:"),
        ({"tiemout": 5}, "tiemout: there is no such option"),
        ({"memory": "lots"}, "memory:"),
        ({"timeout": float("nan")}, "timeout:"),
    ],
)
def test_bad_calls_name_the_field_and_what_to_write(options: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = options if "command" in options else {"code": "1", **options}
    with pytest.raises(errors.InvalidRequest) as caught:
        belljar.run(**arguments)
    assert words in str(caught.value)


def test_limits_and_paths_may_be_given_as_objects(open_folder: Path) -> None:
    (open_folder / "a.txt").write_text("hi")
    result = belljar.run(command=["cat", "a.txt"], workspace=open_folder, limits=belljar.Limits(timeout=5))
    assert result.stdout == "hi"


@pytest.mark.anyio
@pytest.mark.parametrize(
    "frame",
    ['{"stream": [], "text": "x"}', '{"stream": {}, "text": 1}', '{"display": 5}', '{"done": true}', "[" * 9999],
)
async def test_no_frame_of_a_guest_breaks_the_hosts_side_of_a_session(engine: Engine, frame: str) -> None:
    forge = (
        f"import os\nfor fd in range(3, 12):\n    try: os.write(fd, {frame!r}.encode() + b'\\n')\n"
        "    except OSError: pass"
    )
    async with belljar.AsyncSession(engine=engine, backend="native") as session:
        await session.run(forge, timeout=5)
        assert (await session.run("6 * 7", timeout=20)).results == ({"text/plain": "42"},)


@pytest.mark.anyio
async def test_a_turn_that_forks_speaks_once_and_leaves_no_mark(engine: Engine) -> None:
    async with belljar.AsyncSession(engine=engine, backend="native") as session:
        turn = await session.run(
            "import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint('who', pid == 0, flush=True)"
        )
        assert sorted(turn.stdout.splitlines()) == ["who False", "who True"]
        assert (await session.run("1")).results == ({"text/plain": "1"},)


@pytest.mark.anyio
async def test_a_child_killed_for_memory_is_told_and_the_guests_own_failure_is_kept(engine: Engine) -> None:
    code = (
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'b = bytearray(10**9)'])\nraise ValueError('mine')"
    )
    result = await belljar.arun(code, engine=engine, memory="100M")
    if result.guarantees and not result.guarantees.limits["memory"].startswith("cgroup v1"):
        pytest.skip("elsewhere the whole guest is killed, or the child is refused its memory")
    assert result.status == "error"
    assert result.error is not None
    assert "mine" in result.error.message
    assert any("killed for memory" in warning for warning in result.warnings)


@pytest.mark.skipif(os.geteuid() != 0, reason="SKIPPED: only root gives guests uids of their own")
def test_guests_share_the_account_that_an_administrator_names_and_live_beside_each_other(state_dir: Path) -> None:
    env = {"HOME": "/nowhere", "PATH": os.environ["PATH"], "SANDBOX_DEFAULT_USER_UID_GID": "4321:4321"}
    engine = Engine(load({**env, "BELLJAR_STATE_DIR": str(state_dir)}, Path("/nowhere")))
    with (
        belljar.Sandbox(backend="native", engine=engine) as one,
        belljar.Sandbox(backend="native", engine=engine) as two,
    ):
        results = [one.run("print(1)"), two.run("print(2)")]
    assert [result.stdout for result in results] == ["1\n", "2\n"]
    assert all(result.guarantees for result in results)
    told = [wall for result in results if result.guarantees for wall in result.guarantees.walls]
    assert told.count("the uid 4321, which all guests share") == 2


IGNORED = """
import belljar
code = '''
import signal
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.getsignal(signal.SIGHUP) is signal.SIG_DFL)
'''
print(belljar.run(code, backend="native").stdout, end="")
"""


def test_a_guest_hears_signals_that_its_caller_ignores_as_under_nohup_and_in_the_background() -> None:
    done = shell(f"trap '' INT HUP; exec {sys.executable} - <<'END'\n{IGNORED}\nEND")
    assert done.stdout.decode() == "True True\n", done.stderr.decode()
