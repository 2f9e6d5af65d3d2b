"""Reads what a server inside writes for signs that something is wrong, and says what can be done. Pure: no I/O."""

from __future__ import annotations

import re
import time
from collections import deque
from typing import NamedTuple

from belljar.core.diagnose import diagnose
from belljar.core.request import Limits
from belljar.core.result import Result, Status
from belljar.protocol.previews import FindingKind, PreviewFinding

_MAX_LINE_CHARACTERS = 2000
_KEPT_LINES, _KEPT_FINDINGS = 60, 10
_TOLD_LINES = 40  # that belong to one failure at most
_ESCAPES = re.compile(r"\x1b\[[0-9;?]{0,32}[@-~]|\x1b\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)")
_PORT = re.compile(r"\bhttps?://(?:localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1?\]):(\d{1,5})\b")
_NAME = r"['\"]?([\w@./:~-]{1,120})['\"]?"


class _Sign(NamedTuple):
    kind: FindingKind
    pattern: re.Pattern[str]
    suggestion: str


def _sign(kind: FindingKind, pattern: str, suggestion: str) -> _Sign:
    return _Sign(kind, re.compile(pattern), suggestion)


_SIGNS = (
    _sign("port_in_use", r"EADDRINUSE|[Aa]ddress already in use|[Pp]ort \d+ is (?:already )?in use",
          "something else in the sandbox has this port: end it, or have the server take another and pass that port"),
    _sign("missing", r"(?:Cannot find (?:module|package)|Can't resolve|Could not resolve|Failed to resolve import) "
          + _NAME,
          "{0} is not installed, or its path is wrong: install the project's packages, or correct the import"),
    _sign("missing", rf"(?:ModuleNotFoundError|ImportError): No module named {_NAME}",
          "{0} is not installed: name it in packages, or install it in the project's own environment"),
    _sign("missing", r"(?:^|: )([\w./-]{1,120}): (?:command )?not found$",
          "{0} is not there: install the project's packages, or correct the command"),
    _sign("missing", r"Missing script: [\"']?([\w:.-]{1,80})", "package.json has no script {0}: name one that it has"),
    _sign("compile", r"\berror TS\d+:|Failed to compile|Compilation failed|Build failed with \d+ error|✘ \[ERROR\]|"
          r"Internal server error: |Transform failed|Module parse failed|\bSyntaxError\b", ""),
    _sign("crash", r"^(?:Uncaught |Unhandled )|UnhandledPromiseRejection|^panic: |^thread '.*' panicked", ""),
)  # fmt: skip
_PYTHON, _PYTHON_END = re.compile(r"^\s*Traceback \(most recent call last\):"), re.compile(r"^[A-Za-z_][\w.]{0,100}:? ")
_JAVASCRIPT, _FRAME = re.compile(r"^\s*(?:Uncaught )?[A-Z]\w{0,60}Error\b.*: "), re.compile(r"^\s+at ")


class OutputWatch:
    """The last lines that a server wrote, and what was found in them.

    Attributes:
        lines: the last ones, without escape sequences.
        findings: what was found, the last ten.
    """

    def __init__(self, port: int) -> None:
        """Nothing is heard yet. `port`: at which the server is expected."""
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self.findings: deque[PreviewFinding] = deque(maxlen=_KEPT_FINDINGS)
        self._port = port
        self._rest: dict[str, str] = {}
        self._block: list[str] = []
        self._language = ""

    def hear(self, stream: str, text: str) -> list[PreviewFinding]:
        """Takes a piece of output; returns what is new of what was found."""
        whole = (self._rest.get(stream, "") + text).split("\n")
        self._rest[stream] = whole.pop()[-_MAX_LINE_CHARACTERS:]
        return [found for line in whole for found in self._line(line)]

    def end(self) -> list[PreviewFinding]:
        """Takes what was written without an end of line; returns what is new of what was found."""
        rest, self._rest = [text for text in self._rest.values() if text], {}
        return [found for line in rest for found in self._line(line)] + self._close()

    def _line(self, given: str) -> list[PreviewFinding]:
        line = _ESCAPES.sub("", given[:_MAX_LINE_CHARACTERS]).rstrip("\r ")
        self.lines.append(line)
        found = self._of_block(line)
        if self._block:
            return found
        if match := _PORT.search(line):
            return found + self._of_port(int(match[1]))
        for sign in _SIGNS:
            if match := sign.pattern.search(line):
                named = match.groups()
                advice = sign.suggestion.format(*named) if named and named[0] else sign.suggestion
                return found + self._note(sign.kind, line, advice or "correct what it says; the page reloads")
        return found

    def _of_port(self, port: int) -> list[PreviewFinding]:
        if port == self._port:
            return []
        told = f"it says that it listens on port {port}, and port {self._port} is looked at"
        return self._note("other_port", told, f"pass port={port}, or have it listen on {self._port}")

    def _of_block(self, line: str) -> list[PreviewFinding]:
        """Collects a stack trace, and tells it when it is whole."""
        if self._block:
            self._block.append(line)
            python = self._language == "python"
            over = bool(_PYTHON_END.match(line)) if python else not _FRAME.match(line)
            return self._close() if over or len(self._block) >= _TOLD_LINES else []
        if _PYTHON.match(line):
            self._block, self._language = [line.strip()], "python"
        elif _JAVASCRIPT.match(line) and not any(sign.pattern.search(line) for sign in _SIGNS):
            self._block, self._language = [line.strip()], "javascript"
        return []

    def _close(self) -> list[PreviewFinding]:
        block, self._block = self._block, []
        if not block:
            return []
        failure = diagnose(
            Result(status=Status.ERROR, exit_code=1, stderr="\n".join(block) + "\n"), language=self._language,
            limits=Limits(), processes=True,
        )  # fmt: skip
        kind: FindingKind = "missing" if failure.error_type == "MISSING_PACKAGE" else "crash"
        return self._note(kind, failure.message, failure.suggestion)

    def _note(self, kind: FindingKind, message: str, suggestion: str) -> list[PreviewFinding]:
        found = PreviewFinding(kind=kind, message=message[:500], suggestion=suggestion[:500], timestamp=time.time())
        if any((one.kind, one.message) == (found.kind, found.message) for one in self.findings):
            return []
        self.findings.append(found)
        return [found]
