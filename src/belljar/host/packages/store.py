"""Sets of packages on disk: made once for each lock, found again by it, granted to guests read-only.

    requests/KEY.json    what was asked for, of which interpreter -> the lock that it came to
    sets/LOCK/           one set: `files`, for guests; `whole.json`, written last; `lock`, held by who uses it
    drafts/NAME/         one that is being made; who holds its `lock` is making it
    turns/NAME           held by whoever makes what others may be about to make

A set is made in a draft and gets its name when it is whole: what was killed on the way is never taken for one. The
kernel lets go of what a dead process held.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread

from belljar.core import errors
from belljar.core.settings import PackageSettings
from belljar.core.values import few
from belljar.host.packages.installing import PackageRecipe, Workshop, size_of

_FORMAT = 1
_POLL_SECONDS = 0.05
_NAME_CHARACTERS = 32
_MOST_RECORD_BYTES = 1 << 20


class PackageSet(NamedTuple):
    """One set of packages that is kept."""

    id: str
    names: tuple[str, ...]
    size: int
    used: float  # when it was last granted, in seconds since 1970


class PackageStore:
    """The sets of packages below one folder."""

    def __init__(
        self,
        folder: Path,
        settings: PackageSettings,
        environment: Mapping[str, str],
        path: str,
        told: Callable[[str], object] = lambda step: None,
    ) -> None:
        """Remembers what it is told; nothing is looked at yet.

        Args:
            folder: where the sets are kept.
            settings: how large and how many they may be, and how long they may take.
            environment: the installers' own variables, with the administrator's configuration in them.
            path: where installers are looked for.
            told: hears what takes long.
        """
        self._folder = folder
        self._settings = settings
        self._environment = {**environment, "PATH": path, "LC_ALL": "C.UTF-8"}
        self.path: str = path
        self._told = told

    @asynccontextmanager
    async def held(self, names: Sequence[str], recipe: PackageRecipe) -> AsyncIterator[Path]:
        """The folder in which these packages are installed, made if need be, and kept while the block runs.

        Args:
            names: what was asked for.
            recipe: how such a set is made.

        Raises:
            InvalidRequest: there are no such packages.
            NotAvailable: they cannot be fetched here, or not in time.
            PolicyDenied: they are more than may be kept.
        """
        await anyio.to_thread.run_sync(self._prepare)
        key = _digest([_FORMAT, recipe.kind, *recipe.stamp(), *names])
        held = await anyio.to_thread.run_sync(self._find, key)
        if held is None:
            held = await self._make(key, names, recipe)
        try:
            yield held.files
        finally:
            os.close(held.lock)

    async def _make(self, key: str, names: Sequence[str], recipe: PackageRecipe) -> _Held:
        with _bounded(self._settings.timeout):
            async with self._turn(key):
                if found := await anyio.to_thread.run_sync(self._find, key):
                    return found  # somebody else has made it meanwhile
                self._told(f"installing packages for guests: {few(names)}")
                await anyio.to_thread.run_sync(self._remove_leftovers)
                async with self._draft() as shop:
                    lock = [recipe.kind, *await recipe.resolve(names, shop)]
                    id = _digest(lock)
                    async with self._turn(id):
                        if not (self._sets / id / "whole.json").exists():
                            await recipe.install(shop)
                            await anyio.to_thread.run_sync(self._finish, shop.folder, id, names, lock)
                await anyio.to_thread.run_sync(self._record, key, names, id)
                held = await anyio.to_thread.run_sync(self._find, key)
        if held is None:  # pruned by somebody in this very moment
            raise errors.NotAvailable("packages: they are gone already", fix="try again, or raise packages.quota")
        try:
            await anyio.to_thread.run_sync(self.prune, self._settings.quota)
        except BaseException:
            os.close(held.lock)
            raise
        return held

    # --- on disk ---

    @property
    def _sets(self) -> Path:
        return self._folder / "sets"

    def _prepare(self) -> None:
        """Makes the folders, or refuses ones that somebody else could have filled."""
        try:
            self._folder.mkdir(mode=0o711, parents=True, exist_ok=True)
            for name in ("", "requests", "sets", "drafts", "turns"):
                part = self._folder / name
                if name:
                    part.mkdir(mode=0o711, exist_ok=True)
                facts = part.lstat()
                if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
                    raise errors.NotAvailable(
                        f"packages: {part} is not ours alone", fix="remove it, or set packages.folder to a private one"
                    )
        except OSError as error:
            raise errors.NotAvailable(
                f"packages: {self._folder} cannot be made: {error.strerror}", fix="set packages.folder"
            ) from None

    def _find(self, key: str) -> _Held | None:
        """A whole set that a request came to before, held so that nobody removes it."""
        said = _read(self._folder / "requests" / f"{key}.json")
        id = said.get("lock") if said else None
        return self._hold(id) if isinstance(id, str) and _is_name(id) else None

    def _hold(self, id: str) -> _Held | None:
        folder = self._sets / id
        try:
            lock = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if (folder / "whole.json").exists() and os.path.samestat(os.fstat(lock), os.stat(folder / "lock")):
                os.utime(folder / "whole.json")
                return _Held(folder / "files", lock)
        except OSError:  # it is being removed
            pass
        os.close(lock)
        return None

    @asynccontextmanager
    async def _draft(self) -> AsyncIterator[Workshop]:
        name = secrets.token_hex(_NAME_CHARACTERS // 2)
        folder = self._folder / "drafts" / name
        lock = await anyio.to_thread.run_sync(_begin, folder)
        try:
            size, seconds = self._settings.size, self._settings.timeout
            yield Workshop(folder, self._environment, size, seconds, lock)
        finally:
            os.close(lock)
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(lambda: shutil.rmtree(folder, ignore_errors=True))

    def _finish(self, draft: Path, id: str, names: Sequence[str], lock: Sequence[str]) -> None:
        """Takes what is to be granted out of the draft, and gives it its name."""
        made = draft / "set"
        made.mkdir(mode=0o755)
        (draft / "files").rename(made / "files")
        _open_up(made / "files")
        (made / "lock").touch(mode=0o600)
        whole = {"names": list(names), "lock": list(lock), "size": size_of(made / "files")}
        _write(made / "whole.json", whole)
        with suppress(FileNotFoundError):  # what is not whole has been left by nobody, but may have lost its list
            shutil.rmtree(self._sets / id)
        made.rename(self._sets / id)

    def _record(self, key: str, names: Sequence[str], id: str) -> None:
        _write(self._folder / "requests" / f"{key}.json", {"names": list(names), "lock": id})

    def _remove_leftovers(self) -> None:
        """Removes the drafts of those who were killed."""
        for draft in (self._folder / "drafts").iterdir():
            with suppress(OSError), _alone(draft / "lock"):
                shutil.rmtree(draft, ignore_errors=True)

    # --- keeping room ---

    def list(self) -> tuple[PackageSet, ...]:
        """Lists the sets that are kept, the one that was used last first."""
        found = []
        for folder in self._sets.iterdir() if self._sets.is_dir() else ():
            said = _read(folder / "whole.json")
            with suppress(OSError, KeyError, TypeError, ValueError):
                used = (folder / "whole.json").stat().st_mtime
                found.append(PackageSet(folder.name, tuple((said or {})["names"]), int((said or {})["size"]), used))
        return tuple(sorted(found, key=lambda one: one.used, reverse=True))

    def prune(self, quota: int, unused_seconds: float = 0) -> tuple[PackageSet, ...]:
        """Removes sets that nobody uses now, the longest unused first, until the rest takes no more than a quota.

        Args:
            quota: bytes that may be left.
            unused_seconds: how long a set must not have been used.

        Returns:
            Those that were removed.
        """
        kept = list(self.list())
        total = sum(one.size for one in kept)
        removed = []
        for one in reversed(kept):
            if total <= quota or time.time() - one.used < unused_seconds:
                break
            with suppress(OSError), _alone(self._sets / one.id / "lock"):
                gone = self._folder / "drafts" / secrets.token_hex(_NAME_CHARACTERS // 2)
                (self._sets / one.id).rename(gone)
                shutil.rmtree(gone, ignore_errors=True)
                total -= one.size
                removed.append(one)
        self._forget(removed)
        return tuple(removed)

    def _forget(self, removed: Sequence[PackageSet]) -> None:
        gone = {one.id for one in removed}
        for record in (self._folder / "requests").glob("*.json") if gone else ():
            if (_read(record) or {}).get("lock") in gone:
                record.unlink(missing_ok=True)

    @asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[None]:
        """Waits until nobody else makes the same."""
        path = self._folder / "turns" / name
        while True:
            if (fd := _taken(path)) is not None:
                break
            await anyio.sleep(_POLL_SECONDS)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # while it is ours: who waits for it looks again
            os.close(fd)


class _Held(NamedTuple):
    files: Path
    lock: int


@contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    try:
        with anyio.fail_after(seconds):
            yield
    except TimeoutError:
        raise errors.NotAvailable(
            f"packages: they were not there after {seconds:g} s", fix="ask for fewer, or raise packages.timeout"
        ) from None
    except OSError as error:
        raise errors.NotAvailable(
            f"packages: they cannot be kept: {error.strerror}", fix="make room: `belljar packages prune`"
        ) from None


def _taken(path: Path) -> int | None:
    """Takes a lock, and the file that stands for it; None: somebody else has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    except OSError:  # it is taken, or was let go and removed in this very moment
        pass
    os.close(fd)
    return None


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Holds a lock that nobody else has, or raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def _begin(folder: Path) -> int:
    folder.mkdir(mode=0o711)
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def _open_up(files: Path) -> None:
    """Lets everybody read what was installed, whatever our umask is; nobody gains rights by running it."""
    files.chmod(0o755)
    for where, folders, names in os.walk(files):
        for name in (*folders, *names):
            path = Path(where, name)
            facts = path.lstat()
            if stat.S_ISDIR(facts.st_mode) or (stat.S_ISREG(facts.st_mode) and facts.st_mode & 0o111):
                path.chmod(0o755)
            elif stat.S_ISREG(facts.st_mode):
                path.chmod(0o644)
            elif not stat.S_ISLNK(facts.st_mode):
                raise errors.PolicyDenied(f"packages: {name[:100]!r} is no file", fix="ask for other packages")


def _digest(parts: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:_NAME_CHARACTERS]


def _is_name(text: str) -> bool:
    return len(text) == _NAME_CHARACTERS and set(text) <= set("0123456789abcdef")


def _write(path: Path, value: Mapping[str, Any]) -> None:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    draft.write_text(json.dumps(value))
    draft.rename(path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            said = json.loads(file.read(_MOST_RECORD_BYTES))
    except (OSError, ValueError):
        return None
    return said if isinstance(said, dict) else None
