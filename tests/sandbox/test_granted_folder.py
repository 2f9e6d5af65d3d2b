"""A granted folder is the folder: what a guest commits of it is what it changed, and nothing is lost or hidden."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from pathlib import Path

import pytest

import belljar
from belljar.engine.engine import Engine
from belljar.host import lending

pytestmark = [pytest.mark.anyio, pytest.mark.engine]
STRANGER = 54_322
_COMMIT = (
    "git config user.email guest@example.org; git config user.name guest; echo x > made; git add -A; git commit -qm it"
)
_GIT = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}


def git(folder: Path, *words: str) -> str:
    env = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **_GIT}
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, env=env, check=True)
    return done.stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with links, permissions, an ignored empty folder and files of two names."""
    folder = tmp_path / "repository"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "main.py").write_text("print(1)\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "current").symlink_to("src")
    (folder / "src" / "link.py").symlink_to("main.py")
    (folder / "nowhere").symlink_to("/no/such/file")
    git(folder.parent, "init", "-q", str(folder))
    git(folder, "config", "user.email", "host@example.org")
    git(folder, "config", "user.name", "host")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    (folder / "empty").mkdir()
    os.link(folder / "run.sh", folder / "src" / "twin.sh")
    (folder / "src" / "secret").write_text("for the owner")
    (folder / "src" / "secret").chmod(0o600)
    return folder


def tree(folder: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(folder.rglob("*")):
        if ".git" not in path.parts:
            facts = path.lstat()
            what = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
            found[str(path.relative_to(folder))] = (stat.filemode(facts.st_mode), what, facts.st_uid, facts.st_nlink)
    return found


def give(folder: Path, owner: int) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, owner, owner, follow_symlinks=False)
    for parent in folder.parents:  # pytest's own, which nobody else may enter
        if parent.stat().st_uid == os.geteuid() and "pytest" in str(parent):
            parent.chmod(0o755)


@pytest.mark.parametrize("owner", [0, STRANGER] if os.geteuid() == 0 else [os.geteuid()])
async def test_a_guest_that_commits_all_commits_only_what_it_changed(
    engine: Engine, repository: Path, owner: int
) -> None:
    give(repository, owner)
    before = tree(repository)
    result = await belljar.arun(
        command=["sh", "-c", _COMMIT], workspace=str(repository), write=True, env=_GIT, engine=engine, backend="native"
    )
    assert result.ok, result.stderr
    changed = set(git(repository, "show", "--name-status", "--format=", "HEAD").splitlines())
    assert changed == {"A\tmade", "A\tsrc/secret", "A\tsrc/twin.sh"}
    after = tree(repository)
    assert after.pop("made") == ("-rw-r--r--", b"x\n", owner, 1)
    assert after == before
    assert git(repository, "status", "--porcelain") == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: only its folders are lent")
async def test_a_guest_of_a_lent_folder_leaves_no_file_that_makes_whoever_runs_it_root(
    engine: Engine, tmp_path: Path
) -> None:
    folder = tmp_path / "lent"
    folder.mkdir()
    code = (
        "import os, stat\n"
        "for name, make in {\n"
        "    'opened': lambda: os.close(os.open('opened', os.O_CREAT | os.O_WRONLY, 0o4755)),\n"
        "    'chmod': lambda: (open('chmod', 'w').close(), os.chmod('chmod', 0o4755)),\n"
        "    'node': lambda: os.mknod('node', stat.S_IFREG | 0o6755),\n"
        "    'device': lambda: os.mknod('device', stat.S_IFBLK | 0o666, os.makedev(254, 0)),\n"
        "    'given': lambda: (open('given', 'w').close(), os.chown('given', 0, 0)),\n"
        "}.items():\n"
        "    try:\n        make()\n    except OSError:\n        pass\n"
        "print('done')"
    )
    result = await belljar.arun(code, workspace=str(folder), write=True, engine=engine, backend="native")
    assert result.stdout == "done\n", result.stderr
    for path in folder.iterdir():
        assert not path.lstat().st_mode & (stat.S_ISUID | stat.S_ISGID), path
        assert stat.S_ISREG(path.lstat().st_mode), path


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: only its folders are lent")
async def test_a_lent_folder_gives_a_guest_nothing_beside_it_and_leaves_no_mount_and_no_descriptor(
    engine: Engine, tmp_path: Path
) -> None:
    folder = tmp_path / "lent"
    folder.mkdir()
    (tmp_path / "beside").write_text("not granted")
    (folder / "out").symlink_to(tmp_path / "beside")
    os.chown(folder / "out", 0, 0, follow_symlinks=False)
    descriptors = len(os.listdir("/proc/self/fd"))
    code = (
        "import os\nprint(os.path.exists('out'), os.path.exists('../beside'))\n"
        "print([os.readlink(f'/proc/self/fd/{n}') for n in range(3, 64) if os.path.exists(f'/proc/self/fd/{n}')])"
    )
    for _ in range(3):
        result = await belljar.arun(code, workspace=str(folder), write=True, engine=engine, backend="native")
    assert result.stdout == "False False\n[]\n", result.stdout + result.stderr
    mounts = Path("/proc/self/mountinfo").read_text()
    assert str(folder) not in mounts
    assert engine.settings.state_dir not in mounts
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: only its folders are lent")
def test_a_folder_that_cannot_be_lent_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(belljar.PolicyDenied, match=r"/proc belongs to root, and cannot be lent .*chown"):
        lending.lend("/proc", 61_000, str(tmp_path))


async def test_a_file_that_only_others_may_read_is_read_by_nobody_for_the_guest(engine: Engine, tmp_path: Path) -> None:
    """Belljar may be root, and in groups of its own: reading for the guest, it is neither."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "closed").write_text("not for the guest")
    (folder / "closed").chmod(0o640)
    if os.geteuid() == 0:
        give(folder, STRANGER)
        os.chown(folder / "closed", 0, 0)
    else:
        (folder / "closed").chmod(0)
    async with belljar.AsyncSandbox(engine=engine, backend="native", workspace=str(folder), write=True) as box:
        with pytest.raises(PermissionError):
            await box.read("closed")
        with pytest.raises(PermissionError):
            await box.write("closed", "changed")
        result = await box.run("print(1)", collect=["closed"])
    assert result.files == ()
    assert result.left_out == ("closed: may not be read",)


async def test_a_pipe_and_a_link_are_refused_at_once_and_lead_nowhere(engine: Engine) -> None:
    code = "import os\nos.mkfifo('pipe')\nos.symlink('/etc/passwd', 'link')\nos.symlink('/etc', 'folder')"
    async with belljar.AsyncSandbox(engine=engine, backend="native") as box:
        assert (await box.run(code)).ok
        for name, number in {"pipe": errno.EINVAL, "link": errno.ELOOP, "folder/passwd": errno.ENOTDIR}.items():
            with pytest.raises(OSError) as caught:
                await box.read(name)
            assert (caught.value.errno, caught.value.filename) == (number, name)
        for name in ("pipe", "link", "folder/new"):
            with pytest.raises(OSError):
                await box.write(name, "x")
        kinds = {entry.path: entry.kind for entry in await box.list()}
    assert kinds == {"pipe": "pipe", "link": "link", "folder": "link"}


@pytest.mark.parametrize("backend", ["native", "wasm"])
async def test_what_a_session_writes_is_there_for_its_code_and_the_other_way_round(
    engine: Engine, backend: str
) -> None:
    async with belljar.AsyncSession(engine=engine, backend=backend, files={"given.txt": "as given"}) as session:
        assert await session.read("given.txt") == b"as given"
        await session.write("a/note.txt", "of the caller")
        turn = await session.run("print(open('a/note.txt').read(), open('given.txt').read())")
        assert turn.stdout == "of the caller as given\n"
        assert (await session.run("open('.belljarrc', 'w').write('mine')")).ok
        assert await session.read(".belljarrc") == b"mine"
        assert [entry.path for entry in await session.list()] == [".belljarrc", "a", "a/note.txt", "given.txt"]


def test_pieces_of_a_large_file_come_to_blocking_code_too(engine: Engine) -> None:
    with belljar.Sandbox(engine=engine, backend="native") as box:
        assert box.run("open('big', 'wb').truncate(5 << 20)").ok
        with box.reading("big") as pieces:
            sizes = [len(piece) for piece in pieces]
        assert sum(sizes) == 5 << 20
        assert len(sizes) > 1
