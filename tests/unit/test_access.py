"""Who asks: keys, tokens and the local user; what is refused, and that no refusal helps to guess."""

from __future__ import annotations

import base64
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from typer.testing import CliRunner

from belljar import cli_keys, errors
from belljar.service import access as access_module
from belljar.service.access import Access, allow, is_loopback, new_key, refuse_open_bind
from belljar.service.records import SCOPES, Caller, Key
from belljar.settings import Jwt, Service, Settings

pytestmark = pytest.mark.anyio
SECRET = "0123456789abcdef0123456789abcdef"


class Keys:
    """A store of keys in memory, which counts how often it is asked."""

    def __init__(self, *keys: Key) -> None:
        self.all = {key.id: key for key in keys}
        self.asked = 0

    async def keys(self) -> list[Key]:
        self.asked += 1
        await anyio.lowlevel.checkpoint()
        return list(self.all.values())

    async def add_key(self, key: Key) -> None:
        self.all[key.id] = key

    async def revoke_key(self, id: str) -> bool:
        key = self.all.get(id)
        if key is None or key.revoked is not None:
            return False
        self.all[id] = key.model_copy(update={"revoked": time.time()})
        return True


def settings(**service: Any) -> Settings:
    return Settings(service=Service(**service))


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def ask(access: Access, headers: dict[str, str], scope: Any) -> Caller:
    caller = await access.known(headers)
    allow(caller, scope)
    return caller


async def refusal(access: Access, headers: dict[str, str], scope: Any = "run") -> errors.PolicyDenied:
    with pytest.raises(errors.PolicyDenied) as caught:
        await ask(access, headers, scope)
    for value in headers.values():
        for word in value.replace(".", " ").replace("_", " ").split():
            assert len(word) < 20 or word not in f"{caught.value}{caught.value.as_dict()}", "a secret in a message"
    return caught.value


# --- nobody has to say anything ------------------------------------------------------------------


async def test_without_keys_and_tokens_everybody_on_loopback_is_the_local_user_with_all_scopes() -> None:
    access = Access(settings(), Keys())
    caller = await ask(access, {}, "admin")
    assert (caller.name, caller.scopes) == ("local user", frozenset(SCOPES))
    assert not await access.required()


async def test_without_keys_a_service_on_the_network_answers_nobody_even_if_it_was_started_with_one() -> None:
    error = await refusal(Access(settings(host="0.0.0.0"), Keys()), {})
    assert error.http_status == 401
    assert "keys create" in error.fix


@pytest.mark.parametrize("name", ["X-Forwarded-For", "forwarded", "x-real-ip"])
async def test_without_keys_whoever_comes_through_a_proxy_is_not_local(name: str) -> None:
    assert (await refusal(Access(settings(), Keys()), {name: "203.0.113.9"})).http_status == 401


async def test_a_key_that_nobody_knows_is_refused_even_where_none_is_needed() -> None:
    _, secret = new_key("ci", frozenset({"run"}))
    assert (await refusal(Access(settings(), Keys()), bearer(secret))).http_status == 401


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost", "LOCALHOST"])
def test_loopback_may_be_open(host: str) -> None:
    assert is_loopback(host)
    refuse_open_bind(host, required=False)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "192.0.2.1", "example.org", "localhost.example.org", "127.0.0.1.example.org", ""]
)
def test_a_bind_to_the_network_without_keys_is_refused_and_says_what_to_do(host: str) -> None:
    with pytest.raises(errors.PolicyDenied, match="keys create"):
        refuse_open_bind(host, required=False)
    refuse_open_bind(host, required=True)


# --- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        lambda s: {"authorization": f"Bearer {s}"},
        lambda s: {"Authorization": f"bearer  {s} "},
        lambda s: {"X-API-Key": s},
        lambda s: {"sec-websocket-protocol": f"belljar, bearer.{s}"},
        lambda s: {"authorization": f"Bearer {s}", "x-api-key": s},
    ],
)
async def test_a_key_is_taken_from_each_header_that_may_carry_it(form: Any) -> None:
    key, secret = new_key("ci", frozenset({"run"}), rate="5/minute", concurrency=3)
    caller = await ask(Access(settings(), Keys(key)), form(secret), "run")
    assert (caller.name, caller.key, caller.rate, caller.concurrency) == ("ci", key.id, "5/minute", 3)
    assert caller.scopes == {"run"}


def test_a_socket_is_answered_with_our_subprotocol_and_never_with_the_key() -> None:
    assert Access.subprotocol({"Sec-WebSocket-Protocol": "bearer.bj_x_y, belljar"}) == "belljar"
    assert Access.subprotocol({"Sec-WebSocket-Protocol": "bearer.bj_x_y"}) is None
    assert Access.subprotocol({}) is None


