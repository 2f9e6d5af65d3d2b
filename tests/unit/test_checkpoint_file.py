"""Saved sessions as files: what was saved is read again, and what would take more than it may is not unpacked."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from belljar.backends.snapshot import Snapshot
from belljar.core import errors
from belljar.core.result import File
from belljar.host.files import unnamed
from belljar.session import checkpoint_file

MIB = 1 << 20
HEAD = {"format": 2, "binary": "b", "size": 0, "count": 0, "turns": 3}


def test_files_folders_and_their_modes_are_read_again_one_at_a_time(tmp_path: Path) -> None:
    files = (File(path="workspace/d/run", content=b"#!", executable=True), File(path="tmp/größe", content=b"\0" * 5000))
    saved = Snapshot("b", 0, 0, unnamed(), files, ("workspace/d", "workspace/empty"))
    saved.turns = 3
    checkpoint_file.save(saved, tmp_path / "s")
    loaded = checkpoint_file.load(tmp_path / "s")
    assert (tuple(loaded.files), loaded.folders, loaded.turns) == (files, saved.folders, 3)
    assert loaded.bytes == 5002
    assert not isinstance(loaded.files, tuple), "they are not held"
    checkpoint_file.save(loaded, tmp_path / "again")
    assert tuple(checkpoint_file.load(tmp_path / "again").files) == files


def millions_of_words(archive: zipfile.ZipFile) -> None:
    archive.writestr("session.json", json.dumps(HEAD)[:-1] + ',"executable":[' + "[]," * 3_000_000 + "[]]}")
    archive.writestr("memory", b"")


def files_without_end(archive: zipfile.ZipFile) -> None:
    archive.writestr("session.json", json.dumps(HEAD))
    archive.writestr("memory", b"")
    for number in range(10):
        archive.writestr(f"files/tmp/{number}", bytes(10 * MIB))


def memory_without_end(archive: zipfile.ZipFile) -> None:
    archive.writestr("session.json", json.dumps(HEAD | {"size": 65536, "count": 1}))
    archive.writestr("memory", bytes(100 * MIB))


def one_file_many_times(archive: zipfile.ZipFile) -> None:
    archive.writestr("session.json", json.dumps(HEAD))
    archive.writestr("memory", b"")
    archive.writestr("files/tmp/x", bytes(10 * MIB))
    archive.filelist += [archive.filelist[-1]] * 9


def another_compression(archive: zipfile.ZipFile) -> None:
    archive.writestr("session.json", json.dumps(HEAD), zipfile.ZIP_LZMA)
    archive.writestr("memory", b"")


_LOAD = """
import resource, sys
from belljar.core import errors
from belljar.session import checkpoint_file
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = peak()
try:
    list(checkpoint_file.load(sys.argv[1], memory=64 << 20, disk=64 << 20).files)
except errors.InvalidRequest as error:
    print(peak() - before, error.message)
"""


@pytest.mark.parametrize(
    ("fill", "why"),
    [
        (millions_of_words, "session.json is too large"),
        (files_without_end, "its files have"),
        (memory_without_end, "its memory is not whole"),
        (one_file_many_times, "too many entries, or one twice"),
        (another_compression, "compressed in another way"),
    ],
)
def test_a_small_file_that_would_take_much_is_refused_before_it_is_unpacked(
    fill: Callable[[zipfile.ZipFile], None], why: str, tmp_path: Path
) -> None:
    bomb = tmp_path / "bomb"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        fill(archive)
    assert bomb.stat().st_size < MIB
    said = subprocess.run(
        [sys.executable, "-c", _LOAD, str(bomb)], capture_output=True, text=True, timeout=60, check=True
    ).stdout  # fmt: skip
    grown, _, message = said.partition(" ")
    assert why in message
    assert int(grown) < 32, "MiB more than before"


def test_a_file_that_is_damaged_is_told_of_when_it_is_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "s", "w") as archive:
        archive.writestr("session.json", json.dumps(HEAD))
        archive.writestr("memory", b"")
        archive.writestr("files/tmp/x", b"unmistakable")
    data = (tmp_path / "s").read_bytes()
    (tmp_path / "s").write_bytes(data.replace(b"unmistakable", b"unmistakeble"))
    loaded = checkpoint_file.load(tmp_path / "s")
    with pytest.raises(errors.InvalidRequest, match="damaged"):
        list(loaded.files)
