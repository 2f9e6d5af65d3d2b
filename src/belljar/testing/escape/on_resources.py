"""Attacks by quantity and by time. Each is bounded, so that it harms nobody even where nothing stops it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from belljar.core.result import Result, Status
from belljar.core.values import KIB, MIB
from belljar.testing.escape.attacks import Attack
from belljar.testing.escape.bait import Bait

OOM = frozenset({Status.OOM_KILLED})
FULL = frozenset({Status.OOM_KILLED, Status.DISK_LIMIT})
LATE = frozenset({Status.TIMEOUT})
_KEPT = 64 * KIB


def _left_behind(mark: str) -> str:
    return f"@marker@-{mark}"


def _gone(mark: str) -> Callable[[Result, Bait], str]:
    """Nothing that carries the mark may run on the host any more; what does is ended here, by its pid."""

    def look(result: Result, bait: Bait) -> str:
        deadline = time.monotonic() + 2
        while (left := bait.running(_left_behind(mark))) and time.monotonic() < deadline:
            time.sleep(0.02)  # in a thread of its own; there is nothing to wait on
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return f"{len(left)} of its processes outlived it" if left else ""

    return look


def in_time(result: Result, bait: Bait) -> str:
    return f"it ran for {result.duration_ms:.0f} ms" if result.duration_ms > 5000 else ""


def _soon_after(result: Result, bait: Bait) -> str:
    """For an attack that keeps every core busy: its end may take seconds, and not more."""
    return f"it ran for {result.duration_ms:.0f} ms" if result.duration_ms > 10_000 else ""


def _output_was_cut(result: Result, bait: Bait) -> str:
    kept = max(len(result.stdout), len(result.stderr))
    if kept > _KEPT + KIB:
        return f"{kept} characters were kept of a limit of {_KEPT}"
    return "" if result.truncated else "the cut was not flagged"


_DAEMON = """
need("fork")
import signal, time
started, starting = os.pipe()  # its last end is closed by the daemon's exec: only then is there anything to be seen
if os.fork() == 0:
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if os.fork() == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(20)", "@marker@-{mark}"])
    os._exit(0)
os.close(starting)
os.read(started, 1)
os.wait()
"""

RESOURCES = (
    Attack(
        name="daemon after the end", category="processes",
        tries="leaves a daemon behind (two forks, a session of its own, deaf to signals) and ends",
        payload=_DAEMON.format(mark="end") + "held('left')", held="nothing of it runs on the host afterwards",
        after=_gone("end"),
    ),
    Attack(
        name="daemon after a timeout", category="processes",
        tries="leaves a daemon behind and is then ended by the time limit",
        payload=_DAEMON.format(mark="late") + "time.sleep(15)", held="the whole tree is killed",
        options={"timeout": 1.5}, ends=LATE, after=_gone("late"),
    ),
    Attack(
        name="deaf to signals", category="processes", tries="ignores every signal it can and outstays its time",
        payload="""
import signal, time
for number in range(1, 32):
    try:
        signal.signal(number, signal.SIG_IGN)
    except OSError:
        pass
end = time.monotonic() + 6
while time.monotonic() < end:
    pass
escaped("ran past its time")
""",
        held="it is ended when its time is up", options={"timeout": 1}, ends=LATE, after=in_time,
    ),
    Attack(
        name="fork bomb", category="resources", tries="starts 400 processes with a limit of 40",
        payload="""
need("fork")
read, write = os.pipe()
started = 0
for _ in range(400):
    try:
        pid = os.fork()
    except OSError as error:
        held(f"stopped after {started}: {error.strerror}")
    if pid == 0:
        os.close(write)
        os.read(read, 1)  # until the parent ends
        os._exit(0)
    started += 1
escaped(f"{started} processes")
""",
        held="the pids limit stops it", options={"pids": 40, "timeout": 20},
        ends=frozenset({Status.KILLED, Status.OOM_KILLED}),
    ),
    Attack(
        name="forks without end", category="resources", tries="forks in 30 processes at a time, past its time",
        payload="""
need("fork")
import time
end = time.monotonic() + 12
for _ in range(30):
    try:
        if os.fork() == 0:
            break
    except OSError:
        break
while time.monotonic() < end:
    try:
        if os.fork() == 0:
            os._exit(0)
        os.wait()
    except OSError:
        pass
escaped("ran past its time")
""",
        held="it is ended when its time is up, and whoever ran it has an answer soon after",
        options={"pids": 64, "timeout": 2}, ends=LATE | {Status.ERROR, Status.KILLED, Status.OOM_KILLED},
        after=_soon_after, control="none", uncontrolled="it would keep every core of the host busy for seconds",
    ),
    Attack(
        name="memory", category="resources", tries="uses 512 MB with a limit of 64",
        payload="""
try:
    kept = [b"%d" % n * (4 << 20) for n in range(10, 74)]
except MemoryError:
    held("no more memory")
escaped(f"{len(kept) * 8} MB")
""",
        held="it is killed, or refused the memory", options={"memory": "64M"}, ends=OOM,
    ),
    Attack(
        name="memory by many", category="resources", tries="has eight children use 32 MB each with a limit of 64",
        payload="""
