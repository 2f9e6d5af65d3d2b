"""Examples for the OpenAPI document. They are made of the models themselves, so that none can be wrong; and they are
not in the models, whose schemas MCP clients pay for by the token."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from belljar.core.capabilities import Capabilities, Guarantees, Isolation
from belljar.core.model import Model
from belljar.core.result import Result, Status
from belljar.core.test_results.model import TestFailure
from belljar.protocol import requests, responses
from belljar.protocol.records import Alert, LogLine, RunRecord, Sample, SandboxMetrics, SessionRecord
from belljar.service.http.sandboxes import examples

_RUN, _SESSION, _CHECKPOINT = "bj-0f3c9a5d7e214b68", "bs-7d1e60b2c94f4a35", "cp-4c8f21d90be6a357"
_AT = 1_794_787_200.25
_HASH = "a2bc5ac9d57b1c4e5f0a8dbb9f3f6f1c3c0f2a1a0b7d7e2f4d5c6b7a89908172"
_WALLS = Guarantees(isolation=Isolation.WASM, walls=("WebAssembly", "a jail"), limits={"memory": "the linear memory"})
_RESULT: dict[str, Any] = {
    "status": Status.SUCCESS, "exit_code": 0, "stdout": "42\n", "duration_ms": 31.5, "startup_ms": 12.1,
    "memory_used_mb": 21.4, "cpu_ms": 18.0, "backend": "wasm", "container_id": _RUN, "guarantees": _WALLS,
    "reasons": ("wasm is the first that suits",),
}  # fmt: skip
_SAMPLE = Sample(container_id=_RUN, timestamp=_AT, cpu_percent=97.5, memory_mb=64.2, uptime_seconds=3.0)

BODIES: tuple[Model, ...] = (
    requests.Execute(language="python", code="print(6 * 7)", timeout_seconds=5),
    requests.Execute(command=("ls", "-la"), backend="native"),
    requests.RunTests(project_path="/srv/projects/app", test_command="pytest -q", timeout_seconds=120),
    requests.OpenSession(kind="session", backend="wasm"),
    requests.Turn(code="x = 41"),
    requests.Turn(code="x + 1"),
    requests.Fork(checkpoint=_CHECKPOINT),
    requests.Rollback(checkpoint=_CHECKPOINT),
    *examples.BODIES,
)
ANSWERS: tuple[Model, ...] = (
    responses.Executed(id=_RUN, **_RESULT),
    responses.Tested(
        id=_RUN, status="failed", passed=41, failed=1, framework="pytest", command="pytest -q", source="report",
        exit_code=1, duration_ms=1840.5, backend="native",
        failures=(
            TestFailure(
                id="tests/test_sums.py::test_bad", name="test_bad", file="tests/test_sums.py", line=7,
                message="assert 3 == 4", duration_ms=0.6,
            ),
        ),
    ),
    RunRecord(
        id=_RUN, caller="ci", instance="server-5b0c2f6e8d914a73", state="finished", language="python", backend="wasm",
        sha256=_HASH, created=_AT, started=_AT + 0.1, ended=_AT + 0.2, result=Result(**_RESULT),
    ),
    SessionRecord(
        id=_SESSION, kind="session", caller="ci", backend="wasm", created=_AT, expires=_AT + 3600, turns=2
    ),
    responses.Checkpointed(id=_CHECKPOINT, bytes=1_310_720),
    responses.FileList(files=(responses.Listed(path="out/plot.png", kind="file", size=20_480),)),
    responses.LogPage(
        lines=(LogLine(container_id=_RUN, number=17, timestamp=_AT, stream="stdout", message="epoch 3"),),
        state="running",
    ),
    SandboxMetrics.of(
        _RUN, _SAMPLE, (_SAMPLE,),
        (Alert(container_id=_RUN, timestamp=_AT, kind="cpu", message="97 % of its CPU for 10 s"),),
    ),
    responses.BackendLanguage(name="python", available=True, version="3.12.0", backend="wasm"),
    Capabilities(backend="wasm", available=True, guarantees=_WALLS, commands=False, fuel=True, checkpoints=True),
    responses.SeenImage(
        engine="docker", reference="registry.example.org/python:3.12", digest=f"sha256:{_HASH}", at=_AT,
        facts={"size": 51_380_224},
    ),
    responses.Alive(),
    responses.Readiness(
        ready=True, backend="wasm", run_ms=24.9, parts={"store": "ok", "logs": "ok", "events": "ok"}, running=1,
        waiting=0,
    ),
    responses.Problem(
        title="Not Found", status=404, detail=f"there is no run '{_RUN}'", kind="not_found",
        fix="GET /api/sandbox/runs lists yours",
    ),
    *examples.ANSWERS,
)  # fmt: skip
_PARAMETERS: dict[str, Any] = {
    "after": 17, "before": _AT, "language": "python", "limit": 100, "path": "out/plot.png", "state": "running",
    "Idempotency-Key": "order-4711", "Last-Event-ID": "17",
    **examples.PARAMETERS,
}  # fmt: skip


_SECURITY: dict[str, Any] = {
    "bearer": {
        "type": "http", "scheme": "bearer", "bearerFormat": "bj_<id>_<secret>, or a JWT",
        "description": "A key (`belljar keys create NAME --scope run`), or a token of `service.jwt`'s issuer.",
    },
    "key": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "The same key, in another header."},
}  # fmt: skip
# The first, which is empty: a server on loopback that has no keys asks for none.
_EITHER: list[dict[str, list[str]]] = [{}, {"bearer": []}, {"key": []}]


class Documented(FastAPI):
    """An application whose document shows, of whatever is sent and answered, how it looks."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            _show(super().openapi())
        return super().openapi()


def _show(api: dict[str, Any]) -> None:
    schemas = api["components"]["schemas"]
    for model in BODIES:
        said = model.model_dump(mode="json", exclude_unset=True)
        schemas[type(model).__name__].setdefault("examples", []).append(said)
    for model in ANSWERS:
        schemas[type(model).__name__]["examples"] = [model.model_dump(mode="json")]
    api["components"]["securitySchemes"] = _SECURITY
    for path, operation in ((path, each) for path, methods in api["paths"].items() for each in methods.values()):
        if path.startswith("/api/") or path == "/metrics":
            operation["security"] = _EITHER
        shown = _PARAMETERS | {"id": _RUN if "runs" in operation["tags"] else _SESSION}
        for parameter in operation.get("parameters", ()):
            example = shown[parameter["name"]]
            listed = parameter["schema"].get("type") == "array" and not isinstance(example, list)
            parameter["example"] = [example] if listed else example
