"""A sandbox for several commands: files stay, processes do not, limits hold for each command."""

from __future__ import annotations

import errno
from typing import Any

from belljar.backends.fake import FakeProcess
from belljar.core.errors import InvalidRequest, PolicyDenied
from belljar.core.result import Result
from belljar.sandbox import AsyncSandbox
from belljar.testing.conformance.bench import (
    Bench,
    CheckFailed,
    check,
    equal,
    expect,
    guest,
    printed,
    refused,
    succeeded,
)


def _shows(path: str) -> str:
    """A guest that prints what is in this file."""
    return guest(f"print(open('{path}').read(), end='')", lambda p: p.out(p.read(path)))


_SHOW, _SHOW_DEEP, _SHOW_GIVEN = _shows("note.txt"), _shows("some/deep/note.txt"), _shows("given.txt")
_CAT = guest(("cat", "note.txt"), lambda p: p.out(p.read("note.txt")))
_LEAVE = guest("open('note.txt', 'w').write('left by the guest')", lambda p: p.write("note.txt", b"left by the guest"))


@check("sandbox", "what is written is read back byte for byte")
async def _roundtrip(bench: Bench) -> None:
    data = bytes(range(256))
    async with bench.sandbox() as box:
        await box.write("some/deep/data.bin", data)
        equal(await box.read("some/deep/data.bin"), data, "the file")
        equal(await box.read("/workspace/some/deep/data.bin"), data, "the file by its absolute name")


@check("sandbox", "a command sees what was written from outside")
async def _seen_inside(bench: Bench) -> None:
    async with bench.sandbox() as box:
        await box.write("some/deep/note.txt", "from outside")
        printed(await box.run(_SHOW_DEEP), "from outside")


@check("sandbox", "what a command leaves is there for the next one and for the caller")
async def _persist(bench: Bench) -> None:
    async with bench.sandbox() as box:
        succeeded(await box.run(_LEAVE))
        printed(await box.run(_SHOW), "left by the guest")
        equal(await box.read("note.txt"), b"left by the guest", "the file")


@check("sandbox", "a write replaces what was there")
async def _overwrite(bench: Bench) -> None:
    async with bench.sandbox() as box:
        await box.write("note.txt", "a rather long first version")
        await box.write("note.txt", "second")
        printed(await box.run(_SHOW), "second")


@check("sandbox", "a write that does not fit leaves what was there, and room for what does fit")
async def _no_room(bench: Bench) -> None:
    async with bench.sandbox(disk="1M") as box:
        await box.write("note.txt", "the old content")
        full = await refused(OSError, box.write("note.txt", b"x" * 3_000_000))
        equal(full.errno, errno.ENOSPC, "why it was refused")
        await box.write("other.txt", "x" * 1000)
        printed(await box.run(_SHOW), "the old content")


@check("sandbox", "the list names files and folders with their sizes")
async def _listing(bench: Bench) -> None:
    async with bench.sandbox() as box:
        await box.write("folder/five", b"12345")
        succeeded(await box.run(_LEAVE))
        seen = {(entry.path, entry.kind, entry.size if entry.kind == "file" else 0) for entry in await box.list()}
    wanted = {("folder", "folder", 0), ("folder/five", "file", 5), ("note.txt", "file", 17)}
    equal(seen, wanted, "the list")


@check("sandbox", "reading a file that is not there is FileNotFoundError")
async def _absent(bench: Bench) -> None:
    async with bench.sandbox() as box:
        try:
            content = await box.read("missing.txt")
        except FileNotFoundError:
            return
        raise CheckFailed(f"read {content!r}")


@check("sandbox", "a path that climbs out is refused as an invalid request")
async def _traversal(bench: Bench) -> None:
    async with bench.sandbox() as box:
        for path in ("../up.txt", "a/../../up.txt", "/etc/passwd"):
            await refused(InvalidRequest, box.read(path))
            await refused(InvalidRequest, box.write(path, "x"))


async def _play_link(p: FakeProcess) -> None:
    p.link("leak.txt", "/etc/passwd")
    p.link("etc", "/etc")


# A WASI guest may make links, but none to an absolute path: there those that climb must do.
_LINK = guest(
    "import os\n"
    "for target, name in (('/etc/passwd', 'leak.txt'), ('/etc', 'etc')):\n"
    "    try:\n"
    "        os.symlink(target, name)\n"
    "    except PermissionError:\n"
    "        os.symlink('../../../../..' + target, name)",
    _play_link,
)


@check("sandbox", "reading a link that the guest made reads nothing")
async def _no_leak(bench: Bench) -> None:
    async with bench.sandbox() as box:
        succeeded(await box.run(_LINK))
        for path in ("leak.txt", "etc/passwd"):
            try:
                content = await box.read(path)
            except OSError:
                continue
            raise CheckFailed(f"a link to the outside was read: {content[:60]!r}")


_SCRIPT = guest(("./hello.sh", "you"), lambda p: p.out("hello you\n"))


@check("sandbox", "a file written as executable can be run", "commands")
async def _executable(bench: Bench) -> None:
    async with bench.sandbox() as box:
        await box.write("hello.sh", '#!/bin/sh\necho "hello $1"\n', executable=True)
        printed(await box.exec(_SCRIPT), "hello you\n")


def _play_env(p: FakeProcess) -> Any:
    return p.out(f"{p.env.get('BASE')} {p.env.get('OWN')}\n")


