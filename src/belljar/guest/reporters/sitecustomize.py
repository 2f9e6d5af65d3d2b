"""Starts with each Python of a test run: has unittest's runner write what each test came to, once it is imported.

The project's or the system's own sitecustomize, which this one hides, is started afterwards.
"""

import contextlib
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


class _RunnerFinder:
    """Finds unittest.runner as ever, and mends it when it was imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "unittest.runner":
            return None
        sys.meta_path.remove(self)
        import importlib.util

        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            import belljar_unittest

            belljar_unittest.mend(module)

        spec.loader.exec_module = exec_module
        return spec


def _next():
    """Starts the sitecustomize that would have been found without this one."""
    import importlib.machinery

    places = [place for place in sys.path if os.path.abspath(place or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", places)
    if spec is not None and spec.loader is not None:
        import importlib.util

        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("BELLJAR_UNITTEST_OUT"):
    sys.meta_path.insert(0, _RunnerFinder())
with contextlib.suppress(ImportError):
    _next()
