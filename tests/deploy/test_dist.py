"""The package as PyPI would get it: built, checked, installed into a clean environment and used there."""

from __future__ import annotations

import email
import re
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import belljar
from pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_TEXTS = {".md", ".py", ".service", ".sh", ".toml", ".yaml", ".yml"}


@pytest.mark.exhaustive("builds the package and installs it with its dependencies into a new environment")
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_make_dist_builds_a_package_that_works_in_a_clean_environment(tmp_path: Path) -> None:
    line = ["make", "-o", ".venv/.belljar-ready", "dist", f"DIST={tmp_path}"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    stem = f"belljar_sandbox-{belljar.__version__}"
    assert {path.name for path in tmp_path.iterdir()} == {f"{stem}-py3-none-any.whl", f"{stem}.tar.gz"}
    with tarfile.open(tmp_path / f"{stem}.tar.gz") as source:
        names = source.getnames()
    assert {f"{stem}/README.md", f"{stem}/LICENSE", f"{stem}/images/python/Dockerfile"} <= {*names}
    wheel = zipfile.ZipFile(tmp_path / f"{stem}-py3-none-any.whl")
    assert {"belljar/dockerfiles/python/Dockerfile", "belljar/py.typed"} <= {*wheel.namelist()}
    about = email.message_from_bytes(wheel.read(f"{stem}.dist-info/METADATA"))
    assert (about["Name"], about["Version"]) == ("belljar-sandbox", belljar.__version__)
    links = re.findall(r"\]\(([^)\s]+)\)", str(about.get_payload()))
    assert len(links) > 10
    assert [link for link in links if not link.startswith("https://")] == []


def test_the_distribution_is_not_the_package_of_somebody_else() -> None:
    assert PROJECT["name"] == "belljar-sandbox"
    assert PROJECT["scripts"]["belljar"] == PROJECT["scripts"]["belljar-sandbox"]
    assert {"Homepage", "Documentation", "Source", "Issues", "Changelog"} <= {*PROJECT["urls"]}


def test_no_page_message_or_file_tells_anybody_to_install_the_package_of_somebody_else() -> None:
    wrong = re.compile(r"""(?:install|uvx|pipx run|uv tool run|--from)\s+['"]?belljar(?![\w-])|['"`]belljar\[""")
    rooms = ("src", "docs", "deploy", "examples", "images", "scripts", "tests")
    texts = [*ROOT.glob("*.*"), *(path for room in rooms for path in (ROOT / room).rglob("*"))]
    texts = [path for path in texts if path.suffix in _TEXTS or path.name == "Dockerfile"]
    assert len(texts) > 100
    found = [path for path in texts if path != Path(__file__) and wrong.search(path.read_text())]
    assert found == []
