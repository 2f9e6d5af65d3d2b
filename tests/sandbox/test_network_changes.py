"""What an open sandbox may reach is changed while it runs: at once, for open connections too, as far as is allowed."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import anyio
import pytest

import belljar
from belljar.backends.native.backend import Native
from belljar.core import errors
from belljar.core.addresses import endpoint
from belljar.core.net_change import NetworkChange
from belljar.core.request import Egress
from belljar.engine.backends import containers
from belljar.engine.engine import Engine
from belljar.host.egress.access import Outside
from belljar.settings import load
from engines import engines
from local_tls import hello

pytestmark = pytest.mark.anyio
ONE, OTHER = "one.example", "other.example"

# Opens a tunnel, says a ClientHello, prints what comes until it is over.
HOLD = """
import socket, sys, binascii
with socket.create_connection(("127.0.0.1", 3128), timeout=60) as s:
    s.sendall(b"CONNECT %(host)s:%(port)d HTTP/1.1\\r\\n\\r\\n")
    print(s.recv(4096).split(b"\\r\\n")[0].decode(), flush=True)
    s.sendall(binascii.unhexlify("%(hello)s"))
    while data := s.recv(4096):
        print(len(data), flush=True)
print("over", flush=True)
"""


def holding(host: str, port: int) -> str:
    return HOLD % {"host": host, "port": port, "hello": hello(host).hex()}


@pytest.fixture
def server() -> Iterator[int]:
    """A port at which something answers a first word and then keeps the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        held = []

        def serve() -> None:
            while True:
                try:
                    held.append(listener.accept()[0])
                except OSError:
                    return
                held[-1].recv(4096)
                held[-1].sendall(b"hi")

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        for connection in held:
            connection.close()


