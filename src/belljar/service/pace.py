"""How fast runs may print, all of them together: who floods waits, and not who asks beside them."""

from __future__ import annotations

import anyio

from belljar.core.values import MIB

_FREE_BYTES = MIB  # of each run: what prints less never waits
_BYTES_A_SECOND = 16 * MIB  # that all runs print beyond that


class OutputPace:
    """Lets large outputs pass at a bounded rate; a guest that prints faster waits at its pipe, and takes no CPU."""

    def __init__(self) -> None:
        self._free_at = 0.0  # by the clock of the event loop

    async def passed(self, size: int, printed: int) -> None:
        """Returns when the next piece of a run may be read.

        Args:
            size: bytes of the piece that it has just printed.
            printed: bytes that it has printed by now.
        """
        if printed > _FREE_BYTES:
            self._free_at = max(self._free_at, anyio.current_time()) + size / _BYTES_A_SECOND
            await anyio.sleep_until(self._free_at)
