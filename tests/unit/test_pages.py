"""The documentation agrees with the code: links, names, codes, variables, defaults, the drawing, and the site."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

import belljar
from belljar import settings
from belljar.cli.run import EXIT_CODES
from belljar.core import errors, values
from belljar.core.languages import Language
from belljar.core.request import Limits, RunRequest
from belljar.core.result import ErrorType, Result, Status
from pages import PAGES, ROOT, VARIABLE, blocks, named, prose, text_of

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PATH = re.compile(r"`((?:src|tests|scripts|deploy|examples|backends|core|engine|guest|host|service)/[\w./-]+)`")
# Of the Makefile; of commands that ask a server; what tests find in a sandbox.
_NO_SETTINGS = {"BELLJAR_INSTALL", "BELLJAR_SERVER", "BELLJAR_KEY", "BELLJAR_REPORTS", "BELLJAR_TEST_PROCESSES"}
_INTERRUPTED = 130
README, REFERENCE, CONFIGURATION = (
    text_of(name) for name in ("README.md", "docs/reference.md", "docs/configuration.md")
)


def in_code(text: str) -> set[str]:
    """The words that stand in backquotes."""
    return {word for span in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"\w+", span)}


def fields(model: type[BaseModel]) -> Iterator[str]:
    """The names of a model's fields, and of those below them."""
    for name, field in model.model_fields.items():
        yield name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from fields(field.annotation)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    links = [
        link.partition("#")[0] for link in _LINK.findall(prose(page)) if "://" not in link and not link.startswith("#")
    ]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    roots = (ROOT, ROOT / "src/belljar")
    paths = _PATH.findall(prose(page))
    assert [path for path in paths if not any((root / path).exists() for root in roots)] == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_page_has_one_title_and_text_before_anything_else(page: Path) -> None:
    title, empty, first = page.read_text().splitlines()[:3]
    assert title.startswith("# ")
    assert empty == ""
    assert re.match(r"[\w`*]", first), first
    assert len(re.findall(r"^# ", prose(page), re.MULTILINE)) == 1


def test_the_readme_is_a_front_page() -> None:
    assert len(README.splitlines()) <= 125
    assert "$ make run" in README[:600]
    assert "$ make test" in README[:600]
    linked = {ROOT / link.partition("#")[0] for link in _LINK.findall(README)}
    pages = {page for page in PAGES if page.parent == ROOT / "docs"} - {ROOT / "docs/index.md"}
    assert pages <= linked, "the index leaves a page out"


def test_every_exit_code_in_the_reference_is_one_the_code_uses_and_none_is_left_out() -> None:
    rows = REFERENCE.partition("| `status` | meaning |")[2].partition("\n\n")[0]
    told = {int(code) for code in re.findall(r"\| (\d{3}) \|$", rows, re.MULTILINE)}
    ours = {kind.exit_code for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "exit_code")}
    assert told == ours | set(EXIT_CODES.values()) | {_INTERRUPTED}
    assert {status.value for status in Status} <= in_code(rows)


def test_every_variable_in_the_docs_is_read_and_every_one_that_is_read_is_in_the_configuration() -> None:
    told = {name for page in PAGES for name in VARIABLE.findall(page.read_text()) if not name.endswith("_")}
    assert told - _NO_SETTINGS <= set(settings._VARIABLES)
    assert set(settings._VARIABLES) <= set(VARIABLE.findall(CONFIGURATION))


def test_every_setting_is_in_the_configuration() -> None:
    assert {*fields(settings.Settings), *Language.model_fields} - {"name"} <= in_code(CONFIGURATION)


def test_every_option_limit_field_and_error_is_in_the_reference() -> None:
    wanted = {*RunRequest.model_fields, *Limits.model_fields, *Result.model_fields, *ErrorType}
    wanted |= {kind.__name__ for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "exit_code")}
    assert wanted <= in_code(REFERENCE)


