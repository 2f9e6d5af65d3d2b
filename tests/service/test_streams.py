"""Who listens for long: silence, keys that are revoked, runs of other servers; and what the gate writes down."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from fastapi import FastAPI
from starlette.websockets import WebSocket

from belljar.core import errors
from belljar.core.settings import Settings
from belljar.engine.audit import Audit
from belljar.protocol.records import Caller, RunRecord
from belljar.service import queries
from belljar.service.auth import access
from belljar.service.auth.access import new_key
from belljar.service.http import streams
from belljar.service.http.app import create_app
from belljar.service.mcp import http as tools_http
from belljar.service.run_lifecycle import Run
from belljar.service.service import Service
from belljar.service.telemetry import log_lines
from store_records import a_line, a_run, until

pytestmark = pytest.mark.anyio
ANN = Caller(name="ann", scopes=frozenset({"run", "read"}))


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[FastAPI]:
    folders = {"data_dir": str(tmp_path / "data"), "state_dir": str(tmp_path / "state")}
    app = create_app(Settings(**folders, audit_log=str(tmp_path / "audit")))
    async with app.router.lifespan_context(app):
        yield app


@pytest.fixture
def service(app: FastAPI) -> Service:
    found: Service = app.state.service
    return found


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is noticed at once, and so is a revocation."""
    for module in (queries, log_lines, tools_http):
        monkeypatch.setattr(module, "BEAT", 0.01)
    monkeypatch.setattr(access, "FRESH", 0.0)


@asynccontextmanager
async def asking(app: FastAPI, key: str = "") -> AsyncIterator[httpx2.AsyncClient]:
    headers = {"X-API-Key": key} if key else {}
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as http:
        yield http


async def key_of(service: Service, name: str, *scopes: str) -> tuple[str, str]:
    """Its id, and what its holder sends."""
    key, secret = new_key(name, frozenset(scopes))
    await service.store.add_key(key)
    return key.id, secret


def under_way(service: Service) -> Run:
    """A run of ours that says nothing."""
    record = a_run(state="running", instance=service.instance.name)
    run = service.lifecycle.runs[record.id] = service.lifecycle.new_run(record, 1 << 20)
    run.done.set()  # nobody waits for it when the service is closed
    return run


async def elsewhere(service: Service) -> RunRecord:
    record = a_run(state="running", instance="server-of-others")
    await service.store.begin(record)
    return record


# --- runs of other servers ---


async def test_a_run_of_another_server_is_not_cancelled_here_and_the_answer_says_where(
    app: FastAPI, service: Service
) -> None:
    record = await elsewhere(service)
    async with asking(app) as http:
        path = f"/api/sandbox/runs/{record.id}/cancel"
        answer = await http.post(path)
        assert (answer.status_code, answer.json()["kind"]) == (409, "elsewhere"), answer.text
        assert answer.json()["context"] == {"instance": "server-of-others"}
        assert isinstance(errors.from_dict(answer.json(), 409), errors.Elsewhere)
        await service.store.change(record.id, state="finished", ended=time.time())
        assert (await http.post(path)).json()["state"] == "finished"


@pytest.mark.usefixtures("soon")
async def test_of_another_server_s_run_silence_lines_gaps_and_the_end_are_told(service: Service) -> None:
    record = await elsewhere(service)
    heard: list[Any] = []
    with anyio.fail_after(30):
        async for batch in service.queries.follow(record.id, ANN, 0):
            heard.append([(line.number, line.stream) for line in batch])
            if len(heard) == 1:
                service.store.add(a_line(record.id, 1), a_line(record.id, 5))
            elif batch:
                await service.store.change(record.id, state="finished", ended=time.time())
    assert heard[0] == []
    assert [one for batch in heard for one in batch] == [(1, "stdout"), (4, "gap"), (5, "stdout")]


async def test_a_page_of_lines_tells_what_is_missing(app: FastAPI, service: Service) -> None:
    record = await elsewhere(service)
    service.store.add(a_line(record.id, 3))
    async with asking(app) as http:
        page = (await http.get(f"/api/sandbox/{record.id}/logs")).json()
    assert [(line["number"], line["message"]) for line in page["lines"]] == [(2, "2 lines were not kept"), (3, "hello")]


# --- who hangs up ---


