"""Routes of sessions and sandboxes that stay open, and of their files."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi import Path as InPath
from fastapi.responses import JSONResponse

from belljar.service import projects
from belljar.service.bodies import Checkpointed, Executed, FileList, Fork, Listed, OpenSession, Rollback, Turn
from belljar.service.records import RunRecord, SessionRecord
from belljar.service.routes import FileUser, Parsed, SessionHolder, TheService, TheSessions

router = APIRouter(prefix="/api/sandbox", tags=["sessions"], route_class=Parsed)
_Path = Annotated[str, InPath(min_length=1, max_length=1024)]


@router.post("/sessions", status_code=201)
async def open_session(
    body: OpenSession, service: TheService, sessions: TheSessions, caller: SessionHolder
) -> SessionRecord:
    """One interpreter across calls (`session`), or one box for many commands (`sandbox`)."""
    folder = projects.check_path(body.project_path, service.settings.service.projects)
    options = body.options() | {"timeout": body.timeout_seconds, "workspace": folder}
    return await sessions.open(caller, body.kind, idle=body.idle, lifetime=body.lifetime, **options)


@router.get("/sessions")
async def list_sessions(sessions: TheSessions, caller: SessionHolder) -> list[SessionRecord]:
    return sessions.of(caller)


@router.get("/sessions/{id}")
async def inspect_session(id: str, sessions: TheSessions, caller: SessionHolder) -> SessionRecord:
    return sessions.get(id, caller).record


@router.delete("/sessions/{id}", status_code=204)
async def close_session(id: str, sessions: TheSessions, caller: SessionHolder) -> None:
    await sessions.close(id, caller)


@router.post("/sessions/{id}/run", responses={202: {"model": RunRecord, "description": "with wait=false: taken in"}})
async def run_turn(id: str, body: Turn, sessions: TheSessions, caller: SessionHolder) -> Executed:
    """One turn: what it defines stays."""
    run = await sessions.run(
        id, caller, code=body.code, command=list(body.command) if body.command else None, language=body.language,
        timeout=body.timeout_seconds, stdin=body.stdin,
    )  # fmt: skip
    if not body.wait:
        return JSONResponse(run.record.model_dump(mode="json"), 202)  # type: ignore[return-value]
    return Executed(**(await run.result()).model_dump(), id=run.id)


@router.post("/sessions/{id}/checkpoints", status_code=201)
async def make_checkpoint(id: str, sessions: TheSessions, caller: SessionHolder) -> Checkpointed:
    """What the session is now, to go back to or to branch from."""
    name, size = await sessions.checkpoint(id, caller)
    return Checkpointed(id=name, bytes=size)


@router.post("/sessions/{id}/fork", status_code=201)
async def fork_session(id: str, body: Fork, sessions: TheSessions, caller: SessionHolder) -> SessionRecord:
    """Another session that goes on from a checkpoint of this one, or from how it is now."""
    return await sessions.fork(id, caller, body.checkpoint)


@router.post("/sessions/{id}/rollback", status_code=204)
async def roll_back(id: str, body: Rollback, sessions: TheSessions, caller: SessionHolder) -> None:
    await sessions.rollback(id, caller, body.checkpoint)


@router.get("/{id}/files")
async def list_files(id: str, sessions: TheSessions, caller: FileUser) -> FileList:
    """What lies in an open session's box."""
    return FileList(files=tuple(Listed(**entry._asdict()) for entry in await sessions.files(id, caller)))


@router.get("/{id}/files/{path:path}", response_class=Response)
async def read_file(id: str, path: _Path, sessions: TheSessions, caller: FileUser) -> Response:
    """Its bytes, never to be taken for a page."""
    content = await sessions.read(id, caller, path)
    return Response(content, media_type="application/octet-stream", headers={"Content-Disposition": "attachment"})


@router.put("/{id}/files/{path:path}", status_code=204)
async def write_file(id: str, path: _Path, request: Request, sessions: TheSessions, caller: FileUser) -> None:
    """The request's body becomes the file."""
    await sessions.write(id, caller, path, await request.body())
