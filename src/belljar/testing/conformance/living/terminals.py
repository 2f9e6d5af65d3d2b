"""Processes with a terminal of their own."""

from __future__ import annotations

import anyio

from belljar.backends.fake import FakeProcess
from belljar.core.errors import InvalidRequest
from belljar.testing.conformance.bench import Bench, check, equal, expect, guest, printed, refused, says
from belljar.testing.conformance.living.guests import python
from belljar.testing.conformance.living.waiting import SECONDS, heard

_AREA = "terminals"
_NEEDS = ("living", "pty")


async def _play_size(p: FakeProcess) -> None:
    size = p.pty
    await p.out(f"True True {size.columns} {size.rows}\r\n" if size else "False False\n")


_SIZE = python(
    "import os\nprint(os.isatty(0), os.isatty(1), *(os.get_terminal_size(0) if os.isatty(0) else ()))",
    _play_size,
)


@check(_AREA, "a process has a terminal of the size that was asked for, or none", *_NEEDS, shared=True)
async def _has_one(bench: Bench) -> None:
    async with bench.machine() as box:
        for pty, said in (
            ((80, 24), "True True 80 24\r\n"),
            ((132, 50), "True True 132 50\r\n"),
            (None, "False False\n"),
        ):
            printed(await (await box.start(_SIZE, pty=pty)).wait(SECONDS), said)


async def _play_resized(p: FakeProcess) -> None:
    changed = anyio.Event()
    p.on_signal(28, changed.set)
    await p.out("ready\r\n")
    await changed.wait()
    assert p.pty
    await p.out(f"{p.pty.columns} {p.pty.rows}\r\n")


_RESIZED = python(
    "import os, signal\n"
    "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])\n"
    "print('ready')\n"
    "signal.sigwait([signal.SIGWINCH])\n"
    "print(*os.get_terminal_size(0))",
    _play_resized,
)


@check(_AREA, "a program hears of another size of its terminal", *_NEEDS, shared=True)
async def _resized(bench: Bench) -> None:
    async with bench.machine() as box:
        process = await box.start(_RESIZED, pty=(80, 24))
        await heard(process, "ready")
        await process.resize(100, 30)
        printed(await process.wait(SECONDS), "ready\r\n100 30\r\n")


async def _play_typed(p: FakeProcess) -> int:
    """A terminal that echoes, and turns its two keys into a signal and an end."""
    await p.out("ready\r\n")
    while typed := await p.receive():
        if typed == b"\x03":
            await p.out("^C")
            p.signal(2)
        if typed == b"\x04":
            break
        await p.out(typed.replace(b"\n", b"\r\n") * 2)
    return 0


_TYPED = guest("echo ready; exec cat", _play_typed)


@check(_AREA, "what is typed is echoed and read, and Ctrl-C interrupts", *_NEEDS, shared=True)
async def _interrupt(bench: Bench) -> None:
    async with bench.machine() as box:
        process = await box.start(_TYPED, pty=(80, 24))
        await heard(process, "ready")
        await process.write("hello\n")
        await heard(process, "hello\r\nhello\r\n")
        await process.write(b"\x03")
        equal((await process.wait(SECONDS)).exit_code, 130, "the exit code")


@check(_AREA, "Ctrl-D ends the input of a terminal, and so does closing it", *_NEEDS, shared=True)
async def _end_of_input(bench: Bench) -> None:
    async with bench.machine() as box:
        one, other = await box.start(_TYPED, pty=(80, 24)), await box.start(_TYPED, pty=(80, 24))
        for process in (one, other):
            await heard(process, "ready")
        await one.write(b"\x04")
        await other.close_stdin()
        equal([(await process.wait(SECONDS)).exit_code for process in (one, other)], [0, 0], "the exit codes")


_FOREGROUND = python(
    "import os\n"
    "print(os.tcgetpgrp(0) == os.getpgrp(), os.open('/dev/tty', os.O_RDWR) > 2, os.environ.get('TERM', '') != '')",
    says("True True True\r\n"),
)


@check(_AREA, "a terminal is its program's own: it can control jobs, and /dev/tty is it", *_NEEDS, shared=True)
async def _controlling(bench: Bench) -> None:
    async with bench.machine() as box:
        printed(await (await box.start(_FOREGROUND, pty=(80, 24))).wait(SECONDS), "True True True\r\n")


async def _play_shell(p: FakeProcess) -> int:
    await p.out("$ ")
    while typed := await p.receive():
        if typed.startswith(b"exit"):
            return 5
        await p.out(typed + b"6 7\r\n$ ")
    return 0


_SHELL = guest(("sh", "-i"), _play_shell)


@check(_AREA, "a shell can be talked to, line by line", *_NEEDS, shared=True)
async def _shell(bench: Bench) -> None:
    async with bench.machine() as box:
        shell = await box.start(_SHELL, pty=(80, 24))
        await shell.write("x=6; echo $x $((x + 1))\n")
        await heard(shell, "6 7\r\n")
        await shell.write("exit 5\n")
        equal((await shell.wait(SECONDS)).exit_code, 5, "the exit code")


@check(_AREA, "two terminals are kept apart, and both are ended with what runs in them", *_NEEDS, shared=True)
async def _apart(bench: Bench) -> None:
    async with bench.machine() as box:
        one, other = await box.start(_TYPED, pty=(80, 24)), await box.start(_TYPED, pty=(80, 24))
        for process in (one, other):
            await heard(process, "ready")
        await one.write("to one\n")
        await heard(one, "to one\r\nto one\r\n")
        await other.write("to other\n")
        await heard(other, "to other\r\nto other\r\n")
        texts = ["".join(chunk.text for chunk in process.kept()) for process in (one, other)]
        expect("other" not in texts[0] and "one" not in texts[1], f"the outputs are {texts}")
        equal([(await process.kill()).status for process in (one, other)], ["aborted"] * 2, "the statuses")
        equal(await box.processes(), (), "what runs then")


@check(_AREA, "what has no terminal cannot be resized, and no terminal has no size", *_NEEDS, shared=True)
async def _no_terminal(bench: Bench) -> None:
    async with bench.machine() as box:
        process = await box.start(_TYPED)
        await refused(InvalidRequest, process.resize(80, 24))
        await refused(InvalidRequest, box.start(_TYPED, pty=(0, 24)))
