"""Files into and out of containers, as archives on the standard streams of small programs inside.

The engine's archive API does not reach folders in memory, and would have a root process of the host walk through
what a guest left. So files go in to `tar` and come out of `find`, `stat` and `tar`, which run inside, behind the same
walls as a guest, with nobody's rights. What they say is hostile: it is capped, then parsed, and never unpacked.
"""

from __future__ import annotations

import io
import re
import stat
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Literal, NamedTuple

from belljar.backends.containers.spec import KEEPER
from belljar.backends.guest_text import shell_script
from belljar.core.result import Collected, Entry, File
from belljar.core.values import MIB, format_size, guest_path
from belljar.host import files
from belljar.host.tree_copy import CopiedTree, TreeNode, paired

_BLOCK = 512
_LETTERS = {b"f": stat.S_IFREG, b"d": stat.S_IFDIR, b"l": stat.S_IFLNK, b"p": stat.S_IFIFO}  # of `find`
# A name can hold a newline, so a guest can say whole lines of its own: no number is longer than a kernel's.
_LINE = re.compile(rb"(\d{1,10}) (?:([a-z]) ([0-7]{1,6})|([0-9a-f]{1,8})) (\d{1,19}) \./(.+)")

LIST_LIMIT = 32 * MIB  # bytes
DELIVER = shell_script("files/deliver", keeper=KEEPER)
LAY = shell_script("files/lay")
LAY_AND_SAY = shell_script("files/lay_and_say")
REPLACE = shell_script("files/replace")
READ = shell_script("files/read")
LIST = shell_script("files/list", depth=files.MAX_DEPTH + 1, most=2 * files.MAX_ENTRIES, limit=LIST_LIMIT)
FETCH = shell_script("files/fetch")


def held(said: bytes) -> int:
    """Adds up the bytes that folders in memory hold, by what `DELIVER` says of each: blocks, free ones, their size."""
    rows = re.findall(rb"^(\d{1,19}) (\d{1,19}) (\d{1,10})$", said, re.MULTILINE)
    return sum(max(0, int(blocks) - int(free)) * int(size) for blocks, free, size in rows)


def archive(tree: Iterable[File], *, sticky: bool = False) -> bytes:
    """Packs files and the folders on the way; `sticky`: so that only who put them in can take them out."""
    buffer = io.BytesIO()
    folders: set[str] = set()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for file in tree:
            for parent in reversed(PurePosixPath(file.path).parents[:-1] if sticky else ()):
                if str(parent) not in folders:
                    folders.add(str(parent))
                    tar.addfile(_member(str(parent), 0o1777, kind=tarfile.DIRTYPE))
            mode = (0o755 if file.executable else 0o644) & ~(0o222 if file.read_only or sticky else 0)
            tar.addfile(_member(file.path, mode, len(file.content)), io.BytesIO(file.content))
    return buffer.getvalue()


def pack(nodes: Iterable[TreeNode]) -> bytes:
    """Packs a whole tree. Folders come last, from the deepest up: one that is read-only is filled before."""
    buffer = io.BytesIO()
    nodes = tuple(nodes)
    folders = sorted((node for node in nodes if node.kind == "folder"), key=lambda node: node.path, reverse=True)
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for node in (*sorted(node for node in nodes if node.kind != "folder"), *folders):
            member = _member(node.path, node.mode, kind=_TYPES[node.kind])
            member.mtime, member.linkname = node.mtime, node.target
            if node.twin and node.twin != node.path:
                member.type, member.linkname = tarfile.LNKTYPE, f"./{node.twin}"
            elif node.kind == "file":
                member.size = len(node.content)
            tar.addfile(member, io.BytesIO(node.content))
    return buffer.getvalue()


_TYPES = {"folder": tarfile.DIRTYPE, "file": tarfile.REGTYPE, "link": tarfile.SYMTYPE}


