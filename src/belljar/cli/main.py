"""The entry point of `belljar`: runs the command that was typed, and turns failures into exit codes.

the guest's own code, or   124 timeout   137 out of memory   125 Belljar's own failure   126 refused   130 Ctrl-C

Imports stand inside the functions: the collector rests before the first of them.
"""

from __future__ import annotations

import gc
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from belljar.core.errors import BelljarError


def main() -> NoReturn:
    """Runs the command that was typed. A failure of ours ends in a sentence and an exit code, never in a traceback."""
    gc.disable()  # until `process.collect`: what is imported stays, and to look at it again and again costs 20 ms
    from belljar.cli import code_cache, lean, process

    lean.skip_plugins()
    codes = code_cache.usual()
    codes.serve()
    process.mend_streams()
    process.end_on_signals()
    try:
        code = _call()
    except KeyboardInterrupt:
        code = 130
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is left is to leave
    codes.keep()
    lean.leave(code)


def _call() -> int:
    import typer

    from belljar.cli import commands, remote
    from belljar.core import errors

    try:
        return int(commands.app(standalone_mode=False) or 0)
    except typer.Exit as stop:
        return stop.exit_code
    except typer.TyperException as error:
        if getattr(error, "option_name", "") == "--server":
            _fail(refused := remote.refusal(commands.typed()))
            return refused.exit_code
        _fail(errors.InvalidRequest(str(error), fix="belljar --help")) if _wants_json() else error.show()  # type: ignore[attr-defined]
    except errors.BelljarError as error:
        _fail(error)
        return error.exit_code
    except typer.Abort:
        return 130
    except Exception as error:
        fix = "this looks like a bug of Belljar: please report it with the command you typed"
        _fail(errors.ExecutionFailed(f"{type(error).__name__}: {error}", fix=fix))
    return errors.BelljarError.exit_code


def _fail(error: BelljarError) -> None:
    from belljar.cli import terminal

    with suppress(OSError):  # nobody may be there to be told
        terminal.print_json({"error": error.as_dict()}) if _wants_json() else terminal.problem(error)


def _wants_json() -> bool:
    words = sys.argv[1:]
    return "--json" in (words[: words.index("--")] if "--" in words else words)
