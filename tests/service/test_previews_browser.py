"""Previews in a real browser: what a hostile page can reach from there, and what an honest one needs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from browsing import browser
from serving import Server, served

pytestmark = pytest.mark.engine

ROUTE = "/api/sandbox/preview"
_SECONDS = 60_000  # milliseconds that the browser is given for anything
# What a hostile page tries. Each attempt answers what it got: "no" where it got nothing.
_HOSTILE = """<!doctype html><title>hostile</title><h1>hostile</h1><script>
const api = new URLSearchParams(location.search).get("api");
const socket = api.replace("http", "ws");
const no = () => "no";
const opened = url => new Promise(done => {
  const one = new WebSocket(url);
  one.onopen = () => done("opened"); one.onerror = () => done("no");
});
const framed = url => new Promise(done => {
  const frame = document.createElement("iframe");
  frame.src = url;
  frame.onload = () => { try { done(frame.contentDocument.body.innerText || "no") } catch { done("no") } };
  document.body.append(frame);
});
const tries = {
  cookie: async () => document.cookie.includes("secret") ? document.cookie : "no",
  read: () => fetch(api + "/api/languages").then(r => r.text(), no),
  probe: () => fetch(api + "/readyz").then(r => r.text(), no),
  home: () => fetch(api + "/").then(r => r.text(), no),
  post: () => fetch(api + "/api/sandbox/execute", {method: "POST", body: '{"code": "print(1)"}',
    headers: {"content-type": "application/json"}}).then(r => r.text(), no),
  credentials: () => fetch(api + "/api/languages", {credentials: "include"}).then(r => r.text(), no),
  socket: () => opened(socket + "/api/events"),
  frame: () => framed(api + "/docs"),
  opener: async () => { try { return window.parent !== window ? parent.document.title : "no" } catch { return "no" } },
  worker: () => navigator.serviceWorker.register(api + "/sw.js", {scope: api + "/"}).then(() => "registered", no),
  domain: async () => { try { document.domain = "localhost"; return "changed" } catch { return "no" } },
  storage: async () => { try { localStorage.setItem("x", "1"); return "own" } catch { return "none" } },
  ownWorker: async () => { try { return await navigator.serviceWorker.register("/sub/sw.js", {scope: "/"})
    .then(() => "widened", no) } catch { return "no" } },
};
(async () => {
  const got = {};
  for (const [name, attempt] of Object.entries(tries)) {
    try { got[name] = await Promise.race([attempt(), new Promise(d => setTimeout(() => d("no"), 5000))]) }
    catch { got[name] = "no" }
  }
  window.got = got;
})();
</script>"""
_SERVER = """
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
class Handler(SimpleHTTPRequestHandler):
    def end_headers(self):
        self.send_header("Service-Worker-Allowed", "/")
        self.send_header("Set-Cookie", "service=guest; Domain=localhost; Path=/")
        super().end_headers()
