"""The allowlist, for real: a guest with no route, our proxy outside, and servers on the host's loopback only."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import given
from hypothesis import strategies as st

import belljar
from belljar.backends.native.backend import Native
from belljar.core.addresses import endpoint
from belljar.core.request import Egress
from belljar.engine.backends import containers
from belljar.engine.engine import Engine
from belljar.host.egress.access import Outside
from belljar.host.egress.judgement import Resolve, judge
from belljar.settings import load
from engines import engines
from witness import eventually

pytestmark = pytest.mark.anyio
LISTED = Egress(mode="listed", hosts=frozenset({"listed.example", "*.wild.example"}))
ADDRESS = "127.0.0.77"  # a loopback address that nobody else listens on
needs_443 = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to listen on port 443 of the loopback")

ASK = """
import socket, ssl, sys
def hello(name):
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname=name)
    try: client.do_handshake()
    except ssl.SSLWantReadError: return outgoing.read()
for target in {targets!r}:
    with socket.create_connection(("127.0.0.1", 3128), timeout=20) as s:
        s.sendall(target + b"\\r\\n\\r\\n")
        answer = s.recv(65536)
        if b" 200 " in answer:
            s.sendall(hello(target.split()[1].rpartition(b":")[0].decode().rstrip(".")))
            answer += s.recv(65536)
        print(target, answer.split(b"\\r\\n")[0].decode(), answer[-60:].decode(errors="replace").splitlines()[-1:])
"""


def unlisted(hosts: str) -> str:
    """What is told of other.example, which none of the tests lists."""
    why = f"it is not on the list ({hosts})"
    return f'network: other.example:443 was refused: {why} — allow it with net=["other.example"]'


def ask(*targets: bytes) -> str:
    return ASK.format(targets=list(targets))


@pytest.fixture
def upstream() -> Iterator[list[bytes]]:
    """A server on 127.0.0.77:443 that answers every word with `pong` and remembers it."""
    heard: list[bytes] = []
    server = socket.create_server((ADDRESS, 443))

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                heard.append(connection.recv(1024))
                connection.sendall(b"pong")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield heard
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join(10)


def answer_once(server: socket.socket) -> None:
    with server.accept()[0] as connection:
        connection.sendall(b"pong")


class Maker(Protocol):
    def __call__(self, addresses: dict[str, str], *, private: Sequence[str] = ()) -> Any: ...


def names_of(addresses: dict[str, str]) -> Resolve:
    """A name service of the test's own."""

    async def resolver(host: str, port: int) -> Sequence[str]:
        return [addresses[host]] if host in addresses else []

    return resolver


def native(state_dir: Path, addresses: dict[str, str], private: Sequence[str] = ()) -> Native:
    settings = load(state_dir=str(state_dir))
    return Native(
        state_dir, first_uid=settings.user_uid, path=settings.path,
        outside=Outside(names_of(addresses), tuple(map(endpoint, private))),
    )  # fmt: skip


@pytest.fixture(
    params=["native", *(pytest.param(name, marks=pytest.mark.containers) for name in ("docker", "podman"))],
)
def made(request: pytest.FixtureRequest, state_dir: Path) -> Maker:
    """The backend, with a name service of the test's own."""

    def make(addresses: dict[str, str], *, private: Sequence[str] = ()) -> Any:
        if request.param == "native":
            return native(state_dir, addresses, private)
        own = {"state_dir": str(state_dir), "egress": {"private": private}}
        name = "podman" if request.param == "podman" else "docker"
        return containers(name, engines().engine(request.param, **own).settings, resolver=names_of(addresses))

    return make


@needs_443
async def test_a_listed_host_is_reached_through_the_proxy_and_only_it(made: Maker, upstream: list[bytes]) -> None:
    backend = made({"listed.example": ADDRESS, "a.wild.example": ADDRESS}, private=[f"{ADDRESS}:443"])
    denied: list[str] = []
    result = await belljar.arun(
        ask(b"CONNECT listed.example:443 HTTP/1.1\r\nHost: x", b"CONNECT A.WILD.example.:443 HTTP/1.1\r\nHost: x",
            b"CONNECT other.example:443 HTTP/1.1\r\nHost: x"),
        backend=backend, net=["listed.example", "*.wild.example"],
        on_event=lambda event: denied.append(event.text) if event.kind == "denied" else None,
    )  # fmt: skip
    lines = result.stdout.splitlines()
    assert "200" in lines[0] and "pong" in lines[0], result.stdout + result.stderr
    assert "200" in lines[1] and "pong" in lines[1], result.stdout
    assert "403" in lines[2]
    assert [words[0] for words in upstream] == [22, 22], "what came is TLS"
    assert denied == [unlisted("*.wild.example, listed.example")]
    assert denied[0] in result.denied, "the agent can read what was refused"
    assert result.guarantees is not None
    assert "filtering proxy" in result.guarantees.network


