"""Routes of the files of living sandboxes, by any path that their programs may touch."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response, WebSocket

from belljar.core.process import FileStat
from belljar.core.values import whole_path
from belljar.protocol import file_errors
from belljar.protocol.living import Exists, FilePage, Made, MakeDir, MoveFile
from belljar.service.http.dependencies import BoundedRoute, TheRequest
from belljar.service.http.sandboxes import content
from belljar.service.http.sandboxes.box import PREFIX, TheFileBox
from belljar.service.http.sandboxes.sockets import attached

router: APIRouter = APIRouter(prefix=PREFIX, tags=["sandboxes"], route_class=BoundedRoute)
raw: APIRouter = APIRouter(prefix=PREFIX, tags=["sandboxes"])  # whose bodies are no JSON

Path = Annotated[str, Query(min_length=1, max_length=4096, description="whole, below /workspace, or ~/…")]
Folder = Annotated[str, Query(min_length=1, max_length=4096, description="a folder: whole, below /workspace, or ~/…")]
Mode = Annotated[str | None, Query(pattern=r"^0?[0-7]{3}$", description="permissions in octal, such as 755")]
Range = Annotated[
    str | None, Header(alias="Range", pattern=r"^bytes=\d{1,18}-(\d{1,18})?$", description="one range from its start")
]


@router.get("/{id}/files")
async def list_folder(
    box: TheFileBox, path: Folder = ".", depth: Annotated[int, Query(ge=1, le=64)] = 1,
    after: Annotated[str, Query(max_length=4096, description="the last path that you have")] = "",
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
) -> FilePage:  # fmt: skip
    """The entries of a folder, and of those in it, so deep."""
    async with box.used() as sandbox:
        with box.sandboxes.listings.taken(box.caller.name), file_errors.refused(path):
            found = [one for one in await sandbox.files.list(path, depth) if one.path > after]
    return FilePage(files=tuple(found[:limit]), more=len(found) > limit)


@router.get("/{id}/files/stat")
async def look_at_file(box: TheFileBox, path: Path) -> FileStat:
    """What is there: of a link, the link itself."""
    async with box.used() as sandbox:
        with file_errors.refused(path):
            return await sandbox.files.stat(path)


@router.get("/{id}/files/exists")
async def has_file(box: TheFileBox, path: Path) -> Exists:
    """Whether there is something of that name."""
    async with box.used() as sandbox:
        with file_errors.refused(path):
            return Exists(exists=await sandbox.files.exists(path))


@router.post("/{id}/files/make_dir")
async def make_folder(body: MakeDir, box: TheFileBox) -> Made:
    """Makes a folder and those above it."""
    async with box.used() as sandbox:
        with file_errors.refused(body.path):
            return Made(made=await sandbox.files.make_dir(body.path))


@router.post("/{id}/files/move", status_code=204)
async def move_file(body: MoveFile, box: TheFileBox, sent: TheRequest) -> None:
    """Renames a file or a folder; a file that was there is replaced."""
    async with box.changing() as sandbox:
        with file_errors.refused(body.path):
            await sent.once(lambda: sandbox.files.move(body.path, body.to), lambda _: box.id)


@router.post("/{id}/files/copy", status_code=204)
async def copy_file(body: MoveFile, box: TheFileBox, sent: TheRequest) -> None:
    """Copies a file, a folder with all that it holds, or a link as such."""
    async with box.changing() as sandbox:
        with file_errors.refused(body.path):
            await sent.once(lambda: sandbox.files.copy(body.path, body.to), lambda _: box.id)


@router.delete("/{id}/files", status_code=204)
async def remove_file(box: TheFileBox, path: Path) -> None:
    """Removes a file, or a folder with all that it holds."""
    async with box.changing() as sandbox:
        with file_errors.refused(path):
            await sandbox.files.remove(path)


@raw.get("/{id}/files/content", response_class=Response, responses=content.PARTLY)
async def read_content(box: TheFileBox, path: Path, range: Range = None) -> Response:
    """Its bytes, sent as they are read; never to be taken for a page."""
    async with AsyncExitStack() as stack:
        held = await stack.enter_async_context(box.held())
        return await content.sent(stack, held.box.files.open, path, range)


@raw.put("/{id}/files/content", status_code=204)
async def write_content(request: Request, box: TheFileBox, path: Path, mode: Mode = None) -> None:
    """The request's body becomes the file, whole or not at all."""
    await content.written(request, box, path, None if mode is None else int(mode, 8))


@raw.get("/{id}/files/archive", response_class=Response, responses=content.ARCHIVE)
async def pack_files(box: TheFileBox, paths: content.Paths = []) -> Response:  # noqa: B006
    """Files and folders as one tar archive. It is as hostile as whoever wrote them."""
    async with AsyncExitStack() as stack:
        held = await stack.enter_async_context(box.held())
        return await content.packed(stack, held.box.files, paths)


@raw.put("/{id}/files/archive", status_code=204)
async def unpack_files(request: Request, box: TheFileBox, path: Folder = ".") -> None:
    """Lays the files of a tar archive, the request's body, below a folder."""
    await content.unpacked(request, box, path)


@router.websocket("/{id}/files/watch")
async def watch_folder(socket: WebSocket, id: str, path: Folder = ".", recursive: bool = False) -> None:
    """What changes in a folder from now on, a message for each change."""
    async with attached(socket, id, "files") as joined, AsyncExitStack() as stack:
        stack.enter_context(joined.sandboxes.watchers.taken(id))
        with file_errors.refused(path):
            changes = await stack.enter_async_context(joined.held.box.files.watch(path, recursive=recursive))
        async with joined.opened(joined.ignore_messages):
            await joined.tell({"watching": whole_path(path, joined.held.box.home)})
            async for change in changes:
                await joined.send_text(change.model_dump_json())
