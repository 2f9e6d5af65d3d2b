"""What is around the MCP server: the page of its configurations, and what is said without its extra."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from belljar.cli.mcp_install import CLIENTS
from mcp_clients import TOOLS
from serving import Server, served

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "mcp.md").read_text()
BLOCKS = re.findall(r"^```(json|toml)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def place() -> Iterator[Server]:
    """Folders and an environment for servers that tests start by themselves."""
    with served(start=False) as server:
        yield server


@pytest.mark.parametrize(("kind", "block"), BLOCKS)
def test_every_configuration_of_the_page_parses_and_starts_a_command_that_exists(kind: str, block: str) -> None:
    document = json.loads(block) if kind == "json" else tomllib.loads(block)
    (section,) = document.keys() - {"inputs"}
    assert section in {client.section for client in CLIENTS.values()}
    server = document[section]["belljar"]
    if address := server.get("url") or server.get("httpUrl") or server.get("serverUrl"):
        assert address == "http://127.0.0.1:8080/mcp"
        assert "BELLJAR_KEY" in block or "Bearer" in block
        return
    assert server["command"] == "belljar"
    command = [sys.executable, "-m", "belljar", *server["args"], "--help"]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


def test_the_page_has_a_block_for_each_way_and_names_every_tool() -> None:
    assert len(BLOCKS) >= 12
    assert all(client.title in PAGE for client in CLIENTS.values())
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == TOOLS


def test_the_command_line_does_not_import_mcp_for_anything_else() -> None:
    code = "import sys, belljar.cli.main, belljar.cli.mcp; print('mcp' in sys.modules, 'starlette' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "False False\n"
    )


def test_without_the_extra_it_says_what_to_install(place: Server) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "mcp.py").write_text("raise ModuleNotFoundError('No module named mcp', name='mcp')\n")
        path = os.pathsep.join([folder, *filter(None, [place._environ.get("PYTHONPATH")])])
        process = subprocess.run(
            [sys.executable, "-m", "belljar", "mcp"], env=place._environ | {"PYTHONPATH": path}, cwd=place.folder,
            capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False,
        )  # fmt: skip
    assert process.returncode == 125 and process.stdout == ""
    assert "pip install 'belljar-sandbox[mcp]'" in process.stderr


def test_a_port_without_http_is_refused(place: Server) -> None:
    made = place.belljar("mcp", "--port", "1")
    assert made.returncode == 125 and "--http" in made.stderr
