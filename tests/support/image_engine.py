"""What the tests of images share: Belljar's images on the tests' own dockerd and on a Podman, and a real registry on
loopback."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from belljar.host.engine_address import FLAVOURS, EngineAddress
from belljar.images.images import Images
from belljar.settings import load
from engines import IMAGE, SCRIPT, engines
from ports import free_port
from witness import eventually

TOOLCHAINS = "belljar-test/toolchains:latest"
_REGISTRY = """version: 0.1
storage: {{filesystem: {{rootdirectory: {folder}}}, delete: {{enabled: true}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


def socket_of(engine: str) -> str:
    found = engines()
    if engine not in found.sockets:
        pytest.skip(f"NOTHING about images was checked on a real {engine}: {found.missing.get(engine)}")
    return found.sockets[engine]


# Docker takes every registry on loopback for one without TLS; Podman has to be told.
_WITHOUT_TLS = '[[registry]]\nlocation = "127.0.0.1"\ninsecure = true\n'


@contextmanager
def podman_service() -> Iterator[str]:
    """A Podman with a storage of its own, that takes registries on loopback without TLS; its socket."""
    socket_of("podman")
    runtime = shutil.which("runc") or shutil.which("crun") or "runc"
    with tempfile.TemporaryDirectory(prefix="bj-pull-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "registries.conf").write_text(_WITHOUT_TLS)
        places = [word for place in ("root", "runroot", "tmpdir") for word in (f"--{place}", f"{folder}/{place}")]
        words = ["--cgroup-manager", "cgroupfs", "--events-backend", "file", "--runtime", runtime]
        env = {**os.environ, "CONTAINERS_REGISTRIES_CONF": str(folder / "registries.conf"), "GOGC": "400"}
        with (folder / "log").open("wb") as log:
            service = subprocess.Popen(
                ["podman", *places, *words, "system", "service", "--time=0", f"unix://{folder}/socket"],
                env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
            try:
                assert eventually((folder / "socket").exists, 30), (folder / "log").read_text()
                yield str(folder / "socket")
            finally:
                service.terminate()
                service.wait(timeout=20)
                subprocess.run(["umount", "-l", f"{folder}/root/overlay"], capture_output=True, check=False)


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


def publish(name: str, content: bytes) -> str:
    """Puts an image of one file, `data`, into a registry by its own API, as a push does; returns its digest."""
    repository, _, tag = name.rpartition(":")
    registry, _, path = repository.partition("/")
    place = f"http://{registry}/v2/{path}"
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        entry = tarfile.TarInfo("data")
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    architecture = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    config = json.dumps({
        "architecture": architecture, "os": "linux", "config": {}, "created": "2026-01-01T00:00:00Z",
        "history": [{"created": "2026-01-01T00:00:00Z", "created_by": "COPY data /"}],
        "rootfs": {"type": "layers", "diff_ids": [_sha256(layer.getvalue())]},
    }).encode()  # fmt: skip
    packed = gzip.compress(layer.getvalue(), 1)
    for blob in (config, packed):
        where, _ = _ask("POST", f"{place}/blobs/uploads/")
        _ask("PUT", f"{where}&digest={_sha256(blob)}", blob, "application/octet-stream")
    manifest = _manifest(config, _sha256(packed), len(packed))
    _, digest = _ask("PUT", f"{place}/manifests/{tag}", manifest, _KIND)
    assert digest == _sha256(manifest)
    return digest


def _ask(method: str, url: str, data: bytes = b"", kind: str = "") -> tuple[str, str]:
    """The place and the digest that the registry answers with."""
    headers = {"Content-Type": kind} if kind else {}
    asked = urllib.request.Request(url, data=data, headers=headers, method=method)
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return str(answer.headers["Location"]), str(answer.headers["Docker-Content-Digest"])


def _sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


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


class ImageEngine:
    """Images with settings of their own on one engine, and its API by another hand (Docker's command line, which
    speaks to Podman too) for what Belljar does not do."""

    def __init__(self, socket: str, folder: Path, name: str = "docker") -> None:
        self.name, self.socket, self.folder = name, socket, folder
        self.lock_file = folder / "belljar.images.lock"

    @property
    def is_podman(self) -> bool:
        return self.name == "podman"

    def images(self, **rules: Any) -> Images:
        settings = load({"HOME": str(self.folder)}, self.folder, images=rules, cache_dir=str(self.folder / "cache"))
        return Images(settings, EngineAddress(FLAVOURS[self.name], f"unix://{self.socket}"), lock_file=self.lock_file)

    def docker(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(
            ["docker", "-H", f"unix://{self.socket}", *words], capture_output=True, text=True, timeout=120, check=False
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout.strip()

    def has(self, name: str) -> bool:
        return bool(self.docker("images", "-q", "--no-trunc", name))

    def contents(self, image: str) -> list[tarfile.TarInfo]:
        """Every file of an image, also where its user may not look."""
        container = self.docker("create", "--network", "none", image, "none")
        with tempfile.TemporaryFile() as archive:
            words = ["docker", "-H", f"unix://{self.socket}", "export", container]
            subprocess.run(words, stdout=archive, timeout=120, check=True)
            self.docker("rm", container)
            archive.seek(0)
            with tarfile.open(fileobj=archive) as tar:
                return tar.getmembers()

    def project(self, dockerfile: str, **files: bytes) -> Path:
        folder = self.folder / f"project-{time.monotonic_ns()}"
        folder.mkdir()
        (folder / "Dockerfile").write_text(dockerfile)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return folder

    async def publish(self, name: str, content: bytes) -> str:
        """A new image in the registry and nowhere else; returns its digest."""
        return await anyio.to_thread.run_sync(publish, name, content)

    async def local(self, tag: str) -> str:
        """Another image, which no registry has; returns its id."""
        report = await self.images().build(self.project("FROM scratch\nCOPY data /\n", data=os.urandom(9)), tag)
        assert report.ok, report
        return report.id

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


def _manifest(config: bytes, layer: str, size: int) -> bytes:
    """Of an image of one layer, which is told by its digest and size."""
    first = {
        "digest": _sha256(config), "size": len(config), "mediaType": "application/vnd.docker.container.image.v1+json",
    }  # fmt: skip
    second = {"digest": layer, "size": size, "mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip"}
    return json.dumps({"schemaVersion": 2, "mediaType": _KIND, "config": first, "layers": [second]}).encode()


async def half_a_registry(stream: Any) -> None:
    """Answers for the manifest as a registry does; of the layer it sends the first bytes, and then nothing."""
    body = _manifest(_CONFIG, _LAYER, 10**6)
    head = f"HTTP/1.1 200 OK\r\nDocker-Content-Digest: {_sha256(body)}\r\n"
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


def belljar(host: ImageEngine, *words: str, stderr: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ, "DOCKER_SOCKET_PATH": host.socket, "CONTAINER_HOST": host.socket, "HOME": str(host.folder),
        "COLUMNS": "200", "XDG_CACHE_HOME": "", "XDG_CONFIG_HOME": "",
    }  # fmt: skip
    engine = ["--engine", "podman"] if host.is_podman else []
    return subprocess.run(
        [sys.executable, "-m", "belljar", "images", *words, *engine], stdout=subprocess.PIPE, stderr=stderr, text=True,
        timeout=120, env=env, cwd=host.folder, check=False,
    )  # fmt: skip


def base_for(language: str, host: ImageEngine) -> str:
    """The tests' own base; for compilers another one made like it, from Debian's packages, once per machine."""
    if language not in ("go", "rust"):
        return IMAGE
    if host.has(TOOLCHAINS):
        return TOOLCHAINS
    done = subprocess.run(["sh", SCRIPT, "toolchains"], capture_output=True, text=True, timeout=900, check=False)
    if done.returncode != 0:
        pytest.skip(f"the {language} image was NOT built, its base cannot be made: {done.stderr[-300:]}")
    host.docker("import", done.stdout.strip(), TOOLCHAINS)
    return TOOLCHAINS
