"""Runs beside a container that was granted hosts, in its network and nowhere else of it, and is its only way out.

Takes connections on the guest's own loopback and carries their bytes to a socket of the host, where the filtering
proxy listens. It decides nothing. It ends when its stdin does. Arguments: the port, the path of the socket.
"""

import asyncio
import os
import sys

_CONNECTIONS = 128
_CHUNK = 1 << 16


async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(_CHUNK):
        target.write(data)
        await target.drain()
    if target.can_write_eof():
        target.write_eof()


async def main(port: int, path: str) -> None:
    places = asyncio.Semaphore(_CONNECTIONS)

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
    asyncio.get_running_loop().add_reader(0, lambda: left.set() if not os.read(0, _CHUNK) else None)
    await asyncio.start_server(attend, "127.0.0.1", port)
    print("open", flush=True)
    await left.wait()
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
