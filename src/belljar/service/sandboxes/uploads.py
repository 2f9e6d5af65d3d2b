"""Files that are written while they arrive, however large: as an archive of one file, which the sandbox lays down."""

from __future__ import annotations

import errno
import stat
import tarfile
import time
from collections.abc import AsyncIterator
from contextlib import suppress

from belljar.core import errors
from belljar.core.values import whole_path
from belljar.sandbox import AsyncSandbox

_NEW_MODE = 0o644
_BLOCK = tarfile.BLOCKSIZE


async def upload(
    box: AsyncSandbox, path: str, size: int, pieces: AsyncIterator[bytes], mode: int | None
) -> None:  # fmt: skip
    """Writes a file piece by piece: all of it, or nothing.

    Args:
        box: the sandbox.
        path: the name of the file.
        size: its bytes, as they were announced.
        pieces: its content.
        mode: its permissions; None: those that it has, and of a new one the usual.

    Raises:
        OSError: what the guest would get.
        InvalidRequest: it is another size than was announced.
    """
    found, files = None, box.files
    with suppress(FileNotFoundError, NotADirectoryError):
        found = await files.stat(path)
    if found is not None and found.kind != "file":
        await files.write(path, b"")  # which raises what the guest would get
        raise OSError(errno.EINVAL, f"it is a {found.kind}", path)
    usual = _NEW_MODE if found is None else found.mode
    folder, _, name = whole_path(path, box.home).rpartition("/")
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = size, int(time.time()), stat.S_IMODE(usual if mode is None else mode)
    await files.unpack(folder or "/", _archive(entry, pieces))


async def _archive(entry: tarfile.TarInfo, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield entry.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    left = entry.size
    async for piece in pieces:
        left -= len(piece)
        if left < 0:
            break
        yield piece
    if left:
        raise errors.InvalidRequest(f"the body has another size than the {entry.size} bytes that were announced")
    yield bytes(-entry.size % _BLOCK + 2 * _BLOCK)
