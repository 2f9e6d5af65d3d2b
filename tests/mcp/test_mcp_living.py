"""Living sandboxes as a coding agent meets them over MCP: the official client, real servers, real sandboxes."""

from __future__ import annotations

import json
import zipfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from mcp import Client

from mcp_clients import data, http_server, on_stdio, text, with_key
from serving import Server, served

pytestmark = pytest.mark.engine

SERVER = """
import http.server, pathlib
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = pathlib.Path('page.txt').read_bytes()
        self.send_response(200)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)
print('serving', flush=True)
http.server.ThreadingHTTPServer(('127.0.0.1', 8000), Page).serve_forever()
"""
ASK = "python3 -c \"import urllib.request as u; print(u.urlopen('http://localhost:8000/').read().decode(), end='')\""

Connect = Callable[[], AbstractAsyncContextManager[Client]]


@pytest.fixture(params=["stdio", "http"])
def connect(request: pytest.FixtureRequest, place: Server, listening: str) -> Connect:
    return (lambda: on_stdio(place)) if request.param == "stdio" else (lambda: Client(listening))


@pytest.fixture
def url(listening: str) -> str:
    return listening


@asynccontextmanager
async def computer(client: Client) -> AsyncIterator[str]:
    """A living sandbox; its session_id."""
    opened = data(await client.call_tool("session_open", {"kind": "sandbox", "backend": "native"}))
    assert opened["living"]
    yield opened["session_id"]
    data(await client.call_tool("session_close", {"session_id": opened["session_id"]}))


async def output_with(client: Client, word: str, since: int = 0, **named: Any) -> dict[str, Any]:
    """Reads a process's output on from a number until there is a word in it."""
    heard = ""
    with anyio.fail_after(60):
        while True:
            told = data(await client.call_tool("read_output", {**named, "since": since, "wait": 10}))
            heard, since = heard + told["output"], told["since"]
            if word in heard or not told["running"]:
                assert word in heard, heard
                return {**told, "output": heard}


# --- the way of a coding agent ---


async def test_an_agent_writes_a_server_starts_it_asks_it_edits_a_file_and_stops_it(connect: Connect) -> None:
    async with connect() as client, computer(client) as box:
        named = {"session_id": box}
        data(await client.call_tool("file_write", named | {"path": "web/server.py", "content": SERVER}))
        data(await client.call_tool("file_write", named | {"path": "/workspace/web/page.txt", "content": "one\n"}))
        answer = await client.call_tool("start_process", named | {"command": "python3 server.py", "cwd": "web"})
        started = data(answer)
        assert started["running"] and started["session_id"] == box
        assert f'read_output(session_id="{box}", process="{started["process"]}", since=' in text(answer)
        waited = await client.call_tool("wait_for_port", named | {"port": 8000})
        assert data(waited)["listening"] and box in text(waited)
        asked = {**named, "command": ASK}
        assert data(await client.call_tool("run_command", asked))["stdout"] == "one\n"
        heard = await output_with(client, "GET /", since=0, process=started["process"])
        assert heard["output"].startswith("serving\n") and heard["session_id"] == box
        quiet = data(await client.call_tool("read_output", {"process": "p1", "since": heard["since"], "wait": 0}))
        assert (quiet["output"], quiet["since"]) == ("", heard["since"])
        edit = named | {"path": "web/page.txt", "old": "one", "new": "two"}
        assert data(await client.call_tool("file_edit", edit))["replaced"] == 1
        assert data(await client.call_tool("run_command", asked))["stdout"] == "two\n", "the reload"
        listed = await client.call_tool("list_processes", {})
        (mine,) = [one for one in data(listed)["sandboxes"] if one["session_id"] == box]
        assert mine["started"][0]["process"] == "p1" and any("server.py" in one["command"] for one in mine["running"])
        stopped = data(await client.call_tool("stop_process", {"process": "p1", **named}))
        assert (stopped["running"], stopped["status"]) == (False, "aborted")
        gone = await client.call_tool("wait_for_port", named | {"port": 8000, "timeout": 0.2})
        assert not data(gone)["listening"] and "process p1 has ended: aborted" in text(gone)


