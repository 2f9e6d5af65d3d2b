"""Sets of packages on disk: made once, found again, never taken for whole by half, let go when room is needed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from belljar.core import errors
from belljar.core.settings import PackageSettings
from belljar.host.packages.installing import Workshop
from belljar.host.packages.store import PackageStore

pytestmark = pytest.mark.anyio


class Tinned:
    """A recipe whose packages are empty files; it counts how often it cooks."""

    kind = "tinned"

    def __init__(self, *, size: int = 10, lock: str = "", fails: bool = False, slow: bool = False) -> None:
        self.size, self.lock, self.fails, self.slow = size, lock, fails, slow
        self.resolved = self.installed = 0

    def stamp(self) -> Sequence[str | int]:
        return ["tin"]

    async def resolve(self, names: Sequence[str], shop: Workshop) -> Sequence[str]:
        self.resolved += 1
        if self.slow:
            await anyio.sleep(30)
        return [self.lock] if self.lock else list(names)

    async def install(self, shop: Workshop) -> None:
        self.installed += 1
        (shop.folder / "files" / "inner").mkdir(parents=True, mode=0o700)
        (shop.folder / "files" / "inner" / "data").write_bytes(b"x" * self.size)
        (shop.folder / "files" / "inner" / "data").chmod(0o4700)
        if self.fails:
            raise errors.InvalidRequest("packages: burnt")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "packages"


def store(folder: Path, told: list[str] | None = None, **settings: object) -> PackageStore:
    hear = told.append if told is not None else (lambda step: None)
    return PackageStore(folder, PackageSettings.model_validate(settings), {}, "/usr/bin:/bin", hear)


async def get(where: PackageStore, recipe: Tinned, *names: str) -> Path:
    async with where.held(names, recipe) as files:
        return files


def left(folder: Path) -> list[str]:
    return [*os.listdir(folder / "drafts"), *os.listdir(folder / "turns")]


async def test_a_set_is_made_once_and_found_again_by_anybody(folder: Path) -> None:
    recipe, told = Tinned(), list[str]()
    first = await get(store(folder, told), recipe, "a", "b")
    again = await get(store(folder, told), recipe, "a", "b")
    assert first == again and (recipe.resolved, recipe.installed) == (1, 1)
    assert told == ["installing packages for guests: a, b"]
    assert [one.names for one in store(folder).list()] == [("a", "b")] and left(folder) == []


async def test_what_was_installed_can_be_read_by_everybody_and_written_by_nobody_else(folder: Path) -> None:
    files = await get(store(folder), Tinned(), "a")
    assert (files / "inner").stat().st_mode & 0o7777 == 0o755
    assert (files / "inner" / "data").stat().st_mode & 0o7777 == 0o755, "and nothing has the set-uid bit"
    assert folder.stat().st_mode & 0o777 == 0o711


async def test_many_who_ask_for_the_same_at_once_wait_for_one_installation(folder: Path) -> None:
    recipe, found = Tinned(), list[Path]()

    async def ask() -> None:
        found.append(await get(store(folder), recipe, "a"))

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(ask)
    assert len(found) == 5 and len(set(found)) == 1 and recipe.installed == 1


async def test_two_requests_that_come_to_one_lock_share_a_set(folder: Path) -> None:
    recipe = Tinned(lock="a 1.0")
    assert await get(store(folder), recipe, "a") == await get(store(folder), recipe, "a==1")
    assert (recipe.resolved, recipe.installed, len(store(folder).list())) == (2, 1, 1)


async def test_an_installation_that_failed_leaves_nothing(folder: Path) -> None:
    with pytest.raises(errors.InvalidRequest, match="burnt"):
        await get(store(folder), Tinned(fails=True), "a")
    assert store(folder).list() == () and left(folder) == []
    assert (await get(store(folder), Tinned(), "a")).exists()


async def test_one_that_takes_too_long_is_given_up(folder: Path) -> None:
    with anyio.fail_after(10), pytest.raises(errors.NotAvailable, match=r"not there after 0\.2 s"):
        await get(store(folder, timeout=0.2), Tinned(slow=True), "a")
    assert left(folder) == []


async def test_what_a_killed_belljar_left_is_not_taken_for_a_set_and_removed_by_the_next(folder: Path) -> None:
    files = await get(store(folder), Tinned(), "a")
    (files.parent / "whole.json").unlink()  # as if it had been killed before the end
    dead = folder / "drafts" / "dead"
    (dead / "files").mkdir(parents=True)
    (dead / "lock").touch()
    assert store(folder).list() == ()
    recipe = Tinned()
    assert await get(store(folder), recipe, "a") == files and recipe.installed == 1
    assert left(folder) == [] and len(store(folder).list()) == 1


async def test_over_the_quota_the_longest_unused_go_but_none_that_is_in_use(folder: Path) -> None:
    one = store(folder, quota=25)
    async with one.held(["used"], Tinned()) as used:
        for age, name in ((100, "old"), (50, "young")):
            files = await get(one, Tinned(), name)
            os.utime(files.parent / "whole.json", (0, files.stat().st_mtime - age))
        os.utime(used.parent / "whole.json", (0, 0))
        await get(one, Tinned(), "new")
        assert {found.names for found in one.list()} == {("used",), ("new",)}
        assert used.exists()
    assert [found.names for found in one.prune(0)] == [("used",), ("new",)]
    assert one.list() == () and left(folder) == []
    recipe = Tinned()
    assert (await get(one, recipe, "old")).exists() and recipe.resolved == 1, "it is asked for anew"


async def test_only_what_was_not_used_for_so_long_is_pruned_if_that_is_asked(folder: Path) -> None:
    await get(store(folder), Tinned(), "a")
    assert store(folder).prune(0, unused_seconds=60) == ()
    assert len(store(folder).prune(0)) == 1


async def test_a_folder_that_others_may_write_to_is_not_used(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(errors.NotAvailable, match=r"not ours alone .*packages\.folder"):
        await get(store(folder), Tinned(), "a")
    folder.rmdir()
    (folder.parent / "theirs").mkdir()
    folder.symlink_to(folder.parent / "theirs")
    with pytest.raises(errors.NotAvailable, match="not ours alone"):
        await get(store(folder), Tinned(), "a")


async def test_a_set_is_let_go_where_no_room_could_be_made_after_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    def refuse(quota: int) -> None:
        raise OSError(30, "read-only")

    one = store(folder)
    with monkeypatch.context() as broken, pytest.raises(OSError, match="read-only"):
        broken.setattr(one, "prune", refuse)
        await get(one, Tinned(), "a")
    assert len(store(folder).prune(0)) == 1, "nobody holds it"
