"""The files of a living sandbox of the fake, by whole paths: a dictionary with the errors of a kernel."""

from __future__ import annotations

import errno
import io
import os
import posixpath
import tarfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Literal

import anyio

from belljar.backends import inputs
from belljar.core.process import FileChange, FileStat
from belljar.core.result import File
from belljar.core.values import WORKSPACE

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectSendStream

    from belljar.backends.fake_living import FakeLivingBox

_MOST_CHANGES = 1000  # that wait for a reader
_FOLDER_MODE, _FILE_MODE = 0o755, 0o644
_NO_FILE = {"folder": errno.EISDIR, "link": errno.ELOOP, "pipe": errno.EINVAL}


class FakeTree:
    """What the fake's box has for a file system."""

    def __init__(self, box: FakeLivingBox) -> None:
        self._box = box
        self.modes: dict[str, int] = {}
        self._times: dict[str, float] = {}
        self._folders = set(box.writable) | {"/", "/home", "/var", "/usr", "/etc"}
        for folder in box.writable:
            self._folders |= set(_parents(folder))
        self._watchers: list[tuple[str, bool, MemoryObjectSendStream[FileChange]]] = []

    # --- what there is ---

    @property
    def _links(self) -> dict[str, str]:
        return {posixpath.normpath(f"{WORKSPACE}/{name}"): target for name, target in self._box.links.items()}

    def kind(self, path: str) -> str:
        """What is there: "file", "folder", "link", or nothing."""
        if path in self._links:
            return "link"
        if path in self._box.pipes:
            return "pipe"
        if path in self._box.disk or path in self._given():
            return "file"
        if path in self._folders or any(name.startswith(f"{path}/") for name in self._names()):
            return "folder"
        return ""

    def _given(self) -> dict[str, bytes]:
        given = {f"{self._box.plan.inputs}/{name}": data for name, data in self._box.plan.files.items()}
        return {
            "/etc/passwd": f"root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::{self._box.plan.home}:/bin/sh\n".encode()
        } | given

    def _names(self) -> Iterator[str]:
        yield from (*self._box.disk, *self._links, *self._folders, *self._given(), *self._box.pipes)

    def _require(self, path: str, *, there: bool = True) -> str:
        for folder in reversed(list(_parents(path))):
            kind = self.kind(folder)
            if kind in ("file", "link"):
                raise _error(errno.ENOTDIR if kind == "file" else errno.ELOOP, path)
        kind = self.kind(path)
        if there and not kind:
            raise _error(errno.ENOENT, path)
        return kind

    def _writable(self, path: str) -> None:
        if not path.startswith(tuple(f"{folder}/" for folder in self._box.writable)):
            raise _error(errno.EROFS, path)

    def stored(self, where: str, file: File) -> None:
        """Notes that a file was written, by whomever."""
        known = where in self._times
        self._folders |= set(_parents(where))
        self.modes.setdefault(where, 0o755 if file.executable else _FILE_MODE)
        self._times[where] = time.time()
        self._tell("changed" if known else "created", where)

    async def stat(self, path: str) -> FileStat:
        kind = self._require(path)
        data = self._box.disk[path].content if path in self._box.disk else self._given().get(path, b"")
        target = self._links.get(path, "")
        usual = {"folder": _FOLDER_MODE, "link": 0o777}.get(kind, _FILE_MODE)
        return FileStat(
            path=path, kind=kind, size=len(target) or len(data), mode=self.modes.get(path, usual),
            modified=self._times.get(path, 0.0), target=target,
        )  # fmt: skip

    async def list(self, path: str, depth: int) -> tuple[FileStat, ...]:
        if self._require(path) != "folder":
            raise _error(errno.ENOTDIR, path)
        top = path.rstrip("/")
        names = {name for one in self._names() for name in (one, *_parents(one))}
        below = (name for name in names if name.startswith(f"{top}/") and name != "/")
        found = sorted(name for name in below if name.removeprefix(top).count("/") <= depth)
        return tuple([await self.stat(name) for name in found])

    def reading(self, path: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        @asynccontextmanager
        async def opened() -> AsyncIterator[AsyncIterator[bytes]]:
            kind = self._require(path)
            if kind != "file":
                raise _error(_NO_FILE[kind], path)
            if not self.modes.get(path, _FILE_MODE) & 0o400:
                raise _error(errno.EACCES, path)
            content = self._given().get(path) or self._box.disk[path].content
            async with inputs.whole(content) as pieces:
                yield pieces

        return opened()

    # --- changes ---

    async def write(self, path: str, content: bytes, mode: int | None = None) -> None:
        kind = self._require(path, there=False)
        if kind in _NO_FILE:
            raise _error(_NO_FILE[kind], path)
        self._writable(path)
        if kind and not self.modes.get(path, _FILE_MODE) & 0o200:
            raise _error(errno.EACCES, path)
        if mode is not None:
            self.modes[path] = mode
        executable = bool(self.modes.get(path, 0) & 0o100)
        self._box.store(path, File(path=posixpath.relpath(path, WORKSPACE), content=content, executable=executable))

    async def make_dir(self, path: str) -> bool:
        kind = self._require(path, there=False)
        if kind == "folder":
            return False
        if kind:
            raise _error(errno.EEXIST, path)
        self._writable(path)
        self._folders |= {path, *_parents(path)}
        self._tell("created", path)
        return True

    async def move(self, path: str, to: str) -> None:
        self._require(path)
        self._writable(path)
        await self.copy(path, to)
        self._drop(path)
        self._tell("moved", path)

    async def copy(self, path: str, to: str) -> None:
        kind, there = self._require(path), self._require(to, there=False)
        self._writable(to)
        if there == "folder" or (there and kind == "folder"):
            raise _error(errno.EISDIR if kind != "folder" else errno.EEXIST, to)
        if f"{to}/".startswith(f"{path}/"):
            raise _error(errno.EINVAL, to)
        for name in [name for name in set(self._names()) if f"{name}/".startswith(f"{path}/")]:
            self._copy_one(name, to + name.removeprefix(path))

    def _copy_one(self, name: str, to: str) -> None:
        self.modes[to] = self.modes.get(name, _FOLDER_MODE if name in self._folders else _FILE_MODE)
        if name in self._links:
            self._box.links[posixpath.relpath(to, WORKSPACE)] = self._links[name]
        elif name in self._box.disk:
            file = self._box.disk[name]
            self._box.store(to, file.model_copy(update={"path": posixpath.relpath(to, WORKSPACE)}))
        else:
            self._folders |= {to, *_parents(to)}

    async def remove(self, path: str) -> None:
        self._require(path)
        if path in self._box.writable:
            raise _error(errno.EBUSY, path)
        self._writable(path)
        self._drop(path)
        self._tell("removed", path)

    def _drop(self, path: str) -> None:
        for name in [name for name in set(self._names()) if f"{name}/".startswith(f"{path}/")]:
            self._box.disk.pop(name, None)
            self._box.links.pop(posixpath.relpath(name, WORKSPACE), None)
            self._folders.discard(name)
            self.modes.pop(name, None)
            self._times.pop(name, None)

    # --- watched, packed ---

    def _tell(self, kind: Literal["created", "changed", "removed", "moved", "missed"], path: str) -> None:
        for folder, recursive, stream in self._watchers:
            if posixpath.dirname(path) == folder or (recursive and path.startswith(f"{folder}/")):
                try:
                    stream.send_nowait(FileChange(kind=kind, path=path))
                except anyio.WouldBlock:
                    continue

    @asynccontextmanager
    async def watch(self, path: str, *, recursive: bool = False) -> AsyncIterator[AsyncIterator[FileChange]]:
        if self._require(path) != "folder":
            raise _error(errno.ENOTDIR, path)
        sending, receiving = anyio.create_memory_object_stream[FileChange](_MOST_CHANGES)
        watcher = (path, recursive, sending)
        self._watchers.append(watcher)
        try:
            with sending, receiving:
                yield receiving.__aiter__()
        finally:
            self._watchers.remove(watcher)

    @asynccontextmanager
    async def packing(self, paths: Sequence[str]) -> AsyncIterator[AsyncIterator[bytes]]:
        for path in paths:
            self._require(path)
        whole = io.BytesIO()
        with tarfile.open(fileobj=whole, mode="w") as archive:
            wanted = tuple(f"{path.rstrip('/')}/" for path in paths)
            for name in sorted({name for name in self._names() if f"{name}/".startswith(wanted)} - {"/"}):
                await self._pack(archive, name)
        async with inputs.whole(whole.getvalue()) as pieces:
            yield pieces

    async def _pack(self, archive: tarfile.TarFile, name: str) -> None:
        facts = await self.stat(name)
        member = tarfile.TarInfo(name.lstrip("/"))
        member.mode, member.mtime = facts.mode, int(facts.modified)
        member.type = {"folder": tarfile.DIRTYPE, "link": tarfile.SYMTYPE}.get(facts.kind, tarfile.REGTYPE)
        member.linkname = facts.target
        content = b""
        if facts.kind == "file":
            content = self._given().get(name) or self._box.disk[name].content
            member.size = len(content)
        archive.addfile(member, io.BytesIO(content))

    async def unpack(self, path: str, archive: AsyncIterator[bytes]) -> None:
        await self.make_dir(path)
        whole = io.BytesIO(b"".join([piece async for piece in archive]))
        try:
            with tarfile.open(fileobj=whole) as opened:
                for member in opened:
                    await self._lay(opened, member, path)
        except tarfile.TarError as error:
            raise ValueError(f"it is no tar archive: {error}") from None

    async def _lay(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        if member.name.startswith("/") or ".." in member.name.split("/"):
            raise ValueError(f"{member.name[:80]!r} leads out of the folder")
        where = posixpath.normpath(f"{path}/{member.name}")
        if where == path:
            return
        if member.isdir():
            await self.make_dir(where)
            self.modes[where] = member.mode
        elif member.issym():
            self._writable(where)
            self._require(where, there=False)
            self._box.links[posixpath.relpath(where, WORKSPACE)] = member.linkname
        elif member.isreg():
            content = archive.extractfile(member)
            assert content is not None
            await self.write(where, content.read(), member.mode)
            self._times[where] = float(member.mtime)
        else:
            raise ValueError(f"{member.name[:80]!r} is neither a file nor a folder nor a link")


def _parents(path: str) -> Iterator[str]:
    while path != "/":
        path = posixpath.dirname(path)
        yield path


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
