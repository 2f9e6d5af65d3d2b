"""Names of packages that a guest is to find installed: `requests`, `numpy==2.*`, `npm:lodash@4`. Pure.

A name is never a path, an address, an option or a marker: it says what, and the configuration of pip, uv and npm says
from where.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

NPM = "npm:"
ANY_PYTHON, ANY_NPM = "*", "npm:*"  # in lists of an administrator's
MOST_NAMES = 64
_MOST_CHARACTERS = 256
_MOST_PATH = 4096
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?"
_CLAUSE = r"(?:~=|==|!=|<=|>=|<|>)[A-Za-z0-9][A-Za-z0-9.+!_-]{0,62}(?:\.\*)?"
_PYTHON = re.compile(rf"({_NAME})(\[{_NAME}(?:,{_NAME}){{0,15}}\])?((?:{_CLAUSE})(?:,{_CLAUSE}){{0,15}})?")
_RANGE = r"(?:[\^~=]|[<>]=?)?\d{1,9}(?:\.(?:\d{1,9}|[xX*])){0,2}(?:-[0-9A-Za-z.-]{1,64})?"
_TAG = r"[A-Za-z][A-Za-z0-9-]{0,63}"
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_NODE = re.compile(rf"((?:@{_PART}/)?{_PART})(?:@({_RANGE}|{_TAG}))?")
_FILES = (".whl", ".zip", ".tgz", ".tar", ".gz", ".bz2", ".xz", ".egg")  # installers would look for such a file
_FIX = 'write what is wanted as "requests", "numpy==2.*" or "npm:lodash@4", without addresses, paths and options'


def package(text: object) -> str:
    """Returns one name in its plain form.

    Raises:
        ValueError: it is none, or something more than a name with its versions.
    """
    if not isinstance(text, str):
        raise ValueError(f"{str(text)[:60]!r} is no name of a package: {_FIX}")
    plain = text.strip(" ")
    if not plain.startswith(NPM) and len(plain) <= _MOST_CHARACTERS:
        plain = re.sub(r" *([\[\],=<>!~]{1,3}) *", r"\1", plain)
    spoken = len(plain) <= _MOST_CHARACTERS and not plain.lower().endswith(_FILES)
    shape = _NODE.fullmatch(plain.removeprefix(NPM)) if plain.startswith(NPM) else _PYTHON.fullmatch(plain)
    if not spoken or shape is None or shape[1].lower().endswith(_FILES):
        raise ValueError(f"{text[:60]!r} is no name of a package: {_FIX}")
    return plain


def project(name: str) -> str:
    """Returns the package that a name stands for, without extras and versions, as registries write it."""
    if name.startswith(NPM):
        found = _NODE.fullmatch(name.removeprefix(NPM))
        return NPM + (found[1] if found else "")
    found = _PYTHON.fullmatch(name)
    return _canonical(found[1]) if found else ""


def node_parts(name: str) -> tuple[str, str]:
    """Splits `npm:lodash@4` into the package and the versions that will do; `*`: any."""
    found = _NODE.fullmatch(name.removeprefix(NPM))
    assert found is not None  # it was checked when it came in
    return found[1], found[2] or "*"


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _pattern(text: str) -> str:
    if text in (ANY_PYTHON, ANY_NPM):
        return text
    plain = package(text)
    if plain != text or (plain.startswith(NPM) and "@" in plain[len(NPM) + 1 :]) or re.search(r"[\[<>=!~]", plain):
        raise ValueError(f"{text[:60]!r}: list packages without versions, or * and npm:* for all")
    return project(plain)


def refused(names: Iterable[str], allowed: Sequence[str]) -> list[str]:
    """Returns those of the names that no pattern allows."""
    return [name for name in names if not _covered(project(name), allowed)]


def _covered(name: str, patterns: Sequence[str]) -> bool:
    return name in patterns or (ANY_NPM if name.startswith(NPM) else ANY_PYTHON) in patterns


def both(one: Sequence[str], other: Sequence[str]) -> tuple[str, ...]:
    """Returns patterns for what two lists allow together."""
    found = [name for name in one if _covered(name, other)] + [name for name in other if _covered(name, one)]
    return tuple(dict.fromkeys(found))


def lacking(names: Iterable[str], there: Mapping[str, str]) -> list[str]:
    """Returns those of the names that are not met by what is there: package -> version."""
    return [name for name in names if not _met(name, there)]


def _met(name: str, there: Mapping[str, str]) -> bool:
    found = None if name.startswith(NPM) else _PYTHON.fullmatch(name)
    if found is None or (version := there.get(_canonical(found[1]))) is None:
        return False
    return all(_fits(clause, version) for clause in (found[3] or "").split(",") if clause)


def _fits(clause: str, version: str) -> bool:
    """Whether a version meets one clause. What is not made of plain numbers is met by no more than the same text."""
    operator, wanted = clause[: 2 if clause[1] == "=" else 1], clause[2 if clause[1] == "=" else 1 :]
    star = wanted.endswith(".*")
    mine, theirs = _numbers(version), _numbers(wanted.removesuffix(".*"))
    if theirs is None or mine is None:
        return operator == "==" and wanted == version
    if star:
        return (mine[: len(theirs)] == theirs) is (operator == "==")
    if operator == "~=":
        return mine >= theirs and mine[: len(theirs) - 1] == theirs[:-1]
    longest = max(len(mine), len(theirs))
    a, b = (numbers + (0,) * (longest - len(numbers)) for numbers in (mine, theirs))
    return {"==": a == b, "!=": a != b, "<=": a <= b, ">=": a >= b, "<": a < b, ">": a > b}[operator]


def _numbers(version: str) -> tuple[int, ...] | None:
    return tuple(map(int, version.split("."))) if re.fullmatch(r"\d{1,9}(\.\d{1,9}){0,7}", version) else None


def _asked(value: object) -> object:
    """The folder of an environment, or names: each once, and in an order of their own."""
    if value is None:
        return None
    if isinstance(value, str):
        if not value or len(value) > _MOST_PATH or "\0" in value:
            raise ValueError("must be a folder, or a list of names of packages")
        return value
    if not isinstance(value, list | tuple | set | frozenset) or not value:
        raise ValueError(f"must be a folder, or a list of names of packages: {_FIX}")
    if len(value) > MOST_NAMES:
        raise ValueError(f"names {len(value)} packages, and may name {MOST_NAMES}")
    return tuple(sorted({package(name) for name in value}))


_SCHEMA = {"anyOf": [
    {"type": "string", "minLength": 1, "maxLength": _MOST_PATH},
    {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MOST_NAMES},
    {"type": "null"},
]}  # fmt: skip
Packages = Annotated[str | tuple[str, ...] | None, BeforeValidator(_asked), WithJsonSchema(_SCHEMA)]
PackagePattern = Annotated[str, AfterValidator(_pattern)]
