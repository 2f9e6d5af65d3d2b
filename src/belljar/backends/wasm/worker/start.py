"""Starts the wasm worker, as a script: `start.py FACTS PACKAGES [BYTECODE]`.

It runs without anything of the user's and of the current folder, which is the guest's. Its own modules are beside it,
wasmtime is in PACKAGES, and in BYTECODE both are compiled: `sys.pycache_prefix` would hide the standard library's.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import FileFinder, SourceFileLoader
from types import CodeType

FOLDER = __file__.rpartition("/worker/")[0]


class CompiledLoader(SourceFileLoader):
    """Looks for a module's bytecode in one folder for all; there is none for a source that has changed."""

    folder = ""

    def get_code(self, fullname: str) -> CodeType | None:
        sys.pycache_prefix = self.folder
        try:
            return super().get_code(fullname)
        finally:
            sys.pycache_prefix = None


def find_modules(packages: str, bytecode: str) -> None:
    """Makes the worker's modules and wasmtime importable."""
    CompiledLoader.folder = bytecode

    def find_compiled(path: str) -> FileFinder:
        if not path.startswith((FOLDER, f"{packages}/wasmtime")):
            raise ImportError(path)
        return FileFinder(path, (CompiledLoader, [".py"]))

    if bytecode:
        sys.path_hooks.insert(0, find_compiled)
    sys.path += [FOLDER, packages]


if __name__ == "__main__":
    find_modules(*sys.argv[2:])
    import_module("worker.main").main()
