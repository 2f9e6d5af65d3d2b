"""What every route of a living sandbox needs: the sandbox of a caller who may use it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Annotated, cast

from fastapi import Depends, Query
from starlette.requests import HTTPConnection

from belljar.core.net_change import NetworkChange
from belljar.living.process import AsyncProcess
from belljar.protocol.records import Caller
from belljar.sandbox import AsyncSandbox
from belljar.service.auth.hosts import check_hosts
from belljar.service.http.dependencies import FileUser, SessionHolder
from belljar.service.sandboxes.held import HeldSandbox
from belljar.service.sandboxes.sandboxes import Sandboxes

PREFIX = "/api/sandboxes"
Labels = Annotated[
    list[Annotated[str, Query(max_length=400)]],
    Query(alias="label", max_length=16, description="name:value, or a name; all of them must match"),
]


async def _sandboxes(connection: HTTPConnection) -> Sandboxes:
    return cast(Sandboxes, connection.app.state.sandboxes)


TheSandboxes = Annotated[Sandboxes, Depends(_sandboxes)]


class AskedBox:
    """A living sandbox that somebody asks something of."""

    def __init__(self, sandboxes: Sandboxes, id: str, caller: Caller) -> None:
        self.sandboxes: Sandboxes = sandboxes
        self.id: str = id
        self.caller: Caller = caller

    @asynccontextmanager
    async def held(self) -> AsyncIterator[HeldSandbox]:
        """Gives it as it is held; while the block runs, it is in use."""
        async with self.sandboxes.used(self.id, self.caller) as held:
            yield held

    @asynccontextmanager
    async def used(self) -> AsyncIterator[AsyncSandbox]:
        """Gives the sandbox itself; while the block runs, it is in use."""
        async with self.held() as held:
            yield held.box

    def uploading(self) -> AbstractContextManager[None]:
        """Takes a place for something large that is written while it arrives: there are a few, as each has a thread."""
        return self.sandboxes.uploads.taken(self.caller.name)

    def may_reach(self, change: NetworkChange) -> NetworkChange:
        """Returns a change of the network, if its caller may ask for it.

        Raises:
            PolicyDenied: the caller may not have a host in it.
        """
        check_hosts(change.asked, self.caller, self.sandboxes.service.settings.service.egress)
        return change

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[AsyncSandbox]:
        """Gives the sandbox for a change of whole folders, which may take long: there may be a few at once."""
        async with self.used() as box:
            with self.sandboxes.changes.taken(self.caller.name):
                yield box

    @asynccontextmanager
    async def process(self, id: str) -> AsyncIterator[AsyncProcess]:
        """Gives one of its processes; while the block runs, the sandbox is in use."""
        async with self.used() as box:
            yield box.process(id)


async def _box(id: str, sandboxes: TheSandboxes, caller: SessionHolder) -> AskedBox:
    return AskedBox(sandboxes, id, caller)


async def _file_box(id: str, sandboxes: TheSandboxes, caller: FileUser) -> AskedBox:
    return AskedBox(sandboxes, id, caller)


TheBox = Annotated[AskedBox, Depends(_box)]
TheFileBox = Annotated[AskedBox, Depends(_file_box)]
