"""Copies a whole folder of the host for a guest, and its changes back: links, permissions, times, empty folders.

What cannot be copied as it is, is refused before anything is run: a guest that commits its project must not find files
missing. What comes back was made by a guest: it is written entry by entry, below an open folder, following no link.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Literal, NamedTuple

from belljar.core import errors
from belljar.core.values import format_size, guest_path
from belljar.host import files

_KINDS: Mapping[int, Literal["folder", "file", "link"]] = {
    stat.S_IFDIR: "folder", stat.S_IFREG: "file", stat.S_IFLNK: "link"
}  # fmt: skip
_OF_THE_SYSTEM = "security."  # extended attributes that every file may have, by no wish of its owner


class TreeNode(NamedTuple):
    """One entry of a folder that is copied."""

    path: str
    kind: Literal["folder", "file", "link"]
    mode: int = 0o777
    mtime: int = 0  # seconds since 1970
    content: bytes = b""
    target: str = ""  # of a link
    twin: str = ""  # the first name, in alphabetical order, of a file that has several

    @property
    def text(self) -> tuple[object, ...]:
        """All that makes it another entry, beside its permissions and its time."""
        return self.kind, self.content, self.target, self.twin


class CopiedTree(NamedTuple):
    """A copy as it is now.

    Attributes:
        nodes: what was found.
        left_out: what was not taken, and why.
        unseen: folders of which not all was looked at; "" is the whole.
    """

    nodes: tuple[TreeNode, ...]
    left_out: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()


def read_tree(path: str, *, limit: int) -> tuple[TreeNode, ...]:
    """Reads all of a host folder, to grant it by copy.

    Raises:
        PolicyDenied: it holds more bytes than the limit, or something that would not survive the copying.
    """
    nodes: list[TreeNode] = []
    names: dict[tuple[int, int], list[str]] = {}
    left_out: list[str] = []
    with files.opened(path) as root:
        for node in files.walk(root, left_out, files.MANY):
            found = _read_node(path, node, limit)
            limit -= len(found.content)
            nodes.append(found)
            if found.kind == "file" and node.stat.st_nlink > 1:
                names.setdefault((node.stat.st_dev, node.stat.st_ino), []).append(found.path)
    if left_out:
        raise _refusal(path, left_out[0])
    return paired(nodes, names.values())


def paired(nodes: Sequence[TreeNode], groups: Iterable[Sequence[str]]) -> tuple[TreeNode, ...]:
    """Returns the nodes, those that are names of one file with the first of these names as their twin."""
    twins = {name: min(group) for group in groups if len(group) > 1 for name in group}
    return tuple(node._replace(twin=twins.get(node.path, "")) for node in nodes)


def _read_node(root: str, node: files.Node, limit: int) -> TreeNode:
    facts = node.stat
    kind = _KINDS.get(stat.S_IFMT(facts.st_mode))
    if kind is None:
        raise _refusal(root, f"{node.path}: {files.kind(facts.st_mode)}, which cannot be copied")
    if odd := _attributes(node):
        raise _refusal(root, f"{node.path}: has the extended attribute {odd}, which would be lost")
    found = TreeNode(node.path, kind, stat.S_IMODE(facts.st_mode) & 0o777, int(facts.st_mtime))
    if kind == "link":
        return found._replace(mode=0o777, target=os.readlink(node.name, dir_fd=node.folder))
    if kind == "folder":
        return found
    content = files.read_node(node, limit)
    if not isinstance(content, str):
        return found._replace(content=content)
    if facts.st_size > limit:
        raise errors.PolicyDenied(
            f"workspace: {root} holds more than the disk limit allows to be copied: {format_size(limit)} are left for "
            f"{node.path}",
            fix="raise `disk`, or use a backend that mounts the folder (native)",
        )
    raise _refusal(root, f"{node.path}: {content}")


def _attributes(node: files.Node) -> str:
    """The first extended attribute that a copy would lose; empty if there is none."""
    if not hasattr(os, "listxattr"):
        return ""
    with suppress(OSError):  # a file system without any
        here = f"/proc/self/fd/{node.folder}/{node.name}"
        names = os.listxattr(here, follow_symlinks=False)
        return next((name for name in names if not name.startswith(_OF_THE_SYSTEM)), "")
    return ""


def _refusal(path: str, why: str) -> errors.PolicyDenied:
    return errors.PolicyDenied(
        f"workspace: {path} would have to be copied, and not all of it can be: {why}",
        fix="take it out of the folder, or use a backend that mounts the folder (native)",
    )


# --- the way back ---


def bring_back(before: Sequence[TreeNode], after: CopiedTree, path: str) -> tuple[str, ...]:
    """Writes the changes to a copy of a host folder to that folder.

    Args:
        before: the copy as it was.
        after: the copy as it is now.
        path: the folder.

    Returns:
        What was left out, and why.
    """
    was, now = {node.path: node for node in before}, {node.path: node for node in after.nodes}
    unseen = {*after.unseen, *(left.partition(": ")[0] for left in after.left_out)}
    left_out = list(after.left_out)
    with files.opened(path) as target:
        gone = [name for name in was.keys() - now.keys() if not _hidden(name, unseen)]
        files.discard(target, sorted(gone, reverse=True))
        for rank in ("folder", "file", "link"):
            for node in after.nodes:
                if node.kind == rank and node != was.get(node.path):
                    left_out += _bring_one(target, node, was.get(node.path))
    return tuple(left_out)


def _hidden(path: str, unseen: set[str]) -> bool:
    return "" in unseen or path in unseen or any(str(parent) in unseen for parent in PurePosixPath(path).parents)


def _bring_one(target: int, node: TreeNode, was: TreeNode | None) -> list[str]:
    *parents, name = guest_path(node.path).split("/")
    try:
        if parents:
            files.clear(target, ["/".join(parents)], folders=True)
        with files.descended(target, parents, make=True) as folder:
            if was is None or was.text != node.text:
                _MAKERS[node.kind](target, folder, name, node)
            elif node.mode != was.mode and node.kind != "link":
                _chmod(folder, name, node.mode)
            if node.kind != "folder":
                os.utime(name, (node.mtime, node.mtime), dir_fd=folder, follow_symlinks=False)
    except (OSError, errors.BelljarError) as error:
        return [f"{node.path}: {error}"]
    return []


def _make_folder(target: int, folder: int, name: str, node: TreeNode) -> None:
    if _facts_of(folder, name, stat.S_ISDIR) is None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        os.mkdir(name, 0o700, dir_fd=folder)
        _own(target, folder, name)
    _chmod(folder, name, node.mode)


def _chmod(folder: int, name: str, mode: int) -> None:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.fchmod(fd, mode)
    finally:
        os.close(fd)


def _make_file(target: int, folder: int, name: str, node: TreeNode) -> None:
    old = _facts_of(folder, name, stat.S_ISREG)
    if node.twin and node.twin != node.path:
        first, last = os.path.split(node.twin)
        with files.descended(target, first.split("/") if first else []) as other:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            os.link(last, name, src_dir_fd=other, dst_dir_fd=folder, follow_symlinks=False)
        return
    files.replace(folder, name, node.content, mode=node.mode, exactly=True)
    _own(target, folder, name, old)


def _make_link(target: int, folder: int, name: str, node: TreeNode) -> None:
    with suppress(FileNotFoundError):
        if _facts_of(folder, name, stat.S_ISDIR):
            os.rmdir(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
    os.symlink(node.target, name, dir_fd=folder)
    _own(target, folder, name)


_MAKERS: Mapping[str, Callable[[int, int, str, TreeNode], None]] = {
    "folder": _make_folder, "file": _make_file, "link": _make_link
}  # fmt: skip


def _facts_of(folder: int, name: str, kind: Callable[[int], bool]) -> os.stat_result | None:
    """What is there under this name, if it is of this kind."""
    with suppress(FileNotFoundError):
        facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
        return facts if kind(facts.st_mode) else None
    return None


def _own(target: int, folder: int, name: str, old: os.stat_result | None = None) -> None:
    """What is new belongs to the folder's owner; what was there, to whom it belonged."""
    owner = old or os.fstat(target)
    if (owner.st_uid, owner.st_gid) != (os.geteuid(), os.getegid()):
        os.chown(name, owner.st_uid, owner.st_gid, dir_fd=folder, follow_symlinks=False)