async def test_a_listed_name_that_leads_to_a_private_address_is_refused(made: Maker) -> None:
    names = {"a.example": "127.0.0.1", "b.example": "169.254.169.254", "c.example": "10.1.2.3", "d.example": "::1"}
    backend = made(names)
    asked = [f"CONNECT {name}:443 HTTP/1.1\r\nHost: x".encode() for name in names]
    result = await belljar.arun(ask(*asked), backend=backend, net=list(names))
    assert [line.count(" 403 network: ") for line in result.stdout.splitlines()] == [1, 1, 1, 1], result.stdout
    assert [reason.partition("which is ")[2].partition(" — ")[0] for reason in result.denied] == [
        "not public but this machine's loopback", "not public but link-local, where clouds have their metadata",
        "not public but a private network", "not public but this machine's loopback",
    ]  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: only then does a folder belong to root")
async def test_a_denial_is_told_although_a_folder_of_root_was_copied_back(made: Maker, tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_text("old")
    code = "import os\nopen('new.txt', 'w').write('new')\nos.symlink('old.txt', 'link')\n"
    result = await belljar.arun(
        code + ask(b"CONNECT other.example:443 HTTP/1.1\r\nHost: x"),
        backend=made({}), net=["listed.example"],
        workspace=str(tmp_path), write=True,
    )  # fmt: skip
    assert (tmp_path / "new.txt").read_text() == "new", result.stderr
    assert result.denied == (unlisted("listed.example"),)
    if not (tmp_path / "link").is_symlink():  # it was copied, so links stayed behind
        assert result.left_out == ("not copied back: link: link, only regular files leave a sandbox",)


async def test_everything_but_connect_to_a_listed_name_on_443_is_refused(made: Maker) -> None:
    backend = made({"listed.example": "127.0.0.1"})
    asked = [
        b"GET http://listed.example/ HTTP/1.1\r\nHost: listed.example",
        b"CONNECT listed.example:22 HTTP/1.1\r\nHost: x",
        b"CONNECT 93.184.216.34:443 HTTP/1.1\r\nHost: x",
        b"CONNECT [::1]:443 HTTP/1.1\r\nHost: x",
        b"CONNECT listed.example\x00.evil.example:443 HTTP/1.1\r\nHost: x",
        b"CONNECT listed.example.evil.example:443 HTTP/1.1\r\nHost: x",
        b"CONNECT evil.example#listed.example:443 HTTP/1.1\r\nHost: x",
        b"\x16\x03\x01 this is not http",
    ]
    result = await belljar.arun(ask(*asked), backend=backend, net=["listed.example"])
    lines = result.stdout.splitlines()
    assert len(lines) == len(asked), result.stdout + result.stderr
    assert not [line for line in lines if " 403 " not in line and " 400 " not in line]


async def test_inside_there_is_no_route_no_name_service_and_no_descriptor_of_the_door(made: Maker) -> None:
    code = (
        "import os, socket\n"
        "for address in ('93.184.216.34', '169.254.169.254', '10.0.0.1'):\n"
        "    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "    try: s.connect((address, 53)); print('a route to', address)\n"
        "    except OSError: pass\n"
        "    s.close()\n"
        "try: print(socket.getaddrinfo('listed.example', 443))\n"
        "except OSError: pass\n"
        "print(sorted(int(fd) for fd in os.listdir('/proc/self/fd'))[:-1], os.environ['HTTPS_PROXY'])"
    )
    result = await belljar.arun(code, backend=made({}), net=["listed.example"])
    assert result.stdout == "[0, 1, 2] http://127.0.0.1:3128\n", result.stdout + result.stderr


async def test_a_missing_program_still_has_exit_code_127(made: Maker) -> None:
    backend = made({})
    result = await belljar.arun(command=["no-such-program"], backend=backend, net=["listed.example"])
    assert (result.status, result.exit_code) == ("error", 127)


@needs_443
async def test_the_way_out_ends_with_the_run(made: Maker, state_dir: Path, upstream: list[bytes]) -> None:
    backend = made({"listed.example": ADDRESS}, private=[f"{ADDRESS}:443"])
    hold = ask(b"CONNECT listed.example:443 HTTP/1.1\r\nHost: x") + "\nimport time; time.sleep(30)"
    before = len(os.listdir("/proc/self/fd"))
    result = await belljar.arun(hold, backend=backend, net=["listed.example"], timeout=2)
    assert result.status == "timeout"
    assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= before + 1)
    assert list(state_dir.glob("*.sock")) == []


