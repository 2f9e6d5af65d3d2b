"""Which disk of the machine a file lies on."""

from __future__ import annotations

import os
from pathlib import Path


def disk_of(path: str) -> str | None:
    """`major:minor` of the whole disk below a path, as throttling wants it; None for what has no disk."""
    number = os.stat(path).st_dev
    entry = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not entry.exists():
        return None
    entry = entry.resolve()
    if (entry / "partition").exists():
        entry = entry.parent
    return (entry / "dev").read_text().strip()
