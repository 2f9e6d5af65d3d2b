"""The memory that callers may fill: each one a part, all together a whole, and small things always."""

from __future__ import annotations

import pytest

from belljar.core import errors
from belljar.service.budget import ByteBudget

KIB = 1024


def test_a_caller_is_refused_beyond_its_part_and_others_are_not() -> None:
    budget = ByteBudget("bodies", each=100 * KIB, total=150 * KIB)
    budget.share("ann").add(110 * KIB)  # of which some are free
    with pytest.raises(errors.Busy) as refused:
        budget.share("ann").add(30 * KIB)
    assert refused.value.http_status == 429
    budget.share("ben").add(30 * KIB)


def test_all_callers_together_are_refused_beyond_the_whole_and_small_things_are_not() -> None:
    budget = ByteBudget("bodies", each=100 * KIB, total=150 * KIB)
    shares = [budget.share(name) for name in ("ann", "ben")]
    shares[0].add(110 * KIB)
    with pytest.raises(errors.Busy) as refused:
        shares[1].add(100 * KIB)
    assert refused.value.http_status == 503
    for number in range(1000):
        budget.share(f"caller {number}").add(16 * KIB)


def test_what_is_given_back_can_be_taken_again_however_often() -> None:
    budget = ByteBudget("bodies", each=100 * KIB, total=100 * KIB)
    for _ in range(10):
        share = budget.share("ann")
        for _ in range(10):
            share.add(11 * KIB)
        with pytest.raises(errors.Busy):
            share.add(11 * KIB)
        share.close()
        share.close()
