"""Authenticates callers: by an API key, by a JWT, or as the local user.

An API key of ours is `bj_<id>_<secret>`, and is kept as a hash. A JWT is signed by somebody else (`tokens`). Where
there are neither keys nor JWTs, whoever reaches a service that listens on loopback only is the local user.

A credential is sent as `Authorization: Bearer …` or as `X-API-Key: …`. A browser cannot set headers on a WebSocket, so
it may also offer the credential as a subprotocol: `new WebSocket(url, ["belljar", "bearer." + key])`. The answer then
names `belljar` (see `Access.subprotocol`) and never the other one, which would put the secret into an answer. Query
strings are not read, because they end up in histories and logs.

Only a caller who has the secret of a key is told that the key was revoked or has expired. A wrong secret and an unknown
id get the same answer, after the same work.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import anyio
from pydantic import ValidationError

from belljar.core import errors
from belljar.core.settings import Settings
from belljar.protocol.records import SCOPES, Caller, Key, Scope

LOCAL_USER = "local user"
SUBPROTOCOL = "belljar"
FRESH = 1.0  # seconds for which keys that were read are used: a revocation counts at the latest then
_BEARER = "bearer."
_STORE_TIMEOUT = 5.0
_LONGEST = 8192  # of a credential; nothing longer is looked at
_KEY = re.compile(r"bj_([0-9a-f]{12})_([0-9a-f]{64})")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.@ -]{0,62}[A-Za-z0-9])?")  # no colon: that is what "jwt:" has
_RATE = re.compile(r"\d{1,9} ?(/|per) ?(second|minute|hour|day)")
_NOBODY = hashlib.sha256(secrets.token_bytes(32)).hexdigest()
_LOCAL = Caller(name=LOCAL_USER, scopes=frozenset(SCOPES))
_CREATE = "create one with `belljar keys create NAME --scope run`"
_log = logging.getLogger("belljar")
_FORWARDED = frozenset(
    ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "via", "cf-connecting-ip")
)


class KeyStore(Protocol):
    """The part of the store that holds keys."""

    async def keys(self) -> list[Key]: ...

    async def add_key(self, key: Key) -> None: ...

    async def revoke_key(self, id: str) -> bool: ...


class Access:
    """Finds out who sent a request.

    It reads the keys from the store at most once in `FRESH` seconds, however many requests there are. The store has to
    return revoked and expired keys, too: a service whose last key was revoked is closed, not open.
    """

    def __init__(self, settings: Settings, keys: KeyStore) -> None:
        from belljar.service.auth.tokens import Tokens

        self._keys = keys
        self._loopback = is_loopback(settings.service.host)
        self._tokens = Tokens.of(settings.service.jwt)
        if self._tokens is not None and not settings.service.jwt.audience:
            _log.warning("service.jwt has no audience: a token without aud is taken, whoever its issuer made it for")
        self._known: dict[str, Key] = {}
        self._asked: float | None = None
        self._asking = anyio.Lock()

    async def required(self) -> bool:
        """Returns whether callers need a credential: there is a key, even a revoked one, or JWTs are configured."""
        return self._tokens is not None or bool(await self._fresh())

    async def known(self, headers: Mapping[str, str]) -> Caller:
        """Returns the caller that sent these headers, whatever they may do.

        Raises:
            Unauthorized: there is no valid credential, and one is needed (401).
            NotAvailable: the store of the keys does not answer.
        """
        credential = _credential(headers)
        if credential is None:
            return await self._local(headers)
        if self._tokens is not None and credential.count(".") == 2:
            return self._tokens.caller(credential)
        return await self._holder(credential)

    @staticmethod
    def subprotocol(headers: Mapping[str, str]) -> str | None:
        """Returns the subprotocol to accept a WebSocket with, if the client offered it.

        Browsers want the answer to name one of those that they offered, so they offer `belljar` beside `bearer.<key>`.
        """
        values = (value for name, value in headers.items() if name.lower() == "sec-websocket-protocol")
        return SUBPROTOCOL if any(SUBPROTOCOL in _offered(value) for value in values) else None

    async def _local(self, headers: Mapping[str, str]) -> Caller:
        if await self.required():
            raise errors.Unauthorized(
                "a key is needed here", fix="send it as `Authorization: Bearer bj_…` or `X-API-Key: bj_…`"
            )
        if not self._loopback:  # keys that were there at the start may have gone since
            raise errors.Unauthorized("without a key this service answers on loopback only", fix=_CREATE)
        if any(name.lower() in _FORWARDED for name in headers):
            raise errors.Unauthorized("without a key this service does not answer through a proxy", fix=_CREATE)
        return _LOCAL

    async def _holder(self, credential: str) -> Caller:
        """Returns the holder of an API key. A wrong key is refused even where none is needed."""
        match = _KEY.fullmatch(credential)
        if match is None:
            raise errors.Unauthorized("this is not a key of Belljar", fix="send it whole: bj_<id>_<secret>")
        key = (await self._fresh()).get(match[1])
        right = hmac.compare_digest(digest_of(match[2]), key.digest if key else _NOBODY)
        if key is None or not right:
            raise errors.Unauthorized("nobody here knows this key", fix="check it, or ask for a new one")
        return _caller_with(key)

    async def holder(self, id: str) -> Caller:
        """Returns the holder of an API key by the key's id, for what they have handed on.

        Raises:
            Unauthorized: the key does not count any more.
        """
        key = (await self._fresh()).get(id)
        if key is None:
            raise errors.Unauthorized("nobody here knows this key", fix="ask for a new one")
        return _caller_with(key)

    async def _fresh(self) -> dict[str, Key]:
        """Returns the keys by id, at most `FRESH` seconds old, or raises NotAvailable if the store does not answer."""
        if self._is_fresh():
            return self._known
        async with self._asking:
            if not self._is_fresh():
                asked = time.monotonic()
                try:
                    with anyio.fail_after(_STORE_TIMEOUT):
                        found = await self._keys.keys()
                except (TimeoutError, errors.BelljarError):  # strangers hear this: not where the store is, nor why
                    raise errors.NotAvailable("the store of the keys does not answer", fix="try again") from None
                self._known, self._asked = {key.id: key for key in found}, asked
        return self._known

    def _is_fresh(self) -> bool:
        return self._asked is not None and time.monotonic() - self._asked < FRESH


def _caller_with(key: Key) -> Caller:
    """Returns the holder of a key that counts, or raises Unauthorized."""
    if key.revoked is not None:
        raise errors.Unauthorized("this key was revoked", fix="ask for a new one")
    if key.expires is not None and key.expires <= time.time():
        raise errors.Unauthorized("this key has expired", fix="ask for a new one")
    return Caller(name=key.name, scopes=key.scopes, key=key.id, rate=key.rate, concurrency=key.concurrency, net=key.net)


def allow(caller: Caller, *scopes: Scope) -> None:
    """Raises PolicyDenied (403) for a caller that has none of these scopes."""
    if not any(caller.may(scope) for scope in scopes):
        raise errors.PolicyDenied(
            f"this needs the scope {scopes[0]!r}, which this credential does not have",
            fix=f"ask for a credential with the scope {scopes[0]!r}",
            context={"scope": scopes[0]},
        )


def _credential(headers: Mapping[str, str]) -> str | None:
    """Returns the credential that was sent, or None. Raises Unauthorized for two different ones."""
    found: set[str] = set()
    for name, value in headers.items():
        match name.lower():
            case "authorization":
                found.add(_bearer(value))
            case "x-api-key":
                found.add(value.strip())
            case "sec-websocket-protocol":
                found.update(item.removeprefix(_BEARER) for item in _offered(value) if item.startswith(_BEARER))
    if len(found) > 1:
        raise errors.Unauthorized("two different credentials were sent", fix="send one")
    if any(len(item) > _LONGEST or not item.isascii() for item in found):
        raise errors.Unauthorized("this is neither a key nor a token", fix="send it as it was given out")
    return found.pop() if found else None


def _bearer(value: str) -> str:
    scheme, _, rest = value.strip().partition(" ")
    if scheme.lower() != "bearer" or not rest.strip():
        raise errors.Unauthorized(
            "the header Authorization is not understood", fix="write `Authorization: Bearer bj_…`"
        )
    return rest.strip()


def _offered(value: str) -> list[str]:
    return [item.strip() for item in value.split(",")]


def parse_key(text: str) -> tuple[str, str] | None:
    """Returns the id and the secret of a key as its holder has it, or None if it is none."""
    match = _KEY.fullmatch(text)
    return (match[1], match[2]) if match else None


def digest_of(secret: str) -> str:
    """Returns the hash of a secret. A fast hash will do: nobody can guess 256 random bits."""
    return hashlib.sha256(secret.encode()).hexdigest()


def new_key(
    name: str,
    scopes: frozenset[str],
    *,
    lifetime: float | None = None,
    rate: str = "",
    concurrency: int = 0,
    net: Sequence[str] | None = None,
    clock: Callable[[], float] = time.time,
) -> tuple[Key, str]:
    """Makes a key.

    Args:
        name: Whose it is.
        scopes: What its holder may do.
        lifetime: Seconds until it expires; None: it does not.
        rate: Requests that its holder may send, such as "60/minute"; empty: as the settings say.
        concurrency: Runs of its holder at once; 0: as the settings say.
        net: Hosts and @sets that its holder's runs may ask for; None: as the settings say.
        clock: Tells the time.

    Returns:
        The key and, this once, what its holder sends.

    Raises:
        InvalidRequest: Something of it makes no sense.
    """
    if not _NAME.fullmatch(name) or name == LOCAL_USER:
        raise errors.InvalidRequest(
            f"{name[:64]!r} cannot be a key's name", fix="up to 64 letters, digits, blanks and any of _ . @ -"
        )
    if not scopes:
        raise errors.InvalidRequest("a key without a scope can do nothing", fix="give it one, such as --scope run")
    if rate and not _RATE.fullmatch(rate):
        raise errors.InvalidRequest(f"{rate[:40]!r} is no rate", fix="write it as 60/minute")
    if concurrency < 0 or (lifetime is not None and lifetime <= 0):
        raise errors.InvalidRequest("concurrency and lifetime cannot be negative", fix="leave out what has no limit")
    identity, secret, now = secrets.token_hex(6), secrets.token_hex(32), clock()
    try:
        key = Key.model_validate({
            "id": identity, "name": name, "digest": digest_of(secret), "scopes": scopes, "created": now,
            "expires": None if lifetime is None else now + lifetime, "rate": rate, "concurrency": concurrency,
            "net": net,
        })  # fmt: skip
    except ValidationError as error:
        raise errors.from_validation(error, "key") from None
    return key, f"bj_{identity}_{secret}"


def is_rate(text: object) -> bool:
    return isinstance(text, str) and _RATE.fullmatch(text) is not None


def is_loopback(host: str) -> bool:
    """Returns whether a host is this machine. Of names, only `localhost` is: others depend on the resolver."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def refuse_open_bind(host: str, required: bool) -> None:
    """Raises PolicyDenied if a service without keys would listen where other machines can reach it."""
    if not required and not is_loopback(host):
        raise errors.PolicyDenied(
            f"without a key, anybody who reaches {host[:80]} could run code here",
            fix=f"{_CREATE}, set service.jwt, or listen on 127.0.0.1",
            context={"host": host},
        )
