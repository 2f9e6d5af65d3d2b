"""The extension for VS Code: built, and tested by Node against a stand-in for the editor and a real `belljar`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXTENSION = Path(__file__).parents[2] / "editors/vscode"


@pytest.mark.exhaustive("npm fetches TypeScript first")
def test_the_extension_is_built_and_its_commands_do_what_they_say(tmp_path: Path) -> None:
    """The editor itself cannot be fetched here: what it shows is recorded by `test/stand_in/vscode.js`."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("NOTHING of the extension was checked: apt install npm")
    place = tmp_path / "vscode"
    left_out = shutil.ignore_patterns("node_modules", "out")
    shutil.copytree(EXTENSION, place, ignore=left_out)
    for words in (["install", "--no-audit", "--no-fund"], ["run", "build"]):
        subprocess.run([npm, *words], cwd=place, check=True, timeout=240)
    environ = os.environ | {"BELLJAR": str(Path(sys.executable).with_name("belljar"))}
    done = subprocess.run(
        [npm, "test"], cwd=place, env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "# pass 8" in done.stdout, done.stdout[-4000:]
