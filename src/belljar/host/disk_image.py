"""A disk for one box: an ext4 file system in a file without a name, mounted nowhere but in the box's own namespace.

Nobody but `mkfs.ext4` and the kernel ever writes its raw bytes. When the last process of the namespace has ended, the
kernel unmounts it, lets the loop device go and frees the file: also when Belljar is killed. Its bytes are set aside
when it is made, so that a box cannot find the host's disk full.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import anyio.to_thread

from belljar.core import errors
from belljar.core.values import MIB, format_size
from belljar.host import process, syscalls
from belljar.host.guest_uid import group_of

_FSOPEN, _FSCONFIG, _FSMOUNT, _OPEN_TREE, _MOVE_MOUNT = 430, 431, 432, 428, 429  # the same on every architecture
_SET_FLAG, _SET_STRING, _CREATE = 0, 1, 6
_AT_FDCWD, _CLONE, _EMPTY_PATH = -100, 1, 4
_CLOEXEC, _NOSUID_NODEV_NOATIME = 1, 0x2 | 0x4 | 0x10
_CLONE_FS, _CLONE_NEWNS = 0x200, 0x20000
_LOOP_CONFIGURE, _LOOP_GET_FREE = 0x4C0A, 0x4C82
_AUTOCLEAR, _DIRECT_IO = 4, 16
_CAP_SYS_ADMIN = 21
_LEAST_BYTES = 4 * MIB  # below which the file system itself takes most of it
_TRIES = 20  # others may take a loop device that was free
_MAKE_SECONDS = 60.0
_MAKE = (
    "-q", "-F", "-m", "0", "-i", "8192", "-O", "^has_journal,^resize_inode", "-E", "lazy_itable_init=1,nodiscard",
)  # fmt: skip


def why_not(folder: Path, size: int) -> str:
    """Says why no disk of this size can be made in a folder; empty if nothing speaks against it."""
    if os.geteuid() != 0 or not _may_mount():
        return "only root of the whole machine can mount a file system"
    try:
        os.close(os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return "there are no loop devices here"
    if _program() is None:
        return "this system has no mkfs.ext4 (install e2fsprogs)"
    free = shutil.disk_usage(folder).free
    return "" if free >= 2 * size else f"its disk has no more than {format_size(free)} left"


async def mount_in(holder: int, state_dir: Path, size: int, folders: Mapping[str, int], uid: int | None) -> None:
    """Gives a box a disk for some of its folders.

    Args:
        holder: the pid of a process in the box's mount namespace.
        state_dir: where the file without a name lies.
        size: bytes.
        folders: whole paths as the holder sees them, all of them empty -> their permissions.
        uid: whose they are; None: ours.

    Raises:
        StartFailed: it could not be made.
    """
    try:
        with ExitStack() as fds:
            file = await anyio.to_thread.run_sync(_reserved, state_dir, max(size, _LEAST_BYTES))
            fds.callback(os.close, file)
            program = _program() or "mkfs.ext4"
            made = await process.output(
                [program, *_MAKE, f"/proc/self/fd/{file}"], deadline=_MAKE_SECONDS, fds=(file,)
            )  # fmt: skip
            if made.code:
                raise errors.StartFailed(f"the sandbox's disk could not be made: {made.stderr.strip()[:500]}")
            await anyio.to_thread.run_sync(_mount, holder, file, folders, uid)
    except (OSError, TimeoutError) as error:
        raise errors.StartFailed(
            f"the sandbox's disk could not be made: {error}", fix='make room, or set living.disk_backing="memory"'
        ) from None


def _may_mount() -> bool:
    """Whether we are root of the first user namespace, with the right to mount."""
    status = Path("/proc/self/status").read_text()
    able = int(status.partition("CapEff:")[2].split()[0], 16) >> _CAP_SYS_ADMIN & 1
    return bool(able) and Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]


def _program() -> str | None:
    return shutil.which("mkfs.ext4", path="/usr/sbin:/sbin:/usr/bin:/bin")


def _reserved(folder: Path, size: int) -> int:
    file = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, size)
    except BaseException:
        os.close(file)
        raise
    return file


def _mount(holder: int, file: int, folders: Mapping[str, int], uid: int | None) -> None:
    with ExitStack() as fds:
        device, path = _loop_device(file)
        fds.callback(os.close, device)
        whole = _file_system(path)
        fds.callback(os.close, whole)
        places = tuple(folders)
        for number, place in enumerate(places):
            os.mkdir(str(number), 0o700, dir_fd=whole)
            if uid is not None:
                os.chown(str(number), uid, group_of(uid), dir_fd=whole)
            os.chmod(str(number), folders[place], dir_fd=whole)
        found: list[OSError] = []
        # A thread of its own: it leaves our mount namespace for good.
        thread = threading.Thread(target=_attach, args=(holder, whole, places, found), name="belljar-disk")
        thread.start()
        thread.join()
        if found:
            raise found[0]


def _loop_device(file: int) -> tuple[int, str]:
    """Returns a loop device on a file, open, and its path; it goes with the last who has it open or mounted."""
    facts = struct.pack("=5Q4I64s64s32s2Q", 0, 0, 0, 0, 0, 0, 0, 0, _AUTOCLEAR | _DIRECT_IO, b"belljar", b"", b"", 0, 0)
    wanted = struct.pack("=II", file, 0) + facts + bytes(64)
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_TRIES):
            path = f"/dev/loop{fcntl.ioctl(control, _LOOP_GET_FREE)}"
            device = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(device, _LOOP_CONFIGURE, wanted)
            except OSError as error:
                os.close(device)
                if error.errno != errno.EBUSY:
                    raise
                continue
            return device, path
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, "no loop device is free")


def _file_system(device: str) -> int:
    """Returns the file system of a device, mounted nowhere yet."""
    made = syscalls.call(_FSOPEN, b"ext4", _CLOEXEC)
    try:
        syscalls.call(_FSCONFIG, made, _SET_STRING, b"source", device.encode(), 0)
        syscalls.call(_FSCONFIG, made, _SET_FLAG, b"noinit_itable", None, 0)
        syscalls.call(_FSCONFIG, made, _CREATE, None, None, 0)
        return syscalls.call(_FSMOUNT, made, _CLOEXEC, _NOSUID_NODEV_NOATIME)
    finally:
        os.close(made)


def _attach(holder: int, whole: int, places: Sequence[str], found: list[OSError]) -> None:
    """Mounts one folder of the file system at each place. The whole lies below the last of them, where nobody comes."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        namespace = os.open(f"/proc/{holder}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        try:
            syscalls.checked(libc.unshare(_CLONE_FS))
            syscalls.checked(libc.setns(namespace, _CLONE_NEWNS))
        finally:
            os.close(namespace)
        last = places[-1]
        syscalls.call(_MOVE_MOUNT, whole, b"", _AT_FDCWD, last.encode(), _EMPTY_PATH)
        for number, place in enumerate(places):
            tree = syscalls.call(_OPEN_TREE, _AT_FDCWD, f"{last}/{number}".encode(), _CLONE | os.O_CLOEXEC)
            try:
                syscalls.call(_MOVE_MOUNT, tree, b"", _AT_FDCWD, place.encode(), _EMPTY_PATH)
            finally:
                os.close(tree)
    except OSError as error:
        found.append(error)