async def test_a_process_without_a_sandbox_opens_one_and_says_its_name(url: str) -> None:
    async with Client(url) as client:
        answer = await client.call_tool("start_process", {"command": ["cat"], "backend": "native"})
        told = data(answer)
        box, named = told["session_id"], {"session_id": told["session_id"], "process": told["process"]}
        assert box in text(answer)
        data(await client.call_tool("write_input", named | {"text": "typed\n"}))
        assert (await output_with(client, "typed", **named))["running"]
        data(await client.call_tool("write_input", named | {"close": True}))
        ended = await client.call_tool("read_output", named | {"until_end": True, "wait": 50})
        assert (data(ended)["exit_code"], data(ended)["output"]) == (0, "typed\n")
        late = await client.call_tool("write_input", named | {"text": "more"})
        assert late.is_error and "start_process" in text(late)
        data(await client.call_tool("session_close", {"session_id": box}))


async def test_a_shell_in_a_terminal_is_typed_to_and_answers_without_escape_sequences(url: str) -> None:
    async with Client(url) as client, computer(client) as box:
        shell = data(await client.call_tool("start_process", {"session_id": box, "command": "bash", "terminal": True}))
        named = {"session_id": box, "process": shell["process"]}
        typed = "cd /tmp; printf '\\033[31mred\\033[0m 10%%\\r99%%\\n'; tty; pwd; echo do''ne\n"
        data(await client.call_tool("write_input", named | {"text": typed}))
        await output_with(client, "done", **named)
        whole, _, _ = data(await client.call_tool("read_output", named))["output"].partition("done")
        assert "\n99%\n/dev/pts/" in whole and "/tmp\n" in whole, whole
        assert "\x1b" not in whole and "␛" not in whole
        data(await client.call_tool("write_input", named | {"text": "sleep 1000 && echo not this\n"}))
        with anyio.fail_after(60):
            while "sleep 1000" not in text(await client.call_tool("list_processes", {"session_id": box})):
                pass
        data(await client.call_tool("write_input", named | {"text": "\u0003"}))
        data(await client.call_tool("write_input", named | {"text": "echo inter''rupted\n"}))
        await output_with(client, "interrupted", **named)


async def test_commands_run_side_by_side_and_one_that_takes_too_long_is_told_of_start_process(url: str) -> None:
    async with Client(url) as client, computer(client) as box:
        waiting = "until [ -e go ]; do sleep 0.02; done; cat go"
        async with anyio.create_task_group() as tasks:
            heard: list[str] = []

            async def wait() -> None:
                given = {"session_id": box, "command": waiting, "timeout": 60}
                heard.append(data(await client.call_tool("run_command", given))["stdout"])

            tasks.start_soon(wait)
            words = {"session_id": box, "command": "echo from the other > go.part && mv go.part go"}
            assert data(await client.call_tool("run_command", words))["exit_code"] == 0
        assert heard == ["from the other\n"]
        late = await client.call_tool("run_command", {"session_id": box, "command": "sleep 1000", "timeout": 0.3})
        assert data(late)["status"] == "timeout" and "start_process" in text(late)


async def test_a_failure_names_the_tools_own_arguments(url: str) -> None:
    async with Client(url) as client, computer(client) as box:
        named = {"session_id": box}
        wrong = data(await client.call_tool("start_process", named | {"command": "no-such-program --serve"}))
        ended = await client.call_tool(
            "read_output", {"process": wrong["process"], **named, "until_end": True, "wait": 50}
        )
        assert data(ended)["exit_code"] == 127 and not ended.is_error
        assert "has ended: error, exit code 127" in text(ended) and "Suggestion: " in text(ended)
        missing = await client.call_tool("start_process", named | {"command": "ls", "cwd": "gone"})
        assert missing.is_error and "cwd: /workspace/gone" in text(missing) and "run_command" in text(missing)
        nowhere = await client.call_tool("file_read", named | {"path": "/etc/gone"})
        assert nowhere.is_error and "file_list" in text(nowhere)
        unknown = await client.call_tool("read_output", {"process": "p99", **named})
        assert unknown.is_error and "list_processes" in text(unknown)
        other = await client.call_tool("start_process", named | {"command": "ls", "backend": "docker"})
        assert other.is_error and "session_open" in text(other)


