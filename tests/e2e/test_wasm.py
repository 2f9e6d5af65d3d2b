"""What is special about the wasm backend: its cache, its workers, what a guest can and cannot see."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

import belljar
from belljar import errors
from belljar.backends import wasm_cache
from belljar.backends.native import create as create_native
from belljar.backends.wasm import Wasm
from belljar.engine import Engine
from conftest import Traces, eventually

pytestmark = pytest.mark.anyio


@pytest.fixture
def wasm(engine: Engine) -> Iterator[Wasm]:
    """The real backend with a state directory of its own; the compiled interpreter is shared (`belljar setup wasm`)."""
    try:
        wasm_cache.compiled(wasm_cache.folder(engine.settings))
    except errors.NotAvailable as error:
        pytest.skip(f"{error}: run `belljar setup wasm`, as `make test` does")
    backend = Wasm(create_native(engine.settings), wasm_cache.folder(engine.settings))
    yield backend
    backend.close()


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

        async def spy(self: Wasm, limits: belljar.Limits) -> object:
            busy.append(await start(self, limits))
            return busy[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Wasm, "_worker", spy)
            tasks.start_soon(victim)
            while not results:
                await anyio.sleep(0.01)
    assert results[0].status == "killed"
    assert (await belljar.arun("print('next')", backend=wasm)).stdout == "next\n"


async def test_commands_other_languages_and_grants_are_refused_by_name(wasm: Wasm, open_folder: Path) -> None:
    for options in ({"command": ["ls"]}, {"code": "ls", "language": "bash"}, {"code": "1", "workspace": open_folder}):
        with pytest.raises(errors.PolicyDenied, match="wasm"):
            await belljar.arun(backend=wasm, **options)  # type: ignore[arg-type]


def test_a_process_that_used_it_leaves_nothing(wasm: Wasm, traces: Traces) -> None:
    env = {**os.environ, "BELLJAR_STATE_DIR": str(traces.state_dir)}
    line = [sys.executable, "-m", "belljar", "run", "--backend", "wasm", "-c", "print(1)"]
    assert subprocess.run(line, env=env, capture_output=True, check=True, timeout=60).stdout == b"1\n"
    assert eventually(lambda: not traces.all()), traces.all()


async def test_until_it_is_compiled_it_says_how_and_nothing_waits(engine: Engine, tmp_path: Path) -> None:
    offer = await Wasm(create_native(engine.settings), tmp_path).probe()
    assert not offer.available
    assert offer.fix == "belljar setup wasm"


async def test_a_damaged_module_is_not_loaded(engine: Engine, tmp_path: Path) -> None:
    file = wasm_cache.path(tmp_path)
    file.write_bytes(b"half of it")
    file.with_suffix(".size").write_text("292312704")
    offer = await Wasm(create_native(engine.settings), tmp_path).probe()
    assert not offer.available
    assert "damaged" in offer.why_not


async def test_a_module_that_somebody_else_could_have_written_is_not_loaded(engine: Engine, tmp_path: Path) -> None:
    file = wasm_cache.path(tmp_path)
    file.write_bytes(b"native code of unknown origin")
    for mode in (0o666, 0o622):
        file.chmod(mode)
        offer = await Wasm(create_native(engine.settings), tmp_path).probe()
        assert not offer.available
        assert "somebody else" in offer.why_not


def test_versions_it_was_never_tried_with_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wasm_cache, "installed", lambda name: "99.0")
    with pytest.raises(errors.NotAvailable, match="never tried"):
        wasm_cache.check_versions()
