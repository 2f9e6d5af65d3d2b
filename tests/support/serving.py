"""A real `belljar serve` in a process of its own, with folders of its own: `with served() as server: server.url`."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

START_SECONDS = 30.0
_OURS = ("BELLJAR_", "SANDBOX_")
_FOREIGN = frozenset(("MAX_CONTAINERS", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"))


class Server:
    """One service. It can be stopped (SIGTERM), killed and started again: on the same port, with the same records."""

    def __init__(self, folder: Path, environ: Mapping[str, str], config: str) -> None:
        self.folder = folder
        self.data_dir = folder / "data"
        self.state_dir = folder / "state"
        self.url = ""
        self.environ = environ
        self._port = 0
        self._environ = _environment(folder, environ)
        self._process: subprocess.Popen[bytes] | None = None
        if config:
            place = folder / "config" / "belljar"
            place.mkdir(parents=True)
            (place / "config.toml").write_text(config)

    @property
    def pid(self) -> int:
        assert self._process is not None, "it is not running"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """All that it wrote to stderr, over all of its lives."""
        path = self.folder / "stderr"
        return path.read_text("utf-8", "replace") if path.exists() else ""

    def start(self) -> None:
        command = [sys.executable, "-m", "belljar", "serve", "--port", str(self._port), "--json"]
        with (self.folder / "stderr").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=self._environ,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.url = json.loads(self._first_line())["url"]
        self._port = urlsplit(self.url).port or 0

    def _first_line(self) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        heard: queue.Queue[bytes] = queue.Queue()
        stream = self._process.stdout

        def listen() -> None:
            with stream:
                for line in stream:
                    heard.put(line)
            heard.put(b"")

        threading.Thread(target=listen, daemon=True).start()
        try:
            line = heard.get(timeout=START_SECONDS)
        except queue.Empty:
            line = b""
        if not line:
            self.kill()
            raise AssertionError(f"the service did not start; it said:\n{self.log}")
        return line

    def stop(self, seconds: float = 60.0) -> int:
        """SIGTERM, and what it ended with."""
        return self._end(signal.SIGTERM, seconds)

    def kill(self) -> int:
        """SIGKILL: it has no time to clean anything up."""
        return self._end(signal.SIGKILL, 10.0)

    def _end(self, number: signal.Signals, seconds: float) -> int:
        process = self._process
        assert process is not None, "it is not running"
        if process.poll() is None:
            process.send_signal(number)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
            raise AssertionError(f"the service did not end within {seconds:g} s; it said:\n{self.log}") from None

    def restart(self, *, kill: bool = False) -> None:
        self.kill() if kill else self.stop()
        self.start()

    def belljar(self, *words: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
        """A command with the same settings as this service: `server.belljar("keys", "create", "ci", ...)`."""
        command = [sys.executable, "-m", "belljar", *words]
        return subprocess.run(
            command, env=self._environ, cwd=self.folder, text=True, capture_output=True, timeout=seconds, check=False
        )


def _environment(folder: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """Ours without the settings of whoever runs the tests. The cache stays theirs: compiling takes a minute."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(_OURS) and k not in _FOREIGN}
    own = {
        "BELLJAR_DATA_DIR": str(folder / "data"), "BELLJAR_STATE_DIR": str(folder / "state"),
        "XDG_CONFIG_HOME": str(folder / "config"), "XDG_DATA_HOME": str(folder / "share"),
    }  # fmt: skip
    return clean | own | dict(extra)


@contextmanager
def served(*, config: str = "", start: bool = True, **environ: str) -> Iterator[Server]:
    """`served(MAX_CONTAINERS="2", config='[service]\\nqueue = 3')`: variables, and a config.toml for the rest.

    `start=False`: for what has to be there before it runs, such as keys; `server.start()` then.
    """
    folder = Path(tempfile.mkdtemp(prefix="belljar-served-"))
    folder.chmod(0o711)  # a guest's uid has to pass on the way to the state folder
    server = Server(folder, environ, config)
    try:
        if start:
            server.start()
        yield server
    finally:
        try:
            if server.running:
                server.stop()
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def posted(server: Server, path: str, body: dict[str, object], **headers: str) -> Iterator[None]:
    """A request whose answer nobody reads, and nobody waits for when the block is left."""
    content = json.dumps(body).encode()
    port = int(server.url.rpartition(":")[2])
    told = {"Host": f"127.0.0.1:{port}", "Content-Type": "application/json", "Content-Length": str(len(content))}
    head = "".join(f"{name}: {value}\r\n" for name, value in (told | headers).items())
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content)
        yield
