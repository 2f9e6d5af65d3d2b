"""The backend `apple` over the stand-in, on an engine of the tests."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from belljar.backends.apple.backend import Apple
from belljar.engine.engine import Engine
from belljar.settings import load
from engines import IMAGE, engines

SCRIPT = Path(__file__).with_name("container.py")


def socket_of(program: str) -> str:
    """Of the tests' own Docker or Podman, or a loud skip."""
    found = engines()
    if why := found.missing.get(program):
        pytest.skip(f"NOTHING of apple was checked: its stand-in needs {program}: {why}")
    if not shutil.which(program):
        pytest.skip(f"NOTHING of apple was checked: its stand-in needs the program {program}")
    return found.sockets[program]


def docker_socket() -> str:
    return socket_of("docker")


def stand_in(folder: Path, socket: str, style: str = "1.0", program: str = "docker") -> str:
    """A program `container` that speaks as that release does. Its engine is in the program, not in a variable."""
    path = folder / f"container-{style}"
    words = [sys.executable, "-I", str(SCRIPT), str(shutil.which(program)), f"unix://{socket}", style]
    path.write_text("#!/bin/sh\nexec " + " ".join(f"'{word}'" for word in words) + ' "$@"\n')
    path.chmod(0o755)
    return str(path)


def backend(folder: Path, *, style: str = "1.0", socket: str = "", program: str = "docker", **more: Any) -> Apple:
    images = {"execution": IMAGE, "node-execution": IMAGE}
    binary = stand_in(folder, socket or socket_of(program), style, program)
    return Apple(folder / "state", images=images, platform="darwin", binary=binary, **more)


def engine(folder: Path, **more: Any) -> Engine:
    """An engine of Belljar's whose `apple` is the stand-in's."""
    return Engine(load(state_dir=str(folder / "state")), extra=(backend(folder, **more),))
