"""What files hold, on its way in and out: streamed, whole or a part."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Annotated, Any

from fastapi import Query, Request, Response

from belljar.core import errors
from belljar.core.values import MIB
from belljar.living.files import AsyncFiles
from belljar.protocol import file_errors
from belljar.service.http.bodies import STREAMED
from belljar.service.http.sandboxes.box import AskedBox
from belljar.service.http.sessions import FileResponse
from belljar.service.sandboxes import uploads

PARTLY: dict[int | str, dict[str, Any]] = {206: {"description": "the range of it that was asked for"}}
ARCHIVE: dict[int | str, dict[str, Any]] = {200: {"content": {"application/x-tar": {}}}}
Paths = Annotated[
    list[Annotated[str, Query(min_length=1, max_length=1024)]],
    Query(alias="path", max_length=16, description="files and folders; unless given, /workspace"),
]
_HELD_BYTES = MIB  # of a file that is written at once
Opening = Callable[[str], AbstractAsyncContextManager[AsyncIterator[bytes]]]


async def sent(stack: AsyncExitStack, opening: Opening, path: str, asked: str | None) -> Response:
    """Returns a file as an answer that holds what the stack holds, until it was sent.

    Args:
        stack: what is to be left when it was sent.
        opening: opens the file.
        path: of the file.
        asked: a range of bytes, such as "bytes=0-99".
    """
    first, _, last = (asked or "").removeprefix("bytes=").partition("-")
    start, stop = int(first or 0), int(last) + 1 if last else None
    if stop is not None and stop <= start:
        raise errors.InvalidRequest(f"Range: {first}-{last} ends before it begins")
    with file_errors.refused(path):
        pieces = await stack.enter_async_context(opening(path))
    if asked is None:
        return FileResponse(pieces, stack.pop_all())
    answer = FileResponse(_part(pieces, start, stop), stack.pop_all())
    answer.status_code = 206
    answer.headers["Content-Range"] = f"bytes {first}-{last}/*"
    return answer


async def _part(pieces: AsyncIterator[bytes], start: int, stop: int | None) -> AsyncIterator[bytes]:
    """Gives the bytes from one place of a file up to another."""
    at = 0
    async for piece in pieces:
        part = piece[max(0, start - at) : None if stop is None else max(0, stop - at)]
        at += len(piece)
        if part:
            yield part
        if stop is not None and at >= stop:
            return


async def written(request: Request, box: AskedBox, path: str, mode: int | None) -> None:
    """Makes the body of a request a file: when it is there, or while it arrives if it is known to be large."""
    async with box.used() as sandbox:
        with file_errors.refused(path):
            if not _is_large(request):
                await sandbox.files.write(path, await request.body(), mode)
                return
            size = int(request.headers["content-length"][:20])
            with box.uploading():
                await uploads.upload(sandbox, path, size, _arriving(request), mode)


async def unpacked(request: Request, box: AskedBox, path: str) -> None:
    """Lays the archive that is the body of a request below a folder: when it is there, or while it arrives."""
    async with box.used() as sandbox:
        with file_errors.refused(path):
            if _is_small(request):
                await sandbox.files.unpack(path, _whole(await request.body()))
                return
            with box.uploading():
                await sandbox.files.unpack(path, _arriving(request))


def _is_large(request: Request) -> bool:
    length = request.headers.get("content-length", "")
    return length.isdecimal() and int(length[:20]) > _HELD_BYTES


def _is_small(request: Request) -> bool:
    return "content-length" in request.headers and not _is_large(request)


async def _whole(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def packed(stack: AsyncExitStack, files: AsyncFiles, paths: list[str]) -> Response:
    """Returns an archive as an answer. What cannot be read at all is told before it begins."""
    with file_errors.refused(paths[0] if paths else "."):
        pieces = await stack.enter_async_context(files.pack(*paths))
        first = await anext(pieces, b"")
    answer = FileResponse(_joined(first, pieces), stack.pop_all())
    answer.headers["Content-Type"] = "application/x-tar"
    return answer


async def _joined(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece


async def _arriving(request: Request) -> AsyncIterator[bytes]:
    """Gives the body of a request as it arrives. None of it is kept, so that it may be of any size."""
    request.scope[STREAMED] = True
    async for piece in request.stream():
        if piece:
            yield piece
