"""What the tests of images share: Belljar's images on the tests' own dockerd, and a real registry on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from belljar.images import Images
from belljar.settings import load
from conftest import eventually
from engines import engines

_REGISTRY = """version: 0.1
storage: {{filesystem: {{rootdirectory: {folder}}}, delete: {{enabled: true}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def docker_socket() -> str:
    found = engines()
    if "docker" not in found.sockets:
        pytest.skip(f"NOTHING about images was checked on a real engine: {found.missing.get('docker')}")
    return found.sockets["docker"]


class Registry:
    """Debian's docker-registry, with its files where a test can damage them."""

    def __init__(self, folder: Path) -> None:
        self.port, self.files = free_port(), folder / "files"
        config = folder / "registry.yml"
        config.write_text(_REGISTRY.format(folder=self.files, port=self.port))
        self.log = (folder / "log").open("wb")
        self.process = subprocess.Popen(["docker-registry", "serve", str(config)], stdout=self.log, stderr=self.log)
        assert eventually(self.answers, 30), "the registry did not start"

    def answers(self) -> bool:
        with closing(socket.socket()) as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def name(self, image: str) -> str:
        return f"127.0.0.1:{self.port}/{image}"

    def blob(self, digest: str) -> Path:
        return self.files / "docker/registry/v2/blobs/sha256" / digest[7:9] / digest[7:] / "data"


@contextmanager
def serving(folder: Path) -> Iterator[Registry]:
    if shutil.which("docker-registry") is None:
        pytest.skip("NOTHING about registries was checked: apt install docker-registry")
    found = Registry(folder)
    try:
        yield found
    finally:
        found.process.terminate()
        found.process.wait(timeout=20)
        found.log.close()


class Bench:
    """Images with settings of their own, and the docker command line for what Belljar does not do."""

    def __init__(self, docker_socket: str, folder: Path) -> None:
        self.socket, self.folder = docker_socket, folder
        self.lock_file = folder / "belljar.images.lock"

    def images(self, **rules: Any) -> Images:
        settings = load(
            {"HOME": str(self.folder)}, self.folder, docker_socket=self.socket, images=rules,
            cache_dir=str(self.folder / "cache"),
        )  # fmt: skip
        return Images(settings, lock_file=self.lock_file)

    def docker(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(
            ["docker", "-H", f"unix://{self.socket}", *words], capture_output=True, text=True, timeout=120, check=False
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout.strip()

    def has(self, name: str) -> bool:
        return bool(self.docker("images", "-q", "--no-trunc", name))

    def project(self, dockerfile: str, **files: bytes) -> Path:
        folder = self.folder / f"project-{time.monotonic_ns()}"
        folder.mkdir()
        (folder / "Dockerfile").write_text(dockerfile)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return folder

    async def publish(self, name: str, content: bytes) -> str:
        """A new image in the registry and nowhere else; returns its digest."""
        report = await self.images().build(self.project("FROM scratch\nCOPY data /\n", data=content), name)
        assert report.ok, report
        self.docker("push", "-q", name)
        digest = self.docker("inspect", "-f", "{{index .RepoDigests 0}}", name).partition("@")[2]
        self.docker("rmi", "-f", report.id)
        assert not self.has(name)
        return digest

    def program(self, name: str, script: str) -> tuple[str, str]:
        """An executable script, and its sha256."""
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path), hashlib.sha256(path.read_bytes()).hexdigest()


_KIND = "application/vnd.docker.distribution.manifest.v2+json"
_LAYER = f"sha256:{'1' * 64}"
_ROOTFS = {"type": "layers", "diff_ids": [_LAYER]}
_CONFIG = json.dumps({"architecture": "amd64", "os": "linux", "config": {}, "rootfs": _ROOTFS}).encode()


def _manifest() -> bytes:
    config: dict[str, Any] = {"digest": f"sha256:{hashlib.sha256(_CONFIG).hexdigest()}", "size": len(_CONFIG)}
    layer = {"digest": _LAYER, "size": 10**6, "mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip"}
    config["mediaType"] = "application/vnd.docker.container.image.v1+json"
    return json.dumps({"schemaVersion": 2, "mediaType": _KIND, "config": config, "layers": [layer]}).encode()


async def half_a_registry(stream: Any) -> None:
    """Answers for the manifest as a registry does; of the layer it sends the first bytes, and then nothing."""
    body = _manifest()
    head = f"HTTP/1.1 200 OK\r\nDocker-Content-Digest: sha256:{hashlib.sha256(body).hexdigest()}\r\n"
    with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
        async with stream:
            while (data := await stream.receive()).startswith((b"GET ", b"HEAD ")):  # TLS is tried first: hung up on
                path = data.split(b" ")[1].decode()
                if _LAYER in path:
                    await stream.send(f"{head}Content-Length: 1000000\r\n\r\n".encode() + b"x" * 1000)
                    await anyio.sleep_forever()
                content = b"" if path == "/v2/" else _CONFIG if "/blobs/" in path else body
                sent = b"" if data.startswith(b"HEAD") else content
                facts = f"Content-Type: {_KIND}\r\nContent-Length: {len(content)}\r\n\r\n"
                await stream.send((head + facts).encode() + sent)


def belljar(bench: Bench, *words: str, stderr: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "DOCKER_SOCKET_PATH": bench.socket, "HOME": str(bench.folder), "COLUMNS": "200",
           "XDG_CACHE_HOME": "", "XDG_CONFIG_HOME": ""}  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "belljar", "images", *words], stdout=subprocess.PIPE, stderr=stderr, text=True,
        timeout=120, env=env, cwd=bench.folder, check=False,
    )  # fmt: skip
