"""Living sandboxes of a server through the client: real boxes, processes and connections, on good days and bad ones."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx2
import pytest

import belljar
from belljar.client.async_client import AsyncClient
from belljar.client.client import Client
from belljar.client.living.blocking import RemoteLivingSandbox
from belljar.core import errors
from belljar.living.handles import ProcessHandle
from interference import answer, canned, proxied
from serving import Server
from witness import eventually

pytestmark = pytest.mark.engine

COUNT = "for i in $(seq 200); do echo line $i; sleep 0.005; done"


@pytest.fixture(scope="module")
def box(server: Server) -> Iterator[RemoteLivingSandbox]:
    """One sandbox for the tests that leave it in order."""
    with (
        Client(server.url) as client,
        client.sandbox(living=True, backend="native", labels={"of": "all"}, expires=900) as box,
    ):
        yield box


def test_the_handles_have_what_those_of_the_library_have(box: RemoteLivingSandbox) -> None:
    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    ours = {"open", "lease", "another", "for_session"}
    assert public(belljar.Sandbox) - ours <= public(type(box))
    assert public(belljar.AsyncSandbox) - ours <= public(type(box._core))
    process = box.start("true")
    assert isinstance(process, belljar.Process) and isinstance(box.files, belljar.Files)
    assert public(ProcessHandle) <= public(type(process)) & public(type(process._core))
    for name, method in inspect.getmembers(belljar.AsyncProcess, inspect.isfunction):
        if name in public(ProcessHandle):
            theirs = inspect.signature(getattr(type(process._core), name))
            assert [*theirs.parameters] == [*inspect.signature(method).parameters], name


# --- processes ---


def test_a_process_goes_on_beside_commands_and_its_output_is_told_in_order(box: RemoteLivingSandbox) -> None:
    process = box.start("cat; echo last >&2; exit 3", labels={"kind": "echo"}, id="echo")
    assert process.id == "echo" and process.pid > 0 and process.running and process.labels == {"kind": "echo"}
    assert box.exec(["echo", "beside"]).stdout == "beside\n"
    process.write("first\n")
    process.write(b"second\n")
    process.close_stdin()
    heard = list(process.output())
    assert "".join(chunk.text for chunk in heard if chunk.stream == "stdout") == "first\nsecond\n"
    assert (heard[-1].stream, heard[-1].data) == ("stderr", b"last\n")
    assert [chunk.seq for chunk in heard] == list(range(1, len(heard) + 1))
    result = process.wait(30)
    assert (result.exit_code, result.stdout, result.stderr) == (3, "first\nsecond\n", "last\n")
    assert not process.running and process.result == result and process.error is None
    assert process.kept(heard[-2].seq) == (heard[-1],)
    with pytest.raises(BrokenPipeError):
        process.write("too late")
    assert process.signal("TERM") is False
    assert [one.id for one in box.started if one.labels] == ["echo"]
    assert box.process("echo").wait() == result


def test_a_process_is_waited_for_signalled_and_killed(box: RemoteLivingSandbox) -> None:
    process = box.start(["sleep", "1000"])
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        process.wait(0.2)
    assert time.monotonic() - began < 10 and process.running
    assert any("sleep" in one.command for one in box.processes())
    assert process.signal("KILL") is True
    assert process.wait(30).exit_code != 0
    killed = box.start("trap '' TERM; sleep 1000")
    assert killed.kill().status in ("aborted", "killed")
    with pytest.raises(errors.InvalidRequest):
        killed.signal("NONSENSE")
    with pytest.raises(errors.NotFound, match="no process"):
        box.process("nobody")
    with pytest.raises(errors.NotFound, match="no process"):
        box.process("../ps")


def test_a_terminal_is_typed_into_and_resized(box: RemoteLivingSandbox) -> None:
    shell = box.start("bash --norc", pty=(80, 24), env={"PS1": "", "TERM": "dumb"})
    assert shell.pty is not None and shell.pty.columns == 80
    shell.resize(101, 33)
    shell.write("stty size; exit 4\n")
    assert b"33 101" in b"".join(chunk.data for chunk in shell.output())
    assert shell.wait(30).exit_code == 4
    with pytest.raises(errors.InvalidRequest):
        box.start("true", pty=(0, 24))


async def test_async_handles_are_the_same_with_await(server: Server) -> None:
    async with (
        AsyncClient(server.url) as client,
        client.sandbox(living=True, backend="native", expires=60) as box,
    ):
        process = await box.start("cat")
        await process.write("typed")
        await process.close_stdin()
        assert [chunk.text async for chunk in process.output()] == ["typed"]
        assert (await process.wait()).ok and len(await process.kept()) == 1
        assert [one.id for one in await box.started] == [(await box.process("p1")).id] == ["p1"]
        await box.files.write("a", b"1")
        async with box.interpreter("bash") as shell, box.files.watch() as changes:
            assert (await shell.run("cat a; echo >b")).stdout == "1"
            assert (await anext(changes)).path == "/workspace/b"
        found: list[str] = []
        async with anyio.create_task_group() as tasks:

            async def one(number: int) -> None:
                found.append((await box.exec(["echo", str(number)])).stdout)

            for number in range(4):
                tasks.start_soon(one, number)
        assert sorted(found) == ["0\n", "1\n", "2\n", "3\n"]
        id = box.id
    async with AsyncClient(server.url) as client:
        with pytest.raises(errors.SessionEnded, match="closed"):
            await client.sandbox(id)


# --- commands and interpreters ---


def test_commands_take_what_those_of_the_library_take(box: RemoteLivingSandbox) -> None:
    box.files.make_dir("made")
    code = (
        "import os, sys; print(os.getcwd(), os.environ['A'], sys.argv[1], sys.stdin.read(), open('/inputs/in').read())"
    )
    result = box.run(code, workdir="made", env={"A": "1"}, args=["x"], stdin="typed", files={"in": "given"})
    assert result.stdout.split() == ["/workspace/made", "1", "x", "typed", "given"], result
    pieces: list[str] = []
    assert box.exec(["sh", "-c", "echo out; echo err >&2"], on_stdout=pieces.append).stderr == "err\n"
    assert "".join(pieces) == "out\n"
    assert box.run("while True: pass", timeout=0.5).status == "timeout"
    stop = belljar.Cancel()
    threading.Timer(0.5, stop.cancel).start()
    assert box.exec(["sleep", "100"], cancel=stop).status == "aborted"
    with pytest.raises(errors.InvalidRequest, match="limit of the whole sandbox"):
        box.run("1", memory="1G")
    with pytest.raises(errors.InvalidRequest, match="cwd"):
        box.start("true", cwd="nowhere")


async def test_a_command_whose_caller_is_cancelled_ends_and_the_sandbox_lives_on(server: Server) -> None:
    async with (
        AsyncClient(server.url) as client,
        client.sandbox(living=True, backend="native", expires=60) as box,
    ):
        with anyio.move_on_after(1.0) as waiting:
            await box.exec(["sleep", "1000"])
        assert waiting.cancelled_caught
        with anyio.fail_after(20):
            while any("sleep" in one.command for one in await box.processes()):
                await anyio.sleep(0.05)
        assert (await box.exec(["echo", "lives"])).stdout == "lives\n"


def test_an_interpreter_keeps_its_variables_and_sees_the_files(box: RemoteLivingSandbox) -> None:
    with box.interpreter() as python:
        assert python.run("import os; x = 20").ok and python.language == "python"
        assert python.run("x + 1").results[0]["text/plain"] == "21"
        assert python.run("open('/workspace/by-python', 'w').write('1')").ok
        assert "path" in python.complete("os.pa")
        assert python.interrupt() is False
        began = threading.Event()
        turn: list[belljar.Result] = []
        code = "print('on', flush=True); import time; time.sleep(1000)"
        work = threading.Thread(target=lambda: turn.append(python.run(code, on_stdout=lambda text: began.set())))
        work.start()
        assert began.wait(20) and eventually(python.interrupt)
        work.join(20)
        assert turn and not turn[0].ok and python.ended == ""
        assert python.run("x").results[0]["text/plain"] == "20"
    assert box.files.read("by-python") == b"1"
    with pytest.raises(errors.BelljarError, match="cobol"):
        box.interpreter("cobol")


# --- ports ---


def test_a_port_is_waited_for_and_dialled(box: RemoteLivingSandbox) -> None:
    with pytest.raises(TimeoutError, match="nothing listens on port 8123"):
        box.wait_for_port(8123, timeout=0.1)
    with pytest.raises(ConnectionRefusedError):
        box.dial(8123)
    program = (
        "import socket\ns = socket.create_server(('127.0.0.1', 8123))\nwhile True:\n    c, _ = s.accept()\n"
        "    while data := c.recv(65536): c.sendall(data.swapcase())\n    c.close()"
    )
    server = box.start(["python3", "-c", program])
    box.wait_for_port(8123)
    sent = os.urandom(300_000).hex().encode()
    with box.dial(8123) as one, box.dial(8123) as other:
        one.write(sent)
        got = b""
        while len(got) < len(sent):
            got += one.read()
        assert got == sent.swapcase()
        one.close()
        other.write(b"ab")
        assert other.read() == b"AB"
    server.kill()
    with pytest.raises(errors.InvalidRequest, match="port"):
        box.dial(0)


# --- files ---


def test_files_are_those_of_the_library_with_real_errors(box: RemoteLivingSandbox) -> None:
    files = box.files
    files.write("tree/a b.txt", "text", 0o640)
    assert files.read("tree/a b.txt") == b"text" and files.stat("tree/a b.txt").mode == 0o640
    assert files.make_dir("tree/sub") and not files.make_dir("tree/sub")
    files.copy("tree/a b.txt", "tree/sub/ü")
    files.move("tree/a b.txt", "tree/z")
    assert [item.path for item in files.list("tree", 2)] == [
        "/workspace/tree/sub", "/workspace/tree/sub/ü", "/workspace/tree/z",
    ]  # fmt: skip
    assert files.exists("tree/z") and not files.exists("tree/nobody")
    files.write("~/notes", "home")
    assert files.read_text(f"{box.home}/notes") == "home"
    with pytest.raises(FileNotFoundError):
        files.read("nobody")
    with pytest.raises(IsADirectoryError):
        files.read("tree")
    with pytest.raises(PermissionError):
        files.remove("/proc/1/status")
    with pytest.raises(OSError, match="Read-only"):
        files.write("/etc/passwd", "root::0:0")
    with pytest.raises(errors.InvalidRequest, match="path"):
        files.read("a\0b")
    files.remove("tree")
    assert not files.exists("tree")


def test_large_files_and_folders_come_and_go_whole(box: RemoteLivingSandbox, tmp_path: Path) -> None:
    content = os.urandom(9_000_000)
    box.files.write("large", content)
    with box.files.open("large") as file:
        assert file.read(10) == content[:10] and file.read() == content[10:]
    assert box.read("large") == content
    (tmp_path / "up" / "deep").mkdir(parents=True)
    (tmp_path / "up" / "deep" / "file").write_bytes(content)
    (tmp_path / "up" / "run").write_text("#!/bin/sh\n")
    (tmp_path / "up" / "run").chmod(0o755)
    box.files.upload(tmp_path / "up", "loaded")
    assert box.exec(["sh", "-c", "test -x loaded/run && cmp large loaded/deep/file"]).ok
    assert box.files.download("loaded", tmp_path / "down") == ()
    assert (tmp_path / "down" / "deep" / "file").read_bytes() == content
    with box.files.pack("loaded/run") as pieces:
        packed = b"".join(pieces)
    box.files.unpack("copy", iter([packed[:700], packed[700:]]))
    assert box.files.read("copy/workspace/loaded/run") == b"#!/bin/sh\n"
    with pytest.raises(errors.InvalidRequest):
        box.files.unpack("copy", iter([b"no archive" * 100]))
    with pytest.raises(FileNotFoundError):
        box.files.upload(tmp_path / "nobody", "x")


def test_a_link_reads_or_writes_one_file_without_a_key(box: RemoteLivingSandbox) -> None:
    box.write("linked", "content")
    assert httpx2.get(box.link("linked")).content == b"content"
    assert httpx2.put(box.link("~/put", write=True), content=b"put").is_success
    assert box.files.read("~/put") == b"put"
    assert not httpx2.put(box.link("linked"), content=b"changed").is_success
    assert box.read("linked") == b"content"
    with pytest.raises(errors.InvalidRequest):
        box.link("linked", seconds=-1)


def test_changes_are_told_while_a_folder_is_watched(box: RemoteLivingSandbox) -> None:
    box.files.make_dir("watched/below")
    with box.files.watch("watched", recursive=True) as changes:
        box.exec(["sh", "-c", "echo 1 > watched/below/new"])
        assert next(changes).path == "/workspace/watched/below/new"
    with pytest.raises(FileNotFoundError), box.files.watch("nowhere"):
        pass


# --- its life ---


def test_it_is_found_again_by_its_id_from_another_process(box: RemoteLivingSandbox, server: Server) -> None:
    box.files.write("left", "here")
    program = (
        "import sys, belljar\nwith belljar.Client(sys.argv[1]) as client, client.sandbox(sys.argv[2]) as box:\n"
        "    print(box.labels, box.read('left'))\n    box.start('sleep 1000', id='left')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, server.url, box.id], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "{'of': 'all'} b'here'\n"
    assert box.process("left").kill()
    with Client(server.url) as client:
        assert [one.id for one in client.sandboxes({"of": "all"})] == [box.id]
        assert client.sandboxes(labels={"of": "none"}) == []
        with pytest.raises(errors.NotFound):
            client.sandbox("bs-0000000000000000")
        with pytest.raises(errors.InvalidRequest, match="id"):
            client.sandbox("../x")
        with pytest.raises(errors.InvalidRequest, match="expires"):
            client.sandbox(living=True, lifetime=10)  # type: ignore[call-overload]


def test_what_is_opened_without_a_block_outlives_its_process_and_close_ends_it(server: Server) -> None:
    program = (
        "import sys, belljar\nprint(belljar.Client(sys.argv[1]).sandbox(living=True, backend='native', expires=120).id)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, server.url], capture_output=True, text=True, timeout=60, check=True
    )
    with Client(server.url) as client:
        found = client.sandbox(done.stdout.strip())
        assert found.exec(["echo", "lives"]).stdout == "lives\n"
        found.close()
        found.close()
        assert found.ended and client.sandboxes({"of": "nobody"}) == []
        with pytest.raises(errors.SessionEnded):
            client.sandbox(found.id)
        with pytest.raises(errors.SessionEnded):
            found.exec(["true"])


def test_it_is_paused_resumed_and_given_more_time(box: RemoteLivingSandbox) -> None:
    box.pause()
    assert box.paused
    with pytest.raises(errors.InvalidRequest, match="paused"):
        box.exec(["true"])
    box.resume()
    assert not box.paused and box.exec(["true"]).ok
    box.extend(1000)
    assert box.expires is not None and 900 < box.expires - time.time() < 1001
    assert box.refresh().state == "running" and box.ended == ""


def test_a_snapshot_and_a_fork_have_its_files_and_not_its_processes(box: RemoteLivingSandbox, server: Server) -> None:
    box.files.write("state", "one")
    kept = box.snapshot(labels={"step": "1"})
    box.files.write("state", "two")
    with Client(server.url) as client, box.fork(expires=60) as copy:
        assert copy.id != box.id and copy.read("state") == b"two"
        copy.write("state", "three")
        assert box.read("state") == b"two"
        assert [one.id for one in client.snapshots({"step": "1"})] == [kept.id]
        with client.sandbox(living=True, backend="native", snapshot=kept, expires=60) as again:
            assert again.read("state") == b"one" and again.started == ()
        client.remove_snapshot(kept.id)
        assert client.snapshots({"step": "1"}) == []
        with pytest.raises(errors.NotFound):
            client.remove_snapshot(kept.id)


# --- bad days ---


def test_output_that_is_cut_again_and_again_loses_nothing_and_says_nothing_twice(
    server: Server, box: RemoteLivingSandbox
) -> None:
    left = [120, 300, 77, 500, 1000, 333, 20]

    def plan(request: bytes) -> int | None:
        return left.pop(0) if b"/output?" in request and left else None

    process = box.start(COUNT)
    with proxied(server.url, plan) as proxy, Client(proxy.url) as client:
        heard = list(client.sandbox(box.id).process(process.id).output())
        assert proxy.cuts == 7
    lines = "".join(f"line {i}\n" for i in range(1, 201))
    assert process.wait().stdout == lines
    assert "".join(chunk.text for chunk in heard) == lines
    assert [chunk.seq for chunk in heard] == list(range(1, len(heard) + 1))


def test_a_start_and_an_opening_whose_answers_were_lost_are_done_once(server: Server) -> None:
    cuts = [0, 0]

    def plan(request: bytes) -> int | None:
        return cuts.pop() if request.startswith(b"POST") and cuts else None

    with proxied(server.url, plan) as proxy, Client(proxy.url) as client:
        with client.sandbox(living=True, backend="native", labels={"cut": "1"}, expires=60) as box:
            assert len(client.sandboxes({"cut": "1"})) == 1
            cuts[:] = [0]
            box.start("sleep 100")
            assert len(box.started) == 1
            cuts[:] = [0]
            assert box.exec(["sh", "-c", "echo x >> once; cat once"]).stdout == "x\n"
        assert proxy.cuts == 4


async def test_an_opening_that_is_cancelled_leaves_no_sandbox(server: Server) -> None:
    async with AsyncClient(server.url) as client:
        for seconds in (0.01, 0.05, 0.1):
            with anyio.move_on_after(seconds):
                async with client.sandbox(living=True, backend="native", labels={"cut": "2"}, expires=60):
                    pass  # on a quick machine it is open by then, and is ended as usual
            assert await client.sandboxes({"cut": "2"}) == []


def test_a_watch_that_breaks_says_that_changes_were_missed(server: Server, box: RemoteLivingSandbox) -> None:
    left = [400]

    def plan(request: bytes) -> int | None:
        return left.pop() if b"/files/watch" in request and left else None

    box.files.make_dir("seen")
    with (
        proxied(server.url, plan) as proxy,
        Client(proxy.url) as client,
        client.sandbox(box.id).files.watch("seen") as changes,
    ):
        box.exec(["sh", "-c", "for i in $(seq 20); do echo > seen/a-name-that-is-long-$i; done"])
        kinds = iter(change.kind for change in changes)
        assert "missed" in kinds and proxy.cuts == 1
        box.exec(["touch", "seen/after"])
        assert next(kinds) == "created"


def test_a_server_that_is_gone_or_another_is_told_as_such(server: Server) -> None:
    with pytest.raises(errors.NotAvailable, match="no connection"):
        Client("http://127.0.0.1:1", retries=0).sandbox(living=True)
    nothing = answer("200 OK", b"{}", "application/json")
    with canned(nothing) as other, pytest.raises(errors.NotAvailable, match="do not understand"):
        Client(other.url, retries=0).sandbox("bs-0123456789abcdef")


# --- its network ---


def test_the_network_of_a_sandbox_of_a_server_is_told_and_changed(box: RemoteLivingSandbox) -> None:
    assert box.network.list() == ()
    told = box.network.set(["a.example", "*.b.example:8443"])
    assert (told.mode, told.net) == ("listed", ("*.b.example:8443", "a.example"))
    assert box.network.deny("x.b.example:8443").denied == ("x.b.example:8443",)
    assert "https_proxy=http://127.0.0.1:3128" in box.exec("env").stdout
    refused = box.exec("curl -sS https://c.example 2>&1")
    assert "c.example:443 was refused: it is not on the list" in " ".join(refused.denied)
    assert box.network.set([]).mode == "none"
    with pytest.raises(errors.InvalidRequest, match="not a host name"):
        box.network.allow("no host")
