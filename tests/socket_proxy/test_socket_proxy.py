"""The socket proxy before a small engine of our own: what arrives there, what does not, and what tricks change."""

from __future__ import annotations

import json
import re
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import h11
import pytest
from anyio.abc import SocketStream

from belljar.core import errors
from belljar.socket_proxy.command import open_listener
from belljar.socket_proxy.proxy import SocketProxy
from belljar.socket_proxy.rules import ProxyRules
from container_bodies import body, told
from witness import eventually

pytestmark = pytest.mark.anyio
OURS, THEIRS, MADE = "a" * 64, "b" * 64, "c" * 64
LABELS = {"belljar": "1"}  # all that a container has of it that somebody started from an image of ours


# --- over the wire ---


class Said(NamedTuple):
    method: str
    target: str
    headers: dict[str, str]
    body: bytes


class Engine:
    """A small HTTP server that knows three containers, and remembers all that it heard."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.heard: list[Said] = []
        self.hung_up = anyio.Event()
        self.answers: dict[str, tuple[int, bytes]] = {
            "GET containers/ours/json": (200, json.dumps(told(OURS)).encode()),
            f"GET containers/{OURS}/json": (200, json.dumps(told(OURS)).encode()),
            "GET containers/theirs/json": (200, json.dumps(told(THEIRS, "Config.Labels", LABELS)).encode()),
            "GET exec/e1/json": (200, json.dumps({"ContainerID": OURS}).encode()),
            "GET exec/e2/json": (200, json.dumps({"ContainerID": "theirs"}).encode()),
            "GET volumes/mine": (200, json.dumps({"Name": "mine", "Labels": LABELS}).encode()),
            "GET volumes/theirs": (200, json.dumps({"Name": "theirs", "Labels": {}}).encode()),
            "POST containers/create": (201, json.dumps({"Id": MADE}).encode()),
            "POST volumes/create": (201, b"{}"), f"POST containers/{OURS}/start": (204, b""),
            f"DELETE containers/{OURS}": (204, b""), f"DELETE containers/{MADE}": (204, b""),
            "GET info": (200, b'{"a": 1}'), "POST build": (200, b"built"),
        }  # fmt: skip

    @property
    def lines(self) -> list[str]:
        return [f"{said.method} {said.target}" for said in self.heard]

    async def attend(self, stream: SocketStream) -> None:
        async with stream:
            http = h11.Connection(h11.SERVER)
            said, held = None, bytearray()
            while not isinstance(event := http.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    try:
                        http.receive_data(await stream.receive())
                    except (anyio.EndOfStream, anyio.BrokenResourceError):
                        return
                elif isinstance(event, h11.Request):
                    said = event
                elif isinstance(event, h11.Data):
                    held += event.data
            assert said
            headers = {name.decode(): value.decode() for name, value in said.headers}
            self.heard.append(Said(said.method.decode(), said.target.decode(), headers, bytes(held)))
            await self._answer(stream, http, said.method.decode(), said.target.decode())

    async def _answer(self, stream: SocketStream, http: h11.Connection, method: str, target: str) -> None:
        path = target.partition("?")[0].removeprefix("/v1.41/").removeprefix("/")
        if path.endswith(("/attach", "/start")) and ("attach" in path or path.startswith("exec")):
            kind = b"101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp" if "attach" in path else b"200 OK"
            await stream.send(b"HTTP/1.1 %s\r\nContent-Type: application/vnd.docker.raw-stream\r\n\r\nhello " % kind)
            heard = bytearray(http.trailing_data[0])
            try:
                async for data in stream:
                    heard += data
                    if heard.endswith(b"hang up"):
                        return
            except anyio.BrokenResourceError:
                pass
            with anyio.move_on_after(1 if b"quiet" not in heard else 60):
                if b"quiet" in heard:
                    await anyio.sleep_forever()
                await stream.send(bytes(heard).upper())
        elif path.endswith("/wait"):
            try:
                while True:
                    await stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                self.hung_up.set()
        else:
            status, text = self.answers.get(f"{method} {path}", (404, b'{"message": "none"}'))
            length = b"" if status == 204 else b"Content-Length: %d\r\n" % len(text)
            await stream.send(b"HTTP/1.1 %d Fine\r\n%s\r\n" % (status, length) + text)


class Setting(NamedTuple):
    engine: Engine
    path: str
    proxy: SocketProxy

    async def say(self, text: bytes) -> bytes:
        """All that comes back for these bytes."""
        async with await anyio.connect_unix(self.path) as stream:
            await stream.send(text)
            held = bytearray()
            with anyio.fail_after(10):
                async for data in stream:
                    held += data
                    if b'{"a": 1}' in data and b"close" not in text:
                        break
            return bytes(held)

    async def ask(self, line: str, content: bytes = b"", headers: str = "") -> tuple[int, bytes]:
        length = f"Content-Length: {len(content)}\r\n" if content else ""
        head = f"{line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{length}{headers}\r\n"
        said = await self.say(head.encode() + content)
        return int(said.split(b" ", 2)[1]), said.partition(b"\r\n\r\n")[2]


@asynccontextmanager
async def setting(**rules: Any) -> AsyncIterator[Setting]:
    with tempfile.TemporaryDirectory(prefix="bj-") as folder:
        engine = Engine(f"{folder}/engine.sock")
        proxy = SocketProxy(ProxyRules(engine.path, **rules), grace=0.2, sweep=0.05)
        listener = open_listener(Path(folder) / "proxy.sock", 0o600)
        async with await anyio.create_unix_listener(engine.path) as real, anyio.create_task_group() as tasks:
            tasks.start_soon(real.serve, engine.attend)
            tasks.start_soon(proxy.serve, listener)
            yield Setting(engine, f"{folder}/proxy.sock", proxy)
            tasks.cancel_scope.cancel()
        listener.close()


async def test_a_call_on_the_list_arrives_and_its_answer_comes_back() -> None:
    async with setting() as here:
        assert await here.ask("GET /v1.41/info") == (200, b'{"a": 1}')
        [said] = here.engine.heard
        assert (said.method, said.target) == ("GET", "/v1.41/info")


async def test_a_refusal_is_told_and_logged_and_the_engine_hears_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with setting() as here:
        status, said = await here.ask("GET /v1.41/secrets")
        assert status == 403
        assert "not one of the calls" in json.loads(said)["message"]
        assert here.engine.heard == []
    assert "GET /v1.41/secrets" in caplog.text


async def test_only_plain_headers_reach_the_engine() -> None:
    async with setting() as here:
        await here.ask("GET /v1.41/info", headers="X-Registry-Auth: secret\r\nX-Forwarded-Host: y\r\nCookie: z\r\n")
        assert set(here.engine.heard[0].headers) == {"host", "connection"}


BEGIN = b"POST /v1.41/containers/ours/start HTTP/1.1\r\nHost: x\r\n"
SMUGGLED = b"POST /v1.41/swarm/init HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    "text",
    [
        BEGIN + b"Content-Length: 0\r\nContent-Length: 5\r\n\r\n",
        BEGIN + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        BEGIN + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        BEGIN + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n",
        BEGIN + b"Content-Length : 4\r\n\r\n",
        BEGIN + b"Content-Length: +0\r\n\r\n",
        b"GET http://engine/v1.41/info HTTP/1.1\r\nHost: x\r\n\r\n", b"GET //v1.41/info HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1.41/info\tHTTP/1.1\r\nHost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01 nonsense\r\n\r\n",
        b"GET /v1.41/info HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
        b"GET /v1.41/info HTTP/1.1\r\nHost: x\r\nUpgrade: tcp\r\nConnection: Upgrade\r\n\r\n",
        b"GET /v1.41/info HTTP/1.1\r\nHost: x\r\n" + b"X: " + b"y" * 70_000 + b"\r\n\r\n",
    ],
)  # fmt: skip
async def test_a_request_that_two_readers_could_read_in_two_ways_is_refused_with_all_after_it(text: bytes) -> None:
    async with setting() as here:
        said = await here.say(text + SMUGGLED)
        assert said.split(b" ")[1] in (b"400", b"403")
        assert said.count(b"HTTP/1.1 ") == 1
        assert here.engine.heard == []


async def test_each_of_several_requests_in_one_packet_is_judged() -> None:
    async with setting() as here:
        text = b"GET /v1.41/info HTTP/1.1\r\nHost: x\r\n\r\n"
        said = await here.say(text + text + SMUGGLED + text + b"connection: close")
        assert re.findall(rb"HTTP/1.1 (\d+)", said) == [b"200", b"200", b"403"]
        assert here.engine.lines == ["GET /v1.41/info"] * 2


async def test_what_looks_like_a_request_inside_a_body_is_a_body() -> None:
    async with setting() as here:
        status, _ = await here.ask("POST /v1.41/containers/ours/start", SMUGGLED)
        assert status == 403
        assert here.engine.lines == []


async def test_a_container_is_looked_up_by_its_name_and_then_used_by_its_id() -> None:
    async with setting() as here:
        assert (await here.ask("POST /v1.41/containers/ours/start", b"{}"))[0] == 204
        assert here.engine.lines == ["GET /v1.41/containers/ours/json", f"POST /v1.41/containers/{OURS}/start"]
        assert here.engine.heard[1].body == b""


@pytest.mark.parametrize(
    ("line", "content"),
    [
        ("POST /v1.41/containers/theirs/start", b""), ("POST /v1.41/containers/theirs/kill?signal=KILL", b""),
        ("DELETE /v1.41/containers/theirs?force=true&v=true", b""), ("GET /v1.41/containers/theirs/json", b""),
        ("POST /v1.41/containers/theirs/exec", b'{"Cmd": ["sh"], "User": "1:1"}'), ("GET /v1.41/exec/e2/json", b""),
        ("POST /v1.41/exec/e2/start", b'{"Detach": false, "Tty": false}'), ("DELETE /v1.41/volumes/theirs", b""),
        ("POST /v1.41/containers/create", json.dumps(body(beside="theirs")).encode()),
        ("POST /v1.41/containers/create", json.dumps(body(volumes={"theirs": "/tmp"})).encode()),
    ],
)  # fmt: skip
async def test_what_has_not_our_label_cannot_be_touched(line: str, content: bytes) -> None:
    async with setting() as here:
        status, said = await here.ask(line, content, "Upgrade: tcp\r\n" if line.endswith("/start") and content else "")
        assert status == 403, said
        assert b"not one of Belljar's" in said
        assert not [line for line in here.engine.lines if not line.startswith("GET ")]


async def test_what_the_engine_does_not_know_is_told_as_that() -> None:
    async with setting() as here:
        assert (await here.ask("DELETE /v1.41/containers/nobody?force=true"))[0] == 404
        assert (await here.ask("POST /v1.41/containers/create", json.dumps(body(volumes={"no": "/tmp"})).encode()))[
            0
        ] == 404


async def test_a_container_is_made_as_it_was_judged_and_shares_only_a_network_of_ours() -> None:
    async with setting() as here:
        asked = body(beside="ours", volumes={"mine": "/tmp"})
        content = json.dumps(asked, indent=3).encode()
        assert (await here.ask("POST /v1.41/containers/create?name=bj-1", content))[0] == 201
        made = here.engine.heard[-1]
        assert made.target == "/v1.41/containers/create?name=bj-1"
        asked["HostConfig"]["NetworkMode"] = f"container:{OURS}"
        assert json.loads(made.body) == asked


async def test_a_body_over_the_cap_is_refused_however_it_is_sent() -> None:
    async with setting() as here:
        content = json.dumps(body(env={"A": "x" * (2 << 20)})).encode()
        status, said = await here.ask("POST /v1.41/containers/create", content)
        assert (status, b"over" in said) == (403, True)
        chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(content), content)
        head = b"POST /v1.41/containers/create HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert (await here.say(head + chunked)).startswith(b"HTTP/1.1 403")
        assert here.engine.heard == []


async def test_a_build_of_any_size_is_streamed_and_not_held() -> None:
    async with setting(images=True) as here:
        content = bytes(range(256)) * (4 << 12)  # sixteen times the cap of other bodies
        status, said = await here.ask("POST /v1.41/build?networkmode=none&t=x", content)
        assert (status, said) == (200, b"built")
        assert here.engine.heard[0].body == content


RAW = b" HTTP/1.1\r\nHost: x\r\nUpgrade: tcp\r\nConnection: Upgrade\r\n"
ATTACH = b"POST /v1.41/containers/ours/attach?stream=1&stdin=1" + RAW + b"\r\n"
START = b"POST /v1.41/exec/e1/start" + RAW + b"Content-Length: 30\r\n\r\n"
START += b'{"Detach": false,"Tty": false}'


@pytest.mark.parametrize(("head", "status"), [(ATTACH, b"101"), (START, b"200")])
async def test_raw_streams_go_both_ways_and_the_end_of_one_is_not_the_end_of_the_other(
    head: bytes, status: bytes
) -> None:
    async with setting() as here, await anyio.connect_unix(here.path) as stream:
        await stream.send(head + b"early ")
        await stream.send(b"late")
        await stream.send_eof()
        held = b"".join([data async for data in stream])
        assert held.split(b" ")[1] == status
        assert held.partition(b"\r\n\r\n")[2] == b"hello EARLY LATE"


async def test_a_connection_that_was_raw_is_never_http_again() -> None:
    async with setting() as here:
        said = await here.say(ATTACH + SMUGGLED + b"hang up")
        assert said.count(b"HTTP/1.1 ") == 1
        assert not [line for line in here.engine.lines if "swarm" in line]


async def test_when_the_client_hangs_up_so_does_the_proxy() -> None:
    async with setting() as here:
        async with await anyio.connect_unix(here.path) as stream:
            await stream.send(b"POST /v1.41/containers/ours/wait HTTP/1.1\r\nHost: x\r\n\r\n")
            with anyio.fail_after(10):
                while len(here.engine.heard) < 2:
                    await anyio.sleep(0.01)
        with anyio.fail_after(10):
            await here.engine.hung_up.wait()


async def test_what_was_made_and_is_no_longer_listened_to_is_removed_and_what_is_is_not() -> None:
    async with setting() as here:
        here.engine.answers[f"GET containers/{MADE}/json"] = (200, b"{}")
        await here.ask("POST /v1.41/containers/create", json.dumps(body()).encode())
        removal = f"DELETE /v1.41/containers/{MADE}?force=true&v=true"
        async with await anyio.connect_unix(here.path) as stream:
            await stream.send(ATTACH.replace(b"ours", MADE.encode()) + b"quiet")
            await stream.send_eof()
            assert await stream.receive()
            with anyio.move_on_after(0.6):
                await anyio.sleep_forever()
            assert removal not in here.engine.lines
        with anyio.fail_after(10):
            while removal not in here.engine.lines:
                await anyio.sleep(0.01)


async def test_an_engine_that_is_down_is_told_as_that() -> None:
    async with setting() as here:
        Path(here.engine.path).unlink()
        status, said = await here.ask("GET /v1.41/info")
        assert (status, b"cannot be reached" in said) == (502, True)


# --- the command ---


def test_the_socket_is_made_for_few_and_that_of_a_dead_proxy_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    open_listener(path, 0o660).close()
    with open_listener(path, 0o600):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(errors.InvalidRequest, match="somebody listens"):
            open_listener(path, 0o600)
    (tmp_path / "file").touch()
    with pytest.raises(errors.InvalidRequest, match="no socket"):
        open_listener(tmp_path / "file", 0o600)


@pytest.fixture
def command() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-m", "belljar.socket_proxy", *words]
        started.append(subprocess.Popen(line, stderr=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=10)


def test_the_command_listens_until_it_is_told_to_end_and_takes_its_socket_with_it(
    command: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    path = tmp_path / "s"
    process = command("--listen", f"unix://{path}", "--engine", str(tmp_path / "none"))
    assert eventually(path.exists, 20)

    def answers() -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(5)
            client.connect(str(path))
            client.sendall(b"GET /v1.41/secrets HTTP/1.1\r\nHost: x\r\n\r\n")
            return client.recv(100).startswith(b"HTTP/1.1 403")

    assert answers()
    process.terminate()
    assert process.wait(timeout=10) == 0
    assert not path.exists()


@pytest.mark.parametrize("words", [["--listen", "tcp://0.0.0.0:1"], ["--network", "host"], ["--mode", "666"]])
def test_the_command_refuses_to_open_the_door_wider(
    command: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, words: list[str]
) -> None:
    process = command("--listen", f"unix://{tmp_path}/s", *words)
    assert process.wait(timeout=20) != 0
    assert not (tmp_path / "s").exists()
