"""Previews over HTTP: a real server in a real sandbox, seen through the proxy as a browser would see it."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from boxes import OpenBox
from serving import Server, served
from watching import Refused, Watcher
from witness import eventually

pytestmark = pytest.mark.engine

APP = Path(__file__).parents[1] / "support/fixtures/preview/app.py"
ROUTE = "/api/sandbox/preview"
_MIB = 1 << 20


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("projects")
    folder.chmod(0o755)
    project = folder / "app"
    project.mkdir(mode=0o755)
    shutil.copy(APP, project / "app.py")
    (project / "hello.txt").write_text("hello")
    return folder


@pytest.fixture(scope="module")
def backend() -> Iterator[str]:
    """A program outside that answers `/api` of previews."""
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"path": self.path, "headers": dict(self.headers)}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(10)


@pytest.fixture(scope="module")
def server(projects: Path, backend: str) -> Iterator[Server]:
    config = (
        f'[service]\nprojects = ["{projects}"]\nrate = "100000/minute"\n'
        f'[service.preview]\nbackends = ["{backend}"]\nframes = ["https://console.example.org"]\n'
    )
    with served(MAX_CONTAINERS="16", config=config) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client


class Seen:
    """A preview as whoever has its address sees it."""

    def __init__(self, http: httpx2.Client, told: dict[str, Any]) -> None:
        self.http = http
        self.told = told
        self.id: str = told["container_id"]
        self.host: str = urlsplit(told["url"]).netloc

    def get(self, path: str, **headers: str) -> httpx2.Response:
        return self.http.get(path, headers={"host": self.host} | headers)

    def now(self) -> dict[str, Any]:
        told: dict[str, Any] = self.http.get(f"{ROUTE}/{self.id}").json()
        return told


def start(http: httpx2.Client, projects: Path, **body: Any) -> Seen:
    asked = {"project_path": str(projects / "app"), "command": "python3 -u app.py", "backend": "native"} | body
    answer = http.post(ROUTE, json=asked)
    assert answer.status_code == 201, answer.text
    return Seen(http, answer.json())


@pytest.fixture(scope="module")
def seen(http: httpx2.Client, projects: Path, backend: str) -> Iterator[Seen]:
    found = start(http, projects, api=backend)
    assert found.told["status"] == "running", found.told
    yield found
    http.delete(f"{ROUTE}/{found.id}")


def test_a_preview_has_the_fields_of_the_specification_and_a_host_of_its_own(seen: Seen, server: Server) -> None:
    assert {"container_id", "url", "status", "logs"} <= seen.told.keys()
    assert seen.told["logs"] == ["starting"]
    assert seen.host.endswith(f".localhost:{urlsplit(server.url).port}") and seen.host.startswith(seen.id)
    assert len(seen.host.partition(".")[0]) <= 63
    told = seen.get("/any/path?x=%20y").json()
    assert (told["path"], told["headers"]["host"]) == ("/any/path?x=%20y", "localhost:3000")


def test_what_the_host_edits_is_seen_inside_and_what_the_guest_writes_is_not_seen_outside(
    http: httpx2.Client, projects: Path
) -> None:
    files = start(http, projects, command="echo mine > written.txt; python3 -m http.server 3000")
    assert files.get("/written.txt").text == "mine\n"
    (projects / "app/sub").mkdir()
    (projects / "app/sub/new.txt").write_text("new")
    assert eventually(lambda: files.get("/sub/new.txt").text == "new", 10)
    (projects / "app/hello.txt").write_text("edited")
    assert eventually(lambda: files.get("/hello.txt").text == "edited", 10)
    (projects / "app/sub/new.txt").unlink()
    assert eventually(lambda: files.get("/sub/new.txt").status_code == 404, 10)
    assert not (projects / "app/written.txt").exists()
    http.delete(f"{ROUTE}/{files.id}")


def test_ranges_events_and_other_methods_go_through(seen: Seen) -> None:
    answer = seen.get("/range", range="bytes=2-4")
    assert (answer.status_code, answer.text, answer.headers["content-range"]) == (206, "234", "bytes 2-4/10")
    heard = []
    with seen.http.stream("GET", "/events", headers={"host": seen.host}) as stream:
        for line in stream.iter_lines():
            heard.append(line)
            if len(heard) == 6:
                break
    assert [line for line in heard if line] == ["data: 0", "data: 1", "data: 2"]
    answer = seen.http.request("DELETE", "/thing", headers={"host": seen.host})
    assert answer.json()["method"] == "DELETE"


def test_bodies_of_any_size_go_both_ways_and_none_is_held(seen: Seen, server: Server) -> None:
    size, piece = 96 * _MIB, b"y" * _MIB
    before = _peak_kib(server.pid)
    answer = seen.http.post("/", content=(piece for _ in range(96)), headers={"host": seen.host})
    assert answer.json() == {"size": size, "sha256": hashlib.sha256(piece * 96).hexdigest()}
    got = 0
    with seen.http.stream("GET", f"/large?{size}", headers={"host": seen.host}) as stream:
        for data in stream.iter_bytes():
            got += len(data)
    assert got == size
    assert _peak_kib(server.pid) - before < 32 * 1024


def _peak_kib(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1])


def test_a_web_socket_goes_through_with_its_subprotocol_and_without_our_key(seen: Seen, server: Server) -> None:
    key = "bj_0123456789ab_" + "c" * 64
    headers = {"Host": seen.host, "Origin": f"http://{seen.host}", "Cookie": "mine=1", "Authorization": f"Bearer {key}"}
    with Watcher(server.url, "/socket?a=1", headers=headers, offer=["vite-hmr", f"bearer.{key}"]) as socket:
        assert socket.subprotocol == "vite-hmr"
        messages = socket.lines()
        asked = next(messages)
        assert asked["origin"] == "http://localhost:3000" and asked["cookie"] == "mine=1"
        assert key not in json.dumps(asked)


def test_a_redirect_a_cookie_and_a_service_worker_stay_inside(seen: Seen) -> None:
    answer = seen.get("/hostile")
    assert answer.headers["location"] == "/there"
    assert answer.headers["set-cookie"] == "a=1; Path=/"
    assert "service-worker-allowed" not in answer.headers and "strict-transport-security" not in answer.headers
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("frame-ancestors 'self' https://console.example.org ")
    below = seen.http.get(f"{seen.told['path_url']}hostile")
    assert below.headers["location"] == f"{seen.told['path_url']}there"
    assert "set-cookie" not in below.headers
    assert below.headers["content-security-policy"].startswith("sandbox ")
    assert "allow-same-origin" not in below.headers["content-security-policy"]


def test_a_previews_host_has_no_route_of_the_service_and_its_api_leads_to_the_named_backend(
    seen: Seen, backend: str
) -> None:
    for path in ("/healthz", "/readyz", "/metrics", "/mcp", "/docs", "/openapi.json", "/links/x"):
        assert seen.get(path).json()["path"] == path
    told = seen.get("/api/languages?x=1", cookie="mine=1").json()
    assert told["path"] == "/api/languages?x=1"
    assert told["headers"]["host"] == backend.removeprefix("http://")
    assert seen.get("/apiary").json()["headers"]["host"] == "localhost:3000"


def test_only_a_backend_that_the_administrator_listed_may_be_named(http: httpx2.Client, server: Server) -> None:
    for address in ("http://127.0.0.1:1", "http://169.254.169.254", server.url):
        answer = http.post(ROUTE, json={"command": "true", "api": address})
        assert (answer.status_code, answer.json()["context"]["setting"]) == (403, "service.preview.backends")


@pytest.mark.parametrize(
    "host",
    ["evil.localhost", "bs-0123456789abcdef-bb8-ffffffff-aaaaaaaaaaaaaaaaaaaaaaaaaa.localhost", "x.localhost.",
     "api.localhost:1"],
)  # fmt: skip
def test_a_host_that_nobody_signed_leads_nowhere(http: httpx2.Client, host: str) -> None:
    for path in ("/", "/api/languages", "/healthz"):
        answer = http.get(path, headers={"host": host})
        assert (answer.status_code, "There is no preview here" in answer.text) == (404, True)


def test_a_label_that_was_changed_leads_nowhere(seen: Seen) -> None:
    label, _, rest = seen.host.partition(".")
    id, port, until, signature = label.rsplit("-", 3)
    for forged in (
        f"{id}-{port}-{int(until, 16) + 1:x}-{signature}", f"{id}-16-{until}-{signature}",
        f"{id}-{port}-{until}-{signature[::-1]}", f"{id}-{port}-1-{signature}",
    ):  # fmt: skip
        assert seen.http.get("/", headers={"host": f"{forged}.{rest}"}).status_code == 404
        assert seen.http.get(f"/preview/{forged}/").status_code == 404


def test_a_page_of_a_preview_cannot_ask_the_service_for_anything(seen: Seen, http: httpx2.Client) -> None:
    for origin in (f"http://{seen.host}", "null"):
        for method, path in (("GET", "/api/languages"), ("POST", "/api/sandbox/execute"), ("GET", "/")):
            assert http.request(method, path, headers={"origin": origin}).status_code == 403


def test_a_server_that_cannot_start_says_why_and_what_to_do(http: httpx2.Client, projects: Path) -> None:
    failed = start(http, projects, command="node -e \"require('left-pad-2')\"")
    assert failed.told["status"] == "error"
    assert "ended with exit code 1 before anything listened on port 3000" in failed.told["reason"]
    assert "left-pad-2 is not installed" in failed.told["suggestion"]
    assert failed.told["findings"][0]["kind"] == "missing"
    answer = failed.get("/", accept="text/html")
    assert (answer.status_code, "left-pad-2" in answer.text) == (502, True)
    assert http.post(f"{ROUTE}/{failed.id}/extend", json={"seconds": 60}).status_code == 410


def test_while_it_starts_a_page_reloads_until_it_is_there(http: httpx2.Client, projects: Path) -> None:
    slow = start(http, projects, command="echo soon; sleep 1; exec python3 -u app.py", wait_seconds=0)
    assert slow.told["status"] == "starting"
    answer = slow.get("/", accept="text/html")
    assert answer.status_code == 503 and 'http-equiv="refresh"' in answer.text
    assert eventually(lambda: slow.now()["status"] == "running", 20)
    assert slow.get("/", accept="text/html").status_code == 200
    http.delete(f"{ROUTE}/{slow.id}")


def test_a_preview_that_dies_while_it_streams_ends_the_stream_and_shows_its_last_words(
    http: httpx2.Client, projects: Path
) -> None:
    dying = start(http, projects)
    with pytest.raises(httpx2.RemoteProtocolError):
        dying.get("/die")
    assert eventually(lambda: dying.now()["status"] == "error", 20)
    told = dying.now()
    assert told["reason"] == "the command ended with exit code 3"
    page = dying.get("/", accept="text/html")
    assert page.status_code == 502
    assert "<script>" not in page.text and "&lt;script&gt;" in page.text


def test_a_preview_is_extended_within_its_cap_and_stopped_gracefully(http: httpx2.Client, projects: Path) -> None:
    trap = "trap 'echo bye > /tmp/bye; sleep 0.2; exit 0' TERM; python3 -u app.py & wait"
    mine = start(http, projects, command=["bash", "-c", trap])
    longer = http.post(f"{ROUTE}/{mine.id}/extend", json={"seconds": 7200}).json()
    assert longer["expires"] > mine.told["expires"]
    refused = http.post(f"{ROUTE}/{mine.id}/extend", json={"seconds": 9 * 3600})
    assert (refused.status_code, refused.json()["context"]["setting"]) == (403, "service.preview.lifetime")
    assert http.delete(f"{ROUTE}/{mine.id}").status_code == 204
    assert http.get(f"{ROUTE}/{mine.id}").status_code == 404
    assert mine.get("/").status_code == 404
    assert http.get(f"/api/sandboxes/{mine.id}").json()["state"] == "ended"


def test_answers_that_are_none_are_explained(seen: Seen) -> None:
    for path in ("/huge-head", "/no-http"):
        answer = seen.get(path, accept="text/html")
        assert (answer.status_code, "does not answer" in answer.text) == (502, True)


@pytest.mark.exhaustive("a thousand requests take ten seconds; each kind of them is in the tests above")
def test_a_thousand_requests_at_once_and_in_a_row_all_get_their_own_answer(seen: Seen) -> None:
    def ask(number: int) -> bool:
        return bool(seen.get(f"/n/{number}").json()["path"] == f"/n/{number}")

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(ask, range(1000)))


def test_a_port_of_a_living_sandbox_is_shown_by_a_link_that_ends(http: httpx2.Client, server: Server) -> None:
    box = OpenBox.opened(http, server.url)
    box.put("files/content", APP.read_bytes(), path="app.py")
    box.start("PORT=8000 exec python3 -u app.py")
    assert box.get("ports/8000/wait", timeout=30).json()["listening"]
    link = box.post("ports/8000/expose", {"seconds": 600}).json()
    shown = Seen(http, link | {"container_id": box.id})
    assert shown.get("/x").json()["headers"]["host"] == "localhost:8000"
    brief = Seen(http, box.post("ports/8000/expose", {"seconds": 0.01}).json() | {"container_id": box.id})
    assert eventually(lambda: brief.get("/x").status_code == 404, 10)
    box.delete()
    assert shown.get("/x").status_code == 404


def test_a_preview_is_its_callers_alone_ends_with_their_key_and_leaves_nothing_when_the_service_is_killed(
    projects: Path,
) -> None:
    with served(config=f'[service]\nprojects = ["{projects}"]\n', start=False) as server:
        made = [server.belljar("keys", "create", name, "--scope", "sessions", "--json") for name in ("one", "two")]
        keys = [json.loads(done.stdout) for done in made]
        server.start()
        with httpx2.Client(base_url=server.url, timeout=60) as http:
            mine, other = ({"authorization": f"Bearer {key['key']}"} for key in keys)
            body = {"project_path": str(projects / "app"), "command": "python3 -u app.py", "backend": "native"}
            told = http.post(ROUTE, json=body, headers=mine).json()
            shown = Seen(http, told)
            assert b"Bearer" not in shown.get("/x", **mine).content
            for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/extend")):
                asked = {"json": {"seconds": 60}} if method == "POST" else {}
                answer = http.request(method, f"{ROUTE}/{shown.id}{path}", headers=other, **asked)
                assert answer.status_code == 404
            assert server.belljar("keys", "revoke", keys[0]["id"]).returncode == 0
            assert eventually(lambda: shown.get("/x").status_code == 404, 10)
            mark = f"preview-mark-{time.time_ns()}"
            body["command"] = f"exec python3 -u app.py {mark}"
            shown = Seen(http, http.post(ROUTE, json=body, headers=other).json())
            assert shown.told["status"] == "running" and _processes_with(mark)
            with socket.create_connection(("127.0.0.1", urlsplit(server.url).port or 0)) as open_stream:
                open_stream.sendall(f"GET /events HTTP/1.1\r\nHost: {shown.host}\r\n\r\n".encode())
                assert b"200" in open_stream.recv(4096)
                server.kill()
        assert eventually(lambda: not _processes_with(mark), 20)


def _processes_with(mark: str) -> list[str]:
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in place.read_bytes():
                found.append(place.parent.name)
        except OSError:
            continue
    return found


def test_a_refused_web_socket_says_why(seen: Seen, server: Server) -> None:
    with pytest.raises(Refused) as caught:
        Watcher(server.url, "/large?10", headers={"Host": "nobody.localhost"})
    assert caught.value.status == 404
