"""What a Dockerfile says, read before an engine does: its base images, its sources, its place. No I/O."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping

from belljar.core import errors

_CONTINUED = re.compile(r"\\[ \t]*\r?\n")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_REMOTE = re.compile(r"\w+://|\bgit@|\$", re.IGNORECASE)


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """Word and rest of each instruction, as engines read them: without comments and empty lines, which do not end a
    continued one."""
    text = dockerfile.lstrip("\ufeff")
    if re.match(r"(?:[ \t]*#[^\n]*\n)*?[ \t]*#[ \t]*escape[ \t]*=[ \t]*`", text, re.IGNORECASE):
        raise errors.InvalidRequest("Dockerfile: another escape character is not supported", fix="use the backslash")
    kept = [line for line in text.split("\n") if line.strip() and not line.lstrip().startswith("#")]
    found = []
    for line in _CONTINUED.sub(" ", "\n".join(kept) + "\n").split("\n"):
        word, rest = (*line.split(None, 1), "", "")[:2]
        if word.upper() == "ONBUILD":
            word, rest = (*rest.split(None, 1), "", "")[:2]
        if word:
            found.append((word.upper(), rest))
    return found


def bases(dockerfile: str, arguments: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The images that a Dockerfile starts from or copies from, to be checked before the engine fetches them itself.

    What cannot be told from the text is refused: a variable without a default, another platform than the engine's.
    """
    values: dict[str, str] = {}
    stages: set[str] = {"scratch"}
    found: list[str] = []
    started = False
    for word, rest in instructions(dockerfile):
        words = rest.split()
        if word == "ARG" and not started and rest:
            name, _, value = rest.strip().partition("=")
            values[name] = (arguments or {}).get(name, value.strip("\"'"))
        elif word == "FROM":
            started = True
            if any(part.startswith("--") for part in words):
                raise errors.InvalidRequest("Dockerfile: FROM takes no options here", fix="leave out --platform")
            image, *others = words or [""]
            _note(found, stages, image, values)
            stages |= {others[1].lower()} if len(others) == 2 else set()
        elif word in ("COPY", "ADD"):
            for part in words:
                if part.startswith("--from=") and not part[7:].isdecimal():
                    _note(found, stages, part[7:], values)
    return tuple(dict.fromkeys(found))


def check_sources(dockerfile: str) -> None:
    """The engine fetches what ADD names with its own network, whatever network the steps have."""
    for word, rest in instructions(dockerfile):
        if word == "ADD" and _REMOTE.search(rest):
            raise errors.PolicyDenied(
                f"Dockerfile: ADD {rest[:80]} may fetch something, and the build has no network",
                fix="allow the network, or use COPY",
                context={"field": "network"},
            )


def _note(found: list[str], stages: set[str], image: str, values: Mapping[str, str]) -> None:
    filled = _VARIABLE.sub(lambda match: values.get(match[1] or match[2], ""), image)
    if "$" in filled or not filled:
        raise errors.InvalidRequest(
            f"Dockerfile: cannot tell which image {image[:80]!r} is", fix="name it, or give its ARG a default"
        )
    if filled.lower() not in stages:
        found.append(filled)


def build_file(text: str) -> str:
    """The Dockerfile's place in its context: relative, plain, never climbing out."""
    path = posixpath.normpath(text)
    if posixpath.isabs(path) or path.split("/")[0] == ".." or "\0" in path or path == ".":
        raise errors.InvalidRequest(f"file: {text[:120]!r} is not in the context", fix="give a path relative to it")
    return path
