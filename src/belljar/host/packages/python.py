"""Sets of Python packages: a virtual environment of wheels, fetched by uv or pip. No code of theirs runs here.

Wheels only: a source package would run its own build. A wheel may name an address as the place of another package, to
which that rule of pip's does not extend: so pip runs where it can start no program, and can build nothing. Nor is the
new environment's interpreter ever started once wheels are in it, since a `.pth` file among them would run then.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from belljar.core import errors
from belljar.host import process
from belljar.host.packages.installing import Workshop, file_stamp

INSIDE = "/opt/belljar/python"  # where guests find the environment
_FACTS = """\
import json, sys, sysconfig
print(json.dumps([sys.implementation.name, "%d.%d.%d" % sys.version_info[:3], sysconfig.get_platform(),
                  sysconfig.get_config_var("SOABI") or ""]))
"""
# Runs pip, whose folder is its first argument, so that it can start nothing but what asks for a password to an index.
_PIP = """\
import os, runpy, sys
STARTING = (
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn"
)
def refuse(event, args):
    if event in STARTING and os.path.basename(os.fsdecode(args[0] or "")) != "keyring":
        raise PermissionError("a package wants to be built, and nothing is built here")
pip = sys.argv.pop(1)
sys.argv[0] = "pip"
sys.addaudithook(refuse)
runpy.run_path(pip, run_name="__main__")
"""
_FIND_PIP = "import os, pip; print(pip.__version__); print(os.path.dirname(pip.__file__))"
_QUIET = ("--disable-pip-version-check", "--no-input", "--progress-bar=off")  # what is a warning says why it failed
_WHEELS = ("--only-binary", ":all:")
_NO_BUILD = "--no-build"  # the same of uv, where it holds for addresses, too
_PLACES = ("index-url", "extra-index-url", "find-links", "no-index", "cert", "client-cert", "trusted-host")
_MOST_SCRIPT_BYTES = 1 << 20
_MEMORY = 2 << 30  # bytes that compiling strangers' sources may take
_OLDEST_PIP = (22, 3)
_GET_PIP = "install pip or uv: apt install python3-pip"


class _Interpreter(NamedTuple):
    implementation: str
    version: str
    platform: str
    abi: str

    @property
    def minor(self) -> str:
        return ".".join(self.version.split(".")[:2])


class PythonRecipe:
    """Makes environments for one interpreter, which guests must be able to run."""

    kind = "python"

    def __init__(self, interpreter: str, path: str) -> None:
        """Remembers the interpreter.

        Args:
            interpreter: the program that guests will run.
            path: where uv is looked for, as in $PATH.
        """
        self._interpreter = interpreter
        self._path = path
        self._uv = ""
        self._pip = ""  # its folder
        self._names: Sequence[str] = ()  # of the interpreter, in the environment

    def stamp(self) -> Sequence[str | int]:
        """Names the interpreter, without starting it."""
        return [os.uname().machine, *file_stamp(self._interpreter)]

    async def resolve(self, names: Sequence[str], shop: Workshop) -> Sequence[str]:
        """Fetches the wheels (pip) or fixes their hashes (uv), for a new environment; returns the lock."""
        about = _Interpreter(*json.loads(await shop.run([self._interpreter, "-I", "-S", "-c", _FACTS])))
        self._lay_out(shop.folder / "files", about)
        (shop.folder / "asked.txt").write_text("".join(f"{name}\n" for name in names))
        await self._choose(shop)
        fix = (
            f"check names and versions; only what has a wheel for Python {about.minor} on {about.platform} can be "
            "installed, as nothing is built here"
        )
        lines = await (self._fix_hashes(shop, fix) if self._uv else self._fetch(shop, fix))
        return [" ".join(about), *lines]

    async def install(self, shop: Workshop) -> None:
        """Installs the wheels into the environment, compiles them, and lets its programs name the guest's folder."""
        files = shop.folder / "files"
        python = str(files / "bin" / "python")
        if self._uv:
            line = [self._uv, "pip", "install", "--quiet", "--python", python, _NO_BUILD]
            line += ["--require-hashes", "--no-deps", "--link-mode=copy", "--no-python-downloads", "--no-progress"]
            line += ["-r", str(shop.folder / "lock.txt")]
        else:
            wheels = sorted(map(str, (shop.folder / "wheels").iterdir()))
            line = [*self._piping(shop), "install", *_QUIET, *_WHEELS, "--no-index", "--no-deps", "--no-user"]
            line += ["--no-compile", "--no-warn-script-location", "--ignore-installed", *wheels]
        await shop.run(line)
        await self._compile(shop)
        self._link(files / "bin")
        _settle(files)

    def _lay_out(self, files: Path, about: _Interpreter) -> None:
        """Makes an environment by hand, as not every Python has its module venv."""
        (files / "lib" / f"python{about.minor}" / "site-packages").mkdir(parents=True)
        (files / "bin").mkdir()
        self._names = ("python", "python3", f"python{about.minor}")
        self._link(files / "bin")
        (files / "pyvenv.cfg").write_text(_configuration(self._interpreter, about.version, "false"))

    def _link(self, folder: Path) -> None:
        """Gives the interpreter its names, whatever had taken them."""
        for name in self._names:
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(self._interpreter)

    async def _choose(self, shop: Workshop) -> None:
        """Takes uv where it is installed, unless only pip was told where packages come from."""
        self._pip = await self._find_pip(shop)
        self._uv = shutil.which("uv", path=self._path) or ""
        if self._uv and self._pip and not _tells_uv(shop) and await self._is_told(shop):
            self._uv = ""
        if not self._uv and not self._pip:
            raise errors.NotAvailable("packages: there is no uv and no pip here to fetch them", fix=_GET_PIP)

    async def _find_pip(self, shop: Workshop) -> str:
        for python in dict.fromkeys((sys.executable, self._interpreter)):
            with suppress(errors.BelljarError):
                version, folder = (await shop.run([python, "-I", "-c", _FIND_PIP])).splitlines()
                if (found := re.match(r"(\d+)\.(\d+)", version)) and (int(found[1]), int(found[2])) >= _OLDEST_PIP:
                    return folder
        return ""

    def _piping(self, shop: Workshop) -> Sequence[str]:
        """The command line before pip's arguments: run by the environment's own interpreter, which wheels are for."""
        return [str(shop.folder / "files" / "bin" / "python"), "-I", "-c", _PIP, self._pip]

    async def _is_told(self, shop: Workshop) -> bool:
        """Whether pip's configuration says where packages come from."""
        said = await shop.run([*self._piping(shop), "config", "list", "--disable-pip-version-check"])
        return any(re.match(rf"[^=]*\.({'|'.join(_PLACES)})=", line) for line in said.splitlines())

    async def _fix_hashes(self, shop: Workshop, fix: str) -> Sequence[str]:
        lock = shop.folder / "lock.txt"
        await shop.run(
            [self._uv, "pip", "compile", "--quiet", "--python", self._interpreter, _NO_BUILD, "--generate-hashes",
             "--no-header", "--no-annotate", "--no-python-downloads", "--no-progress", "--output-file", str(lock),
             str(shop.folder / "asked.txt")],
            fix=fix,
        )  # fmt: skip
        return lock.read_text().splitlines()

    async def _fetch(self, shop: Workshop, fix: str) -> Sequence[str]:
        wheels = shop.folder / "wheels"
        wheels.mkdir()
        line = [*self._piping(shop), "download", *_QUIET, *_WHEELS, "--dest", str(wheels)]
        await shop.run([*line, "-r", str(shop.folder / "asked.txt")], fix=fix)
        found = sorted(wheels.iterdir())
        if stray := [wheel.name for wheel in found if wheel.suffix != ".whl"]:
            raise errors.PolicyDenied(f"packages: {stray[0]} is no wheel", fix=fix)
        return [f"{wheel.name} sha256:{_sha256(wheel)}" for wheel in found]

    async def _compile(self, shop: Workshop) -> None:
        """Compiles the sources, by an interpreter that looks into no environment. What it cannot compile stays."""
        files = str(shop.folder / "files")
        compiling = [self._interpreter, "-I", "-S", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"]
        limited = ["prlimit", f"--data={_MEMORY}", "--core=0", "--", *compiling]
        env = {**shop.environment, "TMPDIR": str(shop.folder / "tmp")}
        with suppress(OSError, TimeoutError):
            await process.output(
                [*limited, "-s", files, "-p", INSIDE, f"{files}/lib"], deadline=shop.seconds, env=env, fds=(shop.held,)
            )


def _configuration(interpreter: str, version: str, outer: str) -> str:
    return f"home = {os.path.dirname(interpreter)}\ninclude-system-site-packages = {outer}\nversion = {version}\n"


def _settle(files: Path) -> None:
    """Makes the environment the one at INSIDE, beside what the guest may install itself with `pip install --user`."""
    text = (files / "pyvenv.cfg").read_text()
    (files / "pyvenv.cfg").write_text(text.replace("packages = false", "packages = true"))
    for script in (files / "bin").iterdir():
        if script.is_symlink() or not script.is_file() or script.stat().st_size > _MOST_SCRIPT_BYTES:
            continue
        content = script.read_bytes()
        if content.startswith(b"#!"):
            script.write_bytes(content.replace(str(files).encode(), INSIDE.encode()))


def _tells_uv(shop: Workshop) -> bool:
    """Whether uv's own configuration is there to be gone by."""
    env = shop.environment
    folders = [env.get("XDG_CONFIG_HOME") or f"{env.get('HOME', '/')}/.config", "/etc"]
    folders += (env.get("XDG_CONFIG_DIRS") or "").split(":")
    return any(os.path.isfile(f"{folder}/uv/uv.toml") for folder in folders if folder) or any(
        re.fullmatch(r"UV_((DEFAULT_|EXTRA_)?INDEX(_URL)?|FIND_LINKS|NO_INDEX|CONFIG_FILE)", name) for name in env
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