async def test_once_there_is_a_key_everybody_needs_one_even_when_it_is_revoked() -> None:
    key, _ = new_key("ci", frozenset({"run"}))
    keys = Keys(key)
    access = Access(settings(), keys)
    assert await access.required()
    assert (await refusal(access, {})).http_status == 401
    await keys.revoke_key(key.id)
    assert await Access(settings(), keys).required()


async def test_a_wrong_secret_and_an_unknown_id_sound_the_same() -> None:
    key, secret = new_key("ci", frozenset({"run"}))
    access = Access(settings(), Keys(key))
    _, stranger = new_key("ci", frozenset({"run"}))
    wrong = f"bj_{key.id}_{stranger.split('_')[2]}"
    one, other = await refusal(access, bearer(wrong)), await refusal(access, bearer(stranger))
    assert one.as_dict() == other.as_dict()
    assert one.http_status == 401
    assert (await ask(access, bearer(secret), "run")).name == "ci"


async def test_revoked_and_expired_is_told_only_to_whom_has_the_secret() -> None:
    for change, word in (({"revoked": 1.0}, "revoked"), ({"expires": time.time() - 1}, "expired")):
        key, secret = new_key("ci", frozenset({"run"}))
        access = Access(settings(), Keys(key.model_copy(update=change)))
        error = await refusal(access, bearer(secret))
        assert (error.http_status, word in error.message) == (401, True)
        assert word not in (await refusal(access, bearer(f"bj_{key.id}_{'0' * 64}"))).message


async def test_a_missing_scope_is_named_and_is_another_status_than_being_unknown() -> None:
    key, secret = new_key("ci", frozenset({"read"}))
    error = await refusal(Access(settings(), Keys(key)), bearer(secret), "sessions")
    assert (error.http_status, error.context) == (403, {"scope": "sessions"})
    assert "'sessions'" in error.message


async def test_admin_may_everything() -> None:
    key, secret = new_key("ci", frozenset({"admin"}))
    access = Access(settings(), Keys(key))
    for scope in SCOPES:
        assert (await ask(access, bearer(secret), scope)).name == "ci"


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Basic dTpw"},
        {"authorization": "Bearer"},
        {"authorization": ""},
        {"x-api-key": ""},
        {"x-api-key": "bj_" + "0" * 12},
        {"x-api-key": "bj_" + "0" * 12 + "_" + "G" * 64},
        {"x-api-key": "bj_" + "0" * 12 + "_" + "0" * 64 + "\n"},
        {"x-api-key": "ü" * 10},
        {"x-api-key": "a" * 100_000},
        {"authorization": "Bearer a.b.c"},
        {"authorization": "Bearer bj_" + "0" * 12 + "_" + "0" * 64, "x-api-key": "bj_" + "1" * 12 + "_" + "1" * 64},
        {"sec-websocket-protocol": "bearer."},
    ],
)  # fmt: skip
async def test_whatever_is_no_key_is_refused(headers: dict[str, str]) -> None:
    key, _ = new_key("ci", frozenset({"run"}))
    assert (await refusal(Access(settings(), Keys(key)), headers)).http_status == 401


async def test_two_keys_at_once_are_refused_even_if_both_are_good() -> None:
    (one, first), (other, second) = new_key("one", frozenset({"run"})), new_key("other", frozenset({"run"}))
    access = Access(settings(), Keys(one, other))
    error = await refusal(access, bearer(first) | {"x-api-key": second})
    assert (error.http_status, "two different" in error.message) == (401, True)


async def test_the_store_is_asked_once_for_many_requests_and_a_revocation_counts_after_that_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key, secret = new_key("ci", frozenset({"run"}))
    keys = Keys(key)
    access = Access(settings(), keys)
    async with anyio.create_task_group() as group:
        for _ in range(50):
            group.start_soon(ask, access, bearer(secret), "run")
    assert keys.asked == 1
    await keys.revoke_key(key.id)
    now = time.monotonic()
    monkeypatch.setattr(access_module.time, "monotonic", lambda: now + access_module.FRESH)
    assert "revoked" in (await refusal(access, bearer(secret))).message
    assert (keys.asked, access_module.FRESH <= 1) == (2, True)


async def test_a_store_that_does_not_answer_lets_nobody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(Keys):
        async def keys(self) -> list[Key]:
            await anyio.sleep_forever()
            raise AssertionError

    monkeypatch.setattr(access_module, "_STORE_TIMEOUT", 0.01)
    with anyio.fail_after(5), pytest.raises(errors.NotAvailable):
        await ask(Access(settings(), Stuck()), {}, "run")


