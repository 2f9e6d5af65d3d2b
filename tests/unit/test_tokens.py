"""Who asks, by tokens of somebody else's making: which are taken, and why the others are not."""

from __future__ import annotations

import base64
import hmac
import json
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from belljar.core import errors
from belljar.core.settings import JwtSettings
from belljar.service.auth.access import Access, new_key
from key_holders import Keys, ask, bearer, refusal, settings

pytestmark = pytest.mark.anyio
SECRET = "0123456789abcdef0123456789abcdef"


def pem(key: Any) -> bytes:
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


RSA, EC = rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP256R1())


@pytest.fixture
def secret_file(tmp_path: Path) -> str:
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    return str(tmp_path / "secret")


def public_file(folder: Path, key: Any) -> str:
    (folder / "key.pem").write_bytes(pem(key.public_key()))
    return str(folder / "key.pem")


def claims(**changes: Any) -> dict[str, Any]:
    made = {"sub": "ada", "exp": time.time() + 60, "scope": "run read"} | changes
    return {name: value for name, value in made.items() if value is not None}


def token(**changes: Any) -> str:
    return jwt.encode(claims(**changes), SECRET, "HS256")


async def test_a_token_says_who_asks_what_they_may_and_how_much(secret_file: str) -> None:
    access = Access(settings(jwt=JwtSettings(secret_file=secret_file)), Keys())
    assert await access.required()
    sent = token(scopes=["files", "world", 3], belljar_rate="9/hour", belljar_concurrency=2, belljar_net=["@a"])
    caller = await ask(access, bearer(sent), "read")
    assert (caller.name, caller.scopes, caller.key) == ("jwt:ada", {"run", "read", "files"}, "")
    assert (caller.rate, caller.concurrency, caller.net) == ("9/hour", 2, ("@a",))
    assert (await ask(access, bearer(token()), "read")).net is None
    assert (await ask(access, {"sec-websocket-protocol": f"belljar,bearer.{sent}"}, "run")).name == "jwt:ada"
    assert (await refusal(access, {})).http_status == 401


@pytest.mark.parametrize("key, algorithm", [(RSA, "RS256"), (EC, "ES256")])
async def test_public_keys_speak_their_own_algorithm_only(tmp_path: Path, key: Any, algorithm: str) -> None:
    file = public_file(tmp_path, key)
    access = Access(settings(jwt=JwtSettings(public_key_file=file)), Keys())
    assert (await ask(access, bearer(jwt.encode(claims(), key, algorithm)), "run")).name == "jwt:ada"
    other = jwt.encode(claims(), *((EC, "ES256") if key is RSA else (RSA, "RS256")))
    assert (await refusal(access, bearer(other))).http_status == 401


async def test_a_token_signed_with_the_public_key_as_a_secret_is_refused(tmp_path: Path) -> None:
    file = public_file(tmp_path, RSA)
    access = Access(settings(jwt=JwtSettings(public_key_file=file)), Keys())

    def part(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

    for algorithm, secret in (("HS256", Path(file).read_bytes()), ("none", b"")):
        head = part(json.dumps({"alg": algorithm, "typ": "JWT"}).encode()) + "." + part(json.dumps(claims()).encode())
        mac = part(hmac.digest(secret, head.encode(), "sha256")) if secret else ""
        error = await refusal(access, bearer(f"{head}.{mac}"))
        assert (error.http_status, error.message) == (401, "this token is not valid")


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"exp": 1}, "expired"),
        ({"exp": None}, "no exp"),
        ({"exp": "soon"}, "not valid"),
        ({"sub": None}, "no sub"),
        ({"sub": ""}, "sub"),
        ({"sub": "a\nb"}, "sub"),
        ({"sub": "a" * 201}, "sub"),
        ({"nbf": 4_000_000_000}, "not valid yet"),
        ({"iss": "other"}, "issuer"),
        ({"iss": None}, "no iss"),
        ({"aud": "other"}, "audience"),
        ({"aud": None}, "no aud"),
        ({"belljar_rate": "lots"}, "quotas"),
        ({"belljar_concurrency": -1}, "quotas"),
        ({"belljar_concurrency": True}, "quotas"),
        ({"belljar_net": "example.org"}, "hosts"),
        ({"belljar_net": ["10.1.2.3"]}, "hosts"),
        ({"belljar_net": [3]}, "hosts"),
    ],
)
async def test_a_token_that_is_not_in_order_is_refused_with_a_reason(
    secret_file: str, changes: dict[str, Any], word: str
) -> None:
    access = Access(settings(jwt=JwtSettings(secret_file=secret_file, issuer="us", audience="belljar")), Keys())
    good = {"iss": "us", "aud": "belljar"}
    assert (await ask(access, bearer(token(**good)), "run")).name == "jwt:ada"
    error = await refusal(access, bearer(token(**(good | changes))))
    assert error.http_status == 401
    assert word in error.message


