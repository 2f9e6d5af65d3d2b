"""A program on a pseudo-terminal, as a person uses it: keys in, what is shown out."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_SECONDS = 60.0  # that anything may take here, on a busy machine
_CODES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-Z\\-_=>])|\r")
_BEGINS_TO_READ = b"\x1b[?2004h"  # a line editor asks for pastes to be marked while it reads, and only then
CTRL_C, CTRL_D, TAB, ENTER, UP = "\x03", "\x04", "\t", "\r", "\x1b[A"


def _as_in_a_window() -> None:
    """Gives a program a controlling terminal, for Ctrl-C, and lets it hear hang-ups though whoever runs it may not."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Terminal:
    """One program that has a terminal of its own."""

    def __init__(self, argv: list[str], env: Mapping[str, str], cwd: Path) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
        self.process = subprocess.Popen(
            argv, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, cwd=cwd,
            # The program never answers where the cursor is, since nobody is behind this terminal.
            env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **env},
            preexec_fn=_as_in_a_window,  # noqa: PLW1509
        )  # fmt: skip
        os.close(theirs)
        self._shown = bytearray()
        self._seen = 0
        self._reads = 0  # how often it began to read
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                if not select.select([self._ours], [], [], 1)[0]:
                    continue
                data = os.read(self._ours, 65536)
            except (OSError, ValueError):  # it has ended, or was closed
                return
            if not data:
                return
            self._shown += data

    @property
    def shown(self) -> str:
        """All that was shown so far, without the codes that move and colour it."""
        return _CODES.sub("", self._shown.decode("utf-8", "replace"))

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def expect(self, text: str) -> str:
        """Waits until this is shown, after all that was expected before; returns what came with it."""
        deadline = time.monotonic() + _SECONDS
        while True:
            news = self.shown[self._seen :]
            if (found := news.find(text)) >= 0:
                self._seen += found + len(text)
                return news[: found + len(text)]
            assert time.monotonic() < deadline, f"{text!r} did not come; there is:\n{self.shown[-3000:]}"
            assert self.process.poll() is None or text in self.shown[self._seen :], f"it ended:\n{self.shown[-3000:]}"
            time.sleep(0.02)

    def expect_prompt(self) -> None:
        """Waits until it reads once more; what was shown until then is seen."""
        deadline = time.monotonic() + _SECONDS
        while self._shown.count(_BEGINS_TO_READ) <= self._reads:
            assert time.monotonic() < deadline, f"it does not read; there is:\n{self.shown[-3000:]}"
            assert self.process.poll() is None, f"it ended:\n{self.shown[-3000:]}"
            time.sleep(0.02)
        self._reads += 1
        self._seen = len(self.shown)

    def wait(self) -> int:
        """Waits for the program's end, and returns its exit code."""
        return self.process.wait(_SECONDS)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(_SECONDS)
        os.close(self._ours)


@contextmanager
def terminal(argv: list[str], env: Mapping[str, str], cwd: Path) -> Iterator[Terminal]:
    """Starts a program on a terminal, and ends it at last."""
    made = Terminal(argv, env, cwd)
    try:
        yield made
    finally:
        made.close()
