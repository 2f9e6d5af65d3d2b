"""Folders and files that go into a living sandbox and come out of it, and changes that are told."""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import anyio

from belljar.backends.fake import FakeProcess
from belljar.core.errors import BelljarError
from belljar.core.process import FileChange
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
from belljar.testing.conformance.living.waiting import SECONDS, done

_AREA = "transfer"
_WATCH = ("living", "watch")


def _lay(folder: Path) -> Path:
    """A small project of this machine."""
    project = folder / "project"
    (project / "src" / "empty").mkdir(parents=True)
    (project / "src" / "main.py").write_text("print(1)\n")
    (project / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (project / "run.sh").chmod(0o755)
    (project / "link").symlink_to("src/main.py")
    return project


_RUN = guest("./run.sh; cat link", lambda p: p.out("ran\nprint(1)\n"))


@check(_AREA, "a folder of this machine is there with all that it holds, and is brought back", "living", shared=True)
async def _folders(bench: Bench) -> None:
    async with bench.machine() as box:
        with tempfile.TemporaryDirectory() as name:
            project = _lay(Path(name))
            await box.files.upload(project, "~/project")
            printed(await done(box, _RUN, cwd=f"{box.home}/project"), "ran\nprint(1)\n")
            left_out = await box.files.download("~/project", Path(name) / "back")
            back = Path(name) / "back"
            equal((back / "src" / "main.py").read_text(), "print(1)\n", "a file that came back")
            expect((back / "src" / "empty").is_dir(), "the empty folder is missing")
            expect((back / "run.sh").stat().st_mode & 0o100 != 0, "the program is not executable any more")
            expect(not (back / "link").exists() and "link" in "".join(left_out), f"left out is {left_out}")


@check(_AREA, "one file goes in and out, under its name or another", "living", shared=True)
async def _one_file(bench: Bench) -> None:
    async with bench.machine() as box:
        with tempfile.TemporaryDirectory() as name:
            script = _lay(Path(name)) / "run.sh"
            await box.files.upload(script, "new/other.sh")
            await box.files.upload(script, "new")
            names = [one.path for one in await box.files.list("new")]
            equal(names, ["/workspace/new/other.sh", "/workspace/new/run.sh"], "what is there")
            equal((await box.files.stat("new/run.sh")).mode & 0o100, 0o100, "whether it is executable")
            await box.files.download("new/other.sh", Path(name) / "back.sh")
            equal((Path(name) / "back.sh").read_text(), "#!/bin/sh\necho ran\n", "what came back")
            await refused(FileNotFoundError, box.files.download("gone", name))


def _play_tree(p: FakeProcess) -> None:
    p.write("tree/deep/file", b"content")
    p.chmod("tree/deep/file", 0o640)
    p.link("tree/link", "/etc/passwd")


_TREE = guest(
    "mkdir -p tree/deep; printf content > tree/deep/file; chmod 640 tree/deep/file; ln -s /etc/passwd tree/link",
    _play_tree,
)


@check(_AREA, "a folder is packed with permissions and links, and unpacked as it was", "living", shared=True)
async def _packed(bench: Bench) -> None:
    async with bench.machine() as one, bench.machine() as other:
        succeeded(await done(one, _TREE))
        async with one.files.pack("tree") as pieces:
            archive = b"".join([piece async for piece in pieces])
        with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
            equal(sorted(opened.getnames())[-1], "workspace/tree/link", "the last name in the archive")
        await other.files.unpack("~/copy", _pieces(archive))
        top = f"{other.home}/copy/workspace/tree"
        equal(await other.files.read(f"{top}/deep/file"), b"content", "the file")
        equal((await other.files.stat(f"{top}/deep/file")).mode, 0o640, "its permissions")
        equal((await other.files.stat(f"{top}/link")).target, "/etc/passwd", "where the link leads")


async def _pieces(archive: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(archive), 1000):
        yield archive[start : start + 1000]


def _archive(name: str, kind: bytes = tarfile.REGTYPE) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.type = kind
        archive.addfile(member)
    return whole.getvalue()


@check(_AREA, "an archive that leads out of its folder, or holds a device, is refused", "living", shared=True)
async def _bad_archives(bench: Bench) -> None:
    hostile = [_archive("../out"), _archive("a/../../out"), _archive("device", tarfile.CHRTYPE), b"no archive" * 100]
    async with bench.machine() as box:
        for archive in hostile:
            try:
                await box.files.unpack("~/in", _pieces(archive))
            except (BelljarError, OSError):
                continue
            raise CheckFailed(f"an archive of {archive[:20]!r} was unpacked")
        seen = [one.path for one in await box.files.list("~", depth=2) if one.kind != "folder"]
        equal(seen, [], "what is there")


_LINKED = guest("mkdir in; ln -s /tmp in/way", lambda p: p.link("in/way", "/tmp"))


@check(_AREA, "an archive is not unpacked through a link", "living", shared=True)
async def _through_link(bench: Bench) -> None:
    async with bench.machine() as box:
        succeeded(await done(box, _LINKED))
        with suppress(BelljarError, OSError):
            await box.files.unpack("in", _pieces(_archive("way/out")))
        equal(await box.files.exists("/tmp/out"), False, "whether it came out")


# --- watched ---


async def _told(changes: AsyncIterator[FileChange], kind: str, path: str) -> None:
    """Waits until this is told; what else is told meanwhile does not matter."""
    seen = []
    with anyio.move_on_after(SECONDS):
        async for change in changes:
            seen.append((change.kind, change.path))
            if seen[-1] == (kind, path):
                return
    raise CheckFailed(f"told was {seen[-5:]}, and should be {(kind, path)}")


_TOUCH = guest('echo x > "$FILE"', lambda p: p.write(p.env["FILE"], b"x\n"))


@check(_AREA, "what programs and callers change in a folder is told", *_WATCH, shared=True)
async def _watched(bench: Bench) -> None:
    async with bench.machine() as box:
        await box.files.make_dir("~/seen")
        seen = f"{box.home}/seen"
        async with box.files.watch("~/seen") as changes:
            succeeded(await done(box, _TOUCH, env={"FILE": f"{seen}/new"}))
            await _told(changes, "created", f"{seen}/new")
            succeeded(await done(box, _TOUCH, env={"FILE": f"{seen}/new"}))
            await _told(changes, "changed", f"{seen}/new")
            await box.files.write("~/seen/other", "x")
            await _told(changes, "created", f"{seen}/other")
            await box.files.remove("~/seen/other")
            await _told(changes, "removed", f"{seen}/other")


@check(_AREA, "folders below are watched if that was asked for, also new ones", *_WATCH, shared=True)
async def _watched_below(bench: Bench) -> None:
    async with bench.machine() as box:
        await box.files.make_dir("top/old")
        async with box.files.watch("top", recursive=True) as deep, box.files.watch("top") as near:
            for name in ("old/a", "new/b"):
                await box.files.write(f"top/{name}", "x")
                await _told(deep, "created", f"/workspace/top/{name}")
            await box.files.write("top/last", "x")
            shallow = []
            with anyio.fail_after(SECONDS):
                while "/workspace/top/last" not in shallow:
                    shallow.append((await anext(near)).path)
        expect("/workspace/top/old/a" not in shallow, f"told was {shallow}")


@check(_AREA, "only a folder can be watched", *_WATCH, shared=True)
async def _not_watched(bench: Bench) -> None:
    async with bench.machine() as box:
        await box.files.write("file", "x")
        for name, kind in (("file", NotADirectoryError), ("gone", FileNotFoundError)):
            await refused(kind, box.files.watch(name).__aenter__())
