"""What a command needs of its own process: streams, the signals that end it, an event loop, an engine."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from belljar.engine.engine import Engine

T = TypeVar("T")
_OBJECTS_BETWEEN_COLLECTIONS = 50_000  # Python's 700 suit programs that make few of them
_BROKEN_PIPE_CODE = 141  # as a shell reports SIGPIPE


def mend_streams() -> None:
    """Replaces closed standard streams, and lets narrow ones print a substitute for what they cannot encode."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (for the life of the process)
        getattr(sys, name).reconfigure(errors="replace")


def end_on_signals() -> None:
    """Makes every signal that asks a process to end work like Ctrl-C: the event loop cancels, and cleans up."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's `&` leaves it: then none of them could end us
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in ending_signals():
        signal.signal(number, lambda number, frame: signal.raise_signal(signal.SIGINT))


def ending_signals() -> list[signal.Signals]:
    """The signals that mean "end", without those that are ignored, as a hangup is under nohup."""
    known = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    return [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]


def collect() -> None:
    """Lets the garbage collector work from now on, and leaves out what is there by now: imported modules stay."""
    gc.freeze()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    gc.enable()


def run_async(function: Callable[[], Awaitable[T]]) -> T:
    """Runs an async function to its end and returns its result.

    Raises:
        typer.Exit: with code 141 when nobody reads our output any more; Typer itself would exit with 1, a guest's code.
    """
    import anyio
    import typer

    collect()
    try:
        return anyio.run(function)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise typer.Exit(_BROKEN_PIPE_CODE) from None


def make_engine(*, probe: bool = False, project: Path | None = None) -> Engine:
    """Makes the engine of a short command: it goes by what an earlier command proved of this machine, since its boot.

    Args:
        probe: prove everything anew, and keep that for the next commands.
        project: the folder whose settings count, if not the current one.
    """
    from belljar.engine.engine import Engine
    from belljar.engine.probe_cache import ProbeCache
    from belljar.settings import load

    settings = load(project=None if project is None else project.absolute())
    return Engine(settings, probes=ProbeCache(Path(settings.cache_dir, "probes"), recalls=not probe))
