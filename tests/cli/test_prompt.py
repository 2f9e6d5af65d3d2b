"""`belljar session` on a terminal, as a person uses it: typed, pasted, completed, interrupted, left."""

from __future__ import annotations

import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from terminals import CTRL_C, CTRL_D, ENTER, TAB, UP, Terminal, terminal

PICTURE = (
    "class Picture:\r    def _repr_png_(self):\rreturn b'\\x89PNG\\r\\n\\x1a\\n' + b'pixels'\r\r"  # the editor indents
)


def prompt(folder: Path, backend: str) -> tuple[list[str], dict[str, str], Path]:
    argv = [sys.executable, "-m", "belljar", "session", "--backend", backend]
    return argv, {"XDG_DATA_HOME": str(folder / "data")}, folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prompt")


@pytest.fixture(scope="module")
def native(home: Path) -> Iterator[Terminal]:
    """One prompt for the tests that leave it in order."""
    with terminal(*prompt(home, "native")) as shown:
        shown.expect("Ctrl-D leaves")
        shown.expect_prompt()
        yield shown


def enter(shown: Terminal, text: str, answer: str) -> None:
    """Types a statement, and waits for what it prints and for the next prompt."""
    shown.type(text + ENTER)
    shown.expect(answer)
    shown.expect_prompt()


def test_what_is_typed_stays_and_a_value_is_echoed(native: Terminal) -> None:
    native.type("value_one = 40" + ENTER)
    native.expect_prompt()
    enter(native, "value_one + 2", "42\n")


def test_a_block_is_indented_and_goes_on_until_an_empty_line(native: Terminal) -> None:
    native.type("def triple(n):" + ENTER + "return 3 * n" + ENTER + ENTER)
    native.expect_prompt()
    enter(native, "triple(111)", "333\n")


def test_a_pasted_block_is_one_turn_however_many_lines_and_empty_ones_it_has(native: Terminal) -> None:
    pasted = "total = 0\n\nfor i in range(5):\n    if i:\n\n        total += i\n\nprint('sum', total * 100)"
    native.type(f"\x1b[200~{pasted}\x1b[201~")
    native.type(ENTER)
    native.expect("sum 1000\n")
    native.expect_prompt()


def test_tab_completes_a_name_that_only_the_session_knows(native: Terminal) -> None:
    native.type("remarkable_name = 6" + ENTER)
    native.expect_prompt()
    native.type("remarkab" + TAB)
    native.expect("le_name")
    enter(native, " * 11", "66\n")
    native.type("import os" + ENTER)
    native.expect_prompt()
    native.type("os.path.basena" + TAB)
    native.expect("me")
    enter(native, "('/a/' + 'bcd')", "'bcd'\n")


def test_ctrl_c_interrupts_a_turn_and_the_session_goes_on(native: Terminal) -> None:
    native.type("import time; kept = 7; print('be' + 'gun'); time.sleep(600)" + ENTER)
    native.expect("begun\n")  # shown while it runs
    native.type(CTRL_C)
    native.expect("KeyboardInterrupt\n")
    native.expect("the session goes on")
    native.expect_prompt()
    enter(native, "kept * 1111", "7777\n")


def test_ctrl_c_throws_away_what_was_typed(native: Terminal) -> None:
    native.type("raise SystemExit('not this'")
    native.type(CTRL_C)
    native.expect_prompt()
    enter(native, "10 ** 5", "100000\n")


def test_a_line_that_the_guest_did_not_end_is_ended_before_the_prompt(native: Terminal) -> None:
    native.type("print('no ' + 'end', end='')" + ENTER)
    assert native.expect("no end\n>>>")
    native.expect_prompt()


def test_a_figure_is_saved_under_a_name_that_is_told(native: Terminal, home: Path) -> None:
    native.type(PICTURE)
    native.expect_prompt()
    native.type("Picture()" + ENTER)
    native.expect("figure: ")
    told = native.expect(".png\n")
    (path,) = (home / "data/belljar/figures").iterdir()
    assert told.strip() == str(path) and re.fullmatch(r"figure-[\d-]+\.png", path.name)
    assert path.read_bytes() == b"\x89PNG\r\n\x1a\npixels"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    native.expect_prompt()


def test_an_unknown_command_is_explained_and_commands_are_completed(native: Terminal) -> None:
    enter(native, ":nonsense", "there is no command :nonsense")
    native.type(":hel" + TAB)
    native.expect("p")
    enter(native, "", ":rollback [NAME]")


def test_history_is_private_and_there_the_next_time_and_ctrl_d_leaves(home: Path) -> None:
    with terminal(*prompt(home, "native")) as first:
        first.expect_prompt()
        enter(first, "print(123 * 1001)", "123123\n")
        first.type(CTRL_D)
        assert first.wait() == 0
    history = home / "data/belljar/session_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    with terminal(*prompt(home, "native")) as second:
        second.expect_prompt()
        second.type(UP)
        second.expect("print(123 * 1001)")
        enter(second, "", "123123\n")
        second.type(CTRL_D)
        assert second.wait() == 0


def test_on_wasm_a_turn_that_is_cut_is_undone_and_the_prompt_says_so(home: Path) -> None:
    with terminal(*prompt(home, "wasm")) as shown:
        shown.expect_prompt()
        shown.type("kept = 6" + ENTER)
        shown.expect_prompt()
        shown.type("\x1b[200~kept = 7\nprint('be' + 'gun', flush=True)\nwhile True: pass\n\x1b[201~" + ENTER)
        shown.expect("begun\n")
        shown.type(CTRL_C)
        shown.expect("the session is what it was before this turn")
        shown.expect_prompt()
        enter(shown, "kept * 1111", "6666\n")
        shown.type(CTRL_D)
        assert shown.wait() == 0
