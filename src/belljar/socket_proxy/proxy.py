"""A proxy before a container engine's socket, which lets through only the calls that Belljar makes.

Whoever can speak to an engine's socket is root on its host. So the service does not get that socket, but this one:
each request is parsed, judged (`calls`, `bodies`) and written anew on a connection of its own, so nothing that one side
reads otherwise than the other ever arrives. Containers are only touched if they have our label and our walls, whoever
made them and before whichever start of ours; a name is looked up first, and the call then made by the id, which never
means another container. Volumes must have our label.

A container lives as long as the connection that attached to it. When that has ended and the service does not remove
the container, because it was killed, the proxy does.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import anyio
import h11
from anyio.abc import UNIXSocketStream

from belljar.core.labels import LABEL
from belljar.host.loops import accepted
from belljar.socket_proxy import bodies, calls
from belljar.socket_proxy.calls import EngineCall
from belljar.socket_proxy.connection import (
    CHUNK_BYTES,
    IDLE_SECONDS,
    LOOK_SECONDS,
    LOST,
    HttpConnection,
    registry_headers,
    response_head,
    send_request,
    send_stream,
    tell,
    tunnel,
    while_connected,
)
from belljar.socket_proxy.rules import CallRefused, ProxyRules, parse

_MAX_CONNECTIONS = 1024
_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 60.0
_GRACE_SECONDS = 120.0  # that the service has to remove what it no longer listens to
_SWEEP_SECONDS = 5.0
_MAX_ANSWER_BYTES = 16 << 20
_REMEMBERED_NAMES = 10_000
_OWN_HEADERS = {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"trailer", b"proxy-authenticate"}
_RAW = (b"application/vnd.docker.raw-stream", b"application/vnd.docker.multiplexed-stream")
_log = logging.getLogger("belljar.socket_proxy")


class UnknownName(Exception):
    """The engine does not know that name."""


class Lifetime(NamedTuple):
    """Until when a container that was made through the proxy is somebody's."""

    due: float  # when it is nobody's; infinite while somebody listens
    volumes: tuple[str, ...] = ()


