"""`belljar port`: a port of a living sandbox of a server, at a port of this machine's loopback."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from belljar.cli import options as opt
from belljar.cli import process, remote, terminal
from belljar.core import errors
from belljar.host.loops import lone_errors

if TYPE_CHECKING:
    from anyio.abc import ByteStream, SocketStream

    from belljar.client.living.sandbox import AsyncRemoteLivingSandbox

_AT_ONCE = 64  # connections
_PORT = 65535


def port(
    id: Annotated[str, typer.Argument(metavar="ID", help="The sandbox.")],
    number: Annotated[int, typer.Argument(metavar="PORT", min=1, max=_PORT, help="Of the sandbox.")],
    local: Annotated[
        int | None, typer.Argument(metavar="[LOCAL]", min=0, max=_PORT, help="Here; the same unless given, 0: any.")
    ] = None,
    as_json: opt.Json = False, server: remote.LivingServer = None, key: remote.Key = None,
    insecure: remote.Insecure = False,
) -> None:  # fmt: skip
    """Forward a port of this machine's loopback to one of a living sandbox of a server. Ctrl-C ends it."""
    remote.use(server, key, insecure)

    async def work() -> None:
        async with remote.served("port") as client:
            box = await client.sandbox(id)
            await _forward(box, number, number if local is None else local, as_json)

    process.run_async(work)


async def _forward(box: AsyncRemoteLivingSandbox, number: int, local: int, as_json: bool) -> None:
    try:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=local)
    except OSError as error:
        raise errors.InvalidRequest(
            f"port {local} of this machine: {error.strerror}", fix="choose another: belljar port ID PORT LOCAL"
        ) from None
    places = anyio.CapacityLimiter(_AT_ONCE)

    async def serve(connection: SocketStream) -> None:
        async with connection, places:
            try:
                await _join(connection, await box.dial(number))
            except (OSError, errors.BelljarError) as error:
                terminal.note(f"port {number} of {box.id}: {getattr(error, 'strerror', None) or error}")

    async with listener:
        here = listener.extra(anyio.abc.SocketAttribute.local_port)
        told = {"host": "127.0.0.1", "port": here, "sandbox": box.id, "to": number}
        terminal.print_json(told) if as_json else print(f"127.0.0.1:{here} is port {number} of {box.id}", flush=True)
        await listener.serve(serve)


async def _join(one: ByteStream, other: ByteStream) -> None:
    """Passes on what comes on either side, until both have ended or one is lost."""
    async with other:
        with lone_errors():
            async with anyio.create_task_group() as tasks:

                async def carry(source: ByteStream, target: ByteStream) -> None:
                    try:
                        async for piece in source:
                            await target.send(piece)
                        await target.send_eof()
                    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                        tasks.cancel_scope.cancel()

                tasks.start_soon(carry, one, other)
                tasks.start_soon(carry, other, one)
