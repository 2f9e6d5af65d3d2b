"""Where `/api` of a preview leads: to one address that a person named, and to nothing else."""

from __future__ import annotations

import ipaddress
import re
import socket
import ssl
from contextlib import suppress
from typing import NamedTuple, Self
from urllib.parse import urlsplit

import anyio
from anyio.abc import ByteStream

from belljar.core import errors
from belljar.core.addresses import why_not_public

_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?|[0-9a-fA-F:.]{2,45}")
# Of this machine and its networks a person may name what they like; of the rest, only what is public.
_NAMED_ON_PURPOSE = frozenset(("", "this machine's loopback", "a private network", "a provider's private network"))
_FIX = "write http://HOST:PORT, or https://HOST"


class ApiBackend(NamedTuple):
    """The address of a program that answers `/api` in place of a preview's own server."""

    scheme: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads an address such as `http://127.0.0.1:9000`.

        Raises:
            InvalidRequest: it is none, or says more than a scheme, a host and a port.
        """
        try:
            parts = urlsplit(text.strip())
            host, port = (parts.hostname or "").removesuffix("."), parts.port
        except ValueError:
            raise errors.InvalidRequest(f"api: {text[:80]!r} is no address", fix=_FIX) from None
        more = parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None
        if parts.scheme not in ("http", "https") or not _HOST.fullmatch(host) or more or port == 0:
            raise errors.InvalidRequest(f"api: {text[:80]!r} is no address of a backend", fix=_FIX)
        return cls(parts.scheme, host.lower(), port or (443 if parts.scheme == "https" else 80))

    @property
    def netloc(self) -> str:
        """Its host and port, as it is asked."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = 443 if self.scheme == "https" else 80
        return host if self.port == usual else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """Its address, in one form."""
        return f"{self.scheme}://{self.netloc}"

    async def connect(self, own_port: int | None, seconds: float) -> ByteStream:
        """Connects to it: to an address that was looked at, not to a name that may lead elsewhere by then.

        Args:
            own_port: of this Belljar's own service, to which no preview is led.
            seconds: for each attempt.

        Raises:
            PolicyDenied: it leads to Belljar itself, to a cloud's metadata, or to what is no machine.
            OSError: nobody answers there.
        """
        found = await anyio.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))
        for address in addresses:
            self._check(address, own_port)
        problem: OSError = ConnectionRefusedError(f"nobody answers at {self.url}")
        for address in addresses:
            try:
                with anyio.fail_after(seconds):
                    return await self._connected(address)
            except (OSError, TimeoutError) as error:
                problem = error
        raise problem

    async def _connected(self, address: str) -> ByteStream:
        if self.scheme == "http":
            return await anyio.connect_tcp(address, self.port)
        secure = ssl.create_default_context()
        return await anyio.connect_tcp(
            address, self.port, tls=True, ssl_context=secure, tls_hostname=self.host, tls_standard_compatible=False
        )

    def _check(self, address: str, own_port: int | None) -> None:
        what = why_not_public(address.partition("%")[0])
        if what not in _NAMED_ON_PURPOSE:
            raise errors.PolicyDenied(f"api: {self.url} leads to {address}, which is {what}", fix="name another one")
        if self.port == own_port and (what == "this machine's loopback" or _is_own(address)):
            raise errors.PolicyDenied(f"api: {self.url} is Belljar itself", fix="name another one")


def _is_own(address: str) -> bool:
    """Whether an address is one of this machine's: only then a socket can be bound to it."""
    family = socket.AF_INET6 if ipaddress.ip_address(address.partition("%")[0]).version == 6 else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((address, 0))
        return True
    return False
