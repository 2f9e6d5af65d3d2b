"""Living sandboxes of the library, on the fake: processes side by side, their output and input, files, ports, time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import ByteStream

import belljar
from belljar.backends.fake import Fake, FakeProcess
from belljar.backends.fake_living import FakeLivingBox
from belljar.core import errors
from belljar.engine.audit import Audit
from belljar.living.machine import LivingMachine
from belljar.living.process import AsyncProcess
from belljar.settings import load

pytestmark = pytest.mark.anyio


async def cat(p: FakeProcess) -> None:
    while piece := await p.receive():
        await p.out(piece)


async def serve(p: FakeProcess) -> None:
    async def echo(stream: ByteStream) -> None:
        await stream.send((await stream.receive()).upper())

    p.listen(8000, echo)
    await p.out("serving\n")
    await p.sleep(3600)


PROGRAMS: dict[str, Any] = {
    "cat": cat,
    "serve": serve,
    "forever": lambda p: p.sleep(3600),
    "echo hi": lambda p: p.out("hi\n"),
    "complain": lambda p: p.err("No module\n"),
    "pwd": lambda p: p.out(f"{p.cwd} {p.env['HOME']} {p.env.get('A')}"),
    "leave": lambda p: p.background(serve, "left"),
    "save": lambda p: p.write("/home/user/kept.txt", b"kept"),
}


@pytest.fixture
def fake() -> Fake:
    return Fake(PROGRAMS)


@pytest.fixture
async def box(fake: Fake) -> AsyncIterator[belljar.AsyncSandbox]:
    async with belljar.AsyncSandbox(backend=fake, living=True, env={"A": "1"}) as box:
        yield box
    assert fake.open_boxes == 0


async def test_a_process_goes_on_beside_runs_until_it_is_ended(box: belljar.AsyncSandbox) -> None:
    server = await box.start("serve")
    assert server.running and server.pid and server.id == "p1" and server.command == "serve"
    assert (await box.exec(["echo", "hi"])).stdout == "hi\n"
    assert [one.command for one in await box.processes()] == ["sh -c " + server._request.command[2] + " sh serve"]  # type: ignore[index]
    result = await server.kill()
    assert (result.status, result.stdout, server.running) == ("aborted", "serving\n", False)
    assert box.started == (server,) and box.process("p1") is server


async def test_its_output_is_read_as_it_comes_and_again_from_any_piece(box: belljar.AsyncSandbox) -> None:
    process = await box.start(["cat"])
    heard = process.output()
    await process.write("one")
    first = await anext(heard)
    await process.write(b"two")
    assert (first.text, (await anext(heard)).text, first.seq) == ("one", "two", 1)
    await process.close_stdin()
    assert (await process.wait(5)).stdout == "onetwo"
    assert [chunk.text async for chunk in process.output(since=1)] == ["two"]
    with pytest.raises(BrokenPipeError):
        await process.write("three")


async def test_a_process_that_fails_is_diagnosed_by_what_it_printed(box: belljar.AsyncSandbox) -> None:
    process = await box.start("no such program")
    result = await process.wait(5)
    assert (result.status, result.exit_code) == ("error", 127) and result.error
    assert "no program" in result.stderr


async def test_a_signal_reaches_it_while_it_runs(box: belljar.AsyncSandbox) -> None:
    process = await box.start("forever")
    with pytest.raises(TimeoutError):
        await process.wait(0.01)
    assert await process.signal("TERM") is True
    assert (await process.wait(5)).exit_code == 143
    assert await process.signal(9) is False
    with pytest.raises(errors.InvalidRequest, match="no signal 'NONE'"):
        await process.signal("NONE")


async def test_a_folder_and_variables_are_those_that_were_named(box: belljar.AsyncSandbox) -> None:
    assert (await (await box.start("pwd")).wait()).stdout == "/workspace /home/user 1"
    assert (await (await box.start("pwd", cwd="/tmp", env={"A": "2"})).wait()).stdout == "/tmp /home/user 2"
    await box.files.make_dir("~/app")
    assert (await (await box.start("pwd", cwd="~/app")).wait()).stdout == "/home/user/app /home/user 1"


async def test_a_missing_folder_is_an_error_and_is_not_made(box: belljar.AsyncSandbox) -> None:
    for wrong in (box.start("pwd", cwd="gone"), box.exec(["pwd"], workdir="/workspace/gone")):
        with pytest.raises(errors.InvalidRequest, match="/workspace/gone: No such file"):
            await wrong
    assert not await box.files.exists("gone") and box.started == ()


async def test_what_a_command_leaves_lives_on_and_its_port_can_be_dialled(box: belljar.AsyncSandbox) -> None:
    await box.exec(["leave"])
    await box.wait_for_port(8000, timeout=5)
    assert [one.command for one in await box.processes()] == ["left"]
    async with await box.dial(8000) as stream:
        await stream.send(b"ping")
        assert await stream.receive() == b"PING"
    with pytest.raises(ConnectionRefusedError):
        await box.dial(8001)
    with pytest.raises(TimeoutError, match="port 8001"):
        await box.wait_for_port(8001, timeout=0.05)


async def test_files_are_those_of_the_programs_by_whole_paths(box: belljar.AsyncSandbox) -> None:
    await box.exec(["save"])
    files = box.files
    assert await files.read_text("~/kept.txt") == "kept"
    await files.write("a/b.txt", "text", mode=0o600)
    assert (await files.stat("/workspace/a/b.txt")).mode == 0o600
    assert [one.path for one in await files.list(depth=2)] == ["/workspace/a", "/workspace/a/b.txt"]
    await files.move("a", "c")
    assert await files.exists("c/b.txt") and not await files.exists("a/b.txt")
    async with files.watch("/workspace/c") as changes:
        await files.write("c/new", b"")
        assert (await anext(changes)).path == "/workspace/c/new"
    with pytest.raises(FileNotFoundError):
        await files.read("gone")
    with pytest.raises(OSError, match="Read-only"):
        await files.write("/etc/passwd", "")


async def test_folders_and_files_are_copied_in_and_out(box: belljar.AsyncSandbox, tmp_path: Path) -> None:
    there = tmp_path / "project"
    (there / "src").mkdir(parents=True)
    (there / "src/main.py").write_text("print(1)")
    (there / "link").symlink_to("/etc/passwd")
    await box.files.upload(there, "~/project")
    assert await box.files.read_text("/home/user/project/src/main.py") == "print(1)"
    assert (await box.files.stat("~/project/link")).target == "/etc/passwd"
    assert [one.split(":")[0] for one in await box.files.download("~/project", tmp_path / "back")] == ["link"]
    assert (tmp_path / "back/src/main.py").read_text() == "print(1)"
    await box.files.upload(there / "src/main.py", "new/other.py")
    assert await box.files.download("new/other.py", tmp_path) == ()
    assert (tmp_path / "other.py").read_text() == "print(1)"
    async with box.files.pack("new") as pieces:
        await box.files.unpack("/tmp/copy", pieces)
    assert await box.files.exists("/tmp/copy/workspace/new/other.py")


async def test_a_paused_sandbox_starts_nothing_and_goes_on_where_it_was(box: belljar.AsyncSandbox) -> None:
    process = await box.start("cat")
    await box.pause()
    assert box.paused
    with pytest.raises(errors.InvalidRequest, match="paused"):
        await box.start("cat")
    await process.write("x")
    await box.resume()
    await process.close_stdin()
    assert (await process.wait(5)).stdout == "x"


async def test_a_sandbox_whose_time_is_over_is_gone_with_its_processes(fake: Fake) -> None:
    async with belljar.AsyncSandbox(backend=fake, expires=0.05) as box:
        process = await box.start("forever")
        assert (await process.wait(5)).status == "killed"
        with anyio.fail_after(5):
            while fake.open_boxes:
                await anyio.sleep(0.01)
        assert box.ended == "its time was over"
        with pytest.raises(errors.SessionEnded, match="time was over"):
            await box.start("cat")


async def test_a_sandbox_that_pauses_at_the_end_of_its_time_gets_it_again(fake: Fake) -> None:
    async with belljar.AsyncSandbox(backend=fake, expires=0.5, on_expire="pause") as box:
        with anyio.fail_after(5):
            while not box.paused:
                await anyio.sleep(0.01)
        await box.resume()
        box.extend(60)
        assert not box.paused and box.expires is not None
        assert (await box.exec(["echo", "hi"])).ok


async def test_a_sandbox_that_nobody_uses_ends_or_pauses(fake: Fake) -> None:
    async with belljar.AsyncSandbox(backend=fake, idle=0.05) as box:
        with anyio.fail_after(5):
            while not box.ended:
                await anyio.sleep(0.01)
        assert box.ended == "nobody used it for 0.05 seconds"
    async with belljar.AsyncSandbox(backend=fake, idle=1, on_expire="pause") as box:
        with anyio.fail_after(5):
            while not box.paused:
                await anyio.sleep(0.01)
        with pytest.raises(errors.InvalidRequest, match="resume"):
            await box.exec(["echo", "hi"])
        await box.resume()
        assert (await box.exec(["echo", "hi"])).ok


async def test_what_runs_or_is_asked_for_counts_as_use(fake: Fake) -> None:
    async with belljar.AsyncSandbox(backend=fake, idle=1) as box:
        process = await box.start("forever")
        with pytest.raises(TimeoutError):
            await process.wait(1.3)
        assert process.running and not box.ended, "a process that was started runs"
        await process.kill()
        with anyio.fail_after(5):
            while not box.ended:
                await anyio.sleep(0.01)


async def test_what_becomes_of_a_sandbox_is_recorded_and_told(fake: Fake, tmp_path: Path) -> None:
    told: list[belljar.Event] = []
    log = tmp_path / "audit.jsonl"
    settings = load(audit_log=str(log), data_dir=str(tmp_path / "data"))
    engine = belljar.Engine(settings, extra=(fake,), sinks=[told.append])
    async with belljar.AsyncSandbox(backend="fake", engine=engine, expires=0.05, on_expire="pause") as box:
        with anyio.fail_after(5):
            while not box.paused:
                await anyio.sleep(0.01)
        box.extend(60)
        await box.resume()
        snapshot = await box.snapshot()
        fork = await box.fork()
        await fork.close()
        id = box.lease.box.id
    kinds = ["opened", "expired", "paused", "resumed", "snapshot", "forked", "closed"]
    mine = [event for event in told if event.run == id]
    assert [event.kind for event in mine] == kinds and [event.seq for event in mine] == [1, 2, 3, 4, 5, 6, 7]
    assert mine[4].text == snapshot.id and mine[1].text == "its time was over"
    assert [entry["kind"] for entry in Audit(log).lines() if entry["run"] == id and entry["kind"] in kinds] == kinds


async def test_files_are_kept_laid_and_forked_where_the_host_cannot_open_them(fake: Fake, tmp_path: Path) -> None:
    engine = belljar.Engine(load(data_dir=str(tmp_path)), extra=(fake,))
    async with belljar.AsyncSandbox(backend="fake", engine=engine, living=True, labels={"a": "b"}) as box:
        await box.files.write("d/run", b"#!" * 100_000, mode=0o755)
        await box.files.write("~/größe", "g")
        await box.start("forever")
        snapshot = await box.snapshot(labels={"c": "d"})
        assert not snapshot.quiet and "ran on" in snapshot.warnings[0] and snapshot.labels == {"c": "d"}
        async with await box.fork(expires=60) as fork:
            assert await fork.files.read("d/run") == b"#!" * 100_000 and fork.labels == {"a": "b"}
            assert await fork.processes() == () and fork.expires is not None
            await fork.files.write("d/run", "other")
        assert await box.files.read("d/run") == b"#!" * 100_000
    async with belljar.AsyncSandbox(backend="fake", engine=engine, snapshot=snapshot, home="/home/new") as box:
        assert (await box.files.stat("d/run")).mode == 0o755 and await box.files.read_text("~/größe") == "g"
    assert await belljar.alist_snapshots({"c": "d"}, engine=engine) == (snapshot,)
    await belljar.aremove_snapshot(snapshot.id, engine=engine)
    with pytest.raises(errors.NotFound, match="no snapshot"):
        await belljar.AsyncSandbox.open(backend="fake", engine=engine, snapshot=snapshot)
    assert fake.open_boxes == 0


def test_blocking_code_has_the_same(fake: Fake) -> None:
    with belljar.Sandbox(backend=fake, living=True, labels={"team": "a"}) as box:
        process = box.start(["cat"])
        process.write("one")
        assert next(process.output()).text == "one"
        box.files.write("big", b"x" * 100_000)
        with box.files.open("big") as file:
            assert file.read(3) == b"xxx" and len(file.read()) == 99_997
        box.start("serve")
        box.wait_for_port(8000)
        with box.dial(8000) as port:
            port.write(b"ping")
            assert port.read() == b"PING"
        process.close_stdin()
        assert process.wait(5).ok and box.labels == {"team": "a"}
    assert fake.open_boxes == 0


def test_a_sandbox_that_is_not_living_says_how_to_get_one(fake: Fake) -> None:
    with belljar.Sandbox(backend=fake) as box, pytest.raises(errors.InvalidRequest, match="open it with living=True"):
        box.start("cat")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"living": False, "home": "/home/x"}, "goes with a living sandbox"),
        ({"home": "relative"}, "home: "),
        ({"home": "/proc/x"}, "is taken"),
        ({"on_expire": "pause"}, "goes with expires or idle"),
        ({"snapshot": "latest"}, "snapshot: 'latest' is no id of a snapshot"),
        ({"labels": {"a b": "c"}}, "labels"),
        ({"expires": -1}, "expires: "),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=words):
        belljar.Sandbox(**options)


async def test_a_command_is_a_line_of_shell_or_a_list_of_words(box: belljar.AsyncSandbox) -> None:
    assert (await box.exec("echo hi")).stdout == (await box.exec(["echo", "hi"])).stdout == "hi\n"


async def test_a_closed_sandbox_says_that_it_was_closed(fake: Fake) -> None:
    box = belljar.AsyncSandbox(backend=fake, living=True)
    with pytest.raises(errors.InvalidRequest, match=r"is not open — use it in a `with` block"):
        await box.exec("echo hi")
    async with box:
        pass
    for call in (lambda: box.exec("echo hi"), lambda: box.start("echo hi")):
        with pytest.raises(errors.InvalidRequest, match=r"was closed — open another"):
            await call()


async def test_refusals_say_what_to_write_instead(box: belljar.AsyncSandbox, fake: Fake) -> None:
    with pytest.raises(errors.InvalidRequest, match=r"cwd: .* — write workdir"):
        await box.exec("pwd", cwd="app")  # type: ignore[call-arg]
    with pytest.raises(errors.InvalidRequest, match=r"id: '../x' is no name of a process"):
        await box.start("cat", id="../x")
    with pytest.raises(errors.InvalidRequest, match=r'write command=\["bash", "-c", .echo hi.\]'):
        async with belljar.AsyncSandbox(backend=fake) as other:
            await other.exec("echo hi")
    with pytest.raises(errors.InvalidRequest, match=r"'cobol' is not known — choose from: (?!.*rust)"):
        await box.interpreter("cobol")
    process = await box.start("forever", id="dev-1")
    with pytest.raises(TimeoutError, match=r"process dev-1 has not ended after 0.01 seconds"):
        await process.wait(0.01)


async def test_limits_of_the_whole_sandbox_are_not_those_of_a_command(box: belljar.AsyncSandbox) -> None:
    with pytest.raises(errors.InvalidRequest, match="memory: is a limit of the whole sandbox"):
        await box.exec(["echo", "hi"], memory="64M")


def test_a_run_cannot_be_asked_to_live(fake: Fake) -> None:
    with pytest.raises(errors.InvalidRequest, match="stays open"):
        belljar.run("1", backend=fake, living=True)  # type: ignore[call-arg]


async def test_who_gives_up_a_pause_that_has_begun_can_resume_it(
    box: belljar.AsyncSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    stop, stopped, answered = FakeLivingBox.pause, anyio.Event(), anyio.Event()

    async def slow(self: FakeLivingBox) -> None:
        await stop(self)
        stopped.set()
        await answered.wait()

    monkeypatch.setattr(FakeLivingBox, "pause", slow)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(box.pause)
            await stopped.wait()
            tasks.cancel_scope.cancel()
            answered.set()
        assert box.paused
        await box.resume()
        assert (await box.exec(["echo", "hi"])).stdout == "hi\n"


async def test_a_process_that_is_about_to_start_while_its_sandbox_ends_is_refused(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    looked, ended = anyio.Event(), anyio.Event()
    refused: list[errors.SessionEnded] = []

    async def look(machine: LivingMachine, path: str) -> None:
        looked.set()
        await ended.wait()

    async def start(box: belljar.AsyncSandbox) -> None:
        with pytest.raises(errors.SessionEnded) as raised:
            await box.start("forever", id="mine")
        refused.append(raised.value)

    monkeypatch.setattr(LivingMachine, "check_folder", look)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            async with belljar.AsyncSandbox(backend=fake, living=True) as box:
                tasks.start_soon(start, box)
                await looked.wait()
            ended.set()
    assert refused and fake.open_boxes == 0


async def test_a_process_whose_sandbox_ends_before_it_is_begun_is_lost_and_ends_nothing_else(
    box: belljar.AsyncSandbox
) -> None:  # fmt: skip
    machine = box._alive()
    process = AsyncProcess("late", box._asked(command=("forever",)), None, {})
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(process._live, machine, "late")
            machine.ended = "its time was over"
        machine.ended = ""
    assert isinstance(process.error, errors.SessionEnded) and not process.running
