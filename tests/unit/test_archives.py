"""Archives: what is packed comes back as it was, and what is hostile is refused."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from belljar.core.values import GIB, MIB
from belljar.host import archives
from belljar.host.archives import Member


def cut(data: bytes, size: int = 100) -> Iterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


def written(*entries: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w", format=form) as archive:
        for info, content in entries:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return whole.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, **facts: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for fact, value in facts.items():
        setattr(info, fact, value)
    return info


def read(data: bytes) -> list[tuple[Member, bytes]]:
    return [(member, b"".join(content)) for member, content in archives.members(cut(data))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    top = tmp_path / "top"
    (top / "deep/er").mkdir(parents=True)
    (top / "a.txt").write_text("a")
    (top / "run.sh").write_text("#!/bin/sh\n")
    (top / "run.sh").chmod(0o755)
    (top / "deep/er/big").write_bytes(os.urandom(3 * MIB))
    (top / ("n" * 200)).write_text("long")
    os.fsencode("x")
    (top / "link").symlink_to("../../etc/passwd")
    os.link(top / "a.txt", top / "b.txt")
    os.mkfifo(top / "pipe")
    return top


def test_a_folder_comes_back_as_it_was_without_its_links(folder: Path, tmp_path: Path) -> None:
    left_out = archives.unpacked(archives.packed(str(folder)), str(tmp_path / "out"), "", GIB)
    out = tmp_path / "out"
    assert (out / "deep/er/big").read_bytes() == (folder / "deep/er/big").read_bytes()
    assert (out / ("n" * 200)).read_text() == "long"
    assert os.access(out / "run.sh", os.X_OK) and not os.access(out / "a.txt", os.X_OK)
    assert sorted(one.partition(":")[0] for one in left_out) == ["b.txt", "link"]
    assert not (out / "pipe").exists() and not (out / "link").exists()


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_archives_of_every_format_are_read(form: int) -> None:
    name = "folder/" * 12 + "name" if form == tarfile.USTAR_FORMAT else "long/" * 60 + "é" * 100
    data = written((entry("d", tarfile.DIRTYPE, mode=0o700), b""), (entry(name, mtime=5), b"content"), form=form)
    (first, _), (second, content) = read(data)
    assert (first.name, first.kind, first.mode) == ("d", "folder", 0o700)
    assert (second.name, second.modified, content) == (name, 5.0, b"content")


def test_a_packed_folder_is_one_that_others_read_too(folder: Path) -> None:
    data = b"".join(archives.packed(str(folder), "home/user"))
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert archive.getmember("home/user/link").linkname == "../../etc/passwd"
        assert archive.getmember("home/user/b.txt").linkname == "home/user/a.txt"


def test_one_file_is_packed_under_the_name_that_is_wanted(folder: Path) -> None:
    ((member, content),) = read(b"".join(archives.packed(str(folder / "a.txt"), "other.txt")))
    assert (member.name, content) == ("other.txt", b"a")


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (entry("../../etc/cron.d/x"), "leads out"),
        (entry("/etc/passwd"), "leads out"),
        (entry("a/../../b"), "leads out"),
        (entry("dev", tarfile.CHRTYPE), "neither a file"),
        (entry("disk", tarfile.BLKTYPE), "neither a file"),
        (entry("pipe", tarfile.FIFOTYPE), "neither a file"),
        (entry("x", tarfile.LNKTYPE, linkname="../../etc/shadow"), "leads out"),
        (entry("x", tarfile.SYMTYPE, linkname=""), "leads nowhere"),
        (entry("n" * 300), "too long"),
        (entry("sparse", tarfile.GNUTYPE_SPARSE), "neither a file"),
    ],
)
def test_what_is_hostile_is_refused(info: tarfile.TarInfo, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(written((info, b"")))


def test_permissions_are_all_that_a_mode_can_say() -> None:
    ((member, _),) = read(written((entry("x", mode=0o6755), b"")))
    assert member.mode == 0o755


def test_what_is_no_archive_or_is_cut_or_damaged_is_refused() -> None:
    data = written((entry("x"), b"content"))
    for broken in (b"", b"no archive at all" * 100, data[:600], data[:100] + b"\x01" + data[101:]):
        with pytest.raises(ValueError):
            read(broken)


def test_a_header_that_claims_gigabytes_is_not_read() -> None:
    huge = entry("x", b"x", size=GIB)
    with pytest.raises(ValueError, match="a header has 1G"):
        read(huge.tobuf(tarfile.GNU_FORMAT) + bytes(10_000))


def test_a_link_that_was_there_is_not_followed_by_what_is_unpacked(tmp_path: Path) -> None:
    outside, out = tmp_path / "outside", tmp_path / "out"
    outside.mkdir()
    out.mkdir()
    (out / "x").symlink_to(outside)
    with pytest.raises(NotADirectoryError):
        archives.unpacked(cut(written((entry("x/file"), b"content"))), str(out), "", GIB)
    assert list(outside.iterdir()) == []


def test_more_bytes_than_are_allowed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="more bytes"):
        archives.unpacked(cut(written((entry("x"), b"content"))), str(tmp_path), "", 3)
