"""The public fake: what users of Belljar write their own tests with."""

from __future__ import annotations

from typing import Any

import pytest

import belljar
from belljar.backends.fake import Fake, FakeProcess, Program
from belljar.core.capabilities import Isolation
from belljar.core.result import Result

CODE = "the code does not matter: it is only a name"


def play(program: Program, **options: Any) -> Result:
    return belljar.run(CODE, backend=Fake({CODE: program}), **options)


def test_a_lambda_is_enough_of_a_guest() -> None:
    result = belljar.run("print(1)", backend=Fake({"print(1)": lambda p: p.out("1\n")}))
    assert (result.status, result.exit_code, result.stdout) == ("success", 0, "1\n")


def test_a_command_is_named_as_a_shell_would_spell_it() -> None:
    fake = Fake({"grep -r 'two words' .": lambda p: p.out(p.argv[2])})
    assert belljar.run(command=["grep", "-r", "two words", "."], backend=fake).stdout == "two words"


def test_a_program_that_was_not_scripted_ends_with_exit_code_127() -> None:
    result = belljar.run("print(2)", backend=Fake({}))
    assert (result.status, result.exit_code) == ("error", 127)
    assert "no program was scripted" in result.stderr


@pytest.mark.parametrize(
    ("program", "code"), [(lambda p: 3, 3), (lambda p: p.exit(300), 44), (lambda p: p.signal(9), 137)]
)
def test_the_guest_ends_as_its_program_says(program: Program, code: int) -> None:
    result = play(program)
    assert (result.status, result.exit_code) == ("error", code)


def test_an_exception_of_the_program_is_the_guests_and_is_printed_like_a_trace() -> None:
    def broken(p: FakeProcess) -> None:
        raise ValueError("no tea")

    result = play(broken)
    assert (result.status, result.exit_code) == ("error", 1)
    assert result.stderr.startswith("Traceback") and result.stderr.endswith("ValueError: no tea\n")


def test_the_program_sees_what_a_guest_would_see() -> None:
    async def look(p: FakeProcess) -> None:
        await p.out(f"{p.cwd} {p.env['NAME']} {p.stdin!r} {p.files['in/a.txt']!r} {'HOME' in p.env}")

    result = play(look, env={"NAME": "bell"}, stdin="hi", files={"in/a.txt": "x"})
    assert result.stdout == "/workspace bell b'hi' b'x' True"


def test_the_view_of_the_files_cannot_be_written() -> None:
    def scribble(p: FakeProcess) -> None:
        p.files["new.txt"] = b"x"  # type: ignore[index]

    assert "TypeError" in play(scribble).stderr


@pytest.mark.parametrize("path", ["given.txt", "/workspace/given.txt", "/usr/bin/x", "../x", "/x"])
def test_inputs_and_the_rest_of_the_system_cannot_be_written(path: str) -> None:
    result = play(lambda p: p.write(path, b"x"), files={"given.txt": "as given"})
    assert result.exit_code == 1
    assert "Read-only file system" in result.stderr


def test_disk_use_is_counted_over_all_files_and_not_twice_for_one() -> None:
    def fits(p: FakeProcess) -> None:
        for _ in range(3):
            p.write("same.bin", b"x" * 60_000)

    def too_much(p: FakeProcess) -> None:
        for i in range(3):
            p.write(f"{i}.bin", b"x" * 60_000)

    assert play(fits, disk="64K").status == "success"
    assert play(too_much, disk="64K").status == "disk_limit"


def test_memory_over_the_limit_kills_like_the_kernel() -> None:
    result = play(lambda p: p.allocate(64 << 20), memory="32M")
    assert (result.status, result.exit_code) == ("oom_killed", 137)


def test_the_timeout_is_real() -> None:
    result = play(lambda p: p.sleep(30), timeout=0.05)
    assert (result.status, result.exit_code) == ("timeout", 124)
    assert 50 <= result.duration_ms < 10_000


def test_it_says_on_every_result_that_it_is_a_simulation() -> None:
    guarantees = play(lambda p: None).guarantees
    assert guarantees is not None
    assert guarantees.isolation is Isolation.KERNEL
    assert guarantees.walls == ("nothing is executed",)
    assert guarantees.weaker == ("a simulation: results are scripted",)


def test_open_boxes_are_counted() -> None:
    fake = Fake({})
    with belljar.Sandbox(backend=fake) as box:
        box.write("a.txt", "x")
        assert fake.open_boxes == 1
    assert fake.open_boxes == 0
