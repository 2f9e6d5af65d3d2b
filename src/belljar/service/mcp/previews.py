"""Tools that show people a web app: its server runs in a living sandbox, and is seen in a browser."""

from __future__ import annotations

from typing import Annotated

from mcp.types import CallToolResult
from pydantic import Field

from belljar.protocol.previews import PREVIEW_PORT, PreviewRecord, StartPreview
from belljar.protocol.records import Caller
from belljar.service.http.preview_hosts import addresses
from belljar.service.mcp import content as answer
from belljar.service.mcp.calls import Backend, Calls, CommandLine, Ctx, Net
from belljar.service.previews.previews import HeldPreview, Previews

_MOST_WAIT_SECONDS = 50.0  # many clients give a call up after 60
PreviewId = Annotated[str, Field(description="the container_id that start_preview answered")]
Wait = Annotated[float, Field(ge=0, le=_MOST_WAIT_SECONDS, description="seconds to wait until it listens, at most 50")]
Shown = Annotated[CallToolResult, PreviewRecord]


class PreviewTools:
    """Each public method is a tool; its docstring is what models are told."""

    def __init__(self, calls: Calls, previews: Previews) -> None:
        self._calls = calls
        self._previews = previews

    async def start_preview(
        self, ctx: Ctx, command: CommandLine,
        port: Annotated[int, Field(ge=1, le=65535, description="at which the server listens")] = PREVIEW_PORT,
        environment: Annotated[dict[str, str] | None, Field(description="variables that it finds")] = None,
        net: Net = None, backend: Backend = "auto", wait_seconds: Wait = 15.0,
    ) -> Shown:  # fmt: skip
        """Start the web app of the user's folder in a sandbox, and get an address at which the user sees it in a
        browser. Hot reload works, and edits of the folder are carried inside. Its server must listen on 127.0.0.1.
        Without a folder, show a port of an open sandbox by a server of your own there."""
        caller = await self._calls.caller(ctx, "sessions")
        folders = self._calls.folders
        body = StartPreview(
            command=command if isinstance(command, str) else tuple(command), port=port, environment=environment or {},
            net=tuple(self._calls.net(net)), backend=backend, project_path=folders.get("workspace"),
            wait_seconds=wait_seconds, packages=folders.get("packages"), live=folders.get("write", False),
            write=folders.get("write", False),
        )  # fmt: skip
        async with self._calls.telling(ctx, "starting the preview"):
            held = await self._previews.start(caller, body)
        return await self._told(ctx, held)

    async def preview_status(self, ctx: Ctx, container_id: PreviewId) -> Shown:
        """Tell how a preview is: whether it runs, the last lines of its server, and what went wrong, with advice."""
        return await self._told(ctx, await self._found(ctx, container_id))

    async def stop_preview(self, ctx: Ctx, container_id: PreviewId) -> Annotated[CallToolResult, answer.Closed]:
        """End a preview. What its server wrote is gone."""
        caller = await self._caller(ctx)
        await self._previews.stop(container_id, caller)
        return answer.of_model(answer.Closed(session_id=container_id), "stopped")

    async def _caller(self, ctx: Ctx) -> Caller:
        return await self._calls.caller(ctx, "sessions")

    async def _found(self, ctx: Ctx, id: str) -> HeldPreview:
        return self._previews.find(id, await self._caller(ctx))

    async def _told(self, ctx: Ctx, held: HeldPreview) -> CallToolResult:
        request = ctx.request_context.request
        if request is not None:
            url, path = addresses(request, held.label)
        else:  # on stdio, where nothing listens yet
            url, path = await self._previews.local_url(held), ""
        record = self._previews.told(held, url, path)
        lines = [f"container_id: {record.container_id}", f"status: {record.status}", f"url: {record.url}"]
        lines += [text for text in (record.reason, record.suggestion) if text]
        lines += [f"{found.kind}: {found.message}: {found.suggestion}" for found in record.findings]
        lines += ["[last lines]", *record.logs] if record.logs else []
        return answer.of_model(record, answer.cut("\n".join(lines)))
