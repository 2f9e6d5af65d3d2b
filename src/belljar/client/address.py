"""The address of a server, and how a stream to it is opened: over TLS, or through the proxy of the environment.

A key goes over TLS or to this machine, never in the clear through a network. It is in no repr and no message.
"""

from __future__ import annotations

import ipaddress
from base64 import b64encode
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urlsplit

import anyio
import anyio.abc
import h11

from belljar.client.framing import Headers, lines_of
from belljar.core import errors
from belljar.core.version import __version__

if TYPE_CHECKING:
    from ssl import SSLContext

CONNECT_SECONDS = 5.0
_PORTS = {"http": 80, "https": 443}
_MAX_PROXY_ANSWER_BYTES = 64 * 1024


class Address:
    """A server's address with the key for it."""

    def __init__(self, url: str, key: str | None, *, insecure: bool) -> None:
        """Checks both.

        Raises:
            InvalidRequest: that is no address or no key.
            PolicyDenied: the key would travel in the clear.
        """
        parts = _checked(url, key, insecure)
        self.url: str = url.rstrip("/")
        self.host: str = parts.hostname or ""
        self.port: int = parts.port or _PORTS[parts.scheme]
        self.secure: bool = parts.scheme == "https"
        self.is_here: bool = _is_here(self.host)  # and no proxy must be asked for it
        self._path = parts.path.rstrip("/")
        self._authority = self.host if self.host.isascii() else self.host.encode("idna").decode()
        self._authority = f"[{self._authority}]" if ":" in self._authority else self._authority
        self._key = key or ""

    @property
    def authorization(self) -> dict[str, str]:
        """The header that carries the key, if there is one."""
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    @cached_property
    def headers(self) -> Headers:
        """The headers of each request."""
        default = self.port == _PORTS["https" if self.secure else "http"]
        said = {"Host": self._authority if default else f"{self._authority}:{self.port}", "User-Agent": _AGENT}
        said |= {"Accept": "*/*", **self.authorization}
        if self.proxy and not self.secure:
            said |= _credentials(self.proxy)
        return [(name.encode(), value.encode()) for name, value in said.items()]

    @cached_property
    def lines(self) -> bytes:
        """The same as they are sent."""
        return lines_of(self.headers)

    def target(self, path: str) -> str:
        """Returns what a request names: a path, or to a proxy that passes requests on, the whole address."""
        if self.proxy and not self.secure:
            return f"http://{self._authority}:{self.port}{self._path}{path}"
        return self._path + path

    @property
    def authority(self) -> str:
        """The host and the port, as a proxy is asked for them."""
        return f"{self._authority}:{self.port}"

    @cached_property
    def proxy(self) -> SplitResult | None:
        """The proxy that the environment names for this server (HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, NO_PROXY)."""
        if self.is_here:
            return None
        from urllib.request import getproxies, proxy_bypass

        known = getproxies()
        named = known.get("https" if self.secure else "http") or known.get("all")
        if not named or proxy_bypass(self.host):
            return None
        parts = urlsplit(named if "://" in named else f"http://{named}")
        if parts.scheme not in _PORTS or not parts.hostname:
            raise errors.NotAvailable(
                f"a proxy of the kind {parts.scheme} cannot be used", fix="name one whose address is http://host:port"
            )
        return parts


_AGENT = f"belljar/{__version__}"


async def open_stream(address: Address) -> anyio.abc.ByteStream:
    """Opens a stream to a server, or to the proxy that passes requests on to it.

    Raises:
        OSError: there is no connection; `ssl.SSLError` is one.
        EndOfStream, BrokenResourceError: it broke while it was opened.
    """
    proxy = address.proxy
    with anyio.fail_after(CONNECT_SECONDS):
        if proxy is None:
            stream: anyio.abc.ByteStream = await anyio.connect_tcp(address.host, address.port)
        else:
            stream = await anyio.connect_tcp(proxy.hostname or "", proxy.port or _PORTS[proxy.scheme])
        try:
            if proxy is not None and proxy.scheme == "https":
                stream = await _encrypted(stream, proxy.hostname or "")
            if proxy is not None and address.secure:
                await _tunnel(stream, address, proxy)
            return await _encrypted(stream, address.host) if address.secure else stream
        except BaseException:
            with anyio.CancelScope(shield=True), suppress(OSError):
                await anyio.aclose_forcefully(stream)
            raise


async def _encrypted(stream: anyio.abc.ByteStream, host: str) -> anyio.abc.ByteStream:
    from anyio.streams.tls import TLSStream

    return await TLSStream.wrap(stream, hostname=host, ssl_context=_certificates(), standard_compatible=False)


def _certificates() -> SSLContext:
    """Returns the authorities that are trusted: those of the HTTP library, SSL_CERT_FILE and SSL_CERT_DIR."""
    import httpx2

    return httpx2.create_ssl_context()


async def _tunnel(stream: anyio.abc.ByteStream, address: Address, proxy: SplitResult) -> None:
    """Has a proxy connect the stream to the server."""
    http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_PROXY_ANSWER_BYTES)
    headers = {"Host": address.authority, "User-Agent": _AGENT} | _credentials(proxy)
    asked = h11.Request(method="CONNECT", target=address.authority, headers=list(headers.items()))
    await stream.send((http.send(asked) or b"") + (http.send(h11.EndOfMessage()) or b""))
    while (event := http.next_event()) is h11.NEED_DATA or isinstance(event, h11.InformationalResponse):
        if event is h11.NEED_DATA:
            http.receive_data(await stream.receive())
    status = event.status_code if isinstance(event, h11.Response) else 0
    if not 200 <= status < 300:
        raise OSError(f"the proxy {proxy.hostname} answered {status}")


def _credentials(proxy: SplitResult) -> dict[str, str]:
    if not proxy.username:
        return {}
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": f"Basic {b64encode(pair.encode()).decode()}"}


def _checked(url: str, key: str | None, insecure: bool) -> SplitResult:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or parts.scheme not in _PORTS or parts.query or parts.fragment or not parts.path.isascii():
        raise errors.InvalidRequest("url: is not the address of a server", fix="write http://127.0.0.1:8080")
    if parts.username is not None or parts.password is not None:
        raise errors.InvalidRequest("url: must hold no password", fix="give the key as `key`")
    if key is not None and (not key or not key.isascii() or any(c <= " " or c == "\x7f" for c in key)):
        raise errors.InvalidRequest("key: is not one", fix="give it whole: bj_<id>_<secret>")
    if key and parts.scheme == "http" and not insecure and not _is_here(host):
        raise errors.PolicyDenied(
            f"a key would travel in the clear to {host}",
            fix="use https://, or insecure=True (--insecure) in a network you trust",
        )
    return parts


def _is_here(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
