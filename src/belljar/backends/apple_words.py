"""The arguments for Apple's `container`, and the small programs inside. Every dangerous choice is in this file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from belljar.backends.docker_spec import GUEST_ENV, KEEPER
from belljar.models import INPUTS, MIB, WORKSPACE, Limits, Workspace

LABEL = "belljar"
OWNER = "belljar.owner"
LEAST_MEMORY = 200 * MIB  # with less, no virtual machine of Apple's boots
_OWN_PROCESSES = 1  # the shell that waits for the guest
# Words of `container run --help` without which there is no wall.
NEEDED = ("--cap-drop", "--init", "--label", "--mount", "--network", "--read-only", "--user")

# Becomes the guest's parent. It sets what must hold for the guest before any word of the guest's is looked at (its
# environment, too, comes after), says the mark, and ends whatever the guest started when the guest has ended.
# The shell's own stderr is shut: what it says of a killed child is not the guest's word.
RUN = (
    'pids=$1 data=$2 cwd=$3 input=$4; shift 4; exec 3>&2 2>/dev/null; '
    'ulimit -u "$pids" || ulimit -p "$pids" || { echo "no limit on processes" >&3; exit 125; }; '
    'if [ -n "$data" ]; then ulimit -d "$data" || { echo "no limit on memory" >&3; exit 125; }; fi; ulimit -c 0; '
    'mkdir -p -- "$cwd"; cd -- "$cwd" || { echo "no folder $cwd" >&3; exit 125; }; '
    '[ -n "$input" ] || exec </dev/null; last=; '
    'for one in /usr/bin/setpriv /bin/setpriv; do [ -x "$one" ] && last="$one --no-new-privs"; done; '
    'printf "%s\\n" "$0" >&3; $last /usr/bin/env "$@" 2>&3 3>&-; code=$?; kill -9 -1; exit "$code"'
)
# A name with "=" in it would be a variable to env.
LITERAL = 'exec "$0" "$@"'
# A signal to -1 reaches all that the guest's uid runs, at once, so no fork outruns it; and nothing of any other uid.
SWEEP = (
    'kill -9 -1 2>/dev/null; at=/sys/fs/cgroup; own=$(sed -n "s/^0:://p" /proc/self/cgroup 2>/dev/null); '
    'for one in "$at$own" "$at" "$at/memory" "$at/cpuacct"; do '
    'for file in memory.events memory.oom_control memory.peak memory.max_usage_in_bytes cpu.stat cpuacct.usage; do '
    '[ -r "$one/$file" ] && { echo "$file:"; cat "$one/$file"; }; done; done 2>/dev/null; '
    'echo kernel:; sed -n "s/^oom_kill /oom_kill /p" /proc/vmstat; echo end:'
)
# What a guest left where the keeper must put something: taken away by the guest's own uid, links and all.
CLEAR = (
    'cd "$0" || exit 1; for path; do if [ -L "./$path" ] || [ ! -d "./$path" ]; then rm -f -- "./$path"; fi; '
    'while :; do case $path in */*) path=${path%/*};; *) break;; esac; '
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


def disk(limits: Limits) -> int:
    """Each writable folder is in the guest's memory: together they must leave room for the guest itself."""
    return max(1, min(limits.disk, memory(limits) * 3 // 8) // MIB) * MIB  # below a megabyte `size` means: any size


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
    folders = {WORKSPACE: "755" if locked else "1777", "/tmp": "1777", **({INPUTS: "1777"} if machine.workspace else {})}
    for folder, mode in folders.items():
        words += ["--mount", f"type=tmpfs,target={folder},size={disk(limits) // MIB}M,mode={mode}"]
    return [*words, "--workdir", "/", "--entrypoint", "cat", machine.image]


def inside(name: str, uid: int, script: str, *words: str, stdin: bool = False) -> list[str]:
    """A small program of ours in a running machine."""
    flags = ["--interactive"] if stdin else []
    return ["exec", *flags, "--user", f"{uid}:{uid}", "--workdir", "/", name, "/bin/sh", "-c", script, *words]


def guest(
    name: str, uid: int, mark: str, limits: Limits, *, argv: Sequence[str], env: Mapping[str, str], cwd: str, stdin: bool
) -> list[str]:
    """The guest's program, below the shell that watches over it."""
    # Where the machine is larger than the limit, because none is that small, each process is held to it by itself.
    data = str(limits.memory // 1024) if limits.memory < LEAST_MEMORY else ""
    literal = ["/bin/sh", "-c", LITERAL] if "=" in argv[0] else []
    variables = [f"{key}={value}" for key, value in {**GUEST_ENV, **env}.items()]
    pids = str(limits.pids + _OWN_PROCESSES)
    fed = "yes" if stdin else ""
    return inside(name, uid, RUN, mark, pids, data, cwd, fed, *variables, *literal, *argv, stdin=stdin)


def build(context: str, tag: str, *, file: str = "", memory_bytes: int | None = None, cpus: float | None = None) -> list[str]:
    words = ["build", "--progress", "plain", "--tag", tag]
    words += ["--file", file] if file else []
    words += ["--memory", f"{-(-memory_bytes // MIB)}M"] if memory_bytes else []
    words += ["--cpus", str(math.ceil(cpus))] if cpus else []
    return [*words, context]
