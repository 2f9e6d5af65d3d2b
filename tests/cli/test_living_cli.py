"""`belljar shell` and the commands for living sandboxes: on real terminals, real native boxes and a real server."""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import anyio
import pytest

import belljar
from belljar.cli import main
from belljar.cli.living import shell as shell_command
from belljar.client.client import Client
from belljar.client.living.blocking import RemoteLivingSandbox
from interference import proxied
from serving import Server
from terminals import CTRL_C, CTRL_D, ENTER, Terminal, terminal
from witness import Traces, eventually

pytestmark = pytest.mark.engine

BELLJAR = [sys.executable, "-m", "belljar"]
LEAVE = "\x1d\x1d\x1d"


@pytest.fixture(scope="module")
def box(server: Server) -> Iterator[RemoteLivingSandbox]:
    """One sandbox for the tests that leave it in order."""
    with (
        Client(server.url) as client,
        client.sandbox(living=True, backend="native", labels={"of": "cli"}, expires=900) as box,
    ):
        yield box


def run(server: Server, *words: str, code: int = 0) -> str:
    """What a command prints, in this process, which is quicker; `code`: what it has to leave with."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with (
        patch.dict(os.environ, {"BELLJAR_SERVER": server.url}),
        patch.object(sys, "argv", ["belljar", *words]),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        left = main._call()
    told, problems = (stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]
    assert left == code, (left, told, problems)
    return told if code == 0 else told + problems


def settings(shown: Terminal) -> list[object]:
    return termios.tcgetattr(shown._ours)


def size(shown: Terminal, columns: int, rows: int) -> None:
    """Gives the terminal another size, which the program is told by SIGWINCH."""
    fcntl.ioctl(shown._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def shell(folder: Path, *words: str) -> tuple[list[str], dict[str, str], Path]:
    return [*BELLJAR, "shell", *words], {"BELLJAR_STATE_DIR": str(folder)}, Path("/")


# --- a shell on this machine ---


def test_a_local_shell_is_a_terminal_in_a_sandbox_that_ends_with_it(traces: Traces, tmp_path: Path) -> None:
    (tmp_path / "given.txt").write_text("given")
    tmp_path.chmod(0o755)
    words = ("--backend", "native", "--workspace", str(tmp_path), "--env", "WORD=said")
    with terminal(*shell(traces.state_dir, *words)) as shown:
        before = settings(shown)
        shown.expect("exit leaves and ends it")
        shown.type("cat given.txt; echo $((6*7)) $WORD $TERM $(stty size)" + ENTER)
        assert "given42 said xterm 40 200" in shown.expect("40 200\n")
        size(shown, 101, 33)
        shown.type("until [ \"$(stty size)\" = '33 101' ]; do sleep 0.02; done; echo re''sized" + ENTER)
        shown.expect("resized\n")
        shown.type("echo be''gun; sleep 1000" + ENTER)
        shown.expect("begun\n")
        assert settings(shown) != before
        shown.type(CTRL_C)
        shown.expect("$ ")
        shown.type(f"echo st''ill {traces.word}; printf '\\033[?1049h'; sleep 1000 & exit 7" + ENTER)
        shown.expect("still")
        assert shown.wait() == 7
        assert settings(shown) == before
        assert b"\x1b[?47l" in shown._shown[-200:] and b"\x1b[?2004l" in shown._shown[-200:]
    assert eventually(lambda: not traces.processes() and not traces.groups())


@pytest.mark.parametrize("end", ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL", "leave"])
def test_however_a_local_shell_is_ended_nothing_of_it_is_left(traces: Traces, end: str) -> None:
    with terminal(*shell(traces.state_dir, "--backend", "native")) as shown:
        before = settings(shown)
        shown.expect("ends it")
        shown.type(f"echo st''arted; sh -c 'sleep 1000; : {traces.word}'" + ENTER)
        shown.expect("started\n")
        assert eventually(traces.processes)
        if end == "leave":
            shown.type(LEAVE)
        else:
            shown.process.send_signal(getattr(signal, end))
        code = shown.wait()
        assert code == {"SIGKILL": -9, "leave": 0}.get(end, 130)
        if end != "SIGKILL":  # after which nobody can put a terminal back but the shell above
            assert settings(shown) == before
    if end == "SIGKILL":
        subprocess.run(
            [*BELLJAR, "run", "-c", "1", "--backend", "native"],
            env={**os.environ, "BELLJAR_STATE_DIR": str(traces.state_dir)},
            check=True, timeout=60,
        )  # fmt: skip
    assert eventually(lambda: not traces.processes() and not traces.groups())


def test_a_shell_without_a_terminal_or_with_odd_options_says_what_to_do(server: Server) -> None:
    assert "belljar exec" in run(server, "shell", code=125)
    assert "for a new sandbox" in run(server, "shell", "bs-1", "--memory", "1G", code=125)
    told = json.loads(run(server, "ps", "--server", "http://127.0.0.1:9", "--json", code=125))
    assert told["error"]["fix"].startswith("start one: belljar serve")


# --- with a server ---


def test_a_shell_on_a_server_is_left_and_the_sandbox_lives_on(server: Server, box: RemoteLivingSandbox) -> None:
    environment = {"BELLJAR_SERVER": server.url}
    with terminal([*BELLJAR, "shell", box.id], environment, Path("/")) as shown:
        before = settings(shown)
        shown.expect("lives on")
        shown.type("echo be''gun $(stty size); cat" + ENTER)
        shown.expect("begun 40 200\n")
        shown.type("typed" + ENTER)
        shown.expect("typed\ntyped\n")
        shown.type(LEAVE)
        told = shown.expect("belljar attach ")
        id = shown.expect("\n").split()[-1]
        assert "goes on" in told and shown.wait() == 0 and settings(shown) == before
    assert box.process(id).running
    with terminal([*BELLJAR, "attach", box.id, id], environment, Path("/")) as shown:
        shown.expect("leaves")
        shown.expect("typed\ntyped\n")
        shown.type(CTRL_C)
        shown.expect("$ ")
        shown.type("stty size; echo la''st" + ENTER)
        shown.expect("40 200\n")
        shown.expect("last\n")
        shown.type("exit 9" + ENTER)
        assert shown.wait() == 9
    assert box.process(id).wait().exit_code == 9


def test_a_connection_that_breaks_while_somebody_types_ends_nothing(server: Server, box: RemoteLivingSandbox) -> None:
    left = {b"/stdin": [0, 0], b"/output?": [0, 150, 90]}

    def plan(request: bytes) -> int | None:
        return next((cuts.pop() for what, cuts in left.items() if what in request and cuts), None)

    with proxied(server.url, plan) as proxy:
        words = [*BELLJAR, "--server", proxy.url, "shell", box.id, "--command", "echo ready; cat"]
        with terminal(words, {}, Path("/")) as shown:
            shown.expect("ready\n")
            for word in ("one", "two", "three"):
                shown.type(word + ENTER)
                shown.expect(word)  # the terminal's echo
                shown.expect(f"{word}\n")
            assert b"\a" in shown._shown
            shown.type(CTRL_D)
            assert shown.wait() == 0
        assert proxy.cuts == 5


def test_a_killed_command_leaves_the_sandbox_of_a_server_alone(server: Server, box: RemoteLivingSandbox) -> None:
    process = box.start("echo on; sleep 1000", pty=(80, 24))
    with terminal([*BELLJAR, "attach", box.id, process.id], {"BELLJAR_SERVER": server.url}, Path("/")) as shown:
        shown.expect("on\n")
        shown.process.kill()
        shown.wait()
    assert box.process(process.id).running and process.kill()


def test_a_new_shell_on_a_server_ends_its_sandbox(server: Server) -> None:
    with terminal([*BELLJAR, "--server", server.url, "shell", "--backend", "native"], {}, Path("/")) as shown:
        shown.expect("of a server")
        shown.type("echo in''side" + ENTER)
        shown.expect("inside\n")
        shown.type(CTRL_D)
        assert shown.wait() == 0
    with Client(server.url) as client:
        assert [one.id for one in client.sandboxes() if one.labels != {"of": "cli"}] == []


def test_a_sandbox_is_opened_listed_used_and_closed_by_commands(server: Server, tmp_path: Path) -> None:
    id = run(server, "open", "--backend", "native", "--label", "made=by-cli", "--expires", "10m").strip()
    assert id in run(server, "ps") and "made=by-cli" in run(server, "ps", "--label", "made=by-cli")
    assert [one["id"] for one in json.loads(run(server, "ps", "--label", "made=by-cli", "--json"))] == [id]
    process = run(server, "start", id, "--", "echo out; echo err >&2; printf '\\033[31m'; exit 5").strip()
    assert run(server, "attach", id, process, code=5).startswith("out\n")
    lines = [json.loads(line) for line in run(server, "attach", id, process, "--json", code=5).splitlines()]
    assert (lines[0]["seq"], lines[0]["stream"], lines[0]["data"][:4]) == (1, "stdout", "out\n")
    assert lines[-1]["ended"]["exit_code"] == 5
    run(server, "start", id, "--id", "cat", "--", "cat")
    piped = subprocess.run(
        [*BELLJAR, "attach", id, "cat", "--input", "--server", server.url], input=b"typed\n", capture_output=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert piped.stdout == b"typed\n"
    run(server, "start", id, "--id", "odd", "--", "sh", "-c", "true; : '\x1b]0;owned\x07[red]x'")
    listed = run(server, "ps", id)
    assert "ended, 5" in listed and "\x1b" not in listed and "[red]x" in listed
    assert json.loads(run(server, "ps", id, "--json"))["started"][0]["id"] == process
    assert json.loads(run(server, "pause", id, "--json"))["state"] == "paused"
    assert "resume" in run(server, "start", id, "--", "true", code=125)
    assert "running" in run(server, "resume", id)
    assert json.loads(run(server, "extend", id, "30m", "--json"))["id"] == id
    run(server, "close", id)
    assert "has ended" in run(server, "ps", id, code=125)


def test_files_and_folders_are_copied_both_ways(
    server: Server, box: RemoteLivingSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "file").write_bytes(b"\x00content")
    (tmp_path / "in" / "top").write_text("top")
    monkeypatch.chdir(tmp_path)
    run(server, "cp", "in", f"{box.id}:")
    run(server, "cp", "in", f"{box.id}:named")
    run(server, "cp", "in/top", f"{box.id}:folder/")
    assert box.read("in/deep/file") == box.read("named/deep/file") == b"\x00content"
    assert box.read("folder/top") == b"top"
    run(server, "cp", f"{box.id}:named", "out")
    run(server, "cp", f"{box.id}:named", ".")
    run(server, "cp", f"{box.id}:named/top", "one")
    for place in ("out", "named"):
        assert (tmp_path / place / "deep" / "file").read_bytes() == b"\x00content"
    assert (tmp_path / "one").read_text() == "top"
    assert "No such file" in run(server, "cp", f"{box.id}:nobody", ".", code=125)
    assert "No such file" in run(server, "cp", "nobody", f"{box.id}:", code=125)
    assert "ID:PATH" in run(server, "cp", "in", "out", code=125)
    shutil.rmtree(tmp_path / "out")


def test_a_port_is_forwarded_to_a_port_of_loopback_until_ctrl_c(server: Server, box: RemoteLivingSandbox) -> None:
    box.files.write("www/index.html", "served from inside")
    web = box.start("python3 -m http.server 8210", cwd="www")
    box.wait_for_port(8210)
    forwarding = subprocess.Popen(
        [*BELLJAR, "port", box.id, "8210", "0", "--json"], env={**os.environ, "BELLJAR_SERVER": server.url},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert forwarding.stdout is not None
        told = json.loads(forwarding.stdout.readline())
        assert told["host"] == "127.0.0.1" and told["to"] == 8210
        assert "served from inside" in fetched(told["port"]) == fetched(told["port"])
        web.kill()
        assert fetched(told["port"]) == ""
        forwarding.send_signal(signal.SIGINT)
        assert forwarding.wait(30) == 130
    finally:
        forwarding.kill()
        _, problems = forwarding.communicate(timeout=30)
    assert "Connection refused" in problems and "Traceback" not in problems


def fetched(port: int) -> str:
    """What HTTP gives there; nothing where the connection is closed at once."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        try:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            while piece := connection.recv(65536):
                answer += piece
        except ConnectionError:
            return ""
    return answer.decode()


