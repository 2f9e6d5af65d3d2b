"""The end of a service, told by SIGTERM: runs finish or are ended, each is recorded, and nobody is left waiting."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import httpx2
import pytest

from belljar.host import ownership
from serving import Server, posted, served
from watching import Watcher
from witness import descendants, eventually

pytestmark = pytest.mark.engine


@contextmanager
def draining(drain: float, **environ: str) -> Iterator[tuple[Server, httpx2.Client, ThreadPoolExecutor]]:
    config = f"[service]\ndrain = {drain}\n"
    with (
        served(config=config, **environ) as server,
        httpx2.Client(base_url=server.url, timeout=60) as http,
        ThreadPoolExecutor(12) as threads,
    ):
        yield server, http, threads


def sleeping(seconds: float, **more: object) -> dict[str, object]:
    code = f"import time; print('up', flush=True); time.sleep({seconds}); print('over')"
    return {"code": code, "backend": "native", **more}


def taken(http: httpx2.Client, **body: object) -> str:
    answer = http.post("/api/sandbox/execute", json={**body, "wait": False})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def records(server: Server) -> dict[str, dict[str, Any]]:
    """What is kept of all runs, read after the service has ended."""
    with closing(sqlite3.connect(server.data_dir / "records.db")) as db:
        db.row_factory = sqlite3.Row
        found = [dict(row) for row in db.execute("SELECT id, state, ended, result, problem FROM runs")]
    for record in found:
        record |= {name: json.loads(record[name] or "null") for name in ("result", "problem")}
    return {record["id"]: record for record in found}


def until_it_says(http: httpx2.Client, id: str, text: str = "up") -> None:
    def said() -> bool:
        return text in [line["message"] for line in http.get(f"/api/sandbox/{id}/logs").json()["lines"]]

    assert eventually(said, 20)


def end_of(server: Server, seconds: float = 30.0) -> int:
    assert server._process is not None
    return server._process.wait(seconds)


def test_runs_that_end_in_time_are_answered_and_those_that_do_not_are_ended_and_recorded() -> None:
    with draining(2.0, MAX_CONTAINERS="3") as (server, http, threads):
        quick: Future[httpx2.Response] = threads.submit(
            lambda: httpx2.post(f"{server.url}/api/sandbox/execute", json=sleeping(1.0), timeout=60)
        )
        slow = taken(http, **sleeping(60))
        wasm = taken(http, **sleeping(60) | {"backend": "wasm"})
        until_it_says(http, slow)
        until_it_says(http, wasm)
        assert eventually(lambda: len(http.get("/api/sandbox/runs?state=running").json()) == 3)
        queued: Future[httpx2.Response] = threads.submit(
            lambda: httpx2.post(f"{server.url}/api/sandbox/execute", json=sleeping(1.0), timeout=60)
        )
        assert eventually(lambda: len(http.get("/api/sandbox/runs?state=queued").json()) == 1)
        below = descendants(server.pid)
        os.kill(server.pid, signal.SIGTERM)
        left = queued.result(10)
        assert (left.status_code, left.json()["kind"], "retry-after" in left.headers) == (503, "busy", True)
        late = http.post("/api/sandbox/execute", json={"code": "print(1)"})
        assert (late.status_code, late.json()["kind"]) == (503, "busy")
        ready = http.get("/readyz")
        assert (ready.status_code, ready.json()["problem"]) == (503, "it is going away")
        assert http.get(f"/api/sandbox/runs/{slow}").json()["state"] == "running"
        done = quick.result(20)
        assert (done.status_code, done.json()["stdout"]) == (200, "up\nover\n")
        assert end_of(server) == 0
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"{server.url}/healthz")
        assert not eventually_gone(below)
        kept = records(server)
        assert kept[done.json()["id"]]["result"]["status"] == "success"
        for id in (slow, wasm):
            result = kept[id]["result"]
            assert (kept[id]["state"], result["status"], result["stdout"]) == ("finished", "killed", "up\n"), kept[id]
        gone = [record for record in kept.values() if record["state"] == "refused"]
        assert [record["problem"]["kind"] for record in gone] == ["busy"]
        assert all(record["ended"] for record in kept.values())
        assert len(kept) == 4


def eventually_gone(pids: set[int]) -> set[int]:
    def left() -> set[int]:
        return {pid for pid in pids if os.path.exists(f"/proc/{pid}")}

    eventually(lambda: not left(), 5)
    return left()


def test_a_second_signal_ends_what_is_under_way_at_once_and_still_answers_and_records_it() -> None:
    with draining(60.0) as (server, http, threads):
        answer: Future[httpx2.Response] = threads.submit(
            lambda: httpx2.post(f"{server.url}/api/sandbox/execute", json=sleeping(60), timeout=60)
        )
        assert eventually(lambda: http.get("/api/sandbox/runs?state=running").json())
        (id,) = [record["id"] for record in http.get("/api/sandbox/runs").json()]
        until_it_says(http, id)
        os.kill(server.pid, signal.SIGTERM)
        assert eventually(lambda: http.get("/readyz").status_code == 503)
        assert server.running
        start = time.monotonic()
        os.kill(server.pid, signal.SIGTERM)
        assert end_of(server, 10) == 0
        assert time.monotonic() - start < 5
        assert (answer.result(5).status_code, answer.result(5).json()["status"]) == (200, "killed")
        assert records(server)[id]["result"]["status"] == "killed"


def test_watchers_hear_the_last_line_and_an_orderly_end() -> None:
    with draining(0.5) as (server, http, threads):
        id = taken(http, **sleeping(60))
        until_it_says(http, id)
        path = f"/api/sandbox/{id}/logs"

        def stream() -> str:
            with httpx2.stream("GET", server.url + path, headers={"Accept": "text/event-stream"}, timeout=30) as answer:
                return "".join(answer.iter_text())

        with Watcher(server.url, path) as watcher, Watcher(server.url, path, buffer=4096) as silent:
            events = threads.submit(stream)
            assert next(watcher.lines())["message"] == "up"
            code = threads.submit(server.stop)
            assert [line["message"] for line in watcher.lines()] == []
            assert watcher.end == (1000, "finished")
            assert events.result(20).endswith("event: end\ndata: finished\n\n")
            assert code.result(20) == 0
            assert [line["message"] for line in silent.lines()] == ["up"]


def test_a_watcher_that_never_reads_does_not_keep_the_service_from_ending() -> None:
    with draining(0.2) as (server, http, _):
        code = "for i in range(300): print('x' * 30_000)"
        id = http.post("/api/sandbox/execute", json={"code": code, "backend": "native"}).json()["id"]
        with Watcher(server.url, f"/api/sandbox/{id}/logs", buffer=4096):
            start = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - start < 12


def test_sessions_are_closed_with_the_service_and_a_turn_under_way_is_ended_and_recorded() -> None:
    with draining(0.5, MAX_CONTAINERS="4") as (server, http, threads):
        for kind, backend in (("session", "wasm"), ("sandbox", "native")):
            opened = http.post("/api/sandbox/sessions", json={"kind": kind, "backend": backend})
            assert opened.status_code == 201, opened.text
        turn: Future[httpx2.Response] = threads.submit(
            lambda: httpx2.post(
                f"{server.url}/api/sandbox/sessions/{opened.json()['id']}/run",
                json={"command": ["sh", "-c", "echo up; sleep 60"]},
                timeout=60,
            )
        )
        assert eventually(lambda: http.get("/api/sandbox/runs?state=running").json())
        (id,) = [record["id"] for record in http.get("/api/sandbox/runs?state=running").json()]
        until_it_says(http, id)
        below = descendants(server.pid)
        os.kill(server.pid, signal.SIGTERM)
        assert eventually(lambda: http.get("/readyz").status_code == 503)
        refused = http.post("/api/sandbox/sessions", json={"backend": "wasm"})
        assert (refused.status_code, refused.json()["kind"]) == (503, "busy")
        assert turn.result(20).json()["status"] in ("killed", "aborted")
        assert end_of(server) == 0
        assert not eventually_gone(below)
        kept = records(server)[id]
        assert (kept["state"], kept["result"]["stdout"]) == ("finished", "up\n")
        assert not [path for path in server.state_dir.rglob("*") if path.name not in ownership.PLACES]


# --- a client that goes away ---


def under_way(http: httpx2.Client, number: int = 1) -> list[str]:
    def found() -> list[dict[str, Any]]:
        runs = http.get("/api/sandbox/runs").json()
        return runs if len(runs) >= number else []

    return [record["id"] for record in eventually(found)]  # type: ignore[attr-defined]


def test_a_client_that_vanishes_takes_its_run_along_unless_it_has_a_key_to_come_back_with() -> None:
    with draining(1.0, MAX_CONTAINERS="1") as (server, http, _):
        body = {"command": ["sh", "-c", "echo up; sleep 4321"], "backend": "native"}
        with posted(server, "/api/sandbox/execute", body):
            (id,) = under_way(http)
            until_it_says(http, id)
            with posted(server, "/api/sandbox/execute", body):  # this one waits for its turn
                second = next(each for each in under_way(http, 2) if each != id)
            assert eventually(lambda: http.get(f"/api/sandbox/runs/{second}").json()["state"] == "failed")
            assert b"4321" in commands(server)
        ended = eventually(lambda: final(http, id))
        assert (ended["state"], ended["result"]["status"]) == ("finished", "aborted")  # type: ignore[index]
        assert ended["result"]["stdout"] == "up\n"  # type: ignore[index]
        assert b"4321" not in commands(server)
        assert final(http, second)["problem"]["kind"] == "aborted"
        headers = {"Idempotency-Key": "comes back"}
        with posted(server, "/api/sandbox/execute", sleeping(1.0), **headers):
            third = next(each for each in under_way(http, 3) if each not in (id, second))
            until_it_says(http, third)
        again = http.post("/api/sandbox/execute", json=sleeping(1.0), headers=headers)
        assert (again.status_code, again.json()["id"], again.json()["stdout"]) == (200, third, "up\nover\n")


def commands(server: Server) -> bytes:
    lines = b""
    for pid in descendants(server.pid):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                lines += file.read()
        except OSError:
            continue
    return lines


def final(http: httpx2.Client, id: str) -> dict[str, Any]:
    record = http.get(f"/api/sandbox/runs/{id}").json()
    return record if record["ended"] else {}
