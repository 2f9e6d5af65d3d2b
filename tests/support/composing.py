"""Compose, whichever there is: Docker's own plugin, or the program before it, which Debian has."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

FILE = Path(__file__).parents[2] / "deploy" / "docker-compose.yml"


class Compose(NamedTuple):
    words: tuple[str, ...]
    version: str

    def file(self, folder: Path) -> Path:
        """The file as it is shipped. Version 1 knows no `name` at its top, so that line is left out for it."""
        text = FILE.read_text()
        assert text.count("\nname: belljar\n") == 1
        copy = folder / FILE.name
        copy.write_text(text.replace("\nname: belljar\n", "\n") if self.version.startswith("1.") else text)
        return copy

    def call(self, file: Path, *words: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        more = [word for path in file.parent.glob("override.yml") for word in ("-f", str(path))]
        line = [*self.words, "-p", "belljar", "-f", str(file), *more, *words]
        env = {**os.environ, **environment}
        done = subprocess.run(
            line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, env=env, check=False
        )
        assert not check or done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
        return done


def compose() -> Compose:
    """A loud skip where there is none."""
    for words in (("docker", "compose"), ("docker-compose",)):
        if shutil.which(words[0]):
            line = [*words, "version", "--short"]
            said = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
            if said.returncode == 0:
                return Compose(words, said.stdout.strip().removeprefix("v"))
    pytest.skip("NOTHING was checked by Compose itself: apt install docker-compose")
