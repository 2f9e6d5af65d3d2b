"""Lets aiohttp go by the proxy that the environment names, as all others do: it asks to be told so, session by session.

It is a part of the `sitecustomize` of a program that was granted hosts, and does nothing but for that one module.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.util import find_spec

_CLIENT = "aiohttp.client"


class _TrustEnvironment(MetaPathFinder, Loader):
    """Finds the module once, as it would be found, and changes one default of it."""

    def __init__(self) -> None:
        self._loader = None

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname != _CLIENT:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):  # type: ignore[no-untyped-def]
        return self._loader.create_module(spec)

    def exec_module(self, module):  # type: ignore[no-untyped-def]
        self._loader.exec_module(module)
        defaults = module.ClientSession.__init__.__kwdefaults__
        if defaults and "trust_env" in defaults:
            defaults["trust_env"] = True


sys.meta_path.insert(0, _TrustEnvironment())
