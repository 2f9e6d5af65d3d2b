"""Moves files into and out of sandboxes.

Everything that leaves a sandbox is hostile: no link is followed, no device or pipe is opened, and count, depth and
size are capped before anything is read. Folders are passed as open descriptors, so that nobody can swap them.
"""

from __future__ import annotations

import ctypes
import fnmatch
import os
import platform
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from belljar.core import errors
from belljar.core.result import Collected, Entry, File
from belljar.core.values import MIB, format_size, guest_path
from belljar.host import syscalls
from belljar.host.guest_uid import group_of

MAX_DEPTH = 32  # folders
MAX_ENTRIES = 10_000
NOT_LOOKED_AT = "the rest was not looked at"
MANY = 1_000_000  # entries, for a folder of the user's own
MAX_COLLECTED = 64 * MIB  # bytes
_CHANGED = "changed while it was read"
# Windows lacks some of these, and has no use for this module but to import it.
_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _SAFE
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _SAFE
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE


class Node(NamedTuple):
    """One entry that `walk` came to."""

    path: str
    folder: int  # an open descriptor of the directory that holds it, valid during the step
    name: str
    stat: os.stat_result


@contextmanager
def opened(path: str) -> Iterator[int]:
    """Opens a folder of the host; the descriptor stays the same folder whatever happens to its name."""
    fd = os.open(path, _DIRECTORY & ~getattr(os, "O_NOFOLLOW", 0))
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def below(root: int, path: str) -> Iterator[int]:
    """Opens a folder below an open one, following no link."""
    with _folder(root, path.split("/"), make=False) as fd:
        yield fd


def unnamed() -> int:
    """Makes a file without a name, in memory where that can be: it leaves nothing behind."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("belljar", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def seal(fd: int) -> None:
    """Makes an unnamed file unchangeable, whatever descriptor somebody holds; where the kernel can do that."""
    with suppress(ImportError, AttributeError, OSError):
        import fcntl

        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


def write(root: int, files: Sequence[File], *, owner: int | None = None) -> None:
    """Writes files below an open directory, as `owner` if given: then with that uid's rights and no more."""
    with acting_as(owner):
        for file in files:
            parts = guest_path(file.path).split("/")
            with _folder(root, parts[:-1]) as folder:
                _replace(folder, parts[-1], file)


def collect(
    root: int, patterns: Sequence[str], *, owner: int | None = None, most: int = MAX_ENTRIES,
    limit: int = MAX_COLLECTED,
) -> Collected:  # fmt: skip
    """Reads the regular files below an open directory that match.

    Args:
        root: the directory.
        patterns: see `matches`.
        owner: with whose rights, if not with ours.
        most: how many entries are looked at.
        limit: how many bytes are read in all.

    Returns:
        The files, and what was left out and why.
    """
    with acting_as(owner):
        return _collect(root, patterns, most, limit)


def _collect(root: int, patterns: Sequence[str], most: int, limit: int) -> Collected:
    files: list[File] = []
    left_out: list[str] = []
    budget = limit
    for node in walk(root, left_out, most):
        if stat.S_ISDIR(node.stat.st_mode) or not matches(node.path, patterns):
            continue
        if not stat.S_ISREG(node.stat.st_mode):
            left_out.append(f"{node.path}: {kind(node.stat.st_mode)}, only regular files leave a sandbox")
        elif node.stat.st_size > budget:
            left_out.append(f"{node.path}: {format_size(node.stat.st_size)} is over what may be collected")
        elif isinstance(content := read_node(node, budget), str):
            left_out.append(f"{node.path}: {content}")
        else:
            budget -= len(content)
            files.append(File(path=node.path, content=content, executable=bool(node.stat.st_mode & 0o100)))
    return Collected(tuple(files), tuple(left_out))


def entries(root: int, *, owner: int | None = None, most: int = MAX_ENTRIES) -> tuple[Entry, ...]:
    """Lists all that is below an open directory, in the order of names.

    With `owner`: all that this uid may see.

    Raises:
        PolicyDenied: there are more than `most` entries.
    """
    left_out: list[str] = []
    with acting_as(owner):
        found = [Entry(node.path, kind(node.stat.st_mode), node.stat.st_size) for node in walk(root, left_out, most)]
    refuse_half(left_out, most)
    return tuple(sorted(found))


def refuse_half(left_out: Sequence[str], most: int) -> None:
    """Raises PolicyDenied where a walk ended early: half a list looks like a whole one."""
    if any(line.endswith(NOT_LOOKED_AT) for line in left_out):
        raise errors.PolicyDenied(
            f"list: there are more than {most} entries in /workspace, so a list would not be whole",
            fix="list a part of it with a command such as `find DIR`, or read files by their names",
            context={"field": "list", "cap": most},
        )


