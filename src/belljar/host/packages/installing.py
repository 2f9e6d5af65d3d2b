"""How installers are run: with the administrator's configuration, within a time and a size, and telling what failed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import anyio
import anyio.to_thread

from belljar.core import errors
from belljar.core.display import neutralise
from belljar.core.values import format_size
from belljar.host import process

_LOOK_SECONDS = 0.25
_MOST_ENTRIES = 500_000  # files and folders of one set
_SHOWN, _SHOWN_LINES = 400, 2  # characters of an installer's words
_CREDENTIALS = re.compile(r"//[^/@\s]*@")
_UNREACHABLE = re.compile(
    r"connection broken|ConnectionError|NewConnectionError|name resolution|ConnectTimeout|ReadTimeout|SSLError|"
    r"ECONNREFUSED|ENOTFOUND|EAI_AGAIN|ETIMEDOUT|error sending request|dns error|Could not connect|"
    r"401 Unauthorized|403 Forbidden|E401|E403",
    re.IGNORECASE,
)
_UNREACHABLE_FIX = "check the index in the configuration of pip, uv or npm in force here, and that it can be reached"


class Workshop(NamedTuple):
    """Where a set of packages is made, and within what."""

    folder: Path  # all that installers write lies below it
    environment: Mapping[str, str]  # the installers' own variables
    size: int  # bytes that may lie there
    seconds: float  # that one step may take
    held: int  # an open lock, which an installer keeps if we are killed before it

    async def run(self, argv: Sequence[str], *, fix: str = "", **variables: str) -> str:
        """Runs one step of an installer, and returns what it printed.

        Args:
            argv: the program and its arguments.
            fix: what to do where it does not find what was asked for.
            **variables: more of its environment.

        Raises:
            InvalidRequest: what was asked for is not to be had.
            PolicyDenied: it took more room than it may.
            NotAvailable: the index could not be reached, or the time was over.
        """
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        env = {**self.environment, "TMPDIR": str(temporary), **variables}
        said = process.Output(-1, "", "")
        over = False

        async def watch(scope: anyio.CancelScope) -> None:
            nonlocal over
            while not over:
                await anyio.sleep(_LOOK_SECONDS)
                over = await anyio.to_thread.run_sync(self._over)
            scope.cancel()

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch, tasks.cancel_scope)
                said = await process.output(argv, deadline=self.seconds, limit=1 << 24, env=env, fds=(self.held,))
                tasks.cancel_scope.cancel()
        except* TimeoutError:
            raise errors.NotAvailable(
                f"packages: they were not there after {self.seconds:g} s",
                fix="ask for fewer, or raise packages.timeout",
            ) from None
        except* OSError as problems:
            raise errors.NotAvailable(f"packages: {argv[0]} could not be started: {problems.exceptions[0]}") from None
        if over or await anyio.to_thread.run_sync(self._over):
            raise errors.PolicyDenied(
                f"packages: they take more than {format_size(self.size)}",
                fix="ask for fewer, or have the administrator raise packages.size",
            )
        if said.code:
            raise _failed(f"{said.stderr}\n{said.stdout}", said.code, fix)
        return said.stdout

    def _over(self) -> bool:
        return size_of(self.folder, self.size) > self.size


def size_of(folder: Path, enough: int | None = None) -> int:
    """Returns the bytes that lie below a folder; counting ends where there are more than `enough`."""
    total = entries = 0
    for where, folders, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(where, name)).st_size
            except FileNotFoundError:  # an installer's, and it is done with it
                continue
        entries += len(folders) + len(files)
        if enough is not None and (total > enough or entries > _MOST_ENTRIES):
            return enough + 1
    return total


def _failed(text: str, code: int, fix: str) -> errors.BelljarError:
    """What an installer's words mean."""
    clean = _CREDENTIALS.sub("//", neutralise(text))
    lines = [line.strip() for line in clean.splitlines() if line.strip()]
    marked = [line for line in lines if re.match(r"(ERROR|error|cause|npm error|npm ERR!)", line)]
    words = "; ".join(list(dict.fromkeys(marked or lines[-2:]))[:_SHOWN_LINES])[:_SHOWN]
    words = words or f"the installer ended with exit code {code}"
    if _UNREACHABLE.search(clean):
        return errors.NotAvailable(f"packages: they could not be fetched: {words}", fix=_UNREACHABLE_FIX)
    return errors.InvalidRequest(f"packages: {words}", fix=fix)


class PackageRecipe(Protocol):
    """How sets of one kind of packages are made."""

    kind: str

    def stamp(self) -> Sequence[str | int]:
        """Names the interpreter that they are for, without starting it."""
        ...

    async def resolve(self, names: Sequence[str], shop: Workshop) -> Sequence[str]:
        """Fixes which versions are meant; returns the lock: every package with its version and its hash."""
        ...

    async def install(self, shop: Workshop) -> None:
        """Installs what `resolve` fixed into the folder `files` of the workshop."""
        ...


def file_stamp(path: str) -> list[str | int]:
    """Names one state of a program."""
    real = os.path.realpath(path)
    facts = os.stat(real)
    return [path, real, facts.st_size, facts.st_mtime_ns]