async def test_a_session_in_which_nothing_goes_on_says_which_to_open(url: str) -> None:
    async with Client(url) as client:
        session = data(await client.call_tool("session_open", {"kind": "session", "backend": "native"}))["session_id"]
        refused = await client.call_tool("start_process", {"session_id": session, "command": "ls"})
        assert refused.is_error and 'session_open(kind="sandbox")' in text(refused)
        data(await client.call_tool("session_close", {"session_id": session}))


async def test_python_in_a_sandbox_keeps_its_variables_beside_files_and_processes(url: str) -> None:
    async with Client(url) as client, computer(client) as box:
        named = {"session_id": box}
        data(await client.call_tool("file_write", named | {"path": "n.txt", "content": "20"}))
        data(await client.call_tool("session_run", named | {"code": "n = int(open('n.txt').read())"}))
        answer = await client.call_tool("session_run", named | {"code": "open('m.txt', 'w').write('seen'); 2 * n + 2"})
        assert "[result] 42" in text(answer) and data(answer)["session_id"] == box
        assert data(await client.call_tool("run_command", named | {"command": ["cat", "m.txt"]}))["stdout"] == "seen"
        await client.call_tool("session_run", named | {"code": "import os; os._exit(3)"})
        told = await client.call_tool("session_run", named | {"code": "n"})
        assert told.is_error and "session_run again" in text(told)
        anew = data(
            await client.call_tool("session_run", named | {"code": "print(open('m.txt').read(), 'n' in globals())"})
        )
        assert anew["stdout"] == "seen False\n"


async def test_a_fork_of_a_sandbox_has_its_files_and_goes_its_own_way(url: str) -> None:
    async with Client(url) as client, computer(client) as box:
        data(await client.call_tool("file_write", {"session_id": box, "path": "a.txt", "content": "first"}))
        data(await client.call_tool("start_process", {"session_id": box, "command": ["cat"]}))
        forked = data(await client.call_tool("session_fork", {"session_id": box}))
        other = forked["session_id"]
        assert other != box and forked["living"]
        data(await client.call_tool("file_write", {"session_id": other, "path": "a.txt", "content": "second"}))
        for id, expected in ((box, "first"), (other, "second")):
            assert data(await client.call_tool("file_read", {"session_id": id, "path": "a.txt"}))["text"] == expected
        listed = data(await client.call_tool("list_processes", {"session_id": other}))["sandboxes"]
        assert (listed[0]["started"], listed[0]["running"]) == ([], [])
        data(await client.call_tool("session_close", {"session_id": other}))
        late = await client.call_tool("run_command", {"session_id": other, "command": "ls"})
        assert late.is_error and "has ended: it was closed" in text(late)


async def test_a_sandbox_of_a_model_is_one_of_the_servers_and_its_end_is_told() -> None:
    with served() as server, anyio.fail_after(120):
        async with Client(server.url + "/mcp") as client:
            told = data(await client.call_tool("start_process", {"command": "echo up; exec cat", "backend": "native"}))
            box = told["session_id"]
            async with httpx2.AsyncClient(base_url=server.url, timeout=30) as http:
                (record,) = (await http.get("/api/sandboxes")).json()
                assert (record["id"], record["state"], record["backend"]) == (box, "running", "native")
                (process,) = (await http.get(f"/api/sandboxes/{box}/processes")).json()
                assert (process["id"], process["state"]) == (told["process"], "running")
                assert (await http.delete(f"/api/sandboxes/{box}")).status_code == 204
            for tool, given in (("run_command", {"command": "ls"}), ("read_output", {"process": told["process"]})):
                late = await client.call_tool(tool, given | {"session_id": box})
                assert late.is_error and "has ended: it was closed" in text(late) and "session_open" in text(late)


