"""TypeScript in images whose Node does not know it: node:20-slim among them. Types are taken out as they are loaded."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from belljar.core.plan import Command

_FOLDER = ".belljar"  # beside the code, read-only like it
_PACKAGE = Path(__file__).parents[2]


@cache
def _files() -> dict[str, bytes]:
    return {
        f"{_FOLDER}/typescript.cjs": (_PACKAGE / "guest" / "javascript" / "node_typescript.js").read_bytes(),
        f"{_FOLDER}/sucrase.js": (_PACKAGE / "backends" / "wasm" / "vendor" / "sucrase.js").read_bytes(),
    }


def prepared(command: Command, inputs: str) -> Command:
    """Returns the command of a TypeScript snippet with what an older Node needs to run it; any other as it is.

    Args:
        command: What is to be run.
        inputs: The folder in which the guest finds its read-only files.
    """
    if command.language != "typescript" or command.argv[0] != "node":
        return command
    argv = ("node", "--require", f"{inputs}/{_FOLDER}/typescript.cjs", *command.argv[1:])
    return command.model_copy(update={"argv": argv, "files": {**command.files, **_files()}})
