"""A door to a container engine that lets through only what Belljar says to it.

Whoever can speak to an engine's socket is root on its host. So the service does not get that socket, but this one:
each request is parsed, judged (`socket_rules`) and written anew on a connection of its own, so nothing that one side
reads otherwise than the other ever arrives. Containers are only touched if they have our label and our walls, whoever
made them and before whichever start of ours; a name is looked up first, and the call then made by the id, which never
means another container. Volumes must have our label.

A container lives as long as the connection that attached to it. When that has ended and the service does not remove
the container, because it was killed, the proxy does.
"""

from __future__ import annotations

import json
import logging
import select
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import anyio
import h11
from anyio.abc import SocketAttribute, UNIXSocketStream

from belljar.backends.containers.spec import LABEL
from belljar.socket_proxy import rules as socket_rules
from belljar.socket_proxy.rules import Call, Refused, Rules

_CONNECTIONS = 1024
_IDLE = 120.0  # seconds until a client says the next thing
_CONNECTING = 10.0
_ASKING = 60.0
_LOOK = 0.25  # seconds between two looks whether a client is still there
_GRACE = 120.0  # seconds that the service has to remove what it no longer listens to
_SWEEP = 5.0
_DRAIN = 4 << 20  # bytes of a refused request that are read, so that the refusal is heard
_CHUNK = 1 << 16
_REMEMBERED = 10_000
_LOST = (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, h11.ProtocolError)
_OWN_HEADERS = {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"trailer", b"proxy-authenticate"}
_RAW = (b"application/vnd.docker.raw-stream", b"application/vnd.docker.multiplexed-stream")
_log = logging.getLogger("belljar.socket_proxy")


class Absent(Exception):
    """The engine does not know that name."""


class Line:
    """One side of a conversation: a stream, and the parser for what comes over it."""

    def __init__(self, stream: UNIXSocketStream, role: type[h11.CLIENT] | type[h11.SERVER]) -> None:
        self.stream = stream
        self._socket: socket.socket = stream.extra(SocketAttribute.raw_socket)
        self.http = h11.Connection(role, max_incomplete_event_size=32_768)

    async def hear(self, seconds: float | None = None) -> Any:
        """The next event. Without a deadline only where the other side's silence means that it works."""
        while (event := self._event()) is h11.NEED_DATA:
            if self.http.they_are_waiting_for_100_continue:
                await self.say(h11.InformationalResponse(status_code=100, headers=[]))
            with anyio.fail_after(seconds):
                self.http.receive_data(await self.receive())
        return event

    async def receive(self) -> bytes:
        """What has come; empty at the end. anyio's own complains when it is cancelled just as something comes."""
        while True:
            with suppress(BlockingIOError):
                return self._socket.recv(_CHUNK)
            await anyio.wait_readable(self._socket)

    def _event(self) -> Any:
        try:
            return self.http.next_event()
        except h11.RemoteProtocolError as error:
            if self.http.our_role is h11.SERVER:
                raise
            raise OSError(f"its answer makes no sense: {error}") from None

    async def say(self, event: Any) -> None:
        if data := self.http.send(event):
            await self.stream.send(data)

    async def body(self, most: int) -> bytes:
        """All of it, if that is not too much."""
        held = bytearray()
        while isinstance(event := await self.hear(_IDLE), h11.Data):
            held += event.data
            if len(held) > most:
                raise Refused(f"the body is over {most} bytes")
        return bytes(held)

    @property
    def early(self) -> bytes:
        """What came after the end of HTTP."""
        return bytes(self.http.trailing_data[0])

    async def going(self, *, half: bool = True) -> None:
        """Returns when the other side has hung up; half: is one that will say nothing more as good as gone?"""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP if half else 0)
        while True:
            if any(found & (select.POLLHUP | select.POLLERR | select.POLLRDHUP) for _, found in poll.poll(0)):
                return
            await anyio.sleep(_LOOK)


class Life(NamedTuple):
    due: float  # when it is nobody's; infinite while somebody listens
    volumes: tuple[str, ...] = ()


