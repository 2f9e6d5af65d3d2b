"""MCP servers in processes of their own, and the official client for them."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio
import httpx2
from mcp import Client, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CallToolResult

from serving import Server

TOOLS = {
    "execute_code", "execute_file", "run_command", "session_open", "session_run", "session_fork", "session_close",
    "start_process", "read_output", "write_input", "wait_for_port", "list_processes", "stop_process",
    "start_preview", "preview_status", "stop_preview",
    "file_write", "file_read", "file_edit", "file_list", "list_languages",
    "run_tests",
}  # fmt: skip
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@contextmanager
def http_server(place: Server, *words: str) -> Iterator[str]:
    command = [sys.executable, "-m", "belljar", "mcp", "--http", "--port", "0", "--json", *words]
    with (place.folder / "stderr").open("ab") as log:
        process = subprocess.Popen(command, env=place._environ, cwd=place.folder, stdout=subprocess.PIPE, stderr=log)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"it did not start; it said:\n{place.log}"
        yield json.loads(line)["url"] + "/mcp"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0, place.log
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


def started(place: Server, *words: str) -> StdioServerParameters:
    return StdioServerParameters(
        command=sys.executable, args=["-m", "belljar", "mcp", *words], env=place._environ, cwd=place.folder
    )


@asynccontextmanager
async def on_stdio(place: Server, *words: str, mode: str = "auto") -> AsyncIterator[Client]:
    with anyio.fail_after(120), (place.folder / "stderr").open("a") as log:
        async with Client(stdio_client(started(place, *words), errlog=log), mode=mode) as client:
            yield client


@asynccontextmanager
async def with_key(url: str, key: str) -> AsyncIterator[Client]:
    http = httpx2.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=60)
    async with http, Client(streamable_http_client(url, http_client=http)) as client:
        yield client


def text(answer: CallToolResult) -> str:
    return "".join(getattr(block, "text", "") for block in answer.content)


def data(answer: CallToolResult) -> dict[str, Any]:
    assert not answer.is_error, text(answer)
    assert answer.structured_content is not None
    return answer.structured_content
