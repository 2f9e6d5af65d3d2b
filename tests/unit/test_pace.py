"""A set-up says what it does, and about how long is left."""

from __future__ import annotations

import pytest

from belljar.cli.pace import USUAL_SECONDS, SetupPace, in_words


def test_time_left_is_that_of_the_steps_ahead_and_shrinks_with_the_clock() -> None:
    pace, whole = SetupPace(), sum(USUAL_SECONDS.values())
    pace.begin("compiling python", 100.0)
    assert pace.left(100.0) == whole and pace.share(100.0) == 0
    assert pace.left(130.0) == whole - 30
    assert 0 < pace.share(130.0) < pace.share(150.0) < 1


def test_a_slow_machine_is_noticed_after_its_first_step() -> None:
    pace = SetupPace()
    pace.begin("compiling python", 0.0)
    pace.begin("compiling javascript", 2 * USUAL_SECONDS["compiling python"])
    ahead = sum(USUAL_SECONDS.values()) - USUAL_SECONDS["compiling python"]
    assert pace.left(2 * USUAL_SECONDS["compiling python"]) == pytest.approx(2 * ahead)


def test_a_step_that_takes_longer_than_usual_never_runs_backwards() -> None:
    pace = SetupPace()
    pace.begin("the profile plots", 0.0)
    assert pace.left(1000.0) == 0 and pace.share(1000.0) == 1


def test_profiles_alone_are_a_set_up_of_seconds_and_an_unknown_step_promises_nothing() -> None:
    pace = SetupPace()
    pace.begin("the profile fresh", 0.0)
    assert (pace.left(0.0) or 0) < 15
    pace.begin("pulling an image", 1.0)
    assert pace.left(2.0) is None and pace.share(2.0) == 0


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(None, ""), (1.0, "a few seconds left"), (12.0, "about 10 seconds left"), (130.0, "about 2 minutes left")],
)
def test_it_is_told_in_round_numbers(seconds: float | None, said: str) -> None:
    assert in_words(seconds) == said
