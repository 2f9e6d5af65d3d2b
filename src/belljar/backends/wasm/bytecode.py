"""Compiles the worker's modules once, for the Python that runs it in its jail: it would compile them at each start.

What is compiled carries a hash of its source: after a change of either, Python compiles anew, by itself.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from belljar.backends.wasm.store import wasmtime_folder
from belljar.core import errors
from belljar.host import process

INSIDE = "/belljar"  # the worker's own folder in its jail
_SECONDS = 120.0
_COMPILE = """
import importlib.util, json, os, py_compile, sys
os.umask(0o022)  # the worker's uid must be able to read it
sys.pycache_prefix = sys.argv[1]
for inside, source in json.loads(sys.argv[2]).items():
    compiled = importlib.util.cache_from_source(inside)
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    py_compile.compile(source, compiled, inside, doraise=True, invalidation_mode=mode)
"""


def own_modules() -> dict[str, Path]:
    """Returns the package `worker`: path in the jail -> file."""
    folder = Path(__file__).with_name("worker")
    return {f"{INSIDE}/worker/{path.relative_to(folder)}": path for path in folder.rglob("*.py")}


async def build(folder: Path, python: str) -> None:
    """Compiles the worker's modules and wasmtime's into a folder, in place of what was there.

    Raises:
        ExecutionFailed: this Python cannot compile them.
    """
    found = wasmtime_folder()
    modules = {inside: str(path) for inside, path in own_modules().items()}
    modules |= {str(path): str(path) for path in found.glob("*.py")}
    draft = folder.with_suffix(".draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    draft.chmod(folder.parent.stat().st_mode)
    told = await process.output(
        [python, "-I", "-S", "-c", _COMPILE, str(draft), json.dumps(modules)], deadline=_SECONDS
    )
    if told.code:
        raise errors.ExecutionFailed(f"the worker's modules cannot be compiled by {python}: {told.stderr[-500:]}")
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)
