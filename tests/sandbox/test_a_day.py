"""A day in the life of a coding agent's sandbox: clone, install, test, serve, edit, reload, snapshot, fork, go on."""

from __future__ import annotations

import io
import subprocess
import zipfile
from pathlib import Path

import pytest

import belljar
from belljar.core.result import Result
from belljar.engine.engine import Engine
from engines import FLAVOURS, engines

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
SECONDS = 120.0  # that a step may take on a busy machine

SERVER = """
import http.server, os, sys, threading, time

def fingerprint():
    return os.stat("greet.py").st_mtime_ns

def reload_when_edited(begun):
    while fingerprint() == begun:
        time.sleep(0.05)
    print("reloading", flush=True)
    os.execv(sys.executable, [sys.executable, *sys.argv])

threading.Thread(target=reload_when_edited, args=(fingerprint(),), daemon=True).start()
import greet

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(greet.greeting().encode())

http.server.ThreadingHTTPServer.allow_reuse_address = True
http.server.ThreadingHTTPServer(("127.0.0.1", 3000), Answer).serve_forever()
"""
GREET = "import loud\n\ndef greeting():\n    return loud.louder('hello')\n"
TEST = """
import unittest
import greet

class Test(unittest.TestCase):
    def test_it_is_loud(self):
        self.assertEqual(greet.greeting(), "HELLO")
"""
CURL = """
import time, urllib.request
deadline = time.monotonic() + 60
while True:
    try:
        print(urllib.request.urlopen("http://127.0.0.1:3000/", timeout=30).read().decode())
        break
    except OSError:  # the server is about to start, or to start again
        if time.monotonic() > deadline:
            raise
        time.sleep(0.05)
"""


def wheel(name: str, source: str) -> bytes:
    """A package as pip takes it."""
    packed = io.BytesIO()
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(f"{name}.py", source)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return packed.getvalue()


@pytest.fixture
def things(tmp_path: Path) -> Path:
    """A repository and an index of packages, as folders of this machine."""
    work = tmp_path / "work"
    work.mkdir()
    for name, text in {"serve.py": SERVER, "greet.py": GREET, "test_greet.py": TEST}.items():
        (work / name).write_text(text)
    for words in (
        ["init", "-q", "-b", "main"], ["add", "-A"],
        ["-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "first"],
        ["clone", "-q", "--bare", str(work), str(tmp_path / "things" / "app.git")],
    ):  # fmt: skip
        subprocess.run(["git", "-C", str(work), *words], check=True, capture_output=True)
    index = tmp_path / "things" / "simple" / "loud"
    index.mkdir(parents=True)
    (index / "loud-1.0-py3-none-any.whl").write_bytes(wheel("loud", "def louder(text):\n    return text.upper()\n"))
    return tmp_path / "things"


def did(result: Result) -> str:
    assert result.ok, f"{result.status}: {result.stdout} {result.stderr} {result.error}"
    return result.stdout.strip()


def sh(box: belljar.Sandbox, line: str) -> str:
    return did(box.exec(["sh", "-c", line], timeout=SECONDS))


def curl(box: belljar.Sandbox) -> str:
    return did(box.exec(["python3", "-c", CURL], timeout=SECONDS))


def served(box: belljar.Sandbox) -> belljar.Process:
    server = box.start(["python3", "serve.py"], cwd="/workspace/app")
    box.wait_for_port(3000, timeout=SECONDS)
    return server


def a_day(backend: str, engine: Engine, things: Path) -> None:
    with belljar.Sandbox(backend=backend, engine=engine, living=True) as box:
        box.files.upload(things, "~/things")
        sh(box, "git clone -q ~/things/app.git app")
        sh(box, "git config --global user.name agent && git config --global user.email agent@example.org")
        index = box.start(["python3", "-m", "http.server", "8080", "--bind", "127.0.0.1"], cwd="~/things")
        box.wait_for_port(8080, timeout=SECONDS)
        install = (
            "python3 -m pip install -q --user --disable-pip-version-check --index-url http://127.0.0.1:8080/simple/"
        )
        sh(box, f"{install} loud")
        index.kill()
        assert "OK" in did_test(box)

        server = served(box)
        assert curl(box) == "HELLO"
        edited = box.files.read_text("app/greet.py").replace("'hello'", "'goodbye'")
        box.files.write("app/greet.py", edited)
        heard = (chunk.text for chunk in server.output())
        assert any("reloading" in text for text in heard)
        assert curl(box) == "GOODBYE"
        sh(box, "cd app && git commit -qam 'say goodbye'")

        snapshot = box.snapshot()
        try:
            with box.fork() as left, box.fork() as right:
                assert [one.processes() for one in (left, right)] == [(), ()], "a fork has files and no processes"
                sh(left, "echo \"def greeting(): return 'LEFT'\" > app/greet.py")
                for one in (left, right):
                    served(one)
                assert (curl(left), curl(right), curl(box)) == ("LEFT", "GOODBYE", "GOODBYE")
                left.close()
                sh(right, "cd app && echo '# more' >> greet.py && git commit -qam 'go on'")
                assert sh(right, "cd app && git log --format=%s") == "go on\nsay goodbye\nfirst"
            assert curl(box) == "GOODBYE"
            assert server.running
            with belljar.Sandbox(backend=backend, engine=engine, snapshot=snapshot) as tomorrow:
                assert sh(tomorrow, "cd app && git log --format=%s") == "say goodbye\nfirst"
                assert did(tomorrow.exec(["python3", "-c", "import loud; print(loud.louder('x'))"])) == "X"
        finally:
            belljar.remove_snapshot(snapshot.id, engine=engine)


def did_test(box: belljar.Sandbox) -> str:
    result = box.exec(["python3", "-m", "unittest", "-q"], workdir="/workspace/app", timeout=SECONDS)
    assert result.ok, result.stderr
    return result.stderr


def test_a_day_on_native(things: Path) -> None:
    engine = Engine()
    offer = belljar.list_backends(engine=engine)
    native = next(one for one in offer if one.backend == "native")
    if not native.available:
        pytest.skip(f"NOT SHOWN: native does not work here: {native.why_not} (fix: {native.fix})")
    a_day("native", engine, things)


@pytest.mark.containers
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_day_in_a_container(flavour: str, things: Path) -> None:
    engine = engines().engine(flavour)
    offer = next(one for one in belljar.list_backends(engine=engine) if one.backend == engine.settings.backend)
    if not offer.living:
        pytest.skip(f"NOT SHOWN: {flavour} has no living sandboxes")
    a_day(engine.settings.backend, engine, things)
