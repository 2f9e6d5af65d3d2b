"""The tool `run_tests`: of the folder that the user granted, and of a sandbox that the model works in."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcp_clients import data, on_stdio, text
from serving import Server
from small_projects import SUMS, project

pytestmark = pytest.mark.engine


async def test_a_model_learns_which_tests_of_the_users_folder_failed_and_why(place: Server, open_folder: Path) -> None:
    folder = project(open_folder / "p")
    async with on_stdio(place, "--workspace", str(folder)) as client:
        answer = await client.call_tool("run_tests", {"backend": "native"})
        told = data(answer)
        assert (told["status"], told["passed"], told["failed"], told["skipped"]) == ("failed", 1, 1, 1)
        assert "failed: test_it.Sums.test_bad at test_it.py:6" in text(answer) and "one is not two" in text(answer)
        again = data(await client.call_tool("run_tests", {"only": [told["failures"][0]["id"]], "backend": "native"}))
        assert (again["passed"], again["failed"]) == (0, 1)
    assert sorted(one.name for one in folder.iterdir()) == ["test_it.py"]


async def test_a_model_tests_what_it_wrote_into_a_sandbox_and_mends_it(place: Server) -> None:
    async with on_stdio(place) as client:
        refused = await client.call_tool("run_tests", {})
        assert refused.is_error and "session_open" in text(refused)
        id = data(await client.call_tool("session_open", {"kind": "sandbox", "backend": "native"}))["session_id"]
        await client.call_tool("file_write", {"session_id": id, "path": "test_it.py", "content": SUMS})
        told = data(await client.call_tool("run_tests", {"session_id": id}))
        assert (told["status"], told["framework"]) == ("failed", "unittest")
        mended = SUMS.replace("(1, 2,", "(22, 22,")
        await client.call_tool("file_write", {"session_id": id, "path": "test_it.py", "content": mended})
        assert data(await client.call_tool("run_tests", {"session_id": id}))["status"] == "passed"