class SocketProxy:
    """`serve` is all there is to call."""

    def __init__(self, rules: Rules, *, grace: float = _GRACE, sweep: float = _SWEEP) -> None:
        self.rules = rules
        self._grace = grace
        self._sweep = sweep
        self._ours: dict[str, None] = {}  # ids that were looked up
        self._lives: dict[str, Life] = {}  # what was made through us: container id -> until when
        self._volumes: dict[str, float] = {}  # volumes that no container has yet
        self._api = f"/v1.{socket_rules.LEAST_API}"

    async def serve(self, listener: socket.socket) -> None:
        """Until it is cancelled."""
        slots = anyio.Semaphore(_CONNECTIONS)
        listener.setblocking(False)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._clear_up)
            while True:
                await slots.acquire()
                tasks.start_soon(self._attend, await _accepted(listener), slots)

    async def _attend(self, connection: socket.socket, slots: anyio.Semaphore) -> None:
        try:
            async with await UNIXSocketStream.from_socket(connection) as stream:
                line = Line(stream, h11.SERVER)
                while await self._answer(line):
                    line.http.start_next_cycle()
        except (*_LOST, TimeoutError):
            return
        finally:
            slots.release()

    async def _answer(self, client: Line) -> bool:
        """One request; whether there may be another on this connection."""
        asked = "?"
        try:
            request = await client.hear(_IDLE)
            if not isinstance(request, h11.Request):
                return False
            asked = f"{request.method.decode()} {request.target.decode('latin-1')[:300]}"
            await self._carry(client, request)
        except h11.RemoteProtocolError as error:
            await self._deny(client, 400, asked, f"this is not HTTP as we know it: {error}")
        except Refused as error:
            await self._deny(client, 403, asked, str(error))
        except Absent as error:
            await _tell(client, 404, str(error))
        except (OSError, TimeoutError, h11.ProtocolError) as error:
            if client.http.our_state is not h11.SEND_RESPONSE:
                raise
            await _tell(client, 502, f"belljar socket-proxy: the engine cannot be reached: {error!r}")
        return client.http.our_state is h11.DONE and client.http.their_state is h11.DONE

    async def _deny(self, client: Line, status: int, asked: str, why: str) -> None:
        _log.warning("refused: %r: %s", asked, why)
        if client.http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            await _tell(client, status, f"belljar socket-proxy: {why}")

    # --- one call ---

    async def _carry(self, client: Line, request: h11.Request) -> None:
        names = [name for name, _ in request.headers]
        if b"transfer-encoding" in names and b"content-length" in names:
            raise Refused("the length of the body is said in two ways")
        call = socket_rules.judge(request.method.decode(), request.target.decode("latin-1"), self.rules)
        self._api = call.version or self._api
        upgrade = dict(request.headers).get(b"upgrade", b"").lower()
        if upgrade and (upgrade != b"tcp" or call.verb not in ("attach", "exec_start")):
            raise Refused("only the streams of a program are raw connections")
        if call.verb == "build":
            await self._forward(client, call, call.target(), None, _registry_headers(request))
            return
        body = socket_rules.check_body(call.verb, await client.body(socket_rules.MOST_BODY), self.rules)
        target = call.target(await self._whose(call, body))
        if call.verb in ("attach", "exec_start"):
            if not upgrade:
                raise Refused("the streams of a program want `Upgrade: tcp`")
            await self._connect(client, call, target, body)
        else:
            headers = _registry_headers(request) if call.verb == "pull" else []
            await self._forward(client, call, target, body, headers)

    async def _whose(self, call: Call, body: dict[str, Any] | None) -> str:
        """The id to use instead of the name, once it is clear that all that is named is ours."""
        if call.verb == "create" and body is not None:
            for volume in socket_rules.volumes_of(body):
                await self._require_volume(volume)
            if neighbour := socket_rules.neighbour_of(body):
                body["HostConfig"]["NetworkMode"] = f"container:{await self._container(neighbour)}"
        if call.verb in ("container", "attach", "exec", "remove"):
            return await self._container(call.name)
        if call.verb in ("exec_start", "exec_look"):
            await self._require_exec(call.name)
        if call.verb == "volume":
            await self._require_volume(call.name)
        return ""

    async def _container(self, name: str) -> str:
        """Its id, if it is ours. An id is never given twice, and labels never change: so it may be remembered."""
        if name in self._ours:
            return name
        facts = await self._look(f"containers/{name}/json")
        if objection := socket_rules.foreign(facts, self.rules):
            raise Refused(f"the container {name[:80]} {objection}")
        found = str(facts["Id"])
        self._remember(found)
        return found

    async def _require_exec(self, name: str) -> None:
        key = f"exec {name}"  # which no container is called
        if key in self._ours:
            return
        await self._container(str((await self._look(f"exec/{name}/json")).get("ContainerID")))
        self._remember(key)

    def _remember(self, name: str) -> None:
        self._ours[name] = None
        while len(self._ours) > _REMEMBERED:
            del self._ours[next(iter(self._ours))]

    async def _require_volume(self, name: str) -> None:
        if ((await self._look(f"volumes/{name}")).get("Labels") or {}).get(LABEL) != "1":
            raise Refused(f"the volume {name[:80]} is not one of Belljar's")

    async def _look(self, path: str) -> dict[str, Any]:
        status, said = await self._ask("GET", path)
        if status == 404:
            raise Absent(f"no such {path.partition('/')[0].rstrip('s')}: {path.split('/')[1]}")
        if status != 200:
            raise Refused(f"the engine did not say whose it is ({status})")
        return socket_rules.parse(said)

    async def _ask(self, method: str, path: str) -> tuple[int, bytes]:
        """A question of our own."""
        with anyio.fail_after(_ASKING):
            async with self._engine() as engine:
                await _request(engine, method, f"{self._api}/{path}", None, [])
                response = await engine.hear()
                return response.status_code, await engine.body(16 << 20)

    @asynccontextmanager
    async def _engine(self) -> AsyncIterator[Line]:
        with anyio.fail_after(_CONNECTING):
            stream = await anyio.connect_unix(self.rules.engine)
        async with stream:
            yield Line(stream, h11.CLIENT)

    # --- there and back ---

    async def _forward(
        self, client: Line, call: Call, target: str, body: Mapping[str, Any] | None, headers: list[tuple[bytes, bytes]]
    ) -> None:
        async with self._engine() as engine, _while_there(client):
            if call.verb == "build":
                await _stream(client, engine, target, headers)
            else:
                await _request(engine, call.method, target, body, headers)
            response = await engine.hear()
            while isinstance(response, h11.InformationalResponse):
                response = await engine.hear()
            kept = [pair for pair in response.headers if pair[0] not in _OWN_HEADERS]
            await client.say(h11.Response(status_code=response.status_code, headers=kept))
            heard = bytearray()
            while isinstance(event := await engine.hear(), h11.Data):
                if call.verb == "create" and len(heard) < _CHUNK:
                    heard += event.data
                await client.say(h11.Data(data=bytes(event.data)))
            self._learn(call, target, response.status_code, body, bytes(heard))
            await client.say(h11.EndOfMessage())

    async def _connect(self, client: Line, call: Call, target: str, body: Mapping[str, Any] | None) -> None:
        """Raw bytes both ways, once the engine has agreed to that; else its answer, and nothing after it."""
        raw = [(b"Connection", b"Upgrade"), (b"Upgrade", b"tcp")]
        async with self._engine() as engine:
            await _request(engine, call.method, target, body, raw)
            response = await engine.hear(_ASKING)
            headers = dict(response.headers)
            agreed = response.status_code == 101 or (
                response.status_code == 200
                and headers.get(b"content-type") in _RAW
                and b"content-length" not in headers
            )
            if not agreed:
                said = await engine.body(_CHUNK)
                await _tell(client, response.status_code, "", said)
                return
            await client.stream.send(_head(response))
            await engine.stream.send(client.early)
            await client.stream.send(engine.early)
            attached = target.split("/")[3] if call.verb == "attach" else ""
            if life := self._lives.get(attached):
                self._lives[attached] = life._replace(due=float("inf"))
            try:
                await _tunnel(client, engine)
            finally:
                if life := self._lives.get(attached):
                    self._lives[attached] = life._replace(due=time.monotonic() + self._grace)
        raise anyio.EndOfStream  # there is no HTTP on this connection any more

    # --- what is left behind ---

    def _learn(self, call: Call, target: str, status: int, body: Mapping[str, Any] | None, said: bytes) -> None:
        due = time.monotonic() + self._grace
        if call.verb == "create" and status == 201 and body is not None:
            volumes = tuple(socket_rules.volumes_of(body))
            made = str(socket_rules.parse(said).get("Id"))
            self._remember(made)
            self._lives[made] = Life(due, volumes)
            for name in volumes:
                self._volumes.pop(name, None)
        elif call.verb == "volume_create" and status == 201 and body is not None:
            self._volumes[str(body["Name"])] = due
        elif call.verb == "remove" and status in (204, 404):
            self._lives.pop(target.split("/")[3].partition("?")[0], None)
        elif call.verb == "volume" and call.method == "DELETE" and status in (204, 404):
            self._volumes.pop(call.name, None)

    async def _clear_up(self) -> None:
        while True:
            await anyio.sleep(self._sweep)
            now = time.monotonic()
            for name, life in list(self._lives.items()):
                if life.due < now:
                    await self._clear(f"containers/{name}?force=true&v=true", self._lives, name)
                    if name not in self._lives:
                        self._volumes |= dict.fromkeys(life.volumes, now)
            for name, due in list(self._volumes.items()):
                if due < now:
                    await self._clear(f"volumes/{name}?force=true", self._volumes, name)

    async def _clear(self, path: str, known: dict[str, Any], name: str) -> None:
        with suppress(*_LOST, TimeoutError, Refused):
            status, _ = await self._ask("DELETE", path)
            if status in (204, 404):
                known.pop(name, None)
                if status == 204:
                    _log.warning("removed %s, which its owner had left behind", name)


