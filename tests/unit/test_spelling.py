"""A suggestion is shown in words that its reader can type: options, fields of JSON, or arguments of a tool."""

from __future__ import annotations

import re

import pytest

from belljar.core import errors, signs
from belljar.core.result import ErrorType, Failure, Result, Status
from belljar.core.spelling import _ROWS, Surface, heard, respell, respelled, told


@pytest.mark.parametrize(
    ("python", "surface", "shown"),
    [
        ('ask for more with memory="<size>"', "cli", "ask for more with --memory <size>"),
        ("grant it for writing with write=True", "cli", "grant it for writing with --rw"),
        ("ask for backend=native, or", "cli", "ask for --backend native, or"),
        ('allow it with net=["a.example"], and', "cli", "allow it with --net a.example, and"),
        ("ask for the hosts with net=[...] on a backend", "cli", "ask for the hosts with --net HOST on a backend"),
        ("fuel=400000000 (about a second)", "cli", "--fuel 400000000 (about a second)"),
        ("pass it with files={...}", "cli", "pass it with --file PATH"),
        ('grant it with packages="/path/to/venv"', "http", 'grant it with "packages": "/path/to/venv"'),
        ("ask for more with timeout=<seconds>", "http", 'ask for more with "timeout_seconds": <seconds>'),
        ("ask for backend=native", "mcp", 'ask for backend="native"'),
        ("pass it with files={...}", "mcp", "pass it with the tool file_write, in a session"),
        ("nothing of ours, not even x_memory=1", "cli", "nothing of ours, not even x_memory=1"),
    ],
)
def test_each_surface_has_its_own_words(python: str, surface: Surface, shown: str) -> None:
    assert respell(python, surface) == shown


@pytest.mark.parametrize("row", _ROWS, ids=lambda row: row[0])
def test_what_the_service_answers_is_python_again_for_its_python_client(row: tuple[str, ...]) -> None:
    python = row[0].replace("@", "value")
    assert respell(respell(f"try {python}, or not", "http"), "python") == f"try {python}, or not"
    assert respell(respell(f"try {python}, or not", "http"), "cli") == respell(f"try {python}, or not", "cli")


def test_no_advice_is_left_in_pythons_words_on_the_command_line() -> None:
    advice = [value for name, value in vars(signs).items() if name.isupper() and isinstance(value, str)]
    rows = [*signs.ANY_LANGUAGE, *signs.ON_WASM, *(sign for table in signs.BY_LANGUAGE.values() for sign in table)]
    advice += [sign.advice for sign in rows]
    assert len(advice) > 60
    for text in advice:
        shown = respell(text.replace("{{", "{").replace("}}", "}"), "cli")
        assert not re.search(r"(?<!-)\b(?:net|files|env|packages|memory|disk|pids|stdin|backend|write)=", shown), shown


def test_a_refusal_is_told_in_a_surface_s_words_and_heard_in_python_s() -> None:
    refused = errors.PolicyDenied("it is only read", fix="grant it with write=True", context={"backend": "native"})
    said = told(refused, "http")
    assert said == {**refused.as_dict(), "fix": 'grant it with "write": true'}
    back = heard(said)
    assert (type(back), back.fix, back.context) == (errors.PolicyDenied, refused.fix, refused.context)


def test_of_a_result_only_the_suggestion_is_respelled() -> None:
    failure = Failure(error_type=ErrorType.RUNTIME_ERROR, message="net=[...]", suggestion="net=[...]", context={})
    result = Result(status=Status.ERROR, stdout="net=[...]", error=failure)
    shown = respelled(result, "cli")
    assert shown.error is not None and (shown.error.message, shown.error.suggestion) == ("net=[...]", "--net HOST")
    assert shown.stdout == "net=[...]" and respelled(Result(status=Status.SUCCESS), "cli").error is None
