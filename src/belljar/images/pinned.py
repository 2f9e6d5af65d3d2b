"""Runs a program of the administrator's if its bytes are the ones that were pinned."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

import anyio.to_thread

from belljar.core import errors
from belljar.host import process


class Distrusted(Exception):
    """A program that is absent, or is not the one that was pinned; the text says which."""


async def run_pinned(argv: Sequence[str], sha256: str, *, deadline: float, limit: int) -> process.Output:
    """Runs a program if its bytes are the ones the administrator pinned.

    Between the check and the start somebody who may write the file could change it, but who may write there has won
    already: the path belongs in a folder of root's.
    """
    program = argv[0]
    if not os.path.isabs(program):
        raise Distrusted(f"{program!r} is not an absolute path")
    if not sha256:
        raise Distrusted(f"the sha256 of {program} is not pinned")
    try:
        found = await anyio.to_thread.run_sync(_sha256, program)
    except OSError as error:
        raise Distrusted(f"{program}: {error.strerror}") from None
    if found != sha256:
        raise Distrusted(f"{program} has changed: its sha256 is {found}, and {sha256} is pinned")
    try:
        return await process.output(argv, deadline=deadline, limit=limit)
    except TimeoutError:
        raise errors.BackendTimeout(
            f"{program} took longer than {deadline:g} s", fix="raise images.tool_timeout"
        ) from None
    except OSError as error:
        raise Distrusted(f"{program} cannot be started: {error.strerror}") from None


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
