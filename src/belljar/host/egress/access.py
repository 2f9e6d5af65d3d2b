"""What one sandbox may reach now. It can be changed: open connections that are no longer allowed are cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import anyio

from belljar.core.addresses import HTTPS_PORT, Endpoint
from belljar.core.request import Egress
from belljar.core.settings import TlsRule
from belljar.host.egress.judgement import EgressDecision, Resolve, judge, resolve


class Outside(NamedTuple):
    """What the administrator says of the way out, whoever goes it."""

    resolver: Resolve = resolve
    private: Sequence[Endpoint] = ()  # addresses of private networks that names may lead to
    tls: TlsRule = "strict"  # what a connection must begin with


USUAL = Outside()


class _Open(NamedTuple):
    target: bytes
    plain: bool
    scope: anyio.CancelScope


class NetworkAccess:
    """What one sandbox may reach, and the connections that it has."""

    def __init__(self, allowed: Egress, outside: Outside = USUAL) -> None:
        self.allowed: Egress = allowed
        self.outside: Outside = outside
        self._ports = frozenset((HTTPS_PORT, *(one.port for one in outside.private)))
        self._open: set[_Open] = set()

    @property
    def proxied(self) -> bool:
        """Whether there is a proxy to be asked."""
        return self.allowed.mode != "none"

    def judge(self, target: bytes, *, plain: bool = False) -> EgressDecision:
        """Decides on a target by its name, as things are now."""
        return judge(target, self.allowed, self._ports, plain=plain)

    @contextmanager
    def connection(self, target: bytes, *, plain: bool = False) -> Iterator[anyio.CancelScope]:
        """Runs a block for one connection; it is cancelled when the connection is no longer allowed."""
        with anyio.CancelScope() as scope:
            one = _Open(target, plain, scope)
            self._open.add(one)
            try:
                yield scope
            finally:
                self._open.discard(one)

    def change(self, allowed: Egress) -> None:
        """Puts something else in force, and cuts the connections that it does not allow."""
        self.allowed = allowed
        for one in tuple(self._open):
            if self.judge(one.target, plain=one.plain).objection:
                one.scope.cancel()
