"""How callers hear of a run and stop it: callbacks, and a handle to cancel."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from belljar.control.control import Control
from belljar.core.result import Event
from belljar.host.loops import in_this_loop

Listener = Callable[[Event], Awaitable[None] | None]
OutputCallback = Callable[[str], Any]


async def notify(listener: Listener | None, event: Event) -> None:
    """Calls a listener with an event, and awaits it if it is async."""
    if listener is not None and inspect.isawaitable(answer := listener(event)):
        await answer


class Cancel:
    """Stops a run from any thread or task: the run then returns, `aborted`, with its partial output.

    Attributes:
        cancelled: whether `cancel` was called.
    """

    def __init__(self) -> None:
        self.cancelled: bool = False
        self._hooks: list[Callable[[], None]] = []

    def cancel(self) -> None:
        """Ends the guest of every run that was given this handle, and everything it started."""
        self.cancelled = True
        for hook in self._hooks:
            hook()

    def attach(self, control: Control) -> None:
        """Stops this control too when it is cancelled. To be called in the run's event loop."""
        self._hooks.append(in_this_loop(control.stop))
        if self.cancelled:
            control.stop()


def control_for(cancel: Cancel | None) -> Control:
    """Returns a new control, which `cancel` stops if it is given."""
    control = Control()
    if cancel is not None:
        cancel.attach(control)
    return control


def listening(
    on_event: Listener | None, on_stdout: OutputCallback | None, on_stderr: OutputCallback | None
) -> Listener | None:
    """Makes one listener of the three callbacks; each may be a plain function or an async one."""
    by_kind = {kind: call for kind, call in (("stdout", on_stdout), ("stderr", on_stderr)) if call}
    if not by_kind:
        return on_event

    async def hear(event: Event) -> None:
        for call, value in ((by_kind.get(event.kind), event.text), (on_event, event)):
            if call is not None and inspect.isawaitable(answer := call(value)):  # type: ignore[arg-type]
                await answer

    return hear
