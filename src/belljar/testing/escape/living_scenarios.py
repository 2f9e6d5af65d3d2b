"""What is done to a living sandbox while an attack goes on in it: commands, calls for files, ports and terminals."""

from __future__ import annotations

import errno
import io
import os
import stat
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio

from belljar.core import errors
from belljar.core.process import Chunk
from belljar.core.result import Result
from belljar.living.process import AsyncProcess
from belljar.sandbox import AsyncSandbox
from belljar.testing.escape.scenarios import Range, escaped_by
from belljar.testing.stalls import Stalls

_READY_SECONDS = 20.0
_COMMANDS = 12  # that are started before the eyes of one that lies in wait
_STALL_SECONDS = 1.0  # of CPU
_SOME = 2  # commands that a sandbox must be able to start before it is at a limit
_QUIET_SECONDS = 0.4
_STILL_SECONDS = 8.0  # after which what is over a limit has been seen
_PAUSED_MS = 20  # of processor, that the kernel may count late
_FILE_ROUNDS = 25
_OPEN_BESIDE = 200  # descriptors, of attacks that are made at the same time; a watcher without bounds holds a thousand
_KEPT_BYTES = 3 << 20  # of a process's output: its first megabyte, its last, and a piece that is on its way
OUR_PROGRAMS = (
    "bash", "bwrap", "cat", "chroot", "cp", "dd", "env", "find", "head", "id", "kill", "ls", "mkdir", "mount", "mv",
    "node", "nsenter", "prlimit", "ps", "python", "python3", "rm", "setsid", "sh", "sleep", "stat", "tar", "test",
    "true",
)  # fmt: skip


@asynccontextmanager
async def _going_on(box: AsyncSandbox, code: str, **options: object) -> AsyncIterator[AsyncProcess]:
    """Starts Python code in a sandbox, and gives it when it has said READY; it is ended with the block."""
    process = await box.start(["python3", "-c", code], **options)  # type: ignore[arg-type]
    try:
        with anyio.fail_after(_READY_SECONDS):
            async for _ in process.output():
                if b"READY" in _said(process) or not process.running:
                    break
        yield process
    finally:
        with suppress(errors.BelljarError):
            await process.kill()


def _said(process: AsyncProcess) -> bytes:
    return b"".join(chunk.data for chunk in process.kept() if isinstance(chunk, Chunk))


def _verdict(said: str) -> Result:
    return Result(status="success", stdout=f"{said}\n", exit_code=0)


async def lying_in_wait(range_: Range) -> Result:
    """Starts commands with a secret in their environment and their input while the payload looks at all that is new."""
    async with range_.sandbox() as box, _going_on(box, range_.payload) as lurker:
        secret = range_.bait.secret
        for _ in range(_COMMANDS):
            await box.exec(["sleep", "0.02"], env={"NEXT_SECRET": secret}, stdin=secret, timeout=20)
        await box.files.write("enough", "")
        return await lurker.wait(_READY_SECONDS)


