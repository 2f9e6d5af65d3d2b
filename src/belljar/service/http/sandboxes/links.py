"""Routes of signed links: made by a caller, used by whoever has one."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from belljar.core import errors
from belljar.core.values import whole_path
from belljar.engine import audit
from belljar.protocol.living import MakeLink, SignedLink
from belljar.service.http.dependencies import BoundedRoute
from belljar.service.http.sandboxes import content
from belljar.service.http.sandboxes.box import PREFIX, AskedBox, TheFileBox, TheSandboxes
from belljar.service.sandboxes import links
from belljar.service.sandboxes.sandboxes import Sandboxes

router: APIRouter = APIRouter(prefix=PREFIX, tags=["sandboxes"], route_class=BoundedRoute)
public: APIRouter = APIRouter(prefix=links.PREFIX, include_in_schema=False)  # whoever has a link may ask
Signature = Annotated[str, Query(max_length=128)]


@router.post("/{id}/files/links", status_code=201)
async def make_link(body: MakeLink, box: TheFileBox) -> SignedLink:
    """A link by which whoever has it can read or write one file for a while."""
    async with box.used() as sandbox:
        try:
            path = whole_path(body.path, sandbox.home)
        except ValueError as error:
            raise errors.InvalidRequest(f"path: {error}") from None
        await box.sandboxes.service.engine.record("link", run=box.id, path=path, method=body.method)
        return await box.sandboxes.links.make(box.id, box.caller, body, path)


async def _granted(
    sandboxes: Sandboxes, request: Request, said: str, signature: str
) -> tuple[AskedBox, str]:  # fmt: skip
    """Returns the sandbox and the path that a link is for, on behalf of who made it."""
    granted, caller = await sandboxes.links.judge(said, signature, request.method)
    audit.caller.set(caller.name)
    request.scope["caller"] = caller
    return AskedBox(sandboxes, granted.sandbox, caller), granted.path


@public.get("/{said}")
async def read_by_link(said: str, request: Request, sandboxes: TheSandboxes, signature: Signature = "") -> Response:
    """The file that a link is for."""
    box, path = await _granted(sandboxes, request, said, signature)
    async with AsyncExitStack() as stack:
        sandbox = await stack.enter_async_context(box.used())
        return await content.sent(stack, sandbox.files.open, path, None)


@public.put("/{said}", status_code=204)
async def write_by_link(said: str, request: Request, sandboxes: TheSandboxes, signature: Signature = "") -> None:
    """The request's body becomes the file that a link is for."""
    box, path = await _granted(sandboxes, request, said, signature)
    await content.written(request, box, path, None)
