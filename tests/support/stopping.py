"""Guests that are stopped in the middle of their work: one saves it, one ignores the signal."""

from __future__ import annotations

import threading
from typing import Any

import belljar
from belljar.engine.engine import Engine

SAVES = """
import os, signal, subprocess, sys, time
child = "import signal, time; signal.signal(15, lambda *_: (print('child saved', flush=True), exit())); "
child += "print('ready', flush=True); time.sleep(120)"
kid = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True)
assert kid.stdout.readline() == "ready\\n"
def save(*_):
    print(kid.stdout.read(), end="")
    print("saved", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, save)
os.write(1, b"working\\n")  # at once: a signal must not come between two writes
time.sleep(120)
"""
IGNORES = "import os, signal, time\nsignal.signal(15, signal.SIG_IGN)\nos.write(1, b'working\\n')\ntime.sleep(120)"


async def stopped_at_work(code: str, engine: Engine, backend: str, **options: Any) -> belljar.Result:
    """Runs it, and stops it from another thread when it has said that it works."""
    cancel = belljar.Cancel()

    def hear(text: str) -> None:
        if "working" in text:
            threading.Thread(target=cancel.cancel).start()

    return await belljar.arun(
        code, backend=backend, engine=engine, timeout=60, cancel=cancel, on_stdout=hear, **options
    )
