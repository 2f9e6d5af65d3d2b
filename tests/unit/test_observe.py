"""The figures: for Prometheus and each second. Boxes are scripted; everything else is real."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families

import belljar
from belljar.backends.containers.engine_stats import usage_of
from belljar.backends.fake import Fake, FakeProcess
from belljar.core.request import Limits
from belljar.core.result import Measurable, Result, Status, Usage
from belljar.core.values import MIB
from belljar.engine.engine import Engine
from belljar.host import procfs
from belljar.host.cgroups import Group
from belljar.protocol.records import Alert, RunRecord, Sample
from belljar.service.telemetry.metrics import RECENT, Metrics
from belljar.service.telemetry.sampler import Sampler

# --- Prometheus ---


def record(
    status: Status = Status.SUCCESS, *, language: str = "python", backend: str = "wasm", **more: Any
) -> RunRecord:
    result = Result(status=status, duration_ms=7, startup_ms=3, container_id="bj-1", **more)
    return RunRecord(
        id="bj-1", caller="a", created=0, state="finished", language=language, backend=backend, result=result
    )


def values(metrics: Metrics) -> dict[str, dict[tuple[str, ...], float]]:
    """By name of the sample, then by the values of its labels."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for each in family.samples:
            labels = tuple(value for _, value in sorted(each.labels.items()))
            found.setdefault(each.name, {})[labels] = each.value
    return found


def test_each_end_is_counted_under_the_names_of_the_mission_by_language_and_backend() -> None:
    metrics = Metrics()
    for status in (Status.SUCCESS, Status.SUCCESS, Status.TIMEOUT, Status.OOM_KILLED):
        metrics.hear(record(status, fuel_consumed=2_000_000))
    metrics.hear(record(backend="native", language="bash"))
    pair, found = ("wasm", "python"), values(metrics)
    assert found["sandbox_executions_total"] == {pair: 4, ("native", "bash"): 1}
    assert found["sandbox_timeouts_total"][pair] == found["sandbox_oom_failures_total"][pair] == 1
    assert found["sandbox_execution_duration_ms_sum"][pair] == 28
    assert found["sandbox_startup_ms_count"][pair] == 4
    assert found["sandbox_fuel_consumed_sum"][pair] == 8_000_000
    assert found["sandbox_fuel_consumed_count"][("native", "bash")] == 0
    assert found["sandbox_success_rate"] == {pair: 0.5, ("native", "bash"): 1}
    assert found["sandbox_outcomes_total"] == {("success",): 3, ("timeout",): 1, ("oom_killed",): 1}


def test_runs_are_shown_in_seconds_and_bytes_beside_the_names_of_the_mission() -> None:
    metrics = Metrics()
    metrics.hear(record(cpu_ms=1500, memory_used_mb=64))
    metrics.waited(0.25)
    pair, found = ("wasm", "python"), values(metrics)
    assert found["sandbox_execution_duration_seconds_sum"][pair] == 0.007
    assert found["sandbox_execution_duration_seconds_bucket"]["wasm", "python", "0.005"] == 0
    assert found["sandbox_execution_duration_seconds_bucket"]["wasm", "python", "0.01"] == 1
    assert found["sandbox_execution_duration_seconds_bucket"]["wasm", "python", "+Inf"] == 1
    assert found["sandbox_startup_seconds_sum"][pair] == 0.003
    assert found["sandbox_guest_cpu_seconds_total"][pair] == 1.5
    assert found["sandbox_guest_memory_peak_bytes_sum"][pair] == 64 * MIB
    assert found["sandbox_queue_wait_seconds_sum"][()] == 0.25


def test_what_guests_use_now_and_what_flowed_is_the_sum_over_open_sandboxes() -> None:
    def sample(id: str, rx: int | None, memory: float = 10, cpu: float = 50) -> Sample:
        return Sample(
            container_id=id, timestamp=1, cpu_percent=cpu, memory_mb=memory, uptime_seconds=1, network_rx_bytes=rx
        )

    metrics = Metrics()
    for each in (sample("a", 100), sample("b", None), sample("a", 250, memory=30), sample("a", 40)):
        metrics.guests.sampled(each)  # the last is of another command, which counts from zero
    found = values(metrics)
    assert found["sandbox_guest_network_receive_bytes_total"][()] == 290
    assert found["sandbox_guest_disk_written_bytes_total"][()] == 0
    assert (found["sandbox_guest_memory_bytes"][()], found["sandbox_guest_cpus"][()]) == (20 * MIB, 1)
    metrics.guests.closed("a")
    assert values(metrics)["sandbox_guest_memory_bytes"][()] == 10 * MIB


