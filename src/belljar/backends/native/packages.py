"""Packages that a guest asked for by name, granted as a Python environment and a folder of npm's packages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from belljar.backends.native.toolchains import Grant, Tool, Toolchains
from belljar.core import errors
from belljar.core.package_names import NPM
from belljar.host.packages import node, python
from belljar.host.packages.store import PackageStore


@asynccontextmanager
async def granted(
    names: Sequence[str], language: str | None, store: PackageStore, toolchains: Toolchains
) -> AsyncIterator[Grant]:
    """Has the packages installed, if they are not yet, and keeps them while the block runs.

    Args:
        names: what was asked for.
        language: of the code, which may be a certain Python.
        store: where they are kept.
        toolchains: knows the interpreters that guests can run.

    Raises:
        NotAvailable: no interpreter for them that guests may run is here, or they cannot be fetched.
        InvalidRequest: there are no such packages.
        PolicyDenied: they take too much room.
    """
    of_node = [name for name in names if name.startswith(NPM)]
    of_python = [name for name in names if not name.startswith(NPM)]
    async with AsyncExitStack() as stack:
        grant = Grant("", (), {})
        if of_python:
            version = language if language and language.startswith("python3.") else "python3"
            tool = _required(toolchains, version, "install Python system-wide: apt install python3")
            recipe = python.PythonRecipe(tool.path, store.path)
            files = await stack.enter_async_context(store.held(of_python, recipe))
            grant = _with(grant, tool, {python.INSIDE: str(files)}, f"{python.INSIDE}/bin")
            grant = grant._replace(python=f"{python.INSIDE}/bin/python")
        if of_node:
            tool = _required(toolchains, "node", "pip install 'belljar-sandbox[node]', or install Node.js system-wide")
            files = await stack.enter_async_context(store.held(of_node, node.NodeRecipe(tool.path, store.path)))
            grant = _with(grant, tool, {node.INSIDE: str(files / "node_modules")}, f"{node.INSIDE}/.bin")
        yield grant


def _required(toolchains: Toolchains, program: str, fix: str) -> Tool:
    tool = toolchains.find(program)
    if tool is None:
        raise errors.NotAvailable(f"packages: there is no {program} here that guests may run", fix=fix)
    return tool


def _with(grant: Grant, tool: Tool, binds: dict[str, str], programs: str) -> Grant:
    folders = tuple(dict.fromkeys((*grant.folders, *filter(None, (tool.folder,)))))
    return grant._replace(folders=folders, binds={**grant.binds, **binds}, bins=(*grant.bins, programs))
