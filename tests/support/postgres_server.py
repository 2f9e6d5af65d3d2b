"""A real PostgreSQL for the tests: its own folder, its own socket, no port, gone with the test.

PostgreSQL refuses to run as root, so as root it is started as the user `postgres`, or `nobody`.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from witness import eventually

_PROGRAMS = Path("/usr/lib/postgresql")


def programs() -> Path | None:
    """The folder with `postgres` and `initdb` in it; Debian keeps them out of the PATH."""
    for folder in sorted(_PROGRAMS.glob("*/bin"), reverse=True):
        if (folder / "initdb").exists():
            return folder
    found = shutil.which("initdb")
    return Path(found).resolve().parent if found else None


class PostgresServer:
    def __init__(self, programs: Path, folder: Path, user: dict[str, Any]) -> None:
        self._programs, self._folder, self._user = programs, folder, user
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = 0

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def create(self) -> None:
        line = [
            self._programs / "initdb",
            "-D",
            self._folder / "data",
            "-U",
            "belljar",
            "-A",
            "trust",
            "-N",
            "-E",
            "UTF8",
        ]
        subprocess.run([*line, "--locale=C"], check=True, stdout=subprocess.DEVNULL, cwd="/", timeout=60, **self._user)

    def start(self) -> None:
        options = ["-c", "listen_addresses=", "-c", f"unix_socket_directories={self._folder}", "-c", "fsync=off"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", self._folder / "data", *options],
                stdout=log, stderr=log, cwd="/", **self._user,
            )  # fmt: skip
        assert eventually(self._answers, 30), (self._folder / "log").read_text()

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None, (self._folder / "log").read_text()
        return self.sql("SELECT 1", check=False) == "1"

    def kill(self) -> None:
        """As a crash does: at once, with all that belongs to it."""
        assert self._process is not None
        children = _children(self._process.pid)
        for pid in (self._process.pid, *children):  # the first of them would only start the others again
            _kill(pid)
        self._process.wait(10)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()

    def sql(self, statement: str, database: str = "postgres", *, check: bool = True) -> str:
        line = [self._programs / "psql", "-h", self._folder, "-U", "belljar", "-d", database, "-XAtqc", statement]
        done = subprocess.run(line, capture_output=True, text=True, cwd="/", timeout=30, check=False, **self._user)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout.strip()

    def new_url(self) -> str:
        """The address of an empty database."""
        self._databases += 1
        name = f"test{self._databases}"
        self.sql(f"CREATE DATABASE {name}")
        return f"postgresql://belljar@/{name}?host={self._folder}"


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """One that runs, or a loud skip."""
    found = programs()
    if found is None:
        pytest.skip("NOTHING of PostgreSQL was checked: install the package postgresql")
    folder = Path(tempfile.mkdtemp(prefix="belljar-pg-"))
    user: dict[str, Any] = {}
    if os.geteuid() == 0:
        who = _unprivileged()
        os.chown(folder, who.pw_uid, who.pw_gid)
        user = {"user": who.pw_uid, "group": who.pw_gid, "extra_groups": []}
    server = PostgresServer(found, folder, user)
    try:
        server.create()
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _unprivileged() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    pytest.skip("NOTHING of PostgreSQL was checked: it refuses root, and there is no user postgres or nobody")
