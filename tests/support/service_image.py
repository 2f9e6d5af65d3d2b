"""The image of the service, built once, on a Docker with networks and a firewall in a network namespace of its own.

No registry of images is asked: the bases are made from Debian's packages, and ours come from a folder of wheels.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from belljar.backends.wasm.store import CompiledStore
from belljar.core import errors
from belljar.settings import load
from engines import IMAGE, install, served

ROOT = Path(__file__).parents[2]
SERVICE = "belljar:latest"
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "belljar-tests"
_ASK = """
import json, sys, urllib.error, urllib.request as u
path, key, body = sys.argv[1:]
asked = u.Request(f"http://127.0.0.1:8080{path}", body.encode() or None, {"Content-Type": "application/json"})
if key:
    asked.add_header("X-API-Key", key)
try:
    print(u.urlopen(asked, timeout=60).read().decode())
except urllib.error.HTTPError as error:
    print(error.read().decode())
"""


class Host(NamedTuple):
    """A machine of its own to all that is in its network: its Docker, and the folder that an image is built from."""

    socket: str
    context: Path
    namespace: str

    def docker(self, *words: str, check: bool = True) -> str:
        line = ["docker", "-H", f"unix://{self.socket}", *words]
        env = {**os.environ, "DOCKER_BUILDKIT": "0"}
        done = subprocess.run(line, capture_output=True, text=True, timeout=900, env=env, check=False)
        assert not check or done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
        return done.stdout.strip()

    def shell(self, *words: str) -> str:
        """A program in the host's network; what it said, or nothing if it failed."""
        line = ["nsenter", f"--net={self.namespace}", *words]
        return subprocess.run(line, stdout=subprocess.PIPE, text=True, timeout=120, check=False).stdout.strip()

    def ask(self, path: str, key: str = "", **body: Any) -> str:
        """What the service answers, on the host's port 8080."""
        return self.shell(sys.executable, "-S", "-c", _ASK, path, key, json.dumps(body) if body else "")

    def ask_inside(self, container: str, path: str, key: str = "", **body: Any) -> str:
        """The same from within a container that has no network."""
        line = ["python3", "-S", "-c", _ASK, path, key, json.dumps(body) if body else ""]
        return self.docker("exec", container, *line, check=False)


@cache
def host() -> Host:
    """Of this test process; the first call starts it and builds the image."""
    install()
    stack = ExitStack()
    atexit.register(stack.close)
    found = stack.enter_context(served("networks"))
    if why := found.missing.get("docker"):
        pytest.skip(f"NOTHING of the service's image was checked: {why}")
    context = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bj-context-")))
    _fill(context)
    pid = (found.folder / "docker" / "pid").read_text()
    here = Host(found.sockets["docker"], context, f"/proc/{pid}/ns/net")
    dockerfile = str(context / "deploy" / "Dockerfile")
    here.docker("build", "-q", "-f", dockerfile, "--build-arg", f"BASE={IMAGE}", "-t", SERVICE, str(context))
    return here


def _fill(context: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, context)
    for name in ("src", "images", "deploy"):
        shutil.copytree(ROOT / name, context / name, ignore=shutil.ignore_patterns("__pycache__", "wheelhouse"))
    shutil.copytree(_wheelhouse(), context / "deploy" / "wheelhouse")


def _wheelhouse() -> Path:
    """Our own wheel, fresh, and those of others, fetched once."""
    text = (ROOT / "pyproject.toml").read_bytes()
    folder = _CACHE / f"wheels-{hashlib.sha256(text).hexdigest()[:16]}"
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check"]
    if not folder.exists():
        draft = Path(tempfile.mkdtemp(prefix="wheels-", dir=_CACHE))
        # Of the last, older patch releases of Python need one more package than this one may.
        line = [*pip, "-w", str(draft), f"{ROOT}[docker,nats,postgres,redis]", "async-timeout"]
        done = subprocess.run(line, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode:
            shutil.rmtree(draft)
            pytest.skip(f"NOTHING of the image was checked: its packages cannot be had: {done.stderr[-300:]}")
        try:
            draft.rename(folder)
        except OSError:  # another test process was quicker
            shutil.rmtree(draft)
    for old in folder.glob("belljar_sandbox-*"):
        old.unlink()
    subprocess.run([*pip, "--no-deps", "-w", str(folder), str(ROOT)], timeout=300, check=True)
    return folder


def import_packages(here: Host, name: str, *packages: str, variant: str) -> None:
    """An image of Debian's packages, fetched once; `extract` is without the system around them."""
    tar = _CACHE / f"{variant}-{hashlib.sha256(' '.join(packages).encode()).hexdigest()[:16]}.tar"
    if not tar.exists():
        words = ["mmdebstrap", "--quiet", "--format=tar", f"--variant={variant}", f"--include={','.join(packages)}"]
        release = platform.freedesktop_os_release().get("VERSION_CODENAME", "bookworm")
        with tempfile.TemporaryDirectory(prefix="packages-", dir=_CACHE) as draft:
            line = [*words, release, f"{draft}/tar"]
            done = subprocess.run(line, capture_output=True, text=True, timeout=600, check=False)
            if done.returncode:
                pytest.skip(f"NOTHING of {name} was checked: its packages cannot be had: {done.stderr[-300:]}")
            os.rename(f"{draft}/tar", tar)
    here.docker("import", str(tar), name)


def lay_in(cache: Path, uid: int, gid: int) -> None:
    """The interpreters that this machine has compiled already, as that user's; else they are compiled when needed."""
    store = CompiledStore.of(load().cache_dir)
    try:
        store.check()
    except errors.NotAvailable:
        return
    shutil.copytree(store.folder, cache / "belljar" / store.folder.name)
    for path in (cache, *cache.rglob("*")):
        os.chown(path, uid, gid)
        path.chmod(0o700 if path.is_dir() else 0o600)