def _member(path: str, mode: int, size: int = 0, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(f"./{path}")
    member.mode, member.size, member.type = mode, size, kind
    return member


class Found(NamedTuple):
    """One entry of a sandbox's folder, as the programs inside tell of it."""

    path: str
    mode: int
    size: int


def listed(said: bytes, most: int = files.MAX_ENTRIES) -> tuple[list[Found], list[str]]:
    """Reads a listing: what the guest has in its folder, and what cannot be named.

    The keeper's own things are not the guest's.
    """
    found: list[Found] = []
    kept: list[Found] = []
    left_out: list[str] = []
    for line in said.split(b"\n"):
        match = _LINE.fullmatch(line)
        if not match:
            continue
        try:
            path = guest_path(match[6].decode())
        except ValueError:
            left_out.append(f"{match[6].decode('utf-8', 'backslashreplace')!r}: an unusable name")
            continue
        mode = _LETTERS.get(match[2], stat.S_IFSOCK) | int(match[3], 8) if match[2] else int(match[4], 16)
        item = Found(path, mode, int(match[5]))
        (kept if int(match[1]) == KEEPER else found).append(item)
    if len(found) > most or len(said) >= LIST_LIMIT:
        left_out.append(f"./: more than {min(most, len(found))} entries, {files.NOT_LOOKED_AT}")
        found = found[:most]
    full = {str(parent) for item in found for parent in PurePosixPath(item.path).parents}
    found += [item for item in kept if stat.S_ISDIR(item.mode) and item.path in full]
    return sorted(found), left_out


def entries(said: bytes) -> tuple[Entry, ...]:
    """Reads a listing as entries, for callers.

    Raises:
        PolicyDenied: there are more entries than can be listed.
    """
    found, left_out = listed(said)
    files.refuse_half(left_out, files.MAX_ENTRIES)
    return tuple(Entry(item.path, files.kind(item.mode), item.size) for item in found)


def wanted(said: bytes, patterns: Sequence[str], limit: int = files.MAX_COLLECTED) -> tuple[list[Found], list[str]]:
    """Chooses from a listing the regular files that match and fit; and says what was left out."""
    found, left_out = listed(said)
    chosen: list[Found] = []
    for item in found:
        if stat.S_ISDIR(item.mode) or not files.matches(item.path, patterns):
            continue
        if not stat.S_ISREG(item.mode):
            left_out.append(f"{item.path}: {files.kind(item.mode)}, only regular files leave a sandbox")
        elif item.size > limit:
            left_out.append(f"{item.path}: {format_size(item.size)} is over what may be collected")
        else:
            limit -= item.size
            chosen.append(item)
    return chosen, left_out


def whole(said: bytes, limit: int) -> tuple[list[Found], CopiedTree]:
    """Chooses from a listing all that a copied folder holds.

    Returns:
        The files and links that have to be fetched, and what is known without that.
    """
    found, left_out = listed(said, files.MANY)
    unseen = ["" for left in left_out if left.startswith("./: ")]
    chosen: list[Found] = []
    folders: list[TreeNode] = []
    for item in found:
        if stat.S_ISDIR(item.mode):
            folders.append(TreeNode(item.path, "folder", stat.S_IMODE(item.mode) & 0o777))
            if item.mode & 0o500 != 0o500:
                left_out.append(f"{item.path}: may not be read, what is in it was not looked at")
        elif not stat.S_ISREG(item.mode) and not stat.S_ISLNK(item.mode):
            left_out.append(f"{item.path}: {files.kind(item.mode)}, which is not copied")
        elif item.size > limit:
            left_out.append(f"{item.path}: {format_size(item.size)} is over what may be copied")
        else:
            limit -= item.size
            chosen.append(item)
    return chosen, CopiedTree(tuple(folders), tuple(left_out), tuple(unseen))


def unpacked_tree(said: bytes, chosen: Sequence[Found], known: CopiedTree) -> CopiedTree:
    """Reads from an archive what `whole` chose, and returns it with what was known before."""
    members = {member.path: member for member in _members(said)}
    nodes, left_out = list(known.nodes), list(known.left_out)
    twins: dict[str, list[str]] = {}
    for item in chosen:
        member = members.get(item.path)
        if member is None or len(member.content) > item.size or (member.kind == "link") != stat.S_ISLNK(item.mode):
            left_out.append(f"{item.path}: may not be read, or changed while it was read")
            continue
        mode = 0o777 if member.kind == "link" else stat.S_IMODE(item.mode) & 0o777
        nodes.append(TreeNode(item.path, member.kind, mode, member.mtime, member.content, member.target))
        twins.setdefault(member.first or item.path, []).append(item.path)
    return CopiedTree(paired(nodes, twins.values()), tuple(left_out), known.unseen)


def room(chosen: Sequence[Found]) -> int:
    """Returns how many bytes an honest archive of these can have."""
    return sum(item.size + 8 * _BLOCK for item in chosen) + 64 * _BLOCK


def unpacked(said: bytes, chosen: Sequence[Found]) -> Collected:
    """Reads from an archive the files that we asked for, and no others."""
    contents = {member.path: member.content for member in _members(said) if member.kind == "file"}
    taken, left_out = [], []
    for item in chosen:
        content = contents.get(item.path)
        if content is None or len(content) > item.size:  # by which the limit was counted
            left_out.append(f"{item.path}: changed while it was read")
        else:
            taken.append(File(path=item.path, content=content, executable=bool(item.mode & 0o100)))
    return Collected(tuple(taken), tuple(left_out))


class _Member(NamedTuple):
    path: str
    kind: Literal["file", "link"]
    mtime: int
    content: bytes = b""
    target: str = ""  # of a link
    first: str = ""  # the name under which the same file came before


def _members(said: bytes) -> Iterator[_Member]:
    """The files and links of a tar. Only what GNU's and BusyBox's write: no sparse files, no headers that compute."""
    seen: dict[str, _Member] = {}
    place, long_name, long_target = 0, b"", b""
    while place + _BLOCK <= len(said):
        header = said[place : place + _BLOCK]
        size, kind_ = _octal(header[124:136]), header[156:157]
        if not header.strip(b"\0") or size is None:
            return
        content = said[place + _BLOCK : place + _BLOCK + size]
        place += _BLOCK + -(-size // _BLOCK) * _BLOCK
        if kind_ in (b"L", b"K"):  # of the entry that comes next
            long_name = content.rstrip(b"\0") if kind_ == b"L" else long_name
            long_target = content.rstrip(b"\0") if kind_ == b"K" else long_target
            continue
        path, target = _text(long_name or header[:100]), _text(long_target or header[157:257])
        long_name, long_target = b"", b""
        member = _Member(path.removeprefix("./"), "file", _octal(header[136:148]) or 0)
        first = target.removeprefix("./")
        if kind_ == b"1" and first in seen:  # another name of a file that came before
            yield member._replace(content=seen[first].content, first=first)
        elif kind_ == b"2":
            yield member._replace(kind="link", target=target)
        elif kind_ in (b"0", b"\0") and len(content) == size:
            seen[member.path] = member._replace(content=content)
            yield member._replace(content=content, first=member.path)


def _octal(field: bytes) -> int | None:
    digits = field.strip(b"\0 ")
    return int(digits, 8) if re.fullmatch(rb"[0-7]{1,12}", digits) else None


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode("utf-8", "replace")
