"""Gives the guest of a living box a name and a home in the image's lists of users, which nobody inside can change.

The lists are the image's with one more line. They lie among the read-only files, and a program of ours that has entered
the container's mounts, and nothing else of it, puts them in place before the guest's first command.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import anyio.to_thread

from belljar.core import errors
from belljar.core.plan import INPUTS
from belljar.host import files, process
from belljar.host.guest_uid import group_of

FOLDER = ".belljar/etc"
_FIELDS = {"passwd": "{name}:x:{uid}:{gid}:{name}:{home}:{shell}", "group": "{name}:x:{gid}:"}
_MAX_BYTES = 1 << 20
_SECONDS = 20.0
_MOUNT = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.setns(int(sys.argv[1]), 0x20000):
    sys.exit(1)
for name in sys.argv[3:]:
    source, target = f"{sys.argv[2]}/{name}".encode(), f"/etc/{name}".encode()
    if libc.mount(source, target, None, 0x1000, None):
        sys.exit(2)
"""


def entries(root: int, uid: int, name: str, home: str) -> Mapping[str, bytes]:
    """Returns the lists of users and groups with the guest in them, for those that the image has.

    Args:
        root: the container's, open.
        uid: the guest's.
        name: the guest's.
        home: its home.
    """
    found = {}
    for kind, form in _FIELDS.items():
        said = _read(root, kind)
        if said is None:
            continue
        kept = [line for line in said.splitlines() if line.split(b":")[:1] != [name.encode()]]
        shell = "/bin/bash" if _has_bash(root) else "/bin/sh"
        own = form.format(name=name, uid=uid, gid=group_of(uid), home=home, shell=shell).encode()
        found[kind] = b"\n".join([*kept, own, b""])
    return found


def _has_bash(root: int) -> bool:
    return any(_there(root, folder) for folder in ("bin", "usr/bin"))


def _there(root: int, folder: str) -> bool:
    try:
        with files.descended(root, folder.split("/")) as place:
            return "bash" in os.listdir(place)
    except OSError:
        return False


def _read(root: int, kind: str) -> bytes | None:
    """None: the image has none, or something else in its place."""
    try:
        with files.descended(root, ["etc"]) as folder:
            fd = os.open(kind, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        said = file.read(_MAX_BYTES + 1)
    return said if len(said) <= _MAX_BYTES else None


async def put_in_place(first: int, kinds: Mapping[str, bytes]) -> None:
    """Mounts the lists that were laid into `FOLDER` over the image's.

    Args:
        first: the container's first process.
        kinds: which lists.

    Raises:
        StartFailed: the kernel refused it.
    """
    space = os.open(f"/proc/{first}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        argv = [sys.executable, "-I", "-S", "-c", _MOUNT, str(space), f"{INPUTS}/{FOLDER}", *kinds]
        null = subprocess.DEVNULL
        child = process.Child(argv, stdin=null, stdout=null, stderr=null, fds=(space,))
    finally:
        os.close(space)
    try:
        with anyio.fail_after(_SECONDS):
            code = await child.wait()
    finally:
        child.kill()
        child.reap(_SECONDS)
    if code:
        raise errors.StartFailed("the guest could not be named in the container's list of users")