async def test_no_secret_is_in_a_repr_or_a_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    key, secret = new_key("ci", frozenset({"run"}))
    access = Access(settings(), Keys(key))
    caller = await ask(access, bearer(secret), "run")
    shown = f"{key!r}{caller!r}{access!r}{caplog.text}"
    assert secret.split("_")[2] not in shown
    assert key.digest not in shown


@pytest.mark.parametrize("name", ["", "jwt:me", "local user", "a" * 65, "-x", "a\nb", "x ", "é"])
def test_a_name_that_could_be_taken_for_somebody_else_is_no_keys_name(name: str) -> None:
    with pytest.raises(errors.InvalidRequest):
        new_key(name, frozenset({"run"}))


@pytest.mark.parametrize("wrong", [{"rate": "fast"}, {"rate": "1/year"}, {"concurrency": -1}, {"lifetime": 0}])
def test_quotas_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidRequest):
        new_key("ci", frozenset({"run"}), **wrong)


@pytest.mark.parametrize("scopes", [frozenset(), frozenset({"root"})])
def test_a_key_has_scopes_and_only_such_as_there_are(scopes: frozenset[str]) -> None:
    with pytest.raises(errors.InvalidRequest):
        new_key("ci", scopes)


# --- tokens --------------------------------------------------------------------------------------


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
    access = Access(settings(jwt=Jwt(secret_file=secret_file)), Keys())
    assert await access.required()
    sent = token(scopes=["files", "world", 3], belljar_rate="9/hour", belljar_concurrency=2)
    caller = await ask(access, bearer(sent), "read")
    assert (caller.name, caller.scopes, caller.key) == ("jwt:ada", {"run", "read", "files"}, "")
    assert (caller.rate, caller.concurrency) == ("9/hour", 2)
    assert (await ask(access, {"sec-websocket-protocol": f"belljar,bearer.{sent}"}, "run")).name == "jwt:ada"
    assert (await refusal(access, {})).http_status == 401


@pytest.mark.parametrize("key, algorithm", [(RSA, "RS256"), (EC, "ES256")])
async def test_public_keys_speak_their_own_algorithm_only(tmp_path: Path, key: Any, algorithm: str) -> None:
    file = public_file(tmp_path, key)
    access = Access(settings(jwt=Jwt(public_key_file=file)), Keys())
    assert (await ask(access, bearer(jwt.encode(claims(), key, algorithm)), "run")).name == "jwt:ada"
    other = jwt.encode(claims(), *((EC, "ES256") if key is RSA else (RSA, "RS256")))
    assert (await refusal(access, bearer(other))).http_status == 401


async def test_a_token_signed_with_the_public_key_as_a_secret_is_refused(tmp_path: Path) -> None:
    file = public_file(tmp_path, RSA)
    access = Access(settings(jwt=Jwt(public_key_file=file)), Keys())

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
    ],
)
async def test_a_token_that_is_not_in_order_is_refused_with_a_reason(
    secret_file: str, changes: dict[str, Any], word: str
) -> None:
    access = Access(settings(jwt=Jwt(secret_file=secret_file, issuer="us", audience="belljar")), Keys())
    good = {"iss": "us", "aud": "belljar"}
    assert (await ask(access, bearer(token(**good)), "run")).name == "jwt:ada"
    error = await refusal(access, bearer(token(**(good | changes))))
    assert error.http_status == 401
    assert word in error.message


async def test_a_token_made_for_an_audience_is_refused_where_none_is_set(secret_file: str) -> None:
    access = Access(settings(jwt=Jwt(secret_file=secret_file)), Keys())
    assert "audience" in (await refusal(access, bearer(token(aud="somebody else")))).message


async def test_a_start_without_an_audience_is_warned_of(secret_file: str, caplog: pytest.LogCaptureFixture) -> None:
    Access(settings(jwt=Jwt(secret_file=secret_file, audience="belljar")), Keys())
    Access(settings(), Keys())
    assert not caplog.records
    Access(settings(jwt=Jwt(secret_file=secret_file, issuer="us")), Keys())
    assert [(each.levelname, "no audience" in each.message) for each in caplog.records] == [("WARNING", True)]


async def test_a_token_with_another_signature_learns_nothing_else(secret_file: str) -> None:
    access = Access(settings(jwt=Jwt(secret_file=secret_file)), Keys())
    forged = jwt.encode(claims(exp=1), "f" * 32, "HS256")
    assert (await refusal(access, bearer(forged))).message == "this token is not valid"


