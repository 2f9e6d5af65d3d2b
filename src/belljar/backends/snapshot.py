"""A copy of a session: the memory of its interpreter and the files of its box."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from belljar.core.result import File


class Snapshot:
    """What a session was at one moment: the written pages of its memory, and the files of its box.

    Attributes:
        binary: the interpreter that the memory belongs to; no other can use it.
        size: how many bytes of memory the interpreter had.
        count: how many pages of it were written.
        pages: an open file (in memory): first the page numbers, then the pages. It is closed with the last user.
        files: the files of the box.
        folders: its folders, empty ones too.
        turns: how many turns the session had had.
    """

    def __init__(
        self, binary: str, size: int, count: int, pages: int, files: Sequence[File] = (), folders: tuple[str, ...] = ()
    ) -> None:
        self.binary = binary
        self.size = size
        self.count = count
        self.pages = pages
        self.files = files
        self.folders = folders
        self.turns = 0

    @property
    def bytes(self) -> int:
        """How many bytes are kept, of memory and of files."""
        return os.fstat(self.pages).st_size + sum(len(file.content) for file in self.files)

    def __del__(self) -> None:
        with suppress(OSError, AttributeError):
            os.close(self.pages)