async def _accepted(listener: socket.socket) -> socket.socket:
    while True:
        await anyio.wait_readable(listener)
        try:
            return listener.accept()[0]
        except (BlockingIOError, ConnectionError):
            continue
        except OSError:  # no descriptor is free
            await anyio.sleep(_LOOK)


async def _request(
    engine: Line, method: str, target: str, body: Mapping[str, Any] | None, headers: list[tuple[bytes, bytes]]
) -> None:
    data = b"" if body is None else json.dumps(body).encode()
    kind = [] if body is None else [(b"Content-Type", b"application/json")]
    length = [(b"Content-Length", b"%d" % len(data))] if body is not None or method == "POST" else []
    close = [] if any(name == b"Connection" for name, _ in headers) else [(b"Connection", b"close")]
    fields = [(b"Host", b"docker"), *kind, *length, *close, *headers]
    await engine.say(h11.Request(method=method, target=target, headers=fields))
    if data:
        await engine.say(h11.Data(data=data))
    await engine.say(h11.EndOfMessage())


async def _stream(client: Line, engine: Line, target: str, headers: list[tuple[bytes, bytes]]) -> None:
    """A body of any length, as it comes."""
    fields = [(b"Host", b"docker"), (b"Content-Type", b"application/x-tar"), (b"Transfer-Encoding", b"chunked")]
    await engine.say(h11.Request(method="POST", target=target, headers=[*fields, (b"Connection", b"close"), *headers]))
    while isinstance(event := await client.hear(_IDLE), h11.Data):
        await engine.say(h11.Data(data=bytes(event.data)))
    await engine.say(h11.EndOfMessage())


