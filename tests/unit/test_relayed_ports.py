"""Connections that a program in a container holds: what it says of an error is the guest's word, perhaps."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, cast

import pytest

from belljar.backends.containers.living.by_programs import RelayedStream

pytestmark = pytest.mark.anyio


class Saying:
    """Streams on which a program says one thing."""

    def __init__(self, said: bytes) -> None:
        self._said = said

    async def parts(self) -> AsyncIterator[tuple[str, bytes]]:
        yield "stdout", self._said


@pytest.mark.parametrize(("said", "number"), [(b"111\n", errno.ECONNREFUSED), (b"99999999999999\n", errno.EIO)])
async def test_whatever_number_it_says_an_error_of_the_system_is_raised(said: bytes, number: int) -> None:
    with pytest.raises(OSError) as raised:
        await RelayedStream(cast(Any, Saying(said)), AsyncExitStack()).begin()
    assert raised.value.errno == number
