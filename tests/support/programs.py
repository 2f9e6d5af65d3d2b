"""Programs that tests put where Belljar looks for them."""

from __future__ import annotations

from pathlib import Path


def program(folder: Path, name: str) -> Path:
    """An executable that tells a version and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("#!/bin/sh\necho 9.9.9\n")
    (folder / name).chmod(0o755)
    return folder / name
