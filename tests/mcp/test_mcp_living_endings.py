"""What goes on in a model's sandbox ends with its MCP server, however that ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client

from mcp_clients import data
from serving import Server
from witness import Traces, descendants, eventually

pytestmark = pytest.mark.engine


def _ask(process: subprocess.Popen[bytes], id: int, tool: str, arguments: dict[str, Any]) -> None:
    assert process.stdin is not None
    message = {"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {"name": tool, "arguments": arguments}}
    process.stdin.write(json.dumps(message).encode() + b"\n")
    process.stdin.flush()


def _answer(process: subprocess.Popen[bytes], id: int) -> dict[str, Any]:
    assert process.stdout is not None
    while True:
        told = json.loads(process.stdout.readline())
        if told.get("id") == id:
            result: dict[str, Any] = told["result"]
            return result


def _begin(place: Server, word: str) -> subprocess.Popen[bytes]:
    """A server on stdio with a sandbox in which something goes on, and a call that waits for its output."""
    with (place.folder / "stderr").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "belljar", "mcp"], env=place._environ, cwd=place.folder, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
    assert process.stdin is not None
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "by hand", "version": "1"}}
    for message in (
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
    ):
        process.stdin.write(json.dumps(message).encode() + b"\n")
    left = f"setsid sh -c 'sleep 1000; : {word}' & trap '' TERM HUP; sleep 1000; : {word}"
    _ask(process, 2, "start_process", {"command": left, "backend": "native"})
    told = _answer(process, 2)
    assert not told.get("isError"), told
    _ask(process, 3, "read_output", {"process": "p1", "wait": 50})
    return process


@pytest.mark.parametrize("how", ["stdin", "SIGKILL"])
def test_what_goes_on_in_a_sandbox_ends_with_its_server(how: str, place: Server, traces: Traces) -> None:
    process = _begin(place, traces.word)
    assert process.stdin is not None and process.stdout is not None
    try:
        assert eventually(lambda: len(traces.processes()) >= 2, 30), place.log
        below = descendants(process.pid)
        if how == "stdin":
            process.stdin.close()
        else:
            process.send_signal(getattr(signal, how))
        process.wait(40)
        assert eventually(lambda: not traces.processes(), 20), traces.processes()
        assert eventually(lambda: not [pid for pid in below if Path(f"/proc/{pid}").exists()])
        if how == "SIGKILL":  # what it could not clean up, the next one does
            assert place.belljar("run", "--backend", "native", "-c", "print(1)").returncode == 0
        assert not traces.groups() and not traces.mounts()
        assert "Traceback" not in place.log, place.log
    finally:
        process.kill()
        process.wait(10)
        process.stdin.close()
        process.stdout.close()


async def test_a_server_over_http_leaves_in_time_though_a_call_waits_for_output(place: Server) -> None:
    command = [sys.executable, "-m", "belljar", "mcp", "--http", "--port", "0", "--json"]
    with (place.folder / "stderr").open("ab") as log:
        process = subprocess.Popen(command, env=place._environ, cwd=place.folder, stdout=subprocess.PIPE, stderr=log)
    assert process.stdout is not None
    told: list[dict[str, Any]] = []
    try:
        url = json.loads(process.stdout.readline())["url"] + "/mcp"
        with anyio.fail_after(120):
            async with Client(url) as client, anyio.create_task_group() as tasks:
                waits = anyio.Event()

                async def progress(seconds: float, total: float | None, message: str | None) -> None:
                    waits.set()

                async def wait() -> None:
                    given = {"process": "p1", "wait": 50}
                    told.append(data(await client.call_tool("read_output", given, progress_callback=progress)))

                data(await client.call_tool("start_process", {"command": "cat", "backend": "native"}))
                tasks.start_soon(wait)
                await waits.wait()
                process.terminate()
                assert await anyio.to_thread.run_sync(process.wait, 30) == 0, place.log
        assert told and told[0]["output"] == ""
        assert "Traceback" not in place.log, place.log
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()
