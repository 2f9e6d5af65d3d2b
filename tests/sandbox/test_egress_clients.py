"""Inside, clients find the way out by themselves: real programs, a real server behind TLS, nothing told to any."""

from __future__ import annotations

import http.server
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import belljar
from belljar.backends.native.backend import Native
from belljar.core.addresses import endpoint
from belljar.engine.backends import package_store
from belljar.engine.engine import Engine
from belljar.host.egress.access import Outside
from belljar.host.egress.named_sets import hosts_of
from belljar.settings import load
from local_tls import Authority

pytestmark = pytest.mark.anyio
NAME = "listed.example"
LIBRARIES = next(Path(sys.prefix, "lib").glob("python3*/site-packages"))  # of these tests: requests and aiohttp


class _Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        said = b"0" * 40 + b"\trefs/heads/main\n" if "info/refs" in self.path else b"pong"
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *words: Any) -> None:
        return


class Servers(NamedTuple):
    tls: int
    plain: int
    authority: bytes
    engine: Engine


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("clients")
    authority, running, stack = Authority(folder), [], ExitStack()
    for secured in (True, False):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answer)
        if secured:
            server.socket = authority.server(NAME).wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        running.append(server)
    tls, plain = (server.server_address[1] for server in running)

    async def here(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    state = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="belljar-test-")))
    state.chmod(0o755)
    settings = load(state_dir=str(state))
    outside = Outside(here, [endpoint(f"127.0.0.1:{port}") for port in (tls, plain)])
    native = Native(
        state, first_uid=settings.user_uid, path=settings.path, outside=outside, packages=package_store(settings)
    )
    yield Servers(tls, plain, authority.file.read_bytes(), Engine(settings, extra=(native,)))
    for server in running:
        server.shutdown()
        server.server_close()
    stack.close()


JAVA = """
import java.net.*; import java.net.http.*;
class Fetch { public static void main(String[] words) throws Exception {
  var request = HttpRequest.newBuilder(URI.create("http://listed.example:%(plain)d/")).build();
  System.out.println(HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString()).body());
} }
"""
GO = """
package main
import ("fmt"; "io"; "net/http")
func main() {
  answer, err := http.Get("http://listed.example:%(plain)d/")
  if err != nil { panic(err) }
  said, _ := io.ReadAll(answer.Body)
  fmt.Println(string(said))
}
"""
URL, CLEAR = "https://listed.example:%(tls)d/x", "http://listed.example:%(plain)d/x"
CLIENTS: dict[str, dict[str, Any]] = {
    "urllib": {"code": f"import urllib.request as u; print(u.urlopen('{URL}').read())"},
    "urllib, plain": {"code": f"import urllib.request as u; print(u.urlopen('{CLEAR}').read())"},
    "requests": {"code": f"import requests; print(requests.get('{URL}').text)", "libraries": True},
    "aiohttp": {
        "code": "import aiohttp, asyncio\nasync def main():\n  async with aiohttp.ClientSession() as s, "
        f"s.get('{URL}') as r: print(await r.text())\nasyncio.run(main())",
        "libraries": True,
    },
    "httpx2": {"code": f"import httpx2; print(httpx2.get('{URL}').text)", "libraries": True},
    "curl": {"command": ["curl", "-sS", URL]},
    "curl, plain": {"command": ["curl", "-sS", CLEAR]},
    "curl, plain, by a tunnel": {"command": ["curl", "-sSp", CLEAR]},
    "wget": {"command": ["wget", "-qO-", "--ca-certificate=/workspace/ca.pem", URL]},
    "git": {"command": ["git", "ls-remote", f"{URL}.git"], "says": "refs/heads/main"},
    "node's fetch": {"code": f"console.log(await (await fetch('{URL}')).text())", "language": "javascript"},
    "node's fetch, plain": {"code": f"console.log(await (await fetch('{CLEAR}')).text())", "language": "javascript"},
    "node's https": {
        "code": f"require('https').get('{URL}', r => r.on('data', d => console.log(String(d))))",
        "language": "javascript",
    },
    "node's http": {
        "code": f"require('http').get('{CLEAR}', r => r.on('data', d => console.log(String(d))))",
        "language": "javascript",
    },
    "java": {"command": ["java", "/workspace/Fetch.java"], "files": {"Fetch.java": JAVA}},
    "go": {"code": GO, "language": "go"},
}
TRUSTING = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS")
SLOW = {"go": "the compiler is built into a fresh cache: half a minute of two processors"}


@cache
def guests_python() -> str:
    """The version of the Python that guests of native run."""
    return belljar.run("import sys; print('%d.%d' % sys.version_info[:2])", backend="native").stdout.strip()


