"""Spares a command what libraries do at each start and it does not need: all we know of their inner parts is here.

A library that turns out to be different does as it does for everybody.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any, NoReturn, TypeVar

C = TypeVar("C")
_PLUGIN_LOADER = "pydantic.plugin._loader"


def skip_plugins() -> None:
    """Has pydantic look for no plugins, unless the user said which: to look for them costs more than a sandbox."""
    if os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__") == "__all__" and _PLUGIN_LOADER not in sys.modules:
        empty = ModuleType(_PLUGIN_LOADER)  # its own imports the readers of packages' metadata, and that of mail
        vars(empty)["get_plugins"] = tuple
        sys.modules[_PLUGIN_LOADER] = empty


def leave(code: int) -> NoReturn:
    """Ends the process as `sys.exit` does, but for taking apart all that was imported, which takes 7 ms."""
    run_exit_functions, end_threads = getattr(atexit, "_run_exitfuncs", None), getattr(threading, "_shutdown", None)
    if run_exit_functions and end_threads:
        end_threads()
        run_exit_functions()
        with suppress(OSError, ValueError):  # nobody reads any more: Python has an exit code for that
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    raise SystemExit(code)


class PlainValue:
    """Reads one parameter: what was not given and what is text by itself, anything else as Typer does.

    Typer makes a validator of pydantic's for each parameter of a command, given or not.
    """

    def __init__(self, typers: Any) -> None:
        """Takes the function that returns Typer's own reader."""
        self._typers = typers

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        several = param.multiple or param.nargs == -1
        if value is None:
            return () if several else None
        kind = param.type_descriptor.annotation
        if kind is str and type(value) is str and not several:
            return value
        if kind == list[str] and type(value) in (list, tuple) and all(type(word) is str for word in value):
            return list(value)
        return self._typers().coerce(value, param=param, ctx=ctx)


def lighten(command: C) -> C:
    """Has the parameters of a command, and of those in its group, read by `PlainValue`; returns the command."""
    if hasattr(command, "get_params"):
        command.get_params = partial(lightened, command.get_params)  # among which is --help, made when it is asked for
    for inner in getattr(command, "commands", {}).values():
        lighten(inner)
    return command


def lightened(get_params: Callable[[Any], list[Any]], context: Any) -> list[Any]:
    """Returns a command's parameters, as `get_params` gives them, read by `PlainValue`."""
    params = get_params(context)
    for param in params:
        typed = getattr(getattr(param, "type_descriptor", None), "parameter_info", None)
        typers = getattr(param, "get_runtime_param", None)
        if typers and typed is not None and typed.parser is None and not isinstance(typers, partial):
            param.get_runtime_param = partial(PlainValue, typers)
    return params
