"""What every backend's run shares: its streams, its denials, its verdict, and a granted folder by copy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from belljar.backends.granted import GrantedCopy
from belljar.backends.outcome import WENT_ON, Ending, Outcome, judge
from belljar.control.control import Control
from belljar.core.request import Limits, Workspace
from belljar.core.result import Result, Status
from belljar.host.egress.guest import DENIALS
from belljar.host.tree_copy import CopiedTree, TreeNode

pytestmark = pytest.mark.anyio


def outcome(told: list[tuple[str, str]], **limits: float) -> Outcome:
    async def emit(kind: str, text: str) -> None:
        told.append((kind, text))

    return Outcome("bj-1", Limits.model_validate(limits), emit)


@pytest.mark.parametrize(
    ("ending", "stderr", "cut", "status"),
    [
        (Ending(0), "No space left on device", False, Status.SUCCESS),
        (Ending(0), "", True, Status.OUTPUT_LIMIT),
        (Ending(1), "", True, Status.ERROR),
        (Ending(137), "", False, Status.ERROR),
        (Ending(137, oom_killed=True), "", False, Status.OOM_KILLED),
        (Ending(1, oom_killed=True), "", False, Status.ERROR),
        (Ending(1, refused_memory=True), "Traceback\nMemoryError", False, Status.OOM_KILLED),
        (Ending(1), "Traceback\nMemoryError", False, Status.ERROR),
        (Ending(1), "OSError: [Errno 28] No space left on device", False, Status.DISK_LIMIT),
        (Ending(1), "Error: ENOSPC: no space left", False, Status.DISK_LIMIT),
        (Ending(1), "no space left on device" + "x" * 3000, False, Status.ERROR),
        (Ending(None), "", False, Status.ERROR),
    ],
)
def test_the_verdict_follows_from_the_exit_code_the_kernel_and_the_last_complaint(
    ending: Ending, stderr: str, cut: bool, status: Status
) -> None:
    assert judge(ending, stderr, cut=cut) is status


async def test_what_ended_a_run_from_outside_is_its_verdict_and_only_the_first_counts() -> None:
    run = outcome([])
    assert run.end(Status.TIMEOUT)
    assert not run.end(Status.ABORTED)
    assert run.result(Ending(0, oom_killed=True)).status is Status.TIMEOUT
    assert run.result(Ending(0, oom_killed=True)).warnings == ()


async def test_a_guest_that_outlived_the_death_of_its_child_is_told_in_a_warning() -> None:
    assert outcome([]).result(Ending(0, oom_killed=True, warnings=("more",))).warnings == (WENT_ON, "more")


async def test_the_start_is_told_first_even_if_output_was_heard_before_it() -> None:
    told: list[tuple[str, str]] = []
    run = outcome(told)
    await run.take("stdout", b"early")
    assert told == []
    await run.begin()
    await run.take("stdout", b"late")
    assert told == [("started", "bj-1"), ("stdout", "early"), ("stdout", "late")]


async def test_what_a_guest_that_never_started_left_is_told_at_the_end() -> None:
    told: list[tuple[str, str]] = []
    run = outcome(told)
    await run.take("stderr", b"early")
    await run.close_streams()
    assert told == [("stderr", "early")]


async def test_passing_the_output_limit_is_told_once_and_a_flood_is_reported() -> None:
    told: list[tuple[str, str]] = []
    run = outcome(told, output=4)
    await run.begin()
    assert not await run.take("stdout", b"12345")
    assert not await run.take("stdout", b"6")
    assert [kind for kind, _ in told] == ["started", "stdout", "limit"]
    assert await run.take("stdout", bytes(17 << 20))
    assert run.result(Ending(0)).truncated


async def test_half_a_character_is_told_when_the_stream_ends() -> None:
    told: list[tuple[str, str]] = []
    run = outcome(told)
    await run.take("stderr", "é".encode()[:1])
    await run.close_streams()
    assert told == [("stderr", "\ufffd")]


async def test_every_denial_is_an_event_and_the_first_are_in_the_result() -> None:
    told: list[tuple[str, str]] = []
    run = outcome(told)
    for number in range(DENIALS + 5):
        await run.deny(f"no {number}")
    assert len(told) == DENIALS + 5
    assert run.result(Ending(0)).denied == tuple(f"no {number}" for number in range(DENIALS))


async def test_a_callback_for_the_stop_is_called_once_and_at_once_if_it_comes_late() -> None:
    control, heard = Control(), list[str]()
    control.on_stop(lambda reason: heard.append(f"early {reason}"))
    control.stop(Status.KILLED)
    control.stop()
    control.on_stop(lambda reason: heard.append(f"late {reason}"))
    assert heard == ["early killed", "late killed"]
    assert await control.stopped() is Status.KILLED


@pytest.mark.parametrize("write", [True, False])
async def test_changes_to_a_copy_come_back_only_if_the_guest_may_write(tmp_path: Path, write: bool) -> None:
    (tmp_path / "old").write_text("old")
    inside: list[TreeNode] = []

    async def put(tree: Sequence[TreeNode]) -> None:
        inside.extend(tree)

    async def get() -> CopiedTree:
        return CopiedTree((TreeNode("new", "file", content=b"new"),), ("link: link",))

    granted = GrantedCopy(Workspace(path=str(tmp_path), write=write), 1000, put=put, get=get)
    await granted.copy_in()
    assert [node.path for node in inside] == ["old"]
    before = Result(status=Status.SUCCESS, denied=("a host",), left_out=("something",))
    result = await granted.finish(before)
    assert result.denied == ("a host",)
    assert sorted(path.name for path in tmp_path.iterdir()) == (["new"] if write else ["old"])
    assert result.left_out == (("something", "not copied back: link: link") if write else ("something",))
