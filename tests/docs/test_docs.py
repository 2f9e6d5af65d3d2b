"""The documentation is true: its snippets run and its output is real. `tests/unit/test_pages.py` has the rest."""

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

from pages import PAGES, ROOT, VARIABLE, Block, blocks, named

_WITH_A_SERVER = {"client.md"}  # test_client runs what is there
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Shown(NamedTuple):
    """A command as a page shows it, with the output it claims."""

    page: Path
    command: str
    output: str
    here: bool


def shown(page: Path) -> Iterator[Shown]:
    for block in blocks(page):
        if block.kind.split(" ")[0] == "console":
            for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                if command.startswith("belljar "):
                    yield Shown(page, command, output, block.kind.endswith(" here"))


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
    kept = {name: value for name, value in os.environ.items() if not VARIABLE.fullmatch(name)}
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
@pytest.mark.parametrize("command", dict.fromkeys(shown.command for shown in COMMANDS))
def test_a_command_in_the_docs_prints_what_each_page_shows(
    command: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    done = subprocess.run(
        command, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=300, cwd=tmp_path, env=environment, check=False,
    )  # fmt: skip
    for shown in COMMANDS:
        if shown.command == command:
            check(shown, done)


def check(shown: Shown, done: subprocess.CompletedProcess[str]) -> None:
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


def test_the_readme_shows_the_cli_and_a_session() -> None:
    assert ROOT / "README.md" in SESSIONS
    words = {shown.command.split()[1] for shown in COMMANDS if shown.page == ROOT / "README.md"}
    assert {"run", "doctor", "attack"} <= words
