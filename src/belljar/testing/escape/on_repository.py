"""The attack on whoever uses git in a granted folder after the guest: its configuration and hooks say what git runs."""

from __future__ import annotations

from pathlib import Path

from belljar.core.result import Result
from belljar.testing.escape.attacks import Attack
from belljar.testing.escape.scenarios import Range, escaped_by

_FILES = (".git/HEAD", ".git/config", ".git/hooks/sample", ".git/modules/sub/HEAD", ".git/modules/sub/config")
_AS_IT_WAS = "as it was\n"
_PAYLOAD = """
import shutil
def write(path, text="run this"):
    with open(path, "w") as file:
        file.write(text)
def attempt(action, *words):
    try:
        action(*words)
        return 0
    except OSError:
        return 1
write("made-by-guest")
refused = sum(attempt(*step) for step in (
    (write, ".git/config"), (os.unlink, ".git/config"), (os.rename, "made-by-guest", ".git/config"),
    (write, ".git/hooks/pre-commit"), (os.rename, ".git/hooks", ".git/old"), (os.mkdir, ".git/hooks"),
    (write, ".git/modules/sub/config"), (os.rename, ".git/modules", ".git/old-modules"),
    (write, ".git/commondir", "../elsewhere"), (write, ".git/config.worktree"),
    (os.rename, ".git", "old"), (shutil.copytree, "old", ".git"), (os.symlink, "old", ".git"),
))
held(f"{refused} steps were refused")
"""


async def _repository(range_: Range) -> Result:
    """Grants a repository, and looks afterwards at what git would go by in it."""
    project = range_.bait.drop.parent / "repository"
    for name in _FILES:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(_AS_IT_WAS)
    for path in (project, *project.rglob("*")):
        path.chmod(0o777)  # so that only the sandbox, and not a file's mode, stands in the way
    before = (project / ".git").stat().st_ino
    result = await range_.run(range_.payload, workspace=str(project), write=True)
    changed = sorted(_changed(project))
    if changed or (project / ".git").lstat().st_ino != before:
        return escaped_by(result, f"git goes by what the guest made: {', '.join(changed) or '.git'}")
    return result


def _changed(project: Path) -> set[str]:
    names = {name for name in _FILES if name.endswith(("config", "sample"))}
    changed = {name for name in names if not _is(project / name)}
    git = project / ".git"
    made = {"commondir", "config.worktree", "hooks/pre-commit"}
    return changed | {f".git/{name}" for name in made if (git / name).exists()}


def _is(path: Path) -> bool:
    return path.is_file() and path.read_text() == _AS_IT_WAS


REPOSITORY = (
    Attack(
        name="repository's hooks", category="files",
        tries="changes, moves and replaces the configuration and hooks of a repository that it may write to",
        payload=_PAYLOAD, held="what git goes by is as it was", scenario=_repository, needs_workspace=True,
    ),
)  # fmt: skip
