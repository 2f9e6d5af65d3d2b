"""A home and a project of its own for a test that reads settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from belljar import settings
from belljar.core.settings import Settings

if list(Path("/etc/belljar").glob("config.*")):
    pytest.skip("SKIPPED: /etc/belljar/config.* of this machine would speak in every test", allow_module_level=True)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "project" / "deep").mkdir(parents=True)
    (tmp_path / "project" / ".git").mkdir()
    return tmp_path


def load(home: Path, project: str = "project/deep", env: dict[str, str] | None = None, **flags: Any) -> Settings:
    return settings.load({"HOME": str(home / "home"), **(env or {})}, home / project, **flags)


def user_file(home: Path, text: str) -> None:
    path = home / "home" / ".config" / "belljar" / "config.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def project_file(home: Path, text: str) -> None:
    (home / "project" / ".belljar.toml").write_text(text)
