"""Snapshots on disk: for each a small head, and a list of its entries that is a content like those of its files.

The head is written last and under its final name at once: what was cut before is no snapshot, and is swept away. What
both say came from a guest, and is judged again whenever it is read.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, ValidationError

from belljar.core import errors
from belljar.core.box_snapshot import MOST_LEFT_OUT, BoxSnapshot
from belljar.core.model import Model
from belljar.core.settings import LivingSettings
from belljar.core.values import format_size
from belljar.host.archives import MAX_MEMBERS, Member, relative
from belljar.host.box_members import FoundMember
from belljar.host.content_store import Content, ContentStore

_MAX_HEAD_BYTES = 4 << 20
_MAX_LINE_BYTES = 64 * 1024
_MAX_LIST_BYTES = 512 << 20
_MAX_TIME = 2**33
_KINDS: dict[str, Literal["file", "folder", "link", "twin"]] = {
    "f": "file", "d": "folder", "l": "link", "t": "twin"
}  # fmt: skip
_LETTERS = {kind: letter for letter, kind in _KINDS.items()}
_DAMAGE = (ValueError, TypeError, KeyError, IndexError, RecursionError)
_SWEEP_SECONDS = 5.0


class Kept(NamedTuple):
    """One entry of a snapshot; `digest` is that of a file's content, and of a twin's."""

    member: Member
    digest: str = ""


class _SnapshotHead(Model):
    format: Literal[1] = 1
    entries: int = Field(ge=0, le=MAX_MEMBERS)
    list: str = Field(pattern=r"^[0-9a-f]{64}$")
    list_bytes: int = Field(ge=0, le=_MAX_LIST_BYTES)
    snapshot: BoxSnapshot


class SnapshotStore:
    """The snapshots of a folder, within the limits of the settings."""

    def __init__(self, folder: Path, limits: LivingSettings) -> None:
        """Remembers where they are; nothing is made yet.

        Args:
            folder: a folder of ours alone.
            limits: how many there may be, and how large.
        """
        self._contents = ContentStore(folder)
        self._heads = folder / "heads"
        self._limits = limits

    # --- what there is ---

    def all(self) -> tuple[BoxSnapshot, ...]:
        """Lists the snapshots, the newest first. A damaged one is left out; what dead processes left is swept away."""
        found = []
        with suppress(OSError, errors.BelljarError):
            self._sweep(0.0)
        with suppress(FileNotFoundError):
            for path in self._heads.glob("snap-*"):
                with suppress(ValueError, OSError):
                    found.append(self._head(path.name).snapshot)
        return tuple(sorted(found, key=lambda one: (-one.created, one.id)))

    def find(self, id: str, owner: str | None = None) -> BoxSnapshot:
        """Returns a snapshot by its id.

        Args:
            id: its name.
            owner: whose it must be; None: anybody's.

        Raises:
            NotFound: there is none.
        """
        try:
            found = self._head(id).snapshot
        except (FileNotFoundError, ValueError):
            raise _missing(id) from None
        if owner is not None and found.owner != owner:
            raise _missing(id)
        return found

    def remove(self, id: str, owner: str | None = None) -> None:
        """Removes a snapshot, and the contents that no other one needs.

        Raises:
            NotFound: there is none.
        """
        if owner is not None:
            self.find(id, owner)
        self._contents.prepare()
        try:
            (self._heads / _checked(id)).unlink()
        except (ValueError, FileNotFoundError):
            raise _missing(id) from None
        self._sweep(_SWEEP_SECONDS, must=True)

    # --- taking one ---

    @contextmanager
    def taking(self) -> Iterator[SnapshotTaking]:
        """Begins a snapshot; what was kept for one that is not finished is removed.

        Raises:
            PolicyDenied: there are too many already.
        """
        self._contents.prepare()
        self._heads.mkdir(mode=0o700, exist_ok=True)
        self._sweep(0.0)
        self._check_count()
        try:
            with self._contents.adding():
                taking = SnapshotTaking(self._contents, self._limits, self._commit)
                yield taking
                if taking.superfluous:
                    self._contents.mark()
        except BaseException:
            with suppress(OSError, errors.BelljarError):
                self._sweep(0.0, must=True)
            raise

    def _commit(self, head: _SnapshotHead) -> None:
        text = head.model_dump_json().encode()
        _SnapshotHead.model_validate_json(text)  # what could not be read again is not written
        self._contents.settle()
        with self._contents.alone("commit"):
            self._check_count()
            if (used := self._contents.used()) > self._limits.snapshots_size:
                raise self._full(used)
            draft = self._heads / f".{head.snapshot.id}"
            try:
                fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                with open(fd, "wb") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(fd)
                draft.rename(self._heads / head.snapshot.id)
            finally:
                draft.unlink(missing_ok=True)

    def _check_count(self) -> None:
        count = sum(1 for _ in self._heads.glob("snap-*"))
        if count >= self._limits.snapshots:
            raise errors.PolicyDenied(
                f"snapshot: there are {count} already, and no more than {self._limits.snapshots} are kept",
                fix="remove some (belljar.remove_snapshot), or have the administrator raise living.snapshots",
                context={"field": "living.snapshots"},
            )

    def _full(self, used: int) -> errors.PolicyDenied:
        return errors.PolicyDenied(
            f"snapshot: all of them would take {format_size(used)}, over {format_size(self._limits.snapshots_size)}",
            fix="remove some (belljar.remove_snapshot), or have the administrator raise living.snapshots_size",
            context={"field": "living.snapshots_size"},
        )

    # --- reading one ---

    @contextmanager
    def opened(self, id: str) -> Iterator[tuple[BoxSnapshot, Callable[[str], Iterator[FoundMember]]]]:
        """Opens a snapshot: gives what it is, and a function that gives what lies in a folder of it.

        It stays whole while the block runs, also if somebody removes it.

        Raises:
            NotFound: there is none.
            ValueError: it is damaged.
        """
        self._contents.prepare()
        with self._contents.shared():
            try:
                head = self._head(id)
            except FileNotFoundError:
                raise _missing(id) from None
            kept = tuple(self._listed(head))
            yield head.snapshot, lambda folder: self._below(kept, folder)

    def _below(self, kept: tuple[Kept, ...], folder: str) -> Iterator[FoundMember]:
        for one in kept:
            member = one.member
            if not _is_below(member.name, (folder,)):
                continue
            if member.kind == "twin" and not _is_below(member.target, (folder,)):
                member = member._replace(kind="file", target="")
            if member.kind != "file":
                yield FoundMember(member)
                continue
            with self._contents.opened(one.digest) as fd:
                yield FoundMember(member, fd, one.digest)

    def _head(self, id: str) -> _SnapshotHead:
        fd = os.open(self._heads / _checked(id), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_size > _MAX_HEAD_BYTES:
                raise ValueError("it is not ours")
            try:
                head = _SnapshotHead.model_validate_json(file.read(_MAX_HEAD_BYTES))
            except ValidationError as error:
                raise ValueError(f"it is damaged: {error.errors()[0]['msg']}") from None
        if head.snapshot.id != id:
            raise ValueError("it is another snapshot")
        return head

    def _listed(self, head: _SnapshotHead) -> Iterator[Kept]:
        count = 0
        for line in _lines(self._contents.reading(head.list, head.list_bytes)):
            count += 1
            if count > head.entries:
                raise ValueError("its list is longer than it says")
            yield _parsed(line, head.snapshot.folders)
        if count != head.entries:
            raise ValueError("its list is shorter than it says")

    def _sweep(self, seconds: float, *, must: bool = False) -> None:
        self._contents.sweep(self._needed, seconds=seconds, must=must)

    def _needed(self) -> set[str]:
        """The digests that snapshots need. A disk that cannot be read keeps everything from being swept."""
        needed: set[str] = set()
        for path in self._heads.iterdir():
            if path.name.startswith("."):
                path.unlink(missing_ok=True)
                continue
            try:
                head = self._head(path.name)
                needed |= {head.list, *(one.digest for one in self._listed(head))}
            except ValueError:
                continue  # damaged: nothing of it can be read again anyway
        return needed


class SnapshotTaking:
    """A snapshot that is being taken: its entries are read, and then it is finished."""

    def __init__(
        self, contents: ContentStore, limits: LivingSettings, commit: Callable[[_SnapshotHead], None]
    ) -> None:  # fmt: skip
        """Nothing is kept yet: `SnapshotStore.taking` makes one."""
        self._contents = contents
        self._limits = limits
        self._commit = commit
        self._files: dict[str, tuple[str, int]] = {}  # digest and size, for other names of the same file
        self._list_bytes = self._size = self._count = self._stored = 0
        self._lines: list[bytes] = []
        self._early: set[str] = set()

    @property
    def superfluous(self) -> bool:
        """Whether contents were kept that it does not need in the end."""
        return not self._early <= {digest for digest, _ in self._files.values()}

    def prepare(self, found: Iterable[FoundMember]) -> None:
        """Keeps contents of files that may still change, so that `read` finds most of them there."""
        size = 0
        for one in islice(found, MAX_MEMBERS):  # names that wander would never end
            size += one.member.size
            if size > self._limits.snapshot_size:
                raise _too_large("the files of one", self._limits.snapshot_size, "snapshot_size")
            if one.fd >= 0:
                self._early.add(self._keep(one.pieces(), one.pieces).digest)

    def read(self, found: Iterable[FoundMember]) -> None:
        """Keeps entries of a box whose files we can open.

        Raises:
            PolicyDenied: they take more than they may.
            ValueError: an entry is none that can be kept.
        """
        for one in found:
            self._add(one.member, one.pieces(), one.pieces)

    def unpack(self, found: Iterable[tuple[Member, Iterator[bytes]]]) -> None:
        """Keeps entries of a hostile archive, each with its content; otherwise as `read`."""
        for member, content in found:
            self._add(member, content, None)

    def finish(self, about: BoxSnapshot, left_out: Sequence[str]) -> BoxSnapshot:
        """Makes a snapshot of what was read, and returns it; it is on the disk then.

        Args:
            about: what is known of it besides.
            left_out: what could not be read.

        Raises:
            PolicyDenied: all of them would take more than they may, or there are too many.
        """
        listed = self._contents.put(iter((b"".join(self._lines),)))
        told = [_plain(line) for line in left_out[: MOST_LEFT_OUT + 1]]
        changes = {"size": self._size, "files": self._count, "stored": self._stored + listed.added}
        snapshot = about.model_copy(update={**changes, "left_out": tuple(told)})
        self._commit(
            _SnapshotHead(
                entries=len(self._lines), list=listed.digest, list_bytes=listed.size, snapshot=snapshot
            )
        )  # fmt: skip
        return snapshot

    def _keep(self, content: Iterator[bytes], again: Callable[[], Iterator[bytes]] | None) -> Content:
        kept = self._contents.put(content, again)
        self._stored += kept.added
        if self._stored > self._limits.snapshots_size:
            raise _too_large("all snapshots", self._limits.snapshots_size, "snapshots_size")
        return kept

    def _add(self, member: Member, content: Iterator[bytes], again: Callable[[], Iterator[bytes]] | None) -> None:
        name = relative(member.name)
        kept = Content("", 0)
        if member.kind == "file":
            self._make_room(member)
            kept = self._keep(content, again)
            if kept.size != member.size:
                raise ValueError(f"{name[:80]!r} changed its size")
            self._files[name] = kept.digest, kept.size
        elif member.kind == "twin":
            digest, size = self._files.get(relative(member.target), ("", 0))
            if not digest:
                raise ValueError(f"{name[:80]!r} is another name of nothing")
            kept = Content(digest, size)
        self._count += member.kind in ("file", "twin")
        self._write(_line(member._replace(name=name, size=kept.size), kept.digest))

    def _make_room(self, member: Member) -> None:
        self._size += member.size
        if self._size > self._limits.snapshot_size:
            raise _too_large("the files of one", self._limits.snapshot_size, "snapshot_size")

    def _write(self, line: bytes) -> None:
        self._list_bytes += len(line)
        if len(self._lines) >= MAX_MEMBERS or self._list_bytes > _MAX_LIST_BYTES:
            raise errors.PolicyDenied(
                f"snapshot: the sandbox has more than {MAX_MEMBERS} files and folders", fix="remove what is not needed"
            )
        self._lines.append(line)


def _too_large(what: str, most: int, setting: str) -> errors.PolicyDenied:
    return errors.PolicyDenied(
        f"snapshot: {what} would take more than {format_size(most)}",
        fix=f"remove what is not needed, or have the administrator raise living.{setting}",
        context={"field": f"living.{setting}", "cap": most},
    )


def _line(member: Member, digest: str) -> bytes:
    modified = min(max(round(member.modified, 3), 0.0), _MAX_TIME)
    row = [_LETTERS[member.kind], member.name, member.mode & 0o777, modified, member.size, digest, member.target]
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


def _parsed(line: bytes, folders: tuple[str, ...]) -> Kept:
    """Reads an entry as hostile.

    Raises:
        ValueError: it is none that `take` wrote.
    """
    try:
        row: Any = json.loads(line)
        letter, name, mode, modified, size, digest, target = row
        kind = _KINDS[letter]
    except _DAMAGE:
        raise ValueError("an entry is damaged") from None
    if not isinstance(name, str) or relative(name) != name or not _is_below(name, folders):
        raise ValueError("an entry lies elsewhere")
    if not isinstance(target, str) or len(target) > 4096 or "\0" in target or (kind == "link") > bool(target):
        raise ValueError(f"{name[:80]!r} leads nowhere")
    if kind == "twin" and (relative(target) != target or not _is_below(target, folders)):
        raise ValueError(f"{name[:80]!r} is another name of what lies elsewhere")
    numbers = (_is_number(mode, 0o777), _is_number(size, 2**62), _is_number(modified, _MAX_TIME, float, int))
    has_content = kind in ("file", "twin")
    if not all(numbers) or not _is_digest(digest, has_content) or (size and not has_content):
        raise ValueError(f"{name[:80]!r} is damaged")
    return Kept(Member(name, kind, mode, float(modified), size, target if kind in ("link", "twin") else ""), digest)


def _is_number(value: Any, most: int, *types: type) -> bool:
    return type(value) in (types or (int,)) and 0 <= value <= most


def _is_digest(value: Any, wanted: bool) -> bool:
    if not wanted:
        return bool(value == "")
    return isinstance(value, str) and len(value) == 64 and not value.strip("0123456789abcdef")


def _is_below(name: str, folders: tuple[str, ...]) -> bool:
    return any(f"/{name}/".startswith(f"{folder}/") for folder in folders)


def _lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
        if len(rest) > _MAX_LINE_BYTES:
            raise ValueError("an entry is too long")
    if rest:
        raise ValueError("its list is cut")


def _checked(id: str) -> str:
    name = id.removeprefix("snap-")
    if len(id) != 21 or len(name) != 16 or name.strip("0123456789abcdef"):
        raise ValueError(f"{id[:80]!r} is no id of a snapshot")
    return id


def _plain(line: str) -> str:
    return line.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")[:4096]


def _missing(id: str) -> errors.NotFound:
    return errors.NotFound(f"there is no snapshot {id[:80]!r}", fix="belljar.list_snapshots() tells which there are")