@pytest.mark.parametrize(
    "client",
    [pytest.param(name, marks=[pytest.mark.exhaustive(SLOW[name])] if name in SLOW else []) for name in CLIENTS],
)
async def test_a_client_reaches_a_listed_host_without_being_told_how(client: str, servers: Servers) -> None:
    options = dict(CLIENTS[client])
    ports = {"tls": servers.tls, "plain": servers.plain}
    program = options.get("command", [{"javascript": "node", "go": "go"}.get(options.get("language", ""), "python3")])[
        0
    ]
    if not shutil.which(program):
        pytest.skip(f"NOT SHOWN: {program} is not installed here")
    says = options.pop("says", "pong")
    if "command" in options:
        options["command"] = [word % ports for word in options["command"]]
    code, libraries = options.pop("code", None), options.pop("libraries", False)
    if libraries and not LIBRARIES.parent.name.endswith(guests_python()):
        pytest.skip(f"NOT SHOWN: the libraries are for another Python than {guests_python()}, which guests have")
    env = dict.fromkeys(TRUSTING, f"{'/inputs' if libraries else '/workspace'}/ca.pem")
    if libraries:
        options["workspace"] = str(LIBRARIES)
    files = {name: text % ports for name, text in options.pop("files", {}).items()}
    result = await belljar.arun(
        code % ports if code else None, backend="native", engine=servers.engine, timeout=120, memory="2G", pids=400,
        net=[f"{NAME}:{servers.tls}", f"http://{NAME}:{servers.plain}"], env=env,
        files={"ca.pem": servers.authority, **files}, **options,
    )  # fmt: skip
    if "Error loading java.security" in result.stderr:
        pytest.skip("NOT SHOWN: this Java has its configuration in /etc, which guests of native do not see")
    assert says in result.stdout, result.stdout + result.stderr + str(result.denied)
    assert not result.denied


@pytest.mark.parametrize(
    "code",
    ["await fetch('https://other.example/x')", "require('https').get('https://other.example/x')"],
)
async def test_node_that_knows_no_proxy_prints_what_was_refused_and_what_would_help(
    code: str, servers: Servers
) -> None:
    result = await belljar.arun(
        code, language="javascript", backend="native", engine=servers.engine, net=[NAME], timeout=60
    )
    assert "other.example:443 was refused" in result.stderr, result.stderr
    assert result.error is not None and 'net=["other.example"]' in result.error.suggestion


# --- real package indexes, where this machine has some configured ---


def engine_for(name: str) -> Engine:
    """An engine that may reach a set's hosts, wherever they are: an index may be a mirror in a private network."""
    known: list[str] = []
    for entry in hosts_of(name, load()):
        host, _, port = entry.removeprefix("http://").partition(":")
        number = int(port or (80 if entry.startswith("http://") else 443))
        try:
            found = socket.getaddrinfo(host, number, socket.AF_INET, socket.SOCK_STREAM)
            socket.create_connection(found[0][4], timeout=10).close()
        except OSError:
            pytest.skip(f"NOT SHOWN: a host of {name} cannot be reached from here")
        known += [f"{address[4][0]}:{number}" for address in found]
    return Engine(load(egress={"private": sorted(set(known))}))


async def test_pip_downloads_through_the_proxy_from_what_pip_is_configured_for() -> None:
    result = await belljar.arun(
        command=["python3", "-m", "pip", "download", "--no-deps", "--no-binary=:none:", "-d", "/tmp/x", "six"],
        backend="native", engine=engine_for("python-packages"), net=["python-packages"], timeout=120,
        env={"SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt", "PIP_CERT": "/etc/ssl/certs/ca-certificates.crt"},
    )  # fmt: skip
    assert result.ok, result.stderr + str(result.denied)
    assert "Saved" in result.stdout
    assert not result.denied


async def test_npm_asks_through_the_proxy_what_npm_is_configured_for() -> None:
    if not shutil.which("npm"):
        pytest.skip("NOT SHOWN: npm is not installed here")
    asked = ["npm", "config", "get", "registry"]
    registry = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True, cwd="/").stdout.strip()
    result = await belljar.arun(
        command=["npm", "view", "left-pad", "version", f"--registry={registry}"],
        backend="native", engine=engine_for("javascript-packages"), net=["javascript-packages"], timeout=120,
        memory="1G", env={"NODE_EXTRA_CA_CERTS": "/etc/ssl/certs/ca-certificates.crt"},
    )  # fmt: skip
    assert result.ok, result.stderr + str(result.denied)
    assert result.stdout.strip()[0].isdigit()