def test_snapshots_and_forks_are_made_and_listed_by_commands(server: Server, box: RemoteLivingSandbox) -> None:
    box.write("kept", "yes")
    snapshot = run(server, "snapshot", box.id, "--label", "from=cli").strip()
    assert snapshot in run(server, "snapshots", "--label", "from=cli")
    again = run(server, "open", "--backend", "native", "--snapshot", snapshot, "--expires", "10m").strip()
    copy = run(server, "fork", box.id, "--expires", "10m").strip()
    with Client(server.url) as client:
        for id in (again, copy):
            found = client.sandbox(id)
            assert found.read("kept") == b"yes" and found.started == ()
    run(server, "close", again, copy)
    run(server, "snapshots", "--remove", snapshot)
    assert json.loads(run(server, "snapshots", "--label", "from=cli", "--json")) == []


async def test_what_a_shell_opened_on_a_server_lives_while_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_command, "_EXTEND_SECONDS", 0.001)
    extended: list[float] = []

    class Box:
        async def extend(self, seconds: float) -> None:
            extended.append(seconds)
            raise belljar.PolicyDenied("no more time")

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(shell_command._keep_alive, Box())
            while len(extended) < 3:
                await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
    assert set(extended) == {600.0}


def test_the_help_of_a_command_has_examples_and_names_the_variable(server: Server) -> None:
    told = run(server, "cp", "--help")
    assert "belljar cp project" in told and "BELLJAR_SERVER" in told


def test_the_network_of_a_sandbox_is_shown_and_changed_from_a_shell(server: Server, box: RemoteLivingSandbox) -> None:
    assert run(server, "network", box.id) == "nothing\n"
    assert run(server, "network", box.id, "allow", "a.example", "*.b.example") == "*.b.example\na.example\n"
    assert run(server, "network", box.id, "deny", "x.b.example").splitlines()[-1] == "but not x.b.example"
    assert json.loads(run(server, "network", box.id, "--json"))["denied"] == ["x.b.example"]
    run(server, "network", box.id, "allow", code=125)
    run(server, "network", box.id, "show", "a.example", code=125)
    run(server, "network", box.id, "grant", "a.example", code=125)
    assert run(server, "network", box.id, "set") == "nothing\n"
