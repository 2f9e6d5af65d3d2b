"""Runs that print much: what is kept is bounded, lies outside the row of its run, and is told whole to who asks."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from serving import Server, served
from watching import forget_peak, peak, resident
from witness import eventually

pytestmark = pytest.mark.engine

MB = 1_000_000
CAP = 4 * 1024 * 1024
CONFIG = f"[service]\noutput = {CAP}\noutput_memory = {3 * CAP}\ndrain = 1\n"
FLOOD = """import os
block = memoryview((b"x" * 99 + b"\\n") * 10_000)
for _ in range({blocks}):
    for stream in (1, 2):
        rest = block
        while rest:
            rest = rest[os.write(stream, rest):]
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with served(config=CONFIG, MAX_CONTAINERS="4") as server:
        yield server


@pytest.fixture
def http(server: Server) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client


def asked(code: str, **more: object) -> dict[str, object]:
    return {"code": code, "backend": "native", **more}


def test_over_the_service_s_cap_of_output_a_request_is_refused_and_the_default_is_cut_to_it(
    http: httpx2.Client,
) -> None:
    refused = http.post("/api/sandbox/execute", json=asked("print(1)", limits={"output": CAP + 1}))
    assert refused.status_code == 403, refused.text
    assert "limits.output" in refused.json()["detail"]
    result = http.post("/api/sandbox/execute", json=asked(FLOOD.format(blocks=8))).json()
    assert result["status"] == "output_limit"
    assert CAP <= len(result["stdout"]) < CAP + 200


def test_a_large_result_is_the_same_in_the_answer_the_record_and_under_its_key(
    http: httpx2.Client, server: Server
) -> None:
    code = "import sys; print('\\u20ac\\n\\x01\"' * 300_000); sys.stderr.write('e' * 1000)"
    body = asked(code, collect=["*"]) | {"code": code + "; open('f', 'wb').write(b'z' * 1_000_000)"}
    first = http.post("/api/sandbox/execute", json=body, headers={"Idempotency-Key": "large"}).json()
    assert first["stdout"] == '\u20ac\n\x01"' * 300_000 + "\n"
    assert first["stderr"] == "e" * 1000
    again = http.post("/api/sandbox/execute", json=body, headers={"Idempotency-Key": "large"}).json()
    assert again == first
    record = http.get(f"/api/sandbox/runs/{first['id']}").json()
    assert record["state"] == "finished"
    assert {"id": first["id"], **record["result"]} == first
    shown = server.belljar("records", "show", first["id"], "--json")
    assert json.loads(shown.stdout)["result"] == record["result"]


def test_a_large_result_is_not_in_the_row_of_its_run(http: httpx2.Client, server: Server) -> None:
    id = http.post("/api/sandbox/execute", json=asked("print('x' * 3_000_000)")).json()["id"]

    def sizes() -> list[int]:
        with sqlite3.connect(server.data_dir / "records.db") as db:
            return [
                size for (size,) in db.execute("SELECT length(result) FROM runs WHERE id = ? AND result != ''", [id])
            ]

    assert eventually(sizes)
    assert sizes()[0] < 10_000
    with sqlite3.connect(server.data_dir / "records.db") as db:
        parts = [size for (size,) in db.execute("SELECT length(part) FROM result_parts WHERE container_id = ?", [id])]
    assert sum(parts) > 3_000_000
    assert max(parts) <= 512 * 1024


def test_outputs_of_one_caller_have_a_bounded_part_of_the_memory_and_a_run_beyond_is_ended(http: httpx2.Client) -> None:
    held = FLOOD.format(blocks=6) + "import time; time.sleep(2)"
    with ThreadPoolExecutor(4) as threads:
        asks = [threads.submit(http.post, "/api/sandbox/execute", json=asked(held)) for _ in range(3)]
        results = [ask.result().json() for ask in asks]
    ended = [result for result in results if result["warnings"]]
    assert ended, "three of them hold six times the cap, and half of that is all they may"
    assert all(result["status"] == "output_limit" for result in results)
    assert "outputs of runs of yours" in ended[0]["warnings"][0]
    after = http.post("/api/sandbox/execute", json=asked(FLOOD.format(blocks=4))).json()
    assert not after["warnings"], "what they held was not given back"


def flood(server: Server, http: httpx2.Client, runs: int) -> tuple[list[dict[str, object]], float, float]:
    """What runs that print far too much come to, what they add to the server, and how long a neighbour waits."""
    for backend in ("wasm", "native"):  # whatever a first run loads is not the flood's
        http.post("/api/sandbox/execute", json={"code": "print(1)", "backend": backend})
    forget_peak(server.pid)
    before = resident(server.pid)
    slowest = 0.0
    with ThreadPoolExecutor(runs) as threads:
        asks = [
            threads.submit(http.post, "/api/sandbox/execute", json=asked(FLOOD.format(blocks=250))) for _ in range(runs)
        ]
        while not all(ask.done() for ask in asks):
            start = time.monotonic()
            other = http.post("/api/sandbox/execute", json={"code": "print(1)", "backend": "wasm"})
            slowest = max(slowest, time.monotonic() - start)
            assert other.json()["stdout"] == "1\n"
        results = [ask.result().json() for ask in asks]
    return results, (peak(server.pid) - before) / MB, slowest


def test_runs_that_print_without_end_leave_the_server_small_and_every_one_of_them_ends_in_the_records(
    http: httpx2.Client, server: Server
) -> None:
    results, grown, slowest = flood(server, http, 3)
    assert {result["status"] for result in results} == {"output_limit"}
    assert grown < 100, f"{grown:.0f} MB more"
    assert slowest < 10, f"a neighbour waited {slowest:.1f} s"
    assert eventually(lambda: http.get("/api/sandbox/runs", params={"state": "running"}).json() == [])


@pytest.mark.exhaustive("ten runs of half a gigabyte each; three small ones are in the test above")
def test_ten_runs_of_one_caller_that_print_half_a_gigabyte_each_leave_the_server_below_a_gigabyte() -> None:
    with (
        served(config="[service]\ndrain = 1\n", MAX_CONTAINERS="10") as server,
        httpx2.Client(base_url=server.url, timeout=300) as http,
    ):
        results, grown, slowest = flood(server, http, 10)
        assert {result["status"] for result in results} == {"output_limit"}
        assert grown < 900, f"{grown:.0f} MB more"
        assert slowest < 20, f"a neighbour waited {slowest:.1f} s"
        assert eventually(lambda: http.get("/api/sandbox/runs", params={"state": "running"}).json() == [])