@pytest.mark.parametrize("when", ["websocket.accept", "websocket.send", "websocket.close"])
@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("it was closed"), None])
async def test_a_watcher_that_hangs_up_is_no_error_whenever_it_does(
    service: Service, when: str, error: Exception | None
) -> None:
    record = await elsewhere(service)
    service.store.add(a_line(record.id, 1))
    await service.store.change(record.id, state="finished", ended=time.time())
    told: list[str] = []
    gone = anyio.Event()

    async def receive() -> dict[str, Any]:
        if not told:
            return {"type": "websocket.connect"}
        await gone.wait()
        return {"type": "websocket.disconnect", "code": 1006}

    async def send(message: Any) -> None:
        told.append(message["type"])
        if message["type"] == when:
            gone.set()
            if error:
                raise error

    scope = {"type": "websocket", "path": "/", "headers": [], "query_string": b"", "subprotocols": []}
    socket = WebSocket(scope, receive, send)
    with anyio.fail_after(30):
        await streams.watch(service, record.id, ANN, {}, 0, socket)
    assert when in told


# --- silence, and keys that are revoked meanwhile ---


@pytest.mark.usefixtures("soon")
async def test_a_quiet_event_stream_says_that_it_lives_and_ends_when_its_key_is_revoked(service: Service) -> None:
    await key_of(service, "other", "run")
    id, secret = await key_of(service, "ann", "read")
    run = under_way(service)
    told: list[str] = []
    with anyio.fail_after(30):
        async for event in streams._events(service, run.id, ANN, {"x-api-key": secret}, 0):
            told.append(event)
            if len(told) == 3:
                await service.store.revoke_key(id)
    assert set(told) == {": alive\n\n"}
    service.lifecycle.runs.pop(run.id)


async def listen(app: FastAPI, headers: dict[str, str], heard: list[Any]) -> None:
    """A GET of /mcp by a client that stays."""
    scope = {
        "type": "http", "http_version": "1.1", "method": "GET", "path": "/mcp", "query_string": b"", "scheme": "http",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip

    sent = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Any:
        return sent.pop() if sent else await anyio.sleep_forever()

    async def send(message: Any) -> None:
        heard.append(message)

    await app(scope, receive, send)


async def introduced(http: httpx2.AsyncClient) -> dict[str, str]:
    """The headers of an MCP session that was begun."""
    headers = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": "2025-06-18"}
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "by hand", "version": "1"}}
    body = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
    begun = await http.post("/mcp", json=body, headers=headers)
    headers["Mcp-Session-Id"] = begun.headers["mcp-session-id"]
    await http.post("/mcp", json={"jsonrpc": "2.0", "method": "notifications/initialized"}, headers=headers)
    return headers


@pytest.mark.usefixtures("soon")
async def test_an_mcp_client_that_only_listens_does_not_outlive_its_key(app: FastAPI, service: Service) -> None:
    await key_of(service, "other", "run")
    id, secret = await key_of(service, "ann", "run")
    async with asking(app, secret) as http:
        headers = await introduced(http)
    heard: list[Any] = []
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen, app, headers | {"Host": "127.0.0.1", "X-API-Key": secret}, heard)
            await until(lambda: heard)
            assert heard[0]["status"] == 200
            await service.store.revoke_key(id)
    assert heard[-1] == {"type": "http.response.body", "body": b""}


# --- the gate ---


async def test_somebody_known_without_the_scope_is_written_down_and_a_stranger_only_counted(
    app: FastAPI, service: Service, tmp_path: Path
) -> None:
    _, secret = await key_of(service, "ann", "files")
    async with asking(app, secret) as known, asking(app, "bj_" + "0" * 12 + "_" + "0" * 64) as stranger:
        assert (await known.post("/api/sandbox/execute", json={"code": "1"})).status_code == 403
        for path in ("/api/sandbox/runs", "/metrics"):
            assert (await stranger.get(path)).status_code == 401
        assert (await stranger.post("/mcp")).status_code == 401
    lines = list(Audit(tmp_path / "audit").lines())
    assert [(line["kind"], line["caller"], line["error"]) for line in lines] == [("refused", "ann", "policy_denied")]
    assert lines[0]["scope"] == "run" and secret not in json.dumps(lines)
    figures = service.metrics.text().decode()
    assert 'sandbox_refusals_total{kind="unauthorized"} 3.0' in figures
    assert 'sandbox_refusals_total{kind="policy_denied"} 1.0' in figures


async def test_a_tool_that_a_key_may_not_use_is_written_down_too(
    app: FastAPI, service: Service, tmp_path: Path
) -> None:
    _, secret = await key_of(service, "ann", "files")
    call = {"name": "execute_code", "arguments": {"code": "1"}}
    async with asking(app, secret) as http:
        headers = await introduced(http)
        body = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call}
        assert "scope 'run'" in (await http.post("/mcp", json=body, headers=headers)).text
    lines = list(Audit(tmp_path / "audit").lines())
    assert [(line["kind"], line["caller"]) for line in lines] == [("refused", "ann")]
