"""The MCP server as models meet it: the official client, real processes and sockets, real sandboxes behind them."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from mcp import Client, MCPError
from mcp.types import ImageContent

from mcp_clients import PNG, TOOLS, data, on_stdio, text
from serving import Server, served
from witness import Traces, eventually

pytestmark = pytest.mark.engine


Connect = Callable[[], AbstractAsyncContextManager[Client]]


@pytest.fixture(params=["stdio-2026", "stdio-2025", "http-2026", "http-2025"])
def connect(request: pytest.FixtureRequest, place: Server, listening: str) -> Connect:
    """Both transports, and both eras of the protocol: with the handshake that most clients still do, and without."""
    transport, era = request.param.split("-")
    mode = "legacy" if era == "2025" else "auto"
    return (lambda: on_stdio(place, mode=mode)) if transport == "stdio" else (lambda: Client(listening, mode=mode))


# --- what is offered ---


async def test_tools_have_schemas_and_annotations_and_run_code_over_each_transport_and_protocol(
    connect: Connect,
) -> None:
    async with connect() as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert tools.keys() == TOOLS
        assert all(tool.output_schema and tool.description and tool.annotations for tool in tools.values())
        assert tools["session_open"].output_schema["required"].count("session_id") == 1  # type: ignore[index]
        for name in ("execute_code", "run_code"):
            told = data(await client.call_tool(name, {"language": "python", "code": "print(6 * 7)"}))
            assert (told["status"], told["stdout"], told["exit_code"]) == ("success", "42\n", 0)
            assert told["id"].startswith("bj-") and told["guarantees"]["isolation"]


async def test_annotations_say_the_worst_that_a_tool_can_do(place: Server) -> None:
    async with on_stdio(place) as client:
        hints = {tool.name: tool.annotations for tool in (await client.list_tools()).tools}
    read_only = {name for name, hint in hints.items() if hint and hint.read_only_hint}
    reading = {"file_read", "file_list", "list_languages", "list_processes", "read_output", "wait_for_port",
               "preview_status"}  # fmt: skip
    assert read_only == reading
    assert not any(hint and hint.open_world_hint for hint in hints.values()), "no host was granted"
    once = hints["execute_code"]
    assert once and once.idempotent_hint and not once.destructive_hint
    async with on_stdio(place, "--net", "example.org") as client:
        assert "example.org" in str(client.instructions)
        hints = {tool.name: tool.annotations for tool in (await client.list_tools()).tools}
    once = hints["execute_code"]
    assert once and once.open_world_hint and once.destructive_hint and not once.idempotent_hint
    listing = hints["file_list"]
    assert listing and not listing.open_world_hint


# --- running ---


async def test_a_guest_s_failure_is_an_answer_with_a_status_and_no_error_of_the_tool(listening: str) -> None:
    async with Client(listening) as client:
        answer = await client.call_tool("execute_code", {"code": "import sys\nprint('so far')\n1 / 0"})
        told = data(answer)
        assert (told["status"], told["error"]["error_type"]) == ("error", "RUNTIME_ERROR")
        words = text(answer)
        assert words.startswith("so far\n[stderr]\n")
        assert "ZeroDivisionError" in words and "[error, exit code 1]" in words and "Suggestion: " in words
        late = await client.call_tool("execute_code", {"code": "while True: pass", "timeout": 0.5})
        assert data(late)["status"] == "timeout" and "[timeout" in text(late)


async def test_stdin_null_and_json_like_texts_reach_the_guest_as_they_are(listening: str) -> None:
    """The SDK parses strings that look like JSON where an argument may be anything but a string: ours may not."""
    async with Client(listening) as client:
        code = "import sys\nsys.stdout.write(sys.stdin.read())"
        given = {"code": code, "stdin": '{"a": [1]}', "timeout": None, "net": None}
        assert data(await client.call_tool("execute_code", given))["stdout"] == '{"a": [1]}'
        assert data(await client.call_tool("execute_code", {"code": "[1, 2]"}))["status"] == "success"


@pytest.mark.parametrize(
    ("tool", "given", "said"),
    [
        ("execute_code", {"code": "1", "packages": ["numpy"]}, "packages: there is no such argument of execute_code"),
        ("execute_code", {"code": 5}, "code: Input should be a valid string"),
        ("execute_code", {}, "code: is required"),
        ("execute_code", {"code": "1", "timeout": -1}, "timeout: "),
        ("execute_code", {"code": "1", "language": "cobol"}, "cobol"),
        ("execute_code", {"code": "1", "net": ["example.org"]}, "'example.org' may not be reached"),
        ("execute_code", {"code": "1", "net": ["https://x/y"]}, "is not a host name"),
        ("run_command", {"command": 5}, "command"),
        ("run_command", {"command": []}, "command: "),
        ("session_run", {"code": "1", "session_id": "bs-none"}, "there is no open session"),
        ("file_read", {"session_id": "bs-none", "path": "a"}, "there is no open session"),
    ],
)
async def test_a_refusal_is_an_error_that_a_model_can_read(
    listening: str, tool: str, given: dict[str, Any], said: str
) -> None:
    async with Client(listening) as client:
        answer = await client.call_tool(tool, given)
        assert answer.is_error and answer.structured_content is None
        assert said in text(answer)
        assert answer.meta and answer.meta["belljar/problem"]["kind"] in text(answer)


async def test_an_unknown_tool_is_refused(listening: str) -> None:
    async with Client(listening) as client:
        try:
            answer = await client.call_tool("format_disk", {})
        except MCPError as error:
            assert "format_disk" in str(error)
        else:
            assert answer.is_error and "format_disk" in text(answer)


async def test_a_host_that_people_granted_can_be_asked_for_and_no_other(place: Server) -> None:
    async with on_stdio(place, "--net", "*.example.org") as client:
        refused = await client.call_tool("execute_code", {"code": "1", "net": ["example.com"]})
        assert refused.is_error and "only *.example.org may" in text(refused)
        taken = await client.call_tool("execute_code", {"code": "print(1)", "net": ["api.example.org"]})
        assert "may not be reached" not in text(taken)


async def test_code_gets_its_arguments(listening: str) -> None:
    async with Client(listening) as client:
        said = {"code": "echo $1/$2", "language": "bash", "args": ["a b", "c"]}
        assert data(await client.call_tool("execute_code", said))["stdout"] == "a b/c\n"


async def test_a_folder_and_packages_that_the_operator_grants_are_there_in_every_run(
    place: Server, open_folder: Path
) -> None:
    work, packages = open_folder / "work", open_folder / "venv"
    work.mkdir(mode=0o755)
    (work / "a.txt").write_text("seen")
    python = "/usr/bin/python3" if os.geteuid() == 0 and os.path.exists("/usr/bin/python3") else sys.executable
    subprocess.run([python, "-m", "venv", "--without-pip", str(packages)], check=True)  # one that guests can read
    (site,) = packages.glob("lib/python3*/site-packages")
    (site / "granted.py").write_text("word = 'imported'")
    code = "import granted; print(open('a.txt').read(), granted.word); open('b.txt', 'w').write('new')"
    words = ("--workspace", str(work), "--packages", str(packages))
    async with on_stdio(place, *words) as client:
        for tool in ("execute_code", "session_run"):
            told = data(await client.call_tool(tool, {"code": code}))
            assert (told["stdout"], told["status"]) == ("seen imported\n", "error"), told["stderr"]
        assert "/workspace and is read-only" in str(client.instructions)
    assert not (work / "b.txt").exists()
    async with on_stdio(place, *words, "--rw") as client:
        hints = {tool.name: tool.annotations for tool in (await client.list_tools()).tools}
        assert hints["execute_code"] and hints["execute_code"].destructive_hint
        assert data(await client.call_tool("execute_code", {"code": code}))["status"] == "success"
    assert (work / "b.txt").read_text() == "new"


async def test_a_file_of_the_granted_folder_is_executed_and_none_from_outside(place: Server, open_folder: Path) -> None:
    (open_folder / "main.py").write_text("import sys, utils\nprint(utils.word, sys.argv[1])\n")
    (open_folder / "utils.py").write_text("word = 'found'\n")
    (open_folder / "out.py").symlink_to("/etc/hostname")
    async with on_stdio(place, "--workspace", str(open_folder)) as client:
        told = data(await client.call_tool("execute_file", {"path": "main.py", "args": ["x"]}))
        assert (told["stdout"], told["exit_code"]) == ("found x\n", 0), told["stderr"]
        skill = {"language": "python", "code": "import utils\nprint(utils.word)", "context_files": ["utils.py"]}
        assert data(await client.call_tool("execute_code", skill))["stdout"] == "found\n"
        for path in ("out.py", "../main.py", "missing.py"):
            assert (await client.call_tool("execute_file", {"path": path})).is_error
        typo = await client.call_tool("execute_code", {"cod": "print(1)"})
        assert typo.is_error and "did you mean code?" in str(typo.content)
        code = {"code": "1", "require_libraries": ["belljar_no_such_package"], "backend": "wasm"}
        missing = await client.call_tool("execute_code", code)
        assert missing.is_error and missing.meta is not None
        assert missing.meta["belljar/problem"]["outcome"] == "system_failure"


async def test_a_command_runs_in_a_fresh_sandbox_or_in_an_open_one(listening: str) -> None:
    async with Client(listening) as client:
        given = {"command": ["sh", "-c", "cat; echo err >&2; exit 3"], "stdin": "in"}
        told = data(await client.call_tool("run_command", given | {"backend": "native"}))
        assert (told["exit_code"], told["stdout"], told["stderr"]) == (3, "in", "err\n")
        box = data(await client.call_tool("session_open", {"kind": "sandbox", "backend": "native"}))["id"]
        data(await client.call_tool("file_write", {"session_id": box, "path": "a.txt", "content": "kept"}))
        told = data(await client.call_tool("run_command", {"command": ["cat", "a.txt"], "session_id": box}))
        assert told["stdout"] == "kept"
        both = await client.call_tool("run_command", {"command": ["ls"], "session_id": box, "backend": "native"})
        assert both.is_error and "session_open" in text(both)
        data(await client.call_tool("session_close", {"session_id": box}))


async def test_a_flood_is_cut_to_what_a_client_takes_and_a_model_wants_to_read(listening: str) -> None:
    async with Client(listening) as client:
        code = "print('first'); [print('\\x01\\x1b[2J' * 30) for _ in range(20000)]; print('last')"
        answer = await client.call_tool("execute_code", {"code": code})
        told = data(answer)
        assert told["truncated"] and len(told["stdout"]) < 20_000
        assert told["stdout"].startswith("first\n") and told["stdout"].endswith("last\n")
        assert "\x1b" not in text(answer) and "[the output was cut]" in text(answer)


# --- sessions and files ---


async def test_a_session_keeps_variables_and_files_and_a_fork_goes_its_own_way(listening: str) -> None:
    async with Client(listening) as client:
        opened = data(await client.call_tool("session_open", {"backend": "wasm"}))
        id = opened["id"]
        assert data(await client.call_tool("session_run", {"session_id": id, "code": "x = 41"}))["session_id"] == id
        answer = await client.call_tool("session_run", {"session_id": id, "code": "x + 1"})
        assert "[result] 42" in text(answer) and data(answer)["results"] == [{"text/plain": "42"}]
        fork = data(await client.call_tool("session_fork", {"session_id": id}))["id"]
        data(await client.call_tool("session_run", {"session_id": fork, "code": "x = 0"}))
        assert "[result] 41" in text(await client.call_tool("session_run", {"session_id": id, "code": "x"}))
        for session in (id, fork):
            data(await client.call_tool("session_close", {"session_id": session}))
        assert (await client.call_tool("session_run", {"session_id": id, "code": "x"})).is_error


async def test_a_turn_without_a_session_opens_one_and_says_its_name(listening: str) -> None:
    async with Client(listening) as client:
        first = await client.call_tool("session_run", {"code": "y = 'kept'"})
        id = data(first)["session_id"]
        assert f"[session_id: {id}, to go on with]" in text(first)
        answer = await client.call_tool("session_run", {"session_id": id, "code": "print(y)"})
        assert text(answer) == "kept"
        data(await client.call_tool("session_close", {"session_id": id}))


async def test_files_go_in_and_out_as_text_as_bytes_and_as_images(listening: str) -> None:
    async with Client(listening) as client:
        id = data(await client.call_tool("session_open", {}))["session_id"]
        named = {"session_id": id}
        document = '{"a": "ü"}'
        data(await client.call_tool("file_write", named | {"path": "a.json", "content": document}))
        encoded = base64.b64encode(PNG).decode()
        wrote = data(await client.call_tool("file_write", named | {"path": "dir/p.png", "base64": encoded}))
        assert wrote == {"path": "dir/p.png", "size": len(PNG)}
        read = await client.call_tool("file_read", named | {"path": "a.json"})
        assert text(read) == document and data(read)["text"] == document and data(read)["next_offset"] is None
        picture = await client.call_tool("file_read", named | {"path": "dir/p.png"})
        assert data(picture)["base64"] == encoded and data(picture)["text"] is None
        assert [block.data for block in picture.content if isinstance(block, ImageContent)] == [encoded]
        code = f"print(open('dir/p.png', 'rb').read() == {PNG!r}, open('a.json', encoding='utf-8').read())"
        assert text(await client.call_tool("session_run", named | {"code": code})) == f"True {document}"
        listed = data(await client.call_tool("file_list", named))["files"]
        assert {"a.json", "dir/p.png"} <= {file["path"] for file in listed}
        missing = await client.call_tool("file_read", named | {"path": "nowhere"})
        assert missing.is_error and "not_found" in text(missing)
        climbing = await client.call_tool("file_write", named | {"path": "../x", "content": "1"})
        assert climbing.is_error and "climbs out" in text(climbing)
        data(await client.call_tool("session_close", named))


async def test_a_long_file_is_read_in_parts_that_cut_no_character(listening: str) -> None:
    async with Client(listening) as client:
        id = data(await client.call_tool("session_run", {"code": "open('l', 'w').write('aü' * 50000)"}))["session_id"]
        whole, offset = "", 0
        while offset is not None:
            part = data(await client.call_tool("file_read", {"session_id": id, "path": "l", "offset": offset}))
            whole, offset = whole + part["text"], part["next_offset"]
        assert whole == "aü" * 50000
        data(await client.call_tool("session_close", {"session_id": id}))


async def test_an_image_of_a_turn_is_an_mcp_image_once_and_a_broken_one_is_none(listening: str) -> None:
    code = f"""
