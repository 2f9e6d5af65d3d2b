"""Keeps the figures of a program: each that `plt.show()` shows, and those that are open when it ends.

It is the `sitecustomize` of a program that imports matplotlib, so that Python loads it first; on wasm the worker does.
The pictures go into a folder below /tmp, from where the host takes them: the guest's claim, like all that it writes.
"""

import atexit
import os
import sys
import warnings
from importlib.util import find_spec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

PYPLOT = "matplotlib.pyplot"
MOST = 64  # as many as the host takes
FOLDER = os.environ.pop("BELLJAR_FIGURES", "")  # children of this process keep none
_kept = 0


def keep_open(*_args: object, **_options: object) -> None:
    """Saves every open figure as a PNG and closes it: what `show` does where there is no window."""
    global _kept
    pyplot = sys.modules.get(PYPLOT)
    for number in pyplot.get_fignums() if pyplot else ():
        if _kept < MOST:
            _kept += 1
            os.makedirs(FOLDER, exist_ok=True)
            pyplot.figure(number).savefig(f"{FOLDER}/{_kept:03d}.png", format="png", bbox_inches="tight")
    if pyplot:
        pyplot.close("all")


def keep_last() -> None:
    """At the end of the program: a picture that cannot be made is none, and no failure of the program."""
    try:
        keep_open()
    except Exception:
        return


def hook(pyplot: "ModuleType") -> None:
    """Makes `show` keep what is open; and so the end, before pyplot's own, which closes all figures."""
    pyplot.show = keep_open  # type: ignore[attr-defined]
    atexit.register(keep_last)


class PyplotFinder:
    """Waits for the import of pyplot, and hooks it when it is loaded."""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "ModuleSpec | None":
        if name != PYPLOT:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = find_spec(name)
        if spec and spec.loader:
            load = spec.loader.exec_module

            def load_and_hook(module: "ModuleType") -> None:
                load(module)
                hook(module)

            spec.loader.exec_module = load_and_hook  # type: ignore[method-assign]
        return spec


if FOLDER:
    warnings.filterwarnings("ignore", message=".*non-interactive.*")
    if PYPLOT in sys.modules:
        hook(sys.modules[PYPLOT])
    else:
        sys.meta_path.insert(0, PyplotFinder())  # type: ignore[arg-type]
