"""Follows what an engine says while it builds, so that a failure can be told as its step and that step's last lines."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence

from belljar.core.model import Model

_KEPT_LINES = 30
_LONGEST_LINE = 2000
_STEP = re.compile(r"(?:\[(\d{1,3})/\d{1,3}\] )?step (\d{1,4})/(\d{1,4}) ?: (.*)", re.IGNORECASE)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # engines paint what a step says on stderr
_MADE = re.compile(r" ?-{2,3}> ([0-9a-f]{11,12})")


class BuildReport(Model):
    """The outcome of a build. A step that failed is the Dockerfile's failure, so it is told here and not raised."""

    ok: bool
    tag: str
    id: str = ""
    step: str = ""
    exit_code: int | None = None
    problem: str = ""
    last_lines: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()  # name@digest of what it was built from; an id, where no registry has it
    weaker: tuple[str, ...] = ()  # limits that did not hold, because the engine has none
    duration_ms: float = 0


class BuildLog:
    """Follows an engine's words, so that a failure can be told as its step and that step's last lines."""

    def __init__(self) -> None:
        self.step: str = ""
        self.number: int = 0
        self.total: int = 0
        self._stage = 1  # Podman counts the steps of each stage, Docker those of all
        self.id: str = ""
        self.stages: list[str] = []  # the last image of each stage but the last: nameless, and nobody's
        self._made = ""
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._rest = ""

    def feed(self, message: object) -> Sequence[str]:
        """Takes a message of the engine's, and returns the lines that it completed."""
        if not isinstance(message, dict):
            return ()
        aux = message.get("aux")
        if isinstance(aux, dict) and isinstance(aux.get("ID"), str):
            self.id = aux["ID"]
        text = message.get("stream")
        if not isinstance(text, str):
            return ()
        *lines, self._rest = (self._rest + text).split("\n")
        self._rest = self._rest[:_LONGEST_LINE]
        return [line for raw in lines if (line := self._line(_COLOUR.sub("", raw.rstrip("\r")[:_LONGEST_LINE])))]

    def _line(self, line: str) -> str:
        match = _STEP.fullmatch(line)
        if match and self._is_next(int(match[1] or 1), int(match[2])):
            self._stage, self.number, self.total, self.step = int(match[1] or 1), int(match[2]), int(match[3]), line
            self._lines.clear()
            if match[4].upper().startswith("FROM ") and self._made:
                self.stages.append(self._made)
        elif made := _MADE.fullmatch(line):
            self._made = made[1]
        elif line.strip():
            self._lines.append(line)
        return line

    def _is_next(self, stage: int, number: int) -> bool:
        """What a step prints may look like the announcement of one."""
        return (stage, number) in ((self._stage, self.number + 1), (self._stage + 1, 1))

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines of the current step."""
        rest = _COLOUR.sub("", self._rest)
        return (*self._lines, *([rest] if rest.strip() else []))
