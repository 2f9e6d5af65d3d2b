"""The walls of a native sandbox, as arguments of bubblewrap. Every dangerous choice is in this file."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import NamedTuple

from belljar.backends.guest_text import shell_script
from belljar.core import errors
from belljar.core.request import Limits, Workspace
from belljar.core.values import MIB, WORKSPACE
from belljar.host import git_settings
from belljar.host.guest_uid import group_of
from belljar.host.seccomp import PROFILES

GUEST_ID = 1000
MINIMUM_BUBBLEWRAP = (0, 8)  # the first with --disable-userns and --size
NEEDED_OPTION = "--ro-bind-fd"  # 0.10 has it, and so have distributions' older ones that were repaired
SHM_BYTES = 64 * MIB

_NAMESPACES = (
    "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup",
)  # fmt: skip
_WALLS = (
    *_NAMESPACES, "--disable-userns", "--cap-drop", "ALL", "--die-with-parent", "--new-session",
    "--uid", str(GUEST_ID), "--gid", str(GUEST_ID), "--hostname", "belljar", "--clearenv",
)  # fmt: skip

# Never /etc wholesale: what programs need to start, and nothing that says who uses this machine.
_ETC = ("alternatives", "fonts")  # folders, mounted
CERTIFICATES = "/etc/ssl/certs"  # for guests that may reach hosts
ETC_COPIED = ("ld.so.cache", "localtime")  # small files: copying is cheaper than mounting
_ETC_FILES = {
    "passwd": f"guest:x:{GUEST_ID}:{GUEST_ID}:guest:/tmp:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "group": f"guest:x:{GUEST_ID}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost belljar\n::1 localhost\n",
}
_MASKED_FILES = ("kcore", "keys", "timer_list", "sched_debug", "latency_stats")
# bubblewrap's init has the guest's own uid. Whoever could write to its memory could have it forget to die with Belljar.
_INIT_MASKS = tuple(part for name in ("1/mem", "1/task/1/mem") for part in ("--ro-bind", "/dev/null", f"/proc/{name}"))
_MASKED_FOLDERS = ("acpi", "asound", "scsi")


class Space(NamedTuple):
    """Where the writable folders of a box come from: fresh for one run, or kept by a holder process."""

    holder: int = 0
    workspace: str = ""  # empty where a granted folder is the workspace
    tmp: str = ""


class Jail(NamedTuple):
    """All that differs from one run to the next."""

    env: Mapping[str, str]
    cwd: str
    disk: int
    files: Mapping[str, bytes]
    inputs: str
    grants: Sequence[str]
    workspace: Workspace | None
    space: Space
    online: bool = False
    granted: int = -1  # the workspace, open, as the guest sees it
    uid: int | None = None  # as whom the guest comes to it, if not as ourselves
    binds: Mapping[str, str] = {}  # inside -> a file of the host
    texts: Mapping[str, bytes] = {}  # inside -> content


def unkillable() -> list[str]:
    """The command line before a launcher, that keeps the kernel's OOM killer away where we have the right to."""
    return ["/bin/sh", "-c", shell_script("native/unkillable"), "belljar"]


def launcher(join_files: Sequence[Path], uid: int | None, holder: int, namespace: str = "") -> list[str]:
    """The command line before bubblewrap: sh joins the groups, chroot drops root, nsenter goes to the kept folders.

    Args:
        join_files: what to write to, to join the control groups.
        uid: to become; None: the uid is kept.
        holder: the pid of the process that keeps the writable folders; 0: there is none.
        namespace: the path of a mount namespace in which a folder was lent to the uid; empty: none was.
    """
    argv = ["/bin/sh", "-c", shell_script("native/launch"), "belljar", str(len(join_files)), *map(str, join_files)]
    if namespace:  # by its path: a descriptor of it would be inherited by the guest
        argv += ["nsenter", f"--mount={namespace}", "--"]
    if uid is not None:
        # coreutils' chroot to / only changes the uid, in half the time that setpriv takes.
        argv += ["chroot", f"--userspec=+{uid}:+{group_of(uid)}", "--groups=", "/"]
    if holder:
        argv += ["nsenter", "--target", str(holder), "--user", "--mount", "--preserve-credentials", "--"]
    return argv


def holder_arguments(limits: Limits, space: Space) -> list[str]:
    """bubblewrap's arguments for a holder: a view of the host in which only our two folders are new.

    No guest ever runs in it. bubblewrap cannot limit the number of files, so the holder itself mounts the folders.

    Args:
        limits: of the box.
        space: where its folders are.
    """
    walls = ["--unshare-user", "--uid", "0", "--gid", "0", "--cap-add", "ALL", "--die-with-parent"]
    script = ["/bin/sh", "-c", shell_script("native/hold"), "belljar", str(limits.kept_bytes)]
    folders = [str(limits.kept_inodes), *filter(None, (space.workspace, space.tmp))]
    return [*walls, "--dev-bind", "/", "/", "--", *script, *folders]


