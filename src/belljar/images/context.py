"""Packs the folder that a build is sent. The folder is a project nobody has read.

No link leads out of it, nothing but files, folders and links is taken, and the size is capped.
"""

from __future__ import annotations

import os
import re
import stat
import tarfile
from collections.abc import Iterator
from typing import IO, NamedTuple

from belljar.core import errors
from belljar.core.values import MIB, format_size
from belljar.host import files

IGNORE = ".dockerignore"
MAX_ENTRIES = 200_000
_MAX_DEPTH = 100
_MAX_IGNORE = MIB
_MAX_PATTERNS = 2000
_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


# --- .dockerignore -----------------------------------------------------------------------------


class Ignore:
    """Docker's rules: the last pattern that matches a path, or a folder it is in, decides."""

    def __init__(self, text: str = "") -> None:
        self.rules: list[tuple[bool, tuple[str, ...]]] = []
        for raw in text.lstrip("\ufeff").splitlines():
            line = raw.strip()
            if not line or line.startswith("#"):
                continue
            keep = line.startswith("!")
            if pattern := os.path.normpath(line.removeprefix("!").strip() or ".").strip("/").removeprefix("./"):
                self.rules.append((keep, () if pattern == "." else tuple(_spelled(pattern))))
            if len(self.rules) > _MAX_PATTERNS:
                raise errors.InvalidRequest(f"{IGNORE}: more than {_MAX_PATTERNS} patterns")
        self.has_exceptions: bool = any(keep for keep, _ in self.rules)

    def ignores(self, path: str) -> bool:
        """Says whether a path is left out of the build."""
        parts = path.split("/")
        places = ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
        ignored = False
        for keep, patterns in self.rules:
            if ignored == keep and any(files.matches(place, patterns) for place in places):
                ignored = not keep
        return ignored


def _spelled(pattern: str) -> Iterator[str]:
    """Docker's pattern in the words of `files.matches`: rooted, `[!x]` for `[^x]`, no backslashes, `**` on its own."""
    plain = re.sub(r"\\(.)", lambda match: f"[{match[1]}]", pattern).replace("[^", "[!")
    mixed = [part for part in plain.split("/") if "**" in part and part != "**"]
    if not mixed:
        yield f"./{plain}"
        return
    if len(mixed) > 1:
        raise errors.InvalidRequest(f"{IGNORE}: {pattern[:80]!r} is too clever", fix="write ** as a folder of its own")
    before, _, after = mixed[0].partition("**")
    for wide in (f"{before}*{after}", f"{before}*/**/*{after}"):
        yield "./" + "/".join(wide if part is mixed[0] else part for part in plain.split("/"))


# --- packing -----------------------------------------------------------------------------------


class Packed(NamedTuple):
    """What went into the archive, and what did not."""

    dockerfile: str  # its text
    entries: int
    size: int
    left_out: tuple[str, ...]


def pack(folder: str, file: str, out: IO[bytes], *, limit: int) -> Packed:
    """Packs a folder into a tar archive, without what .dockerignore names.

    Args:
        folder: Its path.
        file: The Dockerfile, relative to it.
        out: Gets the archive.
        limit: How many bytes the files may have together.

    Raises:
        InvalidRequest: There is no such folder or Dockerfile, or it cannot be read.
        PolicyDenied: It is too large, or a link leads out of it.
    """
    try:
        with files.opened(folder) as root:
            return _Packing(root, file, out, limit).run()
    except (FileNotFoundError, NotADirectoryError):
        raise errors.InvalidRequest(f"context: {folder} is not a folder", fix="check the path") from None
    except PermissionError as error:
        raise errors.InvalidRequest(f"context: {folder}: {error.strerror}: {error.filename}") from None


