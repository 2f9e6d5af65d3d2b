"""Who may ask an MCP server over HTTP, and for what."""

from __future__ import annotations

import json

import anyio
import httpx2
import pytest

from mcp_clients import data, http_server, text, with_key
from serving import Server

pytestmark = pytest.mark.engine


def _key(place: Server, name: str, *scopes: str) -> str:
    words = [word for scope in scopes for word in ("--scope", scope)]
    made = place.belljar("keys", "create", name, *words, "--json")
    assert made.returncode == 0, made.stderr + made.stdout
    return str(json.loads(made.stdout)["key"])


async def test_over_http_a_key_is_needed_once_there_is_one_and_says_what_its_holder_may(place: Server) -> None:
    runner, holder = _key(place, "runner", "run"), _key(place, "holder", "sessions", "files")
    with anyio.fail_after(120), http_server(place) as url:
        async with httpx2.AsyncClient(timeout=30) as http:
            hello = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
            accept = {"Accept": "application/json, text/event-stream"}
            for headers in ({}, {"Authorization": "Bearer bj_nonsense"}):
                answer = await http.post(url, json=hello, headers=accept | headers)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
                assert answer.json()["kind"] == "unauthorized"
        async with with_key(url, runner) as client:
            assert data(await client.call_tool("execute_code", {"code": "print(1)"}))["stdout"] == "1\n"
            refused = await client.call_tool("session_open", {})
            assert refused.is_error and "scope 'sessions'" in text(refused)
            refused = await client.call_tool("file_list", {"session_id": "bs-x"})
            assert refused.is_error and "scope 'files'" in text(refused)
        async with with_key(url, holder) as client:
            refused = await client.call_tool("execute_code", {"code": "1"})
            assert refused.is_error and "scope 'run'" in text(refused)
            id = data(await client.call_tool("session_open", {}))["id"]
            data(await client.call_tool("file_write", {"session_id": id, "path": "a", "content": "1"}))
            data(await client.call_tool("session_close", {"session_id": id}))


async def test_an_mcp_session_belongs_to_the_key_that_began_it(place: Server) -> None:
    one, other = _key(place, "one", "run"), _key(place, "other", "run")
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "by hand", "version": "1"}}
    accept = {"Accept": "application/json, text/event-stream"}
    with anyio.fail_after(120), http_server(place) as url:
        async with httpx2.AsyncClient(timeout=30, headers=accept) as http:
            begun = await http.post(
                url, json={"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello},
                headers={"X-API-Key": one},
            )  # fmt: skip
            session = {"Mcp-Session-Id": begun.headers["mcp-session-id"]}
            ping = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
            assert (await http.post(url, json=ping, headers=session | {"X-API-Key": one})).status_code == 200
            assert (await http.post(url, json=ping, headers=session | {"X-API-Key": other})).status_code == 404


async def test_pages_of_other_sites_cannot_ask(listening: str) -> None:
    async with httpx2.AsyncClient(timeout=30) as http:
        ping = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
        for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
            answer = await http.post(listening, json=ping, headers=headers)
            assert answer.status_code == 403, headers
