"""Attacks of a sandbox that is kept: on the memory of the host, command by command, and on those who hear it."""

from __future__ import annotations

from belljar.core import errors
from belljar.core.result import Result
from belljar.session.session import AsyncSession
from belljar.testing.escape.attacks import Attack
from belljar.testing.escape.on_resources import FULL
from belljar.testing.escape.scenarios import Range, escaped_by
from belljar.testing.stalls import Stalls

_COMMANDS = 6
_MANY_FILES = 50_000
_STALL_SECONDS = 1.0  # of CPU
_UNCONTROLLED = "it would fill the host's own disk, which outlives every command by nature"

_FILL = """
import time
folder = ("/workspace", "/tmp")[time.time_ns() // 1000 % 2]
with open(f"{folder}/{time.time_ns()}", "wb", buffering=0) as file:
    for _ in range(40):
        file.write(bytes(1 << 20))
"""
_LOOK = """
held_bytes = sum(one.stat().st_size for folder in ("/workspace", "/tmp") for one in os.scandir(folder))
if held_bytes > 160 << 20:
    escaped(f"{held_bytes >> 20} MB")
held(f"{held_bytes >> 20} MB")
"""
_TOUCH = """
import time
os.makedirs("many", exist_ok=True)  # not among the modules, which wasm would list for minutes
for number in range(1, 12_001):
    os.close(os.open(f"many/{time.time_ns()}-{number}", os.O_CREAT | os.O_WRONLY))
    if number % 1000 == 0:
        print(number, flush=True)
"""
# A frame that takes seconds to parse, into whatever leads to the host: a pipe, or a function of the interpreter's.
_FRAMES = """
import os, threading, time
line = b'{"display": {"application/json": [' + b"[]," * 4_000_000 + b"[]]}}\\n"
def pour(fd):
    view = memoryview(line)
    while True:
        sent = 0
        while sent < len(view):
            sent += os.write(fd, view[sent:])
def is_pipe(fd):
    try:
        return "pipe:" in os.readlink(f"/proc/self/fd/{fd}") and os.write(fd, b"\\n")
    except OSError:
        return False
try:
    from _host import call
except ImportError:
    for fd in filter(is_pipe, range(3, 20)):
        threading.Thread(target=pour, args=(fd,), daemon=True).start()
    time.sleep(2)
else:
    for _ in range(10):
        call(line[:-1])
"""


async def _many_files(range_: Range) -> Result:
    """Runs the payload in one sandbox, command after command, and looks at how much it holds then."""
    async with range_.sandbox() as box:
        for _ in range(_COMMANDS):
            ended = await box.run(range_.payload)
        after = await box.run(range_.ready(_LOOK))
    return after if "HELD" in after.stdout or "ESCAPED" in after.stdout else ended


async def _many_inodes(range_: Range) -> Result:
    """The same, but each command says how far it came: listing so many files would take the guest too long."""
    made = 0
    async with range_.sandbox() as box:
        for _ in range(_COMMANDS):
            ended = await box.run(range_.payload)
            made += max(map(int, ended.stdout.split()), default=0)
    if made > _MANY_FILES:
        return escaped_by(ended, f"{made} files")
    return ended.model_copy(update={"stdout": f"HELD {made} files\n"})


async def _flood_of_frames(range_: Range) -> Result:
    """A session's turn and the time after it, while the event loop of Belljar is watched."""
    try:
        session = AsyncSession(backend=range_.backend, engine=range_.engine, **range_.options)
        async with session, Stalls() as stalls:
            ended = await session.run(_FRAMES, timeout=10)
    except errors.NotAvailable as lack:
        return Result(status="success", stdout=f"HELD there are no sessions: {lack.message}\n")
    if stalls.longest > _STALL_SECONDS:
        return escaped_by(ended, f"everybody else waited for {stalls.longest:.1f} s")
    return ended.model_copy(update={"stdout": f"HELD nobody waited for more than {stalls.longest:.2f} s\n"})


KEPT_BOXES = (
    Attack(
        name="files across commands", category="resources",
        tries="fills a kept sandbox with 40 MB in each of six commands, with 64 MB of memory", payload=_FILL,
        held="it holds no more than its memory, however many commands there were",
        options={"memory": "64M", "disk": "1G"}, scenario=_many_files,
        ends=FULL, control="none", uncontrolled=_UNCONTROLLED,
    ),
    Attack(
        name="inodes across commands", category="resources",
        tries="makes 12,000 empty files in each of six commands of a kept sandbox, with 64 MB of memory and 16 of disk",
        payload=_TOUCH, held="the number of files is limited, or the memory that they cost",
        options={"memory": "64M", "disk": "16M"}, scenario=_many_inodes,
        ends=FULL, control="none", uncontrolled=_UNCONTROLLED,
    ),
    Attack(
        name="session frames", category="resources",
        tries="sends its session's host frames of 12 MB that take seconds to parse", payload=_FRAMES,
        held="they are thrown away unparsed, and nobody else waits", options={"output": "64K"},
        scenario=_flood_of_frames, control="none", uncontrolled="there is no session without Belljar",
    ),
)  # fmt: skip
