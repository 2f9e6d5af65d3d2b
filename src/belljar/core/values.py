"""Values that users write: sizes with units, names inside a box, variables, times, bytes as text or base64."""

import base64
import posixpath
import re
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, PlainSerializer, WithJsonSchema

KIB, MIB, GIB = 1024, 1024**2, 1024**3
WORKSPACE = "/workspace"
_MAX_PATH_BYTES = 4095  # the kernel's

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", re.IGNORECASE | re.ASCII)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(value: object) -> object:
    """`"512M"` -> 536870912. Units are powers of 1024; a bare number is bytes."""
    if isinstance(value, bool):
        raise ValueError("is neither true nor false, but a size")
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if not match:
        raise ValueError(f'{value[:40]!r} is not a size: write bytes, or a number with a unit such as "512M" or "4G"')
    number = float(match[1]) * 1024 ** _POWERS[match[2].lower()]
    if not number < 2**63:
        raise ValueError(f"{value[:40]!r} is larger than any machine")
    return int(number)


def format_size(size: float) -> str:
    for unit in ("B", "K", "M", "G"):
        if size < 1024:
            return f"{size:g}{unit}" if unit != "B" else f"{size:g} bytes"
        size = size // 1024 if size % 1024 == 0 else size / 1024
    return f"{size:.7g}T"


def guest_path(value: object) -> str:
    """A name inside the box: relative, plain, never climbing out."""
    if not isinstance(value, str | PurePosixPath):
        raise ValueError("a path inside the sandbox must be a string")
    text = str(value)
    if not text or len(text.encode("utf-8", "surrogatepass")) > 1024:
        raise ValueError("a path inside the sandbox must have 1 to 1024 bytes")
    if any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) <= 0xDFFF for c in text):
        raise ValueError(f"{text!r} holds a control character or half a surrogate pair: use a plain name")
    if "\\" in text:
        raise ValueError(f"{text!r} holds a backslash: separate folders with /")
    path = PurePosixPath(text)
    if path.is_absolute():
        if not path.is_relative_to(WORKSPACE):
            raise ValueError(f"{text!r} is outside {WORKSPACE}: use a path relative to it")
        path = path.relative_to(WORKSPACE)
    if ".." in path.parts:
        raise ValueError(f"{text!r} climbs out of {WORKSPACE}: leave out '..'")
    if not path.parts:
        raise ValueError(f"{text!r} names no file: give a name below {WORKSPACE}")
    if any(len(part.encode()) > 255 for part in path.parts) or len(path.parts) > 32:
        raise ValueError(f"{text[:60]!r} has a name over 255 bytes or more than 32 folders")
    return str(path)


def whole_path(value: str, home: str = "") -> str:
    """Returns the whole path of a name in a living sandbox: a relative one is below /workspace, `~` is its home.

    Raises:
        ValueError: nothing can have such a name.
    """
    if home and (value == "~" or value.startswith("~/")):
        value = home + value[1:]
    if not value or "\0" in value:
        raise ValueError("a path inside the sandbox must have at least one character, and no NUL")
    if len(_encodable(value).encode()) > _MAX_PATH_BYTES:
        raise ValueError(f"{value[:60]!r}… has more than {_MAX_PATH_BYTES} bytes")
    return posixpath.normpath("/" + posixpath.join(WORKSPACE, value).lstrip("/"))


def _env_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,127}", value):
        raise ValueError(f"{value[:40]!r} is not a variable name: use letters, digits and _")
    return value


def _env_text(value: object) -> object:
    """Numbers and booleans as the text that a program would read: 3000 -> "3000", true -> "true"."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


def near(name: str, known: Collection[str]) -> str:
    """Returns the known name that somebody may have meant; empty if none is like it."""
    import difflib  # here: few names are misspelt

    return next(iter(difflib.get_close_matches(name[:80], list(known), 1)), "")


def _no_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not hold a NUL byte")
    return value


def _encodable(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode (it holds half a surrogate pair)") from None
    return value


def _as_bytes(value: object) -> object:
    """Text, or `{"base64": …}` for what is not text."""
    if isinstance(value, Mapping):
        if set(value) != {"base64"} or not isinstance(value["base64"], str):
            raise ValueError('give text, or {"base64": "…"} for bytes that are not text')
        try:
            return base64.b64decode(value["base64"], validate=True)
        except ValueError:
            raise ValueError("base64: it cannot be decoded") from None
    return value.encode() if isinstance(value, str) else value


def _in_json(value: bytes) -> str | dict[str, str]:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


def iso_time(seconds: float) -> str:
    """Returns a time, in seconds since 1970, as ISO 8601 text: `2026-11-18T05:16:09.250000Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _seconds(value: object) -> object:
    """A time as seconds since 1970, from ISO 8601 text or from a number. Text without a zone is UTC."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise ValueError("is no time: write 2026-11-18T05:16:09Z, or seconds since 1970") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


_FEW = 10


def few(names: Collection[str]) -> str:
    """Lists the first of some names, for a message; empty if there is none."""
    shown = sorted(names)[:_FEW]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"{', '.join(shown)}{more}"


_ENCODED = {"type": "object", "properties": {"base64": {"type": "string"}}, "required": ["base64"]}
_SIZES = {"anyOf": [{"type": "integer"}, {"type": "string", "examples": ["512M"]}]}
Size = Annotated[int, BeforeValidator(parse_size), WithJsonSchema(_SIZES, mode="validation")]
Text = Annotated[str, AfterValidator(_no_nul), AfterValidator(_encodable)]
GuestPath = Annotated[str, BeforeValidator(guest_path)]
EnvText = Annotated[
    Text,
    BeforeValidator(_env_text),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}]}, mode="validation"),
]
EnvName = Annotated[str, AfterValidator(_env_name)]
Bytes = Annotated[
    bytes,
    BeforeValidator(_as_bytes),
    PlainSerializer(_in_json, when_used="json"),
    WithJsonSchema({"anyOf": [{"type": "string"}, _ENCODED | {"additionalProperties": False}]}),
]
Moment = Annotated[  # seconds since 1970 in Python, ISO 8601 text in JSON
    float,
    BeforeValidator(_seconds),
    PlainSerializer(iso_time, when_used="json"),
    WithJsonSchema({"type": "string", "format": "date-time"}, mode="serialization"),
    WithJsonSchema({"anyOf": [{"type": "string", "format": "date-time"}, {"type": "number"}]}, mode="validation"),
]


def _absolute(path: str) -> str:
    if path and not path.startswith("/"):
        raise ValueError(f"{path[:80]!r} is not an absolute path of a seccomp profile")
    return path


ProfilePath = Annotated[str, AfterValidator(_absolute)]
