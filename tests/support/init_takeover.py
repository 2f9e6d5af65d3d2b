"""A guest that takes over process 1 of its sandbox, and what the host sees of it after `kill -9` of Belljar."""

from __future__ import annotations

# Prints one line: what process 1 is doing now. The machine code that it puts where process 1 waits for its children is
# `prctl(PR_SET_PDEATHSIG, 0); while (1) pause();` (`ppoll` without descriptors on aarch64).
GUEST = """
import os, platform, time
CODE = {
    "x86_64": bytes.fromhex("b89d000000 bf01000000 31f6 0f05 b822000000 0f05 ebf7"),
    "aarch64": b"".join(
        word.to_bytes(4, "little")
        for word in (0xd28014e8, 0xd2800020, 0xd2800001, 0xd4000001, 0xd2800928, 0xd2800000, 0xd2800001, 0xd2800002,
                     0xd2800003, 0xd4000001, 0x17fffffa)
    ),
}[platform.machine()]
waits_at = int(open("/proc/1/syscall").read().split()[-1], 16)
said = "as before"
for path in ("/proc/1/mem", "/proc/1/task/1/mem"):
    try:
        fd = os.open(path, os.O_RDWR)
        os.pwrite(fd, CODE, waits_at)
        if os.pread(fd, len(CODE), waits_at) == CODE:
            said = "overwritten"
    except OSError:
        pass
if os.fork() == 0:  # an orphan that ends, so that process 1 wakes
    if os.fork() == 0:
        os._exit(0)
    os._exit(0)
os.wait()
deadline = time.monotonic() + 1
while said == "overwritten" and time.monotonic() < deadline:
    waiting_in = open("/proc/1/syscall").read().split()[0]
    said = "taken over" if waiting_in in ("34", "73") else said
print("process 1 is", said, flush=True)
time.sleep(60)
"""

# Run by whoever is to own the sandbox; arguments: the guest's code, and a word to find it by. Prints what the guest
# said, and how many of its processes are left after Belljar was killed; those it ends.
KILLER = """
import os, signal, subprocess, sys, time
from pathlib import Path
code, word = sys.argv[1:]

def left():
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if word in line and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found

command = [sys.executable, "-m", "belljar", "exec", "--backend", "native", "--", "python3", "-c", code, word]
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as belljar:
    print(belljar.stdout.readline().strip())
    belljar.kill()
deadline = time.monotonic() + 5
while (pids := left()) and time.monotonic() < deadline:
    time.sleep(0.02)
for pid in pids:
    os.kill(pid, signal.SIGKILL)
print(len(pids), "left")
"""
