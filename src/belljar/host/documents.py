"""Reads documents that people write: JSON, TOML and YAML, of bounded size and depth, each key once.

What a file says twice is refused, because each reader takes another of the two. A document of somebody else's, of which
only one part is ours, is read with `foreign=True`: what its other parts say twice is their affair.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from belljar.core.values import KIB, MIB

FORMATS = (".toml", ".yaml", ".yml", ".json")
MAX_BYTES = 4 * MIB
_MAX_YAML_BYTES = 256 * KIB  # its parser takes a second for so much
_MAX_DEPTH = 64
_MESSAGE_CHARACTERS = 400
_MAX_VALUES = 200_000  # counted as often as it is referred to: a few lines of YAML can mean billions


class _Mapping(dict[str, Any]):
    """A table, which knows what of it was said twice."""

    twice: tuple[str, ...] = ()


def parse(text: bytes, suffix: str, *, foreign: bool = False) -> Any:
    """Returns what a document says, as dicts, lists and plain values.

    Args:
        text: The document.
        suffix: Its format, as the end of its name: one of `FORMATS`.
        foreign: Whether most of it is somebody else's: then keys that are there twice are left to `refuse_twice`.

    Raises:
        ValueError: It is no such document, is too large, or says something twice.
    """
    suffix = suffix.lower()
    if suffix not in FORMATS:
        raise ValueError(f"its name must end in one of {', '.join(FORMATS)}, not {suffix!r}")
    most = _MAX_YAML_BYTES if suffix in (".yaml", ".yml") else MAX_BYTES
    if len(text) > most:
        raise ValueError(f"it has more than {most // KIB} KiB, which is larger than any settings")
    try:
        document = _READERS[suffix](text.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _count(document)
    if not foreign:
        refuse_twice(document)
    return document


def refuse_twice(value: Any, *, only: Iterable[str] | None = None) -> None:
    """Raises ValueError where a table in a document says something twice.

    Args:
        value: What `parse` returned, or a part of it.
        only: The keys that count, of this table and nothing below it; None: all keys, and those below.
    """
    if isinstance(value, _Mapping) and (wrong := [key for key in value.twice if only is None or key in only]):
        raise ValueError(f"{wrong[0][:80]!r} is there twice: leave one of them out")
    if only is None:
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            refuse_twice(part)


def _count(document: Any) -> None:
    """Refuses what would take forever to walk through."""
    values, stack = 0, [(document, 0)]
    while stack:
        value, depth = stack.pop()
        values += 1
        if depth > _MAX_DEPTH or values > _MAX_VALUES:
            raise ValueError("it is nested too deeply" if depth > _MAX_DEPTH else "it has too many values")
        if isinstance(value, dict):
            stack += [(part, depth + 1) for part in value.values()]
        elif isinstance(value, list):
            stack += [(part, depth + 1) for part in value]


def _paired(pairs: Iterable[tuple[Any, Any]]) -> _Mapping:
    table, twice = _Mapping(), []
    for key, value in pairs:
        if not isinstance(key, str):
            raise ValueError(f"the key {str(key)[:80]!r} is no text: put it in quotes")
        if key in table:
            twice.append(key)
        table[key] = value
    table.twice = tuple(twice)
    return table


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_paired)


def _toml(text: str) -> Any:
    import tomllib  # here, as the next one: most machines have no such file

    return tomllib.loads(text)


def _yaml(text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Plain values only, and each key once."""

    def table(loader: yaml.SafeLoader, node: yaml.MappingNode) -> _Mapping:
        # Merge keys can mean exponentially much, and that before anything could be counted.
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise ValueError("merge keys (<<) are not read: write out what they stand for")
        built = [[loader.construct_object(part, deep=True) for part in pair] for pair in node.value]
        return _paired((key, value) for key, value in built)

    Loader.add_constructor("tag:yaml.org,2002:map", table)
    try:
        return yaml.load(text, Loader)  # noqa: S506, it is a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())[:_MESSAGE_CHARACTERS]) from None


_READERS = {".json": _json, ".toml": _toml, ".yaml": _yaml, ".yml": _yaml}
