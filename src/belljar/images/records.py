"""Keeps on disk what is known of images: the lock file, records of scans and signatures, ids of what was built here."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from belljar.core import errors
from belljar.core.image_name import is_digest
from belljar.core.model import Model
from belljar.core.values import MIB
from belljar.images.lock import MAX_LOCK_BYTES, Lock, Pin, read_lock, write_lock
from belljar.images.rules import ScanRecord, SignatureRecord

_MAX_RECORD_BYTES = 1 * MIB
_Record = TypeVar("_Record", bound=Model)


class ImageRecords:
    """The lock file, and a folder with a small file for each image that something is known of."""

    def __init__(self, folder: Path, lock_file: Path) -> None:
        self.folder = folder
        self.lock_file = lock_file

    # --- the lock ---

    def lock(self) -> Lock:
        """Reads the lock file. Without a file the lock is empty; one that cannot be read raises `ImageRefused`."""
        try:
            with self.lock_file.open("rb") as file:
                data = file.read(MAX_LOCK_BYTES + 1)
        except FileNotFoundError:
            return Lock()
        except OSError as error:
            raise errors.ImageRefused(
                f"{self.lock_file}: {error.strerror}", fix="make the file readable", context={"rule": "lock"}
            ) from None
        return read_lock(data.decode("utf-8", "replace") if len(data) <= MAX_LOCK_BYTES else "", str(self.lock_file))

    def save_lock(self, lock: Lock) -> None:
        """Writes the lock file."""
        try:
            _replace(self.lock_file, write_lock(lock).encode(), 0o644)
        except OSError as error:
            raise errors.InvalidRequest(f"{self.lock_file}: {error.strerror}", fix="name another lock file") from None

    # --- scans and signatures ---

    def scan(self, image_id: str) -> ScanRecord | None:
        """Returns the record of an image's scan; one that is damaged, or of another image, is none."""
        record = self._kept(ScanRecord, "scans", image_id)
        return record if record and record.id == image_id else None

    def save_scan(self, record: ScanRecord) -> None:
        """Keeps the record of a scan."""
        _replace(self._record("scans", record.id), record.model_dump_json().encode(), 0o600)

    def signature(self, digest: str) -> SignatureRecord | None:
        """Returns the record of a signature that cosign accepted, if there is one."""
        record = self._kept(SignatureRecord, "signatures", digest)
        return record if record and record.digest == digest else None

    def save_signature(self, record: SignatureRecord) -> None:
        """Keeps the record of a signature."""
        _replace(self._record("signatures", record.digest), record.model_dump_json().encode(), 0o600)

    def _kept(self, shape: type[_Record], kind: str, digest: str) -> _Record | None:
        try:
            with self._record(kind, digest).open("rb") as file:
                data = file.read(_MAX_RECORD_BYTES + 1)
            return shape.model_validate_json(data) if len(data) <= _MAX_RECORD_BYTES else None
        except (OSError, ValidationError):
            return None

    # --- what was built here ---

    def note_built(self, image_id: str) -> None:
        """Remembers that an image was built here."""
        _replace(self._record("built", image_id), b"", 0o600)

    def note_fetched(self, image_id: str) -> None:
        """Forgets that an image was built here: a registry has it by now."""
        self._record("built", image_id).unlink(missing_ok=True)

    def built(self) -> frozenset[str]:
        """Returns the ids of all images that were built here."""
        with suppress(OSError):
            return frozenset(f"sha256:{path.name}" for path in (self.folder / "built").iterdir())
        return frozenset()

    def forget(self, *digests: str) -> None:
        """Forgets all that is known of an image, by its id and the digests it had in registries."""
        for digest in digests:
            for kind in ("scans", "signatures", "built"):
                self._record(kind, digest).unlink(missing_ok=True)

    def _record(self, kind: str, digest: str) -> Path:
        if not is_digest(digest):
            raise errors.ExecutionFailed(f"the engine calls an image {digest[:80]!r}, which is not an id")
        return self.folder / kind / digest.removeprefix("sha256:")


def _replace(path: Path, data: bytes, mode: int) -> None:
    """Writes the whole file or nothing, also when two of us write at once."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), mode)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def new_pin(digest: str, *, in_registry: bool, by: str = "") -> Pin:
    """Returns a pin of this moment; `by`: who says so, if not the account that runs this."""
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Pin(digest=digest, of="registry" if in_registry else "engine", at=at, by=by or _account())


def _account() -> str:
    with suppress(ImportError, KeyError, AttributeError):
        import pwd

        return pwd.getpwuid(os.geteuid()).pw_name
    return "unknown"