async def test_a_token_made_for_an_audience_is_refused_where_none_is_set(secret_file: str) -> None:
    access = Access(settings(jwt=JwtSettings(secret_file=secret_file)), Keys())
    assert "audience" in (await refusal(access, bearer(token(aud="somebody else")))).message


async def test_a_start_without_an_audience_is_warned_of(secret_file: str, caplog: pytest.LogCaptureFixture) -> None:
    Access(settings(jwt=JwtSettings(secret_file=secret_file, audience="belljar")), Keys())
    Access(settings(), Keys())
    assert not caplog.records
    Access(settings(jwt=JwtSettings(secret_file=secret_file, issuer="us")), Keys())
    assert [(each.levelname, "no audience" in each.message) for each in caplog.records] == [("WARNING", True)]


async def test_a_token_with_another_signature_learns_nothing_else(secret_file: str) -> None:
    access = Access(settings(jwt=JwtSettings(secret_file=secret_file)), Keys())
    forged = jwt.encode(claims(exp=1), "f" * 32, "HS256")
    assert (await refusal(access, bearer(forged))).message == "this token is not valid"


@pytest.mark.parametrize("given", [{}, {"scope": "rune"}, {"scope": 7}, {"scopes": "run"}, {"scopes": {"run": 1}}])
async def test_a_token_without_scopes_that_we_know_may_nothing(secret_file: str, given: dict[str, Any]) -> None:
    access = Access(settings(jwt=JwtSettings(secret_file=secret_file)), Keys())
    assert (await refusal(access, bearer(token(**({"scope": None} | given))))).http_status == 403


async def test_keys_and_tokens_go_together(secret_file: str) -> None:
    key, secret = new_key("ada", frozenset({"run"}))
    access = Access(settings(jwt=JwtSettings(secret_file=secret_file)), Keys(key))
    assert (await ask(access, bearer(secret), "run")).name == "ada"
    assert (await ask(access, bearer(token()), "run")).name == "jwt:ada"


def wrong_jwt(tmp_path: Path) -> dict[str, JwtSettings]:
    files = {
        "short": b"hunter2",
        "public": pem(RSA.public_key()),
        "private": RSA.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
        "small": pem(rsa.generate_private_key(65537, 1024).public_key()),
        "edwards": pem(ed25519.Ed25519PrivateKey.generate().public_key()),
        "good": SECRET.encode(),
    }
    path = {name: str(tmp_path / name) for name in files}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    return {
        "a short secret": JwtSettings(secret_file=path["short"]),
        "a public key as secret": JwtSettings(secret_file=path["public"]),
        "HS256 with a public key": JwtSettings(public_key_file=path["public"], algorithms=("HS256",)),
        "HS256 too": JwtSettings(public_key_file=path["public"], algorithms=("RS256", "HS256")),
        "another kind": JwtSettings(public_key_file=path["public"], algorithms=("ES256",)),
        "RS256 with a secret": JwtSettings(secret_file=path["good"], algorithms=("RS256",)),
        "a private key": JwtSettings(public_key_file=path["private"]),
        "a small key": JwtSettings(public_key_file=path["small"]),
        "an unknown kind": JwtSettings(public_key_file=path["edwards"]),
        "no key at all": JwtSettings(public_key_file=path["good"]),
        "both": JwtSettings(secret_file=path["good"], public_key_file=path["public"]),
        "none, but an issuer": JwtSettings(issuer="us"),
        "no file": JwtSettings(secret_file=str(tmp_path / "missing")),
    }


def test_settings_that_would_be_unsafe_are_refused_before_anything_is_served(tmp_path: Path) -> None:
    for what, given in wrong_jwt(tmp_path).items():
        with pytest.raises(errors.InvalidRequest, match=r"service\.jwt") as caught:
            Access(settings(jwt=given), Keys())
        assert caught.value.fix, what
        assert "hunter2" not in str(caught.value)
