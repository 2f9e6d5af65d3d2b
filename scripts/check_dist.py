"""Builds the package, checks it, installs the wheel into a clean environment and runs the showcase from there.

`make dist` calls it: `python scripts/check_dist.py [FOLDER]`. Nothing is uploaded.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMAND_SECONDS = 600
_WHERE = "import belljar; print(belljar.__version__, belljar.__file__)"


def build(folder: Path) -> Path:
    """Builds the source package, the wheel from it, and returns the wheel; both must pass `twine check --strict`."""
    for old in folder.glob("belljar*"):
        old.unlink()
    _call(sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT))
    made = sorted(folder.glob("belljar_sandbox-*"))
    _call(sys.executable, "-m", "twine", "check", "--strict", *map(str, made))
    (wheel,) = (path for path in made if path.suffix == ".whl")
    return wheel


def try_out(wheel: Path, folder: Path) -> None:
    """Installs the wheel into a new environment in `folder` and uses it away from the repository."""
    home = folder / "clean"
    venv.create(home, with_pip=True)
    shutil.copy(ROOT / "examples" / "showcase.py", folder)
    _call(str(home / "bin/pip"), "install", "--quiet", "--disable-pip-version-check", str(wheel))
    version, _, where = _call(str(home / "bin/python"), "-c", _WHERE, cwd=folder).strip().partition(" ")
    if not where.startswith(str(home)) or f"-{version}-" not in wheel.name:
        raise SystemExit(f"{wheel.name} is not what was imported: version {version} from {where}")
    for command in ("belljar", "belljar-sandbox"):
        _call(str(home / "bin" / command), "version", cwd=folder)
    _call(str(home / "bin/python"), "showcase.py", cwd=folder)


def _call(*words: str, cwd: Path = ROOT) -> str:
    print("$", *(word.removeprefix(f"{ROOT}/") for word in words), flush=True)
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}\nit ended with {done.returncode}")
    return done.stdout


def main() -> None:
    """Builds into the folder that was named (default: dist) and says what is ready."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = build(folder)
    with tempfile.TemporaryDirectory(prefix="belljar-dist-") as scratch:
        Path(scratch).chmod(0o755)  # as root, guests have a uid of their own and must be able to read the interpreter
        try_out(wheel, Path(scratch))
    print("ready:", *(path.name for path in sorted(folder.glob("belljar_sandbox-*"))))


if __name__ == "__main__":
    main()
