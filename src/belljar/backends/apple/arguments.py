"""The arguments for Apple's `container`, and the small programs inside. Every dangerous choice is in this file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from belljar.backends.containers.spec import GUEST_ENV, KEEPER
from belljar.core.plan import INPUTS
from belljar.core.request import Limits, Workspace
from belljar.core.values import MIB, WORKSPACE

LABEL = "belljar"
OWNER = "belljar.owner"
BALLAST = "/run/belljar"
LEAST_MEMORY = 200 * MIB  # with less, no virtual machine of Apple's boots
_OWN_PROCESSES = 1  # the shell that waits for the guest
# Words of `container run --help` without which there is no wall.
NEEDED = ("--cap-drop", "--init", "--label", "--mount", "--network", "--read-only", "--user")

# Becomes the guest's parent. It sets what must hold for the guest before any word of the guest's is looked at (its
# environment, too, comes after), says the mark, and ends whatever the guest started when the guest has ended.
# The shell's own stderr is shut: what it says of a killed child is not the guest's word.
RUN = (
    "pids=$1 sure=$2 loader=$3 filter=$4 cwd=$5 input=$6; shift 6; exec 3>&2 2>/dev/null; "
    'no() { echo "$1" >&3; exit 125; }; '
    'ulimit -u "$pids" || ulimit -p "$pids" || no "no limit on processes can be set"; ulimit -n 1024; ulimit -c 0; '
    'mkdir -p -- "$cwd"; cd -- "$cwd" || no "there is no folder $cwd"; [ -n "$input" ] || exec </dev/null; '
    'set -- /usr/bin/env "$@"; python=; for one in /usr/bin/python3 /usr/local/bin/python3; do '
    '[ -x "$one" ] && python=$one; done; '
    'if [ -n "$python" ] && [ -n "$filter" ]; then set -- "$python" -I -S -c "$loader" "$filter" "$@"; fi; '
    'for one in /usr/bin/setpriv /bin/setpriv; do if [ -x "$one" ]; then '
    'set -- "$one" --no-new-privs "$@"; sure=; break; fi; done; [ -z "$sure" ] || no "the image has no setpriv"; '
    'printf "%s\\n" "$0" >&3; "$@" 2>&3 3>&-; code=$?; kill -9 -1; exit "$code"'
)
# Puts our seccomp profile in place, where the image has a Python that can. It is no wall that is promised: the
# machine's own kernel is. So where it cannot be done, the guest is run without it.
LOADER = """
import os, sys
try:
    import base64, ctypes
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]
    code = base64.b64decode(sys.argv[1])
    libc = ctypes.CDLL(None)
    libc.prctl(38, 1, 0, 0, 0)
    libc.prctl(22, 2, ctypes.byref(Program(len(code) // 8, code)))
except Exception:
    pass
os.execv(sys.argv[2], sys.argv[2:])
"""
# A name with "=" in it would be a variable to env.
LITERAL = 'exec "$0" "$@"'
# Takes up what a machine has above its limit, because none that small would boot, in a folder that is closed to guests.
FILL = 'head -c "$1" /dev/zero > "$0/ballast"'
# A signal to -1 reaches all that the guest's uid runs, at once, so no fork outruns it; and nothing of any other uid.
SWEEP = (
    'kill -9 -1 2>/dev/null; at=/sys/fs/cgroup; own=$(sed -n "s/^0:://p" /proc/self/cgroup 2>/dev/null); '
    'for one in "$at$own" "$at" "$at/memory" "$at/cpuacct"; do '
    "for file in memory.events memory.oom_control memory.peak memory.max_usage_in_bytes cpu.stat cpuacct.usage; do "
    '[ -r "$one/$file" ] && { echo "$file:"; cat "$one/$file"; }; done; done 2>/dev/null; '
    'echo kernel:; sed -n "s/^oom_kill /oom_kill /p" /proc/vmstat; echo end:'
)
# What a guest left where the keeper must put something: taken away by the guest's own uid, links and all.
CLEAR = (
    'cd "$0" || exit 1; for path; do if [ -L "./$path" ] || [ ! -d "./$path" ]; then rm -f -- "./$path"; fi; '
    "while :; do case $path in */*) path=${path%/*};; *) break;; esac; "
    'if [ -L "./$path" ] || [ ! -d "./$path" ]; then rm -f -- "./$path"; else chmod 1777 "./$path"; fi; done; '
    "done 2>/dev/null; exit 0"
)
TOOLS = ("sh", "cat", "env", "tar", "find", "stat", "head", "mktemp", "mv", "mkdir", "rmdir")
LOOK = (
    "cat /proc/self/status; echo boot:; cat /proc/sys/kernel/random/boot_id; echo devices:; cat /proc/net/dev; "
    "echo routes:; cat /proc/net/route; echo root:; ( : > /usr/belljar-probe ) 2>&1 || echo refused; echo tools:; "
    f"for one in {' '.join(TOOLS)} python3; do command -v $one; done; echo end:"
)


class Machine(NamedTuple):
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


def run(machine: Machine) -> list[str]:
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
    return ["exec", *flags, "--user", f"{uid}:{uid}", "--workdir", "/", name, "/bin/sh", "-c", script, *words]


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
    literal = ["/bin/sh", "-c", LITERAL] if "=" in argv[0] else []
    variables = [f"{key}={value}" for key, value in {**GUEST_ENV, **env}.items()]
    sure, fed = ("yes" if flag else "" for flag in (watch.sure, stdin))
    words = (watch.mark, str(pids + _OWN_PROCESSES), sure, LOADER, watch.filter, cwd, fed)
    return inside(name, uid, RUN, *words, *variables, *literal, *argv, stdin=stdin)


def build(
    context: str, tag: str, *, file: str = "", memory_bytes: int | None = None, cpus: float | None = None
) -> list[str]:
    words = ["build", "--progress", "plain", "--tag", tag]
    words += ["--file", file] if file else []
    words += ["--memory", f"{-(-memory_bytes // MIB)}M"] if memory_bytes else []
    words += ["--cpus", str(math.ceil(cpus))] if cpus else []
    return [*words, context]
