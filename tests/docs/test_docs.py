"""The documentation is true: its snippets run, its output is real, its links and names exist. See CONTRIBUTING.md."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from belljar import settings
from belljar.cli import main
from belljar.core import errors, values

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
README = (ROOT / "README.md").read_text()
_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_VARIABLE = re.compile(
    r"\b(?:(?:SANDBOX|BELLJAR)_[A-Z_]+|MAX_CONTAINERS|DOCKER_SOCKET_PATH|DOCKER_HOST|CONTAINER_HOST)\b"
)
_NO_SETTINGS = {"BELLJAR_INSTALL", "BELLJAR_SERVER", "BELLJAR_KEY"}  # of the Makefile; of commands that ask a server
_WITH_A_SERVER = {"client.md"}  # test_client runs what is there
_INTERRUPTED = 130
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    page: Path
    kind: str
    text: str


class Shown(NamedTuple):
    """A command as a page shows it, with the output it claims."""

    page: Path
    command: str
    output: str
    here: bool


def blocks(page: Path) -> Iterator[Block]:
    for match in _FENCE.finditer(page.read_text()):
        yield Block(page, match[1].strip(), match[2])


def shown(page: Path) -> Iterator[Shown]:
    for block in blocks(page):
        if block.kind.split(" ")[0] == "console":
            for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                if command.startswith("belljar "):
                    yield Shown(page, command, output, block.kind.endswith(" here"))


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def plain(text: str) -> str:
    """What may differ from one run to the next made equal, and all white space one space."""
    text = re.sub(r"\b\d+(\.\d+)? ms\b", "# ms", text)
    return " ".join(re.sub(r"\bbj-[0-9a-f]{16}\b", "bj-#", text).split())


def matches(wanted: str, seen: str) -> bool:
    parts = [re.escape(plain(part)) for part in re.split(r"^…$", wanted, flags=re.MULTILINE)]
    return re.fullmatch(r"\s*.*\s*".join(parts), plain(seen), re.DOTALL) is not None


def begins(line: str) -> tuple[str, ...]:
    """The cells of a table's row but the last, which is the machine's own; of a sentence, two words."""
    cells = re.split(r"\s{2,}", line.strip())
    return tuple(cells[:-1]) or tuple(line.split()[:2])


@pytest.fixture
def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not _VARIABLE.fullmatch(name)}
    return kept | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "400"}


PYTHON = [
    block for page in PAGES for block in blocks(page) if block.kind == "python" and page.name not in _WITH_A_SERVER
]
SESSIONS = [page for page in PAGES if any(block.kind == "pycon" for block in blocks(page))]
COMMANDS = [command for page in PAGES for command in shown(page)]


@pytest.mark.engine
@pytest.mark.parametrize("page", SESSIONS, ids=named)
def test_a_python_session_in_the_docs_prints_what_it_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "\n".join(block.text for block in blocks(page) if block.kind == "pycon")
    said: list[str] = []
    test = doctest.DocTestParser().get_doctest(text, {}, named(page), named(page), 0)
    outcome = doctest.DocTestRunner(optionflags=_FLAGS, verbose=False).run(test, out=said.append)
    assert outcome.attempted > 0
    assert outcome.failed == 0, "".join(said)


@pytest.mark.engine
@pytest.mark.parametrize("block", PYTHON, ids=lambda block: named(block.page))
def test_a_python_snippet_in_the_docs_runs(block: Block, tmp_path: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", block.text], capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.engine
@pytest.mark.parametrize("shown", COMMANDS, ids=lambda shown: shown.command)
def test_a_command_in_the_docs_prints_what_it_shows(shown: Shown, tmp_path: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        shown.command, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=300, cwd=tmp_path, env=environment, check=False,
    )  # fmt: skip
    if not shown.here:
        assert matches(shown.output, done.stdout), done.stdout
        return
    assert done.returncode == 0, done.stdout
    there = {begins(line) for line in done.stdout.splitlines()}
    wanted = [begins(line) for line in shown.output.splitlines() if line.strip() not in ("", "…")]
    assert wanted, "the page shows nothing"
    assert [line for line in wanted if line not in there] == [], done.stdout


def test_the_comparison_can_fail() -> None:
    assert matches("a 12 ms\n…\nz\n", "a 9.5 ms\nb\nc\nz\n")
    assert not matches("a\nz\n", "a\nb\nz\n")
    assert not matches("…\nz\n", "a\ny\n")


def test_the_readme_shows_the_two_commands_the_cli_and_a_session() -> None:
    assert "$ make run" in README[:600]
    assert "$ make test" in README[:600]
    assert ROOT / "README.md" in SESSIONS
    words = {shown.command.split()[1] for shown in COMMANDS if shown.page == ROOT / "README.md"}
    assert {"run", "doctor", "attack"} <= words


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    text = _FENCE.sub("", page.read_text())
    links = [link.partition("#")[0] for link in _LINK.findall(text) if "://" not in link and not link.startswith("#")]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_exit_code_in_the_readme_is_one_the_code_uses_and_none_is_left_out() -> None:
    rows = README.partition("| `status` | meaning |")[2].partition("\n\n")[0]
    told = {int(code) for code in re.findall(r"\| (\d{3}) \|$", rows, re.MULTILINE)}
    ours = {kind.exit_code for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "exit_code")}
    assert told == ours | set(main._OWN_CODES.values()) | {_INTERRUPTED}


def test_every_variable_in_the_docs_is_read_and_every_one_that_is_read_is_in_the_readme() -> None:
    told = {name for page in PAGES for name in _VARIABLE.findall(page.read_text()) if not name.endswith("_")}
    assert told - _NO_SETTINGS <= set(settings._VARIABLES)
    assert set(settings._VARIABLES) <= set(_VARIABLE.findall(README))


def test_every_default_and_cap_in_the_readme_is_the_real_one() -> None:
    defaults, caps = settings.Settings().defaults, settings.Caps()
    for name in ("memory", "disk", "output", "cpus", "pids", "timeout"):
        row = next(line for line in README.splitlines() if line.startswith(f"| `{name}`"))
        shown_default, shown_cap = (cell.strip().removesuffix(" s") for cell in row.split("|")[2:4])
        assert float(values.parse_size(shown_default)) == getattr(defaults, name), row  # type: ignore[arg-type]
        assert float(values.parse_size(shown_cap)) == getattr(caps, name), row  # type: ignore[arg-type]


def test_no_path_of_the_machine_it_was_written_on_is_in_the_docs() -> None:
    private = "|".join(re.escape(str(path)) for path in (ROOT, Path.home()) if len(path.parts) > 1)
    for page in [*PAGES, *ROOT.glob("examples/*.py"), *ROOT.glob("tests/bench/*.py")]:
        assert not re.search(rf"(?<!\w)({private})/", page.read_text()), page
