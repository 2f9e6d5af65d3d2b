"""How each surface writes what a suggestion asks for: `net=["x"]` in Python is `--net x` on the command line.

Suggestions are made in Python's words, and the service answers with those of its JSON. Whoever shows one respells it
from either, so that whoever reads it can type it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from belljar.core import errors
from belljar.core.result import Result

if TYPE_CHECKING:
    from belljar.core.test_results.model import TestReport

Answer = TypeVar("Answer", Result, "TestReport")
Surface = Literal["python", "cli", "http", "mcp"]

_VALUE = r"([\w*](?:[\w.*@/:+-]{0,251}[\w*])?)"
# Python's words -> those of the command line, of a JSON body, and of a tool's arguments. @: some name, which is kept.
_ROWS: tuple[tuple[str, str, str, str], ...] = (
    ("net=[...]", "--net HOST", '"net": ["HOST"]', 'net=["HOST"]'),
    ('net=["@"]', "--net @", '"net": ["@"]', 'net=["@"]'),
    ("backend=@", "--backend @", '"backend": "@"', 'backend="@"'),
    ('memory="<size>"', "--memory <size>", '"limits": {"memory": "<size>"}',
     "a larger memory, which the operator sets (BELLJAR_DEFAULT_MEMORY)"),
    ('disk="<size>"', "--disk <size>", '"limits": {"disk": "<size>"}',
     "a larger disk, which the operator sets (BELLJAR_DEFAULT_DISK)"),
    ("pids=<number>", "--pids <number>", '"limits": {"pids": <number>}',
     "more processes, which the operator sets (BELLJAR_DEFAULT_PIDS)"),
    ("timeout=<seconds>", "--timeout <seconds>", '"timeout_seconds": <seconds>', "timeout=<seconds>"),
    ("fuel=<instructions>", "--fuel <instructions>", '"limits": {"fuel": <instructions>}',
     "more fuel, which the operator sets (BELLJAR_DEFAULT_FUEL)"),
    ("fuel=@", "--fuel @", '"limits": {"fuel": @}', "a limit on fuel (of @)"),
    ("files={...}", "--file PATH", '"context_files": {"NAME": "CONTENT"}', "the tool file_write, in a session"),
    ("env={...}", "--env NAME=VALUE", '"environment": {"NAME": "VALUE"}', "the code itself (os.environ)"),
    ("stdin=...", "--stdin FILE", '"stdin": "..."', "stdin"),
    ('packages="/path/to/venv"', "--packages /path/to/venv", '"packages": "/path/to/venv"',
     "the help of the operator of this server"),
    ('packages=["@"]', "--packages @", '"packages": ["@"]',
     "the help of the operator of this server (belljar mcp --packages @)"),
    ('packages=["<name>"]', "--packages <name>", '"packages": ["<name>"]',
     "the help of the operator of this server (belljar mcp --packages <name>)"),
    ('collect=["<name>"]', "--collect <name> --out DIR", '"collect": ["<name>"]', "the tool file_read, in a session"),
    ("open it with living=True", "`belljar shell` opens one", 'open it with "living": true',
     'open one with session_open(kind="sandbox")'),
    ("make it first: files.make_dir", "make it first: mkdir -p", 'make it first: files/make_dir',
     'make it first: run_command("mkdir -p ...")'),
    ("`started` lists those that it has", "`belljar ps` lists those that it has", "list its processes",
     "list_processes lists those that it has"),
    ("client.sandboxes() lists yours", "`belljar ps` lists yours", "GET /api/sandboxes lists yours",
     "list_processes lists your sandboxes, session_open opens one"),
    ("list the files first", "list the files first", "list the files first", "call file_list first"),
    ("resume() it first", "`belljar resume` it first", "resume it first", "ask the user to resume it"),
    ("give it when you open the sandbox", "give it when you open the sandbox", "give it when you open the sandbox",
     "the operator sets it"),
    ("`sessions` lists yours", "list yours first", "GET /api/sandbox/sessions lists yours",
     "list_processes lists your sandboxes, session_open opens one"),
    ("open one: Sandbox(living=True)", "`belljar shell` opens one", "open one: POST /api/sandboxes",
     'open one with session_open(kind="sandbox")'),
    ("pty=(80, 24)", "--pty", '"pty": {"columns": 80, "rows": 24}', "a terminal, which the operator's shell has"),
    ('require_libraries=["@"]', "--require-library @", '"require_libraries": ["@"]', 'require_libraries=["@"]'),
    ("`belljar doctor` shows", "`belljar doctor` shows", "GET /api/backends shows",
     "the operator's `belljar doctor` shows"),
    ("run `belljar doctor`", "run `belljar doctor`", "look at GET /api/backends",
     "have the operator run `belljar doctor`"),
    ("write=True", "--rw", '"write": true', "the operator's consent"),
)  # fmt: skip
_COLUMNS: dict[Surface, int] = {"python": 0, "cli": 1, "http": 2, "mcp": 3}
_READ = (0, 2)  # the columns that are respelled


def respell(suggestion: str, surface: Surface) -> str:
    """Returns a suggestion in the words of a surface."""
    for pattern, words in _table(surface):
        suggestion = pattern.sub(words, suggestion)
    return suggestion


def respelled(result: Answer, surface: Surface) -> Answer:
    """Returns a result, or a report of tests, whose suggestion is in the words of a surface."""
    if result.error is None:
        return result
    failure = result.error.model_copy(update={"suggestion": respell(result.error.suggestion, surface)})
    return result.model_copy(update={"error": failure})


def told(error: errors.BelljarError, surface: Surface) -> dict[str, Any]:
    """Returns an error as JSON whose remedy is in the words of a surface."""
    return error.as_dict() | {"fix": respell(error.fix, surface)}


def heard(told: Mapping[str, Any], status: int = 500) -> errors.BelljarError:
    """Returns the error that a server told, with its remedy in Python's words."""
    return errors.from_dict({**told, "fix": respell(str(told.get("fix", "")), "python")}, status)


@cache
def _table(surface: Surface) -> tuple[tuple[re.Pattern[str], str], ...]:
    wanted = _COLUMNS[surface]
    return tuple(
        (_pattern(row[column]), row[wanted].replace("@", r"\1"))
        for row in _ROWS
        for column in _READ
        if column != wanted
    )


def _pattern(words: str) -> re.Pattern[str]:
    """Whole words: `memory="<size>"` is not a part of another name."""
    return re.compile(r"(?<![\w`-])" + _VALUE.join(re.escape(part) for part in words.split("@")))
