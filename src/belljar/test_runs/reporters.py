"""Our reporters in a sandbox: they are laid into a folder of its /tmp, whose name nobody knows before the run."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path

from belljar.core.test_results.asked import TestOptions
from belljar.host.archives import Member, padding

_SOURCE = Path(__file__).parents[1] / "guest/reporters"
_FOLDERS = {".py": "py", ".cjs": "js", ".mjs": "js"}
_PROGRAMS = "bin"  # the folder of `reporters` with programs that stand in for others on PATH


def new_folder() -> str:
    """Returns the name of a folder for one run."""
    return f"/tmp/.belljar-{secrets.token_hex(8)}"


@cache
def _sources() -> tuple[tuple[str, bytes, int], ...]:
    files = [("launch.sh", (_SOURCE / "launch.sh").read_bytes(), 0o644)]
    for path in sorted(_SOURCE.iterdir()):
        if path.suffix in _FOLDERS and path.name != "__init__.py":
            files.append((f"{_FOLDERS[path.suffix]}/{path.name}", path.read_bytes(), 0o644))
    if (_SOURCE / _PROGRAMS).is_dir():
        for path in sorted((_SOURCE / _PROGRAMS).iterdir()):
            files.append((f"{_PROGRAMS}/{path.stem}", path.read_bytes(), 0o755))
    return tuple(files)


def packed(options: TestOptions) -> Iterator[bytes]:
    """Gives the reporters, with what they are told, as a tar archive."""
    settings = json.dumps({"only": options.only, "shard": options.shard, "coverage": options.coverage}).encode()
    told = [(f"{folder}/settings.json", settings, 0o644) for folder in dict.fromkeys(_FOLDERS.values())]
    yield Member("out", "folder", 0o700).header()
    for name, content, mode in (*_sources(), *told):
        yield Member(name, "file", mode, size=len(content)).header() + content + padding(len(content))
    yield bytes(1024)


async def pieces(options: TestOptions) -> AsyncIterator[bytes]:
    """Gives the same to async readers."""
    for piece in packed(options):
        yield piece
