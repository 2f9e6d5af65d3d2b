"""Contents of files, each kept once under its SHA-256, in a folder that only its owner can read.

Who adds contents or reads them holds a lock with others; who sweeps away what nobody needs holds it alone. So what was
found to be there stays there while it is counted on. Processes that die give their locks back.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from belljar.core import errors
from belljar.core.values import MIB

_BLOCK_BYTES = 4096  # that a file takes at least of the disk
_PIECE_BYTES = MIB
_SMALL_BYTES = 256 * 1024  # what is no larger is read before it is known whether it has to be written
_LOOK_SECONDS = 0.02
_WAIT_SECONDS = 60.0
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC
_KEPT, _UNFINISHED = "contents", "unfinished"


class Content(NamedTuple):
    """Where a content is found again.

    Attributes:
        digest: its SHA-256, in hexadecimal.
        size: its bytes.
        added: bytes of the disk that it took; 0: it was there.
    """

    digest: str
    size: int
    added: int = 0


class ContentStore:
    """A folder of contents."""

    def __init__(self, folder: Path) -> None:
        """Remembers the folder; nothing is made yet."""
        self.folder = folder

    def prepare(self) -> None:
        """Makes the folder.

        Raises:
            NotAvailable: it cannot be made, or is not ours alone.
        """
        try:
            for one in (self.folder, self.folder / _KEPT, self.folder / _UNFINISHED):
                one.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = self.folder.lstat()
        except OSError as error:
            raise _unusable(self.folder, f"cannot be made: {error.strerror}") from None
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            raise _unusable(self.folder, "is not ours alone")

    # --- locks ---

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Keeps sweeping away while contents are added or read."""
        with self._locked("lock", fcntl.LOCK_SH, _WAIT_SECONDS):
            yield

    @contextmanager
    def adding(self) -> Iterator[None]:
        """As `shared`, for who adds. Where it fails or its process dies, what it added is swept away later."""
        with self.shared():
            mark = self.mark()
            yield
            mark.unlink(missing_ok=True)

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Waits for others that do the same, of whatever process."""
        with self._locked(name, fcntl.LOCK_EX, _WAIT_SECONDS):
            yield

    @contextmanager
    def _locked(self, name: str, kind: int, seconds: float) -> Iterator[None]:
        deadline = time.monotonic() + seconds
        fd = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(fd, kind | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise errors.Busy("the snapshots are in use by another process", retry_after=1.0) from None
                    time.sleep(_LOOK_SECONDS)
            yield
        finally:
            os.close(fd)

    def mark(self) -> Path:
        """Says to whoever looks next that there may be something to sweep; returns what says so."""
        path = self.folder / _UNFINISHED / os.urandom(8).hex()
        path.touch(mode=0o600)
        return path

    # --- contents ---

    def put(self, pieces: Iterator[bytes], again: Callable[[], Iterator[bytes]] | None = None) -> Content:
        """Keeps what comes in pieces, unless it is there. To be called while `adding`.

        Args:
            pieces: the content.
            again: gives it once more from its beginning; then what is there already is not written first.
        """
        held = bytearray()
        for piece in pieces:
            held += piece
            if len(held) > _SMALL_BYTES:
                if again is None:
                    return self._put_large(bytes(held), pieces)
                known = self._seen(held, pieces)
                return known if self.has(known.digest, known.size) else self._put_large(b"", again())
        digest = hashlib.sha256(held).hexdigest()
        if self.has(digest, len(held)):
            return Content(digest, len(held))
        with self._draft() as draft:
            _write(draft.fd, held)
            return self._name(draft, digest, len(held))

    def _seen(self, first: bytearray, rest: Iterator[bytes]) -> Content:
        seen, size = hashlib.sha256(first), len(first)
        for piece in rest:
            seen.update(piece)
            size += len(piece)
        return Content(seen.hexdigest(), size)

    def _put_large(self, first: bytes, rest: Iterator[bytes]) -> Content:
        seen, size = hashlib.sha256(first), len(first)
        with self._draft() as draft:
            _write(draft.fd, first)
            for piece in rest:
                seen.update(piece)
                size += len(piece)
                _write(draft.fd, piece)
            digest = seen.hexdigest()
            return Content(digest, size) if self.has(digest, size) else self._name(draft, digest, size)

    def has(self, digest: str, size: int) -> bool:
        """Whether a content is there whole: one that a crash of the machine cut is kept anew."""
        try:
            facts = os.lstat(self._path(digest))
        except FileNotFoundError:
            return False
        return stat.S_ISREG(facts.st_mode) and facts.st_size == size

    def reading(self, digest: str, size: int) -> Iterator[bytes]:
        """Gives a content piece by piece.

        Raises:
            ValueError: it is not there, or is not what it was.
        """
        seen = hashlib.sha256()
        with self.opened(digest) as fd:
            while piece := os.read(fd, _PIECE_BYTES):
                seen.update(piece)
                size -= len(piece)
                if size < 0:
                    break
                yield piece
        if size or seen.hexdigest() != digest:
            raise ValueError("a content is damaged")

    @contextmanager
    def opened(self, digest: str) -> Iterator[int]:
        """Opens a content as a file.

        Raises:
            ValueError: it is not there.
        """
        try:
            fd = os.open(self._path(digest), os.O_RDONLY | os.O_NONBLOCK | _NO_LINK)
        except OSError as error:
            raise ValueError(f"a content is missing: {error.strerror}") from None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ValueError("a content is no file")
            yield fd
        finally:
            os.close(fd)

    def used(self) -> int:
        """Bytes of the disk that all contents take."""
        return sum(on_disk(size) for _, _, size in self._all())

    def settle(self) -> None:
        """Returns when all that was written is on the disk."""
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | _NO_LINK)
        try:
            _sync_file_system(fd)
        finally:
            os.close(fd)

    # --- sweeping ---

    def sweep(self, needed: Callable[[], Collection[str]], *, seconds: float = 0.0, must: bool = False) -> bool:
        """Removes what is not needed and what dead processes left, unless somebody is adding or reading.

        Args:
            needed: lists the digests that are needed; called when nobody can add any.
            seconds: how long to wait for others.
            must: whether something is known to be superfluous; else nothing is done unless somebody died.

        Returns:
            Whether nothing superfluous is left. If not, the next sweep will see to it.
        """
        if not must and not os.listdir(self.folder / _UNFINISHED):
            return True
        if must:
            self.mark()  # should we not come to it now
        try:
            with self._locked("lock", fcntl.LOCK_EX, seconds):
                keep = needed()
                for shelf, digest, _ in self._all():
                    if digest not in keep:
                        (self.folder / _KEPT / shelf / digest).unlink(missing_ok=True)
                for path in (self.folder / _UNFINISHED).iterdir():
                    path.unlink(missing_ok=True)
        except errors.Busy:
            return False
        return True

    def _all(self) -> Iterator[tuple[str, str, int]]:
        for shelf in os.listdir(self.folder / _KEPT):
            with os.scandir(self.folder / _KEPT / shelf) as entries:
                for entry in entries:
                    yield shelf, entry.name, entry.stat(follow_symlinks=False).st_size

    def _path(self, digest: str) -> str:
        return f"{self.folder}/{_KEPT}/{digest[:2]}/{digest}"

    @contextmanager
    def _draft(self) -> Iterator[_Draft]:
        """A file that has no name yet, where the system can do that: who is killed leaves nothing."""
        place = self.folder / _UNFINISHED
        path = ""
        try:
            fd = os.open(place, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
            path = f"{place}/{os.urandom(8).hex()}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o600)
        try:
            yield _Draft(fd, path)
        finally:
            os.close(fd)
            if path:
                os.unlink(path)

    def _name(self, draft: _Draft, digest: str, size: int) -> Content:
        path = self._path(digest)
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | _NO_LINK)
        try:
            with suppress(FileExistsError):
                draft.link(digest, folder)
                return Content(digest, size, on_disk(size))
            if not self.has(digest, size):  # a crash of the machine cut it
                other = f".{os.urandom(8).hex()}"
                draft.link(other, folder)
                os.rename(other, digest, src_dir_fd=folder, dst_dir_fd=folder)
            return Content(digest, size)
        finally:
            os.close(folder)


class _Draft(NamedTuple):
    """A file that is being written, and its path if it had to have one."""

    fd: int
    path: str

    def link(self, name: str, folder: int) -> None:
        # Only with a folder does `link` follow the link that /proc has.
        os.link(self.path or f"/proc/self/fd/{self.fd}", name, dst_dir_fd=folder)


def on_disk(size: int) -> int:
    """Bytes of the disk that a file of this size takes."""
    return max(_BLOCK_BYTES, -(-size // _BLOCK_BYTES) * _BLOCK_BYTES)


def _write(fd: int, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _sync_file_system(fd: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "syncfs"):  # a system that is not Linux
        os.sync()
    elif libc.syncfs(fd):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _unusable(folder: Path, why: str) -> errors.NotAvailable:
    return errors.NotAvailable(
        f"the folder for snapshots {folder} {why}", fix="remove it, or set BELLJAR_DATA_DIR to a folder of your own"
    )