class _Packing:
    def __init__(self, root: int, file: str, out: IO[bytes], limit: int) -> None:
        self.root, self.file, self.out, self.limit = root, file, out, limit
        self.ignore = Ignore(_text(root, IGNORE, _MAX_IGNORE) or "")
        self.entries = self.size = 0
        self.left_out: list[str] = []

    def run(self) -> Packed:
        dockerfile = _text(self.root, self.file, _MAX_IGNORE)
        if dockerfile is None:
            raise errors.InvalidRequest(
                f"file: there is no readable {self.file} in the context", fix="name it with --file"
            )
        with tarfile.open(fileobj=self.out, mode="w", format=tarfile.PAX_FORMAT) as tar:
            self._folder(tar, self.root, "", 1)
        return Packed(dockerfile, self.entries, self.size, tuple(self.left_out))

    def _folder(self, tar: tarfile.TarFile, folder: int, prefix: str, depth: int) -> None:
        for name in sorted(os.listdir(folder)):
            path = prefix + name
            facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
            is_folder = stat.S_ISDIR(facts.st_mode)
            ignored = self.ignore.ignores(path) and path not in (self.file, IGNORE)
            # Below an ignored folder there may still be something that an exception keeps, or the Dockerfile.
            deeper = self.ignore.has_exceptions or self.file.startswith(path + "/")
            if ignored and not (is_folder and deeper):
                continue
            self.entries += 1
            if self.entries > MAX_ENTRIES or depth > _MAX_DEPTH:
                raise errors.PolicyDenied(
                    f"context: more than {MAX_ENTRIES} entries or {_MAX_DEPTH} folders deep",
                    fix=f"name some in {IGNORE}",
                )
            self._entry(tar, folder, path, facts)
            if is_folder:
                inner = os.open(name, _DIRECTORY, dir_fd=folder)
                try:
                    self._folder(tar, inner, path + "/", depth + 1)
                finally:
                    os.close(inner)

    def _entry(self, tar: tarfile.TarFile, folder: int, path: str, facts: os.stat_result) -> None:
        try:
            path.encode()
        except UnicodeEncodeError:
            self.left_out.append(f"{path.encode('utf-8', 'backslashreplace').decode()}: a name that is not UTF-8")
            return
        entry = tarfile.TarInfo(path)
        entry.mtime = int(facts.st_mtime)
        entry.mode = facts.st_mode & 0o777  # no setuid file enters an image by this way; the owner becomes root
        if stat.S_ISDIR(facts.st_mode):
            entry.type = tarfile.DIRTYPE
            tar.addfile(entry)
        elif stat.S_ISLNK(facts.st_mode):
            entry.type = tarfile.SYMTYPE
            entry.linkname = _inside(path, os.readlink(path.rpartition("/")[2], dir_fd=folder))
            tar.addfile(entry)
        elif stat.S_ISREG(facts.st_mode):
            self._file(tar, entry, folder)
        else:
            self.left_out.append(f"{path}: neither a file nor a folder nor a link")

    def _file(self, tar: tarfile.TarFile, entry: tarfile.TarInfo, folder: int) -> None:
        fd = os.open(entry.name.rpartition("/")[2], _READ, dir_fd=folder)
        with os.fdopen(fd, "rb") as source:
            facts = os.fstat(source.fileno())
            self.size += facts.st_size
            if self.size > self.limit:
                raise errors.PolicyDenied(
                    f"context: it holds more than {format_size(self.limit)}",
                    fix=f"name what the build does not need in {IGNORE}, or raise images.build_context",
                    context={"field": "context", "cap": self.limit},
                )
            entry.size = facts.st_size
            try:
                if not stat.S_ISREG(facts.st_mode):
                    raise OSError("no file any more")
                tar.addfile(entry, source)
            except OSError:
                raise errors.InvalidRequest(
                    f"context: {entry.name} changed while it was read", fix="try again"
                ) from None


def _inside(path: str, target: str) -> str:
    """A link's target, if it stays in the context wherever that is unpacked."""
    landing = os.path.normpath(os.path.join(os.path.dirname(path), target))
    if os.path.isabs(target) or landing == ".." or landing.startswith("../"):
        raise errors.PolicyDenied(
            f"context: {path} is a link out of the context, to {target[:200]!r}",
            fix=f"copy the file into the context, or name the link in {IGNORE}",
            context={"field": "context", "path": path},
        )
    return target


def _text(root: int, path: str, limit: int) -> str | None:
    """A file of the context without following a link; None: there is none that can be read."""
    *folders, name = path.split("/")
    here = os.dup(root)
    try:
        for part in folders:
            inner = os.open(part, _DIRECTORY, dir_fd=here)
            os.close(here)
            here = inner
        fd = os.open(name, _READ, dir_fd=here)
    except OSError:
        return None
    finally:
        os.close(here)
    with os.fdopen(fd, "rb") as source:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        data = source.read(limit + 1)
    if len(data) > limit:
        raise errors.InvalidRequest(f"{path}: larger than {format_size(limit)}")
    return data.decode("utf-8", "replace")