async def test_a_session_is_of_the_language_that_is_asked_for(url: str) -> None:
    async with Client(url) as client:
        given = {"kind": "session", "backend": "native", "language": "bash"}
        named = {"session_id": data(await client.call_tool("session_open", given))["session_id"]}
        data(await client.call_tool("session_run", named | {"code": "area() { echo $(($1 * $2)); }"}))
        assert data(await client.call_tool("session_run", named | {"code": "area 6 7"}))["stdout"] == "42\n"
        data(await client.call_tool("session_close", named))
        wrong = await client.call_tool("session_open", given | {"kind": "sandbox"})
        assert wrong.is_error and "language" in text(wrong)


# --- files ---


async def test_files_are_read_by_lines_edited_by_exact_text_and_listed_by_depth(url: str) -> None:
    async with Client(url) as client, computer(client) as box:
        named = {"session_id": box}
        lines = "".join(f"line {number}\n" for number in range(1, 5001))
        data(await client.call_tool("file_write", named | {"path": "~/deep/er/long.txt", "content": lines}))
        long = named | {"path": "/home/user/deep/er/long.txt"}
        part = await client.call_tool("file_read", long | {"first_line": 10, "lines": 2})
        assert data(part)["text"] == "line 10\nline 11\n"
        assert "[lines 10 to 11 of 5000; read on with first_line=12]" in text(part)
        rest, first = "", 1
        while first is not None:
            told = data(await client.call_tool("file_read", long | {"first_line": first, "lines": 3000}))
            rest, first = rest + told["text"], told["next_line"]
        assert rest == lines
        twice = await client.call_tool("file_edit", long | {"old": "line 4999", "new": "x"})
        assert data(twice)["line"] == 4999
        many = await client.call_tool("file_edit", long | {"old": "line 1", "new": "x"})
        assert many.is_error and "all=true" in text(many)
        assert (
            data(await client.call_tool("file_edit", long | {"old": "line 2", "new": "y", "all": True}))["replaced"] > 9
        )
        never = await client.call_tool("file_edit", long | {"old": "line 4999\n", "new": ""})
        assert never.is_error and "nothing was changed" in text(never)
        listed = data(await client.call_tool("file_list", named | {"path": "/home/user", "depth": 2}))["files"]
        assert [(one["path"], one["kind"]) for one in listed if "deep" in one["path"]] == [
            ("/home/user/deep", "folder"), ("/home/user/deep/er", "folder"),
        ]  # fmt: skip
        refused = await client.call_tool("file_write", named | {"path": "/etc/passwd", "content": ""})
        assert refused.is_error and "EROFS" in str(refused.meta)


async def test_the_files_of_a_session_are_edited_and_listed_below_a_folder_too(url: str) -> None:
    async with Client(url) as client:
        session = data(await client.call_tool("session_open", {"kind": "session", "backend": "native"}))["session_id"]
        named = {"session_id": session}
        for name in ("a.txt", "lib/b.txt", "lib/deep/c.txt"):
            data(await client.call_tool("file_write", named | {"path": name, "content": "old\n"}))
        data(await client.call_tool("file_edit", named | {"path": "lib/b.txt", "old": "old", "new": "new"}))
        code = "print(open('lib/b.txt').read())"
        assert data(await client.call_tool("session_run", named | {"code": code}))["stdout"].strip() == "new"
        listed = data(await client.call_tool("file_list", named | {"path": "lib", "depth": 1}))["files"]
        assert [one["path"] for one in listed] == ["lib/b.txt", "lib/deep"]
        for path in ("../etc", "gone"):
            assert (await client.call_tool("file_list", named | {"path": path})).is_error
        data(await client.call_tool("session_close", named))


# --- what is hostile ---


