"""What is special about the wasm backend: its workers, its profiles, what a guest can and cannot see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

import belljar
from belljar.backends.wasm.backend import Wasm
from belljar.core import errors
from belljar.core.plan import Plan
from belljar.engine.engine import Engine
from witness import Traces, descendants, eventually, give

pytestmark = pytest.mark.anyio
PNG = b"\x89PNG\r\n\x1a\n"
HIDDEN = "numpy = __import__('num' + 'py')"  # an import that the analysis cannot see, so no profile is chosen


# --- a run ---


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "import sys; print('|'.join(sys.argv[1:]))"),
        ("javascript", "console.log(process.argv.slice(2).join('|'))"),
        ("typescript", "const words: string[] = process.argv.slice(2); console.log(words.join('|'))"),
    ],
)
async def test_code_finds_its_arguments(wasm: Wasm, language: str, code: str) -> None:
    result = await belljar.arun(code, language=language, backend=wasm, args=["two words", "", "{'x'}"])
    assert result.stdout == "two words||{'x'}\n", result.stderr


async def test_every_run_is_a_fresh_interpreter_in_a_reused_worker(wasm: Wasm) -> None:
    first = await belljar.arun("import builtins; builtins.spy = 1; print('set')", backend=wasm)
    second = await belljar.arun("import builtins; print(hasattr(builtins, 'spy'))", backend=wasm)
    assert (first.stdout, second.stdout) == ("set\n", "False\n")
    assert sum(len(idle) for idle in wasm._idle.values()) == 1, "one worker served both"


async def test_numpy_is_in_the_runtime_and_what_is_not_is_named(wasm: Wasm) -> None:
    result = await belljar.arun("import numpy; print(int(numpy.arange(10).sum()))", backend=wasm)
    assert result.stdout == "45\n", result.stderr
    missing = await belljar.arun("import torch", backend=wasm)
    assert missing.error is not None
    assert missing.error.error_type == "MISSING_PACKAGE"
    assert "backend=native" in missing.error.suggestion


async def test_a_guest_that_computes_and_one_that_sleeps_both_end_in_time(wasm: Wasm) -> None:
    for code in ("while True: pass", "import time; time.sleep(60)"):
        result = await belljar.arun(f"print('before', flush=True)\n{code}", backend=wasm, timeout=1)
        assert (result.status, result.stdout) == ("timeout", "before\n")
        assert result.duration_ms < 20_000
    assert (await belljar.arun("print('next')", backend=wasm)).stdout == "next\n"


async def test_memory_is_limited_for_the_guest_and_the_worker_lives_on(wasm: Wasm) -> None:
    result = await belljar.arun("x = bytearray(300 * 2**20)", backend=wasm, memory="128M")
    assert result.status == "oom_killed"
    assert (await belljar.arun("print('next')", backend=wasm, memory="128M")).stdout == "next\n"


async def test_there_are_no_processes_no_threads_and_no_host_files(wasm: Wasm) -> None:
    code = (
        "import os, threading\n"
        "for attempt in (lambda: os.fork(), lambda: os.system('id'), lambda: open('/etc/passwd'),\n"
        "                lambda: threading.Thread(target=print).start(), lambda: os.listdir('/proc'),\n"
        "                lambda: open('/belljar/worker.py')):\n"
        "    try: attempt(); print('got through')\n"
        "    except (OSError, AttributeError, RuntimeError): pass\n"
        "print('done')"
    )
    assert (await belljar.arun(code, backend=wasm)).stdout == "done\n"


async def test_files_go_in_and_come_out_and_nothing_stays_for_the_next(wasm: Wasm) -> None:
    result = await belljar.arun(
        "import helper_module; open('out.bin', 'wb').write(helper_module.data()); open('/tmp/left', 'w')",
        backend=wasm, files={"helper_module.py": "def data(): return bytes(range(256))"}, collect=["*.bin"],
    )  # fmt: skip
    assert [file.content for file in result.files] == [bytes(range(256))], result.stderr
    code = "import os; print(sorted(os.listdir('.')), os.listdir('/tmp'))"
    assert (await belljar.arun(code, backend=wasm)).stdout == "['main.py'] []\n"


async def test_eight_guests_at_once_mix_nothing(wasm: Wasm) -> None:
    seen: dict[int, str] = {}

    async def one(number: int) -> None:
        seen[number] = (await belljar.arun(f"print({number} * 1000)", backend=wasm)).stdout

    async with anyio.create_task_group() as tasks:
        for number in range(8):
            tasks.start_soon(one, number)
    assert seen == {number: f"{number * 1000}\n" for number in range(8)}


async def test_a_worker_that_is_killed_costs_its_run_and_no_other(wasm: Wasm) -> None:
    async with anyio.create_task_group() as tasks:
        results: list[belljar.Result] = []

        async def victim() -> None:
            results.append(
                await belljar.arun("print('in', flush=True)\nwhile True: pass", backend=wasm, on_stdout=strike)
            )

        async def strike(text: str) -> None:
            for worker in busy:
                worker.kill()

        busy: list[object] = []
        start = Wasm._worker

        async def spy(self: Wasm, plan: Plan) -> object:
            busy.append(await start(self, plan))
            return busy[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Wasm, "_worker", spy)
            tasks.start_soon(victim)
            while not results:
                await anyio.sleep(0.01)
    assert results[0].status == "killed"
    assert (await belljar.arun("print('next')", backend=wasm)).stdout == "next\n"


async def test_commands_and_languages_it_lacks_are_refused_by_name(wasm: Wasm) -> None:
    for options in ({"command": ["ls"]}, {"code": "ls", "language": "bash"}):
        with pytest.raises(errors.PolicyDenied, match="wasm"):
            await belljar.arun(backend=wasm, **options)  # type: ignore[arg-type]


async def test_the_program_is_the_main_module_as_everywhere_else(wasm: Wasm) -> None:
    code = (
        "from __future__ import annotations\nimport pickle, typing, unittest\n"
        "class Part: pass\nclass Whole:\n    part: Part\n"
        "print(type(pickle.loads(pickle.dumps(Part()))).__name__, typing.get_type_hints(Whole)['part'].__name__)\n"
        "class Test(unittest.TestCase):\n    def test_nothing(self): pass\n"
        "print(unittest.main(exit=False).result.testsRun)"
    )
    result = await belljar.arun(code, backend=wasm)
    assert result.stdout == "Part Part\n1\n", result.stderr


async def test_a_limit_below_what_the_interpreter_needs_is_explained(wasm: Wasm) -> None:
    with pytest.raises(errors.BelljarError, match="memory"):
        await belljar.arun("print(1)", backend=wasm, memory="16M")


def test_a_process_that_used_it_leaves_nothing(wasm: Wasm, traces: Traces) -> None:
    env = {**os.environ, "BELLJAR_STATE_DIR": str(traces.state_dir)}
    line = [sys.executable, "-m", "belljar", "run", "--backend", "wasm", "-c", "print(1)"]
    assert subprocess.run(line, env=env, capture_output=True, check=True, timeout=60).stdout == b"1\n"
    assert eventually(lambda: not traces.all()), traces.all()


async def test_workers_that_make_room_for_others_leave_no_descriptor_and_no_process(wasm: Wasm, traces: Traces) -> None:
    await belljar.arun("print(1)", backend=wasm)
    strangers = descendants(os.getpid())
    wasm.close()
    open_before = len(os.listdir("/proc/self/fd"))
    for megabytes in range(64, 72):  # each limit is a kind of worker, and four idle ones are kept
        assert (await belljar.arun("print(1)", backend=wasm, memory=f"{megabytes}M")).ok
    wasm.close()
    assert eventually(lambda: not descendants(os.getpid()) - strangers, 5), "processes"
    assert eventually(lambda: not traces.all()), traces.all()
    assert len(os.listdir("/proc/self/fd")) <= open_before


# --- a granted folder ---


@pytest.mark.parametrize("owner", [0, 12345], ids=["root", "somebody"])
async def test_a_granted_folder_is_at_mnt_project_and_can_only_be_read(
    wasm: Wasm, open_folder: Path, owner: int
) -> None:
    (open_folder / "in.txt").write_text("theirs")
    (open_folder / "out").symlink_to("/etc/passwd")
    give(owner, open_folder, open_folder / "in.txt")
    code = (
        "import os\nprint(open('/mnt/project/in.txt').read(), open('in.txt').read())\n"
        "for attempt in (lambda: open('/mnt/project/in.txt', 'w'), lambda: open('/mnt/project/new', 'w'),\n"
        "                lambda: os.remove('/mnt/project/in.txt'), lambda: os.mkdir('/mnt/project/d'),\n"
        "                lambda: os.rename('in.txt', 'b'), lambda: os.symlink('in.txt', '/mnt/project/s'),\n"
        "                lambda: os.link('in.txt', '/tmp/l'), lambda: os.truncate('in.txt', 0),\n"
        "                lambda: os.utime('in.txt', (1, 1)), lambda: open('/mnt/project/out').read(),\n"
        "                lambda: open('/mnt/project/../../etc/passwd').read()):\n"
        "    try: attempt(); print('got through')\n"
        "    except OSError: pass"
    )
    before = (open_folder / "in.txt").stat().st_mtime_ns
    result = await belljar.arun(code, backend=wasm, workspace=open_folder)
    assert result.stdout == "theirs theirs\n", result.stderr
    assert sorted(os.listdir(open_folder)) == ["in.txt", "out"]
    assert (open_folder / "in.txt").stat().st_mtime_ns == before


@pytest.mark.parametrize("owner", [0, 12345], ids=["root", "somebody"])
async def test_a_folder_granted_for_writing_is_changed(wasm: Wasm, open_folder: Path, owner: int) -> None:
    (open_folder / "gone.txt").write_text("old")
    give(owner, open_folder, open_folder / "gone.txt")
    code = "import os; os.mkdir('d'); open('d/new.txt', 'w').write('n'); os.remove('/mnt/project/gone.txt')"
    result = await belljar.arun(code, backend=wasm, workspace=open_folder, write=True)
    assert result.ok, result.stderr
    assert [path.name for path in open_folder.iterdir()] == ["d"]
    assert (open_folder / "d/new.txt").read_text() == "n"


async def test_without_a_grant_there_is_no_project_not_even_after_a_run_that_had_one(
    wasm: Wasm, open_folder: Path
) -> None:
    (open_folder / "in.txt").write_text("theirs")
    assert (await belljar.arun("open('/mnt/project/in.txt')", backend=wasm, workspace=open_folder)).ok
    code = "import os; print(os.path.exists('/mnt/project'), os.path.exists('/mnt'), os.path.exists('/inputs'))"
    assert (await belljar.arun(code, backend=wasm)).stdout == "False False False\n"


# --- profiles ---


async def test_a_run_that_imports_numpy_finds_it_imported(wasm: Wasm) -> None:
    profiled = await belljar.arun("import numpy\nprint(int(numpy.arange(10).sum()))", backend=wasm)
    importing = await belljar.arun(f"{HIDDEN}\nprint(int(numpy.arange(10).sum()))", backend=wasm)
    assert profiled.stdout == importing.stdout == "45\n", profiled.stderr + importing.stderr
    assert profiled.fuel_consumed and importing.fuel_consumed
    assert profiled.fuel_consumed * 5 < importing.fuel_consumed
    named = await belljar.arun(f"{HIDDEN}\nprint(int(numpy.arange(10).sum()))", backend=wasm, profile="numpy")
    assert named.fuel_consumed and named.fuel_consumed * 5 < importing.fuel_consumed


async def test_what_a_run_does_to_a_profile_is_gone_with_it_and_randomness_is_not_part_of_it(wasm: Wasm) -> None:
    code = (
        "import numpy, pandas, random, sys\nprint(hasattr(numpy, 'spy'), 'spy' in sys.modules, numpy.float64(1) + 1)\n"
        "print(random.random(), numpy.random.rand())\n"
        "numpy.spy = 1; sys.modules['spy'] = sys; numpy.add = None; random.seed(1)"
    )
    runs = [(await belljar.arun(code, backend=wasm)).stdout.splitlines() for _ in range(3)]
    assert [run[0] for run in runs] == ["False False 2.0"] * 3
    numbers = [number for run in runs for number in run[1].split()]
    assert len(set(numbers)) == 6, "a profile's random state was made once, at set-up"


async def test_a_profile_that_does_not_exist_is_refused_with_those_that_do(wasm: Wasm) -> None:
    with pytest.raises(errors.PolicyDenied, match=r"no profile 'astrology', only: .*numpy"):
        await belljar.arun("1", backend=wasm, profile="astrology")


async def test_matplotlib_draws(wasm: Wasm) -> None:
    code = "import matplotlib.pyplot as plt\nplt.plot([1, 2, 3]); plt.title('t'); plt.savefig('p.png')"
    result = await belljar.arun(code, backend=wasm, env={"MPLBACKEND": "Agg"}, collect=["p.png"], timeout=60)
    assert [file.content[:8] for file in result.files] == [PNG], result.stderr


# --- without the native jail ---


async def test_without_the_jail_guests_run_in_plain_workers_and_the_guarantees_say_so(
    plain: Wasm, open_folder: Path
) -> None:
    result = await belljar.arun(
        "open('out.txt', 'w').write(open('in.txt').read()); print('in')",
        backend=plain, files={"in.txt": "given"}, collect=["out.txt"],
    )  # fmt: skip
    assert (result.stdout, [file.text for file in result.files]) == ("in\n", ["given"])
    assert result.guarantees is not None
    assert result.guarantees.isolation == "wasm"
    assert any("no jail on this machine" in line for line in result.guarantees.weaker)
    with pytest.raises(errors.PolicyDenied, match="isolation wasm is weaker than namespace"):
        await belljar.arun("1", backend=plain, isolation="namespace")
    (open_folder / "in.txt").write_text("theirs")
    granted = "print(open('/mnt/project/in.txt').read())\ntry: open('/mnt/project/new', 'w')\nexcept OSError: pass"
    assert (await belljar.arun(granted, backend=plain, workspace=open_folder)).stdout == "theirs\n"
    assert os.listdir(open_folder) == ["in.txt"]


async def test_limits_hold_in_a_plain_worker_and_nothing_is_left(
    plain: Wasm, open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(open_folder))
    before = descendants(os.getpid())
    for code, options, status in (
        ("while True: pass", {"timeout": 0.5}, "timeout"),
        ("import time; time.sleep(60)", {"timeout": 0.5}, "timeout"),
        ("x = bytearray(300 << 20)", {"memory": "128M"}, "oom_killed"),
        ("while True: print('x' * 100_000)", {"output": "10K"}, "output_limit"),
        ("while True: pass", {"fuel": 10_000_000}, "fuel_exhausted"),
    ):
        assert (await belljar.arun(code, backend=plain, **options)).status == status  # type: ignore[arg-type]
    async with belljar.AsyncSession(backend=plain) as session:
        await session.run("x = 1")
        async with session.fork() as branch:
            assert (await branch.run("x + 1")).results == ({"text/plain": "2"},)
    assert os.listdir(open_folder), "the workers' folders are here"
    plain.close()
    assert eventually(lambda: not os.listdir(open_folder)), os.listdir(open_folder)
    assert eventually(lambda: not descendants(os.getpid()) - before, 5)


async def test_a_kept_sandbox_does_not_find_the_full_disk_of_the_guest_before_it(engine: Engine) -> None:
    fill = "from pathlib import Path\nfor i in range(2000): Path(str(i)).write_bytes(bytes(4096))"  # slow to remove
    for _ in range(5):
        full = await belljar.arun(fill, backend="wasm", engine=engine, disk="4M")
        async with belljar.AsyncSandbox(backend="wasm", engine=engine, disk="4M") as box:
            result = await box.run("print(1)")
        assert (full.status, result.stdout) == ("disk_limit", "1\n")


async def test_a_guest_is_stopped_at_once_whatever_its_grace_and_its_capabilities_say_so(wasm: Wasm) -> None:
    assert (await wasm.probe()).grace is False
    code = "try:\n    while True: pass\nfinally: print('saved')"
    result = await belljar.arun(code, backend=wasm, timeout=0.5, grace=10)
    assert (result.status, result.stdout) == ("timeout", "") and result.duration_ms < 5000
