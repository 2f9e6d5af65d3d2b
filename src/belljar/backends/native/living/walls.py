"""The walls of a living sandbox, as arguments of bubblewrap.

One bubblewrap builds the machine: its namespaces, and below one folder all that guests see. It stays as the machine's
first process. Each command is one more bubblewrap that joins those namespaces, has a view of that folder of its own
with the same walls, a user namespace of its own, and the seccomp filter.

Guests have both in sight, and of each process in sight the kernel tells everybody the mounts. So beside that folder
there is nothing in the machine but what bubblewrap itself needs: programs, and the host's /proc to find itself in.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from belljar.backends.guest_text import shell_script
from belljar.backends.native import jail
from belljar.core.plan import INPUTS
from belljar.core.process import User
from belljar.core.request import Limits, Workspace
from belljar.core.values import WORKSPACE

PLACE = "/machine"  # below which all is that guests see
# Its own /dev/null is for the shell there, which opens it for what it starts in the background, or starts nothing.
_MACHINE = (
    "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--uid", "0", "--gid", "0",
    "--cap-add", "ALL", "--die-with-parent", "--as-pid-1", "--hostname", "belljar", "--bind", "/proc", "/proc",
    "--perms", "0755", "--dir", "/tmp", "--perms", "0755", "--dir", "/etc",
    "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache",
    "--perms", "0755", "--dir", "/dev", "--symlink", f"{PLACE}/dev/null", "/dev/null",
)  # fmt: skip
_COMMAND = (
    "--unshare-user", "--unshare-cgroup", "--disable-userns", "--cap-drop", "ALL", "--die-with-parent", "--clearenv",
)  # fmt: skip
_ETC_COPIED = (
    *jail.ETC_COPIED, "os-release", "debian_version", "services", "protocols", "mime.types", "shells", "inputrc",
    "ssl/openssl.cnf",
)  # fmt: skip
# For who has said nothing else in ~/.gitconfig: a commit that only wants a name does not fail for it.
_GIT = "[user]\n\tname = {user}\n\temail = {user}@belljar.invalid\n[init]\n\tdefaultBranch = main\n"
_SHARED = ("/tmp", "/var/tmp")  # everybody's, and so with the sticky bit
_MOST_FILE_BYTES = 1 << 20
PROGRAMS = "/opt/belljar/bin"  # names for programs that the host has under others


class MachineSpec(NamedTuple):
    """All that differs from one living sandbox to the next."""

    bubblewrap: str
    limits: Limits
    home: str
    user: User
    workspace: Workspace | None
    grants: Sequence[str]
    files: Mapping[str, bytes]  # read-only inputs
    links: Mapping[str, str]  # names for programs -> where they are
    binds: Mapping[str, str] = {}  # inside -> a folder of the host
    counted: bool = False  # does the host itself limit the number of files?

    @property
    def writable(self) -> tuple[str, ...]:
        """The folders that guests may write to, a granted one aside; none is below another."""
        own = () if self.workspace else (WORKSPACE,)
        found = (*own, *_SHARED, "/run")
        at_home = any(_within(self.home, folder) for folder in (*found, WORKSPACE))
        return found if at_home else (*found, self.home)

    @property
    def on_disk(self) -> Mapping[str, int]:
        """The folders that a disk of its own can take -> their permissions; in others something is mounted."""
        mounted = (*self.grants, *self.binds, *(f"{PROGRAMS}/{name}" for name in self.links))
        return {
            folder: 0o1777 if folder in _SHARED else 0o755
            for folder in self.writable
            if folder != "/run" and not any(_within(path, folder) for path in mounted)
        }

    @property
    def guest_id(self) -> int:
        """The uid of its guests, as they see it."""
        return 0 if self.user == "root" else jail.GUEST_ID


class EntrySpec(NamedTuple):
    """All that differs from one command of a living sandbox to the next."""

    env: Mapping[str, str]
    cwd: str
    files: Mapping[str, bytes]  # read-only, beside those of the machine
    terminal: bool = False
    granted: int = -1  # the workspace, open, if it was granted
    uid: int | None = None  # as whom the guest comes to it, if not as ourselves


def machine_arguments(machine: MachineSpec, stack: ExitStack) -> tuple[list[str], list[int]]:
    """bubblewrap's arguments for a machine with its first process, and the descriptors that they name."""
    fds: list[int] = []
    at = PLACE

    def text(path: str, content: bytes) -> list[str]:
        fds.append(jail.memory_file(content, stack))
        return ["--perms", "0444", "--file", str(fds[-1]), f"{at}{path}"]

    args = [*_MACHINE, *jail.root_mounts(), *_own_program(machine.bubblewrap)]
    args += ["--perms", "0755", "--size", str(machine.limits.kept_bytes), "--tmpfs", at]
    for folder in ("/etc", "/var", "/opt", INPUTS, PROGRAMS):
        args += ["--perms", "0755", "--dir", f"{at}{folder}"]
    args += jail.root_mounts(at)
    if os.path.isdir(jail.CERTIFICATES):
        args += ["--ro-bind", jail.CERTIFICATES, f"{at}{jail.CERTIFICATES}"]
    for name, content in _etc(machine):
        args += text(f"/etc/{name}", content)
    args += ["--proc", f"{at}/proc", *jail.proc_masks(at)]
    for name in ("1/cgroup", "1/task/1/cgroup"):  # whose names tell which process of the host is Belljar
        args += ["--ro-bind", "/dev/null", f"{at}/proc/{name}"]
    args += ["--dev", f"{at}/dev", "--perms", "1777", "--size", str(jail.SHM_BYTES), "--tmpfs", f"{at}/dev/shm"]
    args += ["--remount-ro", f"{at}/dev"]
    for folder in (*machine.writable, machine.home):
        args += ["--perms", "1777" if folder in _SHARED else "0755", "--dir", f"{at}{folder}"]
    if machine.workspace:
        way = "--bind" if machine.workspace.write else "--ro-bind"
        args += [way, machine.workspace.path, f"{at}{WORKSPACE}"]
    for name, program in machine.links.items():
        args += ["--symlink", program, f"{at}{PROGRAMS}/{name}"]
    for folder in machine.grants:
        args += ["--ro-bind", folder, f"{at}{folder}"]
    for inside, folder in machine.binds.items():
        args += ["--ro-bind", folder, f"{at}{inside}"]
    for name, content in machine.files.items():
        args += text(f"{INPUTS}/{name}", content)
    most = "" if machine.counted else str(machine.limits.kept_inodes)
    first = ["/bin/sh", "-c", shell_script("native/machine"), "belljar", at, most]
    return [*args, "--remount-ro", "/", "--chdir", "/", "--", *first], fds


