"""Spans: none unless somebody wants them, and then the whole story of a request, in order and nested."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import anyio
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NoOpTracerProvider, StatusCode

from belljar.backends.fake import Fake
from belljar.conformance import scripts
from belljar.engine import Engine
from belljar.models import RunRequest
from belljar.settings import load
from belljar.tracing import span, turn_off, turn_on


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    assert turn_on(provider)
    yield kept
    turn_off()


def test_without_a_provider_nothing_is_recorded_and_nothing_is_made() -> None:
    assert not turn_on()
    assert not turn_on(NoOpTracerProvider())
    with span("run", backend="wasm") as here:
        here.set(status="success")
    assert span("run") is span("queue")  # one that does nothing serves all


def test_while_it_is_off_opentelemetry_is_not_even_imported() -> None:
    code = "import sys\nfrom belljar.tracing import span\nwith span('run'): pass\nprint('opentelemetry' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert said.stdout == "False\n"


def test_where_it_is_not_installed_turning_it_on_says_no() -> None:
    code = (
        "import sys\nsys.modules['opentelemetry'] = None\nfrom belljar.tracing import span, turn_on\n"
        "print(turn_on())\nwith span('run') as s: s.set(a=1)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert said.stdout == "False\n"


@pytest.mark.anyio
async def test_the_spans_of_a_request_are_nested_even_across_tasks(exporter: InMemorySpanExporter) -> None:
    async def work() -> None:
        with span("start"), span("run", backend="wasm", position=None) as run:
            run.set(status="success", exit_code=0)

    with span("request", run="bj-1"):
        with span("queue"):
            pass
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
    done = {each.name: each for each in exporter.get_finished_spans()}
    assert list(done) == ["queue", "run", "start", "request"]
    request, start = done["request"].context, done["start"].context
    assert request
    assert start
    assert [done[name].parent.span_id for name in ("queue", "start", "run")] == [  # type: ignore[union-attr]
        request.span_id, request.span_id, start.span_id,
    ]  # fmt: skip
    assert dict(done["run"].attributes or {}) == {
        "belljar.backend": "wasm", "belljar.status": "success", "belljar.exit_code": 0,
    }  # fmt: skip


def test_an_exception_is_noted_on_the_span_and_goes_on(exporter: InMemorySpanExporter) -> None:
    with pytest.raises(ValueError, match="no"), span("policy"):
        raise ValueError("no")
    [policy] = exporter.get_finished_spans()
    assert policy.status.status_code is StatusCode.ERROR
    assert [event.name for event in policy.events] == ["exception"]


def test_a_request_goes_on_with_the_trace_of_its_caller_and_a_forged_one_is_ignored(
    exporter: InMemorySpanExporter,
) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    with span("request", headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"}):
        pass
    with span("request", headers={"traceparent": "not one\n"}):
        pass
    theirs, ours = exporter.get_finished_spans()
    assert theirs.context
    assert ours.context
    assert f"{theirs.context.trace_id:032x}" == trace
    assert ours.parent is None


@pytest.mark.anyio
async def test_a_run_tells_policy_start_run_and_cleanup(exporter: InMemorySpanExporter) -> None:
    engine = Engine(load(), extra=(Fake(scripts()),))
    await engine.run(RunRequest(command=("true",), backend="fake"))
    told = {found.name: found for found in exporter.get_finished_spans()}
    assert list(told) == ["policy", "start", "run", "cleanup"]
    assert told["run"].attributes is not None
    assert told["run"].attributes["belljar.backend"] == "fake"
