"""The programs that run on the untrusted side, as text: `belljar/guest` is never imported, only sent."""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path

_GUEST = Path(__file__).parents[1] / "guest"


@cache
def shell_script(name: str, **values: str | int) -> str:
    """Returns a script of `guest/shell`, for `sh -c`.

    Args:
        name: Of the file, with its folder and without its ending: `files/lay`.
        values: Variables that the script counts on; they are set before its first line.
    """
    lines = (_GUEST / "shell" / f"{name}.sh").read_text().splitlines()
    code = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]  # each run sends it anew
    given = [f"{variable}={shlex.quote(str(value))}" for variable, value in values.items()]
    return "\n".join([*given, *code])


@cache
def text(name: str) -> str:
    """Returns a file of `guest` as it is, by its whole name."""
    return (_GUEST / name).read_text()


@cache
def python_program(name: str) -> str:
    """Returns a Python program of `guest`, by the name of its file without the ending."""
    return (_GUEST / f"{name}.py").read_text()