class SocketProxy:
    """Serves the clients of one listening socket, until it is cancelled."""

    def __init__(self, rules: ProxyRules, *, grace: float = _GRACE_SECONDS, sweep: float = _SWEEP_SECONDS) -> None:
        self.rules = rules
        self._grace = grace
        self._sweep = sweep
        self._ours: dict[str, None] = {}  # ids that were looked up
        self._lives: dict[str, Lifetime] = {}  # what was made through us: container id -> until when
        self._volumes: dict[str, float] = {}  # volumes that no container has yet
        self._api = f"/v1.{calls.LEAST_API}"

    async def serve(self, listener: socket.socket) -> None:
        """Takes connections from a listening socket, until it is cancelled."""
        slots = anyio.Semaphore(_MAX_CONNECTIONS)
        listener.setblocking(False)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._clear_up)
            while True:
                await slots.acquire()
                tasks.start_soon(self._attend, await accepted(listener, LOOK_SECONDS), slots)

    async def _attend(self, connection: socket.socket, slots: anyio.Semaphore) -> None:
        try:
            async with await UNIXSocketStream.from_socket(connection) as stream:
                line = HttpConnection(stream, h11.SERVER)
                while await self._answer(line):
                    line.http.start_next_cycle()
        except (*LOST, TimeoutError):
            return
        finally:
            slots.release()

    async def _answer(self, client: HttpConnection) -> bool:
        """One request; whether there may be another on this connection."""
        asked = "?"
        try:
            request = await client.hear(IDLE_SECONDS)
            if not isinstance(request, h11.Request):
                return False
            asked = f"{request.method.decode()} {request.target.decode('latin-1')[:300]}"
            await self._carry(client, request)
        except h11.RemoteProtocolError as error:
            await self._deny(client, 400, asked, f"this is not HTTP as we know it: {error}")
        except CallRefused as error:
            await self._deny(client, 403, asked, str(error))
        except UnknownName as error:
            await tell(client, 404, str(error))
        except (OSError, TimeoutError, h11.ProtocolError) as error:
            if client.http.our_state is not h11.SEND_RESPONSE:
                raise
            await tell(client, 502, f"belljar socket-proxy: the engine cannot be reached: {error!r}")
        return client.http.our_state is h11.DONE and client.http.their_state is h11.DONE

    async def _deny(self, client: HttpConnection, status: int, asked: str, why: str) -> None:
        _log.warning("refused: %r: %s", asked, why)
        if client.http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            await tell(client, status, f"belljar socket-proxy: {why}")

    # --- one call ---

    async def _carry(self, client: HttpConnection, request: h11.Request) -> None:
        names = [name for name, _ in request.headers]
        if b"transfer-encoding" in names and b"content-length" in names:
            raise CallRefused("the length of the body is said in two ways")
        call = calls.judge(request.method.decode(), request.target.decode("latin-1"), self.rules)
        self._api = call.version or self._api
        upgrade = dict(request.headers).get(b"upgrade", b"").lower()
        if upgrade and (upgrade != b"tcp" or call.verb not in ("attach", "exec_start")):
            raise CallRefused("only the streams of a program are raw connections")
        if call.verb == "build":
            await self._forward(client, call, call.target(), None, registry_headers(request))
            return
        body = bodies.check_body(call.verb, await client.body(bodies.MAX_BODY_BYTES), self.rules)
        target = call.target(await self._whose(call, body))
        if call.verb in ("attach", "exec_start"):
            if not upgrade:
                raise CallRefused("the streams of a program want `Upgrade: tcp`")
            await self._connect(client, call, target, body)
        else:
            headers = registry_headers(request) if call.verb == "pull" else []
            await self._forward(client, call, target, body, headers)

    async def _whose(self, call: EngineCall, body: dict[str, Any] | None) -> str:
        """The id to use instead of the name, once it is clear that all that is named is ours."""
        if call.verb == "create" and body is not None:
            for volume in bodies.volumes_of(body):
                await self._require_volume(volume)
            if neighbour := bodies.neighbour_of(body):
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
        if objection := bodies.foreign(facts, self.rules):
            raise CallRefused(f"the container {name[:80]} {objection}")
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
        while len(self._ours) > _REMEMBERED_NAMES:
            del self._ours[next(iter(self._ours))]

    async def _require_volume(self, name: str) -> None:
        if ((await self._look(f"volumes/{name}")).get("Labels") or {}).get(LABEL) != "1":
            raise CallRefused(f"the volume {name[:80]} is not one of Belljar's")

    async def _look(self, path: str) -> dict[str, Any]:
        status, said = await self._ask("GET", path)
        if status == 404:
            raise UnknownName(f"no such {path.partition('/')[0].rstrip('s')}: {path.split('/')[1]}")
        if status != 200:
            raise CallRefused(f"the engine did not say whose it is ({status})")
        return parse(said)

    async def _ask(self, method: str, path: str) -> tuple[int, bytes]:
        """A question of our own."""
        with anyio.fail_after(_ANSWER_SECONDS):
            async with self._engine() as engine:
                await send_request(engine, method, f"{self._api}/{path}", None, [])
                response = await engine.hear()
                return response.status_code, await engine.body(_MAX_ANSWER_BYTES)

    @asynccontextmanager
    async def _engine(self) -> AsyncIterator[HttpConnection]:
        with anyio.fail_after(_CONNECT_SECONDS):
            stream = await anyio.connect_unix(self.rules.engine)
        async with stream:
            yield HttpConnection(stream, h11.CLIENT)

    # --- there and back ---

    async def _forward(
        self,
        client: HttpConnection,
        call: EngineCall,
        target: str,
        body: Mapping[str, Any] | None,
        headers: list[tuple[bytes, bytes]],
    ) -> None:
        async with self._engine() as engine, while_connected(client):
            if call.verb == "build":
                await send_stream(client, engine, target, headers)
            else:
                await send_request(engine, call.method, target, body, headers)
            response = await engine.hear()
            while isinstance(response, h11.InformationalResponse):
                response = await engine.hear()
            kept = [pair for pair in response.headers if pair[0] not in _OWN_HEADERS]
            await client.say(h11.Response(status_code=response.status_code, headers=kept))
            heard = bytearray()
            while isinstance(event := await engine.hear(), h11.Data):
                if call.verb == "create" and len(heard) < CHUNK_BYTES:
                    heard += event.data
                await client.say(h11.Data(data=bytes(event.data)))
            self._learn(call, target, response.status_code, body, bytes(heard))
            await client.say(h11.EndOfMessage())

    async def _connect(
        self, client: HttpConnection, call: EngineCall, target: str, body: Mapping[str, Any] | None
    ) -> None:
        """Raw bytes both ways, once the engine has agreed to that; else its answer, and nothing after it."""
        raw = [(b"Connection", b"Upgrade"), (b"Upgrade", b"tcp")]
        async with self._engine() as engine:
            await send_request(engine, call.method, target, body, raw)
            response = await engine.hear(_ANSWER_SECONDS)
            headers = dict(response.headers)
            agreed = response.status_code == 101 or (
                response.status_code == 200
                and headers.get(b"content-type") in _RAW
                and b"content-length" not in headers
            )
            if not agreed:
                said = await engine.body(CHUNK_BYTES)
                await tell(client, response.status_code, "", said)
                return
            await client.stream.send(response_head(response))
            await engine.stream.send(client.early)
            await client.stream.send(engine.early)
            attached = target.split("/")[3] if call.verb == "attach" else ""
            if life := self._lives.get(attached):
                self._lives[attached] = life._replace(due=float("inf"))
            try:
                await tunnel(client, engine)
            finally:
                if life := self._lives.get(attached):
                    self._lives[attached] = life._replace(due=time.monotonic() + self._grace)
        raise anyio.EndOfStream  # there is no HTTP on this connection any more

    # --- what is left behind ---

    def _learn(self, call: EngineCall, target: str, status: int, body: Mapping[str, Any] | None, said: bytes) -> None:
        due = time.monotonic() + self._grace
        if call.verb == "create" and status == 201 and body is not None:
            volumes = tuple(bodies.volumes_of(body))
            made = str(parse(said).get("Id"))
            self._remember(made)
            self._lives[made] = Lifetime(due, volumes)
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
        with suppress(*LOST, TimeoutError, CallRefused):
            status, _ = await self._ask("DELETE", path)
            if status in (204, 404):
                known.pop(name, None)
                if status == 204:
                    _log.warning("removed %s, which its owner had left behind", name)
