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

from belljar import errors
from belljar.backends import docker_spec
from belljar.backends.docker_engine import DOCKER, PODMAN
from belljar.cli_proxy import open_listener
from belljar.models import Limits, Workspace
from belljar.service import socket_rules
from belljar.service.socket_proxy import SocketProxy
from belljar.service.socket_rules import Refused, Rules
from belljar.values import MIB
from witness import eventually

pytestmark = pytest.mark.anyio
OURS, THEIRS, MADE = "a" * 64, "b" * 64, "c" * 64
LABELS = {"belljar": "1"}


# --- bodies: pure ---


def body(**guest: Any) -> dict[str, Any]:
    """What Belljar itself would send."""
    facts = {"flavour": DOCKER, "image": "i", "argv": ("true",), "uid": 12345, "limits": Limits(), "owner": "o"}
    return docker_spec.container(docker_spec.Guest(**facts | {"run": "r"} | guest))


def changed(path: str, value: Any) -> bytes:
    """The same with one field more, or another."""
    whole = body()
    *folders, name = path.split(".")
    place = whole
    for folder in folders:
        place = place[folder]
    place[name] = value
    return json.dumps(whole).encode()


@pytest.mark.parametrize(
    "guest",
    [
        {},
        {"flavour": PODMAN},
        {"own_kernel": True, "runtime": "runsc"},
        {"small_buffers": True, "declared": ("/data",), "env": {"A": "b"}},
        {"volumes": {"bj-1-tmp": "/tmp", "bj-1-workspace": "/workspace"}, "locked": ("/workspace",)},
        {"beside": OURS},
        {"limits": Limits(io_bps=MIB, io_iops=100), "options": docker_spec.Options(disk="/dev/sda", io_weight=100)},
        {"options": docker_spec.Options(cpu_shares=512, writable_root=True, capabilities=("CHOWN",))},
        {"options": docker_spec.Options(security=("apparmor=belljar", "label=type:container_t"))},
        {"options": docker_spec.Options(network="belljar-sandbox", dns=("192.0.2.53",))},
    ],
)  # fmt: skip
def test_whatever_belljar_itself_asks_for_is_let_through(guest: dict[str, Any]) -> None:
    asked = body(**guest)
    rules = Rules(networks=("belljar-sandbox",))
    assert socket_rules.check_body("create", json.dumps(asked, sort_keys=True).encode(), rules) == asked


def test_the_volumes_that_belljar_makes_are_let_through_and_those_of_the_host_are_not() -> None:
    asked = docker_spec.volume("bj-1-tmp", 64 * MIB, "o", "r")
    assert socket_rules.check_body("volume_create", json.dumps(asked).encode(), Rules()) == asked
    for options in (
        {"type": "none", "device": "/", "o": "bind"},
        {"type": "tmpfs", "device": "tmpfs", "o": "bind,nosuid"},
        {"type": "tmpfs", "device": "tmpfs", "o": "nosuid,nodev,suid"},
        {"type": "nfs", "device": ":/", "o": "addr=192.0.2.1,nosuid"},
    ):
        with pytest.raises(Refused):
            socket_rules.check_body("volume_create", json.dumps(asked | {"DriverOpts": options}).encode(), Rules())
    for change in ({"Driver": "vieux/sshfs"}, {"Labels": {}}, {"ClusterVolumeSpec": {}}, {"Name": "../x"}):
        with pytest.raises(Refused):
            socket_rules.check_body("volume_create", json.dumps(asked | change).encode(), Rules())


