"""One server over HTTP: how a request is sent, how often it is sent again, and what its answer means."""

from __future__ import annotations

import json as json_codec
import random
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode
from weakref import WeakKeyDictionary

import anyio
import anyio.lowlevel

from belljar.client.address import CONNECT_SECONDS, Address
from belljar.client.connections import Connections, Question, Unanswered
from belljar.client.framing import Answer, Headers
from belljar.core import errors
from belljar.core.spelling import heard, respell

if TYPE_CHECKING:
    import httpx2

    from belljar.client.web_socket import WebSocket

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 5.0
MAX_RETRY_AFTER_SECONDS = 30.0  # that a server may ask us to wait; more is the caller's decision
_UNPACKING_SECONDS = 600.0  # that a server may take for what was sent piece by piece
_GATEWAYS = frozenset((502, 503, 504))


class Transport:
    """Sends requests to one server, and repeats those that got no answer."""

    def __init__(self, url: str, key: str | None, *, timeout: float, retries: int, insecure: bool) -> None:
        self._address = Address(url, key, insecure=insecure)
        if not timeout > 0 or not isinstance(retries, int) or retries < 0:
            raise errors.InvalidRequest("timeout must be positive, and retries a number that is not negative")
        self.url: str = self._address.url
        self.timeout: float = timeout
        self.retries: int = retries
        self._connections: WeakKeyDictionary[Any, Connections] = WeakKeyDictionary()  # by event loop
        self._streams: WeakKeyDictionary[Any, httpx2.AsyncClient] = WeakKeyDictionary()  # the same
        _require_library()

    @property
    def streams(self) -> httpx2.AsyncClient:
        """What opens streams (WebSocket, server-sent events) in this event loop."""
        loop = anyio.lowlevel.current_token().native_token
        if loop not in self._streams:
            self._streams[loop] = self._open_streams()
        return self._streams[loop]

    def _open_streams(self) -> httpx2.AsyncClient:
        import httpx2

        return httpx2.AsyncClient(
            base_url=self.url,
            headers=self._address.authorization,
            timeout=httpx2.Timeout(self.timeout, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=30.0),
            trust_env=not self._address.is_here,  # a proxy must not be asked for this machine
            verify=self._address.secure,  # without TLS there is nothing to load certificates for
        )

    async def aclose(self) -> None:
        """Closes the connections of this event loop; the next request opens new ones."""
        loop = anyio.lowlevel.current_token().native_token
        if connections := self._connections.pop(loop, None):
            await connections.close()
        if streams := self._streams.pop(loop, None):
            await streams.aclose()

    async def ask(self, method: str, path: str, *, again: bool | None = None, **options: Any) -> bytes:
        """Sends a request until it is answered, and returns the answer's body.

        Args:
            method: of HTTP.
            path: below the server's address.
            again: whether the request may be sent a second time when the server may have heard the first; unless
                given, that depends on the method.
            **options: of `once`.

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

    async def once(
        self, method: str, path: str, *, json: Any = None, content: bytes = b"",
        params: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None, read: float | None = None,
    ) -> bytes:  # fmt: skip
        """Sends a request once, and returns the body of its answer.

        Args:
            method: of HTTP.
            path: below the server's address.
            json: the body, which is sent as JSON.
            content: the body, which is sent as it is.
            params: of the query.
            headers: besides those that every request has.
            read: seconds to wait for the answer; the client's timeout unless given.

        Raises:
            BelljarError: what the server answered instead, or `Unanswered`.
        """
        sent: Headers = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        if json is not None:
            content = json_codec.dumps(json, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
            sent.append((b"Content-Type", b"application/json"))
        target = f"{path}?{urlencode(params, doseq=True)}" if params else path
        seconds = self.timeout if read is None else read
        answer = await self._of_this_loop().ask(Question(method, target, sent, content, seconds))
        if 200 <= answer.status < 300:
            return answer.content
        raise refusal(answer, self.url)

    # --- what is too large to be held, and what goes on ---

    @asynccontextmanager
    async def download(self, path: str, params: Mapping[str, Any]) -> AsyncIterator[AsyncIterator[bytes]]:
        """Gives the body of an answer piece by piece: `async with transport.download(path, {}) as pieces`.

        Raises:
            BelljarError: what the server answered instead, or `Unanswered`.
        """
        async with AsyncExitStack() as stack:
            response = await self._begun_download(stack, path, params)

            async def pieces() -> AsyncGenerator[bytes, None]:
                with self.translated_errors():
                    async for piece in response.aiter_raw():
                        yield piece

            yield await stack.enter_async_context(aclosing(pieces()))

    async def _begun_download(self, stack: AsyncExitStack, path: str, params: Mapping[str, Any]) -> httpx2.Response:
        for attempt in range(self.retries + 1):
            try:
                with self.translated_errors():
                    asking = self.streams.stream("GET", path, params=params, headers={"Accept-Encoding": "identity"})
                    response = await stack.enter_async_context(asking)
                    if not response.is_success:
                        content = await response.aread()
                        raise refusal(Answer(response.status_code, response.headers, content), self.url)
                    return response
            except Unanswered:
                if attempt == self.retries:
                    raise
                await self.pause(attempt)
        raise AssertionError("the last attempt returns or raises")

    async def upload(
        self, path: str, pieces: AsyncIterator[bytes], params: Mapping[str, Any], *, size: int | None = None
    ) -> None:
        """Sends a body piece by piece with PUT, once.

        Args:
            path: below the server's address.
            pieces: the body.
            params: of the query.
            size: its bytes, if they are known.

        Raises:
            BelljarError: what the server answered instead, or `Unanswered`.
        """
        import httpx2

        headers = {} if size is None else {"Content-Length": str(size)}
        timeout = httpx2.Timeout(self.timeout, read=_UNPACKING_SECONDS)
        with self.translated_errors():
            response = await self.streams.put(path, content=pieces, params=params, headers=headers, timeout=timeout)
        if not response.is_success:
            raise refusal(Answer(response.status_code, response.headers, response.content), self.url)

    async def web_socket(self, path: str, params: Mapping[str, Any]) -> WebSocket:
        """Opens a WebSocket, and tries again while there is no connection.

        Raises:
            BelljarError: what the server answered instead, or `Unanswered`.
        """
        from belljar.client.web_socket import Refused, open_web_socket

        refused: Answer | None = None
        for attempt in range(self.retries + 1):
            try:
                return await open_web_socket(self._address, path, params, self.timeout)
            except Refused as error:
                refused = error.answer
                break
            except Unanswered:
                if attempt == self.retries:
                    raise
                await self.pause(attempt)
        assert refused is not None
        raise refusal(refused, self.url)

    def _of_this_loop(self) -> Connections:
        loop = anyio.lowlevel.current_token().native_token
        if (found := self._connections.get(loop)) is None:
            found = self._connections[loop] = Connections(self._address, self.timeout)
        return found

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


def refusal(answer: Answer, url: str) -> errors.BelljarError:
    """Returns a refusal of the server as the exception that the library would have raised."""
    try:
        told = json_codec.loads(answer.content)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict) or not isinstance(told.get("kind"), str):
        return _foreign(answer, url)
    message, context = str(told.get("detail", "")), told.get("context")
    context = context if isinstance(context, dict) else {}
    if told["kind"] == errors.Busy.kind:
        after = _seconds(answer.headers) or _number(context.get("retry_after")) or 1.0
        return errors.Busy(
            message, retry_after=after, status=answer.status, fix=respell(str(told.get("fix", "")), "python")
        )
    return heard({**told, "message": message, "context": context}, answer.status)


def _foreign(answer: Answer, url: str) -> errors.BelljarError:
    """Returns the error for an answer that is not Belljar's: a proxy's in between, or another server's."""
    status = answer.status
    if 300 <= status < 400:
        there = answer.headers.get("location", "elsewhere")[:200]
        return errors.NotAvailable(f"{url} sends us to {there!r}", fix="give that address, if you trust it")
    if status in _GATEWAYS:
        if (after := _seconds(answer.headers)) is not None:
            return errors.Busy(f"{url} answered {status}", retry_after=after, status=503)
        return Unanswered(f"{url} answered {status}", sent=True, fix="the server behind it does not answer")
    return errors.NotAvailable(f"{url} answered {status}, and not as Belljar does", fix="is this its address?")


def _seconds(headers: Mapping[str, str]) -> float | None:
    return _number(headers.get("retry-after"))


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if 0 <= number < 1e9 else None


def _text_of(error: Exception) -> str:
    return str(error) or type(error).__name__


def _require_library() -> None:
    """Says at once if the HTTP library is missing; it is imported on first use only."""
    for name in ("httptools", "httpx2", "wsproto"):
        if find_spec(name) is None:
            raise errors.NotAvailable(
                f"the client needs a package that is not installed: {name}", fix="pip install 'belljar-sandbox[client]'"
            )