@pytest.mark.parametrize("given", [{}, {"scope": "rune"}, {"scope": 7}, {"scopes": "run"}, {"scopes": {"run": 1}}])
async def test_a_token_without_scopes_that_we_know_may_nothing(secret_file: str, given: dict[str, Any]) -> None:
    access = Access(settings(jwt=Jwt(secret_file=secret_file)), Keys())
    assert (await refusal(access, bearer(token(**({"scope": None} | given))))).http_status == 403


async def test_keys_and_tokens_go_together(secret_file: str) -> None:
    key, secret = new_key("ada", frozenset({"run"}))
    access = Access(settings(jwt=Jwt(secret_file=secret_file)), Keys(key))
    assert (await ask(access, bearer(secret), "run")).name == "ada"
    assert (await ask(access, bearer(token()), "run")).name == "jwt:ada"


def wrong_jwt(tmp_path: Path) -> dict[str, Jwt]:
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
        "a short secret": Jwt(secret_file=path["short"]),
        "a public key as secret": Jwt(secret_file=path["public"]),
        "HS256 with a public key": Jwt(public_key_file=path["public"], algorithms=("HS256",)),
        "HS256 too": Jwt(public_key_file=path["public"], algorithms=("RS256", "HS256")),
        "another kind": Jwt(public_key_file=path["public"], algorithms=("ES256",)),
        "RS256 with a secret": Jwt(secret_file=path["good"], algorithms=("RS256",)),
        "a private key": Jwt(public_key_file=path["private"]),
        "a small key": Jwt(public_key_file=path["small"]),
        "an unknown kind": Jwt(public_key_file=path["edwards"]),
        "no key at all": Jwt(public_key_file=path["good"]),
        "both": Jwt(secret_file=path["good"], public_key_file=path["public"]),
        "none, but an issuer": Jwt(issuer="us"),
        "no file": Jwt(secret_file=str(tmp_path / "missing")),
    }


def test_settings_that_would_be_unsafe_are_refused_before_anything_is_served(tmp_path: Path) -> None:
    for what, given in wrong_jwt(tmp_path).items():
        with pytest.raises(errors.InvalidRequest, match=r"service\.jwt") as caught:
            Access(settings(jwt=given), Keys())
        assert caught.value.fix, what
        assert "hunter2" not in str(caught.value)


# --- belljar keys --------------------------------------------------------------------------------


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Keys:
    made = Keys()

    @asynccontextmanager
    async def opened() -> AsyncIterator[Keys]:
        yield made

    monkeypatch.setattr(cli_keys, "open_keys", opened)
    return made


def command(*words: str) -> Any:
    done = CliRunner().invoke(cli_keys.app, words)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def test_a_key_is_created_listed_and_revoked_from_the_command_line(keys: Keys) -> None:
    options = ("--scope", "run", "--scope", "read", "--expires", "30d", "--rate", "60/minute", "--concurrency", "4")
    made = json.loads(command("create", "ci", *options, "--json").stdout)
    (key,) = keys.all.values()
    assert (made["id"], made["scopes"], made["state"]) == (key.id, ["read", "run"], "valid")
    assert key.expires == pytest.approx(time.time() + 30 * 86400, abs=60)
    access = Access(settings(), keys)
    assert anyio.run(ask, access, bearer(made["key"]), "run").rate == "60/minute"

    listed = command("list", "--json").stdout
    assert json.loads(listed)["keys"][0]["name"] == "ci"
    assert made["key"].split("_")[2] not in listed + command("list").stdout
    assert key.digest not in listed

    assert json.loads(command("revoke", key.id, "--json").stdout) == {"id": key.id, "revoked": True}
    assert "revoked" in command("list").stdout
    with pytest.raises(errors.NotFound):
        command("revoke", key.id)


def test_the_secret_alone_goes_to_stdout(keys: Keys) -> None:
    done = command("create", "ci", "--scope", "run")
    assert done.stdout.strip().startswith("bj_")
    assert len(done.stdout.split()) == 1
    assert "not shown again" in done.stderr


def test_a_second_key_of_one_name_is_made_and_said(keys: Keys) -> None:
    command("create", "ci", "--scope", "run")
    assert "both see the same runs" in command("create", "ci", "--scope", "run").stderr.replace("\n", " ")


@pytest.mark.parametrize(
    "text, meant", [("30d", 2_592_000), ("12h", 43_200), ("90m", 5400), ("5s", 5), ("1w", 604_800)]
)
def test_durations_are_read(text: str, meant: float) -> None:
    assert cli_keys.seconds(text) == meant


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "0h", "1y", "nan", "999999999w", "1 d 2 h"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(errors.InvalidRequest):
        cli_keys.seconds(text)
