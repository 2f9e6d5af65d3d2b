"""Reads the administrators' language file (JSON, TOML, or YAML where PyYAML is installed)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from belljar.core import errors
from belljar.core.languages import BUILTIN, Language, Languages
from belljar.host.seccomp.profiles import read_profile


def load(path: str) -> Languages:
    """Reads the administrators' language file (JSON, TOML, or YAML where PyYAML is installed)."""
    if not path:
        return Languages()
    try:
        table = _parse(Path(path))
    except (OSError, ValueError) as error:
        raise errors.InvalidRequest(f"{path}: {error}", fix=_FIX) from None
    return Languages({name.lower(): _entry(path, name.lower(), fields) for name, fields in table.items()})


_FIX = "correct the language file (SANDBOX_LANGUAGE_CONFIG_FILE)"


def _entry(path: str, name: str, fields: object) -> Language:
    if not isinstance(fields, dict):
        raise errors.InvalidRequest(f"{path}: {name}: a language is a table of fields (got {fields!r})", fix=_FIX)
    base = BUILTIN[name].model_dump() if name in BUILTIN else {}
    try:
        language = Language.model_validate(base | fields | {"name": name})
    except ValidationError as error:
        problem = errors.from_validation(error)
        wrong = [f"{name}.{part}" for part in problem.message.split("; ")]
        raise errors.InvalidRequest(f"{path}: {'; '.join(wrong)}", fix=_FIX, context=problem.context) from None
    try:
        if language.seccomp_profile:
            read_profile(language.seccomp_profile)
    except ValueError as error:
        raise errors.InvalidRequest(f"{path}: {name}.seccomp_profile: {error}", fix=_FIX) from None
    return language


def _parse(path: Path) -> dict[str, Any]:
    text = path.read_text("utf-8")
    match path.suffix.lower():
        case ".json":
            table = json.loads(text)
        case ".toml":
            import tomllib

            table = tomllib.loads(text)
        case ".yaml" | ".yml":
            try:
                import yaml
            except ImportError:
                raise ValueError("YAML needs `pip install pyyaml`; JSON and TOML need nothing") from None
            try:
                table = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(" ".join(str(error).split())) from None
        case other:
            raise ValueError(f"a language file ends in .json, .toml or .yaml, not {other!r}")
    if not isinstance(table, dict):
        raise ValueError("a language file maps names to languages")
    languages = table.get("languages", table)
    if not isinstance(languages, dict) or not all(isinstance(name, str) for name in languages):
        raise ValueError("`languages` maps names to languages")
    return languages
