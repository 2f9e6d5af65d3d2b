"""Language name -> the file its code goes into and the command that runs it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import Field, ValidationError

from belljar import errors
from belljar.models import GuestPath, Model, Size, Text


class Language(Model):
    """How a language runs. The administrators' file may add some, or change these fields."""

    name: str
    filename: GuestPath
    argv: tuple[Text, ...] = Field(min_length=1)
    aliases: tuple[str, ...] = ()
    extensions: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    image: str = ""
    seccomp_profile: str = ""
    memory: Size | None = None
    allow_network: bool = False
    needs: str = Field("", description="the program it needs, if not the first of argv")
    fix: str = Field("", description="how to get it where it is missing")

    @property
    def program(self) -> str:
        return self.needs or self.argv[0]


_PYTHON_ENV = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
_GO_ENV = {"GOCACHE": "/tmp/go-cache", "GOPATH": "/tmp/go", "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=mod"}
_RUST = 'rustc --edition 2021 -o /tmp/belljar-main "$0" && exec /tmp/belljar-main'

BUILTIN: dict[str, Language] = {
    language.name: language
    for language in (
        Language(
            name="python", filename="main.py", argv=("python3", "main.py"), aliases=("py", "python3"),
            extensions=(".py",), env=_PYTHON_ENV, fix="install Python 3 (Debian: apt install python3)",
        ),
        Language(
            name="bash", filename="main.sh", argv=("bash", "main.sh"), aliases=("sh", "shell"),
            extensions=(".sh", ".bash"), fix="install bash",
        ),
        Language(
            name="javascript", filename="main.js", argv=("node", "main.js"), aliases=("js", "node"),
            extensions=(".js", ".cjs", ".mjs"), fix="pip install 'belljar[node]', or install Node.js",
        ),
        Language(
            name="typescript", filename="main.ts", argv=("node", "main.ts"), aliases=("ts",),
            extensions=(".ts", ".mts"), fix="pip install 'belljar[node]' (Node 24 runs TypeScript directly)",
        ),
        Language(
            name="go", filename="main.go", argv=("go", "run", "main.go"), aliases=("golang",),
            extensions=(".go",), env=_GO_ENV, fix="install Go (Debian: apt install golang-go)",
        ),
        Language(
            name="rust", filename="main.rs", aliases=("rs",), extensions=(".rs",),
            argv=("sh", "-c", _RUST, "main.rs"), needs="rustc", fix="install Rust (Debian: apt install rustc)",
        ),
    )
}  # fmt: skip

_VERSIONED_PYTHON = re.compile(r"python3\.\d{1,2}")


class Languages:
    """The table in force: the built-in one with the administrators' file laid over."""

    def __init__(self, extra: Mapping[str, Language] | None = None) -> None:
        self._table = BUILTIN | dict(extra or {})
        self._names = {alias: name for name, lang in self._table.items() for alias in (name, *lang.aliases)}

    def __iter__(self) -> Any:
        return iter(self._table.values())

    def get(self, name: str) -> Language:
        wanted = name.lower()
        if found := self._names.get(wanted):
            return self._table[found]
        if _VERSIONED_PYTHON.fullmatch(wanted):
            base = self._table["python"]
            return base.model_copy(update={"name": wanted, "argv": (wanted, *base.argv[1:]), "fix": f"install {wanted}"})
        raise errors.InvalidRequest(f"language: {name!r} is not known", fix=f"choose from: {', '.join(self._table)}")

    def of_file(self, path: str) -> Language:
        suffix = PurePosixPath(path).suffix.lower()
        for language in self._table.values():
            if suffix and suffix in language.extensions:
                return language
        raise errors.InvalidRequest(
            f"language: {path!r} does not say its language by its extension",
            fix="name it with --language (or language=...)",
        )


def load(path: str) -> Languages:
    """Reads the administrators' language file (JSON, TOML, or YAML where PyYAML is installed)."""
    if not path:
        return Languages()
    try:
        table = _parse(Path(path))
        extra = {name: _entry(name, fields) for name, fields in table.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        message = errors.from_validation(error).message if isinstance(error, ValidationError) else str(error)
        raise errors.InvalidRequest(f"{path}: {message}", fix="correct SANDBOX_LANGUAGE_CONFIG_FILE") from None
    return Languages(extra)


def _entry(name: str, fields: dict[str, Any]) -> Language:
    base = BUILTIN[name].model_dump() if name in BUILTIN else {}
    return Language.model_validate(base | fields | {"name": name})


def _parse(path: Path) -> dict[str, Any]:
    text = path.read_text("utf-8")
    match path.suffix.lower():
        case ".json":
            table = json.loads(text)
        case ".toml":
            table = tomllib.loads(text)
        case ".yaml" | ".yml":
            try:
                import yaml
            except ImportError:
                raise ValueError("YAML needs `pip install pyyaml`; JSON and TOML need nothing") from None
            table = yaml.safe_load(text)
        case other:
            raise ValueError(f"a language file ends in .json, .toml or .yaml, not {other!r}")
    if not isinstance(table, dict):
        raise ValueError("a language file maps names to languages")
    languages = table.get("languages", table)
    if not isinstance(languages, dict):
        raise ValueError("`languages` maps names to languages")
    return languages
