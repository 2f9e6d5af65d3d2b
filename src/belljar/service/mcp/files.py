"""Tools for the files of sessions and sandboxes: read in parts, written, edited and listed.

A living sandbox has files everywhere its programs may write, by whole paths; all others have those below /workspace.
"""

from __future__ import annotations

import base64 as base64_codec
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from posixpath import normpath
from typing import Annotated, TypeVar

from mcp.types import CallToolResult
from pydantic import Field

from belljar.core import errors
from belljar.core.result import Entry
from belljar.core.values import GIB, MIB, WORKSPACE
from belljar.protocol import file_errors
from belljar.protocol.records import Caller
from belljar.service.mcp import content as answer
from belljar.service.mcp.boxes import Boxes
from belljar.service.mcp.calls import Calls, Ctx, Session

_MOST_READ = GIB  # bytes of a file that one call passes by: a guest's file may claim to have exabytes
_MOST_EDITED = 4 * MIB  # bytes of a file in which something is replaced
_DEEPEST = 32

Path = Annotated[
    str, Field(description="relative to /workspace; in a living sandbox also a whole path, or ~/ for its home")
]


WindowT = TypeVar("WindowT", answer.FileWindow, answer.LineWindow)


class FileTools:
    """Each public method is a tool; its docstring is what models are told."""

    def __init__(self, calls: Calls, boxes: Boxes) -> None:
        self._calls = calls
        self._boxes = boxes

    async def file_write(
        self, ctx: Ctx, session_id: Session, path: Path,
        content: Annotated[str, Field(description="the file's text")] = "",
        base64: Annotated[str, Field(description="instead of content, for bytes that are not text")] = "",
    ) -> Annotated[CallToolResult, answer.Written]:  # fmt: skip
        """Write a file of a session's sandbox, or replace it. Folders above it are made."""
        caller = await self._calls.caller(ctx, "files")
        data = _bytes(content, base64)
        await self._write(session_id, caller, path, data)
        return answer.of_model(
            answer.Written(path=path, size=len(data)), f"{len(data)} bytes written to {answer.cut(path, 300)}"
        )

    async def file_read(
        self, ctx: Ctx, session_id: Session, path: Path,
        offset: Annotated[int, Field(ge=0, description="bytes to skip, for files that need several calls")] = 0,
        first_line: Annotated[int | None, Field(ge=1, description="instead of offset: the line to begin with")] = None,
        lines: Annotated[int | None, Field(ge=1, description="how many lines at most")] = None,
    ) -> Annotated[CallToolResult, answer.FileText]:  # fmt: skip
        """Read a file of a session's sandbox, or a part of it: as text, as base64 if it is not text, and as an image if
        it is one."""
        caller = await self._calls.caller(ctx, "files")
        if offset and (first_line or lines):
            raise errors.InvalidRequest("offset: goes with neither first_line nor lines", fix="give one of the two")
        if first_line is None and lines is None:
            return answer.of_file(path, await self._seen(session_id, caller, path, answer.FileWindow(offset)))
        part = answer.LineWindow(first_line or 1, lines)
        return answer.of_lines(path, await self._seen(session_id, caller, path, part))

    async def _seen(self, id: str, caller: Caller, path: str, window: WindowT) -> WindowT:
        """Has a window look at a whole file."""
        async with self._pieces(id, caller, path) as pieces:
            async for piece in pieces:
                window.take(piece)
                if window.size > _MOST_READ:
                    raise errors.InvalidRequest(
                        f"path: {answer.cut(path, 300)} is larger than {_MOST_READ // MIB} MB",
                        fix="read a part of it by a program: run_command",
                    )
        return window

    async def file_edit(
        self, ctx: Ctx, session_id: Session, path: Path,
        old: Annotated[str, Field(min_length=1, description="text of the file, exactly; it must be there once")],
        new: Annotated[str, Field(description="what replaces it")],
        all: Annotated[bool, Field(description="replace each occurrence, however many there are")] = False,
    ) -> Annotated[CallToolResult, answer.Edited]:  # fmt: skip
        """Replace an exact piece of a text file by another, and leave the rest as it is."""
        caller = await self._calls.caller(ctx, "files")
        content, wanted = await self._whole(session_id, caller, path), old.encode("utf-8", "surrogatepass")
        count = content.count(wanted)
        if count == 0 or (count > 1 and not all):
            raise _not_once(path, content, wanted, count)
        changed = content.replace(wanted, new.encode("utf-8", "surrogatepass"))
        await self._write(session_id, caller, path, changed)
        line = content[: content.index(wanted)].count(b"\n") + 1
        told = answer.Edited(path=path, size=len(changed), replaced=count, line=line)
        times = "once" if count == 1 else f"{count} times"
        return answer.of_model(told, f"replaced {times} in {answer.cut(path, 300)}, at line {line}")

    async def file_list(
        self, ctx: Ctx, session_id: Session, path: Path = ".",
        depth: Annotated[
            int, Field(ge=1, le=_DEEPEST, description="1: the entries of the folder; 2: those below them, too; …")
        ] = 2,
    ) -> Annotated[CallToolResult, answer.Folder]:  # fmt: skip
        """List the files and folders of a session's sandbox. To make, move or remove some, use run_command."""
        caller = await self._calls.caller(ctx, "files")
        if not self._boxes.lives(session_id, caller):
            return answer.of_folder(_below(await self._calls.sessions.files(session_id, caller), path, depth))
        async with self._boxes.used(session_id, caller) as used:
            with self._boxes.listing(caller), file_errors.refused(answer.cut(path, 300)):
                found = await used.box.files.list(path, depth)
        return answer.of_folder([Entry(path=one.path, kind=one.kind, size=one.size) for one in found])

    # --- of either kind ---

    async def _write(self, id: str, caller: Caller, path: str, data: bytes) -> None:
        if not self._boxes.lives(id, caller):
            await self._calls.sessions.write(id, caller, path, data)
            return
        async with self._boxes.used(id, caller) as used:
            with file_errors.refused(answer.cut(path, 300)):
                await used.box.files.write(path, data)

    @asynccontextmanager
    async def _pieces(self, id: str, caller: Caller, path: str) -> AsyncIterator[AsyncIterator[bytes]]:
        if not self._boxes.lives(id, caller):
            async with self._calls.sessions.reading(id, caller, path) as pieces:
                yield pieces
            return
        async with self._boxes.used(id, caller) as used:
            with file_errors.refused(answer.cut(path, 300)):
                async with used.box.files.open(path) as pieces:
                    yield pieces

    async def _whole(self, id: str, caller: Caller, path: str) -> bytes:
        content = bytearray()
        async with self._pieces(id, caller, path) as pieces:
            async for piece in pieces:
                content += piece
                if len(content) > _MOST_EDITED:
                    raise errors.InvalidRequest(
                        f"path: {answer.cut(path, 300)} is larger than {_MOST_EDITED // MIB} MB",
                        fix="change it by a program: run_command",
                    )
        return bytes(content)


