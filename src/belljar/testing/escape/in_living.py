"""The same attacks once more, made by commands of living sandboxes: each joins a machine through walls of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from belljar.testing.escape.attacks import Attack

_SHOWN = "the attack of the same name without the living sandbox is shown to get through"
_NO_COMMANDS = {"session frames"}  # what they are about is no command of a sandbox


def in_living_sandboxes(attacks: Iterable[Attack]) -> tuple[Attack, ...]:
    """Returns those attacks that a command of a living sandbox can make, under other names.

    Args:
        attacks: such as `ATTACKS`; of WebAssembly's own and of those that are made in living sandboxes anyway, nothing.
    """
    return tuple(
        replace(one, name=f"{one.name}, living", living=True, control="none", uncontrolled=_SHOWN)
        for one in attacks
        if not one.living and one.category != "wasm" and one.name not in _NO_COMMANDS
    )
