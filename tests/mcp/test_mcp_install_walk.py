"""`belljar mcp install CLIENT` to its end: what the client's file then says is started as that client starts it.

The clients themselves are not here. What each of them does with its file is to start the entry's command, without a
shell, with no variables but a few, in some folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters, stdio_client

from belljar.cli.mcp_install import CLIENTS, NAME
from mcp_clients import data
from serving import Server

pytestmark = pytest.mark.anyio


def _entry(client: str, home: Path) -> dict[str, Any]:
    scope = "user" if CLIENTS[client].user else "project"
    path = home / (CLIENTS[client].user if scope == "user" else CLIENTS[client].project)
    read = tomllib.loads if path.suffix == ".toml" else json.loads
    found: dict[str, Any] = read(path.read_text())[CLIENTS[client].section][NAME]
    return found


@pytest.mark.skipif(sys.platform == "darwin", reason="SKIPPED: the files are elsewhere on macOS")
@pytest.mark.parametrize("client", ["claude-code", "codex", "vscode"])
async def test_what_a_client_s_file_says_is_a_server_that_runs_code(place: Server, tmp_path: Path, client: str) -> None:
    variables = {**place._environ, "HOME": str(tmp_path)}
    words = [sys.executable, "-m", "belljar", "mcp", "install", client, "--scope", "user", "--yes"]
    done = subprocess.run(words, env=variables, cwd=tmp_path, text=True, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0 and "Restart" in done.stdout + done.stderr, done
    entry = _entry(client, tmp_path)
    asked = StdioServerParameters(command=entry["command"], args=entry["args"], env=variables, cwd="/")
    with anyio.fail_after(120), (tmp_path / "stderr").open("w") as log:
        async with Client(stdio_client(asked, errlog=log)) as server:
            tools = {tool.name for tool in (await server.list_tools()).tools}
            assert "execute_code" in tools
            told = data(await server.call_tool("execute_code", {"code": "print(6 * 7)", "language": "python"}))
    assert told["stdout"] == "42\n"
