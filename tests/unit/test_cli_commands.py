"""The table of commands: what it imports, and that its sentences are those of the commands themselves."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest
import typer
from typer.core import TyperGroup

from belljar.cli.commands import COMMANDS, load
from belljar.cli.examples import EXAMPLES

HEAVY = {
    "rich", "pydantic", "anyio", "asyncio", "h11", "httpx2", "fastapi", "sqlalchemy", "belljar.engine.engine",
    "belljar.service.service", "belljar.testing.conformance", "belljar.client.client",
    "belljar.backends.native.backend",
}  # fmt: skip


def imported_by(*words: str) -> set[str]:
    """The modules that are loaded once `belljar WORDS` has ended."""
    program = (
        "import atexit, sys; atexit.register(lambda: sys.stderr.write(' '.join(sys.modules)));"
        f"sys.argv[1:] = {list(words)!r}; from belljar.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(done.stderr.split())


def test_help_imports_neither_the_engine_nor_any_large_library() -> None:
    assert imported_by("--help") & HEAVY == set()


@pytest.mark.parametrize(("words", "needed"), [(("version",), set()), (("version", "--json"), {"pydantic"})])
def test_version_imports_no_large_library_to_read_its_options(words: tuple[str, ...], needed: set[str]) -> None:
    assert imported_by(*words) & HEAVY == needed


def test_a_run_imports_no_surface_but_its_own() -> None:
    loaded = imported_by("run", "--help")
    foreign = {"rich", "fastapi", "sqlalchemy", "httpx2", "h11", "prompt_toolkit", "belljar.service", "belljar.testing"}
    assert loaded & foreign == set()


def test_the_line_editor_is_imported_only_by_a_prompt_on_a_terminal() -> None:
    assert "prompt_toolkit" not in imported_by("session", "--json")  # stdin is no terminal here


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_begins_with_the_sentence_in_the_table(name: str) -> None:
    command = COMMANDS[name]
    own = getattr(import_module(f"belljar.cli.{command.module}"), command.attribute)
    told = own.info.help if isinstance(own, typer.Typer) else own.__doc__
    assert told.startswith(command.help.removesuffix("."))
    assert command.help.endswith(".")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_called_by_its_name_and_a_table_of_commands_by_theirs(name: str) -> None:
    found = load(name)
    if isinstance(found, TyperGroup):
        assert found.list_commands(None)  # type: ignore[arg-type]
    else:
        assert found.name == name


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_ends_with_examples_that_name_it(name: str) -> None:
    assert EXAMPLES[name]
    assert all(f"belljar {name}" in example or f"belljar --{name}" in example for example in EXAMPLES[name])
    assert f"Examples:\n  {EXAMPLES[name][0]}" in load(name).epilog


def test_a_newcomer_reads_first_of_running_code() -> None:
    assert list(COMMANDS)[:3] == ["run", "session", "exec"]
