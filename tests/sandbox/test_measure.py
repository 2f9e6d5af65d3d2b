"""What real sandboxes say of themselves while they run: with and without control groups, in containers, in wasm."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

import belljar
from belljar.backends.base import Box
from belljar.backends.native.backend import Native
from belljar.backends.wasm import store as wasm_store
from belljar.backends.wasm.backend import Wasm
from belljar.core import errors
from belljar.core.capabilities import Capabilities
from belljar.core.request import Limits
from belljar.core.result import Measurable, Usage
from belljar.core.values import MIB
from belljar.engine.backends import Backends
from belljar.engine.engine import Engine
from belljar.host import cgroups
from belljar.protocol.records import Alert, Sample
from belljar.service.telemetry.sampler import Sampler
from engines import FLAVOURS, backend_of, engines

pytestmark = [pytest.mark.anyio, pytest.mark.engine]
# Uses a CPU and 60 MB, and writes once it has both.
BUSY = "held = bytearray(60 * 2**20)\nprint('up', flush=True)\nwhile True: pass"
IDLE = "import time\nprint('up', flush=True)\ntime.sleep(60)"
READING = "open('/usr/lib/os-release').read()\n" + IDLE


@asynccontextmanager
async def running(engine: Engine, code: str, **options: Any) -> AsyncIterator[Box]:
    """A box in which this runs and has said so; it is ended afterwards."""
    up = anyio.Event()
    async with belljar.AsyncSandbox(engine=engine, backend=engine.settings.backend, **options) as sandbox:
        box: Box = sandbox._lease.box  # type: ignore[attr-defined]
        assert isinstance(box, Measurable)
        assert await box.measure() is None  # nothing runs
        cancel = belljar.Cancel()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_run, sandbox, code, cancel, up)
            with anyio.fail_after(60):
                await up.wait()
            try:
                yield box
            finally:
                cancel.cancel()
        assert await box.measure() is None  # nothing runs any more


async def _run(sandbox: belljar.AsyncSandbox, code: str, cancel: belljar.Cancel, up: anyio.Event) -> None:
    await sandbox.run(code, on_stdout=lambda _: up.set(), cancel=cancel)


async def figures(box: Box, wanted: Callable[[Usage], object] = lambda _: True) -> Usage:
    """The first that are as wanted, within seconds."""
    assert isinstance(box, Measurable)
    found: Usage | None = None
    with anyio.move_on_after(15):
        while not ((found := await box.measure()) and wanted(found)):
            await anyio.sleep(0.02)
    assert found
    assert wanted(found), found
    return found


async def check(engine: Engine, **options: Any) -> Usage:
    """Whatever the backend: CPU and memory of the guest are about right, and counters only grow."""
    async with running(engine, BUSY, **options) as box:
        first = await figures(box)
        began = time.monotonic()
        then = await figures(box, lambda seen: (seen.cpu_ms or 0) > (first.cpu_ms or 0) + 200)
        assert (then.cpu_ms or 0) - (first.cpu_ms or 0) < (time.monotonic() - began) * 1000 * 1.2 + 50
        assert 55 * MIB < (then.memory or 0) < 130 * MIB, then
        assert (then.disk_read or 0) >= (first.disk_read or 0)
    return then


# --- native ---


def native_engine(state_dir: Path, **options: Any) -> Engine:
    from belljar.settings import load

    settings = load(state_dir=str(state_dir), backend="native")
    backend = Native(state_dir, first_uid=settings.user_uid, path=settings.path, **options)
    return Engine(settings, extra=[backend])


@pytest.mark.parametrize("grouped", [True, False])
async def test_a_native_box_tells_its_cpu_memory_disk_and_that_it_has_no_network(
    state_dir: Path, grouped: bool
) -> None:
    seen = await check(native_engine(state_dir, use_cgroups=grouped), memory="256M")
    assert (seen.rx, seen.tx) == (0, 0)
    if Path("/proc/self/io").stat().st_uid == 0:
        assert seen.disk_read is not None
        assert seen.disk_write == 0


@pytest.mark.parametrize("grouped", [True, False])
async def test_files_in_memory_count_and_cpu_of_children_that_have_ended_too(state_dir: Path, grouped: bool) -> None:
    code = (
        "import subprocess, sys, time\n"
        "open('/tmp/a', 'wb').write(bytes(50 * 2**20))\n"
        "subprocess.run([sys.executable, '-c', 'import time\\nwhile time.process_time() < 0.3: pass'])\n"
        "print('up', flush=True)\ntime.sleep(60)"
    )
    async with running(native_engine(state_dir, use_cgroups=grouped), code, memory="256M") as box:
        seen = await figures(box)
    assert (seen.cpu_ms or 0) >= 290
    assert 50 * MIB < (seen.memory or 0) < 100 * MIB


async def test_the_figures_of_two_boxes_are_their_own(state_dir: Path) -> None:
    engine = native_engine(state_dir)
    async with running(engine, BUSY, memory="256M") as busy, running(engine, IDLE, memory="256M") as idle:
        await figures(busy, lambda seen: (seen.cpu_ms or 0) > 500)
        seen = await figures(idle)
    assert (seen.cpu_ms or 0) < 300
    assert (seen.memory or 0) < 40 * MIB


async def test_what_goes_through_the_proxy_is_not_called_no_traffic(state_dir: Path) -> None:
    async with running(native_engine(state_dir), IDLE, net=["example.org"]) as box:
        seen = await figures(box)
    assert (seen.rx, seen.tx) == (None, None)


# --- wasm ---


async def _no_jail() -> Capabilities:
    return Capabilities(backend="native", available=False, why_not="no jail on this machine")


@pytest.fixture(params=["jailed", "plain"])
def wasm(request: pytest.FixtureRequest, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Any:
    store = wasm_store.CompiledStore.of(engine.settings.cache_dir)
    try:
        store.check()
    except errors.NotAvailable as error:
        pytest.skip(f"{error}: run `belljar setup wasm`, as `make test` does")
    native = Backends(engine.settings).native()
    if request.param == "plain":
        monkeypatch.setattr(native, "probe", _no_jail)
    backend = Wasm(native, store)
    settings = engine.settings.model_copy(update={"backend": "wasm"})
    yield Engine(settings, extra=[backend]), request.param
    backend.close()


async def test_a_wasm_box_tells_what_its_guest_uses_and_not_what_earlier_guests_did(wasm: tuple[Engine, str]) -> None:
    engine, kind = wasm
    seen = await check(engine, memory="256M")
    assert (seen.rx, seen.tx) == ((0, 0) if kind == "jailed" else (None, None))
    async with running(engine, IDLE, memory="256M") as box:
        first = await figures(box)
        assert first.cpu_ms == 0
        assert (first.memory or 0) < 45 * MIB
        assert first.disk_write in (0, None)


# --- containers ---


@pytest.fixture(params=FLAVOURS)
def containers(request: pytest.FixtureRequest) -> Engine:
    return engines().engine(request.param)


@pytest.mark.containers
async def test_a_container_tells_what_it_uses(containers: Engine) -> None:
    assert backend_of(containers)
    seen = await check(containers, memory="256M", timeout=120)
    assert (seen.rx, seen.tx) == (0, 0)


@pytest.mark.containers
async def test_where_the_group_cannot_be_seen_the_engine_is_asked(
    containers: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "group_of", lambda *_: None)
    seen = await check(containers, memory="256M", timeout=120)
    assert seen.rx in (0, None)


# --- each second ---


async def test_a_run_over_nine_tenths_of_its_memory_is_told_while_it_runs(state_dir: Path) -> None:
    heard: list[Sample | Alert] = []
    async with (
        Sampler(heard.append, 0.5) as sampler,
        running(native_engine(state_dir), BUSY, memory="70M") as box,
    ):
        sampler.watch(box.id, box, Limits(memory=70 * MIB), False)
        with anyio.fail_after(20):
            while not any(isinstance(item, Alert) for item in heard) or len(heard) < 4:
                await anyio.sleep(0.02)
        latest = sampler.latest(box.id)
        sampler.forget(box.id)
    assert latest
    assert latest.cpu_percent > 10  # of one CPU, on a machine that may be busy
    assert [item.kind for item in heard if isinstance(item, Alert)] == ["memory", "memory"]  # raised, and over


def test_every_backend_of_linux_can_be_measured() -> None:
    from belljar.backends.containers.box import DockerBox
    from belljar.backends.fake import FakeBox
    from belljar.backends.native.box import NativeBox
    from belljar.backends.wasm.box import WasmBox

    assert all(issubclass(box, Measurable) for box in (NativeBox, WasmBox, DockerBox, FakeBox))
