"""Previews over MCP: a model starts one, and people see it at an address of their machine."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from mcp_clients import data, on_stdio, text
from serving import Server

pytestmark = [pytest.mark.anyio, pytest.mark.engine]


async def test_a_model_shows_the_users_folder_and_is_told_what_went_wrong(place: Server) -> None:
    folder = Path(place.folder) / "site"
    folder.mkdir(mode=0o755)
    (folder / "index.html").write_text("<h1>hello</h1>")
    async with on_stdio(place, "--workspace", str(folder)) as client:
        serve = {"command": "python3 -u -m http.server 3000", "backend": "native", "wait_seconds": 50}
        told = data(await client.call_tool("start_preview", serve))
        assert told["status"] == "running", told
        url = urlsplit(told["url"])
        async with httpx2.AsyncClient() as http:
            seen = await http.get(f"http://127.0.0.1:{url.port}/", headers={"host": url.netloc})
            assert (seen.status_code, seen.text) == (200, "<h1>hello</h1>")
            other = await http.get(f"http://127.0.0.1:{url.port}/")
            assert other.status_code == 404
        named = {"container_id": told["container_id"]}
        assert data(await client.call_tool("preview_status", named))["url"] == told["url"]
        assert not (await client.call_tool("stop_preview", named)).is_error
        assert (await client.call_tool("preview_status", named)).is_error
        failed = await client.call_tool("start_preview", serve | {"command": "exit 3"})
        assert data(failed)["status"] == "error" and "exit code 3" in text(failed)
