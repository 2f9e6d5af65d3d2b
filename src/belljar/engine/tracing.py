"""Spans for OpenTelemetry: request, policy, queue, start, run, cleanup.

Off until `turn_on`, and then only with a provider that somebody has set up (`opentelemetry-instrument belljar serve`,
or a provider that is handed over). While it is off a span costs a function call, and OpenTelemetry is not imported.

Attributes leave this machine: ids, names and numbers, never code, output or environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from opentelemetry.trace import Span as Recorded
    from opentelemetry.trace import Tracer, TracerProvider

Name = Literal["request", "policy", "queue", "start", "run", "cleanup"]
Value = str | bool | int | float | None
_tracer: Tracer | None = None


class Span(Protocol):
    def set(self, **attributes: Value) -> None:
        """Adds attributes to the span."""
        ...


class _Nothing:
    """The span that is not recorded. It has no state: there is one of it, and it may be entered many times."""

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def set(self, **attributes: Value) -> None:
        return None


_NOTHING = _Nothing()


class _Live:
    """A span that is recorded, and the current one while it is entered; an exception that passes is noted on it."""

    _span: Recorded

    def __init__(self, tracer: Tracer, name: Name, attributes: dict[str, Value]) -> None:
        self._entered = tracer.start_as_current_span(name, attributes=_known(attributes))

    def __enter__(self) -> _Live:
        self._span = self._entered.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.__exit__(kind, error, trace)

    def set(self, **attributes: Value) -> None:
        self._span.set_attributes(_known(attributes))


def span(name: Name, **attributes: Value) -> AbstractContextManager[Span]:
    """Returns a context manager that records a span around its block, if tracing is on."""
    return _NOTHING if _tracer is None else _Live(_tracer, name, attributes)


def join(headers: Mapping[str, str]) -> None:
    """Makes the spans of this task part of the caller's trace (traceparent), unless they are part of one already."""
    if _tracer is None:
        return
    from opentelemetry import context, trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if not trace.get_current_span().get_span_context().is_valid:
        context.attach(TraceContextTextMapPropagator().extract(headers))


def turn_on(provider: TracerProvider | None = None) -> bool:
    """Spans are recorded from now on, by this provider or by the one that the process has; False: nobody wants them."""
    global _tracer
    try:
        from opentelemetry import trace
    except ImportError:
        return False
    provider = provider or trace.get_tracer_provider()
    if isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider)):
        return False  # nobody would get them
    _tracer = provider.get_tracer("belljar")
    return True


def turn_off() -> None:
    global _tracer
    _tracer = None


def _known(attributes: Mapping[str, Value]) -> dict[str, str | bool | int | float]:
    return {f"belljar.{name}": value for name, value in attributes.items() if value is not None}