_ENV = guest("import os\nprint(os.environ.get('BASE'), os.environ.get('OWN'))", _play_env)
_ENV_COMMAND = guest(("sh", "-c", 'echo "$BASE $OWN"'), _play_env)


@check("sandbox", "the box's environment holds for its commands, which may add to it")
async def _environment(bench: Bench) -> None:
    async with bench.sandbox(env={"BASE": "of the box", "OWN": "of the box"}) as box:
        printed(await box.run(_ENV, env={"OWN": "of the command"}), "of the box of the command\n")


@check("sandbox", "a program sees the files and the environment that code sees", "commands")
async def _program(bench: Bench) -> None:
    async with bench.sandbox(env={"BASE": "of the box", "OWN": "of the box"}) as box:
        succeeded(await box.run(_LEAVE))
        printed(await box.exec(_CAT), "left by the guest")
        printed(await box.exec(_ENV_COMMAND, env={"OWN": "of the command"}), "of the box of the command\n")


@check("sandbox", "a program is run as one, or is denied, and its last word is never taken for code")
async def _not_code(bench: Bench) -> None:
    async with bench.sandbox() as box:
        await box.write("note.txt", "print('taken for code')")
        if bench.lacks("commands"):
            await refused(PolicyDenied, box.exec(_CAT))
        else:
            printed(await box.exec(_CAT), "print('taken for code')")
        printed(await box.run(_SHOW), "print('taken for code')")


@check("sandbox", "files given when it was opened are there for every command")
async def _given(bench: Bench) -> None:
    async with bench.sandbox(files={"given.txt": "given"}) as box:
        printed(await box.run(_SHOW_GIVEN), "given")
        printed(await box.run(_SHOW_GIVEN), "given")


async def _play_beat(p: FakeProcess) -> None:
    p.write("beat", b"x")
    await p.out("beating\n")


# A child that leaves its session, ignores polite signals and writes ten times a second for as long as it lives.
_BEATING = (
    "import os, signal, sys, time\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):\n"
    "        signal.signal(number, signal.SIG_IGN)\n"
    "    while True:\n"
    "        with open('beat', 'a') as file:\n"
    "            file.write('x')\n"
    "        time.sleep(0.1)\n"
    "while not os.path.exists('beat'):\n"
    "    time.sleep(0.01)\n"
    "os.write(1, b'beating\\n')\n"
)
_BEAT = guest(_BEATING, _play_beat)


async def _play_beat_on(p: FakeProcess) -> None:
    await _play_beat(p)
    await p.sleep(60)


BEAT_ON = guest(_BEATING + "time.sleep(60)\n", _play_beat_on)

# Waits for several beats, then says whether there was one.
_LISTEN = guest(
    "import os, time\nbefore = os.path.getsize('beat')\ntime.sleep(0.5)\nprint(os.path.getsize('beat') - before)",
    lambda p: p.out(f"{len(p.read('beat')) - 1}\n"),
)


async def expect_silence(box: AsyncSandbox, result: Result) -> None:
    """The guest's child beat while the command ran, and does so no more."""
    equal(result.stdout, "beating\n", "stdout")
    expect(len(await box.read("beat")) > 0, "the child never ran")
    printed(await box.run(_LISTEN), "0\n")


@check("sandbox", "processes do not outlive their command", "processes")
async def _no_survivors(bench: Bench) -> None:
    async with bench.sandbox() as box:
        await expect_silence(box, succeeded(await box.run(_BEAT, timeout=30)))


async def _play_nap(p: FakeProcess) -> None:
    await p.sleep(20)


_NAP = guest("import time\ntime.sleep(20)", _play_nap)
_NAP_COMMAND = guest(("sleep", "20"), _play_nap)


@check("sandbox", "a command may have a tighter limit, and the box lives on after it struck")
async def _tighter(bench: Bench) -> None:
    async with bench.sandbox(timeout=30) as box:
        await box.write("note.txt", "still here")
        equal((await box.run(_NAP, timeout=0.5)).status, "timeout", "status")
        printed(await box.run(_SHOW), "still here")


@check("sandbox", "the limits of the box hold for its commands")
async def _inherited(bench: Bench) -> None:
    async with bench.sandbox(timeout=0.5) as box:
        equal((await box.run(_NAP)).status, "timeout", "status")


@check("sandbox", "the limits of the box hold for its programs", "commands")
async def _inherited_by_programs(bench: Bench) -> None:
    async with bench.sandbox(timeout=0.5) as box:
        equal((await box.exec(_NAP_COMMAND)).status, "timeout", "status")


@check("sandbox", "two sandboxes share no files")
async def _separate(bench: Bench) -> None:
    async with bench.sandbox() as one, bench.sandbox() as two:
        await one.write("note.txt", "of the first")
        await two.write("note.txt", "of the second")
        printed(await one.run(_SHOW), "of the first")
        printed(await two.run(_SHOW), "of the second")


@check("sandbox", "a closed sandbox refuses")
async def _closed(bench: Bench) -> None:
    box = bench.sandbox()
    async with box:
        await box.write("note.txt", "x")
    await refused(InvalidRequest, box.read("note.txt"))
    await refused(InvalidRequest, box.run(_SHOW))
    await refused(InvalidRequest, box.exec(_CAT))


@check("sandbox", "reaping orphans leaves a living sandbox alone")
async def _reaping(bench: Bench) -> None:
    async with bench.sandbox() as box:
        await box.write("note.txt", "alive")
        await bench.engine.backend(bench.backend).reap()
        printed(await box.run(_SHOW), "alive")
