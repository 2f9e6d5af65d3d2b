"""Results as JSON. A large one is serialised in a thread, piece by piece, into a file without a name.

So the event loop goes on meanwhile, no second copy of the output is held in memory, and whoever reads it afterwards
(the answer, the store) holds one part of it at a time. The file is gone when nobody holds its `ResultText` any more.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Protocol

import anyio
import anyio.to_thread
from pydantic_core import PydanticSerializationError, to_json

from belljar.core import errors
from belljar.core.result import Result
from belljar.core.values import KIB
from belljar.host.capture import scrub
from belljar.host.loops import give_way
from belljar.service.store.tables import as_json

LARGE_BYTES = 256 * KIB  # from here on a result is a large one
PART_BYTES = 512 * KIB  # that are read, sent and stored at once
_PIECE_CHARACTERS = 64 * KIB  # that are serialised at once: the interpreter is not shared meanwhile
_OUTPUTS = frozenset(("stdout", "stderr", "files", "results"))  # the fields that can be large
_at_once = anyio.CapacityLimiter(1)


class LargeText(Protocol):
    """A large result as JSON, wherever it is."""

    def parts(self) -> AsyncIterator[bytes]:
        """Yields the text in order, in parts of a bounded size."""
        ...


class ResultText:
    """A result as JSON.

    Attributes:
        brief: The result; without its outputs, if it is large.
        json: The brief result as JSON, so all of a small one.
        size: Bytes of the file that holds a large one whole; 0 for a small one.
    """

    def __init__(self, brief: Result, json: str, fd: int | None = None, size: int = 0) -> None:
        self.brief = brief
        self.json = json
        self.size = size
        self._fd = fd
        if fd is not None:
            weakref.finalize(self, os.close, fd)

    @property
    def is_large(self) -> bool:
        """Whether `parts` has it, and `json` only its head."""
        return self._fd is not None

    async def parts(self) -> AsyncIterator[bytes]:
        """Yields a large one in order."""
        assert self._fd is not None, "it is a small one"
        for offset in range(0, self.size, PART_BYTES):
            await give_way()
            yield os.pread(self._fd, PART_BYTES, offset)


async def result_text(result: Result, folder: str | None = None) -> ResultText:
    """Serialises a result.

    Args:
        result: What a run came to.
        folder: Where the file of a large one is made; None: where temporary files go.

    Raises:
        NotAvailable: It is a large one, and there is no room for it.
    """
    if weigh(result) <= LARGE_BYTES:
        return ResultText(result, as_json(result))
    try:
        return await anyio.to_thread.run_sync(_write, result, folder, limiter=_at_once)
    except OSError as error:
        raise errors.NotAvailable(
            f"the result has no room: {error.strerror}", fix=f"make room in {folder or tempfile.gettempdir()}"
        ) from error


async def parse(text: LargeText) -> Result:
    """Returns the result that a large text is of."""
    whole = b"".join([part async for part in text.parts()])
    return await anyio.to_thread.run_sync(Result.model_validate_json, whole)


def weigh(result: Result) -> int:
    """Returns about how many characters the outputs of a result have."""
    files = sum(len(file.content) for file in result.files)
    return len(result.stdout) + len(result.stderr) + files + sum(map(_weigh_value, result.results))


def _weigh_value(value: object) -> int:
    """Returns about how many characters something has that a guest displayed."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_weigh_value, value.values()))
    return sum(map(_weigh_value, value)) if isinstance(value, list | tuple) else 1


def _write(result: Result, folder: str | None) -> ResultText:
    brief = result.model_copy(update={"stdout": "", "stderr": "", "files": (), "results": ()})
    size = 0
    with tempfile.TemporaryFile(dir=folder) as file:
        for piece in _pieces(result):
            size += file.write(piece)
        file.flush()
        return ResultText(brief, as_json(brief), os.dup(file.fileno()), size)


def _pieces(result: Result) -> Iterator[bytes]:
    yield b'{"stdout":"'
    yield from _escaped(result.stdout)
    yield b'","stderr":"'
    yield from _escaped(result.stderr)
    yield b'","files":['
    for place, file in enumerate(result.files):
        yield b"," * (place > 0) + as_json(file).encode()
    yield b'],"results":['
    for place, bundle in enumerate(result.results):
        yield b"," * (place > 0) + as_json(bundle).encode()
    yield b"]," + as_json(result, exclude=_OUTPUTS).encode()[1:]


def _escaped(text: str) -> Iterator[bytes]:
    """Yields a text as it stands between the quotes of JSON."""
    for at in range(0, len(text), _PIECE_CHARACTERS):
        piece = text[at : at + _PIECE_CHARACTERS]
        try:
            yield to_json(piece)[1:-1]
        except PydanticSerializationError:  # half a surrogate pair, which guests do print
            yield to_json(scrub(piece))[1:-1]
