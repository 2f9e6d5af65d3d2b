"""The client on bad days: broken connections, servers that are full, restarted or killed, strangers in between."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

import belljar
from belljar.client.async_client import AsyncClient
from belljar.client.client import Client
from belljar.core import errors
from belljar.core.result import Event, Result, Status
from interference import answer, canned, proxied
from serving import Server, served

pytestmark = pytest.mark.engine

COUNT = "import time\nfor i in range({}): print('line', i, flush=True); time.sleep({})"


class _Cutting:
    """The first seven answers that are streams of lines are cut, each somewhere else: in the middle of lines, too."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._left = [400, 300, 1000, 777, 2000, 1501, 3333]

    def __call__(self, request: bytes) -> int | None:
        return self._left.pop(0) if self._mark in request and self._left else None


async def test_a_stream_that_is_cut_again_and_again_loses_nothing_and_says_nothing_twice(server: Server) -> None:
    with proxied(server.url, _Cutting(b"/logs")) as proxy:
        async with AsyncClient(proxy.url) as client, client.stream(COUNT.format(150, 0.02), backend="native") as run:
            heard = [event async for event in run]
    assert proxy.cuts == 7
    assert [event.text for event in heard[:-1]] == [f"line {i}\n" for i in range(150)]
    assert [event.seq for event in heard] == list(range(1, 152))
    assert run.result is not None and run.result.ok


def test_where_websockets_do_not_get_through_the_lines_come_as_events(server: Server) -> None:
    def refuse(request: bytes) -> bytes:
        return answer("400 Bad Request", b"no", "text/plain") if b"upgrade: websocket" in request.lower() else b""

    with proxied(server.url, _Cutting(b"text/event-stream"), refuse) as proxy, Client(proxy.url) as client:
        out: list[str] = []
        client.run(COUNT.format(100, 0.02), backend="native", on_stdout=out.append)
        assert proxy.cuts == 7
        assert out == [f"line {i}\n" for i in range(100)]
        run = client.runs(limit=1)[0].id
        assert [line.message for line in client.logs(run, after=90)] == [f"line {i}" for i in range(90, 100)]


def test_lines_of_a_run_under_way_can_be_pulled_and_left(client: Client) -> None:
    began = threading.Event()
    stop = belljar.Cancel()
    ids: list[str] = []

    def hear(event: Event) -> None:
        ids.append(event.run)
        began.set()

    work = threading.Thread(
        target=client.run, args=(COUNT.format(1000, 0.02),),
        kwargs={"backend": "native", "on_event": hear, "cancel": stop},
    )  # fmt: skip
    work.start()
    assert began.wait(20)
    for line in client.logs(ids[0]):
        if line.number == 20:
            break
    assert line.message == "line 19"
    stop.cancel()
    work.join(20)
    assert not work.is_alive()


@pytest.mark.parametrize("callbacks", [False, True])
def test_a_run_whose_answer_was_lost_is_not_run_twice(server: Server, callbacks: bool) -> None:
    word = f"once{callbacks}"
    cuts = [0, 0]

    def plan(request: bytes) -> int | None:
        return cuts.pop() if request.startswith(b"POST") and cuts else None

    with proxied(server.url, plan) as proxy, Client(proxy.url) as client:
        before = len(client.runs(limit=1000))
        hear = {"on_event": lambda event: None} if callbacks else {}
        assert client.run(f"print({word!r})", backend="native", **hear).stdout == f"{word}\n"
        assert proxy.cuts == 2
        assert len(client.runs(limit=1000)) == before + 1


def test_who_finds_a_full_server_is_served_when_there_is_room() -> None:
    with served(MAX_CONTAINERS="1", config="[service]\nqueue = 0\n") as server, Client(server.url) as client:
        began = threading.Event()
        first = threading.Thread(
            target=client.run, args=("print(1, flush=True)\nimport time; time.sleep(2)",),
            kwargs={"backend": "native", "on_stdout": lambda text: began.set()},
        )  # fmt: skip
        first.start()
        assert began.wait(20)
        with pytest.raises(errors.Busy) as full:
            Client(server.url, retries=0).run("print(2)", backend="native")
        assert full.value.http_status == 503 and full.value.retry_after > 0
        assert client.run("print(2)", backend="native").stdout == "2\n"
        first.join(20)


