"""Walls of living sandboxes that need a terminal, or a look from outside, to be seen."""

from __future__ import annotations

import os
import pty
import sys

import pytest

import belljar
from belljar.host import mounted

pytestmark = pytest.mark.anyio

# Belljar on a terminal of its own, with a sandbox whose guest has put its own programs under names that we use.
_ON_A_TERMINAL = """
import anyio, belljar, sys

MINE = "#!/bin/sh\\n(exec </dev/tty) 2>/dev/null && echo REACHED the terminal of Belljar\\necho REPLACED $0\\n"

async def main():
    async with belljar.AsyncSandbox(backend="native", living=True) as box:
        for name in ("setsid", "prlimit", "env", "sh", "nsenter", "bwrap", "chroot"):
            await box.files.write(f"~/.local/bin/{name}", MINE, mode=0o755)
        commands = {
            "plain": await box.start(["/bin/sh", "-c", "(exec </dev/tty) 2>/dev/null && echo REACHED; echo plain"]),
            "typed": await box.start(["/bin/sh", "-c", "tty; (exec </dev/tty) && echo typed"], pty=(80, 24)),
        }
        for name, process in commands.items():
            print(name, (await process.wait(20)).stdout.split(), file=sys.stderr)

anyio.run(main)
"""


def _on_a_terminal(code: str) -> str:
    """Runs Python with a controlling terminal of its own; returns what it wrote there."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", code])
    said = b""
    try:
        while piece := os.read(terminal, 4096):
            said += piece
    except OSError:  # nobody has it open any more
        pass
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)
    return said.decode()


def test_programs_of_a_guest_do_not_run_in_place_of_ours_nor_get_the_terminal_of_belljar() -> None:
    said = _on_a_terminal(_ON_A_TERMINAL)
    assert "plain ['plain']" in said and "typed ['/dev/pts/0', 'typed']" in said, said


async def test_the_first_process_of_a_machine_sleeps_also_after_a_guest_ended_what_it_sleeps_by() -> None:
    async with belljar.AsyncSandbox(backend="native", living=True) as box:
        code = "import os; print(max(int(one) for one in os.listdir('/proc') if one.isdigit()))"
        first = int((await box.run(code)).stdout)
        await box.exec(["sh", "-c", "kill -9 -1; true"])
        for _ in range(5):
            last = int((await box.run(code)).stdout)
        assert last < first + 100, "it goes round and round"


async def test_the_mounts_of_every_process_in_sight_are_those_of_the_sandbox() -> None:
    async with belljar.AsyncSandbox(backend="native", living=True) as box:
        code = "import glob\nfor one in glob.glob('/proc/[0-9]*/mountinfo'): print(open(one).read())"
        told = {line.split()[4] for line in (await box.run(code)).stdout.splitlines() if line}
        own = {line.split()[4] for line in (await box.exec(["cat", "/proc/self/mountinfo"])).stdout.splitlines()}
    inside = {path.removeprefix("/machine") or "/" for path in told}
    assert "/machine/workspace" in told or "/machine" in told, told
    assert inside - own <= {"/etc/ld.so.cache", "/inputs"}, inside - own


# Reads what it may of every other process, over and over, until it is told that it was enough.
_LURKER = """
import os
found, doors = set(), ("environ", "mem", "fd/0", "auxv", "stack", "root/etc/passwd", "cwd/enough", "maps", "exe")
while not os.path.exists("enough"):
    for one in os.listdir("/proc"):
        for name in doors if one.isdigit() and int(one) != os.getpid() else ():
            try:
                with open(f"/proc/{one}/{name}", "rb", 0) as file:
                    found.add(name) if file.read(1) else None
            except OSError as error:
                found.add(name) if error.errno not in (1, 2, 3, 13) else None  # refused, or gone
print(sorted(found))
"""


async def test_no_command_can_read_another_before_it_runs_or_while_it_runs() -> None:
    async with belljar.AsyncSandbox(backend="native", living=True) as box:
        lurker = await box.start(["python3", "-c", _LURKER])
        for _ in range(10):
            await box.exec(["sleep", "0.05"], env={"SECRET": "known to one alone"}, stdin="known to one alone")
        await box.files.write("enough", "")
        result = await lurker.wait(20)
    assert (result.stdout, result.stderr) == ("[]\n", "")


@pytest.mark.parametrize("by_host", [True, False])
async def test_the_number_of_files_is_limited_by_the_host_and_where_it_cannot_by_the_machine_itself(
    by_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_host and not mounted.can_limit_files():
        pytest.skip("NOT CHECKED: only root on Linux 5.2 or later limits the number of files from outside")
    monkeypatch.setattr(mounted, "can_limit_files", lambda: by_host)
    async with belljar.AsyncSandbox(backend="native", living=True, memory="64M", disk="4M") as box:
        code = (
            "import os\n"
            "most, made = os.statvfs('/workspace').f_files, 0\n"
            "try:\n"
            "    while made < 5000: open(f'{made}', 'w').close(); made += 1\n"
            "except OSError as error: print(most, most - made < 200, error.strerror)"
        )
        assert (await box.run(code)).stdout == "2048 True No space left on device\n"
