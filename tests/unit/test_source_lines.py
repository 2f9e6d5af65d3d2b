"""When typed lines are whole, how the next is indented, and where figures and history of the prompt go."""

from __future__ import annotations

import base64
import os
import stat
from pathlib import Path

import pytest
from prompt_toolkit.history import FileHistory, InMemoryHistory

from belljar.cli import figures, line_editor
from belljar.cli.source_lines import indentation, is_whole


@pytest.mark.parametrize(
    ("source", "whole"),
    [
        ("x = 1", True), ("", True), (":help", True), ("x = (", False), ("def f():", False), ("def f():\n    x", False),
        ("def f():\n    x\n", True), ("def f():\n    x\n    ", True), ("for i in x:\n    y\n\nz", True),
        ("'''a", False), ("x = 'a", True), ("def f[T](x):", False), ("def f[T](x):\n    x\n", True), ("1 +", True),
        ("@d", False), ("if x:\n    y\nelse:", False), ("\\", False), ("(" * 3000, True), ("x = '\\d'", True),
    ],
)  # fmt: skip
def test_a_statement_is_taken_when_it_is_whole_or_can_never_be(source: str, whole: bool) -> None:
    assert is_whole(source) is whole


def test_from_a_pipe_a_line_of_white_space_ends_no_block() -> None:
    assert not is_whole("def f():\n    x\n    ", typed=False)
    assert is_whole("def f[T](:", typed=False)


@pytest.mark.parametrize(
    ("before", "space"), [("x", ""), ("if x:", "    "), ("if x:\n    y", "    "), ("if x:\n    if y:  ", "        ")]
)
def test_the_next_line_is_indented_as_python_wants_it(before: str, space: str) -> None:
    assert indentation(before) == space


def test_the_history_is_private_bounded_and_never_a_file_of_somebody_else(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "history"
    history = line_editor.open_history(path)
    assert isinstance(history, FileHistory)
    history.append_string("print(1)")
    path.chmod(0o644)
    entry = b"\n# 2026-11-18 06:00:00.000000\n+x = 1\n"
    path.write_bytes(entry * 40_000)
    history = line_editor.open_history(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size < 600_000 and set(history.load_history_strings()) == {"x = 1"}
    link = tmp_path / "link"
    link.symlink_to(path)
    os.mkfifo(tmp_path / "pipe")
    for odd in (link, tmp_path / "pipe", tmp_path / "deep", path / "below"):
        assert isinstance(line_editor.open_history(odd), InMemoryHistory)


def test_a_figure_is_what_it_claims_to_be_and_gets_a_name_of_its_own(tmp_path: Path) -> None:
    png = base64.b64encode(b"\x89PNG\r\n\x1a\nx").decode()
    assert list(figures.images({"image/png": "aGFsbG8=", "image/svg+xml": "<svg/>", "text/plain": "x"})) == []
    ((ending, content),) = figures.images({"image/png": png, "text/plain": "<Figure>"})
    paths = {figures.save(tmp_path / "figures", ending, content) for _ in range(3)}
    assert len(paths) == 3 and all(path.read_bytes() == content and path.suffix == ".png" for path in paths)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in paths)


def test_what_notebooks_write_is_whole_when_it_could_run() -> None:
    assert is_whole("!ls") and is_whole("x = !ls -l") and is_whole("%pip install x") and is_whole("await f()")
    assert not is_whole("async with f():\n    await g()", typed=False)
    assert is_whole("async with f():\n    await g()\n", typed=False)
    assert not is_whole("%%bash\nfor i in 1 2; do") and is_whole("%%bash\nls\n")