def engine_of(state_dir: Path, port: int, **settings: object) -> Engine:
    async def here(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    known = load(state_dir=str(state_dir), audit_log=str(state_dir / "audit.log"), **settings)
    outside = Outside(here, [endpoint(f"127.0.0.1:{port}")])
    native = Native(state_dir, first_uid=known.user_uid, path=known.path, outside=outside)
    return Engine(known, extra=(native,))


async def said(process: belljar.AsyncProcess, words: bytes) -> None:
    """Waits until a process has printed something."""
    with anyio.fail_after(60):
        while words not in b"".join(chunk.data for chunk in process.kept()):
            await anyio.sleep(0.02)


async def test_a_living_sandbox_gets_a_network_and_loses_it_while_its_programs_run(
    state_dir: Path, server: int
) -> None:
    engine = engine_of(state_dir, server)
    async with belljar.AsyncSandbox(living=True, backend="native", engine=engine) as box:
        assert await box.network.list() == ()
        assert not (await box.run(holding(ONE, server))).ok, "there is no way out yet"
        told = await box.network.allow(f"{ONE}:{server}", f"{OTHER}:{server}")
        assert (told.mode, len(told.net)) == ("listed", 2)
        one, other = [await box.start(["python3", "-c", holding(host, server)]) for host in (ONE, OTHER)]
        for process in (one, other):
            await said(process, b"200 Connection established\n2\n")
        await box.network.deny(f"{ONE}:{server}")
        await one.wait(timeout=60)
        assert other.running, "the other goes on"
        again = await box.run(holding(ONE, server))
        assert f"{ONE}:{server} was refused: it is not on the list" in " ".join(again.denied)
        assert again.guarantees is not None and OTHER in again.guarantees.network
        await box.network.set([])
        await other.wait(timeout=60)
        assert await box.network.list() == ()
        refused = await box.run("import socket; socket.create_connection(('127.0.0.1', 3128)).sendall(b'x')")
        assert "https_proxy" not in (await box.exec("env")).stdout, refused
    kinds = [json.loads(line)["kind"] for line in (state_dir / "audit.log").read_text().splitlines()]
    assert kinds.count("network") == 3


async def test_a_kept_sandbox_and_a_session_are_changed_too(state_dir: Path, server: int) -> None:
    engine = engine_of(state_dir, server)
    async with belljar.AsyncSandbox(backend="native", engine=engine) as box:
        await box.network.set([f"{ONE}:{server}"])
        ask = holding(ONE, server).replace("while data := s.recv(4096)", "if data := s.recv(4096)")
        assert (await box.run(ask)).stdout.startswith("HTTP/1.1 200")
        await box.network.deny("*")
        assert not (await box.run(ask)).ok
    async with belljar.AsyncSession(backend="native", engine=engine, net=[f"{OTHER}:{server}"]) as session:
        assert " 403 " in (await session.run(ask)).stdout
        await session.network.allow(f"{ONE}:{server}")
        assert "200 Connection" in (await session.run(ask)).stdout
    async with belljar.AsyncSession(backend="native", engine=engine) as session:
        with pytest.raises(errors.NotAvailable, match="began without a way out"):
            await session.network.allow(ONE)


async def test_what_administrators_do_not_allow_is_not_to_be_had_by_a_change(state_dir: Path, server: int) -> None:
    engine = engine_of(state_dir, server, egress={"hosts": [f"{ONE}:{server}"], "open": False})
    async with belljar.AsyncSandbox(living=True, backend="native", engine=engine) as box:
        for asked in (OTHER, "*", f"*.{ONE}", "python-packages"):
            with pytest.raises(errors.PolicyDenied):
                await box.network.allow(asked)
            with pytest.raises(errors.PolicyDenied):
                await box.network.set([asked])
        with pytest.raises(errors.InvalidRequest, match="not a host name"):
            await box.network.allow("not a host")
        assert (await box.network.allow(f"{ONE}:{server}")).net == (f"{ONE}:{server}",)


async def test_an_open_network_is_said_to_be_one_and_has_no_private_address(state_dir: Path, server: int) -> None:
    code = "import urllib.request as u\ntry: u.urlopen('http://10.0.0.1/')\nexcept OSError as error: print(error)"
    result = await belljar.arun(code, backend="native", engine=engine_of(state_dir, server), net=["*"])
    assert "not public but a private network" in result.stdout, result.stdout + result.stderr
    assert result.guarantees and result.guarantees.network == "open: any public host, through a filtering proxy"


async def test_a_backend_that_has_no_network_says_so() -> None:
    async with belljar.AsyncSandbox(backend="wasm") as box:
        with pytest.raises(errors.NotAvailable, match="wasm cannot change it"):
            await box.network.allow(ONE)


@pytest.mark.parametrize(
    ("now", "change", "then"),
    [
        (["a.example"], {"allow": ["b.example"]}, (["a.example", "b.example"], [])),
        (["a.example", "*.b.example"], {"deny": ["x.b.example"]}, (["*.b.example", "a.example"], ["x.b.example"])),
        (["a.example"], {"deny": ["a.example"]}, ([], [])),
        (["x.a.example", "b.example"], {"deny": ["*.a.example"]}, (["b.example"], [])),
        (["*"], {"deny": ["a.example"]}, (["*"], ["a.example"])),
        (["a.example"], {"net": ["b.example"], "allow": ["c.example"], "deny": ["b.example"]}, (["c.example"], [])),
        (["a.example"], {"allow": ["*"]}, (["*"], [])),
        (["a.example"], {"deny": ["*"]}, ([], [])),
        ([], {"deny": ["a.example"]}, ([], [])),
    ],
)  # fmt: skip
def test_a_change_of_a_list_comes_to_what_it_says(
    now: list[str], change: dict[str, list[str]], then: tuple[list[str], list[str]]
) -> None:
    found = NetworkChange.model_validate(change).applied(Egress.of(now))
    assert (list(found.entries), sorted(found.denied)) == then


def test_what_was_denied_is_allowed_again_when_it_is_asked_for() -> None:
    denied = NetworkChange(deny=("a.example",)).applied(Egress.of(["*"]))
    assert not NetworkChange(allow=("a.example",)).applied(denied).denied


@pytest.mark.containers
@pytest.mark.parametrize("name", ["docker", "podman"])
async def test_a_living_container_gets_a_network_and_loses_it(name: str, state_dir: Path, server: int) -> None:
    async def here(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    own = {"state_dir": str(state_dir), "egress": {"private": [f"127.0.0.1:{server}"]}}
    settings = engines().engine(name, **own).settings
    engine = Engine(settings, extra=(containers(name, settings, resolver=here),))
    async with belljar.AsyncSandbox(living=True, backend=name, engine=engine) as box:
        assert not (await box.run(holding(ONE, server))).ok, "there is no way out yet"
        await box.network.allow(f"{ONE}:{server}")
        process = await box.start(["python3", "-c", holding(ONE, server)])
        await said(process, b"200 Connection established\n2\n")
        await box.network.deny("*")
        await process.wait(timeout=60)
        assert (await box.network.show()).mode == "none"
    async with belljar.AsyncSandbox(backend=name, engine=engine) as box:
        ask = holding(ONE, server).replace("while data := s.recv(4096)", "if data := s.recv(4096)")
        await box.network.set([f"{ONE}:{server}"])
        assert (await box.run(ask)).stdout.startswith("HTTP/1.1 200")