@needs_443
async def test_a_private_mirror_is_reached_at_the_address_and_port_that_an_administrator_lists(state_dir: Path) -> None:
    with socket.create_server((ADDRESS, 0)) as server:
        port = server.getsockname()[1]
        threading.Thread(target=answer_once, args=(server,), daemon=True).start()
        names = {"mirror.example": ADDRESS, "moved.example": "127.0.0.78", "public.example": "93.184.216.34"}
        backend = native(state_dir, names, private=[f"{ADDRESS}:{port}"])
        targets = [f"mirror.example:{port}", f"moved.example:{port}", f"public.example:{port}", "mirror.example:443"]
        result = await belljar.arun(
            ask(*(f"CONNECT {target} HTTP/1.1\r\nHost: x".encode() for target in targets)),
            backend=backend, net=["*.example"],
        )  # fmt: skip
    lines = result.stdout.splitlines()
    assert "200" in lines[0] and "pong" in lines[0], result.stdout + result.stderr
    assert ["403" in line for line in lines[1:]] == [True] * 3, "nothing else at that port, nor it at another"
    assert "only port 443 can be reached" in result.denied[1]
    assert f'an administrator lists "{ADDRESS}:443" in egress.private' in result.denied[2]


OWN = """
from belljar.host.egress.judgement import EgressDecision, judge_address
for address in ("93.184.216.34", "64:ff9b::5db8:d822", "2a00:1450::34", "93.184.216.35", "2a00:1450::35"):
    print(address, judge_address(EgressDecision("a.example", 443), address, ()).objection.partition("which is ")[2])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a network of its own a public address")
def test_a_name_that_leads_to_an_address_of_this_machine_is_refused_though_it_is_public() -> None:
    script = (
        "ip link set lo up && ip addr add 93.184.216.34/32 dev lo && ip -6 addr add 2a00:1450::34/128 dev lo nodad "
        '&& ip route add default dev lo && ip -6 route add default dev lo && exec "$@"'
    )
    line = ["unshare", "--net", "sh", "-c", script, "sh", sys.executable, "-c", OWN]
    done = subprocess.run(line, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.splitlines() == [
        "93.184.216.34 not public but this machine itself", "64:ff9b::5db8:d822 not public but this machine itself",
        "2a00:1450::34 not public but this machine itself", "93.184.216.35 ", "2a00:1450::35 ",
    ]  # fmt: skip


HOST = "other.example"
# What people and their tools fetch with: options of a run that asks for a host that is not listed.
CLIENTS: dict[str, dict[str, Any]] = {
    "urllib": {"code": f"import urllib.request as u; u.urlopen('https://{HOST}/x')"},
    "urllib, caught and raised anew": {
        "code": "import urllib.request as u\n"
        f"try: u.urlopen('https://{HOST}')\nexcept OSError: raise ValueError('no data')"
    },
    "http.client": {
        "code": "from http.client import HTTPSConnection\nproxied = HTTPSConnection('127.0.0.1', 3128)\n"
        f"proxied.set_tunnel('{HOST}')\nproxied.connect()"
    },
    "requests": {"code": f"from pip._vendor import requests\nrequests.get('https://{HOST}/x')"},
    "curl": {"command": ["curl", "-sS", f"https://{HOST}/x"]},
    "curl in bash": {"code": f"set -e\ncurl -s https://{HOST}/x | cat\nexit 3", "language": "bash"},
    "git": {"command": ["git", "clone", f"https://{HOST}/x.git"]},
    "pip": {"command": ["python3", "-m", "pip", "download", "--retries=0", f"--index-url=https://{HOST}/simple", "x"]},
    "npm": {"command": ["npm", "install", "--fetch-retries=0", f"--registry=https://{HOST}/", "x"]},
    "node's fetch": {"code": f"await fetch('https://{HOST}/x')", "language": "javascript"},
    "node's https": {"code": f"require('https').get('https://{HOST}/x')", "language": "javascript"},
}


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_refused_host_is_a_network_error_that_names_it_and_says_how_to_allow_it(
    client: str, engine: Engine
) -> None:
    options = dict(CLIENTS[client])
    if options.get("command", ["sh"])[0] not in ("sh", "python3") and not shutil.which(options["command"][0]):
        pytest.skip(f"NOT SHOWN: {client} is not installed here")
    result = await belljar.arun(
        options.pop("code", None), backend="native", engine=engine, net=["listed.example"], timeout=60, **options
    )
    assert result.error is not None, result.stdout
    assert result.error.error_type == "NETWORK_ERROR", result.stderr
    assert HOST in result.error.message
    assert f'allow it with net=["{HOST}"]' in result.error.suggestion


async def test_a_guest_that_went_on_without_the_host_failed_of_something_else(engine: Engine) -> None:
    code = f"import urllib.request as u\ntry: u.urlopen('https://{HOST}')\nexcept OSError: pass\nint('x')"
    result = await belljar.arun(code, backend="native", engine=engine, net=["listed.example"])
    assert result.denied
    assert result.error is not None
    assert result.error.error_type == "RUNTIME_ERROR"


@given(st.binary(max_size=300))
def test_no_target_but_a_listed_name_is_ever_allowed(target: bytes) -> None:
    verdict = judge(target, LISTED)
    if not verdict.objection:
        assert verdict.port == 443
        assert verdict.host == "listed.example" or verdict.host.endswith(".wild.example")


@pytest.mark.parametrize(
    ("target", "allowed"),
    [
        (b"listed.example:443", True), (b"LISTED.example.:443", True), (b"x.y.wild.example:443", True),
        (b"wild.example:443", False), (b"evilwild.example:443", False), (b"listed.example:80", False),
        (b"xlisted.example:443", False), (b"127.0.0.1:443", False), (b"2130706433:443", False),
        (b"listed.example:443\n", False), (b"", False), (b"listed.example:99999999", False),
    ],
)  # fmt: skip
def test_the_list_is_taken_at_its_word(target: bytes, allowed: bool) -> None:
    assert (judge(target, LISTED).objection == "") is allowed


async def test_what_a_session_is_denied_is_told_with_its_turn_and_recorded(made: Maker, tmp_path: Path) -> None:
    log, denied = tmp_path / "audit.log", list[str]()
    backend = made({}, private=[f"{ADDRESS}:443"])
    engine = Engine(load(state_dir=str(tmp_path), audit_log=str(log)), extra=(backend,))
    async with belljar.AsyncSession(
        backend=backend.name, engine=engine, id="bs-given", net=["listed.example"]
    ) as session:
        turn = await session.run(
            ask(b"CONNECT other.example:443 HTTP/1.1\r\nHost: x"), id="bj-turn",
            on_event=lambda event: denied.append(event.text) if event.kind == "denied" else None,
        )  # fmt: skip
        assert not (await session.run("1")).denied, "the next turn was denied nothing"
    assert denied == [unlisted("listed.example")]
    assert denied[0] in turn.denied
    (line,) = [line for line in map(json.loads, log.read_text().splitlines()) if line["kind"] == "denied"]
    assert (line["run"], line["session"], line["message"]) == ("bj-turn", "bs-given", denied[0])


@needs_443
async def test_a_living_sandbox_reaches_listed_hosts_and_only_them_from_every_program(
    made: Maker, upstream: list[bytes]
) -> None:
    backend = made({"listed.example": ADDRESS}, private=[f"{ADDRESS}:443"])
    listed, other = (f"CONNECT {name}.example:443 HTTP/1.1\r\nHost: x".encode() for name in ("listed", "other"))
    async with belljar.AsyncSandbox(backend=backend, living=True, net=["listed.example"]) as box:
        started = await box.start(["python3", "-c", ask(listed)])
        told = await box.run(ask(listed, other))
        (first, second), third = told.stdout.splitlines(), (await started.wait(30)).stdout
        assert "200" in first and "pong" in first and "200" in third and "pong" in third, told.stdout + third
        assert "403" in second
        assert told.denied == (unlisted("listed.example"),)
        straight = await box.run(
            "import socket\n"
            f"for target in (('{ADDRESS}', 443), ('192.0.2.1', 443), ('listed.example', 443)):\n"
            "    try: socket.create_connection(target, timeout=5); print('got out')\n"
            "    except OSError: print('no way')"
        )
        assert straight.stdout == "no way\n" * 3, straight.stdout + straight.stderr
    assert [words[0] for words in upstream] == [22, 22], "what came is TLS"
