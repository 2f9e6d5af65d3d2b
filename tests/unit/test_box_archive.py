"""Archives that come into a living sandbox: what is hostile is refused with words, whatever it is."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from belljar.host import files
from belljar.host.box_tree import HostTree

pytestmark = pytest.mark.anyio


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[HostTree]:
    (tmp_path / "workspace").mkdir()
    with files.opened(str(tmp_path)) as root:
        yield HostTree(root, ("/workspace",), owner=None)


async def pieces(archive: bytes) -> AsyncIterator[bytes]:
    yield archive


def _with_time(kind: bytes, modified: str) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w", format=tarfile.PAX_FORMAT) as archive:
        entry = tarfile.TarInfo("a")
        entry.type, entry.pax_headers = kind, {"mtime": modified}
        archive.addfile(entry)
    return whole.getvalue()


@pytest.mark.parametrize("modified", ["inf", "nan", "1e300"])
async def test_a_file_whose_time_is_beyond_all_is_refused(tree: HostTree, tmp_path: Path, modified: str) -> None:
    with pytest.raises(ValueError):
        await tree.unpack("/workspace", pieces(_with_time(tarfile.REGTYPE, modified)))
    assert os.listdir(tmp_path / "workspace") == [], "and no draft is left"


@pytest.mark.parametrize("modified", ["inf", "nan", "1e300"])
async def test_a_folder_whose_time_is_beyond_all_is_made(tree: HostTree, tmp_path: Path, modified: str) -> None:
    await tree.unpack("/workspace", pieces(_with_time(tarfile.DIRTYPE, modified)))
    assert (tmp_path / "workspace" / "a").is_dir()


async def test_headers_that_only_tell_of_the_next_header_are_refused(tree: HostTree) -> None:
    one = tarfile.TarInfo._create_pax_generic_header({"comment": "x"}, tarfile.XHDTYPE, "utf-8")  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="not an archive that can be unpacked"):
        await tree.unpack("/workspace", pieces(one * 5000))
