"""Figures for Prometheus, under the mission's names, in a registry of their own; and beside them in base units.

No label takes a caller's word: a language or a kind that is not known here counts as "other", so that nobody can grow
the number of series.
"""

from __future__ import annotations

import math
import platform
import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from belljar.core import errors
from belljar.core.languages import BUILTIN, Language
from belljar.core.result import Result, Status
from belljar.core.version import __version__
from belljar.engine.backends import NAMES, NEVER_CHOSEN
from belljar.protocol.records import RunRecord
from belljar.service.telemetry.guest_metrics import GuestMetrics, InSeconds

RECENT = 1000  # runs that the success rate is of
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_PAIR = ("language", "backend")
_OTHER = "other"
_COMMAND = "command"  # the language of a run that named none
_NOWHERE = "unknown"  # the backend of a run that failed before one was chosen
_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000)
_WAIT_SECONDS = (0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300)
_HTTP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "WEBSOCKET"))
_FUEL = tuple(10.0**n for n in range(5, 14))
_VERSION = re.compile(r"(?<=^python)3\.\d+$")  # there are too many to have a series each
_ALERTS = ("cpu", "memory", "network")
_OUTCOMES = (*(str(status) for status in Status), "failed", "lost")

Watched = Literal[
    "running", "waiting", "sessions", "store_up", "bus_up", "store_dropped", "bus_dropped", "sinks_dropped",
    "sync_behind", "log_dropped",
]  # fmt: skip
_WATCHED: dict[Watched, str] = {
    "running": "Runs under way.",
    "waiting": "Runs that wait for their turn.",
    "sessions": "Sessions and sandboxes that are open.",
    "store_up": "1 while the store of records works, else 0.",
    "bus_up": "1 while the bus works, else 0.",
    "store_dropped": "Lines, samples and alerts that the store had no room for, since the start.",
    "bus_dropped": "Messages that the bus had no room for, since the start.",
    "sinks_dropped": "Events that slow sinks missed, since the start.",
    "sync_behind": "Records that the shared store has not got yet.",
    "log_dropped": "Lines of the server's own log that nobody took in time, since the start.",
}


class _Recent:
    """How the last runs of one language on one backend went."""

    def __init__(self) -> None:
        self._went: deque[bool] = deque(maxlen=RECENT)
        self._good = 0

    def add(self, good: bool) -> float:
        if len(self._went) == RECENT:
            self._good -= self._went[0]
        self._went.append(good)
        self._good += good
        return self._good / len(self._went)


class _Pair(NamedTuple):
    """The series of one language on one backend, looked up once."""

    executions: Counter
    duration: Histogram
    startup: Histogram
    fuel: Histogram
    timeouts: Counter
    starved: Counter
    rate: Gauge
    recent: _Recent
    labels: tuple[str, str]


