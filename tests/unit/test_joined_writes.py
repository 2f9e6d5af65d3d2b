"""What is written in one turn of the event loop is sent together, and in its order."""

from __future__ import annotations

import asyncio
import socket

import pytest

from belljar.service.http.joined_writes import JoinedWrites


@pytest.mark.anyio
async def test_a_body_goes_out_with_its_head_before_anything_else_is_done() -> None:
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
    joined = JoinedWrites(transport, loop)
    with theirs:
        theirs.setblocking(False)
        joined.write(b"head ")
        with pytest.raises(BlockingIOError):
            theirs.recv(100)
        joined.write(b"body")
        assert theirs.recv(100) == b"head body"
        joined.write(b"alone")
        await asyncio.sleep(0)
        assert theirs.recv(100) == b"alone"
        joined.close()


@pytest.mark.anyio
async def test_parts_are_sent_in_their_order_however_they_were_written() -> None:
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
    joined = JoinedWrites(transport, loop)
    joined.write(b"head ")
    joined.writelines([b"one ", b"two "])
    joined.write(b"x" * 70_000)  # more than is held back
    joined.writelines([b" end"])
    joined.close()
    with theirs:
        theirs.setblocking(False)
        heard = b""
        while data := await loop.sock_recv(theirs, 1 << 16):
            heard += data
    assert heard == b"head one two " + b"x" * 70_000 + b" end"
