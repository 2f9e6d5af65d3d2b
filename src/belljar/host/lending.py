"""Lends a folder of root's to a guest's uid by an idmapped mount: the folder itself, nothing copied, nothing changed.

Through the mount, what belongs to root is the guest's, and what the guest makes belongs to root. It is attached in a
mount namespace of its own: nothing is mounted on the host, and it is gone when the namespace's last descriptor is.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from contextlib import ExitStack
from typing import NamedTuple

from belljar.core import errors
from belljar.host import files, process, syscalls
from belljar.host.guest_uid import group_of

_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442  # the same numbers on every architecture
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = 1, 4
_MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV, _MOUNT_ATTR_IDMAP = 0x2, 0x4, 0x100000
_CLONE_NEWNS, _MS_REC, _MS_SLAVE = 0x20000, 0x4000, 1 << 19
_LAST_ID = 2**32 - 2
_END_SECONDS = 5.0


class LentFolder(NamedTuple):
    """A folder in the hands of a guest's uid.

    Attributes:
        namespace: a descriptor of the mount namespace in which it lies at its place.
        folder: a descriptor of the folder itself, as the guest's uid sees it.
    """

    namespace: int
    folder: int

    @property
    def path(self) -> str:
        """Where a program of the host's root finds the namespace."""
        return f"/proc/{os.getpid()}/fd/{self.namespace}"

    def close(self) -> None:
        """Takes the folder back, once no guest is left that uses it."""
        for fd in self:
            os.close(fd)


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def open_grant(path: str, uid: int | None, place: str, stack: ExitStack) -> tuple[int, LentFolder | None]:
    """Opens a granted folder as its guest will see it: one of root's is lent to the guest's uid.

    Args:
        path: the folder.
        uid: the guest's, if it is not ours.
        place: where a folder that is lent is mounted.
        stack: closes it.

    Returns:
        A descriptor of the folder, and the folder as it was lent, if it was.

    Raises:
        PolicyDenied: it belongs to root, and cannot be lent here.
    """
    if uid is None or os.stat(path).st_uid != 0:
        return stack.enter_context(files.opened(path)), None
    lent = lend(path, uid, place)
    stack.callback(lent.close)
    return lent.folder, lent


def lend(path: str, uid: int, place: str) -> LentFolder:
    """Lends a folder of root's to a uid.

    Args:
        path: the folder.
        uid: who may use it as root could, and whose group has what root's group has.
        place: where it is mounted, in a namespace of its own.

    Returns:
        The folder, to be closed.

    Raises:
        PolicyDenied: this kernel or the folder's file system cannot do that.
    """
    found: list[LentFolder | OSError] = []
    # A thread of its own: it leaves our mount namespace for good.
    thread = threading.Thread(target=lambda: found.append(_mount(path, uid, place)), name="belljar-lending")
    thread.start()
    thread.join()
    folder = found[0]
    if isinstance(folder, OSError):
        raise errors.PolicyDenied(
            f"workspace: {path} belongs to root, and cannot be lent to the guest's uid: {folder.strerror}",
            fix="give it to an unprivileged user (chown -R), run Belljar as one, or use a container engine",
        )
    return folder


def _mount(path: str, uid: int, place: str) -> LentFolder | OSError:
    try:
        with ExitStack() as fds:
            users = _swapped_ids(uid)
            fds.callback(os.close, users)
            flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_RECURSIVE
            tree = syscalls.call(_OPEN_TREE, _AT_FDCWD, path.encode(), flags)
            fds.callback(os.close, tree)
            wanted = _MountAttributes(_MOUNT_ATTR_IDMAP | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV, 0, 0, users)
            flags, size = _AT_EMPTY_PATH | _AT_RECURSIVE, ctypes.sizeof(wanted)
            syscalls.call(_MOUNT_SETATTR, tree, b"", flags, ctypes.byref(wanted), size)
            libc = ctypes.CDLL(None, use_errno=True)
            syscalls.checked(libc.unshare(_CLONE_NEWNS))
            syscalls.checked(libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None))  # ours stays ours
            syscalls.call(_MOVE_MOUNT, tree, b"", _AT_FDCWD, place.encode(), _MOVE_MOUNT_F_EMPTY_PATH)
            folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            return LentFolder(os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC), folder)
    except OSError as error:
        return error


def _swapped_ids(uid: int) -> int:
    """Returns a user namespace in which root and this uid have changed places, and all others have kept theirs; and so
    have their groups."""
    with ExitStack() as fds:
        (stdin, end), (ready, stdout) = os.pipe(), os.pipe()
        for fd in (end, ready):
            fds.callback(os.close, fd)
        try:
            child = process.Child(["unshare", "--user", "--", "cat"], stdin=stdin, stdout=stdout, stderr=stdout)
        finally:
            os.close(stdin)
            os.close(stdout)
        try:
            os.write(end, b"\n")
            if os.read(ready, 1) != b"\n":  # else it is a complaint: `cat` repeats the line once it is in there
                raise OSError(errno.EPERM, "no user namespace can be made here")
            for name, number in (("uid_map", int(uid)), ("gid_map", group_of(uid))):
                _write(f"/proc/{child.pid}/{name}", _swapped_with_root(number))
            return os.open(f"/proc/{child.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)  # it outlives the process
        finally:
            child.kill()
            child.reap(_END_SECONDS)


def _swapped_with_root(number: int) -> bytes:
    rows = ((0, number, 1), (1, 1, number - 1), (number, 0, 1), (number + 1, number + 1, _LAST_ID - number))
    return "".join(f"{inside} {outside} {count}\n" for inside, outside, count in rows if count).encode()


def _write(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)
