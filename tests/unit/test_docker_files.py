"""What comes out of a container is hostile: lists and archives that lie. No engine is needed for these."""

from __future__ import annotations

import errno
import io
import os
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.backends.containers import archive as docker_files
from belljar.backends.containers import file_stream
from belljar.backends.containers.archive import Found
from belljar.backends.containers.spec import KEEPER
from belljar.core import errors
from belljar.core.result import Collected, File
from belljar.host import files

REGULAR = stat.S_IFREG | 0o644


def tar(*members: tuple[str, bytes], kind: bytes = tarfile.REGTYPE, target: str = "") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size, member.type, member.linkname = len(content), kind, target
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def asked(*paths: str, mode: int = REGULAR) -> list[Found]:
    return [Found(path, mode, 100) for path in paths]


def test_only_what_was_asked_for_is_taken_from_an_archive() -> None:
    said = tar(("./a.txt", b"a"), ("./../../up.txt", b"up"), ("/etc/passwd", b"root"), ("b.txt", b"b"))
    assert docker_files.unpacked(said, asked("a.txt")) == Collected((File(path="a.txt", content=b"a"),))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.GNUTYPE_SPARSE])
def test_what_became_something_else_than_a_file_is_left_out(kind: bytes) -> None:
    collected = docker_files.unpacked(tar(("./a.txt", b""), kind=kind, target="/etc/passwd"), asked("a.txt"))
    assert collected == Collected((), ("a.txt: changed while it was read",))


def test_a_second_name_of_a_file_has_its_content_and_a_link_to_what_did_not_come_has_none() -> None:
    said = tar(("./a.txt", b"a"))[:1024] + tar(("./b.txt", b""), kind=tarfile.LNKTYPE, target="./a.txt")[:512]
    said += tar(("./c.txt", b""), kind=tarfile.LNKTYPE, target="/etc/passwd")
    collected = docker_files.unpacked(said, asked("a.txt", "b.txt", "c.txt"))
    assert [(file.path, file.content) for file in collected.files] == [("a.txt", b"a"), ("b.txt", b"a")]
    assert collected.left_out == ("c.txt: changed while it was read",)


def test_long_names_and_the_executable_flag_come_through() -> None:
    name = "/".join(["folder" * 5] * 10) + "/file.txt"
    collected = docker_files.unpacked(tar((f"./{name}", b"x")), asked(name, mode=stat.S_IFREG | 0o755))
    assert collected.files == (File(path=name, content=b"x", executable=True),)


def test_an_archive_that_is_cut_short_gives_no_half_files() -> None:
    said = tar(("./a.txt", b"a" * 2000))
    assert docker_files.unpacked(said[:1024], asked("a.txt")).files == ()


@given(st.binary(max_size=4096))
def test_no_bytes_harm_the_reader_of_archives(said: bytes) -> None:
    assert docker_files.unpacked(said, asked("a.txt")).files == ()


@given(st.binary(max_size=4096))
def test_no_bytes_harm_the_reader_of_lists(said: bytes) -> None:
    found, _ = docker_files.listed(said)
    assert all(not item.path.startswith("/") and ".." not in item.path.split("/") for item in found)


def test_a_list_names_no_path_that_climbs_and_nothing_of_the_keepers() -> None:
    said = (
        f"1 f 644 5 ./mine.txt\n{KEEPER} f 444 5 ./given.txt\n{KEEPER} d 1777 60 ./empty\n{KEEPER} d 1777 60 ./full\n"
        "1 f 644 1 ./full/mine.txt\n1 f 644 1 ./../up\n1 f 644 1 ./a\\b\n1 p 644 0 ./pipe\nnonsense\n1 81ed 7 ./tool\n"
    )
    found, left_out = docker_files.listed(said.encode())
    assert [item.path for item in found] == ["full", "full/mine.txt", "mine.txt", "pipe", "tool"]
    assert [files.kind(item.mode) for item in found] == ["folder", "file", "file", "pipe", "file"]
    assert len(left_out) == 2


