"""What guests used, for Prometheus, in base units: seconds and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample as Figure

from belljar.core.result import Result
from belljar.core.values import MIB
from belljar.protocol.records import Sample

_MEMORY_BYTES = tuple(float(MIB * 2**n) for n in range(2, 14))  # 4 MiB to 8 GiB
_FLOWS = {
    "network_rx_bytes": ("network_receive_bytes", "Bytes that guests received, by the samples of each second."),
    "network_tx_bytes": ("network_transmit_bytes", "Bytes that guests sent, by the samples of each second."),
    "disk_read_bytes": ("disk_read_bytes", "Bytes that guests read from disks, by the samples of each second."),
    "disk_write_bytes": (
        "disk_written_bytes",
        "Bytes that guests wrote to disks, by the samples of each second.",
    ),
}


class GuestMetrics:
    """`ended` hears of each result, `sampled` of each second of each open sandbox, `closed` of its end."""

    def __init__(self, registry: CollectorRegistry, pair: tuple[str, str]) -> None:
        self._cpu = Counter("sandbox_guest_cpu_seconds", "CPU time that guests used.", pair, registry=registry)
        self._peak = Histogram(
            "sandbox_guest_memory_peak_bytes", "The most memory that a run used.", pair, buckets=_MEMORY_BYTES,
            registry=registry,
        )  # fmt: skip
        self._open: dict[str, Sample] = {}
        self._flows = {
            field: Counter(f"sandbox_guest_{name}", text, registry=registry) for field, (name, text) in _FLOWS.items()
        }
        memory = Gauge("sandbox_guest_memory_bytes", "Memory that open sandboxes use now.", registry=registry)
        memory.set_function(lambda: sum(each.memory_mb for each in [*self._open.values()]) * MIB)
        cpus = Gauge("sandbox_guest_cpus", "CPUs that open sandboxes keep busy now.", registry=registry)
        cpus.set_function(lambda: sum(each.cpu_percent for each in [*self._open.values()]) / 100)

    def ended(self, labels: tuple[str, str], result: Result) -> None:
        """Counts what a run used, where the backend could tell."""
        if result.cpu_ms is not None:
            self._cpu.labels(*labels).inc(result.cpu_ms / 1000)
        if result.memory_used_mb is not None:
            self._peak.labels(*labels).observe(result.memory_used_mb * MIB)

    def sampled(self, sample: Sample) -> None:
        """Counts what has flowed since the last sample of the same sandbox."""
        before = self._open.get(sample.container_id)
        self._open[sample.container_id] = sample
        for field, counter in self._flows.items():
            now, last = getattr(sample, field), getattr(before, field, None) or 0
            if now is not None:
                counter.inc(now - last if now >= last else now)  # less than before: another command counts from zero

    def closed(self, id: str) -> None:
        """Forgets a sandbox."""
        self._open.pop(id, None)


class InSeconds(Collector):
    """Shows histograms of milliseconds once more, in seconds: nothing is counted twice.

    Args:
        histograms: The new name of each, and the histogram.
    """

    def __init__(self, histograms: Iterable[tuple[str, Histogram]]) -> None:
        self._histograms = tuple(histograms)

    def collect(self) -> Iterator[Metric]:
        """Yields them with buckets and sums divided by a thousand."""
        for name, histogram in self._histograms:
            for metric in histogram.collect():
                text = metric.documentation.replace("milliseconds", "seconds")
                shown = Metric(name, text, "histogram")
                shown.samples = [_in_seconds(name, metric.name, figure) for figure in metric.samples]
                yield shown


def _in_seconds(name: str, old: str, figure: Figure) -> Figure:
    suffix = figure.name.removeprefix(old)
    labels = dict(figure.labels)
    if labels.get("le", "+Inf") != "+Inf":
        labels["le"] = str(float(labels["le"]) / 1000)
    value = figure.value / 1000 if suffix == "_sum" else figure.value
    return Figure(f"{name}{suffix}", labels, value)
