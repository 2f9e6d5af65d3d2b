"""JWTs: somebody else says who asks, and we check that they said it.

What is checked with is decided by the settings alone, never by the token: a shared secret speaks HS256, an RSA key
RS256, a P-256 key ES256, and a token that names anything else is refused. `sub` is who asks, `scope` (one text) or
`scopes` (a list) what they may; `belljar_rate` and `belljar_concurrency` are quotas, and `belljar_net` (a list) the
hosts that their runs may ask for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from pydantic import ValidationError

from belljar.core import errors
from belljar.core.settings import JwtSettings
from belljar.protocol.records import SCOPES, Caller
from belljar.service.auth.access import is_rate

LEEWAY = 10  # seconds that two clocks may differ
_LARGEST = 1 << 16  # bytes of a key file
_FIX = "ask for a new token"


class Tokens:
    """How tokens are checked. It shows nothing of its key."""

    def __init__(
        self, settings: JwtSettings, key: bytes | RSAPublicKey | EllipticCurvePublicKey, algorithm: str
    ) -> None:
        self._key = key
        self._algorithm = algorithm
        self._issuer = settings.issuer or None
        self._audience = settings.audience or None

    @classmethod
    def of(cls, settings: JwtSettings) -> Tokens | None:
        """None, if no tokens are to be taken; `InvalidRequest`, if that cannot be told or would be unsafe."""
        if settings.secret_file and settings.public_key_file:
            raise _wrong("secret_file and public_key_file are both set", "keep one of them")
        if settings.secret_file:
            key, algorithm = _secret(settings.secret_file), "HS256"
            return cls(settings, key, _agreed(settings, algorithm))
        if settings.public_key_file:
            public, algorithm = _public(settings.public_key_file)
            return cls(settings, public, _agreed(settings, algorithm))
        if settings != JwtSettings():
            raise _wrong("there is no key to check tokens with", "set secret_file or public_key_file too")
        return None

    def caller(self, token: str) -> Caller:
        claims = self._claims(token)
        name = claims["sub"]
        if not isinstance(name, str) or not 0 < len(name) <= 200 or not name.isprintable():
            raise errors.Unauthorized("the token's sub is not a name", fix=_FIX)
        concurrency, rate = claims.get("belljar_concurrency", 0), claims.get("belljar_rate", "")
        if type(concurrency) is not int or concurrency < 0 or not (rate == "" or is_rate(rate)):
            raise errors.Unauthorized("the token's quotas are not understood", fix=_FIX)
        given = _scopes(claims)
        scopes = frozenset(scope for scope in SCOPES if scope in given)
        try:  # no key's name has a colon
            return Caller(
                name=f"jwt:{name}", scopes=scopes, rate=rate, concurrency=concurrency, net=claims.get("belljar_net")
            )
        except ValidationError:
            raise errors.Unauthorized("the token's hosts are not understood", fix=_FIX) from None

    def _claims(self, token: str) -> dict[str, Any]:
        try:
            return jwt.decode(
                token, self._key, algorithms=[self._algorithm], issuer=self._issuer, audience=self._audience,
                leeway=LEEWAY, options={"require": _required(self._issuer, self._audience)},
            )  # fmt: skip
        except jwt.ExpiredSignatureError:  # told only of a token whose signature is right, like all below but the last
            what = "this token has expired"
        except jwt.ImmatureSignatureError:
            what = "this token is not valid yet"
        except jwt.InvalidIssuerError:
            what = "this token is from another issuer"
        except jwt.InvalidAudienceError:
            what = "this token is for another audience"
        except jwt.MissingRequiredClaimError as error:
            what = f"this token has no {error.claim}"
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
            what = "this token is not valid"
        raise errors.Unauthorized(what, fix=_FIX)


def _required(issuer: str | None, audience: str | None) -> list[str]:
    return ["exp", "sub", *(["iss"] if issuer else []), *(["aud"] if audience else [])]


def _scopes(claims: dict[str, Any]) -> set[str]:
    text, listed = claims.get("scope", ""), claims.get("scopes", [])
    scopes = text.split(" ") if isinstance(text, str) else []
    return {*scopes, *(item for item in listed if isinstance(item, str))} if isinstance(listed, list) else set(scopes)


def _agreed(settings: JwtSettings, algorithm: str) -> str:
    """A public key is known to everybody, so taken as HS256's secret it would let anybody sign."""
    others = sorted(set(settings.algorithms) - {algorithm})
    if others:
        raise _wrong(f"{', '.join(others)} does not go with this key", f'set algorithms = ["{algorithm}"], or none')
    return algorithm


def _secret(path: str) -> bytes:
    secret = _read(path).strip()
    if b"-----BEGIN" in secret or secret.startswith((b"ssh-", b"ecdsa-")):
        raise _wrong("secret_file holds a key pair's key, not a secret", "name it as public_key_file")
    if len(secret) < 32:
        raise _wrong("the secret has fewer than 32 bytes", "make one with `openssl rand -hex 32`")
    return secret


def _public(path: str) -> tuple[RSAPublicKey | EllipticCurvePublicKey, str]:
    text = _read(path)
    if b"PRIVATE KEY" in text:
        raise _wrong("public_key_file holds a private key", "keep that with whoever signs, and name the public one")
    try:
        key = load_pem_public_key(text)
    except (ValueError, UnsupportedAlgorithm):
        raise _wrong("public_key_file is no public key", "give it in PEM, as from `openssl pkey -pubout`") from None
    if isinstance(key, RSAPublicKey) and key.key_size >= 2048:
        return key, "RS256"
    if isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1):
        return key, "ES256"
    raise _wrong("this kind of public key is not taken", "RSA with 2048 bits or more, or P-256")


def _read(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return file.read(_LARGEST)
    except OSError as error:
        raise _wrong(f"{path}: {error.strerror}", "check the path and who may read it") from None


def _wrong(what: str, fix: str) -> errors.InvalidRequest:
    return errors.InvalidRequest(f"service.jwt: {what}", fix=fix)