def _registry_headers(request: h11.Request) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in request.headers if name.startswith(b"x-registry-")]


async def _tell(client: Line, status: int, why: str, body: bytes = b"") -> None:
    """An answer of our own, in the words of an engine. What the client still says is heard, and forgotten."""
    said = body or json.dumps({"message": why}).encode()
    fields = [("Content-Type", "application/json"), ("Content-Length", str(len(said))), ("Connection", "close")]
    await client.say(h11.Response(status_code=status, headers=fields))
    await client.say(h11.Data(data=said))
    await client.say(h11.EndOfMessage())
    with suppress(anyio.BrokenResourceError, OSError):
        await client.stream.send_eof()
    with suppress(*_LOST), anyio.move_on_after(2):
        rest = _DRAIN
        while rest > 0 and (data := await client.receive()):
            rest -= len(data)


def _head(response: Any) -> bytes:
    lines = [f"HTTP/1.1 {response.status_code} {response.reason.decode('latin-1')}".encode()]
    lines += [name.title() + b": " + value for name, value in response.headers]
    return b"\r\n".join(lines) + b"\r\n\r\n"


@asynccontextmanager
async def _while_there(client: Line) -> AsyncIterator[None]:
    """Ends what is inside when the client has hung up: an engine stops pulling when nobody listens any more."""

    async def watch() -> None:
        await client.going()
        tasks.cancel_scope.cancel()

    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        try:
            yield
        except Exception as error:  # else it would come out as a group
            failure = error
        tasks.cancel_scope.cancel()
    if failure:
        raise failure
    if client.http.our_state not in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED):
        raise anyio.EndOfStream


async def _tunnel(client: Line, engine: Line) -> None:
    """Until the engine has said all, or the client is gone. One that only ended its input still listens.

    No deadline: a guest may be silent for hours, and both sides are on this machine, whose kernel tells of a death.
    """

    async def carry(source: Line, target: Line) -> None:
        with suppress(*_LOST):
            while data := await source.receive():
                await target.stream.send(data)

    async def outwards() -> None:
        await carry(engine, client)
        tasks.cancel_scope.cancel()

    async def inwards() -> None:
        await carry(client, engine)
        with suppress(*_LOST):
            await engine.stream.send_eof()
        await client.going(half=False)
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outwards)
        tasks.start_soon(inwards)
