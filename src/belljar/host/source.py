"""Reads a file of code that is to be run: `run(path="script.py")`."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import anyio.to_thread

from belljar.core import errors
from belljar.core.languages import Languages
from belljar.core.values import MIB, guest_path
from belljar.host import files

_MAX_SOURCE_BYTES = 16 * MIB  # as much as `RunRequest.code` takes
_MAX_FILES_BYTES = 64 * MIB  # of all files that are named together


def read_source(path: str | os.PathLike[str], *, folder: int | None = None, waits: bool = False) -> str:
    """Returns the text of a file of code.

    Args:
        path: the file.
        folder: an open folder to which `path` is relative; then no part of it may be a link.
        waits: read a pipe too, to its end, such as a shell's `<(…)`.

    Raises:
        InvalidRequest: it is not there, cannot be read, is no regular file, is too large or is not UTF-8.
    """
    name = os.fspath(path)
    try:
        content = _read(name, waits=waits) if folder is None else _read_below(folder, name)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise errors.InvalidRequest(f"path: {name}: {why}", fix="name a file of code that can be read") from None
    return decode_source(name, content)


def decode_source(name: str, content: bytes) -> str:
    """Returns code as text.

    Args:
        name: what it was read from, for the message.
        content: at least the first 16 MiB and one byte of it.

    Raises:
        InvalidRequest: it is too large or is not UTF-8.
    """
    if len(content) > _MAX_SOURCE_BYTES:
        raise errors.InvalidRequest(f"path: {name}: is larger than {_MAX_SOURCE_BYTES} bytes", fix="run less at once")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise errors.InvalidRequest(f"path: {name}: is not UTF-8 text", fix="save the code as UTF-8") from None


async def with_code(
    code: str | None, path: str | os.PathLike[str] | None, options: Mapping[str, Any], languages: Languages
) -> dict[str, Any]:
    """Returns the options of a run with its code: the one that was given, or what the file at `path` holds.

    Args:
        code: what to run.
        path: a file of this machine to run instead; its extension tells the language, unless the options do.
        options: of the run.
        languages: the table in which the extension is looked up.

    Raises:
        InvalidRequest: `path` was given together with code or a command, or cannot be read.
    """
    if path is None:
        return {**options, "code": code}
    if code is not None or options.get("command") is not None:
        raise errors.InvalidRequest("path: goes with neither code nor command", fix="give one of the three")
    text = await anyio.to_thread.run_sync(read_source, path)
    language = options.get("language") or languages.of_file(os.fspath(path)).name
    return {**options, "code": text, "language": language}


def _read(name: str, *, folder: int | None = None, flags: int = 0, waits: bool = False) -> bytes:
    """Reads at most a byte more than is allowed. Unless it `waits`, it does not wait for a pipe's other end."""
    patience = 0 if waits else getattr(os, "O_NONBLOCK", 0)
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | patience | flags, dir_fd=folder)
    with open(fd, "rb") as file:
        if not waits and not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("is not a regular file")
        return file.read(_MAX_SOURCE_BYTES + 1)


def _read_below(folder: int, name: str) -> bytes:
    """Follows no link: whoever may write to the folder could lead us to any file of the host."""
    parent, _, last = name.rpartition("/")
    with files.below(folder, parent) if parent else nullcontext(folder) as at:
        return _read(last, folder=at, flags=os.O_NOFOLLOW)


def read_files(
    folder: str, names: Iterable[str], field: str = "files", limit: int = _MAX_FILES_BYTES
) -> dict[str, bytes]:
    """Returns the content of files below a folder, by their names. No part of a name may be a link, nor lead out.

    Args:
        folder: the folder.
        names: the files, relative to it.
        field: what named them, for the message.
        limit: the most bytes of all together.

    Raises:
        InvalidRequest: one is not there, cannot be read, is no regular file, is outside, or all are too large.
    """
    found: dict[str, bytes] = {}
    name = folder
    try:
        with files.opened(folder) as root:
            for name in names:
                content = found[guest_path(name)] = _read_below(root, guest_path(name))
                limit -= len(content)
                if limit < 0 or len(content) > _MAX_SOURCE_BYTES:
                    raise ValueError("is too large to be sent along")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise errors.InvalidRequest(
            f"{field}: {name[:200]!r}: {why}", fix="name regular files below the project; links are not followed"
        ) from None
    return found


async def with_named_files(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a run in which a list of files of the workspace is a map to their contents.

    Raises:
        InvalidRequest: there is no workspace, or one of them cannot be read.
    """
    names = options.get("files")
    if names is None or isinstance(names, Mapping | str | bytes) or not isinstance(names, Iterable):
        return dict(options)
    folder = options.get("workspace")
    folder = folder.get("path") if isinstance(folder, Mapping) else getattr(folder, "path", folder)
    if folder is None:
        raise errors.InvalidRequest(
            "files: a list names files below workspace", fix='give workspace=, too, or write files={"a.txt": b"..."}'
        )
    found = await anyio.to_thread.run_sync(read_files, os.fspath(folder), [os.fspath(name) for name in names])
    return {**options, "files": found}


async def turn_code(code: str | None, path: str | os.PathLike[str] | None) -> str:
    """Returns the code of a turn: the one that was given, or what the Python file at `path` holds."""
    found = (await with_code(code, path, {"language": "python"}, Languages()))["code"]
    if not isinstance(found, str):
        raise errors.InvalidRequest("code: give `code` or `path`")
    return found