ThreadingHTTPServer(("127.0.0.1", 3000), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("projects")
    folder.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def server(projects: Path) -> Iterator[Server]:
    with served(config=f'[service]\nprojects = ["{projects}"]\n') as server:
        yield server


@pytest.fixture
def open_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="belljar-preview-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    context = chromium.new_context()
    context.set_default_timeout(_SECONDS)
    yield context.new_page()
    context.close()


def started(server: Server, **body: Any) -> dict[str, Any]:
    answer = httpx2.post(server.url + ROUTE, json={"backend": "native", "wait_seconds": 60} | body, timeout=120)
    assert answer.status_code == 201, answer.text
    told: dict[str, Any] = answer.json()
    assert told.get("status") == "running", told
    return told


def test_a_hostile_preview_reaches_nothing_of_the_service_and_a_static_site_is_seen(
    server: Server, projects: Path, page: Any
) -> None:
    folder = projects / "hostile"
    folder.mkdir(mode=0o755)
    (folder / "index.html").write_text(_HOSTILE)
    (folder / "server.py").write_text(_SERVER)
    (folder / "sub").mkdir()
    (folder / "sub/sw.js").write_text("onfetch = event => event.respondWith(new Response('taken over'))")
    told = started(server, project_path=str(folder), command="python3 server.py")
    api = f"http://localhost:{urlsplit(server.url).port}"
    page.goto(f"{api}/")
    page.evaluate("document.cookie = 'service=secret'")  # as a console of the service might have one
    below = api + told["path_url"]
    for address, storage in ((told["url"], "own"), (below, "none")):
        page.goto(f"{address}?api={api}")
        assert page.inner_text("h1") == "hostile"
        page.wait_for_function("window.got")
        got = page.evaluate("window.got")
        assert got.pop("storage") == storage
        assert set(got.values()) == {"no"}, got
    page.goto(f"{api}/")
    assert page.evaluate("document.cookie") == "service=secret"  # the preview has not changed it
    assert page.evaluate("navigator.serviceWorker.getRegistrations().then(all => all.length)") == 0
    shown = page.evaluate(
        """url => new Promise(done => { const frame = document.createElement("iframe"); frame.src = url;
           frame.onload = () => { try { done(frame.contentDocument.title) } catch (error) { done(error.name) } };
           document.body.append(frame) })""",
        told["url"],
    )
    assert shown in (None, "SecurityError", "TypeError") or "hostile" not in str(shown)
    httpx2.delete(f"{server.url}{ROUTE}/{told['container_id']}", timeout=60)


_FASTAPI = """
from fastapi import FastAPI, WebSocket
from fastapi.responses import HTMLResponse
app = FastAPI()

@app.get("/")
def page():
    return HTMLResponse('<p></p><script>const s = new WebSocket(`ws://${location.host}/ws`);'
        's.onopen = () => s.send("hello");'
        's.onmessage = e => document.querySelector("p").textContent = e.data</script>')

@app.websocket("/ws")
async def echo(socket: WebSocket):
    await socket.accept()
    await socket.send_text("heard " + await socket.receive_text() + " from " + socket.headers["origin"])
    await socket.receive_text()
"""


@pytest.mark.exhaustive("pip fetches FastAPI first")
def test_a_fastapi_app_with_a_web_socket_is_seen_by_the_command(projects: Path, page: Any, open_folder: Path) -> None:
    environment = open_folder / "venv"  # of a Python that guests can read, in a place that they may enter
    subprocess.run(["/usr/bin/python3", "-m", "venv", str(environment)], check=True, timeout=120)
    fetched = ["fastapi", "uvicorn", "wsproto"]
    subprocess.run([str(environment / "bin/pip"), "install", "-q", *fetched], check=True, timeout=240)
    folder = projects / "fastapi"
    folder.mkdir(mode=0o755)
    (folder / "app.py").write_text(_FASTAPI)
    words = ["--packages", str(environment), "--json", "--", "python -m uvicorn app:app --port 3000"]
    command = [sys.executable, "-m", "belljar", "preview", str(folder), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            for line in running.stdout:
                told = json.loads(line)
                if told.get("status") != "starting":
                    break
            assert told.get("status") == "running", told
            page.goto(told["url"])
            page.wait_for_function("document.querySelector('p').textContent")
            assert page.inner_text("p") == "heard hello from http://localhost:3000"
        finally:
            running.terminate()
            running.wait(30)


@pytest.mark.exhaustive("npm fetches Vite first")
def test_a_vite_app_is_reloaded_hot_when_a_file_of_the_host_is_edited(
    server: Server, projects: Path, page: Any
) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("NOTHING of Vite was checked: apt install npm")
    folder = projects / "vite"
    folder.mkdir(mode=0o755)
    (folder / "package.json").write_text('{"private": true, "type": "module", "scripts": {"dev": "vite --port 3000"}}')
    (folder / "index.html").write_text('<div id="app"></div><script type="module" src="/main.js"></script>')
    (folder / "main.js").write_text(
        'import { text } from "./text.js";'
        'const show = t => document.querySelector("#app").textContent = t; show(text);'
        "window.loaded = (window.loaded || 0) + 1;"
        'import.meta.hot.accept("./text.js", fresh => show(fresh.text));'
    )
    (folder / "text.js").write_text('export const text = "before"')
    subprocess.run([npm, "install", "vite@7", "--no-audit", "--no-fund"], cwd=folder, check=True, timeout=240)
    told = started(server, project_path=str(folder), command="npm run dev", expires=600)
    page.goto(told["url"])
    page.wait_for_function("document.querySelector('#app').textContent == 'before'")
    (folder / "text.js").write_text('export const text = "after"')
    page.wait_for_function("document.querySelector('#app').textContent == 'after'")
    assert page.evaluate("window.loaded") == 1  # by hot reload, and not by loading the page again
    httpx2.delete(f"{server.url}{ROUTE}/{told['container_id']}", timeout=60)
