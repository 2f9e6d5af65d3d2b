"""What is asked of a test run, whoever asks: the values that library, command line and service have alike."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, ValidationError

from belljar.core import errors
from belljar.core.model import Model
from belljar.core.request import MAX_TIMEOUT_SECONDS, MAX_VARIABLES
from belljar.core.values import EnvName, EnvText, Text, guest_path

TEST_SECONDS = 300.0  # that the tests may take, unless somebody says otherwise
MAX_REPEATS = 100


def _command(value: Any) -> Any:
    """A line of shell, or a program with its arguments."""
    return tuple(value) if isinstance(value, list) else value


def _shard(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"(\d{1,4})/(\d{1,4})", value.strip())
    if not found:
        raise ValueError(f"{value[:40]!r} is no part of the tests: write 1/4, for the first of four")
    return int(found[1]), int(found[2])


def _part(value: tuple[int, int] | None) -> tuple[int, int] | None:
    if value is not None and not 1 <= value[0] <= value[1]:
        raise ValueError(f"there is no part {value[0]} of {value[1]}: write 1/4, for the first of four")
    return value


Shard = Annotated[tuple[int, int] | None, BeforeValidator(_shard), AfterValidator(_part)]
CommandLine = Annotated[
    Annotated[Text, Field(min_length=1, max_length=65_536)]
    | Annotated[tuple[Text, ...], Field(min_length=1, max_length=4096)] | None,
    BeforeValidator(_command),
]  # fmt: skip


def _paths(value: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(guest_path(one) for one in value)


class TestOptions(Model):
    """How tests are to be run."""

    __test__: ClassVar[bool] = False

    command: CommandLine = None
    """A line of shell, or a program with its arguments; found by the project's files unless given."""
    environment: Annotated[Mapping[EnvName, EnvText], Field(max_length=MAX_VARIABLES)] = Field(default_factory=dict)
    """Variables that the tests find."""
    timeout: float = Field(TEST_SECONDS, gt=0, le=MAX_TIMEOUT_SECONDS, allow_inf_nan=False)
    """Seconds that each run of the command may take."""
    coverage: StrictBool = False
    """Whether to measure how much code the tests run."""
    only: Annotated[tuple[Annotated[Text, Field(min_length=1, max_length=4096)], ...], Field(max_length=10_000)] = ()
    """The ids of the tests to run; all unless given."""
    shard: Shard = None
    """One part of the tests, such as (1, 4) or "1/4"."""
    repeat: int = Field(1, ge=1, le=MAX_REPEATS)
    """How often to run them, to find those that do not end alike each time."""
    reports: Annotated[tuple[Text, ...], Field(max_length=32), AfterValidator(_paths)] = ()
    """Patterns of files of the project to which the command writes JUnit XML or TAP, such as "build/**/*.xml"."""


def test_options(**given: Any) -> TestOptions:
    """Checks what a user typed; None counts as not given.

    Raises:
        InvalidRequest: a value is wrong.
    """
    lists = ("command", "only", "reports")
    plain = {
        name: tuple(value) if name in lists and isinstance(value, Iterable) and not isinstance(value, str) else value
        for name, value in given.items()
        if value is not None
    }
    try:
        return TestOptions(**plain)
    except ValidationError as error:
        raise errors.from_validation(error, "test", TestOptions) from None


test_options.__test__ = False  # type: ignore[attr-defined]
