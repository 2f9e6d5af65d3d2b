"""A thread that runs soon after it wakes: what the kernel says of it, and that no child inherits it."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Callable
from typing import Any

import pytest

from belljar.host import scheduling, syscalls


def slice_here() -> int:
    found = ctypes.create_string_buffer(scheduling._ATTRIBUTES.size)
    syscalls.call(scheduling._NUMBERS[platform.machine()][1], 0, found, len(found), 0)
    return int(scheduling._ATTRIBUTES.unpack(found.raw)[5])


def in_a_thread(function: Callable[[], Any]) -> Any:  # the thread of the tests stays as it is
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(function()))
    thread.start()
    thread.join()
    return answers[0]


@pytest.mark.skipif(
    tuple(int(part) for part in platform.release().split(".")[:2]) < (6, 12),
    reason="NOT SHOWN: kernels before 6.12 have no slices of a thread's own",
)
def test_a_thread_has_short_slices_and_its_children_do_not() -> None:
    def tried() -> tuple[bool, int, int]:
        taken = scheduling.run_soon_after_waking()
        child = os.fork()
        if not child:
            os._exit(int(slice_here() == scheduling.SLICE_NANOSECONDS))
        return taken, slice_here(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert in_a_thread(tried) == (True, scheduling.SLICE_NANOSECONDS, 0)


def test_a_machine_that_is_not_known_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "pdp11")
    assert scheduling.run_soon_after_waking() is False
