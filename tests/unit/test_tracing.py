"""Spans: none unless somebody wants them, and then the whole story of a request, in order and nested."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextvars import copy_context
from pathlib import Path

import anyio
import httpx2
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NoOpTracerProvider, StatusCode

from belljar.backends.fake import Fake
from belljar.core.request import RunRequest
from belljar.engine.engine import Engine
from belljar.engine.tracing import join, span, turn_off, turn_on
from belljar.service.http.app import create_app
from belljar.settings import load
from belljar.testing.conformance import scripts

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


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
    code = "import sys\nfrom belljar.engine.tracing import span\n"
    code += "with span('run'): pass\nprint('opentelemetry' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert said.stdout == "False\n"


def test_where_it_is_not_installed_turning_it_on_says_no() -> None:
    code = (
        "import sys\nsys.modules['opentelemetry'] = None\nfrom belljar.engine.tracing import span, turn_on\n"
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


def trace_of(recorded: ReadableSpan) -> str:
    assert recorded.context
    return f"{recorded.context.trace_id:032x}"


def test_a_task_goes_on_with_the_trace_of_its_caller_and_a_forged_one_is_ignored(
    exporter: InMemorySpanExporter,
) -> None:
    def answer(parent: str) -> None:
        join({"traceparent": parent})
        with span("request"):
            pass

    for parent in (PARENT, "not one\n"):
        copy_context().run(answer, parent)
    theirs, ours = exporter.get_finished_spans()
    assert trace_of(theirs) == TRACE
    assert ours.parent is None


def test_who_instruments_the_server_keeps_its_own_span_between(exporter: InMemorySpanExporter) -> None:
    with span("start"):
        join({"traceparent": PARENT})
        with span("request"):
            pass
    inner, outer = exporter.get_finished_spans()
    assert trace_of(inner) == trace_of(outer) != TRACE


@pytest.mark.anyio
async def test_the_spans_of_a_run_are_part_of_the_trace_of_the_http_request(
    exporter: InMemorySpanExporter, tmp_path: Path
) -> None:
    app = create_app(load(data_dir=str(tmp_path / "data"), state_dir=str(tmp_path / "state")))

    async def ask(http: httpx2.AsyncClient, headers: dict[str, str]) -> None:
        body = {"command": ["true"], "backend": "apple", "wait": True}
        await http.post("/api/sandbox/execute", json=body, headers=headers)

    async with app.router.lifespan_context(app):
        transport = httpx2.ASGITransport(app)
        async with (
            httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http,
            anyio.create_task_group() as tasks,  # a request has a task of its own
        ):
            tasks.start_soon(ask, http, {"traceparent": PARENT})
            tasks.start_soon(ask, http, {})
    told = exporter.get_finished_spans()
    assert {trace_of(each) == TRACE for each in told if each.name == "request"} == {True, False}
    assert {trace_of(each) == TRACE for each in told if each.name == "policy"} == {True, False}


@pytest.mark.anyio
async def test_a_run_tells_policy_start_run_and_cleanup(exporter: InMemorySpanExporter) -> None:
    engine = Engine(load(), extra=(Fake(scripts()),))
    await engine.run(RunRequest(command=("true",), backend="fake"))
    told = {found.name: found for found in exporter.get_finished_spans()}
    assert list(told) == ["policy", "start", "run", "cleanup"]
    assert told["run"].attributes is not None
    assert told["run"].attributes["belljar.backend"] == "fake"