def clear(root: int, paths: Iterable[str], *, folders: bool = False) -> None:
    """Removes what is in the way of a file (or folder) at each path: links, pipes, files where folders must be."""
    for path in paths:
        parts = path.split("/")
        with suppress(FileNotFoundError), ExitStack() as stack:
            folder = root
            for depth, part in enumerate(parts):
                mode = os.stat(part, dir_fd=folder, follow_symlinks=False).st_mode
                last = depth == len(parts) - 1
                if last and stat.S_ISDIR(mode) and not folders:
                    raise errors.ExecutionFailed(
                        f"{path} is a folder, and a file was to be there", fix="remove it first"
                    )
                if not (stat.S_ISDIR(mode) or (last and stat.S_ISREG(mode) and not folders)):
                    os.unlink(part, dir_fd=folder)
                if not last:
                    folder = os.open(part, _DIRECTORY, dir_fd=folder)
                    stack.callback(os.close, folder)


def make_folder(root: int, path: str, *, owner: int | None = None) -> None:
    """Makes a folder below an open directory, and those on the way to it, as `owner` if given."""
    with acting_as(owner), _folder(root, path.split("/")):
        pass


def missing(root: int, paths: Iterable[str]) -> list[str]:
    """Lists those paths, and folders on the way to them, that do not exist below an open directory; deepest first."""
    wanted = {"/".join(path.split("/")[: depth + 1]) for path in paths for depth in range(path.count("/") + 1)}
    return sorted((path for path in wanted if not _exists(root, path)), key=lambda path: -path.count("/"))


def discard(root: int, paths: Sequence[str]) -> None:
    """Removes files and empty folders, deepest first, as `missing` listed them before somebody made them."""
    for path in paths:
        parts = path.split("/")
        with suppress(OSError, errors.InvalidRequest), _folder(root, parts[:-1], make=False) as folder:
            try:
                os.unlink(parts[-1], dir_fd=folder)
            except IsADirectoryError:
                os.rmdir(parts[-1], dir_fd=folder)


def erase(root: int, name: str, *, owner: int | None = None) -> bool:
    """Removes a whole tree below an open directory, however deep, following no link; False if something remains.

    Each folder found is first moved to the top, so that neither the depth of the tree nor a name's length counts.
    """
    waiting = [name]
    with suppress(OSError), acting_as(owner):
        while waiting:
            folder = waiting[-1]
            with suppress(FileNotFoundError):
                waiting[-1:-1] = _flatten(root, folder)
                os.rmdir(folder, dir_fd=root)
            waiting.remove(folder)
    return not waiting


def _flatten(root: int, name: str) -> list[str]:
    """Unlinks a folder's files and moves its folders up to the root, under new names."""
    moved = []
    folder = os.open(name, _DIRECTORY, dir_fd=root)
    try:
        for entry in os.listdir(folder):
            try:
                os.unlink(entry, dir_fd=folder)
            except IsADirectoryError:
                moved.append(f".gone-{os.urandom(8).hex()}")
                os.rename(entry, moved[-1], src_dir_fd=folder, dst_dir_fd=root)
    finally:
        os.close(folder)
    return moved


def _exists(root: int, path: str) -> bool:
    try:
        os.stat(path, dir_fd=root, follow_symlinks=False)
    except OSError:
        return False
    return True


@contextmanager
def acting_as(owner: int | None) -> Iterator[None]:
    """This thread's file rights become the owner's, and no more: neither root's nor those of a group of ours."""
    if owner is None:
        yield
        return
    libc = ctypes.CDLL(None)
    groups = os.getgroups()
    _set_groups([])
    libc.setfsgid(group_of(owner))
    libc.setfsuid(owner)
    try:
        yield
    finally:
        libc.setfsuid(os.geteuid())
        libc.setfsgid(os.getegid())
        _set_groups(groups)


