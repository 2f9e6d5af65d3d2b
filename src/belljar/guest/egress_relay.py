"""Runs in a container beside one that was granted hosts, in the network of that one, and is its only way out.

It takes connections on the guest's own loopback and carries their bytes to a socket of the host, where the filtering
proxy listens. It decides nothing. It ends when its stdin does. Arguments: the port, and the path of the socket.
"""

import asyncio
import os
import sys

_MAX_CONNECTIONS = 128
_CHUNK_BYTES = 1 << 16


async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Carries bytes from one side to the other, and then the end."""
    while data := await source.read(_CHUNK_BYTES):
        target.write(data)
        await target.drain()
    if target.can_write_eof():
        target.write_eof()


async def main(port: int, path: str) -> None:
    """Listens on a port of the loopback, and connects each caller to the socket at a path."""
    places = asyncio.Semaphore(_MAX_CONNECTIONS)

    async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with places:
                back, out = await asyncio.open_unix_connection(path)
                try:
                    await asyncio.gather(pump(reader, out), pump(back, writer))
                finally:
                    out.close()
        except OSError:
            pass
        finally:
            writer.close()

    left = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, lambda: left.set() if not os.read(0, _CHUNK_BYTES) else None)
    await asyncio.start_server(attend, "127.0.0.1", port)
    print("open", flush=True)
    await left.wait()
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
