"""The cleanup of containers, before an engine that is stuck with one of them."""

from __future__ import annotations

import asyncio
import json
from asyncio import StreamReader, StreamWriter
from contextlib import closing, suppress
from pathlib import Path

import anyio
import pytest

from belljar.backends.containers.cleanup import Cleanup, Leftovers
from belljar.host.engine_address import FLAVOURS, EngineAddress

pytestmark = pytest.mark.anyio


class StuckEngine:
    """Speaks as Docker does: it never answers for the container `stuck`, and all others are not there."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.free = asyncio.Event()

    async def serve(self, source: StreamReader, target: StreamWriter) -> None:
        with closing(target), suppress(asyncio.IncompleteReadError):  # whoever asked has hung up
            while head := await source.readuntil(b"\r\n\r\n"):
                path = head.split(b" ")[1].decode()
                self.asked.append(path)
                if "/stuck" in path:
                    await self.free.wait()
                found = {"ApiVersion": "1.41"} if path.endswith("/version") else {"message": "no such container"}
                status = "200 OK" if path.endswith("/version") else "404 Not Found"
                body = json.dumps(found).encode()
                kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                target.write(f"HTTP/1.1 {status}\r\n{kind}".encode() + body)
                await target.drain()


class Orphanage:
    """Where orphans would be looked for."""

    async def reap(self) -> int:
        return 0


async def test_a_container_that_the_engine_is_stuck_with_does_not_keep_others_from_being_removed(
    tmp_path: Path,
) -> None:
    engine, orphanage = StuckEngine(), Orphanage()
    address = EngineAddress(FLAVOURS["docker"], f"unix://{tmp_path}/s")
    async with await asyncio.start_unix_server(engine.serve, tmp_path / "s"):
        cleanup = Cleanup(address, orphanage.reap, interval=600)
        cleanup.remove_later(Leftovers(["stuck"]))
        with anyio.fail_after(10):
            while not any("/stuck" in path for path in engine.asked):
                await anyio.sleep(0.01)
            cleanup.remove_later(Leftovers(["next"]))
            while not any("/next" in path for path in engine.asked):
                await anyio.sleep(0.01)
        assert not cleanup.drain(0), "the first one still is to be removed"
        engine.free.set()
        with anyio.fail_after(10):
            while not cleanup.drain(0):
                await anyio.sleep(0.01)