def _own_program(path: str) -> list[str]:
    """Mounts bubblewrap, with which each command begins, if it is none of the system's programs."""
    return [] if path.startswith(("/usr/", "/bin/")) else ["--ro-bind", path, path]


def entry_arguments(machine: MachineSpec, entry: EntrySpec, stack: ExitStack) -> tuple[list[str], list[int]]:
    """bubblewrap's arguments for a command that has joined the machine, and the descriptors that they name."""
    fds: list[int] = []
    guest = str(machine.guest_id)
    args = [*_COMMAND, "--uid", guest, "--gid", guest]
    if not entry.terminal:  # else the command itself begins a session, which its terminal belongs to
        args.append("--new-session")
    args += [part for name, value in entry.env.items() for part in ("--setenv", name, value)]
    args += ["--dev-bind", PLACE, "/"]
    for folder in machine.writable:
        args += ["--bind", f"{PLACE}{folder}", folder]
    if machine.workspace and machine.workspace.write and not machine.workspace.write_git:
        walls = jail.Jail({}, "/", 0, {}, "", (), machine.workspace, jail.Space(), granted=entry.granted, uid=entry.uid)
        args += jail.git_walls(walls, fds, stack)
    if entry.files:
        args += ["--perms", "0755", "--size", str(_size(entry.files)), "--tmpfs", INPUTS]
        for name, content in entry.files.items():
            fds.append(jail.memory_file(content, stack))
            args += ["--perms", "0444", "--file", str(fds[-1]), f"{INPUTS}/{name}"]
        args += ["--remount-ro", INPUTS]
    args += ["--remount-ro", "/", "--chdir", entry.cwd]
    return [*args, *jail.filtered(fds, stack)], fds


def joining(holder: int) -> list[str]:
    """The command line that takes the next program into a machine's namespaces; its children get into all of them."""
    spaces = ("--user", "--mount", "--net", "--ipc", "--uts", "--pid", "--no-fork", "--preserve-credentials")
    return ["nsenter", "--target", str(holder), *spaces, "--"]


def _etc(machine: MachineSpec) -> Iterator[tuple[str, bytes]]:
    shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
    root = machine.home if machine.user == "root" else "/root"
    group = "" if machine.user == "root" else f"user:x:{jail.GUEST_ID}:\n"
    account = "" if machine.user == "root" else f"user:x:{jail.GUEST_ID}:{jail.GUEST_ID}:user:{machine.home}:{shell}\n"
    nobody = "nobody:x:65534:65534:nobody:/:/bin/false\n"
    yield "passwd", f"root:x:0:0:root:{root}:{shell}\n{account}{nobody}".encode()
    yield "group", f"root:x:0:\n{group}nogroup:x:65534:\n".encode()
    yield "hosts", b"127.0.0.1 localhost belljar\n::1 localhost\n"
    yield "hostname", b"belljar\n"
    yield "gitconfig", _GIT.format(user=machine.user).encode()
    yield "nsswitch.conf", b"passwd: files\ngroup: files\nhosts: files dns\n"
    for name in _ETC_COPIED:
        path = Path("/etc", name)
        if path.is_file() and path.stat().st_size <= _MOST_FILE_BYTES and os.access(path, os.R_OK):
            yield name, path.read_bytes()


def _size(files: Mapping[str, bytes]) -> int:
    """Bytes of a file system that holds them, page by page."""
    return sum(len(content) + 8192 for content in files.values()) + 65536


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")
