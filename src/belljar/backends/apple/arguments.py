"""The arguments for Apple's `container`, and the small programs inside. Every dangerous choice is in this file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from belljar.backends.containers.spec import GUEST_ENV, KEEPER
from belljar.backends.guest_text import python_program, shell_script
from belljar.core.plan import INPUTS
from belljar.core.request import Limits, Workspace
from belljar.core.values import MIB, WORKSPACE
from belljar.host.guest_uid import group_of

LABEL = "belljar"
OWNER = "belljar.owner"
BALLAST = "/run/belljar"
LEAST_MEMORY = 200 * MIB  # with less, no virtual machine of Apple's boots
_OWN_PROCESSES = 1  # the shell that waits for the guest
# Words of `container run --help` without which there is no wall.
NEEDED = ("--cap-drop", "--init", "--label", "--mount", "--network", "--read-only", "--user")

TOOLS = ("sh", "cat", "env", "tar", "find", "stat", "head", "mktemp", "mv", "mkdir", "rmdir")


class AppleMachine(NamedTuple):
    """All that differs from one virtual machine to the next."""

    name: str
    image: str
    limits: Limits
    owner: str
    workspace: Workspace | None = None


def memory(limits: Limits) -> int:
    """Whole megabytes, rounded down: a guest gets no more than was said; but never less than boots."""
    return max(LEAST_MEMORY, limits.memory // MIB * MIB)


def ballast(limits: Limits) -> int:
    return max(0, memory(limits) - limits.memory)


def disk(limits: Limits) -> int:
    """Each writable folder is in the guest's memory: together they must leave room for the guest itself."""
    return max(1, min(limits.disk, limits.memory * 3 // 8) // MIB) * MIB  # below a megabyte `size` means: any size


def run(machine: AppleMachine) -> list[str]:
    """Boots it. Its first program only repeats its stdin, so it ends when we close that, or die."""
    limits = machine.limits
    words = [
        "run", "--interactive", "--rm", "--progress", "none", "--name", machine.name,
        "--label", f"{LABEL}=box", "--label", f"{OWNER}={machine.owner}",
        "--cpus", str(math.ceil(limits.cpus)), "--memory", f"{memory(limits) // MIB}M",
        "--network", "none", "--read-only", "--cap-drop", "ALL", "--init", "--user", f"{KEEPER}:{KEEPER}",
    ]  # fmt: skip
    locked = machine.workspace is not None and not machine.workspace.write
    folders = {
        WORKSPACE: "755" if locked else "1777",
        "/tmp": "1777",
        **({INPUTS: "1777"} if machine.workspace else {}),
    }
    for folder, mode in folders.items():
        words += ["--mount", f"type=tmpfs,target={folder},size={disk(limits) // MIB}M,mode={mode}"]
    if ballast(limits):
        words += ["--mount", f"type=tmpfs,target={BALLAST},size={LEAST_MEMORY // MIB}M,mode=700"]
    return [*words, "--workdir", "/", "--entrypoint", "cat", machine.image]


def inside(name: str, uid: int, script: str, *words: str, stdin: bool = False) -> list[str]:
    """A small program of ours in a running machine."""
    flags = ["--interactive"] if stdin else []
    return ["exec", *flags, "--user", f"{uid}:{group_of(uid)}", "--workdir", "/", name, "/bin/sh", "-c", script, *words]


class GuestLaunch(NamedTuple):
    """What the guest's parent has to see to."""

    mark: str
    sure: bool  # is it an error if the image has no setpriv?
    filter: str  # the compiled seccomp profile as base64, or empty


def guest(
    name: str,
    uid: int,
    watch: GuestLaunch,
    pids: int,
    *,
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    stdin: bool,
) -> list[str]:
    """The guest's program, below the shell that watches over it."""
    literal = ["/bin/sh", "-c", shell_script("apple/exec_literal")] if "=" in argv[0] else []
    variables = [f"{key}={value}" for key, value in {**GUEST_ENV, **env}.items()]
    sure, fed = ("yes" if flag else "" for flag in (watch.sure, stdin))
    words = (watch.mark, str(pids + _OWN_PROCESSES), sure, python_program("seccomp_loader"), watch.filter, cwd, fed)
    return inside(name, uid, shell_script("apple/run"), *words, *variables, *literal, *argv, stdin=stdin)


def build(
    context: str, tag: str, *, file: str = "", memory_bytes: int | None = None, cpus: float | None = None
) -> list[str]:
    words = ["build", "--progress", "plain", "--tag", tag]
    words += ["--file", file] if file else []
    words += ["--memory", f"{-(-memory_bytes // MIB)}M"] if memory_bytes else []
    words += ["--cpus", str(math.ceil(cpus))] if cpus else []
    return [*words, context]
