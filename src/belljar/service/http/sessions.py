"""Routes of sessions and sandboxes that stay open, and of their files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi import Path as InPath
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from belljar.protocol.records import SessionRecord
from belljar.protocol.requests import Fork, OpenSession, Rollback, Turn
from belljar.protocol.responses import Checkpointed, Executed, FileList, Listed
from belljar.service.http.dependencies import (
    ACCEPTED,
    BoundedRoute,
    FileUser,
    Key,
    SessionHolder,
    TheRequest,
    TheSessions,
    answer,
)


class FileResponse(StreamingResponse):
    """A file that is sent while it is read; it is closed when all is sent, or the client has gone."""

    def __init__(self, pieces: AsyncIterator[bytes], opened: AsyncExitStack) -> None:
        headers = {"Content-Disposition": "attachment"}
        super().__init__(pieces, media_type="application/octet-stream", headers=headers)
        self._opened = opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._opened:
            await super().__call__(scope, receive, send)


router: APIRouter = APIRouter(prefix="/api/sandbox", tags=["sessions"], route_class=BoundedRoute)
_Path = Annotated[str, InPath(min_length=1, max_length=1024)]


@router.post("/sessions", status_code=201)
async def open_session(
    body: OpenSession, sessions: TheSessions, caller: SessionHolder, sent: TheRequest
) -> SessionRecord:
    """One interpreter across calls (`session`), or one box for many commands (`sandbox`)."""
    options = body.options() | {"idle": body.idle, "lifetime": body.lifetime}
    return await sent.once(lambda: sessions.open(caller, body.kind, **options), lambda record: record.id)


@router.get("/sessions")
async def list_sessions(sessions: TheSessions, caller: SessionHolder) -> list[SessionRecord]:
    return sessions.of(caller)


@router.get("/sessions/{id}")
async def inspect_session(id: str, sessions: TheSessions, caller: SessionHolder) -> SessionRecord:
    return sessions.get(id, caller).record


@router.delete("/sessions/{id}", status_code=204)
async def close_session(id: str, sessions: TheSessions, caller: SessionHolder) -> None:
    await sessions.close(id, caller)


@router.post("/sessions/{id}/run", response_model=Executed, responses=ACCEPTED)
async def run_turn(
    id: str, body: Turn, request: Request, sessions: TheSessions, caller: SessionHolder, idempotency_key: Key = None
) -> Response:
    """One turn: what it defines stays."""
    run = await sessions.run(
        id, caller, code=body.code, command=list(body.command) if body.command else None, language=body.language,
        timeout=body.timeout_seconds, stdin=body.stdin, args=body.args, path=body.path, key=idempotency_key or "",
    )  # fmt: skip
    return await answer(run, request, wait=body.wait, key=idempotency_key)


@router.post("/sessions/{id}/checkpoints", status_code=201)
async def make_checkpoint(id: str, sessions: TheSessions, caller: SessionHolder, sent: TheRequest) -> Checkpointed:
    """What the session is now, to go back to or to branch from."""
    name, size = await sent.once(lambda: sessions.checkpoint(id, caller), lambda _: id)
    return Checkpointed(id=name, bytes=size)


@router.post("/sessions/{id}/fork", status_code=201)
async def fork_session(
    id: str, body: Fork, sessions: TheSessions, caller: SessionHolder, sent: TheRequest
) -> SessionRecord:
    """Another session that goes on from a checkpoint of this one, or from how it is now."""
    return await sent.once(lambda: sessions.fork(id, caller, body.checkpoint), lambda record: record.id)


@router.post("/sessions/{id}/rollback", status_code=204)
async def roll_back(id: str, body: Rollback, sessions: TheSessions, caller: SessionHolder, sent: TheRequest) -> None:
    await sent.once(lambda: sessions.rollback(id, caller, body.checkpoint), lambda _: id)


@router.get("/{id}/files")
async def list_files(id: str, sessions: TheSessions, caller: FileUser) -> FileList:
    """What lies in an open session's box."""
    return FileList(files=tuple(Listed(**entry._asdict()) for entry in await sessions.files(id, caller)))


@router.get("/{id}/files/{path:path}", response_class=Response)
async def read_file(id: str, path: _Path, sessions: TheSessions, caller: FileUser) -> Response:
    """Its bytes, never to be taken for a page."""
    async with AsyncExitStack() as stack:
        pieces = await stack.enter_async_context(sessions.reading(id, caller, path))
        return FileResponse(pieces, stack.pop_all())


@router.put("/{id}/files/{path:path}", status_code=204)
async def write_file(id: str, path: _Path, request: Request, sessions: TheSessions, caller: FileUser) -> None:
    """The request's body becomes the file."""
    await sessions.write(id, caller, path, await request.body())
