"""Files for JavaScript: each operation is a call of wasmtime's WASI, made by the bridge in the guest's own memory.

This process never touches a path with its own system calls. wasmtime resolves every path beneath the preopened
folders, links and `..` included; a path that lies elsewhere has no such folder and is refused before that.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from .calls import OutOfMemory, WasiError
from .quickjs import MAX_ALLOCATION_BYTES, PATH_MAX_BYTES, SCRATCH_BYTES

if TYPE_CHECKING:
    from .operations import Operations
    from .quickjs import QuickJs

    Place = tuple[int, int, int]  # a preopened folder, where the rest of the path lies, and how long it is

# WASI's error numbers that we ourselves give.
_ACCES, _BADF, _ISDIR, _NAMETOOLONG, _NOENT = 2, 8, 31, 37, 44
_FOLDER = 3  # a type of file
_O_DIRECTORY = 2
_FD_READ, _FD_WRITE, _FD_READDIR = 1 << 1, 1 << 6, 1 << 14
_FIRST_PREOPENED = 3
_BUFFERS_AT = 64  # in the scratch: what comes before is for small answers
_LEAST_BUFFER_BYTES = 4096
_DIRENT_BYTES = 24


class FileOperations:
    """The operations on files; a failure is answered with WASI's number, negative."""

    def __init__(self, js: QuickJs) -> None:
        self._js = js
        self._folders: dict[bytes, int] | None = None

    def table(self) -> Operations:
        return {
            b"readFile": (2, self.read_file), b"readInput": (2, self.read_input), b"writeFile": (4, self.write_file),
            b"stat": (2, self.stat), b"readFolder": (1, self.read_folder), b"makeFolder": (1, self.make_folder),
            b"removeFolder": (1, self.remove_folder), b"removeFile": (1, self.remove_file),
            b"rename": (2, self.rename),
        }  # fmt: skip

    # --- reading and writing ---

    def read_file(self, path: int, as_text: int) -> int:
        fd = self._open(self._locate(path), 0, _FD_READ)
        try:
            self._wasi("fd_filestat_get", fd, self._js.scratch)
            if self._js.word(self._js.scratch + 16, 1) == _FOLDER:
                raise WasiError(_ISDIR)
            return self._read_all(fd, self._js.word(self._js.scratch + 32, 8), bool(self._js.number(as_text)))
        finally:
            self._js.call("fd_close", fd)

    def read_input(self, fd: int, as_text: int) -> int:
        """Reads stdin to its end."""
        if self._js.number(fd):
            raise WasiError(_BADF)
        return self._read_all(0, 0, bool(self._js.number(as_text)))

    def _read_all(self, fd: int, expected: int, as_text: bool) -> int:
        js, room, filled = self._js, max(expected + 1, _LEAST_BUFFER_BYTES), 0
        buffer = js.call("wasm_malloc", room) if room < MAX_ALLOCATION_BYTES else 0
        while buffer:
            if filled == room:
                room *= 2
                buffer = js.call("realloc", buffer, room) if room < MAX_ALLOCATION_BYTES else 0
                continue
            self._vector(buffer + filled, room - filled)
            self._wasi("fd_read", fd, js.scratch, 1, js.scratch + 8)
            count = js.word(js.scratch + 8)
            filled += count
            if not count:
                box: int = js.call("qjs_new_string" if as_text else "qjs_new_uint8_array", buffer, filled)
                js.free(buffer)
                return box
        raise OutOfMemory("the file is larger than the guest's memory")

    def write_file(self, path: int, data: int, flags: int, append: int) -> int:
        place = self._locate_to_write(path)
        chars = 0
        if self._js.call("qjs_is_string", data):
            chars = start = self._js.call("qjs_get_string_len", data, self._js.scratch)
            size = self._js.word(self._js.scratch)
        else:
            start, size = self._js.bytes_at(data)
        fd = self._open(place, self._js.number(flags), _FD_WRITE, self._js.number(append))
        try:
            self._write_all(fd, start, size)
        finally:
            self._js.call("fd_close", fd)
            if chars:
                self._js.call("qjs_free_cstring", chars)
        return self._js.new_number(0)

    def _write_all(self, fd: int, start: int, size: int) -> None:
        scratch = self._js.scratch
        while size:
            self._vector(start, size)
            self._wasi("fd_write", fd, scratch, 1, scratch + 8)
            count = self._js.word(scratch + 8)
            start, size = start + count, size - count

    # --- names ---

    def stat(self, path: int, follow: int) -> int:
        """Returns as JSON: type, size, links, inode, and three times in milliseconds."""
        fd, at, size = self._locate(path)
        self._wasi("path_filestat_get", fd, self._js.number(follow), at, size, self._js.scratch)
        facts = self._js.read(self._js.scratch, 64)
        inode, links, length, *times = (int.from_bytes(facts[n : n + 8], "little") for n in (8, 24, 32, 40, 48, 56))
        return self._js.new_string(json.dumps([facts[16], length, links, inode, *(ns / 1e6 for ns in times)]).encode())

    def read_folder(self, path: int) -> int:
        """Returns the names and types of what is in a folder, as JSON."""
        fd = self._open(self._locate(path), _O_DIRECTORY, _FD_READDIR)
        names: list[tuple[str, int]] = []
        cookie, at, room = 0, self._js.scratch + _BUFFERS_AT, SCRATCH_BYTES - _BUFFERS_AT
        try:
            while True:
                self._wasi("fd_readdir", fd, at, room, cookie, self._js.scratch)
                data = self._js.read(at, self._js.word(self._js.scratch))
                found, cookie = _entries(data, cookie)
                names += found
                if len(data) < room or not found:
                    return self._js.new_string(json.dumps(names).encode())
        finally:
            self._js.call("fd_close", fd)

    def make_folder(self, path: int) -> int:
        self._wasi("path_create_directory", *self._locate(path))
        return self._js.new_number(0)

    def remove_folder(self, path: int) -> int:
        self._wasi("path_remove_directory", *self._locate(path))
        return self._js.new_number(0)

    def remove_file(self, path: int) -> int:
        self._wasi("path_unlink_file", *self._locate(path))
        return self._js.new_number(0)

    def rename(self, old: int, new: int) -> int:
        self._wasi("path_rename", *self._locate(old), *self._locate(new, slot=1))
        return self._js.new_number(0)

    # --- paths and calls as WASI wants them ---

    def _preopened(self) -> dict[bytes, int]:
        if self._folders is None:
            self._folders, fd, at = {}, _FIRST_PREOPENED, self._js.scratch
            while not self._js.call("fd_prestat_get", fd, at):
                size = self._js.word(at + 4)
                self._js.call("fd_prestat_dir_name", fd, at, size)
                self._folders[self._js.read(at, size).rstrip(b"/")] = fd
                fd += 1
        return self._folders

    def _locate(self, box: int, slot: int = 0) -> Place:
        """Puts a path's rest into the scratch; two paths of one call need two slots."""
        path = self._js.text(box)
        if len(path) > PATH_MAX_BYTES:
            raise WasiError(_NAMETOOLONG)
        for folder, fd in self._preopened().items():
            if path == folder or path.startswith(folder + b"/"):
                rest = path[len(folder) + 1 :] or b"."
                at = self._js.scratch + _BUFFERS_AT + slot * (PATH_MAX_BYTES + 8)
                self._js.write(at, rest)
                return fd, at, len(rest)
        raise WasiError(_NOENT)

    def _locate_to_write(self, box: int) -> Place:
        """Outside the preopened folders nothing can be written: that is a denial, not a missing file."""
        try:
            return self._locate(box)
        except WasiError as error:
            raise WasiError(_ACCES if error.number == _NOENT else error.number) from None

    def _open(self, place: Place, flags: int, rights: int, append: int = 0) -> int:
        fd, at, size = place
        self._wasi("path_open", fd, 1, at, size, flags, rights, rights, append, self._js.scratch)
        return self._js.word(self._js.scratch)

    def _vector(self, start: int, size: int) -> None:
        self._js.write(self._js.scratch, start.to_bytes(4, "little") + size.to_bytes(4, "little"))

    def _wasi(self, name: str, *args: int) -> None:
        if number := self._js.call(name, *args):
            raise WasiError(number)


def _entries(data: bytes, cookie: int) -> tuple[list[tuple[str, int]], int]:
    """Returns the whole entries in an answer of `fd_readdir`, and where to go on."""
    found, at = [], 0
    while at + _DIRENT_BYTES <= len(data):
        size = int.from_bytes(data[at + 16 : at + 20], "little")
        name = data[at + _DIRENT_BYTES : at + _DIRENT_BYTES + size]
        if len(name) < size:
            break
        if name not in (b".", b".."):
            found.append((name.decode(errors="replace"), data[at + 20]))
        cookie = int.from_bytes(data[at : at + 8], "little")
        at += _DIRENT_BYTES + size
    return found, cookie
