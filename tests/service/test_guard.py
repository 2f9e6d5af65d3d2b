"""What pages of the web may not do to a service on their reader's machine."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from belljar.core import errors
from belljar.core.settings import ServiceSettings, Settings
from belljar.service.http.guard import Authority, Guard, problem

pytestmark = pytest.mark.anyio
LIMIT = 2048


class Told:
    """What an app behind the guard was asked, and what came out."""

    def __init__(self) -> None:
        self.asked = 0
        self.sent: list[dict[str, Any]] = []

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        pairs = [(name.decode(), value.decode()) for name, value in self.sent[0]["headers"]]
        assert len(pairs) == len({name for name, _ in pairs}) or [name for name, _ in pairs].count("vary") > 1
        return dict(pairs)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def problem(self) -> dict[str, Any]:
        assert self.headers["content-type"] == "application/problem+json"
        told: dict[str, Any] = json.loads(self.body)
        assert told["status"] == self.status
        return told


def guarded(app: Any, **service: Any) -> Guard:
    return Guard(app, Settings(service=ServiceSettings(request_size=LIMIT, **service)))


async def ask(
    method: str = "GET",
    path: str = "/api/languages",
    host: str | None = "localhost:8080",
    *,
    answer: dict[str, str] | None = None,
    chunks: list[bytes] | None = None,
    kind: str = "http",
    extensions: dict[str, Any] | None = None,
    service: dict[str, Any] | None = None,
    **headers: str,
) -> Told:
    told = Told()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        told.asked += 1
        if kind == "websocket":
            await send({"type": "websocket.accept"})
            return
        await Response("fine", headers=answer)(scope, receive, send)

    pairs = [("host", host)] if host is not None else []
    pairs += [(name.replace("_", "-"), value) for name, value in headers.items()]
    scope = {"type": kind, "path": path, "headers": [(n.encode(), v.encode("latin-1")) for n, v in pairs]}
    if kind == "http":
        scope |= {"method": method}
    if extensions is not None:
        scope |= {"extensions": extensions}

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"} if kind == "websocket" else {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        told.sent.append(message)

    await guarded(app, **(service or {}))(scope, receive, send)
    return told


# --- Host ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:1", "LocalHost:8080", "127.0.0.1:8080", "[::1]:8080", "[::1]", "localhost.:80"]
)
async def test_it_may_be_asked_under_the_names_of_loopback(host: str) -> None:
    assert (await ask(host=host)).body == b"fine"


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", "", None, "::1",
        "evil.example:localhost", "localhost:80:80", "localhost@evil.example", "[::1", "0.0.0.0:8080", "localhost\x00",
        "a b", "10.0.0.7", "a" * 400, "localhost, evil.example", "[::ffff:10.0.0.1]",
    ],
)  # fmt: skip
async def test_a_name_that_nobody_listed_is_refused_before_anything_is_done(host: str | None) -> None:
    told = await ask(host=host)
    assert (told.status, told.asked, told.problem["kind"]) == (403, 0, "policy_denied")
    assert told.problem["fix"]


async def test_the_refusal_of_a_host_says_which_setting_to_change() -> None:
    told = (await ask(host="box.example:8080")).problem
    assert "service.hosts" in told["fix"]
    assert "box.example" in told["fix"]


@pytest.mark.parametrize(
    "headers",
    [
        [(b"host", b"localhost"), (b"host", b"evil.example")],
        [(b"host", b"localhost"), (b"origin", b"http://localhost"), (b"origin", b"http://evil.example")],
    ],
)
async def test_two_hosts_or_two_origins_are_none(headers: list[tuple[bytes, bytes]]) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("it was asked")

    await guarded(app)({"type": "http", "method": "GET", "path": "/", "headers": headers}, _nothing, send)
    assert sent[0]["status"] == 403


async def _nothing() -> Any:
    raise AssertionError("nobody has to read")


async def test_listed_hosts_are_answered_with_their_port_if_they_name_one() -> None:
    service = {"hosts": ("box.example", "other.example:9000", "[fd00::1]", "192.0.2.7")}
    for host in ("box.example", "BOX.example:1234", "other.example:9000", "[fd00::1]:80", "192.0.2.7:8080"):
        assert (await ask(host=host, service=service)).status == 200, host
    for host in ("other.example", "other.example:9001", "sub.box.example"):
        assert (await ask(host=host, service=service)).status == 403, host


@pytest.mark.parametrize("wrong", ["*", "*.example", "http://box.example", "box.example/", "", "fd00::1"])
def test_a_host_that_cannot_be_one_is_refused_at_the_start(wrong: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=r"service\.hosts"):
        guarded(None, hosts=(wrong,))


async def test_only_the_probes_may_be_asked_under_any_name_and_only_to_look() -> None:
    for path in ("/healthz", "/readyz"):
        assert (await ask(path=path, host="10.0.0.7:8080")).status == 200
        assert (await ask(path=path, host="10.0.0.7:8080", method="POST")).status == 403
        assert (await ask(path=path, host="10.0.0.7:8080", kind="websocket")).asked == 0
        assert (await ask(path=path, host="10.0.0.7:8080", origin="http://evil.example")).status == 403
    for path in ("/metrics", "/healthz/", "/healthz/../api/languages", "/api/healthz"):
        assert (await ask(path=path, host="10.0.0.7:8080")).status == 403


@given(st.text(max_size=40))
def test_whatever_is_parsed_as_a_host_is_written_as_it_was_asked(text: str) -> None:
    found = Authority.parse(text)
    if found is not None and found.host in ("localhost", "127.0.0.1", "[::1]"):
        assert text.lower().removesuffix(f":{found.port}").removesuffix(":").removesuffix(".") == found.host


# --- Origin --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "origin, host",
    [
        ("http://localhost:8080", "localhost:8080"), ("http://localhost", "localhost"),
        ("https://localhost", "localhost"), ("http://localhost", "localhost:80"),
        ("https://localhost:443", "localhost"), ("http://[::1]:8080", "[::1]:8080"),
    ],
)  # fmt: skip
async def test_pages_of_its_own_may_ask(origin: str, host: str) -> None:
    told = await ask("POST", host=host, origin=origin, sec_fetch_site="same-origin")
    assert told.status == 200
    assert "access-control-allow-origin" not in told.headers


@pytest.mark.parametrize(
    "origin",
    ["http://localhost:3000", "http://127.0.0.1:8080", "http://evil.example", "null", "", "file://", "localhost:8080",
     "chrome-extension://localhost:8080", "http://localhost:8080/x", "http://user@localhost:8080"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
async def test_pages_of_others_may_not(origin: str, method: str) -> None:
    told = await ask(method, origin=origin, access_control_request_method="POST")
    assert (told.status, told.asked) == (403, 0)
    assert "service.origins" in told.problem["fix"]
    assert "access-control-allow-origin" not in told.headers


@pytest.mark.parametrize("site", ["cross-site", "same-site", "Cross-Site"])
async def test_another_site_may_change_nothing_even_without_an_origin(site: str) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "TRACE"):
        assert (await ask(method, sec_fetch_site=site)).status == 403
    assert (await ask("GET", sec_fetch_site=site)).status == 200  # a link to a page of ours


@pytest.mark.parametrize("site", ["same-origin", "none"])
async def test_a_page_of_ours_and_the_reader_may_change_things(site: str) -> None:
    assert (await ask("POST", sec_fetch_site=site)).status == 200


async def test_a_listed_origin_gets_what_its_browser_wants_to_hear() -> None:
    service = {"origins": ("https://app.example/", "http://localhost:3000")}
    told = await ask("POST", origin="https://app.example", sec_fetch_site="cross-site", service=service)
    assert (told.status, told.headers["access-control-allow-origin"]) == (200, "https://app.example")
    assert told.headers["vary"] == "Origin"
    assert "Retry-After" in told.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in told.headers
    assert (await ask("POST", origin="https://app.example:444", service=service)).status == 403
    assert (await ask("POST", origin="http://app.example", service=service)).status == 403


async def test_a_preflight_of_a_listed_origin_is_answered_here() -> None:
    service = {"origins": ("https://app.example",)}
    told = await ask(
        "OPTIONS", origin="https://app.example", access_control_request_method="POST", sec_fetch_site="cross-site",
        access_control_request_headers="authorization", service=service,
    )  # fmt: skip
    assert (told.status, told.asked) == (204, 0)
    assert told.headers["access-control-allow-origin"] == "https://app.example"
    assert "POST" in told.headers["access-control-allow-methods"]
    for name in ("Authorization", "Content-Type", "Idempotency-Key", "Last-Event-ID", "X-API-Key"):
        assert name in told.headers["access-control-allow-headers"]


async def test_a_listed_origin_does_not_open_another_host() -> None:
    told = await ask(host="evil.example", origin="https://app.example", service={"origins": ("https://app.example",)})
    assert told.status == 403


@pytest.mark.parametrize(
    "wrong",
    ["*", "null", "app.example", "https://*.example", "https://app.example/x", "https://", "https://a b"],
)
def test_an_origin_that_cannot_be_one_is_refused_at_the_start(wrong: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=r"service\.origins"):
        guarded(None, origins=(wrong,))


# --- answers -------------------------------------------------------------------------------------


async def test_every_answer_of_the_api_keeps_browsers_from_running_framing_and_keeping_it() -> None:
    loose = {"content-security-policy": "default-src *", "cache-control": "public", "X-Content-Type-Options": "x"}
    for told in (await ask(answer=loose), await ask(host="evil.example"), await ask(answer={})):
        assert told.headers["x-content-type-options"] == "nosniff"
        assert told.headers["referrer-policy"] == "no-referrer"
        assert told.headers["cross-origin-resource-policy"] == "same-origin"
        assert told.headers["cache-control"] == "no-store"
        for part in ("default-src 'none'", "frame-ancestors 'none'", "sandbox"):
            assert part in told.headers["content-security-policy"]


async def test_a_page_of_our_own_may_say_more_about_its_content() -> None:
    own = {"content-security-policy": "default-src 'self'", "cache-control": "max-age=60"}
    told = await ask(path="/docs", answer=own)
    assert (told.headers["content-security-policy"], told.headers["cache-control"]) == tuple(own.values())
    assert "default-src 'none'" in (await ask(path="/docs")).headers["content-security-policy"]


def test_a_problem_has_the_words_of_the_contract() -> None:
    told = problem(errors.Aborted("gone", fix="again"))
    assert list(told) == ["type", "title", "status", "detail", "kind", "fix", "context", "outcome", "exit_code"]
    assert (told["status"], told["title"], told["kind"]) == (499, "aborted", "aborted")
    assert problem(errors.Busy("no", retry_after=3))["context"] == {"retry_after": 3}


# --- WebSockets ----------------------------------------------------------------------------------


async def test_a_socket_of_another_page_is_refused_before_it_is_accepted() -> None:
    for headers in ({"origin": "http://evil.example"}, {"host": "evil.example"}, {"sec_fetch_site": "cross-site"}):
        told = await ask(kind="websocket", extensions={"websocket.http.response": {}}, **headers)  # type: ignore[arg-type]
        assert (told.asked, told.sent[0]["type"], told.status) == (0, "websocket.http.response.start", 403)
        assert told.problem["kind"] == "policy_denied"
        told = await ask(kind="websocket", **headers)  # type: ignore[arg-type]
        assert (told.asked, told.sent) == (0, [{"type": "websocket.close", "code": 1008, "reason": "refused"}])


async def test_a_socket_of_our_own_page_and_of_a_program_is_let_through() -> None:
    for headers in ({}, {"origin": "http://localhost:8080", "sec_fetch_site": "same-origin"}):
        assert (await ask(kind="websocket", **headers)).sent == [{"type": "websocket.accept"}]  # type: ignore[arg-type]
    listed = {"origins": ("https://app.example",)}
    told = await ask(kind="websocket", origin="https://app.example", sec_fetch_site="cross-site", service=listed)
    assert told.asked == 1


# --- real servers: bodies, and how uvicorn says no -------------------------------------------------


async def _echo(request: Request) -> Response:
    return JSONResponse({"bytes": len(await request.body())})


async def _fail(request: Request) -> Response:
    raise RuntimeError("of the app")


async def _swallow(request: Request) -> Response:
    """As FastAPI does with bodies that it cannot read."""
    try:
        await request.body()
    except Exception:
        return PlainTextResponse("that was a bad body", 400)
    return PlainTextResponse("read")


async def _early(request: Request) -> Response:
    """Answers while it still reads."""
    from starlette.responses import StreamingResponse

    async def parts() -> AsyncIterator[bytes]:
        yield b"begun"
        async for _ in request.stream():
            pass
        yield b"ended"

    return StreamingResponse(parts())


async def _talk(websocket: WebSocket) -> None:
    await websocket.accept(subprotocol="belljar")
    await websocket.send_text("hello")
    await websocket.close()


@asynccontextmanager
async def served(ws: str = "wsproto") -> AsyncIterator[int]:
    posts = {"/api/echo": _echo, "/api/swallow": _swallow, "/api/early": _early}
    routes = [Route(path, function, methods=["POST"]) for path, function in posts.items()]
    app = guarded(Starlette(routes=[*routes, Route("/api/fail", _fail), WebSocketRoute("/api/talk", _talk)]))
    config = uvicorn.Config(app, log_config=None, lifespan="off", ws=ws, timeout_graceful_shutdown=1)  # type: ignore[arg-type]
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    with listener:
        async with anyio.create_task_group() as group:
            group.start_soon(server.serve, [listener])
            try:
                yield listener.getsockname()[1]
            finally:
                server.should_exit = True


async def say(port: int, *parts: bytes, until: bytes = b"\0never\0") -> bytes:
    """Everything that the server answers to these bytes, until it hangs up or has said what is waited for."""
    answer = b""
    with anyio.fail_after(10):
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            try:
                for part in parts:
                    await stream.send(part)
                while until not in answer:
                    answer += await stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                pass
    return answer


def post(path: str, *headers: str, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


def chunk(size: int) -> bytes:
    return f"{size:x}\r\n".encode() + b"x" * size + b"\r\n"


async def test_a_body_of_the_largest_size_is_taken_whole_with_and_without_a_length() -> None:
    async with served() as port:
        told = await say(port, post("/api/echo", f"Content-Length: {LIMIT}", "Connection: close"), b"x" * LIMIT)
        assert told.endswith(b'{"bytes":2048}')
        head = post("/api/echo", "Transfer-Encoding: chunked", "Connection: close")
        assert (await say(port, head, chunk(LIMIT), b"0\r\n\r\n")).endswith(b'{"bytes":2048}')


async def test_a_body_that_says_it_is_too_large_is_refused_unread() -> None:
    async with served() as port:
        for size in ("2049", "9" * 15):
            told = await say(port, post("/api/echo", f"Content-Length: {size}"))
            assert told.startswith(b"HTTP/1.1 413 "), told
            assert b"application/problem+json" in told
            assert b"service.request_size" in told


@pytest.mark.parametrize("path", ["/api/echo", "/api/swallow"])
async def test_a_body_that_turns_out_too_large_is_refused_while_it_comes_whatever_the_app_makes_of_it(
    path: str,
) -> None:
    async with served() as port:
        endless = [chunk(LIMIT - 1), chunk(1), chunk(1)]  # and no end
        told = await say(port, post(path, "Transfer-Encoding: chunked"), *endless)
        assert told.startswith(b"HTTP/1.1 413 ")
        assert told.count(b"HTTP/1.1") == 1
        assert b"bad body" not in told


async def test_after_a_body_was_refused_the_app_hears_of_a_disconnect_and_says_and_raises_nothing_more() -> None:
    sent: list[Any] = []
    heard: list[str] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"x" * LIMIT, "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        heard.extend([(await receive())["type"] for _ in range(3)])
        await PlainTextResponse("that was a bad body", 400)(scope, receive, send)
        raise RuntimeError("and now it is confused")

    scope = {"type": "http", "method": "POST", "path": "/api/x", "headers": [(b"host", b"localhost")]}
    await guarded(app)(scope, receive, send)
    assert heard == ["http.request", "http.disconnect", "http.disconnect"]
    assert [message.get("status") for message in sent] == [413, None]


async def test_an_answer_that_had_begun_ends_early_when_its_request_gets_too_large() -> None:
    async with served() as port:
        told = await say(port, post("/api/early", "Transfer-Encoding: chunked"), chunk(LIMIT), chunk(1))
        assert b"ended" not in told
        assert not told.endswith(b"0\r\n\r\n")


async def test_what_the_app_itself_does_wrong_is_not_hidden() -> None:
    async with served() as port:
        told = await say(port, post("/api/fail", "Connection: close", method="GET"))
        assert told.startswith(b"HTTP/1.1 500 ")
        assert b"nosniff" in told


UPGRADE = (
    "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Protocol: belljar, bearer.x",
)  # fmt: skip


async def test_a_real_server_refuses_a_foreign_socket_with_a_reason_and_opens_our_own() -> None:
    async with served() as port:
        told = await say(port, post("/api/talk", *UPGRADE, "Origin: http://evil.example", method="GET"))
        assert told.startswith(b"HTTP/1.1 403 ")
        assert b"service.origins" in told
        own = post("/api/talk", *UPGRADE, "Origin: http://localhost", method="GET")
        told = await say(port, own, until=b"hello")
        assert told.startswith(b"HTTP/1.1 101 ")
        assert b"sec-websocket-protocol: belljar\r\n" in told.lower()
        assert b"hello" in told
