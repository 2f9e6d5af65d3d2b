"""MCP servers that are ended in mid-run, from whichever side, leave nothing; their stdout is the protocol alone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client

from mcp_clients import http_server
from serving import Server
from witness import Traces, descendants, eventually

pytestmark = pytest.mark.engine


def _speak(process: subprocess.Popen[bytes], *messages: dict[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(b"".join(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n" for message in messages))
    process.stdin.flush()


def _begin(place: Server, command: list[str], before: str = "") -> subprocess.Popen[bytes]:
    """A server on stdio with a run under way, by hand: no client that ends it nicely."""
    started = ["sh", "-c", f'{before} exec "$@"', "sh", sys.executable, "-m", "belljar", "mcp"]
    with (place.folder / "stderr").open("ab") as log:
        process = subprocess.Popen(
            started, env=place._environ, cwd=place.folder, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "by hand", "version": "1"}}
    given = {"command": command, "backend": "native", "timeout": 99}
    _speak(
        process,
        {"id": 1, "method": "initialize", "params": hello},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": {"name": "run_command", "arguments": given}},
        {"id": 3, "method": "tools/call", "params": {"name": "session_run", "arguments": {"code": "x = 1"}}},
    )
    return process


@pytest.mark.parametrize("how, before", [("stdin", ""), ("SIGTERM", ""), ("SIGINT", ""), ("SIGTERM", "trap '' INT;")])
def test_a_server_that_is_ended_in_mid_run_leaves_nothing(how: str, before: str, place: Server, traces: Traces) -> None:
    process = _begin(place, ["sh", "-c", "sleep 100; true", traces.word], before)  # `&` of a shell's ignores SIGINT
    try:
        assert eventually(traces.processes, 60), place.log
        assert process.stdin is not None
        below = descendants(process.pid)
        assert below
        if how == "stdin":
            process.stdin.close()
        else:  # with stdin still open, as from a terminal or a service manager
            process.send_signal(getattr(signal, how))
        process.wait(40)
        assert eventually(lambda: not traces.processes()), traces.processes()
        assert eventually(lambda: not [pid for pid in below if Path(f"/proc/{pid}").exists()])
        assert not [name for name in traces.files() if not name.endswith(".owner")], traces.files()
        assert not traces.groups() and not traces.mounts()
        if how == "stdin":
            assert process.returncode == 0, place.log
        assert "Traceback" not in place.log, place.log
    finally:
        process.kill()
        process.wait(10)
        process.stdin.close()  # type: ignore[union-attr]
        process.stdout.close()  # type: ignore[union-attr]


def test_stdout_carries_nothing_but_the_protocol(place: Server) -> None:
    messages = (
        {"id": 1, "method": "initialize", "params": {
            "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "by hand", "version": "1"}}},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": {"name": "execute_code", "arguments": {"code": "print('out')"}}},
        {"id": 3, "method": "tools/call", "params": {"name": "nothing", "arguments": {}}},
        {"id": 4, "method": "nonsense"},
    )  # fmt: skip
    with (place.folder / "stderr").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "belljar", "mcp"], env=place._environ, cwd=place.folder, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
    try:
        _speak(process, *messages)
        process.stdin.write(b"this is not JSON\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
        assert process.stdout is not None
        told: dict[Any, Any] = {}
        deadline = time.monotonic() + 60
        while not {1, 2, 3, 4} <= told.keys() and time.monotonic() < deadline:
            line = json.loads(process.stdout.readline())
            assert line["jsonrpc"] == "2.0"
            told[line.get("id")] = line
        assert told[2]["result"]["structuredContent"]["stdout"] == "out\n"
        process.stdin.close()  # type: ignore[union-attr]
        rest = process.stdout.read()
        assert all(json.loads(line)["jsonrpc"] == "2.0" for line in rest.splitlines())
        assert process.wait(15) == 0
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()  # type: ignore[union-attr]


async def test_a_client_that_only_listens_does_not_hold_up_a_server_that_leaves(place: Server) -> None:
    """`http_server` asserts that it ends in time, with code 0."""
    began = time.monotonic()
    with anyio.fail_after(120), http_server(place) as url:
        async with Client(url, mode="legacy"):  # opens a stream of its own for what the server has to say
            began = time.monotonic()
    assert time.monotonic() - began < 15