def mounts_of_the_host() -> str:
    """The places of the host's mounts, to be looked for in what guests are told."""
    with suppress(OSError):
        return "\n".join(line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return ""


async def told_mounts(range_: Range) -> Result:
    """Looks at the mounts of all that is in sight while commands are started."""
    hosts = {"HOST_MOUNTS": mounts_of_the_host()}
    async with range_.sandbox(env=hosts) as box, _going_on(box, range_.payload) as lurker:
        for _ in range(_COMMANDS):
            await box.exec(["sleep", "0.02"], timeout=20)
        await box.files.write("enough", "")
        return await lurker.wait(_READY_SECONDS)


async def first_process(range_: Range) -> Result:
    """After the attack on process 1 the sandbox goes on, or says that it has ended."""
    async with range_.sandbox() as box:
        result = await box.run(range_.payload)
        try:
            after = await box.run("print(6 * 7)")
        except errors.BelljarError as error:
            return _verdict(f"HELD the sandbox has ended: {error.message}")
    return result if after.stdout == "42\n" else escaped_by(result, f"afterwards a command says {after.stdout!r}")


async def replaced_programs(range_: Range) -> Result:
    """Does all that Belljar does by itself where the guest has put its own programs everywhere."""
    async with range_.sandbox(env={"PROGRAMS": " ".join(OUR_PROGRAMS)}) as box:
        result = await box.run(range_.payload)
        await box.files.remove("/tmp/replaced") if await box.files.exists("/tmp/replaced") else None
        await _all_that_is_ours(box)
        if await box.files.exists("/tmp/replaced"):
            names = (await box.files.read_text("/tmp/replaced")).split()
            return escaped_by(result, f"ran the guest's {', '.join(sorted(set(names)))}")
        with suppress(
            errors.BackendError
        ):  # a program of the sandbox, and so the guest's: what it says is not believed
            async with box.interpreter() as python:
                await python.run("x = 1")
    return result


async def _all_that_is_ours(box: AsyncSandbox) -> None:
    files = box.files
    await files.write("~/a/b", "text")
    await files.list("~", depth=2)
    await files.copy("~/a", "~/c")
    await files.move("~/c", "~/d")
    await files.remove("~/d")
    assert await files.read("~/a/b") == b"text"
    async with files.pack("~/a") as pieces:
        await files.unpack("/tmp/copy", pieces)
    await box.processes()
    with suppress(TimeoutError):
        await box.wait_for_port(9, timeout=0.1)
    with suppress(OSError, errors.NotAvailable):
        await box.dial(9)
    with suppress(errors.NotAvailable):
        await (await box.start(["/bin/true"], pty=(80, 24))).wait(_READY_SECONDS)
    sleeper = await box.start(["/bin/sleep", "20"])
    await sleeper.signal("CONT")
    await sleeper.kill()
    with suppress(errors.NotAvailable):
        await box.pause()
        await box.resume()


async def answering_terminal(range_: Range) -> Result:
    """Has a guest ask its terminal who it is, and whether the caller's side answers."""
    async with range_.sandbox() as box:
        process = await box.start(["python3", "-c", range_.payload], pty=(80, 24))
        result = await process.wait(_READY_SECONDS)
    return result.model_copy(update={"stdout": result.stdout.replace("\r\n", "\n")})


async def terminals_of_others(range_: Range) -> Result:
    """Two sandboxes; one has terminals, the other looks for them."""
    async with range_.sandbox() as one, range_.sandbox() as other:
        typed = await one.start(["python3", "-c", _TYPES.replace("SECRET", range_.bait.secret)], pty=(80, 24))
        with anyio.fail_after(_READY_SECONDS):
            async for _ in typed.output():
                if b"READY" in _said(typed):
                    break
        result = await other.run(range_.payload)
        await typed.kill()
    return result


_TYPES = "import os, time; print('READY', os.ttyname(0), flush=True); time.sleep(15)"


async def endless_line(range_: Range) -> Result:
    """Starts what floods a terminal and a pipe without a line's end, and looks at what we hold and how we go on."""
    async with range_.sandbox() as box, Stalls() as stalls:
        flooding = [await box.start(["python3", "-c", range_.payload]) for _ in range(2)]
        with suppress(errors.NotAvailable):
            flooding.append(await box.start(["python3", "-c", range_.payload], pty=(80, 24)))
        results = [await one.wait(_READY_SECONDS) for one in flooding]
        held = max(sum(len(chunk.data) for chunk in one.kept()) for one in flooding)
    if held > _KEPT_BYTES:
        return escaped_by(results[0], f"{held >> 20} MB are held of one process")
    if stalls.longest > _STALL_SECONDS:
        return escaped_by(results[0], f"everybody else waited for {stalls.longest:.1f} s")
    return _verdict(f"HELD {held >> 10} KB were held, and nobody waited for more than {stalls.longest:.2f} s")


async def flooded_watcher(range_: Range) -> Result:
    """Watches a folder while the payload does its worst in it."""
    told = missed = 0
    async with range_.sandbox() as box:
        await box.files.make_dir("seen")
        before = len(os.listdir("/proc/self/fd"))
        async with box.files.watch("seen", recursive=True) as changes, Stalls() as stalls:
            worker = await box.start(["python3", "-c", range_.payload])
            with anyio.move_on_after(_READY_SECONDS):
                async for change in changes:
                    told += 1
                    missed += change.kind == "missed"
                    if change.path.endswith("/the-end"):
                        break
        await box.files.write("enough", "")
        result = await worker.wait(_READY_SECONDS)
        after = len(os.listdir("/proc/self/fd"))
    if stalls.longest > _STALL_SECONDS:
        return escaped_by(result, f"everybody else waited for {stalls.longest:.1f} s")
    if after > before + _OPEN_BESIDE:
        return escaped_by(result, f"{after - before} descriptors are open")
    return result if not result.ok else _verdict(f"HELD {told} changes were told, {missed} times that some are missing")


async def dialled_host(range_: Range) -> Result:
    """Asks for a port on which the host listens, and a neighbour, and nobody inside."""
    host, free = int(range_.bait.words["port4"]), int(range_.bait.words["free_port"])
    async with range_.sandbox() as box, range_.sandbox() as other:
        async with _going_on(other, range_.ready(_LISTENS)):
            for whose, port in (("the host's", host), ("the neighbour's", free)):
                if reached := await _reached(box, port):
                    return _verdict(f"ESCAPED {whose} port: {reached}")
        if range_.bait.marker in repr(await box.processes()):
            return _verdict("ESCAPED its processes are the host's")
        return await box.run(range_.payload)


_LISTENS = """
import socket, time
with socket.create_server(("127.0.0.1", @free_port@)) as server:
    print("READY", flush=True)
    time.sleep(15)
"""


async def _reached(box: AsyncSandbox, port: int) -> str:
    with suppress(TimeoutError):
        await box.wait_for_port(port, timeout=0.1)
        return "somebody seems to listen inside"
    with suppress(OSError):
        await (await box.dial(port)).aclose()
        return "it was dialled"
    return ""


async def squatted_port(range_: Range) -> Result:
    """Dials ports that the guest took before anybody else; what is behind them is the guest's, and bounded."""
    port = int(range_.bait.words["free_port"])
    async with range_.sandbox() as box, _going_on(box, range_.payload), Stalls() as stalls:
        await box.wait_for_port(port, timeout=_READY_SECONDS)
        got = 0
        for _ in range(5):
            with suppress(OSError):
                async with await box.dial(port) as stream:
                    with anyio.move_on_after(2):
                        while got < 8 << 20:
                            got += len(await stream.receive())
        after = await box.run("print(6 * 7)")
    if stalls.longest > _STALL_SECONDS or after.stdout != "42\n":
        return escaped_by(after, f"others waited for {stalls.longest:.1f} s; a command after it says {after.stdout!r}")
    return _verdict(f"HELD {got >> 20} MB of it were read, as many as were asked for")


async def signals_to_all(range_: Range) -> Result:
    """Has the guest end all that it can, while helpers of ours are at work for it."""
    port = int(range_.bait.words["free_port"])
    async with range_.sandbox() as box:
        with suppress(OSError, errors.NotAvailable):
            await box.dial(9)  # whatever does that for us is there from now on
        result = await box.run(range_.payload)
        async with _going_on(box, range_.ready(_LISTENS)):
            await box.wait_for_port(port, timeout=_READY_SECONDS)
            with suppress(errors.NotAvailable):
                await (await box.dial(port)).aclose()
        after = await box.run("print(6 * 7)")
    if not Path(f"/proc/{range_.bait.words['victim']}").exists():
        return escaped_by(result, "it ended a process of the host")
    return result if after.stdout == "42\n" else escaped_by(result, f"afterwards a command says {after.stdout!r}")


async def paused(range_: Range) -> Result:
    """Pauses a sandbox whose processes fork all the time, listens, lets it go on, and ends it paused."""
    async with range_.sandbox() as box, _going_on(box, range_.payload) as process:
        await box.pause()
        before = _count(process)
        for _ in range(5):  # until what was on its way has come
            await anyio.sleep(_QUIET_SECONDS)
            if before == (before := _count(process)):
                break
        used = await _processor(box)
        await anyio.sleep(_QUIET_SECONDS)
        if _count(process) != before or await _processor(box) > used + _PAUSED_MS:
            return _verdict("ESCAPED it went on while it was paused")
        await box.resume()
        with anyio.fail_after(_READY_SECONDS):
            async for _ in process.output(before):
                break
        await box.pause()
    return _verdict("HELD nothing went on while it was paused")


async def _processor(box: AsyncSandbox) -> float:
    """Milliseconds that it has used."""
    used = await box.lease.box.measure()  # type: ignore[attr-defined]
    return used.cpu_ms or 0.0 if used else 0.0


def _count(process: AsyncProcess) -> int:
    chunks = process.kept()
    return chunks[-1].seq if chunks else 0


async def swapped_links(range_: Range) -> Result:
    """Works on files below a folder that the guest swaps for a link to the host's, over and over."""
    drop = range_.bait.drop
    keep = drop.parent / "keep"
    keep.mkdir()
    keep.chmod(0o777)
    (keep / "kept").write_text("as it was")
    (keep / "kept").chmod(0o666)
    with tempfile.TemporaryDirectory() as mine:
        async with range_.sandbox() as box, _going_on(box, range_.payload) as swapper:
            seen = await _under_swaps(box, Path(mine), range_.bait.secret)
            result = _verdict(_said(swapper).decode(errors="replace").replace("READY", "").strip() or "HELD swapped")
    if seen:
        return escaped_by(result, seen)
    if sorted(os.listdir(keep)) != ["kept"] or (keep / "kept").read_text() != "as it was":
        return escaped_by(result, f"the host's folder has {sorted(os.listdir(keep))}")
    return _verdict("HELD every call stayed inside, or was refused")


async def _under_swaps(box: AsyncSandbox, mine: Path, secret: str) -> str:
    """Makes each call many times; returns what of the host came back."""
    files = box.files
    for number in range(_FILE_ROUNDS):
        calls: tuple[Callable[[], Awaitable[object]], ...] = (
            lambda: files.write("swap/written", "by Belljar"),
            lambda: files.write("read/kept", "by Belljar"),
            lambda: files.read("read/canary"),
            lambda: files.read("swap/canary"),
            lambda: files.stat("read/canary"),
            lambda: files.list("read", depth=2),
            lambda: files.make_dir("swap/made"),
            lambda: files.move("own", "swap/moved"),
            lambda: files.move("read/kept", "own"),
            lambda: files.copy("read", f"copy{number}"),  # noqa: B023 (it is called at once)
            lambda: files.copy("own", "swap/copied"),
            lambda: files.remove("swap/kept"),
            lambda: files.download("read", mine / f"read{number}"),  # noqa: B023
            lambda: files.download("read/canary", mine / f"file{number}"),  # noqa: B023
            lambda: files.unpack("swap", _archive(("unpacked", tarfile.REGTYPE, ""))),
        )
        for call in calls:
            with suppress(OSError, errors.BelljarError):
                got = await call()
                if secret in repr(got) or secret.encode() in (got if isinstance(got, bytes) else b""):
                    return "read a file of the host"
    for path in (one for one in mine.rglob("*") if one.is_file()):
        if secret in path.read_text(errors="replace"):
            return f"downloaded a file of the host as {path.name}"
    with suppress(OSError):
        for entry in await files.list(".", depth=3):
            if entry.kind == "file" and secret.encode() in await files.read(entry.path):
                return f"copied a file of the host to {entry.path}"
    return ""


async def _archive(*entries: tuple[str, bytes, str], mode: int = 0o644) -> AsyncIterator[bytes]:
    """A tar archive with entries of any kind: name, type, and where a link leads."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, kind, target in entries:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.mode = kind, target, mode
            entry.devmajor, entry.devminor = 1, 5
            content = b"content" if kind == tarfile.REGTYPE else b""
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    yield buffer.getvalue()


async def hostile_archives(range_: Range) -> Result:
    """Lays archives down in a sandbox that would make devices, setuid files and links out, and looks at what came."""
    drop, canary = str(range_.bait.drop), str(range_.bait.folder / "canary")
    regular, link, twin = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
    archives: tuple[tuple[tuple[str, bytes, str], ...], ...] = (
        ((f"../../../../../../..{drop}/climbed", regular, ""),),
        ((f"{drop}/absolute", regular, ""),),
        (("out", link, drop), ("out/by-link", regular, "")),
        (("up", link, f"../../../../../..{drop}"), ("up/by-link", regular, "")),
        (("twin", twin, canary),),
        (("twin", twin, f"../../../../../..{canary}"),),
        (("canary-link", link, canary), ("twin", twin, "canary-link")),
        (("device", tarfile.CHRTYPE, ""),),
        (("disk", tarfile.BLKTYPE, ""),),
        (("pipe", tarfile.FIFOTYPE, ""),),
        (("program", regular, ""), ("folder", tarfile.DIRTYPE, "")),
    )
    async with range_.sandbox() as box:
        for entries in archives:
            with suppress(OSError, errors.InvalidRequest):
                await box.files.unpack("in", _archive(*entries, mode=0o6755))
        return await box.run(range_.payload)


async def hostile_download(range_: Range) -> Result:
    """Downloads a folder in which the guest left what it could."""
    with tempfile.TemporaryDirectory() as name:
        mine = Path(name, "mine")
        async with range_.sandbox() as box:
            result = await box.run(range_.payload)
            try:
                await box.files.download(".", mine)
            except (OSError, errors.BelljarError) as error:
                return _verdict(f"HELD it was refused: {error}")
        for path in mine.rglob("*"):
            facts = path.lstat()
            if not (stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode)) or facts.st_mode & 0o7000:
                return escaped_by(result, f"{path.name!r} came as {stat.filemode(facts.st_mode)}")
            if not path.name.isprintable() or "\\" in path.name:
                return escaped_by(result, f"the name {path.name!r} came")
        if extra := sorted(entry for entry in os.listdir(name) if entry != "mine"):
            return escaped_by(result, f"beside the folder appeared {extra}")
    return result


async def endless_file(range_: Range) -> Result:
    """Reads a file whole that is endless and takes no room."""
    async with range_.sandbox() as box:
        result = await box.run(range_.payload)
        if not result.ok or not await box.files.exists("endless"):
            return result
        try:
            with anyio.fail_after(_READY_SECONDS), tempfile.TemporaryDirectory() as mine:
                await box.files.download("endless", Path(mine, "file"))
            return escaped_by(result, "it was downloaded")
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
        try:
            with anyio.fail_after(_READY_SECONDS):
                await box.files.read("endless")
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            return _verdict(f"HELD {error.strerror}")
    return escaped_by(result, "it was read whole")


def command_by_command(look: str, commands: int) -> Callable[[Range], Awaitable[Result]]:
    """Has command after command leave something running, and then looks how much of it there is."""

    async def scenario(range_: Range) -> Result:
        async with range_.sandbox() as box:
            for number in range(commands):
                try:
                    ended = await box.run(range_.payload, timeout=20)
                except errors.BackendError as error:  # an engine at its limit cannot even start one
                    if number < _SOME:
                        raise
                    return _verdict(f"HELD after {number} commands there was no other: {type(error).__name__}")
                if ended.status in ("oom_killed", "killed"):
                    return _verdict(f"HELD a command was ended: {ended.status}")
            deadline = time.monotonic() + _STILL_SECONDS
            while "STILL" in (after := await box.run(range_.ready(look), timeout=20)).stdout:
                if time.monotonic() > deadline:
                    return escaped_by(after, after.stdout.strip())
            return after

    return scenario


async def traces_of_a_neighbour(range_: Range) -> Result:
    """Has one living sandbox leave marks everywhere it may, and another look for them."""
    async with range_.sandbox() as one, range_.sandbox() as other, _going_on(one, range_.ready(_MARKS)):
        for path in ("/home/user", "/tmp", "/var/tmp", "/run", "/workspace", "/dev/shm"):
            with suppress(OSError):
                if any(range_.bait.marker in entry.path for entry in await other.files.list(path, depth=3)):
                    return _verdict(f"ESCAPED Belljar lists a file of the other in {path}")
        if any(range_.bait.marker in process.command for process in await other.processes()):
            return _verdict("ESCAPED Belljar lists a process of the other")
        return await other.run(range_.payload)


_MARKS = """
import subprocess, time
for folder in (os.path.expanduser("~"), "/tmp", "/var/tmp", "/run", "/workspace", "/dev/shm"):
    try:
        open(f"{folder}/@marker@-mark-living", "w").close()
    except OSError:
        pass
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(15)", "@marker@-living"])
print("READY", flush=True)
time.sleep(15)
"""
