"""The files of a living sandbox, by whole paths, with its programs' rights and errors."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Awaitable
from typing import Any

import anyio

from belljar.backends.fake import FakeProcess
from belljar.core.errors import InvalidRequest
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
    says,
    succeeded,
)
from belljar.testing.conformance.living.guests import python
from belljar.testing.conformance.living.waiting import SECONDS, done

_AREA = "living files"
_EVERYWHERE = ("notes.txt", "/workspace/deep/er/notes.txt", "~/notes.txt", "/tmp/notes.txt", "/var/tmp/notes.txt")


async def _denied(attempt: Awaitable[Any], what: str) -> None:
    """It must be an OSError of whatever kind, and soon."""
    try:
        with anyio.fail_after(SECONDS):
            answer = await attempt
    except TimeoutError:
        raise CheckFailed(f"{what} never ends") from None
    except OSError:
        return
    raise CheckFailed(f"{what} gave {answer!r}, and should be an OSError")


def _whole(box: AsyncSandbox, path: str) -> str:
    if path.startswith("~"):
        return f"{box.home}{path[1:]}"
    return path if path.startswith("/") else f"/workspace/{path}"


@check(_AREA, "a file is read back byte for byte, wherever its programs may write", "living", shared=True)
async def _roundtrip(bench: Bench) -> None:
    data = bytes(range(256))
    async with bench.machine() as box:
        for path in _EVERYWHERE:
            await box.files.write(path, data)
            equal(await box.files.read(path), data, path)
            seen = await box.files.stat(path)
            equal((seen.path, seen.kind, seen.size), (_whole(box, path), "file", 256), f"stat of {path}")


def _play_append(p: FakeProcess) -> None:
    p.write(p.env["FILE"], p.read(p.env["FILE"]) + b"more\n")


_SHOW = guest('cat "$FILE"', lambda p: p.out(p.read(p.env["FILE"])))
_APPEND = guest('echo more >> "$FILE"', _play_append)


@check(_AREA, "files are those of its programs, which may change what was written from outside", "living", shared=True)
async def _shared(bench: Bench) -> None:
    async with bench.machine() as box:
        for path in _EVERYWHERE:
            name = {"FILE": _whole(box, path)}
            await box.files.write(path, "first\n")
            printed(await done(box, _SHOW, env=name), "first\n")
            succeeded(await done(box, _APPEND, env=name))
            equal(await box.files.read_text(path), "first\nmore\n", path)


_TOOL = guest(("./tool",), says("ran\n"))


@check(
    _AREA,
    "a file has the permissions that it was given, and keeps them when it is written again",
    "living",
    shared=True,
)
async def _permissions(bench: Bench) -> None:
    async with bench.machine() as box:
        await box.files.write("tool", "#!/bin/sh\necho nothing\n", mode=0o755)
        await box.files.write("tool", "#!/bin/sh\necho ran\n")
        await box.files.write("secret", "", mode=0o600)
        modes = {name: (await box.files.stat(name)).mode for name in ("tool", "secret")}
        equal(modes, {"tool": 0o755, "secret": 0o600}, "permissions")
        printed(await (await box.start(_TOOL)).wait(SECONDS), "ran\n")
        await refused(InvalidRequest, box.files.write("tool", "", mode=0o4755))


@check(_AREA, "a list goes as deep as it was asked to, sorted by whole path", "living", shared=True)
async def _listed(bench: Bench) -> None:
    async with bench.machine() as box:
        for name in ("b/c/deep", "b/near", "a"):
            await box.files.write(f"~/top/{name}", "12345")
        top = f"{box.home}/top"
        wanted = [(f"{top}/a", "file"), (f"{top}/b", "folder")]
        equal([(one.path, one.kind) for one in await box.files.list("~/top")], wanted, "the list")
        wanted += [(f"{top}/b/c", "folder"), (f"{top}/b/near", "file")]
        equal([(one.path, one.kind) for one in await box.files.list(top, depth=2)], wanted, "the list, two deep")
        equal(len(await box.files.list(top, depth=64)), 5, "entries at any depth")


def _play_kinds(p: FakeProcess) -> None:
    p.write("folder/five", b"12345")
    p.link("link", "/etc/passwd")
    p.make_pipe("pipe")


_KINDS = guest("mkdir folder; printf 12345 > folder/five; ln -s /etc/passwd link; mkfifo pipe", _play_kinds)


@check(_AREA, "stat tells kind and size, and of a link where it leads", "living", shared=True)
async def _kinds(bench: Bench) -> None:
    async with bench.machine() as box:
        succeeded(await done(box, _KINDS))
        seen = [await box.files.stat(name) for name in ("folder", "folder/five", "link", "pipe")]
        equal([one.kind for one in seen], ["folder", "file", "link", "pipe"], "kinds")
        equal((seen[1].size, seen[2].target), (5, "/etc/passwd"), "(size, target)")


@check(_AREA, "a pipe is not waited for, and is no file", "living", shared=True)
async def _pipe(bench: Bench) -> None:
    async with bench.machine() as box:
        succeeded(await done(box, _KINDS))
        await _denied(box.files.read("pipe"), "reading a pipe")
        await _denied(box.files.write("pipe", "x"), "writing to a pipe")


@check(_AREA, "what is there exists, and nothing else does", "living", shared=True)
async def _exists(bench: Bench) -> None:
    async with bench.machine() as box:
        succeeded(await done(box, _KINDS))
        names = ("folder", "folder/five", "link", "~", "/etc/passwd", "gone", "folder/five/below", "/nowhere/at/all")
        seen = {name: await box.files.exists(name) for name in names}
        equal(list(seen.values()), [True] * 5 + [False] * 3, f"what of {names} exists")


@check(_AREA, "a folder is made with those above it, and one that is there is left", "living", shared=True)
async def _make_dir(bench: Bench) -> None:
    async with bench.machine() as box:
        equal([await box.files.make_dir("~/a/b/c") for _ in range(2)], [True, False], "whether it was made")
        await box.files.write("~/a/b/c/file", "kept")
        equal(await box.files.make_dir("~/a/b/c"), False, "whether it was made")
        equal(await box.files.read("~/a/b/c/file"), b"kept", "what is in it")
        await refused(FileExistsError, box.files.make_dir("~/a/b/c/file"))


@check(
    _AREA, "files and folders are moved, also from one place to another, and a file gives way", "living", shared=True
)
async def _move(bench: Bench) -> None:
    async with bench.machine() as box:
        await box.files.write("from/one", "1", mode=0o640)
        await box.files.write("old", "old")
        await box.files.move("from/one", "old")
        equal((await box.files.read("old"), (await box.files.stat("old")).mode), (b"1", 0o640), "(content, mode)")
        await box.files.write("from/two", "2")
        for path, to in (("from", "~/to"), ("~/to", "/tmp/there")):
            await box.files.move(path, to)
            equal([await box.files.exists(path), await box.files.read(f"{to}/two")], [False, b"2"], "there, and here")
        await refused(FileNotFoundError, box.files.move("gone", "else"))


@check(_AREA, "a folder is copied with all that it holds, its links as links", "living", shared=True)
async def _copy(bench: Bench) -> None:
    async with bench.machine() as box:
        succeeded(await done(box, _KINDS))
        await box.files.write("folder/run", "", mode=0o755)
        await box.files.move("link", "folder/link")
        await box.files.copy("folder", "~/copy")
        seen = {one.path.removeprefix(box.home): (one.kind, one.target) for one in await box.files.list("~/copy")}
        wanted = {"/copy/five": ("file", ""), "/copy/link": ("link", "/etc/passwd"), "/copy/run": ("file", "")}
        equal(seen, wanted, "the copy")
        equal((await box.files.stat("~/copy/run")).mode, 0o755, "permissions of the copy")
        await box.files.write("~/copy/five", "other")
        equal(await box.files.read("folder/five"), b"12345", "what was copied")


@check(_AREA, "a file or a folder with all that it holds is removed", "living", shared=True)
async def _remove(bench: Bench) -> None:
    async with bench.machine() as box:
        for name in ("folder/deep/file", "other"):
            await box.files.write(name, "x")
        for name in ("folder", "other"):
            await box.files.remove(name)
            await refused(FileNotFoundError, box.files.remove(name))
        equal(await box.files.list(), (), "what is left")
        await _denied(box.files.remove("/workspace"), "removing /workspace itself")
        await box.files.write("after", "x")


@check(_AREA, "what goes wrong is the error that a program would get", "living", shared=True)
async def _errors(bench: Bench) -> None:
    async with bench.machine() as box:
        await box.files.write("folder/file", "x")
        await refused(FileNotFoundError, box.files.read("gone"))
        await refused(FileNotFoundError, box.files.stat("folder/gone"))
        await refused(FileNotFoundError, box.files.list("gone"))
        await refused(IsADirectoryError, box.files.read("folder"))
        await refused(IsADirectoryError, box.files.write("folder", "x"))
        await refused(NotADirectoryError, box.files.list("folder/file"))
        await refused(NotADirectoryError, box.files.read("folder/file/below"))


def _play_forbid(p: FakeProcess) -> None:
    p.write("secret", b"hidden")
    p.chmod("secret", 0)
    p.write("fixed", b"kept")
    p.chmod("fixed", 0o444)


_FORBID = guest("printf hidden > secret; chmod 0 secret; printf kept > fixed; chmod 444 fixed", _play_forbid)


@check(_AREA, "files are touched with its programs' rights, and no more", "living", shared=True)
async def _rights(bench: Bench) -> None:
    async with bench.machine() as box:
        succeeded(await done(box, _FORBID))
        await refused(PermissionError, box.files.read("secret"))
        await refused(PermissionError, box.files.write("fixed", "changed"))
        equal(await box.files.read("fixed"), b"kept", "the file that is read-only")


_SYSTEM = guest("head -c 4 /etc/passwd; ls -d /etc/new /usr/new 2>/dev/null; true", says("root"))


@check(_AREA, "the system's own files can be read and not be changed", "living", shared=True)
async def _system(bench: Bench) -> None:
    async with bench.machine() as box:
        expect((await box.files.stat("/etc")).kind == "folder", "there is no /etc")
        await _denied(box.files.write("/etc/passwd", "x"), "writing /etc/passwd")
        await _denied(box.files.write("/usr/new", "x"), "writing /usr/new")
        await _denied(box.files.make_dir("/etc/new"), "making /etc/new")
        await _denied(box.files.remove("/usr"), "removing /usr")
        await _denied(box.files.move("/etc/passwd", "/tmp/passwd"), "moving /etc/passwd")
        printed(await done(box, _SYSTEM), "root")


@check(_AREA, "the kernel's files are no files of the sandbox", "living", shared=True)
async def _kernels(bench: Bench) -> None:
    async with bench.machine() as box:
        for path in ("/proc/self/environ", "/proc/1/environ", "/proc/self/root/etc/passwd", "/dev/zero"):
            await _denied(box.files.read(path), f"reading {path}")
        await _denied(box.files.write("/dev/null", "x"), "writing /dev/null")


def _play_traps(p: FakeProcess) -> None:
    p.link("file", "/etc/passwd")
    p.link("folder", "/etc")
    p.write("kept/inside", b"inside")
    p.link("inner", "kept")


_TRAPS = guest(
    "ln -s /etc/passwd file; ln -s /etc folder; mkdir kept; printf inside > kept/inside; ln -s kept inner",
    _play_traps,
)


@check(_AREA, "no link is followed, neither to read nor to write nor to remove", "living", shared=True)
async def _links(bench: Bench) -> None:
    async with bench.machine() as box:
        succeeded(await done(box, _TRAPS))
        for name in ("file", "folder/passwd", "inner/inside"):
            await _denied(box.files.read(name), f"reading {name}")
            await _denied(box.files.write(name, "x"), f"writing {name}")
        await _denied(box.files.list("folder"), "listing a link")
        equal([one.path for one in await box.files.list(depth=64)].count("/workspace/inner/inside"), 0, "below a link")
        await box.files.remove("inner")
        equal(await box.files.read("kept/inside"), b"inside", "what the removed link led to")


def _play_large(p: FakeProcess) -> None:
    p.write("large", b"0123456789abcdef" * 320_000)


_LARGE = guest(("sh", "-c", "yes 0123456789abcde | head -n 320000 | tr '\\n' f > large"), _play_large)


@check(_AREA, "a large file is read piece by piece, and can be left in the middle", "living", shared=True)
async def _large(bench: Bench) -> None:
    async with bench.machine() as box:
        succeeded(await box.exec(_LARGE))
        async with box.files.open("large") as pieces:
            first = await anext(pieces)
        expect(first.startswith(b"0123456789abcdef"), f"the first piece is {first[:20]!r}")
        digest = hashlib.sha256()
        async with box.files.open("large") as pieces:
            async for piece in pieces:
                digest.update(piece)
        equal(digest.hexdigest(), hashlib.sha256(b"0123456789abcdef" * 320_000).hexdigest(), "the digest of it")


@check(_AREA, "any name is a name, and what is none is refused", "living", shared=True)
async def _names(bench: Bench) -> None:
    names = ("a b", "ü.txt", "-rf", "quote'\"s", "line\nend", "*", "$HOME", ".hidden")
    async with bench.machine() as box:
        for name in names:
            await box.files.write(f"names/{name}", name)
        seen = {one.path.removeprefix("/workspace/names/") for one in await box.files.list("names")}
        equal(seen, set(names), "the list")
        equal([await box.files.read_text(f"names/{name}") for name in names], list(names), "the contents")
        for wrong in ("", "a\0b"):
            await refused(InvalidRequest, box.files.read(wrong))


def _play_bytes(p: FakeProcess) -> None:
    p.write("bad?", b"x")
    p.write("good", b"x")


_BAD_NAME = python("open(b'bad\\xff', 'w').close()\nopen('good', 'w').close()", _play_bytes)


@check(_AREA, "a name that is not UTF-8 spoils no list", "living", shared=True)
async def _bad_name(bench: Bench) -> None:
    async with bench.machine() as box:
        succeeded(await (await box.start(_BAD_NAME)).wait(SECONDS))
        names = [one.path for one in await box.files.list()]
        equal((len(names), names[-1]), (2, "/workspace/good"), "(entries, the last of them)")


@check(_AREA, "a file that does not fit is refused, and leaves what was there", "living", "limit:disk")
async def _full(bench: Bench) -> None:
    async with bench.machine(disk="4M") as box:
        await box.files.write("~/kept", "old")
        full = await refused(OSError, box.files.write("~/kept", b"x" * 8_000_000))
        equal(full.errno, errno.ENOSPC, "why it was refused")
        equal(await box.files.read("~/kept"), b"old", "the file")
        await box.files.write("~/small", "x" * 1000)


@check(_AREA, "many files are written at once, each whole", "living", shared=True)
async def _at_once(bench: Bench) -> None:
    async with bench.machine() as box:
        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(box.files.write, f"many/{number}", str(number) * 1000)
        found = {one.path.rpartition("/")[2]: one.size for one in await box.files.list("many")}
        equal(found, {str(n): len(str(n)) * 1000 for n in range(20)}, "sizes")
