"""`belljar.Client` against real servers, and against what may stand between: the same answers as the library gives."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import anyio
import httpx2
import pytest

import belljar
from belljar.client.async_client import AsyncClient
from belljar.client.client import Client
from belljar.core import errors
from belljar.core.result import Event, Result, Status
from serving import Server, served
from witness import eventually

pytestmark = pytest.mark.engine

COUNT = "import time\nfor i in range({}): print('line', i, flush=True); time.sleep({})"
SECRET = "f" * 64
KEY = f"bj_{'a' * 12}_{SECRET}"


# --- one run ---


def test_a_run_comes_back_as_the_librarys_own_result(client: Client) -> None:
    result = client.run("print(6 * 7)", backend="native")
    assert type(result) is Result
    assert (result.status, result.stdout, result.backend) == (Status.SUCCESS, "42\n", "native")
    assert result.guarantees is not None and result.guarantees.isolation


def test_every_option_of_the_library_arrives(client: Client) -> None:
    code = (
        "import os, sys\nopen('out.bin', 'wb').write(sys.stdin.buffer.read()[::-1])\n"
        "print(os.environ['WORD'], open('in.bin', 'rb').read())"
    )
    result = client.run(
        code, backend="native", files={"in.bin": b"\x00\xff"}, stdin=b"\xfe\x01", env={"WORD": "hi"},
        collect=["out.bin"], timeout=20, memory="128M",
    )  # fmt: skip
    assert result.stdout == "hi b'\\x00\\xff'\n", result
    assert [(file.path, file.content) for file in result.files] == [("out.bin", b"\x01\xfe")]
    assert client.run(command=["echo", "a b"], backend="native").stdout == "a b\n"
    assert client.run("while True: pass", backend="native", timeout=0.5).status is Status.TIMEOUT


def test_a_mistake_is_found_before_anything_is_sent() -> None:
    nobody = Client("http://127.0.0.1:1")
    with pytest.raises(errors.InvalidRequest, match="memory"):
        nobody.run("1", memory="lots")
    with pytest.raises(errors.InvalidRequest, match="there is no such option"):
        nobody.run("1", memroy="1G")
    with pytest.raises(errors.InvalidRequest, match="workdir"):
        nobody.run("1", workdir="/workspace/a")


def test_a_refusal_of_the_server_is_the_exception_that_the_library_raises(client: Client) -> None:
    with pytest.raises(errors.InvalidRequest, match="there is no backend 'nope'") as wrong:
        client.run("1", backend="nope")
    assert "native" in wrong.value.fix
    with pytest.raises(errors.PolicyDenied) as denied:
        client.run("1", backend="native", timeout=100_000)
    assert denied.value.message and denied.value.http_status == 403
    with pytest.raises(errors.NotFound, match="no run"):
        client.inspect("bj-unknown")


async def test_async_and_blocking_calls_work_side_by_side(server: Server) -> None:
    async with AsyncClient(server.url) as client:
        found: list[Result] = []
        async with anyio.create_task_group() as tasks:

            async def one(number: int) -> None:
                found.append(await client.run(f"print({number})", backend="native"))

            for number in range(4):
                tasks.start_soon(one, number)
        assert sorted(result.stdout for result in found) == ["0\n", "1\n", "2\n", "3\n"]
        with Client(server.url) as blocking:
            assert blocking.run("print('b')", backend="native").stdout == "b\n"


# --- as it comes ---


def test_callbacks_hear_every_line_once_and_in_order(client: Client) -> None:
    out: list[str] = []
    err: list[str] = []
    events: list[Event] = []
    code = "import sys\nfor i in range(300): print(i)\nprint('oh', file=sys.stderr)"
    result = client.run(code, backend="native", on_stdout=out.append, on_stderr=err.append, on_event=events.append)
    assert out == [f"{i}\n" for i in range(300)] and "".join(out) == result.stdout
    assert err == ["oh\n"]
    assert [event.seq for event in events] == list(range(1, 303))
    assert events[-1].kind == "finished" and events[-1].result == result


def test_what_was_printed_without_an_end_of_line_gets_none(client: Client) -> None:
    out: list[str] = []
    result = client.run("print('a'); print('b' * 200_000); print('c', end='')", backend="native", on_stdout=out.append)
    assert "".join(out) == result.stdout


async def test_a_stream_tells_events_and_then_has_the_result(client: Client, server: Server) -> None:
    async with AsyncClient(server.url) as here, here.stream(COUNT.format(3, 0.01), backend="native") as run:
        heard = [event async for event in run]
    assert [event.text for event in heard[:-1]] == ["line 0\n", "line 1\n", "line 2\n"]
    assert run.result is not None and run.result.ok and heard[-1].result == run.result


async def test_leaving_a_stream_early_ends_the_guest(server: Server) -> None:
    async with AsyncClient(server.url) as client:
        async with client.stream(COUNT.format(1000, 0.05), backend="native") as run:
            first = await anext(aiter(run))
        record = await client.inspect(first.run)
        assert record.result is not None and record.result.status is Status.ABORTED


@pytest.mark.parametrize("raised", [ZeroDivisionError("mine"), BrokenPipeError("mine"), httpx2.ReadError("mine")])
async def test_an_error_in_a_callback_is_raised_and_ends_the_run(server: Server, raised: Exception) -> None:
    runs: list[str] = []

    def hear(event: Event) -> None:
        runs.append(event.run)
        raise raised

    async with AsyncClient(server.url) as client:
        with pytest.raises(type(raised), match="mine"):
            await client.run(COUNT.format(1000, 0.05), backend="native", on_event=hear)
        record = await client.inspect(runs[0])
    assert record.result is not None and record.result.status is Status.ABORTED


# --- stopping ---


def test_a_cancel_from_another_thread_ends_the_run_with_its_partial_output(client: Client) -> None:
    stop = belljar.Cancel()
    result = client.run(COUNT.format(1000, 0.05), backend="native", cancel=stop, on_stdout=lambda text: stop.cancel())
    assert result.status is Status.ABORTED
    assert result.stdout.startswith("line 0\n")


@pytest.mark.parametrize("callbacks", [False, True])
async def test_cancelling_the_local_task_ends_the_remote_run(server: Server, callbacks: bool) -> None:
    async with AsyncClient(server.url) as client:
        hear = {"on_event": lambda event: None} if callbacks else {}
        async with anyio.create_task_group() as tasks:

            async def work() -> None:
                await client.run(f"import time\ntime.sleep(100)  # {callbacks}", backend="native", timeout=110, **hear)

            tasks.start_soon(work)
            with anyio.fail_after(20):
                while not (running := await client.runs(state="running")):
                    await anyio.sleep(0.02)
            tasks.cancel_scope.cancel()
        record = await client.inspect(running[0].id)
        assert record.result is not None and record.result.status is Status.ABORTED


def test_a_run_can_be_listed_inspected_measured_and_cancelled_by_its_id(client: Client) -> None:
    failed: list[Result] = []
    work = threading.Thread(
        target=lambda: failed.append(client.run("import time; time.sleep(100)", backend="native", timeout=110))
    )
    work.start()
    running = eventually(lambda: client.runs(state="running"))
    assert isinstance(running, list) and running
    id = running[0].id
    assert client.inspect(id).state == "running"
    assert client.metrics(id).container_id == id
    assert client.cancel(id).state == "finished"
    work.join(20)
    assert failed[0].status is Status.ABORTED


# --- what stays open ---


def test_a_session_keeps_what_it_defined_and_can_be_forked_and_rolled_back(client: Client) -> None:
    with client.session(backend="wasm") as session:
        session.run("x = 1")
        copy = session.checkpoint()
        assert copy.bytes > 0
        session.run("x = 2")
        with session.fork(copy) as branch:
            assert branch.run("x").results == ({"text/plain": "1"},)
        with session.fork() as branch:
            assert branch.run("x").results == ({"text/plain": "2"},)
        session.rollback(copy)
        assert session.run("x").results == ({"text/plain": "1"},)
        assert len(client.sessions()) == 1
    assert client.sessions() == []


def test_a_turn_is_heard_as_it_goes_and_can_be_cancelled(client: Client) -> None:
    with client.session(backend="native") as session:
        heard: list[str] = []
        result = session.run("print('a'); print('b')", on_stdout=heard.append)
        assert heard == ["a\n", "b\n"] and result.stdout == "a\nb\n"
        stop = belljar.Cancel()
        code = "import time\nwhile True: print('on', flush=True); time.sleep(.05)"
        result = session.run(code, cancel=stop, on_stdout=lambda text: stop.cancel())
        assert result.status is Status.ABORTED


def test_a_sandbox_keeps_its_files_and_runs_commands(client: Client) -> None:
    with client.sandbox(backend="native", env={"WORD": "hi"}) as box:
        box.write("a dir/ö%41.txt", b"\x00\xff")
        assert box.read("a dir/ö%41.txt") == b"\x00\xff"
        assert [entry.path for entry in box.list() if entry.kind == "file"] == ["a dir/ö%41.txt"]
        assert box.exec(["sh", "-c", "echo $WORD; cat"], stdin=b"in").stdout == "hi\nin"
        assert box.run("print(open('a dir/ö%41.txt', 'rb').read())").stdout == "b'\\x00\\xff'\n"
        with pytest.raises(FileNotFoundError, match="nothing"):
            box.read("nothing")
        with pytest.raises(errors.InvalidRequest, match="climbs out"):
            box.read("../../etc/passwd")
        with pytest.raises(errors.InvalidRequest, match="memory: is the sandbox's"):
            box.exec(["true"], memory="1G")


def test_files_on_a_server_have_the_errors_of_the_guest_and_any_size(client: Client) -> None:
    code = (
        "import os\nos.mkdir('folder')\nos.symlink('/etc/passwd', 'link')\n"
        "for name, mode in (('closed', 0), ('fixed', 0o444)):\n    open(name, 'w').close()\n    os.chmod(name, mode)\n"
        "open('big', 'wb').truncate(65 << 20)"
    )
    with client.sandbox(backend="native") as box:
        assert box.run(code).ok
        for name, kind in {"folder": IsADirectoryError, "closed": PermissionError, "link": OSError}.items():
            with pytest.raises(kind) as caught:
                box.read(name)
            assert caught.value.filename == name
        with pytest.raises(PermissionError):
            box.write("fixed", "changed")
        assert len(box.read("big")) == 65 << 20


async def test_a_session_that_is_gone_is_not_mistaken_for_a_missing_file(server: Server) -> None:
    async with AsyncClient(server.url) as client:
        session = client.session(backend="native")
        with pytest.raises(errors.InvalidRequest, match="not open"):
            await session.run("1")
        async with session, AsyncClient(server.url) as other:
            await other._transport.ask("DELETE", f"/api/sandbox/sessions/{session.id}")
            with pytest.raises(errors.NotFound, match="no open session"):
                await session.read("a")


def test_what_the_server_can_do_is_told_in_the_librarys_words(client: Client) -> None:
    offers = {offer.backend: offer for offer in client.backends()}
    assert offers["native"].available
    assert "python" in client.supported_languages()
    assert ("native", "python") in [(backend, row.name) for backend, row in client.languages()]


# --- the key ---


def test_a_key_does_not_travel_in_the_clear() -> None:
    for url in ("http://example.org", "http://192.0.2.1:8080", "http://127.0.0.1.example.org"):
        with pytest.raises(errors.PolicyDenied, match="in the clear") as refused:
            Client(url, KEY)
        assert SECRET not in str(refused.value) and "https://" in refused.value.fix
        Client(url, KEY, insecure=True)
        Client(url)
    for url in ("https://example.org", "http://localhost:1", "http://127.8.9.1", "http://[::1]:80"):
        Client(url, KEY)


@pytest.mark.parametrize("url", ["", "ftp://a", "http://", "http://u:p@127.0.0.1", "http://a?b=c", "http://[", "x"])
def test_what_is_no_address_is_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="url: ") as refused:
        Client(url, KEY)
    assert "u:p" not in str(refused.value)


def test_the_key_is_in_no_repr_and_no_traceback() -> None:
    client = Client("http://127.0.0.1:1", KEY, retries=0)
    assert SECRET not in repr(client) + repr(vars(client)) + repr(vars(client._core)) + repr(
        vars(client._core._transport)
    )
    with pytest.raises(errors.NotAvailable) as failed:
        client.run("1")
    told = "".join(traceback.TracebackException.from_exception(failed.value, capture_locals=True).format())
    assert SECRET not in told
    for bad in ("", "a b", "ä", "a\r\nX: y"):
        with pytest.raises(errors.InvalidRequest, match="key: "):
            Client("http://127.0.0.1:1", bad)


def test_a_key_opens_what_is_closed_to_others() -> None:
    with served(start=False) as server:
        made = server.belljar("keys", "create", "ci", "--scope", "run", "--scope", "read", "--json")
        assert made.returncode == 0, made.stderr
        key = next(value for value in json.loads(made.stdout).values() if str(value).startswith("bj_"))
        server.start()
        with Client(server.url, key) as client:
            out: list[str] = []
            assert client.run("print(1)", backend="native", on_stdout=out.append).ok
            assert out == ["1\n"]
            with pytest.raises(errors.PolicyDenied, match="sessions"), client.session():
                pass
        with Client(server.url) as nobody, pytest.raises(errors.Unauthorized):
            nobody.run("print(1)")
        with Client(server.url, KEY) as stranger, pytest.raises(errors.Unauthorized):
            stranger.run("print(1)", on_stdout=print)


# --- what is imported ---


def test_importing_belljar_does_not_import_the_client_and_without_its_extra_the_fix_is_told() -> None:
    code = (
        "import sys, belljar\n"
        "assert not {'httpx2', 'belljar.client'} & set(sys.modules)\n"
        "sys.modules['httpx2'] = None\n"
        "try: belljar.Client('http://127.0.0.1:1')\n"
        "except belljar.BackendError as error: print(error.kind, error.fix)"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=60, check=False)
    assert done.stdout == "not_available pip install 'belljar-sandbox[client]'\n", done.stderr


# --- the command line ---


def _belljar(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "belljar", *words]
    return subprocess.run(command, text=True, capture_output=True, timeout=60, check=False)


def test_the_command_line_runs_on_a_server_and_ends_as_the_guest_did(server: Server, client: Client) -> None:
    before = len(client.runs(limit=1000))
    done = _belljar("--server", server.url, "run", "-b", "native", "-c", "print('hi', end=''); raise SystemExit(3)")
    assert (done.returncode, done.stdout) == (3, "hi"), done.stderr
    done = _belljar("--server", server.url, "exec", "-b", "native", "--json", "--", "echo", "there")
    assert json.loads(done.stdout)["stdout"] == "there\n"
    assert len(client.runs(limit=1000)) == before + 2
    rows = json.loads(_belljar("--server", server.url, "languages", "--json").stdout)["languages"]
    assert {"native", "python"} <= {row["backend"] for row in rows} | {row["name"] for row in rows}
    assert json.loads(_belljar("--server", server.url, "doctor", "--json").stdout)["backends"]


def test_where_a_command_is_done_may_be_said_after_it_and_arguments_reach_the_server(server: Server) -> None:
    code = "import sys; print(sys.argv[1:])"
    done = _belljar("run", "-b", "native", "-c", code, "--server", server.url, "--", "a", "--server")
    assert done.stdout == "['a', '--server']\n", done.stderr


def test_a_prompt_on_a_server_keeps_variables(server: Server) -> None:
    words = [sys.executable, "-m", "belljar", "session", "-b", "native", "--server", server.url]
    done = subprocess.run(
        words, input="x = 20\nprint(x)\nx + 1\n:save f\n", text=True, capture_output=True, timeout=60, check=False
    )
    assert done.stdout == "20\n21\n", done.stderr
    assert ":save does not work with --server" in done.stderr
    done = _belljar("session", "--server", server.url, "--load", "f")
    assert done.returncode == 125 and "--load does not work with --server" in done.stderr


def test_a_sandbox_of_a_server_takes_arguments_of_code_and_a_session_has_none(client: Client) -> None:
    with client.sandbox(backend="native") as box:
        assert box.run("echo $1-$2", language="bash", args=["a", "b"]).stdout == "a-b\n"
        with pytest.raises(errors.InvalidRequest, match="args"):
            box.exec(["echo"], args=["a"])


def test_the_command_line_refuses_what_a_server_cannot_do_instead_of_doing_it_here(server: Server) -> None:
    done = _belljar("--server", server.url, "serve")
    assert done.returncode == 125 and "does not work with --server" in done.stderr
    done = _belljar("--server", "http://127.0.0.1:1", "run", "-c", "print(1)")
    assert done.returncode == 125 and "no connection" in done.stderr and done.stdout == ""


def test_the_examples_of_the_page_run(server: Server) -> None:
    page = (Path(__file__).parents[2] / "docs" / "client.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(examples) == 2
    for code in examples:
        command = [sys.executable, "-W", "error", "-c", code.replace("http://127.0.0.1:8080", server.url)]
        done = subprocess.run(command, text=True, capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
    (line,) = re.findall(r"^```sh\nbelljar (.*)\n```$", page, re.MULTILINE)
    done = _belljar(*shlex.split(line.replace("http://127.0.0.1:8080", server.url)))
    assert done.stdout == "42\n", done.stderr
