"""How sessions speak with their agents: one kind for each language, for all boxes that can run a command.

An agent is a program of ours inside the sandbox, next to the guest's code. What each is sent and says is told in its
text: `guest/session/agent.py`, `guest/session/agent.js`, `guest/shell/session/bash.sh`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Protocol

from belljar.backends import guest_text
from belljar.backends.agent_frames import FrameLines
from belljar.backends.marked_text import MarkedText
from belljar.backends.turn import AGENT_ENV, AGENT_FOLDER, TurnRequest, agent_source
from belljar.core import errors
from belljar.core.result import STREAMS, StreamName

LANGUAGES = frozenset({"python", "javascript", "bash"})  # that there are agents for
_SCRIPTS = {character: f"\\{ord(character):03o}" for character in map(chr, (*range(1, 32), 127))}
_QUOTED = str.maketrans(_SCRIPTS | {"\\": "\\\\", "'": "\\'", "\0": ""})


class SessionAgent(Protocol):
    """What a session has to know of its agent.

    Attributes:
        argv: how it is started; `{}` stands for the folder of its files.
        files: by their names below that folder.
        own_clock: it ends turns over their time by itself; else the session has to interrupt it.
        completes: it tells the names that a half-typed one may become.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    files: Mapping[str, bytes]
    own_clock: bool
    completes: bool

    def begin(self) -> bytes:
        """Returns what it is sent before the first turn."""
        ...

    def turn(self, request: TurnRequest) -> bytes:
        """Returns what it is sent to run a turn."""
        ...

    def interrupt(self, turn: int) -> bytes:
        """Returns what it is sent to interrupt one."""
        ...

    def feed(self, stream: StreamName, text: str) -> list[tuple[str, bool]]:
        """Takes what came of a stream; returns pieces, and for each whether it is a frame, else a turn's output.

        Raises:
            OverflowError: a frame is longer than any may be.
        """
        ...

    def skip(self, stream: StreamName, text: str) -> None:
        """Takes what came between turns, when nobody waits for it."""
        ...


class PythonAgent:
    """Keeps the private pipes to itself: all that comes on stdout are frames, the turn's output among them."""

    def __init__(self) -> None:
        name = "session_agent.py"
        self.argv: tuple[str, ...] = ("python3", "{}/" + name)
        self.env: Mapping[str, str] = AGENT_ENV
        self.files: Mapping[str, bytes] = {name: agent_source()}
        self.own_clock: bool = True
        self.completes: bool = True
        self._lines = FrameLines()

    def begin(self) -> bytes:
        return b""

    def turn(self, request: TurnRequest) -> bytes:
        return request.message() + b"\n"

    def interrupt(self, turn: int) -> bytes:
        return json.dumps({"interrupt": turn}).encode() + b"\n"

    def feed(self, stream: StreamName, text: str) -> list[tuple[str, bool]]:
        """On stderr comes what is from before the agent took over its streams, or as it dies."""
        return [(line, True) for line in self._lines.feed(text)] if stream == "stdout" else [(text, False)]

    def skip(self, stream: StreamName, text: str) -> None:
        if stream == "stdout":
            self._lines.skip(text)


class _MarkingAgent:
    """Prints as it likes, and tells its frames in between, each behind a mark that is the session's own."""

    own_clock: bool = False
    completes: bool = False

    def __init__(self) -> None:
        self.mark: str = f"\x1e{secrets.token_hex(16)}\x1e"
        self._streams: Mapping[StreamName, MarkedText] = {name: MarkedText(self.mark) for name in STREAMS}

    def feed(self, stream: StreamName, text: str) -> list[tuple[str, bool]]:
        return self._streams[stream].feed(text)

    def skip(self, stream: StreamName, text: str) -> None:
        self._streams[stream].skip()


class JavaScriptAgent(_MarkingAgent):
    """Node.js, whose turns are evaluated as in the console of a browser."""

    def __init__(self) -> None:
        super().__init__()
        name = "session_agent.js"
        self.argv: tuple[str, ...] = (
            "sh",
            "-c",
            guest_text.shell_script("session/own_group"),
            "sh",
            "node",
            f"{{}}/{name}",
        )
        self.env: Mapping[str, str] = {"BELLJAR_MARK": self.mark}
        self.files: Mapping[str, bytes] = {name: guest_text.text("session/agent.js").encode()}

    def begin(self) -> bytes:
        return b""

    def turn(self, request: TurnRequest) -> bytes:
        return request.message() + b"\n"

    def interrupt(self, turn: int) -> bytes:
        return json.dumps({"interrupt": turn}).encode() + b"\n"


class BashAgent(_MarkingAgent):
    """An interactive bash, which goes on with its next line when it is interrupted."""

    def __init__(self) -> None:
        super().__init__()
        start = guest_text.shell_script("session/own_group")
        self.argv: tuple[str, ...] = ("sh", "-c", start, "sh", "bash", "-c", guest_text.shell_script("session/bash"))
        self.env: Mapping[str, str] = {}
        self.files: Mapping[str, bytes] = {}

    def begin(self) -> bytes:
        """Frames are told on descriptors of their own, so that a turn may turn stdout elsewhere for good."""
        mark = _quoted(self.mark)
        tell = (
            f'__belljar() {{ local code=$?; builtin printf {mark}\'{{"done":%d,"ok":%s,"exit_code":%d}}\\n\' '
            '"$1" "$( ((code)) && builtin printf false || builtin printf true)" "$code" >&"$__belljar_out"; '
            f'builtin printf {mark}\'{{"settled":%d}}\\n\' "$1" >&"$__belljar_err"; return $code; }}'
        )
        ready = f"builtin printf {mark}'{{\"ready\":true}}\\n'"
        return f"set +Hm +o history; exec {{__belljar_out}}>&1 {{__belljar_err}}>&2\n{tell}\n{ready}\n".encode()

    def turn(self, request: TurnRequest) -> bytes:
        code = request.code.encode("utf-8", "replace").decode()
        return f"eval {_quoted(code)} </dev/null\n__belljar {request.number}\n".encode()

    def interrupt(self, turn: int) -> bytes:
        return b"interrupt\n"


def _quoted(text: str) -> str:
    """Returns a text as one word of bash, in one line."""
    return f"$'{text.translate(_QUOTED)}'"


_AGENTS: Mapping[str, type[PythonAgent] | type[JavaScriptAgent] | type[BashAgent]] = {
    "python": PythonAgent, "javascript": JavaScriptAgent, "bash": BashAgent,
}  # fmt: skip


def agent_for(language: str) -> SessionAgent:
    """Returns a new agent for a session.

    Raises:
        NotAvailable: there are no sessions of this language.
    """
    if language not in _AGENTS:
        known = ", ".join(sorted(_AGENTS))
        raise errors.NotAvailable(f"there are no sessions of {language}", fix=f"choose from: {known}; or use a sandbox")
    return _AGENTS[language]()


def folder_of(inputs: str) -> str:
    """Returns where the agent's files lie, below the read-only inputs."""
    return f"{inputs}/{AGENT_FOLDER}"
