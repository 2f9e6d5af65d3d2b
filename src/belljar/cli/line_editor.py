"""Where people type at the prompt of `belljar session`: a line editor on a terminal, plain lines from a pipe.

Only the first needs prompt_toolkit, which takes a while to import: so only a prompt on a terminal imports this module.
"""

from __future__ import annotations

import builtins
import keyword
import os
import re
import stat
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application.current import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.lexers import PygmentsLexer
from pygments.lexers.javascript import JavascriptLexer  # type: ignore[import-untyped]
from pygments.lexers.python import PythonLexer  # type: ignore[import-untyped]
from pygments.lexers.shell import BashLexer  # type: ignore[import-untyped]

from belljar.cli.source_lines import indentation, is_whole
from belljar.core import errors
from belljar.core.values import MIB

Names = Callable[[str], Awaitable[Iterable[str]]]
_MAX_HISTORY_BYTES = MIB
_PRIVATE = 0o600
_WORDS = sorted({*keyword.kwlist, *keyword.softkwlist, *dir(builtins)})
_TYPED_NAME = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*\.?$")


class LineEditor:
    """Reads statements and commands with history, editing, several lines, paste and completion."""

    def __init__(self, history: Path, commands: Iterable[str], names: Names, language: str = "python") -> None:
        """`names` is asked what a half-typed name may become; `commands` are those that begin with a colon."""
        lexer = {"python": PythonLexer, "javascript": JavascriptLexer, "bash": BashLexer}[language]
        self._session: PromptSession[str] = PromptSession(
            history=open_history(history), completer=_NameCompleter(commands, names), complete_while_typing=False,
            multiline=True, key_bindings=_keys(language), lexer=PygmentsLexer(lexer), enable_open_in_editor=False,
        )  # fmt: skip

    async def read(self, depth: int) -> str | None:
        """Returns the next statement or command, whole; None at the end (Ctrl-D).

        Ctrl-C throws away what was typed.
        """
        sign = ">" * (depth + 2) + " "
        while True:
            try:
                return await self._session.prompt_async(
                    sign, prompt_continuation="." * (depth + 2) + " ", handle_sigint=False
                )
            except KeyboardInterrupt:
                continue
            except EOFError:
                return None


def open_history(path: Path) -> History:
    """Returns the history of a file that only its owner can read; one in memory where there can be none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, _PRIVATE)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                return InMemoryHistory()
            os.fchmod(fd, _PRIVATE)
            _shorten(fd, found.st_size)
        finally:
            os.close(fd)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))


def _shorten(fd: int, size: int) -> None:
    """Leaves the last half of a history that has become too long."""
    if size > _MAX_HISTORY_BYTES:
        kept = os.pread(fd, _MAX_HISTORY_BYTES // 2, size - _MAX_HISTORY_BYTES // 2)
        kept = kept[kept.find(b"\n# ") + 1 :]  # where an entry begins
        os.ftruncate(fd, 0)
        os.pwrite(fd, kept, 0)


class _NameCompleter(Completer):
    """Completes names of Python by asking the session, and commands of the prompt."""

    def __init__(self, commands: Iterable[str], names: Names) -> None:
        self._commands = sorted(commands)
        self._names = names

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        """Nothing without the session."""
        return iter(())

    async def get_completions_async(
        self, document: Document, complete_event: CompleteEvent
    ) -> AsyncGenerator[Completion, None]:
        typed = document.text_before_cursor
        if typed.startswith(":"):
            found = [name for name in self._commands if name.startswith(typed[1:])] if " " not in typed else []
            for name in found:
                yield Completion(name, start_position=1 - len(typed))
            return
        match = _TYPED_NAME.search(typed)
        if match is None or typed[: match.start()].endswith((".", ")", "]", "'", '"')):
            return
        last = match[0].rpartition(".")[2]
        for name in await self._found(match[0]):
            yield Completion(name, start_position=-len(last))

    async def _found(self, text: str) -> list[str]:
        try:
            said = list(await self._names(text))
        except errors.BelljarError:
            said = []
        words = [] if "." in text else [word for word in _WORDS if word.startswith(text)]
        return sorted({*said, *words})


def _keys(language: str) -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _enter(event: KeyPressEvent) -> None:
        """Takes what is whole; otherwise begins another line, indented as it should be."""
        buffer = event.current_buffer
        if buffer.complete_state and buffer.complete_state.current_completion:
            buffer.complete_state = None  # the menu's choice is taken, and no more
            return
        at_end = not buffer.document.text_after_cursor.strip()
        if is_whole(buffer.text, language=language) and (at_end or "\n" not in buffer.text):
            buffer.validate_and_handle()
        else:
            buffer.insert_text("\n" + indentation(buffer.document.text_before_cursor))

    @keys.add("tab", filter=Condition(_at_indentation))
    def _indent(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("    ")

    return keys


def _at_indentation() -> bool:
    return not get_app().current_buffer.document.current_line_before_cursor.strip()