def _set_groups(groups: Sequence[int]) -> None:
    """Of this thread alone: `os.setgroups` would change those of all the others too."""
    number = 116 if platform.machine() == "x86_64" else 159
    syscalls.call(number, len(groups), (ctypes.c_uint32 * len(groups))(*groups))


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Whether a path matches one of the patterns.

    A pattern without a slash matches names at any depth (`./name` only the topmost); `*` stays within a name, `**`
    does not.
    """
    return any(_match(path.split("/"), p.removeprefix("./").split("/") if "/" in p else ["**", p]) for p in patterns)


def _match(parts: list[str], pattern: list[str]) -> bool:
    places = {0}  # how many parts each way of matching has used up so far; a set, so that no pattern takes long
    for word in pattern:
        if word == "**":
            places = set(range(min(places, default=len(parts) + 1), len(parts) + 1))
        else:
            places = {i + 1 for i in places if i < len(parts) and fnmatch.fnmatchcase(parts[i], word)}
    return len(parts) in places


@contextmanager
def _folder(root: int, parts: Sequence[str], *, make: bool = True) -> Iterator[int]:
    try:
        with descended(root, parts, make=make) as fd:
            yield fd
    except NotADirectoryError:
        raise errors.InvalidRequest(f"path: {'/'.join(parts)!r} is not a folder in the sandbox") from None


@contextmanager
def descended(root: int, parts: Sequence[str], *, make: bool = False) -> Iterator[int]:
    """Opens (making what is missing) the folder below root, one name at a time, so that no link is followed.

    Raises:
        NotADirectoryError: something else is on the way, a link perhaps.
    """
    current = os.dup(root)
    try:
        for part in parts:
            try:
                following = os.open(part, _DIRECTORY, dir_fd=current)
            except FileNotFoundError:
                if not make:
                    raise
                with suppress(FileExistsError):  # somebody else has just made it
                    os.mkdir(part, 0o755, dir_fd=current)
                following = os.open(part, _DIRECTORY, dir_fd=current)
            os.close(current)
            current = following
        yield current
    finally:
        os.close(current)


def _replace(folder: int, name: str, file: File) -> None:
    mode = (0o755 if file.executable else 0o644) & ~(0o222 if file.read_only else 0)
    replace(folder, name, file.content, mode=mode)


def replace(folder: int, name: str, content: bytes, *, mode: int, exactly: bool = False) -> None:
    """Writes a whole file or nothing: under another name, then renamed over what was there.

    Args:
        folder: an open directory.
        name: the file in it; of a link, the link itself gives way, never what it points to.
        content: its bytes.
        mode: its permissions.
        exactly: whether they hold whatever the umask says.
    """
    draft = f".belljar-{os.urandom(6).hex()}"
    fd = os.open(draft, _CREATE, 0o600 if exactly else mode, dir_fd=folder)
    try:
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(fd, view) :]
            if exactly:
                os.fchmod(fd, mode)
        finally:
            os.close(fd)
        with suppress(NotADirectoryError, FileNotFoundError):
            os.rmdir(name, dir_fd=folder)  # an empty folder may give way, a full one may not
        os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft, dir_fd=folder)
        raise


def walk(root: int, left_out: list[str], most: int = MAX_ENTRIES) -> Iterator[Node]:
    """Depth first, so that no more folders are open at once than the tree is deep."""
    seen = 0

    def visit(folder: int, prefix: str, depth: int) -> Iterator[Node]:
        nonlocal seen
        for name in sorted(os.listdir(folder)):
            seen += 1
            if seen > most:
                if seen == most + 1:
                    left_out.append(f"{prefix or './'}: more than {most} entries, {NOT_LOOKED_AT}")
                return
            path = prefix + name
            try:
                guest_path(path)
                facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except (OSError, ValueError):
                left_out.append(f"{path.encode('utf-8', 'backslashreplace').decode()!r}: an unusable name")
                continue
            yield Node(path, folder, name, facts)
            if stat.S_ISDIR(facts.st_mode) and depth >= MAX_DEPTH:
                left_out.append(f"{path}: lies {MAX_DEPTH} folders deep, what is in it was not looked at")
            elif stat.S_ISDIR(facts.st_mode):
                try:
                    inner = os.open(name, _DIRECTORY, dir_fd=folder)
                except OSError:
                    left_out.append(f"{path}: cannot be opened")
                    continue
                try:
                    yield from visit(inner, path + "/", depth + 1)
                finally:
                    os.close(inner)

    yield from visit(root, "", 1)


def read_node(node: Node, limit: int) -> bytes | str:
    """The content, or why there is none: it is no regular file any more, or longer than allowed."""
    try:
        fd = os.open(node.name, _READ, dir_fd=node.folder)
    except PermissionError:
        return "may not be read"
    except OSError:
        return _CHANGED
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return _CHANGED
        chunks: list[bytes] = []
        size = 0
        while chunk := os.read(fd, 1 << 20):
            size += len(chunk)
            if size > limit:
                return _CHANGED
            chunks.append(chunk)
        return b"".join(chunks)
    finally:
        os.close(fd)


def kind(mode: int) -> str:
    """Names the kind of a file, as in `Entry.kind`."""
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link", stat.S_IFIFO: "pipe"}
    return kinds.get(stat.S_IFMT(mode), "device or socket")
