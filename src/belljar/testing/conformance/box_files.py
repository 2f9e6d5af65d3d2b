"""The files of a sandbox as its caller has them: those that the guest sees, with the guest's rights and errors."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio.to_thread

from belljar.backends.fake import FakeProcess
from belljar.core import errors
from belljar.core.values import MIB
from belljar.testing.conformance.bench import Bench, check, equal, expect, guest, printed, refused, says, succeeded

_STRANGER = 54_320  # a uid that is neither root's nor any guest's
_BIG_BYTES = 65 * MIB  # more than may be collected


async def _play_modes(p: FakeProcess) -> None:
    p.write("tool.sh", b"old", executable=True)
    p.write("fixed.txt", b"old", read_only=True)


_MODES = guest(
    "import os\n"
    "for name, mode in (('tool.sh', 0o750), ('fixed.txt', 0o444)):\n"
    "    open(name, 'w').write('old')\n"
    "    os.chmod(name, mode)",
    _play_modes,
)
_SHOW_MODES = guest(
    "import os\nprint(oct(os.stat('tool.sh').st_mode & 0o777), open('tool.sh').read(), open('fixed.txt').read())",
    lambda p: p.out(f"0o750 {p.read('tool.sh').decode()} {p.read('fixed.txt').decode()}\n"),
)


@check("sandbox", "a write over a file keeps its permissions, and a read-only one is not written over", "posix")
async def _permissions(bench: Bench) -> None:
    async with bench.sandbox() as box:
        succeeded(await box.run(_MODES))
        await box.write("tool.sh", "new")
        await refused(PermissionError, box.write("fixed.txt", "new"))
        printed(await box.run(_SHOW_MODES), "0o750 new old\n")


@check("sandbox", "what is no file is told apart: a folder, and a name below a file")
async def _kinds(bench: Bench) -> None:
    async with bench.sandbox() as box:
        await box.write("folder/file", "x")
        await refused(IsADirectoryError, box.read("folder"))
        await refused(IsADirectoryError, box.write("folder", "x"))
        await refused(NotADirectoryError, box.read("folder/file/below"))
        await refused(NotADirectoryError, box.write("folder/file/below", "x"))


async def _play_many(p: FakeProcess) -> None:
    p.write("zz/last.txt", b"the last")
    p.write("big.bin", bytes(_BIG_BYTES - 3) + b"end")


_MANY = guest(
    "import os\n"
    "for number in range(10_100):\n"
    "    os.close(os.open(f'{number:05}', os.O_CREAT | os.O_WRONLY))\n"
    "os.mkdir('zz')\n"
    "open('zz/last.txt', 'w').write('the last')\n"
    "with open('big.bin', 'wb') as file:\n"
    f"    file.seek({_BIG_BYTES - 3})\n"
    "    file.write(b'end')",
    _play_many,
)


@check("sandbox", "a file is read however many others there are and however large it is, and no list is half of one")
async def _large(bench: Bench) -> None:
    async with bench.sandbox() as box:
        succeeded(await box.run(_MANY))
        equal(await box.read("zz/last.txt"), b"the last", "the file behind ten thousand others")
        size, pieces = 0, 0
        async with box.reading("big.bin") as content:
            async for piece in content:
                size, pieces, last = size + len(piece), pieces + 1, piece
        try:
            names = {entry.path for entry in await box.list()}
            expect("zz/last.txt" in names, f"the list ends early, after {len(names)} entries")
        except errors.PolicyDenied as refusal:
            expect(refusal.message.startswith("list: "), f"the refusal does not say what of: {refusal}")
    equal((size, last[-3:]), (_BIG_BYTES, b"end"), "size and end of a large file")


_GIVEN = guest("print(open('given.txt').read())", lambda p: p.out(p.read("given.txt") + b"\n"))


@check("sandbox", "what a sandbox was opened with is read and listed, and not to be written over")
async def _given(bench: Bench) -> None:
    async with bench.sandbox(files={"given.txt": "as given"}) as box:
        for _ in range(2):
            equal(await box.read("given.txt"), b"as given", "the file")
            names = [(entry.path, entry.kind, entry.size) for entry in await box.list()]
            expect(("given.txt", "file", 8) in names, f"the list does not have it: {names}")
            await refused(PermissionError, box.write("given.txt", "another"))
            printed(await box.run(_GIVEN), "as given\n")


# --- a granted folder ---


@contextmanager
def _granted(owner: int) -> Iterator[Path]:
    """A folder of the host that belongs to this uid, with a file, a link and an empty folder."""
    with tempfile.TemporaryDirectory(prefix="belljar-conformance-") as name:
        folder = Path(name)
        (folder / "mine.txt").write_text("from the host")
        (folder / "mine.txt").chmod(0o640)
        (folder / "empty").mkdir()
        (folder / "link").symlink_to("mine.txt")
        (folder / "run.sh").write_text("#!/bin/sh\n")
        (folder / "run.sh").chmod(0o555)
        for path in (folder, *folder.iterdir()):
            os.chown(path, owner, owner, follow_symlinks=False)
        yield folder


def _owners() -> tuple[int, ...]:
    """Whose folders may be granted here: one's own and, for root, somebody else's."""
    return (0, _STRANGER) if os.geteuid() == 0 else (os.geteuid(),)


def _look(folder: Path) -> dict[str, tuple[str, int, str]]:
    """All that is in it: permissions, owner, and content."""

    def content(path: Path) -> str:
        return os.readlink(path) if path.is_symlink() else path.read_text() if path.is_file() else ""

    found = sorted(folder.rglob("*"))
    return {
        str(path.relative_to(folder)): (stat.filemode(path.lstat().st_mode), path.lstat().st_uid, content(path))
        for path in found
    }


_SHOW = guest("print(open('new.txt').read(), end='')", says(""))
_ANSWER = guest("open('answer.txt', 'w').write('of the guest')", says(""))


@check("sandbox", "a granted folder is what the caller writes, reads and lists, whoever owns it", "workspace")
async def _grant(bench: Bench) -> None:
    for owner in _owners():
        with _granted(owner) as folder:
            async with bench.sandbox(workspace=str(folder), write=True) as box:
                await box.write("new.txt", "of the caller")
                printed(await box.run(_SHOW), "of the caller")
                succeeded(await box.run(_ANSWER))
                equal(await box.read("answer.txt"), b"of the guest", "what the guest wrote")
                equal(await box.read("mine.txt"), b"from the host", "what was there")
                names = {entry.path for entry in await box.list()}
                await box.write("last.txt", "no run follows")
            there = await anyio.to_thread.run_sync(_look, folder)
        equal(names, {"answer.txt", "empty", "link", "mine.txt", "new.txt", "run.sh"}, "the list")
        for name, text in (
            ("new.txt", "of the caller"),
            ("answer.txt", "of the guest"),
            ("last.txt", "no run follows"),
        ):
            equal(there.get(name), ("-rw-r--r--", owner, text), f"{name} on the host")


@check("sandbox", "what a guest leaves in a granted folder can be collected", "workspace")
async def _collected(bench: Bench) -> None:
    for owner in _owners():
        with _granted(owner) as folder:
            result = succeeded(await bench.run(_ANSWER, workspace=str(folder), write=True, collect=["answer.txt"]))
        equal([(file.path, file.content) for file in result.files], [("answer.txt", b"of the guest")], "the files")


@check("sandbox", "a folder that is granted to be read is not written to by the caller either", "workspace")
async def _read_only_grant(bench: Bench) -> None:
    with _granted(os.geteuid()) as folder:
        async with bench.sandbox(workspace=str(folder)) as box:
            equal(await box.read("mine.txt"), b"from the host", "what was there")
            await refused(OSError, box.write("mine.txt", "changed"))
        equal((folder / "mine.txt").read_text(), "from the host", "the file of the host")


_SEEN = guest(
    "import os, stat\n"
    "for name in sorted(os.listdir('.')):\n"
    "    facts = os.lstat(name)\n"
    "    print(name, stat.filemode(facts.st_mode), os.readlink(name) if stat.S_ISLNK(facts.st_mode) else '-')\n"
    "open('made.txt', 'w').close()",
    says(""),
)


@check("sandbox", "a granted folder is seen as it is, and nothing of it is lost", "workspace", "posix")
async def _faithful(bench: Bench) -> None:
    wanted = "empty drwxr-xr-x -\nlink lrwxrwxrwx mine.txt\nmine.txt -rw-r----- -\nrun.sh -r-xr-xr-x -\n"
    for owner in _owners():
        with _granted(owner) as folder:
            before = await anyio.to_thread.run_sync(_look, folder)
            result = succeeded(await bench.run(_SEEN, workspace=str(folder), write=True))
            after = await anyio.to_thread.run_sync(_look, folder)
        equal(result.stdout, wanted, "what the guest sees")
        equal(after.pop("made.txt", None), ("-rw-r--r--", owner, ""), "what the guest made, on the host")
        equal(after, before, "what was there before")
