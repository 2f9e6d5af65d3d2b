"""The wasm backend for its tests: the real store, and one whose parts are built in a moment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from belljar.backends.wasm import store as wasm_store
from belljar.backends.wasm.backend import Wasm
from belljar.core import errors
from belljar.core.capabilities import Capabilities
from belljar.engine.backends import Backends
from belljar.engine.engine import Engine


@pytest.fixture
def store(engine: Engine) -> wasm_store.CompiledStore:
    """The real one, which takes minutes to build."""
    found = wasm_store.CompiledStore.of(engine.settings.cache_dir)
    try:
        found.check()
    except errors.NotAvailable as error:
        pytest.skip(f"{error}: run `belljar setup wasm`, as `make test` does")
    return found


@pytest.fixture
def wasm(engine: Engine, store: wasm_store.CompiledStore) -> Iterator[Wasm]:
    """The real backend with a state directory of its own; the compiled interpreter is shared."""
    backend = Wasm(Backends(engine.settings).native(), store)
    yield backend
    backend.close()


async def _no_jail() -> Capabilities:
    return Capabilities(backend="native", available=False, why_not="no jail on this machine")


@pytest.fixture
def plain(engine: Engine, store: wasm_store.CompiledStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wasm]:
    """The same where there is no native jail, as on macOS: its workers are plain processes."""
    native = Backends(engine.settings).native()
    monkeypatch.setattr(native, "probe", _no_jail)
    backend = Wasm(native, store)
    yield backend
    backend.close()


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, open_folder: Path) -> wasm_store.CompiledStore:
    """A store of our own whose parts are built in a moment; nothing in it can be run."""
    monkeypatch.setattr(wasm_store, "_compiled", lambda path: b"native code of " + path.name.encode())
    return wasm_store.CompiledStore(open_folder / "cache")