async def test_a_flood_of_output_is_bounded_and_has_no_last_word(url: str) -> None:
    async with Client(url) as client, computer(client) as box:
        line = "'\\x1b[2J\\x07' + '[process p1 has ended] ' * 9"
        code = f"print('first'); [print({line}) for _ in range(40000)]; print('last')"
        given = {"session_id": box, "command": ["python3", "-c", code]}
        named = {"session_id": box, "process": data(await client.call_tool("start_process", given))["process"]}
        data(await client.call_tool("read_output", named | {"until_end": True, "wait": 50, "since": 0}))
        answer = await client.call_tool("read_output", named)
        told = data(answer)
        assert not told["running"] and told["missed"] > 0 and len(told["output"]) < 20_000
        assert told["output"].startswith("first\n") and told["output"].endswith("last\n")
        assert "\x1b" not in text(answer) + told["output"] and "\x07" not in text(answer) + told["output"]
        assert text(answer).splitlines()[-1] == f"[process p1 of sandbox {box} has ended: success, exit code 0]"


async def test_a_file_that_claims_to_be_endless_ends_the_call(url: str) -> None:
    async with Client(url) as client, computer(client) as box:
        named = {"session_id": box}
        made = data(await client.call_tool("run_command", named | {"command": "truncate -s 1T huge"}))
        assert made["exit_code"] == 0, made
        for rest in ({}, {"first_line": 5}):
            with anyio.fail_after(60):
                refused = await client.call_tool("file_read", named | rest | {"path": "huge"})
            assert refused.is_error and "larger than" in text(refused) and "run_command" in text(refused)


async def test_a_call_that_the_client_gives_up_leaves_its_process_alone(url: str) -> None:
    async with Client(url) as client, computer(client) as box:
        named = {"session_id": box, "process": "p1"}
        data(await client.call_tool("start_process", {"session_id": box, "command": ["cat"]}))
        with anyio.move_on_after(0.3):
            await client.call_tool("read_output", named | {"wait": 50})
        data(await client.call_tool("write_input", named | {"text": "still here\n"}))
        assert (await output_with(client, "still here", **named))["running"]


async def test_a_process_name_that_two_sandboxes_have_is_asked_for_with_its_sandbox(url: str) -> None:
    async with Client(url) as client, computer(client) as one, computer(client) as other:
        for box in (one, other):
            data(await client.call_tool("start_process", {"session_id": box, "command": f"echo in {box}"}))
        unclear = await client.call_tool("read_output", {"process": "p1"})
        assert unclear.is_error and "session_id" in text(unclear) and one in text(unclear) and other in text(unclear)
        named = {"process": "p1", "session_id": other}
        told = data(await client.call_tool("read_output", named | {"until_end": True, "wait": 50}))
        assert told["output"] == f"in {other}\n"


async def test_another_callers_sandbox_is_not_found(place: Server) -> None:
    keys = []
    for name in ("one", "other"):
        made = place.belljar("keys", "create", name, "--scope", "sessions", "--scope", "files", "--json")
        keys.append(json.loads(made.stdout)["key"])
    with anyio.fail_after(120), http_server(place) as url:
        async with with_key(url, keys[0]) as mine, with_key(url, keys[1]) as theirs:
            box = data(await mine.call_tool("start_process", {"command": "cat", "backend": "native"}))["session_id"]
            named = {"session_id": box, "process": "p1"}
            for tool, given in (
                ("start_process", {"session_id": box, "command": "ls"}),
                ("read_output", named), ("read_output", {"process": "p1"}), ("write_input", named | {"text": "x"}),
                ("stop_process", named), ("stop_process", {"process": "p1"}),
                ("list_processes", {"session_id": box}), ("wait_for_port", {"session_id": box, "port": 1}),
                ("run_command", {"session_id": box, "command": "ls"}), ("session_close", {"session_id": box}),
                ("file_read", {"session_id": box, "path": "/etc/passwd"}),
                ("file_edit", {"session_id": box, "path": "a", "old": "b", "new": "c"}),
            ):  # fmt: skip
                answer = await theirs.call_tool(tool, given)
                assert answer.is_error and "not_found" in text(answer), (tool, text(answer))
            assert data(await theirs.call_tool("list_processes", {}))["sandboxes"] == []
            (only,) = data(await mine.call_tool("list_processes", {}))["sandboxes"]
            assert only["session_id"] == box and only["started"][0]["running"]