def test_no_caller_can_grow_the_number_of_series_of_http() -> None:
    metrics = Metrics()
    for number in range(50):
        metrics.answered(f"M{number}", "", 404, 0.001)
    found = values(metrics)
    assert found["sandbox_http_requests_total"] == {("other", "other", "404"): 50}
    assert len(metrics._http) == 0


def test_our_own_failure_is_an_execution_without_success_and_a_refusal_is_none() -> None:
    metrics = Metrics()
    metrics.hear(record().model_copy(update={"state": "failed", "result": None, "problem": {"kind": "start_failed"}}))
    metrics.hear(record().model_copy(update={"state": "refused", "result": None, "problem": {"kind": "policy_denied"}}))
    metrics.refused("busy")
    found = values(metrics)
    assert found["sandbox_executions_total"] == {("wasm", "python"): 1}
    assert found["sandbox_success_rate"] == {("wasm", "python"): 0}
    assert found["sandbox_refusals_total"] == {("policy_denied",): 1, ("busy",): 1}


def test_the_success_rate_is_of_the_last_runs_alone() -> None:
    metrics = Metrics()
    for _ in range(RECENT):
        metrics.hear(record(Status.ERROR))
    for _ in range(RECENT // 2):
        metrics.hear(record())
    assert values(metrics)["sandbox_success_rate"] == {("wasm", "python"): 0.5}
    for _ in range(RECENT):
        metrics.hear(record())
    assert values(metrics)["sandbox_success_rate"] == {("wasm", "python"): 1}
    assert f"last {RECENT} runs" in metrics.text().decode()


def test_no_caller_can_grow_the_number_of_series() -> None:
    metrics = Metrics()
    for number in range(100):
        metrics.hear(record(language=f"made-up-{number}", backend=f"b{number}"))
        metrics.hear(record(language=f"python3.{number}"))
        metrics.refused(f"kind{number}")
        metrics.alerted(f"kind{number}")
    for name in ("py", "PYTHON3", "", "js"):
        metrics.hear(record(language=name))
    found = values(metrics)
    assert found["sandbox_executions_total"] == {
        ("other", "other"): 100, ("wasm", "python"): 102, ("wasm", "command"): 1, ("wasm", "javascript"): 1,
    }  # fmt: skip
    assert found["sandbox_refusals_total"] == found["sandbox_alerts_total"] == {("other",): 100}


def test_what_is_asked_when_somebody_looks_never_fails_a_scrape() -> None:
    metrics = Metrics()
    state = {"running": 3}
    metrics.show("running", lambda: state["running"])
    metrics.show("store_up", lambda: True)
    metrics.show("bus_up", lambda: state["nothing"])
    found = values(metrics)
    assert (found["sandbox_running"][()], found["sandbox_store_up"][()], found["sandbox_waiting"][()]) == (3, 1, 0)
    assert found["sandbox_bus_up"][()] != found["sandbox_bus_up"][()]  # not a number
    state["running"] = 4
    assert values(metrics)["sandbox_running"][()] == 4


def test_two_of_them_do_not_meet() -> None:
    one, other = Metrics(), Metrics()
    one.hear(record())
    assert "sandbox_executions_total" not in values(other)


# --- what the kernel tells ---


def lay(folder: Path, **texts: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_a_group_of_version_2_tells_what_is_used_without_the_page_cache_of_files(tmp_path: Path) -> None:
    folder = lay(
        tmp_path / "box", cpu__stat="usage_usec 1500\nuser_usec 1000\n", memory__current="1000\n",
        memory__stat="anon 600\ninactive_file 250\nactive_file 50\nshmem 100\n",
        io__stat="8:0 rbytes=10 wbytes=20 rios=1 wios=1 dbytes=5 dios=0\n8:16 rbytes=1 wbytes=2\n",
    )  # fmt: skip
    group = Group(2, dict.fromkeys(("memory", "pids", "cpu", "io"), folder))
    assert group.figures() == Usage(1.5, 700, None, None, 11, 22)
    (folder / "io.stat").write_text("")  # it has read and written nothing
    assert group.figures()[4:] == (0, 0)


def test_a_group_of_version_1_tells_the_same_from_other_files(tmp_path: Path) -> None:
    dirs = {
        "memory": lay(
            tmp_path / "memory", memory__usage_in_bytes="1000\n",
            memory__stat="inactive_file 1\ntotal_inactive_file 250\ntotal_active_file 50\n",
        ),
        "cpuacct": lay(tmp_path / "cpuacct", cpuacct__usage="2500000\n"),
        "blkio": lay(
            tmp_path / "blkio",
            blkio__throttle__io_service_bytes="8:0 Read 10\n8:0 Write 20\n8:0 Total 30\n8:16 Read 1\nTotal 31\n",
        ),
    }  # fmt: skip
    assert Group(1, dirs).figures() == Usage(2.5, 700, None, None, 11, 20)
    del dirs["blkio"]
    assert Group(1, dirs).figures()[4:] == (None, None)


def test_a_group_that_is_gone_tells_nothing(tmp_path: Path) -> None:
    assert procfs.of_group(Group(2, {"memory": tmp_path / "gone"})) is None


def test_traffic_is_of_all_interfaces_but_loopback_and_never_that_of_our_own_namespace(tmp_path: Path) -> None:
    head = "Inter-|   Receive  |  Transmit\n face |bytes packets errs drop fifo frame compressed multicast|bytes …\n"
    rest = "    lo: 999 1 0 0 0 0 0 0 999 1 0 0 0 0 0 0\n  eth0:7 1 0 0 0 0 0 0 8 1 0 0 0 0 0 0\n"
    more = " eth1: 1 1 0 0 0 0 0 0 2 1 0 0 0 0 0 0\n"
    for name in ("7", "self"):
        lay(tmp_path / name / "ns", net="")
    lay(tmp_path / "7" / "net", dev=head + rest + more)
    assert procfs.network(7, str(tmp_path)) == (8, 10)
    assert procfs.network(8, str(tmp_path)) == (None, None)
    (tmp_path / "self" / "ns" / "net").unlink()
    (tmp_path / "self" / "ns" / "net").hardlink_to(tmp_path / "7" / "ns" / "net")
    assert procfs.network(7, str(tmp_path)) == (None, None)
    assert procfs.network(os.getpid()) == (None, None)


def test_our_own_process_tells_its_cpu_and_memory() -> None:
    seen = procfs.of_processes([os.getpid()])
    assert seen
    assert (seen.cpu_ms or 0) > 10
    assert (seen.memory or 0) > MIB
    assert procfs.of_processes([]) is None
    assert procfs.of_processes([2**22 + 1]) is None


# --- an engine's own words ---


def test_what_an_engine_tells_is_taken_where_it_makes_sense() -> None:
    stats = {
        "cpu_stats": {"cpu_usage": {"total_usage": 5_000_000}},
        "memory_stats": {"usage": 100, "stats": {"inactive_file": 30, "active_file": 10}},
        "networks": {"lo": {"rx_bytes": 9}, "eth0": {"rx_bytes": 1, "tx_bytes": 2}, "eth1": "nonsense"},
        "blkio_stats": {"io_service_bytes_recursive": [{"op": "Read", "value": 7}, {"op": "write", "value": 8}, 3]},
    }
    assert usage_of(stats) == Usage(5.0, 60, 1, 2, 7, 8)
    bare: dict[str, Any] = {"cpu_stats": {"cpu_usage": {"total_usage": 0}}, "memory_stats": {"usage": 1}}
    assert usage_of(bare) == Usage(0.0, 1)
    for nonsense in (None, [], "no", {}, {"cpu_stats": 3}, {**bare, "memory_stats": {"usage": "much"}}):
        assert usage_of(nonsense) is None


# --- the sampler ---

INTERVAL = 0.3
pytestmark = pytest.mark.anyio


class Told:
    def __init__(self) -> None:
        self.all: list[Sample | Alert] = []
        self.changed = anyio.Event()

    def __call__(self, item: Sample | Alert) -> None:
        self.all.append(item)
        self.changed.set()

    @property
    def samples(self) -> list[Sample]:
        return [item for item in self.all if isinstance(item, Sample)]

    @property
    def alerts(self) -> list[Alert]:
        return [item for item in self.all if isinstance(item, Alert)]

    async def until(self, condition: Callable[[], object]) -> None:
        with anyio.fail_after(10):
            while not condition():
                self.changed = anyio.Event()
                await self.changed.wait()


class Scripted:
    """A box that uses one CPU, and whatever else it is told."""

    def __init__(self, memory: int = 50 * MIB) -> None:
        self.memory = memory
        self.looks = 0
        self._began = time.monotonic()

    async def measure(self) -> Usage | None:
        self.looks += 1
        return Usage((time.monotonic() - self._began) * 1000, self.memory, 0, 0, 1, 2)


class Stuck(Scripted):
    async def measure(self) -> Usage | None:
        self.looks += 1
        await anyio.sleep(60)
        return None


class Broken(Scripted):
    async def measure(self) -> Usage | None:
        self.looks += 1
        raise OSError("gone")


async def test_a_box_has_a_sample_soon_and_then_one_each_interval() -> None:
    told = Told()
    async with Sampler(told) as sampler:  # each second
        sampler.watch("a", Scripted(), Limits(), False)
        assert sampler.latest("a") is None
        await told.until(lambda: len(told.samples) == 3)
        assert sampler.latest("a") == told.samples[-1]
    first, second, third = told.samples
    assert 0.15 < first.uptime_seconds < 0.6
    assert 0.9 < second.uptime_seconds < 1.5
    assert 1.9 < third.uptime_seconds < 2.5
    assert first.cpu_percent == pytest.approx(100, abs=30)
    assert second.cpu_percent == pytest.approx(100, abs=5)
    assert (first.memory_mb, first.network_rx_bytes, first.disk_write_bytes) == (50, 0, 2)


async def test_one_that_is_stuck_or_broken_is_logged_once_and_delays_nobody(caplog: pytest.LogCaptureFixture) -> None:
    told, stuck, broken = Told(), Stuck(), Broken()
    with caplog.at_level(logging.WARNING, "belljar"):
        async with Sampler(told, INTERVAL) as sampler:
            for name, box in (("stuck", stuck), ("broken", broken), ("well", Scripted()), ("mute", object())):
                sampler.watch(name, box, Limits(), False)
            await told.until(lambda: len(told.samples) >= 4)
    assert {sample.container_id for sample in told.samples} == {"well"}
    assert min(stuck.looks, broken.looks) >= 2
    said = [line.getMessage() for line in caplog.records]
    assert sorted(said) == ["broken cannot be measured: OSError: gone", "stuck cannot be measured: TimeoutError: "]


async def test_a_listener_that_fails_does_not_end_the_figures(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()

    def hear(item: Sample | Alert) -> None:
        told(item)
        raise ValueError("full")

    async with Sampler(hear, INTERVAL) as sampler:
        sampler.watch("a", Scripted(), Limits(), False)
        await told.until(lambda: len(told.samples) >= 2)


async def test_what_is_forgotten_is_not_told_and_its_alerts_are_over() -> None:
    told, box = Told(), Scripted(memory=99 * MIB)
    async with Sampler(told, INTERVAL) as sampler:
        sampler.watch("a", box, Limits(memory=100 * MIB), False)
        await told.until(lambda: told.alerts)
        sampler.forget("a")
        assert [(alert.kind, alert.over) for alert in told.alerts] == [("memory", False), ("memory", True)]
        looks, seen, other = box.looks, len(told.samples), Scripted()
        sampler.watch("b", other, Limits(), False)
        await told.until(lambda: other.looks >= 4)
        assert (box.looks, sampler.latest("a")) == (looks, None)
        assert all(sample.container_id == "b" for sample in told.samples[seen:])
        sampler.forget("never known")


async def test_runs_that_end_before_the_first_look_are_never_looked_at_and_cost_microseconds() -> None:
    told, box = Told(), Scripted()
    async with Sampler(told) as sampler:
        began = time.perf_counter()
        for number in range(10_000):
            sampler.watch(str(number), box, Limits(), False)
            sampler.forget(str(number))
        each = (time.perf_counter() - began) / 10_000
        await anyio.lowlevel.checkpoint()
    assert (box.looks, told.all) == (0, [])
    assert each < 200e-6  # some 10 on an idle machine; a wasm run takes 3000


async def test_a_real_run_is_measured_only_while_it_runs() -> None:
    told, found = Told(), []

    async def play(process: FakeProcess) -> None:
        process.allocate(99 * MIB)
        await told.until(lambda: told.alerts)
        process.spend(cpu_ms=50, rx=7, disk_write=3)
        await told.until(lambda: told.samples[-1].network_rx_bytes)

    async with Sampler(told, INTERVAL) as sampler:
        engine = Engine(extra=[Fake({"x": play})])
        async with belljar.AsyncSandbox(engine=engine, backend="fake", memory="100M") as sandbox:
            box = sandbox._lease.box  # type: ignore[attr-defined]
            assert isinstance(box, Measurable)
            assert await box.measure() is None
            sampler.watch(box.id, box, Limits(memory=100 * MIB), False)
            found.append(await sandbox.run("x"))
            assert await box.measure() is None
            await told.until(lambda: {(alert.kind, alert.over) for alert in told.alerts} >= {("memory", True)})
            sampler.forget(box.id)
    assert found[0].status == "success"
    assert (told.samples[-1].network_rx_bytes, told.samples[-1].disk_write_bytes) == (7, 3)
    assert ("network", False) in {(alert.kind, alert.over) for alert in told.alerts}
