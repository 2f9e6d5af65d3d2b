"""The image of the service, built on the tests' engine, and started as Compose would start it.

No registry of images is asked: the base is the tests' own, and packages come from a folder of wheels.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from engines import IMAGE
from image_engine import socket_of
from witness import eventually

pytestmark = [pytest.mark.engine, pytest.mark.containers]
ROOT = Path(__file__).parents[2]
SERVICE = "belljar-test/service:latest"
COMPOSE = yaml.safe_load((ROOT / "deploy" / "docker-compose.yml").read_text())["services"]
WALLS = ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
ASK = """
import json, sys, urllib.request as u
path, key, body = sys.argv[1:]
asked = u.Request(f"http://127.0.0.1:8080{path}", body.encode() or None, {"Content-Type": "application/json"})
asked.add_header("X-API-Key", key)
print(u.urlopen(asked, timeout=60).read().decode())
"""
Docker = Callable[..., str]


def wheelhouse() -> Path:
    """Our own wheel, fresh, and those of others, fetched once."""
    text = (ROOT / "pyproject.toml").read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "belljar-tests"
    folder = cache / f"wheels-{hashlib.sha256(text).hexdigest()[:16]}"
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check"]
    if not folder.exists():
        draft = Path(tempfile.mkdtemp(prefix="wheels-", dir=cache))
        # Of the last, older patch releases of Python need one more package than this one may.
        line = [*pip, "-w", str(draft), f"{ROOT}[docker,nats,postgres,redis]", "async-timeout"]
        done = subprocess.run(line, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode:
            shutil.rmtree(draft)
            pytest.skip(f"NOTHING of the image was checked: its packages cannot be had: {done.stderr[-300:]}")
        draft.rename(folder)
    for old in folder.glob("belljar-*"):
        old.unlink()
    subprocess.run([*pip, "--no-deps", "-w", str(folder), str(ROOT)], timeout=300, check=True)
    return folder


@pytest.fixture(scope="module")
def docker() -> Iterator[Docker]:
    """Docker's command line on the tests' engine, with the image built and everything gone afterwards."""
    path = socket_of("docker")

    def call(*words: str, check: bool = True) -> str:
        line = ["docker", "-H", f"unix://{path}", *words]
        env = {**os.environ, "DOCKER_BUILDKIT": "0"}
        done = subprocess.run(line, capture_output=True, text=True, timeout=900, env=env, check=False)
        assert not check or done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
        return done.stdout.strip()

    with tempfile.TemporaryDirectory(prefix="bj-context-") as context:
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, context)
        for name in ("src", "images"):
            shutil.copytree(ROOT / name, f"{context}/{name}", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(wheelhouse(), f"{context}/deploy/wheelhouse")
        dockerfile = str(ROOT / "deploy" / "Dockerfile")
        call(
            "build", "-q", "--network", "none", "-f", dockerfile, "--build-arg", f"BASE={IMAGE}", "-t", SERVICE, context
        )
    try:
        yield call
    finally:
        for name in ("bj-service", "bj-proxy"):
            call("rm", "-f", name, check=False)
        for name in ("bj-records", "bj-engine"):
            call("volume", "rm", "-f", name, check=False)
        call("rmi", "-f", SERVICE, check=False)


def start(docker: Docker, name: str, *words: str) -> None:
    tmp = "/tmp:rw,nosuid,nodev,size=1g,mode=1777"
    docker("run", "-d", "--name", name, "--network", "none", "--tmpfs", tmp, *WALLS, *words)


def test_the_image_has_no_root_no_package_manager_and_nothing_setuid(docker: Docker) -> None:
    look = (
        "id -u; for name in pip pip3 apt dpkg gcc cc make; do command -v $name; done; "
        "find / -xdev -perm /6000 -type f 2>/dev/null; touch /opt/x 2>/dev/null && echo writable; echo end"
    )
    said = docker("run", "--rm", "--network", "none", *WALLS, "--entrypoint", "sh", SERVICE, "-c", look)
    assert said.splitlines() == ["10001", "end"]


def test_it_refuses_to_listen_to_everybody_before_there_is_a_key(docker: Docker) -> None:
    said = docker("run", "--rm", "--network", "none", *WALLS, "--tmpfs", "/tmp", SERVICE, "serve", check=False)
    assert "serves on" not in said


def test_behind_the_proxy_it_runs_a_snippet_in_a_container_beside_it(docker: Docker) -> None:
    """As in Compose: read-only, without root, the engine's socket only at the proxy."""
    records, engine = ["-v", "bj-records:/var/lib/belljar"], "bj-engine:/run/belljar"
    real = socket_of("docker")
    group = str(os.stat(real).st_gid)
    start(docker, "bj-proxy", "-u", COMPOSE["engine-proxy"]["user"], "--group-add", group, "-v", engine,
          "-v", f"{real}:/var/run/docker.sock", SERVICE, *COMPOSE["engine-proxy"]["command"])  # fmt: skip
    *program, check = COMPOSE["engine-proxy"]["healthcheck"]["test"][1:]

    def healthy() -> bool:
        return docker("exec", "bj-proxy", *program, f"{check}\nprint('fine')", check=False) == "fine"

    assert eventually(healthy, 30), docker("logs", "bj-proxy", check=False)
    key = docker("run", "--rm", "--network", "none", "--tmpfs", "/tmp", *WALLS, *records, SERVICE,
                 "keys", "create", "me", "--scope", "run").split()[-1]  # fmt: skip
    env = {"BELLJAR_BACKEND": "docker", "DOCKER_HOST": "unix:///run/belljar/docker.sock", "BELLJAR_IMAGE": IMAGE}
    start(docker, "bj-service", *records, "-v", f"{engine}:ro",
          *(word for name, value in env.items() for word in ("-e", f"{name}={value}")), SERVICE)  # fmt: skip

    def ask(path: str, body: str = "") -> str:
        return docker("exec", "bj-service", "python3", "-S", "-c", ASK, path, key, body, check=not body)

    def alive() -> bool:
        return "alive" in docker("exec", "bj-service", "python3", "-S", "-c", ASK, "/healthz", "", "", check=False)

    assert eventually(alive, 60), docker("logs", "bj-service", check=False)
    result = json.loads(ask("/api/sandbox/execute", json.dumps({"language": "python", "code": "print(6 * 7)"})))
    assert (result["stdout"], result["backend"]) == ("42\n", "docker"), docker("logs", "bj-proxy", check=False)
    docker("stop", "-t", "20", "bj-service")
    assert docker("inspect", "-f", "{{.State.ExitCode}}", "bj-service") == "0"