def _not_once(path: str, content: bytes, wanted: bytes, count: int) -> errors.InvalidRequest:
    """Why a replacement was not made."""
    name = answer.cut(path, 300)
    if count:
        fix = "give more of the text around it, or all=true"
        return errors.InvalidRequest(f"old: is {count} times in {name}, and nothing was changed", fix=fix)
    there = b"\r\n" in content and b"\r\n" not in wanted and wanted in content.replace(b"\r\n", b"\n")
    fix = "its lines end with \\r\\n: write old and new so" if there else "read the file first: file_read"
    return errors.InvalidRequest(f"old: is not in {name}, and nothing was changed", fix=fix)


def _below(entries: tuple[Entry, ...], path: str, depth: int) -> list[Entry]:
    """The entries of a folder below /workspace, down to a depth."""
    whole = normpath(f"{WORKSPACE}/{path}" if not path.startswith("/") else path)
    if whole != WORKSPACE and not whole.startswith(f"{WORKSPACE}/"):
        raise errors.InvalidRequest("path: climbs out of /workspace", fix="name a folder below it")
    above = whole[len(WORKSPACE) + 1 :]
    start = f"{above}/" if above else ""
    if start and not any(entry.path == above or entry.path.startswith(start) for entry in entries):
        raise errors.NotFound(f"path: there is no folder {answer.cut(path, 300)}", fix="list the folder above it")
    inside = (entry for entry in entries if entry.path.startswith(start) and entry.path != above)
    return [entry for entry in inside if entry.path[len(start) :].count("/") < depth]


def _bytes(text: str, encoded: str) -> bytes:
    if text and encoded:
        raise errors.InvalidRequest("content, base64: give one of the two")
    try:
        return base64_codec.b64decode(encoded, validate=True) if encoded else text.encode()
    except ValueError:
        raise errors.InvalidRequest("content, base64: it cannot be decoded", fix="write plain base64") from None
