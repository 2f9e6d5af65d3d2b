"""The store of what wasm runs: compiled once, checked at each start, built anew where it is not whole."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import belljar
from belljar.backends.wasm import bytecode
from belljar.backends.wasm import store as wasm_store
from belljar.backends.wasm.backend import Wasm
from belljar.core import errors
from belljar.engine.backends import Backends
from belljar.engine.engine import Engine
from witness import give

pytestmark = pytest.mark.anyio


async def test_until_it_is_compiled_it_says_how_and_nothing_waits(engine: Engine, tmp_path: Path) -> None:
    offer = await Wasm(Backends(engine.settings).native(), wasm_store.CompiledStore(tmp_path)).probe()
    assert not offer.available
    assert offer.fix == "belljar setup wasm"
    assert offer.setup


def _make_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


HARM: dict[str, Callable[[Path], object]] = {
    "damaged": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "open to all": lambda path: path.chmod(0o666),
    "given away": lambda path: give(12345, path),
    "a link": _make_link,
    "missing": Path.unlink,
}


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("part", ["python.cwasm", "javascript.cwasm", "lib/python315.zip", "parts.json"])
def test_a_part_that_is_damaged_foreign_or_missing_is_refused_and_rebuilt(
    toy: wasm_store.CompiledStore, part: str, harm: str
) -> None:
    assert toy.build()
    toy.check()
    assert not toy.build(), "nothing to do"
    HARM[harm](toy.folder / part)
    with pytest.raises(errors.NotAvailable) as refused:
        toy.check()
    assert refused.value.fix == "belljar setup wasm"
    assert toy.build()
    toy.check()
    assert sorted(os.listdir(toy.root)) == sorted(["build.lock", toy.folder.name]), "no draft is left"


def test_a_store_without_the_data_of_matplotlib_is_not_whole(toy: wasm_store.CompiledStore) -> None:
    toy.build()
    (toy.folder / "mpl-data").rename(toy.root / "elsewhere")
    with pytest.raises(errors.NotAvailable):
        toy.check()


def test_a_folder_that_others_may_write_to_is_made_safe_or_refused_before_anything_is_compiled(
    toy: wasm_store.CompiledStore,
) -> None:
    toy.root.mkdir()
    toy.root.chmod(0o777)
    steps: list[str] = []
    try:
        toy.build(steps.append)
    except errors.NotAvailable:
        assert not steps, "minutes of work for nothing"
    else:
        toy.check()


def test_builders_at_once_build_once(toy: wasm_store.CompiledStore) -> None:
    steps: list[str] = []
    built: list[bool] = []
    builders = [threading.Thread(target=lambda: built.append(toy.build(steps.append))) for _ in range(4)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(60)
    assert sorted(built) == [False, False, False, True]
    assert len(steps) == len(set(steps)), steps
    toy.check()


async def test_auto_does_not_wait_and_an_explicit_request_builds_and_tells_its_steps(
    engine: Engine, store: wasm_store.CompiledStore, monkeypatch: pytest.MonkeyPatch, open_folder: Path
) -> None:
    ready = {path: (store.folder / f"{name}.cwasm") for name, path in wasm_store.sources().items()}
    steps: list[str] = []
    backend = Wasm(Backends(engine.settings).native(), wasm_store.CompiledStore(open_folder / "cache"))
    own = Engine(engine.settings, on_setup=steps.append)
    own._backends._made["wasm"] = backend  # in its usual place among the others
    monkeypatch.setattr(wasm_store, "_compiled", lambda path: pytest.fail("auto compiled it"))
    result = await belljar.arun("print(1)", engine=own)
    assert (result.stdout, result.backend, steps) == ("1\n", "native", [])
    assert "not compiled yet" in result.reasons[0]
    monkeypatch.setattr(wasm_store, "_compiled", lambda path: ready[path].read_bytes())
    result = await belljar.arun("import numpy; print(1)", engine=own, backend="wasm")
    assert (result.stdout, result.backend) == ("1\n", "wasm"), result.stderr
    assert [step.split()[0] for step in steps[:3]] == ["compiling", "compiling", "unpacking"]
    assert any("numpy" in step for step in steps[3:]), "and the profiles"
    assert {"bytecode", "fresh"} <= set(backend._store.places()), "and what workers start faster with"
    assert (await belljar.arun("print(2)", engine=own)).backend == "wasm", "now auto takes it"
    backend.close()


async def test_a_worker_starts_without_what_setup_kept_for_a_faster_start(
    wasm: Wasm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wasm_store.CompiledStore, "_quick_parts", lambda store: {})
    result = await belljar.arun("print(1)", backend=wasm)
    assert result.stdout == "1\n", result.stderr


async def test_the_worker_runs_its_source_where_the_bytecode_is_of_another(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = open_folder / "worker"
    package.mkdir()
    script = Path(bytecode.__file__).with_name("worker") / "start.py"
    (package / "start.py").write_bytes(script.read_bytes())
    main, compiled = package / "main.py", open_folder / "bytecode"
    main.write_text("def main(): print('as it was compiled')\n")
    monkeypatch.setattr(bytecode, "own_modules", lambda: {str(main): main})
    await bytecode.build(compiled, sys.executable)

    def start(code: bytes) -> str:
        for found in compiled.rglob("main.*.pyc"):  # what tells that it was used
            found.write_bytes(found.read_bytes().replace(b"as it was compiled", code))
        argv = [sys.executable, "-I", "-S", str(package / "start.py"), "{}", str(open_folder), str(compiled)]
        return subprocess.run(argv, capture_output=True, check=True, text=True).stdout

    assert start(b"from its bytecode!") == "from its bytecode!\n"
    main.write_text("def main(): print('after a change')\n")
    assert start(b"") == "after a change\n"


def test_versions_it_was_never_tried_with_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wasm_store, "installed", lambda name: "99.0")
    with pytest.raises(errors.NotAvailable, match="never tried"):
        wasm_store.check_versions()


async def test_a_store_whose_profiles_are_of_another_version_says_so_and_is_made_anew_in_seconds(
    wasm: Wasm, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await wasm.probe()).notes == ()
    monkeypatch.setattr("belljar.backends.wasm.store.start", lambda: "another")
    found = await wasm.probe()
    assert found.available and "belljar setup wasm" in found.notes[0]