def test_what_does_not_fit_or_is_no_file_is_left_out_and_said() -> None:
    said = b"1 f 644 60 ./a.bin\n1 f 644 60 ./b.bin\n1 l 777 1 ./link\n1 f 644 10 ./c.bin\n"
    chosen, left_out = docker_files.wanted(said, ["*"], limit=100)
    assert [item.path for item in chosen] == ["a.bin", "c.bin"]
    assert left_out == [
        "b.bin: 60 bytes is over what may be collected", "link: link, only regular files leave a sandbox",
    ]  # fmt: skip


def script(text: str, folder: Path, stdin: bytes = b"", *words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["/bin/sh", "-c", text, str(folder), *words], input=stdin, capture_output=True, check=False)


def put(folder: Path, *files: File) -> int:
    return script(docker_files.REPLACE, folder, docker_files.archive(files), *(file.path for file in files)).returncode


def test_a_file_is_put_with_its_folders_and_replaces_what_was_there(tmp_path: Path) -> None:
    odd = "a b/$(id);'\"/-dash.txt"
    assert put(tmp_path, File(path=odd, content=b"first")) == 0
    assert put(tmp_path, File(path=odd, content=b"second", executable=True), File(path="top", content=b"t")) == 0
    assert (tmp_path / odd).read_bytes() == b"second"
    assert os.access(tmp_path / odd, os.X_OK)
    assert sorted(os.listdir(tmp_path)) == ["a b", "top"]


def test_a_file_of_several_names_stays_one_file(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("the longer text that was there")
    (tmp_path / "one").chmod(0o640)
    os.link(tmp_path / "one", tmp_path / "other")
    assert put(tmp_path, File(path="one", content=b"new")) == 0
    assert (tmp_path / "other").read_bytes() == b"new"
    assert (tmp_path / "one").samefile(tmp_path / "other")
    assert (tmp_path / "one").stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["one", "other"]


def test_a_file_is_never_put_through_a_link(tmp_path: Path) -> None:
    outside, box = tmp_path / "outside", tmp_path / "box"
    outside.mkdir()
    box.mkdir()
    (box / "inbox").symlink_to(outside)
    (box / "name").symlink_to(outside / "target")
    assert put(box, File(path="inbox/planted", content=b"x")) == errno.ENOTDIR
    assert put(box, File(path="name", content=b"x")) == errno.ELOOP
    assert os.listdir(outside) == []
    assert sorted(os.listdir(box)) == ["inbox", "name"]


def test_the_list_and_the_archive_of_a_real_folder_agree(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "-dash ü.txt").write_bytes(b"content")
    (tmp_path / "link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "pipe")
    chosen, left_out = docker_files.wanted(script(docker_files.LIST, tmp_path).stdout, ["**"])
    names = "".join(f"./{item.path}\n" for item in chosen).encode()
    said = script(docker_files.FETCH, tmp_path, names).stdout
    assert len(said) <= max(docker_files.room(chosen), 10_240)
    assert docker_files.unpacked(said, chosen).files == (File(path="sub/-dash ü.txt", content=b"content"),)
    assert [left.partition(":")[0] for left in left_out] == ["link", "pipe"]


# --- one file, as the program inside tells it ---


async def told(*pieces: bytes) -> bytes:
    waiting = list(pieces)

    async def more() -> bytes:
        return waiting.pop(0) if waiting else b""

    return b"".join([piece async for piece in await file_stream.opened(more, "a.txt")])


@pytest.mark.anyio
async def test_a_file_is_as_many_bytes_as_were_promised_and_what_comes_after_is_nobody_s() -> None:
    assert await told(b"5\nhe", b"llo", b" and more") == b"hello"
    assert await told(b"0\n") == b""


@pytest.mark.anyio
async def test_a_file_of_which_less_comes_than_was_promised_is_an_error_and_not_a_shorter_file() -> None:
    with pytest.raises(errors.ExecutionFailed, match="became shorter"):
        await told(b"5\nhe")


@pytest.mark.anyio
async def test_an_error_that_is_named_instead_of_a_size_is_raised_and_nonsense_is_a_failure() -> None:
    with pytest.raises(PermissionError):
        await told(b"-13\n")
    with pytest.raises(errors.ExecutionFailed, match="says nothing"):
        await told(b"rubbish\n")
