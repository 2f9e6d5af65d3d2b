"""The programs of ours that run inside sandboxes, as text for `sh -c` and `python3 -c`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_GUEST = Path(__file__).parents[1] / "guest"


@cache
def shell(name: str) -> str:
    """Returns `guest/shell/NAME.sh` without its comments: the text is on a command line of every run."""
    lines = (_GUEST / "shell" / f"{name}.sh").read_text().splitlines()
    return "\n".join(line for line in lines if line.strip() and not line.lstrip().startswith("#"))


@cache
def python(name: str) -> str:
    """Returns `guest/NAME.py`."""
    return (_GUEST / f"{name}.py").read_text()
