"""Who asks: keys and the local user; what is refused, and that no refusal helps to guess."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from typer.testing import CliRunner

from belljar.cli import keys as cli_keys
from belljar.core import errors
from belljar.protocol.records import SCOPES, Key
from belljar.service.auth import access as access_module
from belljar.service.auth.access import Access, is_loopback, new_key, refuse_open_bind
from key_holders import Keys, ask, bearer, refusal, settings

pytestmark = pytest.mark.anyio


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


# --- belljar keys --------------------------------------------------------------------------------


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Keys:
    made = Keys()

    made.database = SimpleNamespace(where="a place of the test's own")  # type: ignore[attr-defined]

    @asynccontextmanager
    async def opened(data_dir: Path | None = None) -> AsyncIterator[Keys]:
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
    assert "a place of the test's own" in done.stderr.replace("\n", " ")


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