def arguments(jail: Jail, stack: ExitStack) -> tuple[list[str], list[int]]:
    """bubblewrap's arguments for a guest, in the order it will act on them, and the descriptors it needs open.

    What has to stay open until bubblewrap has started is closed with `stack`.
    """
    fds: list[int] = []

    def data(content: bytes) -> str:
        fds.append(memory_file(content, stack))
        return str(fds[-1])

    args = [*_WALLS, *(part for name, value in jail.env.items() for part in ("--setenv", name, value))]
    args += ["--perms", "0755", "--dir", "/etc", *root_mounts()]
    for name, content in _etc().items():
        args += ["--perms", "0444", "--file", data(content), f"/etc/{name}"]
    if jail.online and os.path.isdir(CERTIFICATES):
        args += ["--ro-bind", CERTIFICATES, CERTIFICATES]
    args += ["--proc", "/proc", *proc_masks(), *_INIT_MASKS]
    args += ["--dev", "/dev", "--perms", "1777", "--size", str(SHM_BYTES), "--tmpfs", "/dev/shm"]
    args += [*_writable(jail), *git_walls(jail, fds, stack)]
    for folder in jail.grants:  # after /tmp, below which one may lie
        args += ["--ro-bind", folder, folder]
    for inside, source in jail.binds.items():
        args += ["--ro-bind", source, inside]
    for inside, content in jail.texts.items():
        args += ["--perms", "0444", "--file", data(content), inside]
    for name, content in jail.files.items():
        args += ["--perms", "0444", "--ro-bind-data", data(content), f"{jail.inputs}/{name}"]
    if not jail.space.holder and not jail.workspace and jail.cwd != "/":
        args += ["--perms", "0755", "--dir", jail.cwd]
    args += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", jail.cwd]
    return [*args, *filtered(fds, stack)], fds


def filtered(fds: list[int], stack: ExitStack) -> list[str]:
    """The arguments that install the seccomp filter; its descriptor is added to those that are passed."""
    seccomp = os.open(seccomp_filter(), os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, seccomp)
    fds.append(seccomp)
    return ["--seccomp", str(seccomp)]


def _writable(jail: Jail) -> list[str]:
    if jail.space.holder:
        tmp = ["--bind", jail.space.tmp, "/tmp"]
        workspace = [] if jail.workspace else ["--bind", jail.space.workspace, WORKSPACE]
    else:
        tmp = ["--perms", "1777", "--size", str(jail.disk), "--tmpfs", "/tmp"]
        workspace = ["--perms", "0755", "--size", str(jail.disk), "--tmpfs", WORKSPACE]
    if jail.workspace:
        workspace = ["--bind" if jail.workspace.write else "--ro-bind", jail.workspace.path, WORKSPACE]
    return tmp + workspace


def git_walls(jail: Jail, fds: list[int], stack: ExitStack) -> Iterator[str]:
    """Mounts over itself what tells git in a writable workspace which programs to run.

    What is mounted on can be neither moved nor removed. By descriptors: bubblewrap gives up if it finds something else
    at that place.
    """
    if jail.workspace and jail.workspace.write and not jail.workspace.write_git:
        for part in git_settings.parts(jail.granted, stack, owner=jail.uid):
            fds.append(part.fd)
            yield from ("--bind-fd" if part.write else "--ro-bind-fd", str(part.fd), f"{WORKSPACE}/{part.path}")


@cache
def _etc() -> dict[str, bytes]:
    copied = {name: Path("/etc", name) for name in ETC_COPIED}
    return {name: text.encode() for name, text in _ETC_FILES.items()} | {
        name: path.read_bytes() for name, path in copied.items() if path.is_file()
    }


@cache
def root_mounts(at: str = "") -> tuple[str, ...]:
    """The host's runtime directories, read-only, and the folders of /etc that programs need; `at`: below which path."""

    def parts() -> Iterator[str]:
        yield from ("--ro-bind", "/usr", f"{at}/usr")
        for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
            path = Path("/", name)
            if path.is_symlink():
                yield from ("--symlink", os.readlink(path), f"{at}{path}")
            elif path.is_dir():
                yield from ("--ro-bind", str(path), f"{at}{path}")
        for name in _ETC:
            if Path("/etc", name).exists():
                yield from ("--ro-bind", f"/etc/{name}", f"{at}/etc/{name}")

    return tuple(parts())


@cache
def proc_masks(at: str = "") -> tuple[str, ...]:
    """What hides the parts of /proc that tell of the host; `at`: below which path it is."""

    def parts() -> Iterator[str]:
        for name in _MASKED_FILES:
            if Path("/proc", name).exists():
                yield from ("--ro-bind", "/dev/null", f"{at}/proc/{name}")
        for name in _MASKED_FOLDERS:
            if Path("/proc", name).is_dir():
                yield from ("--perms", "0555", "--size", "4096", "--tmpfs", f"{at}/proc/{name}")

    return tuple(parts())


@cache
def seccomp_filter() -> str:
    """The compiled profile for this machine (`make profiles` compiles it; a test compares)."""
    path = PROFILES / f"guest.{platform.machine()}.bpf"
    if not path.is_file():
        raise errors.NotAvailable(f"there is no seccomp filter for {platform.machine()}")
    return str(path)


def memory_file(content: bytes, stack: ExitStack) -> int:
    """An anonymous file holding content, read from its start: nothing on disk to leave behind."""
    fd = os.memfd_create("belljar", os.MFD_CLOEXEC)
    stack.callback(os.close, fd)
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