HOSTILE: list[tuple[str, Any]] = [
    *((f"HostConfig.{name}", True) for name in ("Privileged", "privileged", "PRIVILEGED", "PublishAllPorts")),
    ("HostConfig.Privileged", 1), ("HostConfig.Privileged", "true"), ("HostConfig.Privileged", None),
    *((f"HostConfig.{name}", "host") for name in ("NetworkMode", "PidMode", "IpcMode", "UTSMode", "UsernsMode")),
    *((f"HostConfig.{name}", "host") for name in ("CgroupnsMode", "pidmode", "networkmode")),
    ("HostConfig.NetworkMode", "bridge"), ("HostConfig.NetworkMode", "container:../x"),
    ("HostConfig.IpcMode", f"container:{OURS}"), ("HostConfig.PidMode", f"container:{OURS}"),
    ("HostConfig.Binds", ["/:/host:rw"]), ("HostConfig.Binds", ["/var/run/docker.sock:/s:rw"]),
    ("HostConfig.Binds", ["./x:/host:rw"]), ("HostConfig.Binds", ["x:/host:rw,rshared"]),
    ("HostConfig.Binds", "x:/host:rw"), ("HostConfig.binds", ["/:/host:rw"]),
    ("HostConfig.CapAdd", ["SYS_ADMIN"]), ("HostConfig.CapAdd", ["ALL"]), ("HostConfig.CapAdd", ["sys_ptrace"]),
    ("HostConfig.CapDrop", []), ("HostConfig.CapDrop", ["CHOWN"]), ("HostConfig.Devices", [{"PathOnHost": "/dev/sda"}]),
    ("HostConfig.DeviceRequests", []), ("HostConfig.DeviceCgroupRules", ["a *:* rwm"]),
    ("HostConfig.VolumesFrom", ["x"]), ("HostConfig.CgroupParent", "/"), ("HostConfig.GroupAdd", ["0"]),
    ("HostConfig.MaskedPaths", []), ("HostConfig.ReadonlyPaths", []), ("HostConfig.OomScoreAdj", -1000),
    ("HostConfig.SecurityOpt", []), ("HostConfig.SecurityOpt", ["no-new-privileges", "seccomp=unconfined"]),
    ("HostConfig.SecurityOpt", ["no-new-privileges"]), ("HostConfig.SecurityOpt", ["no-new-privileges:false"]),
    ("HostConfig.SecurityOpt", ["no-new-privileges", 'seccomp={"defaultAction":"SCMP_ACT_ALLOW"}']),
    ("HostConfig.SecurityOpt", ["no-new-privileges", "seccomp=/etc/passwd"]),
    ("HostConfig.SecurityOpt", ["no-new-privileges", f"seccomp={docker_spec._PROFILE}", "apparmor=unconfined"]),
    ("HostConfig.SecurityOpt", ["no-new-privileges", f"seccomp={docker_spec._PROFILE}", "label=disable"]),
    ("HostConfig.SecurityOpt", ["no-new-privileges", f"seccomp={docker_spec._PROFILE}", "systempaths=unconfined"]),
    ("HostConfig.SecurityOpt", ["no-new-privileges", f"seccomp={docker_spec._PROFILE}", "seccomp:unconfined"]),
    ("HostConfig.Sysctls", {"kernel.core_pattern": "|/x"}), ("HostConfig.Runtime", "/tmp/evil"),
    ("HostConfig.Memory", 0), ("HostConfig.PidsLimit", -1), ("HostConfig.LogConfig", {"Type": "syslog", "Config": {}}),
    ("HostConfig.RestartPolicy", {"Name": "always"}), ("HostConfig.AutoRemove", False), ("HostConfig.Links", ["x"]),
    ("HostConfig.ſecurityOpt", []), ("HostConfig.PortBindings", {"80/tcp": [{"HostPort": "80"}]}),
    ("HostConfig.Mounts", [{"Type": "volume", "Source": "x", "Target": "/x"}]),
    ("User", "0:0"), ("User", "root"), ("User", ""), ("User", "1000"), ("User", "1000:0"), ("User", "00:1"),
    ("User", "1\u0660:1"),
    ("Labels", {}), ("Labels", {"belljar": "0"}), ("labels", {"belljar": "1"}), ("Volumes", {"/x": {}}),
    ("Entrypoint", ["/bin/sh"]), ("Healthcheck", {"Test": ["CMD", "x"]}), ("NetworkingConfig", {}), ("hostconfig", {}),
    ("ExposedPorts", {}), ("OnBuild", []), ("Tty", True),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), HOSTILE, ids=[f"{path}={value}"[:60] for path, value in HOSTILE])
