"""What the proxy of previews changes in the headers of requests and answers. Pure: no I/O.

A server inside believes that it is asked as `localhost:PORT`, from pages of its own. What it answers is made to stay
inside: redirects to itself, cookies for itself alone, and nothing by which it could speak for another origin.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

Headers = list[tuple[bytes, bytes]]

LOCAL_NAMES = frozenset(("localhost", "127.0.0.1", "::1", "0.0.0.0"))  # noqa: S104  (as servers call themselves)
_HOP_BY_HOP = frozenset((
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
    b"trailer", b"transfer-encoding", b"upgrade", b"http2-settings",
))  # fmt: skip
# Who asks and how it came is nobody's business inside; what is right of it is put there by us.
_OF_OTHER_PROXIES = frozenset((
    b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-forwarded-port",
    b"x-forwarded-prefix", b"x-forwarded-server", b"x-real-ip", b"via", b"cf-connecting-ip", b"true-client-ip",
))  # fmt: skip
_NOT_ASKED = _HOP_BY_HOP | _OF_OTHER_PROXIES | {b"host", b"expect"}
# Each would count for more than the preview itself: another path, another port, another day.
_NOT_ANSWERED = _HOP_BY_HOP | {
    b"service-worker-allowed", b"strict-transport-security", b"alt-svc", b"public-key-pins", b"set-cookie2",
    b"report-to", b"reporting-endpoints", b"nel", b"date", b"origin-agent-cluster",
}  # fmt: skip
_NOT_WITHOUT_ORIGIN = frozenset((
    b"set-cookie", b"clear-site-data", b"www-authenticate", b"cross-origin-resource-policy",
    b"cross-origin-opener-policy", b"cross-origin-embedder-policy", b"access-control-allow-origin",
    b"access-control-allow-credentials",
    b"access-control-allow-methods", b"access-control-allow-headers", b"access-control-expose-headers",
))  # fmt: skip
_ELSEWHERE = (b"location", b"content-location")
_KEY = re.compile(rb"bj_[0-9a-f]{12}_")  # how a key of Belljar begins
_OURS = frozenset((b"authorization", b"x-api-key"))  # headers in which Belljar takes a credential
_SANDBOX = "sandbox allow-scripts allow-forms allow-modals allow-popups allow-downloads allow-pointer-lock"
_ANYBODY: Headers = [
    (b"access-control-allow-origin", b"*"),
    (b"access-control-allow-methods", b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"),
    (b"access-control-allow-headers", b"*"),
    (b"access-control-expose-headers", b"*"),
    (b"cross-origin-resource-policy", b"cross-origin"),
]


class SeenFrom(NamedTuple):
    """How a preview is seen from outside, and what its server is told.

    Attributes:
        origin: its scheme, host and port, such as "http://x.localhost:8080".
        prefix: before each path, where it shares its origin with others; empty: the origin is its own.
        port: of its server.
        frames: origins whose pages may show it in a frame, besides its own.
        withholds: whether the credential of this request is Belljar's, and so is not sent on.
    """

    origin: str
    prefix: str
    port: int
    frames: tuple[str, ...] = ()
    withholds: bool = False

    @property
    def inside(self) -> str:
        """The host that the server believes to be."""
        return f"localhost:{self.port}"

    @property
    def policy(self) -> str:
        """The Content-Security-Policy that is added to each answer.

        Where a preview shares its origin with Belljar, its pages are sandboxed without `allow-same-origin`: to the
        browser they are of no origin at all, so they have no cookies, no storage, no service worker, and reach
        nothing of Belljar's.
        """
        ancestors = " ".join(("frame-ancestors 'self'", *self.frames))
        return f"{_SANDBOX}; {ancestors}" if self.prefix else ancestors


def asked(given: Iterable[tuple[bytes, bytes]], outside: SeenFrom, host: str) -> Headers:
    """Returns the headers of a request as they are sent on, but for those that frame its body.

    Args:
        given: as they came.
        outside: how the preview is seen.
        host: whom the request is for.
    """
    listed = list(given)
    dropped = _NOT_ASKED | _named_by_connection(listed)
    kept: Headers = [(b"host", host.encode())]
    for name, value in listed:
        if name in dropped or name == b"content-length" or name.startswith(b"sec-websocket-"):
            continue
        if name == b"cookie" and outside.prefix:  # Belljar's origin: what is set there is not the preview's
            continue
        if name in _OURS and (outside.prefix or outside.withholds or _KEY.search(value)):
            continue
        kept.append((name, _as_inside(name, value, outside, host)))
    scheme, _, seen = outside.origin.partition("://")
    kept += [(b"x-forwarded-host", seen.encode()), (b"x-forwarded-proto", scheme.encode())]
    if outside.prefix:
        kept.append((b"x-forwarded-prefix", outside.prefix.encode()))
    return kept


def answered(given: Iterable[tuple[bytes, bytes]], outside: SeenFrom, host: str) -> Headers:
    """Returns the headers of an answer as a browser gets them.

    Args:
        given: as they came from whoever answered.
        outside: how the preview is seen.
        host: who answered, by the name that it was asked by.
    """
    listed = [(name.lower(), value) for name, value in given]
    dropped = _NOT_ANSWERED | _named_by_connection(listed) | (_NOT_WITHOUT_ORIGIN if outside.prefix else frozenset())
    kept: Headers = []
    for name, value in listed:
        if name in dropped or name == b"referrer-policy":
            continue
        kept.append((name, _mended(name, value, outside, host)))
    kept.append((b"content-security-policy", outside.policy.encode()))
    # The address of a preview is what opens it: other sites must not learn it from a link that is followed.
    strict = any(name == b"referrer-policy" and value.strip() == b"no-referrer" for name, value in listed)
    kept.append((b"referrer-policy", b"no-referrer" if strict or outside.prefix else b"same-origin"))
    return kept + (_ANYBODY if outside.prefix else [(b"origin-agent-cluster", b"?1")])


def offered(given: Iterable[str]) -> list[str]:
    """Returns the subprotocols of a WebSocket as they are sent on: without those that carry a key of Belljar's."""
    return [one for one in given if not _KEY.search(one.encode("latin-1", "replace"))]