class Picture:
    def __init__(self, data): self.data = data
    def _repr_png_(self): return self.data
Picture({PNG!r})"""
    async with Client(listening) as client:
        answer = await client.call_tool("session_run", {"code": code})
        id = data(answer)["session_id"]
        images = [block for block in answer.content if isinstance(block, ImageContent)]
        assert [(image.mime_type, base64.b64decode(image.data)) for image in images] == [("image/png", PNG)]
        assert data(answer)["results"] == [{"image/png": "(image 1 of this answer)"}]
        broken = await client.call_tool("session_run", {"session_id": id, "code": "Picture(b'no picture')"})
        assert not [block for block in broken.content if isinstance(block, ImageContent)]
        assert "was left out" in text(broken)
        data(await client.call_tool("session_close", {"session_id": id}))


async def test_languages_are_listed_with_their_backends(listening: str) -> None:
    async with Client(listening) as client:
        answer = await client.call_tool("list_languages", {})
        told = data(answer)["languages"]
        assert any(row["name"] == "python" and row["available"] and row["backend"] for row in told)
        assert "python" in text(answer)


# --- while it runs ---


async def test_progress_tells_the_seconds_and_the_latest_line_to_who_asked(
    connect: Connect,
) -> None:
    heard: list[tuple[float, str]] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append((progress, message or ""))

    code = "import time\nfor i in range(4):\n  print('step', i, flush=True)\n  time.sleep(0.8)"
    async with connect() as client:
        data(await client.call_tool("execute_code", {"code": code}, progress_callback=hear))
    assert len(heard) >= 2, heard
    assert [seconds for seconds, _ in heard] == sorted({seconds for seconds, _ in heard}), "it must only grow"
    assert any("step" in message for _, message in heard), heard


async def test_a_call_that_the_client_cancels_ends_the_guest(connect: Connect, traces: Traces) -> None:
    command = ["sh", "-c", "sleep 100; true", traces.word]
    async with connect() as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.call_tool, "run_command", {"command": command, "backend": "native", "timeout": 99})
            await anyio.to_thread.run_sync(lambda: eventually(traces.processes, 60))
            assert traces.processes(), "the guest never ran"
            tasks.cancel_scope.cancel()
        assert await anyio.to_thread.run_sync(lambda: eventually(lambda: not traces.processes())), traces.processes()
        told = data(await client.call_tool("execute_code", {"code": "print('alive')"}))
        assert told["stdout"] == "alive\n", "the server goes on"


async def test_the_whole_service_offers_mcp_too() -> None:
    with served() as server, anyio.fail_after(120):
        async with Client(server.url + "/mcp") as client:
            told = data(await client.call_tool("execute_code", {"code": "print(6 * 7)"}))
            assert told["stdout"] == "42\n"
        answer = httpx2.get(f"{server.url}/api/sandbox/runs/{told['id']}", timeout=30)
        assert answer.json()["result"]["stdout"] == "42\n", "the same records"
