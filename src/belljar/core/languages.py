"""Language name -> the file its code goes into and the command that runs it."""

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from pydantic import Field, StrictBool, field_validator

from belljar.core import errors
from belljar.core.model import Model
from belljar.core.values import MIB, EnvName, GuestPath, ProfilePath, Size, Text


class Language(Model):
    """How a language runs. The administrators' file may add some, or change these fields."""

    name: str = Field(pattern=r"^[a-z0-9.+#_-]{1,64}$")
    filename: GuestPath
    argv: tuple[Text, ...] = Field(min_length=1)
    aliases: tuple[str, ...] = ()
    extensions: tuple[str, ...] = ()
    env: dict[EnvName, Text] = Field(default_factory=dict)
    image: str = Field("", max_length=512, description="of containers")
    seccomp_profile: ProfilePath = Field("", description="of containers; other backends refuse a language that has one")
    memory: Size | None = Field(None, ge=8 * MIB, le=2**46, description="instead of the default")
    allow_network: StrictBool | None = Field(None, description="false: never; absent or true: as the request asks")
    needs: str = Field("", description="the program it needs, if not the first of argv")
    fix: str = Field("", description="how to get it where it is missing")

    @field_validator("extensions")
    @classmethod
    def _dotted(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [extension for extension in value if not re.fullmatch(r"\.\w{1,16}", extension)]:
            raise ValueError(f"{wrong[0]!r} is not an extension: write it with its dot, as in .py")
        return tuple(extension.lower() for extension in value)

    @property
    def program(self) -> str:
        return self.needs or self.argv[0]


_PYTHON_ENV = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
_GO_ENV = {"GOCACHE": "/tmp/go-cache", "GOPATH": "/tmp/go", "GOTOOLCHAIN": "local", "GOTELEMETRY": "off"}
# Built, then run: `go run` hides the program's exit code. Few compilers at once, each of them with few
# threads: on a large machine they would hit the limits on processes and memory.
_GO = 'GOMAXPROCS=2 go build -p 2 -o /tmp/belljar-main "$0" && exec /tmp/belljar-main "$@"'
_RUST = 'rustc --edition 2021 -o /tmp/belljar-main "$0" && exec /tmp/belljar-main "$@"'

# Constructed without validation: the validator takes 5 ms to build at every start, and a test validates these rows.
BUILTIN: dict[str, Language] = {
    language.name: language
    for language in (
        Language.model_construct(
            name="python", filename="main.py", argv=("python3", "main.py"), aliases=("py", "python3"),
            extensions=(".py",), env=_PYTHON_ENV, fix="install Python 3 (Debian: apt install python3)",
        ),
        Language.model_construct(
            name="bash", filename="main.sh", argv=("bash", "main.sh"), aliases=("sh", "shell"),
            extensions=(".sh", ".bash"), fix="install bash",
        ),
        Language.model_construct(
            name="javascript", filename="main.js", argv=("node", "main.js"), aliases=("js", "node"),
            extensions=(".js", ".cjs", ".mjs"), fix="pip install 'belljar-sandbox[node]', or install Node.js",
        ),
        Language.model_construct(
            name="typescript", filename="main.ts", argv=("node", "main.ts"), aliases=("ts",),
            extensions=(".ts", ".mts"), fix="pip install 'belljar-sandbox[node]' (Node 24 runs TypeScript directly)",
        ),
        Language.model_construct(
            name="go", filename="main.go", argv=("sh", "-c", _GO, "main.go"), aliases=("golang",),
            extensions=(".go",), env=_GO_ENV, needs="go", fix="install Go (Debian: apt install golang-go)",
        ),
        Language.model_construct(
            name="rust", filename="main.rs", aliases=("rs",), extensions=(".rs",),
            argv=("sh", "-c", _RUST, "main.rs"), needs="rustc", fix="install Rust (Debian: apt install rustc)",
        ),
    )
}  # fmt: skip

_FAMILY = re.compile(r"([a-z+#]+?)[-_]?(\d{1,3}(?:\.\d{1,3}){0,2})?")
_ALSO = {"nodejs": "javascript", "cpython": "python", "rustlang": "rust"}


def family(name: str) -> Language | None:
    """Returns how a language runs by the family that its name says, such as `python3.10` or `nodejs18`; None: unknown.

    A version of Python is a program of that name. Others have no such program outside of an image, so elsewhere the
    language is not there: better none than another version than its name says.
    """
    match = _FAMILY.fullmatch(name)
    word, version = (match[1], match[2] or "") if match else ("", "")
    found = _ALSO.get(word) or next((one.name for one in BUILTIN.values() if word in (one.name, *one.aliases)), "")
    if not found:
        return None
    base = BUILTIN[found]
    changes: dict[str, object] = {"name": name, "aliases": (), "extensions": ()}
    if version and found == "python":
        program = f"python{version}"
        changes |= {"argv": (program, *base.argv[1:]), "fix": f"install {program} system-wide, or use its image"}
    elif version:
        changes |= {"needs": name, "fix": f"run it in its image: backend=docker, podman or macos-container ({name})"}
    return base.model_copy(update=changes)


_VERSIONED_PYTHON = re.compile(r"python3\.\d{1,2}")


class Languages:
    """The table in force: the built-in one with the administrators' file laid over."""

    def __init__(self, extra: Mapping[str, Language] | None = None) -> None:
        self._table = BUILTIN | dict(extra or {})
        aliases = {alias.lower(): name for name, lang in self._table.items() for alias in lang.aliases}
        self._names = aliases | {name: name for name in self._table}  # nobody's alias hides a language
        self._extensions = {ext: name for name, lang in self._table.items() for ext in lang.extensions}

    def __iter__(self) -> Iterator[Language]:
        return iter(self._table.values())

    def get(self, name: str) -> Language:
        wanted = name.lower()
        if found := self._names.get(wanted):
            return self._table[found]
        if _VERSIONED_PYTHON.fullmatch(wanted):
            base = self._table["python"]
            fix = f"install {wanted} system-wide, or ask for language=python"
            return base.model_copy(update={"name": wanted, "argv": (wanted, *base.argv[1:]), "fix": fix})
        raise errors.InvalidRequest(f"language: {name!r} is not known", fix=f"choose from: {', '.join(self._table)}")

    def of_file(self, path: str) -> Language:
        suffix = PurePosixPath(path).suffix.lower()
        if found := self._extensions.get(suffix):
            return self._table[found]
        raise errors.InvalidRequest(
            f"language: {path!r} does not say its language by its extension",
            fix="name it with --language (or language=...)",
        )