def _mended(name: bytes, value: bytes, outside: SeenFrom, host: str) -> bytes:
    if name in _ELSEWHERE:
        return _kept_inside(value, outside, host)
    if name == b"refresh":
        return _refresh(value, outside, host)
    return _own_cookie(value) if name == b"set-cookie" else value


def _named_by_connection(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """The headers that are for this one hop, by the word of who sent them; what frames a message is never one."""
    named = b",".join(value for name, value in headers if name == b"connection").lower()
    return frozenset(word.strip() for word in named.split(b",")) - {b"content-length", b"host", b"content-type", b""}


def _as_inside(name: bytes, value: bytes, outside: SeenFrom, host: str) -> bytes:
    """An Origin or a Referer of the preview's own as the server knows itself; any other as it is."""
    own = outside.origin.encode()
    if name == b"origin" and (value == own or (outside.prefix and value == b"null")):
        return f"http://{host}".encode()
    if name == b"referer" and (value == own or value.startswith(own + b"/")):
        rest = value[len(own) :]
        prefix = outside.prefix.encode()
        return f"http://{host}".encode() + (rest.removeprefix(prefix) if prefix else rest)
    return value


def _kept_inside(value: bytes, outside: SeenFrom, host: str) -> bytes:
    """Where an answer leads: to the preview, if that is where its server meant."""
    text = value.decode("latin-1").strip()
    try:
        parts = urlsplit(text)
        there = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return b"/"
    if parts.netloc:
        itself = there in LOCAL_NAMES and port == outside.port
        if parts.scheme not in ("http", "https", "") or not (itself or parts.netloc == host):
            return value
        text = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        text += f"#{parts.fragment}" if parts.fragment else ""
        while text.startswith("//"):  # which would be the name of another host
            text = text[1:]
    if text.startswith("/") and not text.startswith(("//", "/\\")):
        return (outside.prefix + text).encode("latin-1")
    return text.encode("latin-1")


def _refresh(value: bytes, outside: SeenFrom, host: str) -> bytes:
    seconds, found, target = value.partition(b"=")
    return seconds + found + _kept_inside(target.strip(b" '\""), outside, host) if found else value


def _own_cookie(value: bytes) -> bytes:
    """A cookie without its Domain, so that it is for the preview's host alone."""
    return b";".join(part for part in value.split(b";") if not _is_domain(part))


def _is_domain(part: bytes) -> bool:
    return part.partition(b"=")[0].strip().lower() == b"domain"


def framing(given: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """Yields the one header that says how long a request's body is, for who sends it on; none: it has no body."""
    found = dict(given)
    if b"transfer-encoding" in found:
        yield b"transfer-encoding", b"chunked"
    elif b"content-length" in found:
        yield b"content-length", found[b"content-length"]
