"""What a living sandbox tells of itself: its processes, their output, and its files."""

import re
from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from belljar.core.model import Model
from belljar.core.result import StreamName
from belljar.core.values import Bytes, Moment

HOME = "/home/user"  # the guest's, in a living sandbox
Feature = Literal["pty", "dial", "pause", "watch", "snapshot", "root"]  # "root": its user may be called root inside
User = Literal["user", "root"]  # who a living sandbox' programs are inside; to the host it is the same uid
PROCESS_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # of a process that was started from outside

_SHELL = 'exec "$(command -v bash || echo sh)" -c "$1"'  # not every image has a bash


def shell(text: str) -> tuple[str, ...]:
    """Returns the command that runs a line of shell in a sandbox: by bash, or by sh where there is none."""
    return ("sh", "-c", _SHELL, "sh", text)


def words(command: str | Iterable[str]) -> tuple[str, ...]:
    """Returns the command of what somebody typed: text is a line of shell, a list a program with its arguments."""
    return shell(command) if isinstance(command, str) else tuple(command)


def shell_text(argv: tuple[str, ...]) -> str | None:
    """Returns the line that `shell` made a command of; None for any other command."""
    return argv[4] if len(argv) == 5 and argv[2] == _SHELL else None


class PtySize(Model):
    """The size of a terminal, in characters."""

    columns: int = Field(80, ge=1, le=4096)
    """Characters in a line."""
    rows: int = Field(24, ge=1, le=4096)
    """Lines."""


class BoxProcess(Model):
    """One process that runs in a sandbox now."""

    pid: int
    """Its number inside the sandbox."""
    parent: int = 0
    """The number of the process that started it; 0: it was started from outside."""
    command: str = ""
    """Its command line."""
    started: Moment = 0.0
    """When, in seconds since 1970; in JSON as ISO 8601 text."""
    cpu_ms: float | None = None
    """Milliseconds of processor time it has used."""
    memory: int | None = None
    """Bytes of memory that it holds now."""


class Chunk(Model):
    """A piece of a process' output. All pieces of a process are numbered in the order in which they came."""

    seq: int
    """Its number, from 1."""
    stream: StreamName
    """Where it was written; a terminal has only "stdout"."""
    data: Bytes
    """Its bytes, as they were written."""
    missed: int = 0
    """Bytes that came right before it and are not kept any more."""

    @property
    def text(self) -> str:
        """The bytes as text; what is not UTF-8 is replaced."""
        return self.data.decode("utf-8", "replace")


class FileStat(Model):
    """What a sandbox's file system says of one name."""

    path: str
    """Its whole path, as the guest names it."""
    kind: str
    """ "file", "folder", "link", "pipe" or "device or socket"."""
    size: int = 0
    """Bytes."""
    mode: int = 0
    """Its permissions, such as 0o644."""
    modified: Moment = 0.0
    """When its content was last changed, in seconds since 1970; in JSON as ISO 8601 text."""
    target: str = ""
    """Where a link leads."""


class FileChange(Model):
    """One change below a folder that is watched."""

    kind: Literal["created", "changed", "removed", "moved", "missed"]
    """What happened; "missed": more than could be told, look again."""
    path: str = ""
    """The whole path, as the guest names it."""
