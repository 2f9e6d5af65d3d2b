"""Reads the administrators' language file: JSON, TOML or YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from belljar.core import errors
from belljar.core.languages import BUILTIN, Language, Languages, family
from belljar.core.values import MIB
from belljar.host import documents
from belljar.host.seccomp.profiles import read_profile

_FIX = "correct the language file (SANDBOX_LANGUAGE_CONFIG_FILE)"
_OTHER_NAMES = {"command": "argv", "default_memory": "memory", "file_name": "filename"}


def load(path: str) -> Languages:
    """Reads the administrators' language file.

    Args:
        path: Where it is; its ending says its format. Empty: there is none.

    Raises:
        InvalidRequest: It cannot be read, or something in it makes no sense.
    """
    if not path:
        return Languages()
    try:
        table = _parse(Path(path))
    except (OSError, ValueError) as error:
        raise errors.InvalidRequest(f"{path}: {error}", fix=_FIX) from None
    return Languages({name.lower(): _entry(path, name.lower(), fields) for name, fields in table.items()})


def _entry(path: str, name: str, fields: object) -> Language:
    if not isinstance(fields, dict):
        raise errors.InvalidRequest(f"{path}: {name}: a language is a table of fields (got {fields!r})", fix=_FIX)
    known = BUILTIN.get(name) or family(name)
    try:
        given = _own_names(fields, Path(path).parent)
        if "argv" in given and known and known.needs == name:  # a command of its own needs its own program
            given = {"needs": ""} | given
        language = Language.model_validate((known.model_dump() if known else {}) | given | {"name": name})
    except ValidationError as error:
        problem = errors.from_validation(error)
        wrong = [f"{name}.{part}" for part in problem.message.split("; ")]
        raise errors.InvalidRequest(f"{path}: {'; '.join(wrong)}", fix=_FIX, context=problem.context) from None
    except ValueError as error:
        raise errors.InvalidRequest(f"{path}: {name}.{error}", fix=_FIX) from None
    try:
        if language.seccomp_profile:
            read_profile(language.seccomp_profile)
    except ValueError as error:
        raise errors.InvalidRequest(f"{path}: {name}.seccomp_profile: {error}", fix=_FIX) from None
    return language


def _own_names(fields: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The fields under our names, and the profile by its path: a relative one is beside the file."""
    given: dict[str, Any] = {}
    for name, value in fields.items():
        own, meant = _OTHER_NAMES.get(name, name), value
        if name == "default_memory_mb":
            own, meant = "memory", _megabytes(value)
        if own in given:
            raise ValueError(f"{name}: it says the same as {own}: leave one of them out")
        given[own] = meant
    if isinstance(given.get("argv"), str):
        given["argv"] = given["argv"].split()
    if isinstance(profile := given.get("seccomp_profile"), str) and profile:
        given["seccomp_profile"] = str(folder.absolute() / profile)
    return given


def _megabytes(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"default_memory_mb: must be a number of megabytes (got {str(value)[:40]!r})")
    return int(value * MIB)


def _parse(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        table = documents.parse(file.read(documents.MAX_BYTES + 1), path.suffix)
    if not isinstance(table, dict):
        raise ValueError("a language file maps names to languages")
    languages = table.get("languages", table)
    if not isinstance(languages, dict):
        raise ValueError("`languages` maps names to languages")
    return languages