def test_a_container_with_anything_else_is_refused(path: str, value: Any) -> None:
    with pytest.raises(Refused):
        socket_rules.check_body("create", changed(path, value), Rules())


@pytest.mark.parametrize("name", socket_rules._NEEDED_WALLS)
def test_a_wall_that_is_left_out_is_refused(name: str) -> None:
    asked = body()
    del asked["HostConfig"][name]
    with pytest.raises(Refused, match="missing"):
        socket_rules.check_body("create", json.dumps(asked).encode(), Rules())


@pytest.mark.parametrize(
    "text",
    [
        b'"Privileged":false,"Privileged":true', b'"Privileged":false,"privileged":true',
        b'"Privileged":false,"\\u0050rivileged":true', b'"Memory":NaN', b'"Memory":1e400',
    ],
)  # fmt: skip
def test_a_field_that_comes_twice_or_is_no_number_is_refused(text: bytes) -> None:
    asked = json.dumps(body()).encode()
    name = text[1:].partition(b'"')[0]
    plain = {b"Privileged": b'"Privileged": false', b"Memory": b'"Memory": %d' % body()["HostConfig"]["Memory"]}[name]
    assert plain in asked
    with pytest.raises(Refused):
        socket_rules.check_body("create", asked.replace(plain, text), Rules())


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"{} {}", b"\xff{}", b"[" * 100_000, b'{"a":1}{"a":2}'])
def test_what_is_not_one_plain_object_is_refused(text: bytes) -> None:
    with pytest.raises(Refused):
        socket_rules.check_body("create", text, Rules())


def test_a_folder_is_shown_only_below_a_root_and_never_by_a_link_or_with_the_engine_in_it(tmp_path: Path) -> None:
    root, sock = tmp_path / "root", tmp_path / "root" / "run" / "docker.sock"
    (root / "project").mkdir(parents=True)
    sock.parent.mkdir()
    sock.touch()
    (root / "link").symlink_to("/etc")
    (root / "alias").symlink_to(sock)
    rules = Rules(engine=str(sock), roots=(str(root),))

    def ask(path: str) -> None:
        asked = body(workspace=Workspace(path=path))
        socket_rules.check_body("create", json.dumps(asked).encode(), rules)

    ask(str(root / "project"))
    for path in (root / "link", root / "alias", sock, sock.parent, root, tmp_path, "/", "/etc", root / "absent"):
        with pytest.raises(Refused):
            ask(str(path))
    for text in (f"{root}/project/../../x", f"{root}//project", "project"):
        asked = body(workspace=Workspace(path=str(root / "project")))
        asked["HostConfig"]["Mounts"][0]["Source"] = text
        with pytest.raises(Refused):
            socket_rules.check_body("create", json.dumps(asked).encode(), rules)
    with pytest.raises(Refused):
        asked = body(workspace=Workspace(path=str(root / "project")))
        asked["HostConfig"]["Mounts"][0]["BindOptions"]["Propagation"] = "rshared"
        socket_rules.check_body("create", json.dumps(asked).encode(), rules)


def test_a_program_in_a_container_is_never_root_and_never_privileged() -> None:
    asked = {"Cmd": ["sh"], "User": "60998:60998", "Privileged": False, "Container": "x", "Env": None, "detachKeys": ""}
    found = socket_rules.check_body("exec", json.dumps(asked).encode(), Rules())
    assert found is not None
    assert "Container" not in found
    for change in ({"Privileged": True}, {"privileged": True}, {"User": ""}, {"User": "0:0"}, {"Tty": True}):
        with pytest.raises(Refused):
            socket_rules.check_body("exec", json.dumps(asked | change).encode(), Rules())


# --- paths: pure ---