need("fork")
import signal
done, go = os.pipe(), os.pipe()
pids = []
for _ in range(8):
    pid = os.fork()
    if pid == 0:
        try:
            kept = b"x" * (32 << 20)
            os.write(done[1], b"+")
        except MemoryError:
            os.write(done[1], b"-")
        os.close(go[1])
        os.read(go[0], 1)  # holds it until the parent ends
        os._exit(0)
    pids.append(pid)
os.close(done[1])
got = b""
while len(got) < 8 and (more := os.read(done[0], 8)):
    got += more
    signal.alarm(8)
escaped("256 MB at once") if got.count(b"+") == 8 else held(f"{got.count(b'+')} of 8 got theirs")
""",
        held="the limit counts the whole tree", options={"memory": "64M", "timeout": 15},
        ends=OOM | LATE | {Status.ERROR},
    ),
    Attack(
        name="shared memory", category="resources", tries="fills /dev/shm with 256 MB with a memory limit of 64",
        payload="""
try:
    fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
    for _ in range(256):
        os.write(fd, bytes(1 << 20))
except OSError as error:
    held(error.strerror)
escaped("256 MB")
""",
        held="it is full, or the memory limit strikes", options={"memory": "64M"}, ends=FULL,
    ),
    Attack(
        name="disk", category="resources", tries="writes 48 MB to each writable folder with a limit of 16",
        payload="""
def fill(folder):
    with open(os.path.join(folder, "flood-@marker@"), "wb", buffering=0) as file:
        os.unlink(file.name)
        for _ in range(48):
            if file.write(bytes(1 << 20)) < 1 << 20:
                raise OSError(0, "short write")
    return "48 MB"
every("write", [(f, lambda f=f: fill(f)) for f in (".", "/tmp", "/var/tmp")])
""",
        held="the disk is full before that", options={"disk": "16M"}, ends=FULL,
    ),
    Attack(
        name="inodes", category="resources", tries="makes 150,000 empty files with 64 MB of memory and 16 of disk",
        payload="""
os.mkdir("many")
where = os.open("many", os.O_RDONLY)
try:
    for number in range(150_000):
        os.close(os.open(str(number), os.O_CREAT | os.O_WRONLY, dir_fd=where))
except OSError as error:
    held(f"{number} files: {error.strerror}")
escaped("150000 files")
""",
        held="the folder is full, or the memory limit strikes", options={"disk": "16M", "memory": "64M"}, ends=FULL,
        control="none", uncontrolled="it would press 150,000 inodes into the host's own disk",
    ),
    Attack(
        name="socket buffers", category="resources",
        tries="leaves 192 MB unread in connections to itself with a memory limit of 64",
        payload="""
import socket, time
try:
    server = socket.create_server(("127.0.0.1", 0))
except OSError as error:
    held(error)
kept, stuck = [server], 0
for _ in range(200):
    near = socket.create_connection(server.getsockname(), timeout=3)
    far = server.accept()[0]
    kept += [near, far]
    near.setblocking(False)
    try:
        while True:
            stuck += near.send(bytes(1 << 16))
    except BlockingIOError:
        pass
    if stuck > 192 << 20:
        time.sleep(2)  # where memory is sampled a burst passes; what counts is that it cannot stay
        escaped(f"{stuck >> 20} MB in {len(kept) // 2} connections")
held(f"{stuck >> 20} MB in {len(kept) // 2} connections")
""",
        held="the memory limit strikes, or sockets take no more", options={"memory": "64M"}, ends=OOM,
    ),
    Attack(
        name="asynchronous I/O", category="resources",
        tries="takes 20,000 of the 65,536 asynchronous I/O slots that all of the host has to share",
        payload="""
import ctypes
taken = 0
while taken < 20_000:
    context = ctypes.c_ulong(0)
    value, error = call("io_setup", 1000, ctypes.byref(context))
    if value == -1:
        held(f"{taken} slots, then {errno.errorcode[error]}")
    taken += 1000
escaped(f"{taken} slots")
""",
        held="it gets none, or a share of its own",
    ),
    Attack(
        name="descriptors", category="resources", tries="opens 5,000 descriptors",
        payload="""
import resource
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
try:
    kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(5000)]
except OSError as error:
    held(f"{error.strerror} (the limit is {hard})")
escaped(f"{len(kept)} descriptors")
""",
        held="the limit stops it",
    ),
    Attack(
        name="output flood", category="resources", tries="prints 24 MB with a limit of 64 KB",
        payload="for _ in range(24): sys.stdout.write(('y' * 1023 + '\\n') * 1024)",
        held="the rest is dropped and the cut is flagged", options={"output": _KEPT},
        ends=frozenset({Status.OUTPUT_LIMIT}), after=_output_was_cut,
    ),
    Attack(
        name="log flood", category="resources", tries="prints one endless line of 8 MB to stderr with a limit of 64 KB",
        payload="for _ in range(8): os.write(2, b'y' * MIB)".replace("MIB", str(MIB)),
        held="the rest is dropped and the cut is flagged", options={"output": _KEPT},
        ends=frozenset({Status.OUTPUT_LIMIT}), after=_output_was_cut,
    ),
)  # fmt: skip
