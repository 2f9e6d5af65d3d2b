"""Keeps what libraries compile from text at each start: methods of dataclasses, references to types, patterns of `re`.

Python keeps the code of modules (`__pycache__`) but not this, which is a fifth of what `belljar run` takes. An entry is
found by the whole text that it was made of, in a file of the user's own for this version of Python: it is what the
compiler would return. Where anything is unlike, all is compiled as ever.
`docs/decisions/0016-compiled-text-is-kept.md` says more.
"""

from __future__ import annotations

import builtins
import collections
import dataclasses
import inspect
import marshal
import os
import re
import sys
import typing
from _thread import get_ident
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

from belljar.cli.examples import EXAMPLES
from belljar.host import own_files

_MAX_BYTES = 4 << 20  # of the file; one that would be larger begins anew
_NAME = "<string>"  # what Python calls a text that is of no file
_IMPORTING = "<frozen importlib._bootstrap>"  # the file of what runs a module's text
_UNREADABLE = (KeyError, ValueError, EOFError, TypeError, RuntimeError)


class CodeCache:
    """The code of one file, and what was compiled since it was read."""

    def __init__(self, path: Path) -> None:
        """Reads the file, if it is there and ours alone."""
        self._path = path
        self._kept: dict[str, bytes] = {}
        self._new: dict[str, bytes] = {}
        with suppress(OSError, *_UNREADABLE):
            kept = marshal.loads(own_files.read(path, _MAX_BYTES))  # noqa: S302 (ours alone, as Python's own cache is)
            self._kept = kept if isinstance(kept, dict) else {}

    def code(self, text: str, mode: str) -> CodeType:
        """Returns what `compile` makes of a text: as it was kept, or compiled now.

        Raises:
            SyntaxError: as `compile` does.
        """
        key = f"{mode}:{text}"
        if isinstance(code := self._recall(key), CodeType):
            return code
        code = compile(text, _NAME, mode, dont_inherit=True)
        self._new[key] = marshal.dumps(code)
        return code

    def _recall(self, key: str) -> Any:
        try:  # not `suppress`, which takes longer than all else here
            return marshal.loads(self._kept[key])  # noqa: S302
        except _UNREADABLE:
            return None

    def keep(self) -> None:
        """Writes down what was compiled, if anything is new and Belljar has a folder for what it keeps."""
        if not self._new or not self._path.parent.parent.is_dir():
            return
        whole = marshal.dumps(self._kept | self._new)
        data = whole if len(whole) <= _MAX_BYTES else marshal.dumps(self._new)
        with suppress(OSError):
            own_files.check_folder(self._path.parent)
            own_files.write(self._path, data)

    def serve(self) -> None:
        """Has the modules that compile texts ask this cache: a function of theirs goes before a built-in one."""
        for module, name, function in (
            (dataclasses, "exec", self._exec),
            (collections, "eval", self._eval),
            (inspect, "eval", self._eval),
            (typing, "compile", self._compile),
        ):
            vars(module).setdefault(name, function)
        _Patterns(self._recall, self._new).serve()

    def _exec(self, text: Any, *scopes: Any) -> None:
        builtins.exec(self.code(text, "exec") if type(text) is str else text, *scopes)  # noqa: S102

    def _eval(self, text: Any, *scopes: Any) -> Any:
        return builtins.eval(self.code(text, "eval") if type(text) is str else text, *scopes)  # noqa: S307

    def _compile(self, text: Any, name: str, mode: str, *others: Any, **more: Any) -> Any:
        plain = type(text) is str and name == _NAME and not others and not more
        return self.code(text, mode) if plain else compile(text, name, mode, *others, **more)


class _Patterns:
    """Patterns of `re` that modules compile when they are imported; what else is compiled may be somebody's own."""

    def __init__(self, recall: Callable[[str], Any], new: dict[str, bytes]) -> None:
        self._recall = recall
        self._new = new
        self._engine: Any = None
        self._compile: Any = None
        self._seen: dict[int, tuple[Any, ...]] = {}  # thread -> what its last pattern was made of

    def serve(self) -> None:
        """Has `re` ask this cache; nothing happens where it works in another way than we know."""
        names = vars(vars(re).get("_compiler", re))
        self._engine, self._compile = names.get("_sre"), names.get("compile")
        if hasattr(self._engine, "compile"):
            names.update(compile=self.compile, _sre=SimpleNamespace(**vars(self._engine) | {"compile": self._note}))

    def compile(self, pattern: Any, flags: Any = 0) -> Any:
        """As the function of that name in `re`, from what was kept where there is any."""
        key = f"re:{int(flags)}:{pattern!r}" if type(pattern) in (str, bytes) else ""
        if (kept := self._recall(key)) is not None:
            with suppress(*_UNREADABLE):
                return self._engine.compile(pattern, *kept)
        found = self._compile(pattern, flags)
        made = self._seen.pop(get_ident(), None)
        if made and key and _is_importing():
            with suppress(*_UNREADABLE):
                effective, code, *groups = made
                self._new[key] = marshal.dumps((int(effective), list(map(int, code)), *groups))
        return found

    def _note(self, pattern: Any, *made: Any) -> Any:
        self._seen[get_ident()] = made
        return self._engine.compile(pattern, *made)


def _is_importing() -> bool:
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _IMPORTING:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def usual() -> CodeCache:
    """Returns the cache of this user, this Python and the command that was typed: others import other libraries."""
    command = next((word for word in sys.argv[1:] if word in EXAMPLES), "any")
    folder = os.environ.get("XDG_CACHE_HOME") or f"{os.environ.get('HOME', '/')}/.cache"
    version = f"{sys.implementation.cache_tag}-{sys.hexversion:x}-{sys.flags.optimize}"
    return CodeCache(Path(folder, "belljar", "code", f"{version}-{command}.code"))