@pytest.mark.parametrize(
    "line",
    [
        "GET http://engine/v1.41/info", "GET //v1.41/info", "GET /v1.41//info", "GET /v1.41/containers/..%2finfo",
        "GET /v1.41/containers/../info", "GET /v1.41/./info", "GET /v1.40/info", "GET /info", "GET /v1.41/INFO",
        "GET /v4.0.0/libpod/info", "GET /v1.41/v1.41/info", "get /v1.41/info", "POST /v1.41/info", "GET /V1.41/info",
        "GET /v1.41/containers/x/archive?path=/", "PUT /v1.41/containers/x/archive?path=/", "POST /v1.41/commit",
        "GET /v1.41/containers/x/logs", "GET /v1.41/containers/x/export", "POST /v1.41/containers/x/update",
        "POST /v1.41/containers/x/rename?name=y", "POST /v1.41/containers/prune", "POST /v1.41/volumes/prune",
        "GET /v1.41/secrets", "POST /v1.41/swarm/init", "POST /v1.41/plugins/pull", "GET /v1.41/events",
        "POST /v1.41/networks/create", "POST /v1.41/networks/x/connect", "POST /session", "POST /v1.41/session",
        "POST /v1.41/grpc", "GET /v1.41/images/x/get", "POST /v1.41/images/load", "POST /v1.41/images/x/push",
        "POST /v1.41/images/create?fromImage=x", "POST /v1.41/build?networkmode=none", "DELETE /v1.41/images/x",
        "GET /v1.41/containers/json", "GET /v1.41/containers/json?all=1", "GET /v1.41/volumes",
        "GET /v1.41/containers/json?filters=%7B%22label%22%3A%5B%22x%22%5D%7D", "GET /v1.41/info?x=1",
        "GET /v1.41/containers/json?filters=%7B%22name%22%3A%5B%22x%22%5D%7D", "GET /v1.41/containers/x%2fy/json",
        "POST /v1.41/containers/create?name=a&name=b", "POST /v1.41/containers/create?platform=x", "GET \\v1.41\\info",
        "GET /v1.41/containers/x/json#y", "GET *", "OPTIONS *", "CONNECT engine:80", "GET /v1.41/containers/x/json;y",
    ],
)  # fmt: skip
def test_a_request_line_that_is_not_on_the_list_is_refused(line: str) -> None:
    with pytest.raises(Refused):
        socket_rules.judge(*line.split(" "), Rules())


def test_images_are_touched_only_where_that_was_said_and_without_the_hosts_network() -> None:
    rules = Rules(images=True)
    for line in ("POST /v1.41/images/create?fromImage=a%2Fb&tag=c", "DELETE /v1.41/images/a/b:c?force=False",
                 "POST /v1.41/build?networkmode=none&t=x", "GET /v1.41/containers/json?all=1"):  # fmt: skip
        assert socket_rules.judge(*line.split(" "), rules)
    for line in ("POST /v1.41/images/create?fromSrc=http%3A%2F%2Fx", "POST /v1.41/build?networkmode=host&t=x",
                 "POST /v1.41/build?t=x", "POST /v1.41/build?networkmode=none&remote=x", "POST /v1.41/images/load",
                 "POST /v1.41/build?networkmode=none&nsoptions=%5B%7B%22Host%22%3Atrue%7D%5D"):  # fmt: skip
        with pytest.raises(Refused):
            socket_rules.judge(*line.split(" "), rules)


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
            "GET containers/ours/json": (200, json.dumps({"Id": OURS, "Config": {"Labels": LABELS}}).encode()),
            f"GET containers/{OURS}/json": (200, json.dumps({"Id": OURS, "Config": {"Labels": LABELS}}).encode()),
            "GET containers/theirs/json": (200, json.dumps({"Id": THEIRS, "Config": {"Labels": None}}).encode()),
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
        proxy = SocketProxy(Rules(engine.path, **rules), grace=0.2, sweep=0.05)
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
        program = "import typer; from belljar.cli_proxy import socket_proxy; typer.run(socket_proxy)"
        started.append(subprocess.Popen([sys.executable, "-c", program, *words], stderr=subprocess.PIPE))
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
