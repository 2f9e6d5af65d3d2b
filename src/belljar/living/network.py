"""What an open sandbox may reach: told, and changed at once, for connections that are open, too."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from pydantic import ValidationError

from belljar.core import errors
from belljar.core.net_change import NetworkChange, NetworkRecord
from belljar.host import portal

Change = Callable[[NetworkChange | None], Awaitable[NetworkRecord]]  # without a change: tells what is in force


class AsyncNetwork:
    """The network of an open sandbox: `await box.network.allow("example.org")`.

    Entries are those of `net`. A change holds at once: connections to hosts that are no longer allowed are cut.
    """

    def __init__(self, change: Change) -> None:
        """Is made by `AsyncSandbox.network`."""
        self._change = change

    async def show(self) -> NetworkRecord:
        """Returns what may be reached now."""
        return await self._change(None)

    async def list(self) -> tuple[str, ...]:
        """Returns the entries that are in force; `*` is any host, and none of them no network."""
        return (await self.show()).net

    async def allow(self, *entries: str) -> NetworkRecord:
        """Allows more.

        Raises:
            PolicyDenied: the administrator does not allow that.
            NotAvailable: this sandbox has no way out that could be opened now.
        """
        return await self._change(_change(allow=entries))

    async def deny(self, *entries: str) -> NetworkRecord:
        """Refuses these from now on, although a wider entry may allow them; `*` is all."""
        return await self._change(_change(deny=entries))

    async def set(self, entries: Iterable[str]) -> NetworkRecord:
        """Puts another list in force; an empty one is no network."""
        return await self._change(_change(net=entries))


def _change(**given: Iterable[str]) -> NetworkChange:
    if word := next((name for name, value in given.items() if isinstance(value, str)), ""):
        raise errors.InvalidRequest(f"{word}: must be a list of entries", fix='write ["example.org"]')
    try:
        return NetworkChange(**{name: tuple(value) for name, value in given.items()})
    except ValidationError as error:
        raise errors.from_validation(error, "network", NetworkChange) from None


class Network:
    """The network of an open sandbox, from blocking code: see `AsyncNetwork`."""

    def __init__(self, core: AsyncNetwork) -> None:
        """Is made by `Sandbox.network`."""
        self._core = core

    def show(self) -> NetworkRecord:
        """Returns what may be reached now."""
        return portal.call(self._core.show)

    def list(self) -> tuple[str, ...]:
        """Returns the entries that are in force; `*` is any host, and none of them no network."""
        return portal.call(self._core.list)

    def allow(self, *entries: str) -> NetworkRecord:
        """Allows more: see `AsyncNetwork.allow`."""
        return portal.call(lambda: self._core.allow(*entries))

    def deny(self, *entries: str) -> NetworkRecord:
        """Refuses these from now on: see `AsyncNetwork.deny`."""
        return portal.call(lambda: self._core.deny(*entries))

    def set(self, entries: Iterable[str]) -> NetworkRecord:
        """Puts another list in force: see `AsyncNetwork.set`."""
        return portal.call(lambda: self._core.set(entries))
