"""Attacks on copies of living sandboxes: what a guest leaves to be read into a snapshot, and what a fork shares."""

from __future__ import annotations

from contextlib import suppress

from belljar.core import errors
from belljar.core.result import Result
from belljar.sandbox import AsyncSandbox, aremove_snapshot
from belljar.testing.escape.attacks import Attack
from belljar.testing.escape.scenarios import Range, escaped_by

_UNCONTROLLED = "without walls there are no snapshots"

_LOOK = """
import stat
bad = []
for folder, folders, names in os.walk("/workspace"):
    if folder.count("/") > 40:
        folders.clear()
    for name in (*folders, *names):
        path = os.path.join(folder, name)
        mode = os.lstat(path).st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or mode & 0o6000:
            bad.append(f"{path} {stat.filemode(mode)}")
        elif stat.S_ISREG(mode) and os.access(path, os.R_OK):
            print(open(path, errors="replace").read(1000))
escaped(bad) if bad else held("plain files, folders and links")
"""


async def _snapshot(range_: Range) -> Result:
    """Takes snapshots while the guest swaps what is in them, and looks around in a sandbox that begins with each."""
    async with range_.sandbox() as box:
        left = await box.run(range_.payload)
        swapper = await box.start(["python3", "-c", range_.ready(_SWAP)])
        result = left
        for _ in range(3):
            try:
                taken = await box.snapshot()
            except (errors.BelljarError, OSError):
                continue  # refused: the guest's folders are too large, or would not hold still
            try:
                async with AsyncSandbox(
                    backend=range_.backend, engine=range_.engine, snapshot=taken, **range_.options
                ) as copy:
                    result = await copy.run(range_.ready(_LOOK))
            finally:
                await aremove_snapshot(taken.id, engine=range_.engine)
            if "ESCAPED" in result.stdout or range_.bait.secret in result.stdout:
                break
        with suppress(errors.BelljarError):
            await swapper.kill()
    return result


_SWAP = """
import ctypes, time
libc = ctypes.CDLL(None)
os.chdir("/workspace")
os.symlink("@folder@", "swapped")
os.mkdir("swapped.folder")
open("swapped.folder/canary", "w").write("mine")
end = time.monotonic() + 15
while time.monotonic() < end:
    libc.renameat2(-100, b"swapped", -100, b"swapped.folder", 2)
"""


async def _fork(range_: Range) -> Result:
    """Forks a sandbox, and looks in each for what the other does afterwards."""
    async with range_.sandbox() as box:
        await box.run(range_.payload)
        try:
            fork = await box.fork()
        except errors.NotAvailable as lack:
            return Result(status="success", stdout=f"HELD there are no forks: {lack.message}\n")
        try:
            result = await fork.run(range_.ready(_FIND))
            await fork.files.write("/workspace/of-the-fork", "x")
            if await box.files.exists("/workspace/of-the-fork"):
                return escaped_by(result, "a file of the fork appeared in the original")
            await box.files.write("/workspace/of-the-original", "x")
            if await fork.files.exists("/workspace/of-the-original"):
                return escaped_by(result, "a file of the original appeared in the fork")
            if any(range_.bait.marker in process.command for process in await fork.processes()):
                return escaped_by(result, "a process of the original is listed in the fork")
        finally:
            await fork.close()
    return result


_FIND = """
import socket
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if "@marker@" in open(f"/proc/{pid}/cmdline").read():
            escaped(f"process {pid}")
    except OSError:
        pass
plug = socket.socket()
plug.settimeout(3)
refused("connect", lambda: plug.connect(("127.0.0.1", @free_port@)))
"""

SNAPSHOTS = (
    Attack(
        name="snapshot of links", category="living", living=True, feature="snapshot",
        tries="leaves links to the host, pipes and locked files in a snapshot, and swaps some while it is taken",
        payload="""
os.chdir("/workspace")
for target, name in (("@canary@", "link"), ("@folder@", "folder"), ("../../../../../../..@canary@", "up"),
                     ("/proc/self/root@canary@", "root"), ("/etc/shadow", "shadow"), ("/dev/zero", "zero")):
    link(target, name)
os.mkfifo("pipe")
open("locked", "w").write("mine")
for mode in (0o6755, 0o4755, 0):
    try:
        os.chmod("locked", mode)
    except OSError:
        pass
try:
    os.link("@canary@", "hard")
except OSError:
    pass
here = os.open(".", os.O_RDONLY)
for _ in range(400):
    os.mkdir("d", dir_fd=here)
    here, above = os.open("d", os.O_RDONLY, dir_fd=here), here
    os.close(above)
held("left them")
""",
        held="links stay links, and nothing of the host is in it", scenario=_snapshot,
        control="none", uncontrolled=_UNCONTROLLED,
    ),
    Attack(
        name="fork's original", category="neighbours", living=True, feature="snapshot",
        tries="looks from a fork for processes, ports and later files of the sandbox that it was made of",
        payload="""
import socket, subprocess
server = socket.create_server(("127.0.0.1", @free_port@))
sleeper = [sys.executable, "-c", "import time; time.sleep(15)", "@marker@-original"]
subprocess.Popen(sleeper, pass_fds=(server.fileno(),))
held("left them")
""",
        held="it finds nothing: only files are copied", scenario=_fork, control="none", uncontrolled=_UNCONTROLLED,
    ),
)  # fmt: skip
