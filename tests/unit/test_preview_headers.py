"""What the proxy of previews changes in headers: nothing of Belljar's gets in, and nothing of the guest's gets out."""

from __future__ import annotations

import pytest

from belljar.preview import headers
from belljar.preview.headers import Headers, SeenFrom

OWN = SeenFrom("http://bs-1.localhost:8080", "", 3000, ("http://localhost:8080",))
BELOW = SeenFrom("http://localhost:8080", "/preview/bs-1", 3000)
KEY = b"bj_0123456789ab_" + b"c" * 64


def asked(*given: tuple[bytes, bytes], outside: SeenFrom = OWN) -> dict[bytes, bytes]:
    return dict(headers.asked(given, outside, outside.inside))


def answered(*given: tuple[bytes, bytes], outside: SeenFrom = OWN) -> Headers:
    return headers.answered(given, outside, outside.inside)


def value(found: Headers, name: bytes) -> list[bytes]:
    return [text for given, text in found if given == name]


def test_a_server_is_asked_by_the_name_that_it_believes_to_have() -> None:
    found = asked((b"host", b"bs-1.localhost:8080"), (b"origin", b"http://bs-1.localhost:8080"), (b"accept", b"*/*"))
    assert (found[b"host"], found[b"origin"], found[b"accept"]) == (b"localhost:3000", b"http://localhost:3000", b"*/*")
    assert (found[b"x-forwarded-host"], found[b"x-forwarded-proto"]) == (b"bs-1.localhost:8080", b"http")


def test_the_origin_of_another_site_is_not_made_the_servers_own() -> None:
    assert asked((b"origin", b"http://evil.example"))[b"origin"] == b"http://evil.example"
    assert asked((b"origin", b"http://bs-1.localhost:80801"))[b"origin"] == b"http://bs-1.localhost:80801"
    assert asked((b"origin", b"null"))[b"origin"] == b"null"
    assert asked((b"referer", b"http://bs-1.localhost:8080.evil/"))[b"referer"] == b"http://bs-1.localhost:8080.evil/"


@pytest.mark.parametrize("name", [b"authorization", b"x-api-key"])
def test_a_key_of_belljar_is_never_sent_on_and_an_applications_own_token_is(name: bytes) -> None:
    assert name not in asked((name, b"Bearer " + KEY))
    assert name not in asked((name, KEY))
    assert asked((name, b"Bearer of-the-app"))[name] == b"Bearer of-the-app"
    assert name not in asked((name, b"Bearer of-the-app"), outside=BELOW)
    assert name not in asked((name, b"Bearer a.jwt.here"), outside=OWN._replace(withholds=True))
    assert headers.offered(["vite-hmr", "bearer." + KEY.decode(), "belljar"]) == ["vite-hmr", "belljar"]


@pytest.mark.parametrize(
    "name",
    [b"connection", b"keep-alive", b"te", b"upgrade", b"proxy-authorization", b"transfer-encoding", b"x-forwarded-for",
     b"forwarded", b"x-real-ip", b"via", b"expect", b"x-mine", b"sec-websocket-key"],
)  # fmt: skip
def test_what_is_for_one_hop_or_tells_who_asks_is_not_sent_on(name: bytes) -> None:
    assert name not in asked((b"connection", b"close, X-Mine"), (name, b"1"))


def test_who_names_content_type_as_a_hop_cannot_take_it_away() -> None:
    assert asked((b"connection", b"content-type"), (b"content-type", b"text/x"))[b"content-type"] == b"text/x"


def test_cookies_reach_a_server_on_its_own_host_and_never_from_belljars() -> None:
    assert asked((b"cookie", b"a=1"))[b"cookie"] == b"a=1"
    assert b"cookie" not in asked((b"cookie", b"a=1"), outside=BELOW)
    assert value(answered((b"set-cookie", b"a=1"), outside=BELOW), b"set-cookie") == []


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (b"a=1; Domain=localhost; Path=/x; HttpOnly", b"a=1; Path=/x; HttpOnly"),
        (b"a=1;DOMAIN =.example.org", b"a=1"),
        (b"a=domain; Path=/", b"a=domain; Path=/"),
        (b"__Host-a=1; Secure; Path=/", b"__Host-a=1; Secure; Path=/"),
    ],
)
def test_a_cookie_is_for_the_previews_own_host(given: bytes, kept: bytes) -> None:
    assert value(answered((b"Set-Cookie", given)), b"set-cookie") == [kept]


