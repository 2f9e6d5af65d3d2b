"""The Markdown pages of this repository, and what is in them: fenced blocks, links, tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
VARIABLE = re.compile(
    r"\b(?:(?:SANDBOX|BELLJAR)_[A-Z_]+|MAX_CONTAINERS|DOCKER_SOCKET_PATH|DOCKER_HOST|CONTAINER_HOST)\b"
)
_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: the page it is on, the words after its fence, and its text."""

    page: Path
    kind: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    for match in _FENCE.finditer(page.read_text()):
        yield Block(page, match[1].strip(), match[2])


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))
