"""One server over HTTP: its address, its key, and how often a broken connection is tried again.

A key goes over TLS or to this machine, never in the clear through a network. It is in no repr and no message.
"""

from __future__ import annotations

import ipaddress
import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import anyio
import anyio.lowlevel
from pydantic import SecretStr

from belljar.core import errors

if TYPE_CHECKING:
    import httpx2

CONNECT_SECONDS = 5.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 5.0
MAX_RETRY_AFTER_SECONDS = 30.0  # that a server may ask us to wait; more is the caller's decision
_GATEWAYS = frozenset((502, 503, 504))


class Unanswered(errors.NotAvailable):
    """The connection broke before there was an answer. `sent`: the server may have heard the question."""

    def __init__(self, message: str, *, sent: bool, fix: str = "") -> None:
        super().__init__(message, fix=fix or "is it running, and is this its address?")
        self.sent: bool = sent


class Transport:
    """Sends requests to one server, and repeats those that got no answer."""

    def __init__(self, url: str, key: str | None, *, timeout: float, retries: int, insecure: bool) -> None:
        self.url: str = _checked(url, key, insecure)
        if not timeout > 0 or not isinstance(retries, int) or retries < 0:
            raise errors.InvalidRequest("timeout must be positive, and retries a number that is not negative")
        self.timeout: float = timeout
        self.retries: int = retries
        self._key = SecretStr(key or "")
        self._pools: WeakKeyDictionary[Any, httpx2.AsyncClient] = WeakKeyDictionary()
        _require_library()

    @property
    def pool(self) -> httpx2.AsyncClient:
        """The connections of this event loop: those of another one are of no use here."""
        loop = anyio.lowlevel.current_token().native_token
        if loop not in self._pools:
            self._pools[loop] = self._open()
        return self._pools[loop]

    def _open(self) -> httpx2.AsyncClient:
        import httpx2

        secret, here = self._key.get_secret_value(), _is_here(urlsplit(self.url).hostname or "")
        return httpx2.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {secret}"} if secret else {},
            timeout=httpx2.Timeout(self.timeout, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=30.0),
            trust_env=not here,  # a proxy must not be asked for this machine
            verify=urlsplit(self.url).scheme != "http",  # without TLS there is nothing to load certificates for
        )

    async def aclose(self) -> None:
        """Closes the connections of this event loop; the next request opens new ones."""
        if pool := self._pools.pop(anyio.lowlevel.current_token().native_token, None):
            await pool.aclose()

    async def ask(self, method: str, path: str, *, again: bool | None = None, **options: Any) -> bytes:
        """Sends a request until it is answered, and returns the answer's body.

        Args:
            method: of HTTP.
            path: below the server's address.
            again: whether the request may be sent a second time when the server may have heard the first; unless
                given, that depends on the method.
            **options: of `once` and of the HTTP library.

        Raises:
            BelljarError: what the server answered instead, or `Unanswered`.
        """
        again = method in ("GET", "PUT", "DELETE") if again is None else again
        for attempt in range(self.retries + 1):
            last = attempt == self.retries
            try:
                return await self.once(method, path, **options)
            except Unanswered as error:
                if last or (error.sent and not again):
                    raise
                await self.pause(attempt)
            except errors.Busy as error:
                if last or error.http_status != 503 or error.retry_after > MAX_RETRY_AFTER_SECONDS:
                    raise
                await anyio.sleep(error.retry_after)
        raise AssertionError("the last attempt returns or raises")

    async def once(self, method: str, path: str, *, read: float | None = None, **options: Any) -> bytes:
        """Sends a request once, and returns the answer's body; `read`: seconds to wait for it."""
        import httpx2

        if read is not None:
            options["timeout"] = httpx2.Timeout(self.timeout, connect=CONNECT_SECONDS, read=read)
        with self.translated_errors():
            response = await self.pool.request(method, path, **options)
        if response.is_success:
            return response.content
        raise refusal(response, self.url)

    @contextmanager
    def translated_errors(self) -> Iterator[None]:
        """Raises the HTTP library's errors as ours: its own hold the request, and so the key."""
        import httpx2

        broken: errors.BelljarError | None = None
        try:
            yield
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError) as error:
            broken = Unanswered(f"no connection to {self.url}: {_text_of(error)}", sent=False)
        except httpx2.TransportError as error:
            broken = Unanswered(f"{self.url} did not answer: {_text_of(error)}", sent=True)
        except httpx2.DecodingError as error:
            broken = errors.NotAvailable(f"{self.url} answered what nobody can read: {_text_of(error)}")
        if broken:
            raise broken from None

    async def pause(self, attempt: int) -> None:
        """Sleeps before the next attempt: longer each time, and not in step with other clients."""
        longest = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2 ** min(attempt, 10))
        await anyio.sleep(longest * random.uniform(0.5, 1))


def refusal(response: httpx2.Response, url: str) -> errors.BelljarError:
    """Returns a refusal of the server as the exception that the library would have raised."""
    try:
        told = json.loads(response.content)
    except (ValueError, RecursionError):
        told = None
    status = response.status_code
    if not isinstance(told, dict) or not isinstance(told.get("kind"), str):
        return _foreign(response, url)
    message, context = str(told.get("detail", "")), told.get("context")
    context = context if isinstance(context, dict) else {}
    if told["kind"] == errors.Busy.kind:
        after = _seconds(response.headers) or _number(context.get("retry_after")) or 1.0
        return errors.Busy(message, retry_after=after, status=status, fix=str(told.get("fix", "")))
    return errors.from_dict({**told, "message": message, "context": context}, status)


def _foreign(response: httpx2.Response, url: str) -> errors.BelljarError:
    """Returns the error for an answer that is not Belljar's: a proxy's in between, or another server's."""
    status = response.status_code
    if response.is_redirect:
        there = response.headers.get("location", "elsewhere")[:200]
        return errors.NotAvailable(f"{url} sends us to {there!r}", fix="give that address, if you trust it")
    if status in _GATEWAYS:
        if (after := _seconds(response.headers)) is not None:
            return errors.Busy(f"{url} answered {status}", retry_after=after, status=503)
        return Unanswered(f"{url} answered {status}", sent=True, fix="the server behind it does not answer")
    return errors.NotAvailable(f"{url} answered {status}, and not as Belljar does", fix="is this its address?")


def _seconds(headers: Mapping[str, str]) -> float | None:
    return _number(headers.get("Retry-After"))


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if 0 <= number < 1e9 else None


def _text_of(error: Exception) -> str:
    return str(error) or type(error).__name__


def _checked(url: str, key: str | None, insecure: bool) -> str:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
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
    return url.rstrip("/")


def _is_here(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _require_library() -> None:
    """Says at once if the HTTP library is missing; it is imported on first use only."""
    for name in ("httpx2", "wsproto"):
        if find_spec(name) is None:
            raise errors.NotAvailable(
                f"the client needs a package that is not installed: {name}", fix="pip install 'belljar[client]'"
            )