@pytest.mark.parametrize(
    ("given", "own", "below"),
    [
        (b"/login?x=1#y", b"/login?x=1#y", b"/preview/bs-1/login?x=1#y"),
        (b"http://localhost:3000/login", b"/login", b"/preview/bs-1/login"),
        (b"http://127.0.0.1:3000", b"/", b"/preview/bs-1/"),
        (b"http://localhost:3000//evil.example/", b"/evil.example/", b"/preview/bs-1/evil.example/"),
        (b"http://localhost:8080/api/keys", b"http://localhost:8080/api/keys", b"http://localhost:8080/api/keys"),
        (b"https://example.org/a", b"https://example.org/a", b"https://example.org/a"),
        (b"//example.org/a", b"//example.org/a", b"//example.org/a"),
        (b"next", b"next", b"next"),
        (b"http://[", b"/", b"/"),
    ],
)
def test_a_redirect_stays_inside_where_the_server_meant_itself(given: bytes, own: bytes, below: bytes) -> None:
    assert value(answered((b"location", given)), b"location") == [own]
    assert value(answered((b"location", given), outside=BELOW), b"location") == [below]
    assert value(answered((b"refresh", b"3; url=" + given)), b"refresh") == [b"3; url=" + own]


@pytest.mark.parametrize(
    "name",
    [b"Service-Worker-Allowed", b"Strict-Transport-Security", b"Alt-Svc", b"Connection", b"Transfer-Encoding", b"NEL",
     b"Report-To", b"Keep-Alive"],
)  # fmt: skip
def test_no_answer_speaks_for_more_than_the_preview(name: bytes) -> None:
    assert value(answered((name, b"/")), name.lower()) == []


def test_a_preview_may_be_framed_by_those_who_were_named_and_keeps_its_own_policy() -> None:
    found = answered((b"content-security-policy", b"default-src 'self'"))
    expected = [b"default-src 'self'", b"frame-ancestors 'self' http://localhost:8080"]
    assert value(found, b"content-security-policy") == expected


def test_pages_that_share_belljars_origin_are_of_no_origin_to_the_browser() -> None:
    given = [(b"access-control-allow-credentials", b"true"), (b"clear-site-data", b'"cookies"')]
    found = answered(*given, (b"www-authenticate", b"Basic"), outside=BELOW)
    (policy,) = value(found, b"content-security-policy")
    assert policy.startswith(b"sandbox ") and b"allow-same-origin" not in policy
    assert b"allow-top-navigation" not in policy and b"allow-popups-to-escape-sandbox" not in policy
    assert value(found, b"access-control-allow-origin") == [b"*"]  # whoever knows the address may read it
    for name in (b"access-control-allow-credentials", b"clear-site-data", b"www-authenticate"):
        assert value(found, name) == []


def test_the_address_that_opens_a_preview_is_told_to_no_other_site() -> None:
    assert value(answered((b"referrer-policy", b"unsafe-url")), b"referrer-policy") == [b"same-origin"]
    assert value(answered((b"referrer-policy", b"no-referrer")), b"referrer-policy") == [b"no-referrer"]


def test_a_body_has_one_length() -> None:
    both = [(b"content-length", b"5"), (b"transfer-encoding", b"gzip, chunked")]
    assert list(headers.framing(both)) == [(b"transfer-encoding", b"chunked")]
    assert list(headers.framing([(b"content-length", b"5")])) == [(b"content-length", b"5")]
    assert list(headers.framing([])) == []
    assert b"content-length" not in asked(*both)
