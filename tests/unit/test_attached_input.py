"""Input that a program inside never reads: it waits for a while, and no connection for ever."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NoReturn, cast

import anyio
import pytest

from belljar.service.http.sandboxes import ports, terminals


class Ended(Exception):
    pass


class Client:
    """Sends two messages, and is told how its connection ends."""

    async def messages(self) -> AsyncIterator[bytes]:
        yield b"one"
        yield b"two"

    def end(self, code: int, reason: str) -> NoReturn:
        raise Ended(code, reason)


async def test_a_terminal_whose_input_is_not_read_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminals, "UNREAD_SECONDS", 0.05)
    feed, waiting = anyio.create_memory_object_stream[bytes | None](1)
    with feed, waiting, anyio.fail_after(5), pytest.raises(Ended) as caught:
        await terminals._hear(cast(Any, Client()), cast(Any, None), feed)
    assert caught.value.args[0] == 1008


async def test_a_dialled_port_that_reads_nothing_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        async def send(self, data: bytes) -> None:
            await anyio.sleep_forever()

    monkeypatch.setattr(ports, "UNREAD_SECONDS", 0.05)
    with anyio.fail_after(5), pytest.raises(Ended) as caught:
        await ports._sent(cast(Any, Client()), cast(Any, Stream()), b"x")
    assert caught.value.args[0] == 1008