def test_the_kept_result_of_the_same_deterministic_run_will_do(client: Client) -> None:
    code = "import random; print(random.random())"
    first = client.run(code, backend="wasm", deterministic=True)
    again = client.run(code, backend="wasm", deterministic=True, cached=True)
    assert again.stdout == first.stdout and "served from the store" in again.reasons[-1]


def test_a_server_that_is_restarted_meanwhile_is_found_again(server: Server, client: Client) -> None:
    first = client.run("print(1)", backend="native")
    server.restart()
    assert client.run("print(2)", backend="native").stdout == "2\n"
    assert client.inspect(first.container_id).result == first


@pytest.mark.usefixtures("counting")
def test_a_run_that_died_with_its_server_is_an_error_and_no_hanging(server: Server) -> None:
    with Client(server.url, retries=8) as client:
        began = threading.Event()
        told: list[BaseException] = []

        def work() -> None:
            try:
                client.run(COUNT.format(1000, 0.1), backend="native", timeout=110, on_event=lambda event: began.set())
            except errors.BelljarError as error:
                told.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        assert began.wait(20)
        server.restart(kill=True)
        thread.join(40)
        assert told and isinstance(told[0], errors.ExecutionFailed) and "under way" in str(told[0]), told
        assert client.runs(limit=1)[0].state == "lost"


def test_a_server_that_is_not_there_is_told_soon_and_by_name() -> None:
    with pytest.raises(errors.NotAvailable, match=r"no connection to http://127\.0\.0\.1:1"):
        Client("http://127.0.0.1:1", retries=1).run("print(1)")


def _problem(kind: str, **more: Any) -> bytes:
    return json.dumps({"title": "x", "status": 0, "detail": "full", "kind": kind, "fix": "wait", **more}).encode()


DONE = answer("200 OK", b'{"id": "bj-1", "status": "success", "stdout": "ok", "a_new_field": 1}')
TAKEN = answer("202 Accepted", b'{"id": "bj-1", "caller": "me", "created": 1.0, "state": "running"}')
RECORD = json.dumps(
    {"id": "bj-1", "caller": "me", "created": 1.0, "state": "finished", "result": {"status": "success", "stdout": "ok"}}
).encode()
LINES = answer("200 OK", b"event: end\ndata: finished\n\n", "text/event-stream")
REST = (TAKEN, answer("404 Not Found"), answer("200 OK", RECORD), LINES, answer("200 OK", RECORD))


def test_a_busy_server_is_asked_again_when_it_said_and_with_a_key_that_was_not_refused() -> None:
    full = answer("503 Service Unavailable", _problem("busy"), "application/problem+json", Retry_After="1")
    with canned(full, full, *REST) as server:
        assert Client(server.url).run("1").stdout == "ok"
    assert len(set(server.header("Idempotency-Key"))) == 3


def test_a_gateway_that_lost_the_answer_is_asked_again_with_the_same_key() -> None:
    with canned(answer("502 Bad Gateway", b"<html>", "text/html"), b"", *REST) as server:
        assert Client(server.url).run("1").stdout == "ok"
    assert len(server.header("Idempotency-Key")) == 3 and len(set(server.header("Idempotency-Key"))) == 1


def test_a_quota_is_the_callers_to_respect() -> None:
    over = answer("429 Too Many Requests", _problem("busy"), "application/problem+json", Retry_After="17")
    with canned(over) as server, pytest.raises(errors.Busy, match="full") as busy:
        Client(server.url).run("1")
    assert (busy.value.retry_after, busy.value.http_status, busy.value.fix) == (17, 429, "wait")


def test_an_answer_of_somebody_else_is_not_taken_for_one_of_ours() -> None:
    moved = answer("302 Found", b"", Location="http://example.org/")
    for reply, said in (
        (answer("200 OK", b"<html>", "text/html"), "do not understand"),
        (answer("403 Forbidden", b"<html>", "text/html"), "answered 403"),
        (moved, "sends us to"),
    ):
        with canned(reply) as server, pytest.raises(errors.NotAvailable, match=said):
            Client(server.url).run("1")


def test_fields_that_a_younger_server_adds_are_passed_over() -> None:
    with canned(DONE) as server:
        assert Client(server.url).run("1") == Result(status=Status.SUCCESS, stdout="ok")
