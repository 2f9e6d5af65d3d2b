"""When an alert is raised, when it is over, and that a figure that swings is one alert."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.core.request import Limits
from belljar.core.values import MIB
from belljar.protocol.records import Alert, Sample
from belljar.service.telemetry.alerts import CALM_SECONDS, CPU_SECONDS, AlertMonitor

LIMITS = Limits(cpus=2, memory=100 * MIB)


def sample(second: float, cpu: float = 0, memory: float = 1, rx: int | None = 0, tx: int | None = 0) -> Sample:
    return Sample(
        container_id="bj-1", timestamp=1_000_000 + second, cpu_percent=cpu, memory_mb=memory, network_rx_bytes=rx,
        network_tx_bytes=tx, uptime_seconds=second,
    )  # fmt: skip


def watch(network_allowed: bool = False) -> AlertMonitor:
    return AlertMonitor("bj-1", LIMITS, network_allowed=network_allowed)


def told(watch: AlertMonitor, *samples: Sample) -> list[tuple[float, str, bool]]:
    """(second, kind, over) of every alert."""
    return [(each.uptime_seconds, alert.kind, alert.over) for each in samples for alert in watch.look(each)]


def test_a_cpu_at_its_limit_for_ten_seconds_is_one_alert() -> None:
    busy = [sample(second, cpu=199) for second in range(30)]
    assert told(watch(), *busy) == [(CPU_SECONDS, "cpu", False)]


def test_the_cpu_limit_is_that_of_the_sandbox_not_of_one_cpu() -> None:
    assert told(watch(), *(sample(second, cpu=150) for second in range(30))) == []


def test_a_pause_of_one_second_starts_the_ten_seconds_again() -> None:
    cpu = [199] * 9 + [10] + [199] * 9 + [10] + [199] * 9
    assert told(watch(), *(sample(second, cpu=each) for second, each in enumerate(cpu))) == []


def test_the_alert_is_over_when_the_cpu_was_low_for_some_seconds_and_not_when_it_is_a_little_lower() -> None:
    cpu = [199] * 12 + [170] * 20 + [10] * 20  # 85 %: neither high nor low
    alerts = told(watch(), *(sample(second, cpu=each) for second, each in enumerate(cpu)))
    assert alerts == [(10, "cpu", False), (31 + CALM_SECONDS, "cpu", True)]


def test_a_cpu_that_swings_around_the_threshold_is_one_alert() -> None:
    cpu = [199] * 12 + [170, 199] * 30
    assert len(told(watch(), *(sample(second, cpu=each) for second, each in enumerate(cpu)))) == 1


def test_memory_above_nine_tenths_of_its_limit_is_told_at_once_and_in_words() -> None:
    [alert] = watch().look(sample(0.2, memory=95))
    assert alert == Alert(
        container_id="bj-1", timestamp=1_000_000.2, kind="memory", message="memory: 95 MB, 95% of its limit of 100M"
    )


def test_memory_that_is_freed_is_over_after_some_seconds() -> None:
    memory = [95, 70, 95] + [70] * 10
    alerts = told(watch(), *(sample(second, memory=each) for second, each in enumerate(memory)))
    assert alerts == [(0, "memory", False), (2 + CALM_SECONDS, "memory", True)]


def test_one_byte_where_no_network_was_allowed_is_told_at_once() -> None:
    found = watch()
    assert told(found, sample(0), sample(1)) == []
    [alert] = found.look(sample(2, tx=1))
    assert (alert.kind, alert.over) == ("network", False)
    assert alert.message == "network: traffic where none was allowed (0 bytes received, 1 sent)"
    rest = told(found, *(sample(second, tx=1) for second in range(3, 20)))
    assert rest == [(2 + CALM_SECONDS, "network", True)]


def test_traffic_in_the_very_first_sample_counts() -> None:
    assert told(watch(), sample(0.2, rx=5)) == [(0.2, "network", False)]


@pytest.mark.parametrize("allowed", [True, False])
def test_traffic_that_was_allowed_or_cannot_be_known_is_no_alert(allowed: bool) -> None:
    seen = [sample(second, rx=10 * second if allowed else None, tx=None) for second in range(20)]
    assert told(watch(allowed), *seen) == []


def test_what_nobody_saw_for_a_while_does_not_count_as_high() -> None:
    assert told(watch(), sample(0, cpu=199), sample(60, cpu=199), sample(61, cpu=199)) == []


def test_what_is_raised_is_over_with_the_command() -> None:
    found = watch()
    found.look(sample(1, memory=99))
    assert found.raised == ("memory",)
    assert [(alert.kind, alert.over, alert.timestamp) for alert in found.end(5.0)] == [("memory", True, 5.0)]
    assert found.raised == ()
    assert found.end(6.0) == []


@given(
    st.lists(st.tuples(st.floats(0.1, 8), st.floats(0, 200), st.floats(0, 100), st.integers(0, 3)), max_size=60),
    st.booleans(),
)
def test_whatever_is_seen_each_kind_is_raised_and_over_in_turn(
    seen: list[tuple[float, float, float, int]], allowed: bool
) -> None:
    found, second, traffic = watch(allowed), 0.0, 0
    alerts: list[Alert] = []
    for pause, cpu, memory, more in seen:
        second, traffic = second + pause, traffic + more
        alerts += found.look(sample(second, cpu=cpu, memory=memory, rx=traffic))
    alerts += found.end(second)
    for kind in ("cpu", "memory", "network"):
        story = [alert for alert in alerts if alert.kind == kind]
        assert [alert.over for alert in story] == [bool(number % 2) for number in range(len(story))]
        assert len(story) % 2 == 0
        assert all(one.timestamp <= other.timestamp for one, other in pairwise(story[:-1]))