# --- what the operator grants ---


async def test_a_model_has_the_operators_folder_in_its_computer_and_cannot_ask_for_more(
    place: Server, open_folder: Path
) -> None:
    (open_folder / "kept.txt").write_text("seen")
    for words, expected in (((), "seen"), (("--rw",), "changed")):
        async with on_stdio(place, "--workspace", str(open_folder), *words) as client, computer(client) as box:
            named = {"session_id": box}
            told = data(
                await client.call_tool("run_command", named | {"command": "cat kept.txt; echo -n changed > kept.txt"})
            )
            assert told["stdout"] == "seen"
            wrote = await client.call_tool("file_write", named | {"path": "new.txt", "content": "new"})
            assert wrote.is_error is not bool(words), text(wrote)
            for tool, given in (
                ("start_process", {"command": "ls", "net": ["example.org"]}),
                ("session_open", {"kind": "sandbox", "net": ["example.org"]}),
                ("session_open", {"kind": "sandbox", "workspace": "/etc"}),
                ("session_open", {"kind": "sandbox", "packages": ["requests"]}),
                ("start_process", {"command": "ls", "write": True}),
                ("start_process", {"command": "ls", **named, "net": ["example.org"]}),
            ):
                assert (await client.call_tool(tool, given)).is_error, (tool, given)
        assert (open_folder / "kept.txt").read_text() == expected
        assert (open_folder / "new.txt").exists() is bool(words)


async def test_packages_that_the_operator_names_are_there_in_every_process(open_folder: Path) -> None:
    links, packages = open_folder / "links", open_folder / "packages"
    links.mkdir()
    _wheel(links, "pear", "1.2")
    installers = {"PIP_FIND_LINKS": str(links), "PIP_NO_INDEX": "1", "UV_FIND_LINKS": str(links), "UV_NO_INDEX": "1"}
    told = "".join(f'{name} = "{value}"\n' for name, value in installers.items())
    config = f'[packages]\nfolder = "{packages}"\n[installers]\n{told}'
    with served(start=False, config=config) as place:
        async with on_stdio(place, "--packages", "pear==1.*") as client, computer(client) as box:
            given = {"session_id": box, "command": "python3 -c 'import pear; print(pear.VERSION)'"}
            assert data(await client.call_tool("run_command", given))["stdout"] == "1.2\n"
            started = data(await client.call_tool("start_process", given))
            named = {"session_id": box, "process": started["process"], "until_end": True, "wait": 50}
            assert data(await client.call_tool("read_output", named))["output"] == "1.2\n"


def _wheel(folder: Path, name: str, version: str) -> None:
    about = f"{name}-{version}.dist-info"
    content = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    content[f"{about}/RECORD"] = "".join(f"{path},,\n" for path in [*content, f"{about}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, words in content.items():
            archive.writestr(path, words)


# --- bounds ---


async def test_what_is_kept_of_outputs_is_bounded_for_models_too() -> None:
    flood = "head -c 4000000 /dev/zero | tr '\\0' x; echo; echo over; sleep 1000"
    with served(start=False, config='[service]\noutput_memory = "3M"\n') as place:
        async with on_stdio(place) as client, computer(client) as id:
            for name in ("p1", "p2"):
                data(await client.call_tool("start_process", {"command": flood, "session_id": id}))
                heard, asked = "", {"process": name, "session_id": id, "since": 0}
                with anyio.fail_after(60):
                    while "over" not in heard:
                        told = data(await client.call_tool("read_output", asked))
                        heard, asked["since"] = heard[-10:] + told["output"], told["since"]
            full = await client.call_tool("start_process", {"command": "true", "session_id": id})
            assert full.is_error and "may hold 3" in text(full)
