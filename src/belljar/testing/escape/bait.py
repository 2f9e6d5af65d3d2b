"""What a guest must not find: secrets, services and processes that the runner puts on the host, and takes away."""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

_VARIABLE = "BELLJAR_BAIT"
_IPC_CREAT, _IPC_RMID = 0o1000, 0


@dataclass(frozen=True)
class Bait:
    """Everything here is random, so that finding it proves where it was found."""

    secret: str
    marker: str
    folder: Path
    words: dict[str, str]

    @property
    def drop(self) -> Path:
        """A folder that everybody may write to: whatever appears in it, a guest has put there."""
        return Path(self.words["drop"])

    def apart(self) -> Bait:
        """The same bait with a drop of its own, so that what appears there can be laid to one attack."""
        return replace(self, words={**self.words, **_drop(self.folder)})

    def fill(self, text: str) -> str:
        for word, value in self.words.items():
            text = text.replace(f"@{word}@", value)
        return text

    def dropped(self) -> str:
        found = sorted(entry.name for entry in self.drop.iterdir())
        return f"on the host appeared {', '.join(found)}" if found else ""

    def running(self, mark: str) -> list[int]:
        """The host's processes that carry a mark as an argument."""
        wanted = self.fill(mark).encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    if wanted in (entry / "cmdline").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found


@contextmanager
def lay() -> Iterator[Bait]:
    """Lays the bait out and clears it away, whatever happens in between."""
    secret, marker = f"secret-{secrets.token_hex(16)}", f"bait-{secrets.token_hex(8)}"
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="belljar-escape-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        words = {
            "marker": marker,
            "folder": str(folder),
            **_drop(folder),
            "canary": _files(folder, secret),
            "home": str(Path.home()),
            "hostname": socket.gethostname(),
            "passwd": hashlib.sha256(Path("/etc/passwd").read_bytes()).hexdigest(),
            "belljar": str(os.getpid()),
            "shm_file": _shared_file(secret, marker, stack),
            "victim": str(_victim(secret, marker, stack)),
            "shm_key": str(_shared_memory(secret, stack)),
            **_listeners(folder, marker, stack),
        }
        _variable(secret, stack)
        stack.callback(_wipe, marker)
        yield Bait(secret, marker, folder, words)


def _files(folder: Path, secret: str) -> str:
    folder.chmod(0o755)
    canary = folder / "canary"
    canary.write_text(secret)
    canary.chmod(0o644)
    return str(canary)


def _drop(folder: Path) -> dict[str, str]:
    place = folder / secrets.token_hex(4)
    drop, code = place / "drop", place / "code"
    drop.mkdir(parents=True)
    drop.chmod(0o777)  # so that only the sandbox, and not the file's mode, stands in the way
    code.mkdir()
    # What a launcher would run if it took the guest's environment for its own.
    (code / "environment.sh").write_text(f": > {drop}/shell-startup\n")
    (code / "sitecustomize.py").write_text(f"open('{drop}/python-startup', 'w').close()\n")
    return {"drop": str(drop), "code": str(code)}


def _wipe(marker: str) -> None:
    """Where nothing held, neighbours have left their marks on the host itself."""
    for folder in ("/tmp", "/var/tmp", "/dev/shm", "/run", str(Path.home())):
        for mark in Path(folder).glob(f"{marker}-*"):
            with suppress(OSError):
                mark.unlink()


def _variable(secret: str, stack: ExitStack) -> None:
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = secret
    stack.callback(os.environ.__setitem__, _VARIABLE, before) if before else stack.callback(
        os.environ.pop, _VARIABLE, None
    )


def _shared_file(secret: str, marker: str, stack: ExitStack) -> str:
    path = Path("/dev/shm", marker)
    with suppress(OSError):
        path.write_text(secret)
        path.chmod(0o644)
        stack.callback(path.unlink, missing_ok=True)
    return str(path)


def _victim(secret: str, marker: str, stack: ExitStack) -> int:
    """A process to look for and to signal. It ends when its stdin does, so it cannot outlive us."""
    victim = subprocess.Popen(
        ["/bin/sh", "-c", "read -r forever", marker], stdin=subprocess.PIPE, env={_VARIABLE: secret}, cwd="/"
    )
    stack.enter_context(victim)  # closes its stdin and waits
    return victim.pid


def _shared_memory(secret: str, stack: ExitStack) -> int:
    """A System V segment with the secret in it; 0 where the system has none."""
    libc = ctypes.CDLL(None, use_errno=True)
    key = secrets.randbelow(2**30) + 1
    segment = libc.shmget(key, ctypes.c_size_t(4096), _IPC_CREAT | 0o666)
    if segment < 0:
        return 0
    stack.callback(libc.shmctl, segment, _IPC_RMID, None)
    libc.shmat.restype = ctypes.c_void_p
    address = libc.shmat(segment, None, 0)
    ctypes.memmove(address, secret.encode() + b"\0", len(secret) + 1)
    libc.shmdt(ctypes.c_void_p(address))
    return key


def _listeners(folder: Path, marker: str, stack: ExitStack) -> dict[str, str]:
    """Services that never accept: for the guest, being able to connect is enough."""
    ports = {"port4": "1", "port6": "1"}
    for word, family, address in (("port4", socket.AF_INET, "127.0.0.1"), ("port6", socket.AF_INET6, "::1")):
        listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        with suppress(OSError):  # a host without IPv6
            listener.bind((address, 0))
            listener.listen(64)
            ports[word] = str(listener.getsockname()[1])
    with socket.socket() as free:  # where a neighbour will listen
        free.bind(("127.0.0.1", 0))
        ports["free_port"] = str(free.getsockname()[1])
    path = str(folder / "service.sock")
    for name in (path, f"\0{marker}"):
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(name)
        listener.listen(64)
    Path(path).chmod(0o666)  # again: only the sandbox stands in the way
    return {**ports, "socket": path, "abstract": marker}
