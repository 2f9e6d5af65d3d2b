"""Finds the backend whose Python can import the libraries that a run requires, or says which are missing."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from belljar.core import errors, hints
from belljar.core.capabilities import Capabilities
from belljar.core.request import RunRequest
from belljar.core.values import few

if TYPE_CHECKING:
    from belljar.engine.engine import Engine

_PROBE_SECONDS = 60.0
_PROBE = """\
import importlib, json
missing = []
for name in {names}:
    try:
        importlib.import_module(name)
    except BaseException:
        missing.append(name)
print(json.dumps(missing))
"""
_PYTHON = "python"


class LibrarySearch:
    """Remembers where libraries were found, so that each place is asked once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._found: set[tuple[object, ...]] = set()

    async def settle(self, request: RunRequest) -> tuple[RunRequest, str]:
        """Returns the request with a backend that has what it requires, and why that one.

        Args:
            request: what was asked, with `require_libraries`.

        Raises:
            InvalidRequest: libraries are required of something else than Python code.
            NotAvailable: no backend has them all; `context["missing"]` names those that each lacks.
        """
        names = self._names(request)
        plain = request.model_copy(update={"require_libraries": False})
        if not names:
            return plain, ""
        named = self._engine.settings.backend if request.backend == "auto" else request.backend
        lacking: dict[str, Sequence[str]] = {}
        refused: dict[str, str] = {}
        for name in self._engine.known if named == "auto" else (named,):
            tried = plain.model_copy(update={"backend": name})
            able = await self._able(tried, refused)
            if able is None:
                continue
            if missing := await self._missing(tried, able, names):
                lacking[name] = missing
            elif named == "auto" and not await self._engine.suits(tried):
                refused[name] = "it may lack something else that the code needs"
            else:
                return tried, f"{name} chosen: it has the libraries that are required: {few(names)}"
        raise _not_found(names, lacking, refused)

    def _names(self, request: RunRequest) -> tuple[str, ...]:
        """The libraries that must import: those that are listed, or all that the code imports."""
        language = self._engine.languages.get(request.language).name if request.code is not None else ""
        if not language.startswith(_PYTHON):
            raise errors.InvalidRequest(
                "require_libraries: goes with Python code", fix="leave it out, or look for them in the program itself"
            )
        if request.require_libraries is not True:
            return tuple(dict.fromkeys(request.require_libraries or ()))
        assert request.code is not None
        seen = hints.analyse(request.code, _PYTHON, request.files).modules
        own = {name.partition("/")[0].removesuffix(".py") for name in request.files}
        return tuple(sorted(seen - sys.stdlib_module_names - own))

    async def _able(self, tried: RunRequest, refused: dict[str, str]) -> Capabilities | None:
        """What a backend can do, if it may take the run at all."""
        if tried.backend in self._engine.known:
            able = await self._engine.capabilities(tried.backend)
            if not able.available:  # one that has only to be set up is not: that takes minutes
                refused[tried.backend] = able.why_not or "not available here"
                return None
        try:
            await self._engine.suits(tried)
        except errors.BelljarError as error:
            refused[tried.backend] = error.message
            return None
        return await self._engine.capabilities(tried.backend)

    async def _missing(self, tried: RunRequest, able: Capabilities, names: Sequence[str]) -> Sequence[str]:
        """The libraries that a backend lacks: by its own list, or by trying to import them there."""
        if able.modules is not None:
            return [name for name in names if name not in able.modules and name not in sys.stdlib_module_names]
        place = (tried.backend, tried.image, tried.runtime, tried.type, tried.language, tried.packages)
        unsure = [name for name in names if (*place, name) not in self._found]
        if not unsure:
            return ()
        seconds = min(_PROBE_SECONDS, self._engine.settings.caps.timeout)
        probe = tried.model_copy(
            update={
                "code": _PROBE.format(names=json.dumps(unsure)), "files": {}, "stdin": b"", "args": (), "env": {},
                "collect": (), "limits": tried.limits.model_copy(update={"timeout": seconds}),
            }
        )  # fmt: skip
        result = await self._engine.run(probe)
        missing = _read(result.stdout, unsure) if result.ok else unsure
        self._found |= {(*place, name) for name in unsure if name not in missing}
        return missing


def _read(text: str, names: Sequence[str]) -> Sequence[str]:
    """What the probe printed; what cannot be understood counts as nothing found."""
    try:
        told = json.loads(text.splitlines()[-1])
    except (ValueError, IndexError, RecursionError):
        return names
    return [name for name in names if name in told] if isinstance(told, list) else names


def _not_found(
    names: Sequence[str], lacking: Mapping[str, Sequence[str]], refused: Mapping[str, str]
) -> errors.NotAvailable:
    told = [f"{name} lacks {few(missing)}" for name, missing in lacking.items()]
    told += [f"{name}: {why}" for name, why in refused.items()]
    return errors.NotAvailable(
        f"the libraries that are required ({few(names)}) cannot be imported here: {'; '.join(told)}",
        fix='have them installed with packages=["<name>"], grant a Python environment that has them with '
        'packages="/path/to/venv", or name an image that does',
        context={"missing": {name: list(missing) for name, missing in lacking.items()}},
    )