def test_every_default_and_cap_in_the_reference_is_the_real_one() -> None:
    defaults, caps = settings.Settings().defaults, settings.Caps()
    for name in ("memory", "disk", "output", "cpus", "pids", "timeout"):
        row = next(line for line in REFERENCE.splitlines() if line.startswith(f"| `{name}`"))
        shown_default, shown_cap = (cell.strip().removesuffix(" s") for cell in row.split("|")[2:4])
        assert float(values.parse_size(shown_default)) == getattr(defaults, name), row  # type: ignore[arg-type]
        assert float(values.parse_size(shown_cap)) == getattr(caps, name), row  # type: ignore[arg-type]


def test_every_public_name_is_in_the_api_page_and_no_other() -> None:
    told = set(re.findall(r"^::: belljar\.(\w+)$", text_of("docs/api.md"), re.MULTILINE))
    assert told == set(belljar.__all__) - {"__version__"}


def test_the_drawing_of_the_rooms_is_the_contract_that_is_checked() -> None:
    contracts = tomllib.loads(text_of("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    assert rows_of_rooms() == [
        [room.strip().removeprefix("belljar.") for room in re.split("[|:]", row)] for row in layers
    ]


def rows_of_rooms() -> list[list[str]]:
    """The rows of the drawing, from the top."""
    (drawing,) = (block.text for block in blocks(ROOT / "docs/architecture.md") if block.kind == "text rooms")
    return [re.findall(r"\w+", line.partition("│")[0]) for line in drawing.splitlines() if "│" in line]


def walks() -> dict[str, list[str]]:
    """The walks through the code: title -> the names of its hops."""
    section = text_of("docs/architecture.md").partition("## Three walks")[2].partition("\n## ")[0]
    titled = [part.partition("\n") for part in section.split("\n### ")[1:]]
    return {title: re.findall(r"^\d+\. `([\w.]+)`", text, re.MULTILINE) for title, _, text in titled}


@pytest.mark.parametrize("title", walks())
def test_a_walk_has_ten_hops_at_most_all_of_which_exist_and_none_of_which_goes_back_up(title: str) -> None:
    hops = walks()[title]
    assert 3 <= len(hops) <= 10
    for hop in hops:
        assert callable(pkgutil.resolve_name(f"belljar.{hop}")), hop
    rows = rows_of_rooms()
    depths = [next(i for i, row in enumerate(rows) if hop.split(".")[0] in row) for hop in hops]
    assert depths == sorted(depths)


def test_there_are_three_walks_and_all_names_in_them_exist() -> None:
    assert len(walks()) == 3
    rooms = {room for row in rows_of_rooms() for room in row}
    section = text_of("docs/architecture.md").partition("## Three walks")[2].partition("\n## ")[0]
    for name in re.findall(r"`(\w+\.[\w.]+)`", section):
        if name.split(".")[0] in rooms:
            pkgutil.resolve_name(f"belljar.{name}")


def test_every_room_has_a_line_in_the_architecture() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", text_of("docs/architecture.md"), re.MULTILINE)
    package = ROOT / "src/belljar"
    rooms = {path.stem for path in package.iterdir() if path.suffix in ("", ".py") and not path.stem.startswith("__")}
    assert set(rows) >= rooms


def test_no_path_of_the_machine_it_was_written_on_is_in_the_docs() -> None:
    private = "|".join(re.escape(str(path)) for path in (ROOT, Path.home()) if len(path.parts) > 1)
    for page in [*PAGES, *ROOT.glob("examples/*.py"), *ROOT.glob("tests/bench/*.py")]:
        assert not re.search(rf"(?<!\w)({private})/", page.read_text()), page


def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the site needs the extra `docs`: pip install 'belljar-sandbox[docs]'")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False, env={"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    pages = {page.name: page.read_text() for page in (tmp_path / "site").rglob("*.html")}
    assert {"index.html", "api.html", "contributing.html", "0012-the-service.html"} <= pages.keys()
    foreign = re.compile(r"""<(?:script|link|img|iframe)[^>]+(?:src|href)=["']?(?:https?:)?//""")
    assert [name for name, page in pages.items() if foreign.search(page)] == []
    assert "belljar.run" in pages["api.html"]