class Metrics:
    """Told of each end by `hear`; `text` is what a scrape gets."""

    def __init__(self, spoken: Iterable[Language] = tuple(BUILTIN.values()), known: Iterable[str] = NAMES) -> None:
        disable_created_metrics()  # else each of ours has a second series, which says when the process was started
        self.registry: CollectorRegistry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._names = _names(spoken)
        self._known = frozenset((*known, *NEVER_CHOSEN, _NOWHERE))
        self._pairs: dict[tuple[str, str], _Pair] = {}
        self._executions = self._counter("executions", "Runs that began, by language and backend.")
        self._duration = self._histogram("execution_duration_ms", "How long they took, milliseconds.", _MS)
        self._startup = self._histogram("startup_ms", "How long until the guest ran, milliseconds.", _MS)
        self._fuel = self._histogram("fuel_consumed", "WebAssembly instructions of a run, about.", _FUEL)
        self._timeouts = self._counter("timeouts", "Runs that were ended by the clock.")
        self._starved = self._counter("oom_failures", "Runs that were ended for memory.")
        meaning = f"Part of the last {RECENT} runs of this language on this backend that ended with status success."
        self._rate = Gauge("sandbox_success_rate", meaning, _PAIR, registry=self.registry)
        self._outcomes = self._counter("outcomes", "Runs by how they ended.", ("status",))
        self._refusals = self._counter("refusals", "Requests that were turned away, by kind of error.", ("kind",))
        self._alerts = self._counter("alerts", "Alerts that were raised.", ("kind",))
        self._gauges = {name: self._gauge(name, text) for name, text in _WATCHED.items()}
        self._kinds = _kinds(errors.BelljarError)
        self.guests: GuestMetrics = GuestMetrics(self.registry, _PAIR)
        seconds = (("sandbox_execution_duration_seconds", self._duration), ("sandbox_startup_seconds", self._startup))
        self.registry.register(InSeconds(seconds))
        self._waited = Histogram(
            "sandbox_queue_wait_seconds", "How long runs waited for a place.", buckets=_WAIT_SECONDS,
            registry=self.registry,
        )  # fmt: skip
        self._http: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self._requests = self._counter("http_requests", "Requests answered.", ("method", "route", "status"))
        self._latency = Histogram(
            "sandbox_http_request_duration_seconds", "From a request to the end of its answer, streams included.",
            ("method", "route"), buckets=_HTTP_SECONDS, registry=self.registry,
        )  # fmt: skip
        build = Gauge("sandbox_build_info", "1, with what this is.", ("version", "python"), registry=self.registry)
        build.labels(__version__, platform.python_version()).set(1)

    # --- what happened ---

    def hear(self, record: RunRecord) -> None:
        """A run has ended; one that was refused has never begun, and counts as a refusal alone."""
        if record.state == "refused":
            self.refused(str((record.problem or {}).get("kind", "")))
            return
        pair = self._pair(record)
        result = record.result if record.state == "finished" else None
        pair.executions.inc()
        pair.rate.set(pair.recent.add(result is not None and result.status is Status.SUCCESS))
        outcome = str(result.status) if result else record.state
        self._outcomes.labels(outcome if outcome in _OUTCOMES else _OTHER).inc()
        if result is not None:
            _count(pair, result)
            self.guests.ended(pair.labels, result)

    def waited(self, seconds: float) -> None:
        """A run has got its place."""
        self._waited.observe(seconds)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request of HTTP was answered; `route` is the pattern of its path, empty where there is none."""
        key = (method, route, status)
        if (series := self._http.get(key)) is None:
            method, route = method if method in _METHODS else _OTHER, route or _OTHER
            series = self._requests.labels(method, route, str(status)), self._latency.labels(method, route)
            if key[0] in _METHODS:  # else a caller could fill our memory with methods of its own making
                self._http[key] = series
        series[0].inc()
        series[1].observe(seconds)

    def refused(self, kind: str) -> None:
        self._refusals.labels(kind if kind in self._kinds else _OTHER).inc()

    def alerted(self, kind: str) -> None:
        self._alerts.labels(kind if kind in _ALERTS else _OTHER).inc()

    def show(self, name: Watched, read: Callable[[], float]) -> None:
        """A figure that is asked for when somebody looks. One that cannot be told is NaN, never a failed scrape."""

        def safely() -> float:
            try:
                return float(read())
            except Exception:  # scrapes come every few seconds: a line of the log for each would be a flood
                return math.nan

        self._gauges[name].set_function(safely)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    # --- the series ---

    def _pair(self, record: RunRecord) -> _Pair:
        backend = record.backend or _NOWHERE
        labels = (
            self._names.get(_VERSION.sub("", record.language.lower()), _OTHER),
            backend if backend in self._known else _OTHER,
        )
        if (pair := self._pairs.get(labels)) is None:
            pair = self._pairs[labels] = _Pair(
                self._executions.labels(*labels), self._duration.labels(*labels), self._startup.labels(*labels),
                self._fuel.labels(*labels), self._timeouts.labels(*labels), self._starved.labels(*labels),
                self._rate.labels(*labels), _Recent(), labels,
            )  # fmt: skip
        return pair

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = _PAIR) -> Counter:
        return Counter(f"sandbox_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"sandbox_{name}", text, _PAIR, buckets=buckets, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"sandbox_{name}", text, registry=self.registry)


def _count(pair: _Pair, result: Result) -> None:
    pair.duration.observe(result.duration_ms)
    if result.startup_ms is not None:
        pair.startup.observe(result.startup_ms)
    if result.fuel_consumed is not None:
        pair.fuel.observe(result.fuel_consumed)
    if result.status is Status.TIMEOUT:
        pair.timeouts.inc()
    elif result.status is Status.OOM_KILLED:
        pair.starved.inc()


def _names(spoken: Iterable[Language]) -> dict[str, str]:
    """All that callers may call a language, and what we call it."""
    table = {language.name: language for language in spoken}
    aliases = {alias.lower(): name for name, language in table.items() for alias in language.aliases}
    return {"": _COMMAND} | aliases | {name: name for name in table}


def _kinds(error: type[errors.BelljarError]) -> frozenset[str]:
    """All that an error can call itself."""
    return frozenset({error.kind}).union(*(_kinds(each) for each in error.__subclasses__()))
