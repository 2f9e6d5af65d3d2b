"""What `belljar serve` says about itself: a line for each request, its id in the answer, and the figures of HTTP."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

import belljar
from serving import Server, served
from witness import eventually

pytestmark = pytest.mark.engine
EXECUTE = "/api/sandbox/execute"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with served(BELLJAR_LOG_FORMAT="json") as it:
        yield it


def lines(server: Server, **wanted: Any) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in server.log.splitlines()]
    return [line for line in found if wanted.items() <= line.items()]


def told(server: Server, **wanted: Any) -> dict[str, Any]:
    """The one line that says this; it may come a moment later than the answer."""
    assert eventually(lambda: lines(server, **wanted), 30), server.log
    [line] = lines(server, **wanted)
    return line


def figures(server: Server) -> dict[str, dict[tuple[str, ...], float]]:
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(httpx2.get(f"{server.url}/metrics").text):
        for each in family.samples:
            found.setdefault(each.name, {})[tuple(value for _, value in sorted(each.labels.items()))] = each.value
    return found


def test_its_start_is_a_line_with_address_and_version(server: Server) -> None:
    line = told(server, event="serving")
    assert (line["url"], line["version"], line["level"]) == (server.url, belljar.__version__, "info")


def test_a_request_is_one_line_with_the_id_that_its_answer_carries(server: Server) -> None:
    body = {"code": "print(6 * 7)"}
    answer = httpx2.post(f"{server.url}{EXECUTE}", json=body, params={"secret": "in-the-query"}, timeout=60)
    line = told(server, request_id=answer.headers["x-request-id"], event="request")
    assert (line["method"], line["path"], line["status"], line["level"]) == ("POST", EXECUTE, 200, "info")
    assert line["run"] == answer.json()["id"]
    assert (line["caller"], line["client"]) == ("local user", "127.0.0.1")
    assert line["ms"] > 0
    assert "in-the-query" not in server.log


def test_an_id_of_the_callers_own_is_kept_if_it_makes_sense_and_replaced_if_not(server: Server) -> None:
    def asked(given: str) -> str:
        return str(httpx2.get(f"{server.url}/api/languages", headers={"X-Request-Id": given}).headers["x-request-id"])

    assert asked("order-4711.b") == "order-4711.b"
    assert told(server, request_id="order-4711.b")["path"] == "/api/languages"
    for nonsense in ("two words", "x" * 65, 'quote"', "-dash"):
        assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{6,}", asked(nonsense)), nonsense


def test_a_refusal_is_a_warning_that_says_why(server: Server) -> None:
    answer = httpx2.get(f"{server.url}/api/languages", headers={"Host": "evil.example.org"})
    assert answer.status_code == 403
    line = told(server, request_id=answer.headers["x-request-id"])
    assert (line["level"], line["status"], line["kind"]) == ("warning", 403, "policy_denied")
    assert "evil.example.org" in line["detail"]


def test_a_run_that_the_clock_ended_is_a_warning_beside_its_request(server: Server) -> None:
    body = {"code": "while True: pass", "timeout_seconds": 1}
    answer = httpx2.post(f"{server.url}{EXECUTE}", json=body, headers={"X-Request-Id": "endless"}, timeout=60)
    assert answer.json()["status"] == "timeout"
    line = told(server, run=answer.json()["id"], status="timeout")
    assert (line["level"], line["request_id"], line["language"]) == ("warning", "endless", "python")


def test_probes_and_scrapes_are_not_logged_as_long_as_they_succeed(server: Server) -> None:
    for path in ("/healthz", "/metrics"):
        assert httpx2.get(f"{server.url}{path}").status_code == 200
    answer = httpx2.get(f"{server.url}/nothing-here")
    told(server, request_id=answer.headers["x-request-id"], status=404)
    assert [line for line in lines(server, event="request") if line["path"] in ("/healthz", "/metrics")] == []


def test_the_figures_count_requests_by_route_and_runs_in_base_units(server: Server) -> None:
    httpx2.post(f"{server.url}{EXECUTE}", json={"code": "print(sum(range(200_000)))"}, timeout=60)
    for name in ("one", "two"):
        httpx2.get(f"{server.url}/api/sandbox/runs/{name}")
        httpx2.request("PROPFIND", f"{server.url}/{name}")
    found = figures(server)
    assert found["sandbox_http_requests_total"]["GET", "/api/sandbox/runs/{id}", "404"] == 2
    assert found["sandbox_http_requests_total"]["other", "other", "404"] == 2
    assert found["sandbox_http_request_duration_seconds_count"]["POST", EXECUTE] >= 1
    assert found["sandbox_queue_wait_seconds_count"][()] >= 1
    assert sum(found["sandbox_guest_cpu_seconds_total"].values()) > 0
    assert sum(found["sandbox_guest_memory_peak_bytes_sum"].values()) > 1_000_000
    [(version, count)] = [(labels[-1], value) for labels, value in found["sandbox_build_info"].items()]
    assert (version, count) == (belljar.__version__, 1)
    assert found["sandbox_log_dropped"][()] == 0


def test_a_server_whose_log_nobody_reads_answers_and_ends_all_the_same(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("BELLJAR_", "SANDBOX_"))}
    env |= {"BELLJAR_DATA_DIR": f"{tmp_path}/data", "BELLJAR_STATE_DIR": f"{tmp_path}/state", "HOME": str(tmp_path)}
    line = [sys.executable, "-m", "belljar", "serve", "--port", "0", "--json", "--log-level", "debug"]
    with subprocess.Popen(line, env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            url = json.loads(process.stdout.readline())["url"]
            with httpx2.Client(base_url=url, timeout=30) as client:
                for _ in range(1500):  # of 150 bytes each: more than a pipe holds
                    assert client.get("/healthz").status_code == 200
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_its_end_is_told_and_the_last_lines_are_written() -> None:
    with served(BELLJAR_LOG_FORMAT="json") as server:
        answer = httpx2.get(f"{server.url}/api/languages", timeout=60)
        assert server.stop() == 0
        events = [line["event"] for line in lines(server)]
    assert "request" in events, answer
    assert "nothing new is taken in" in events[-2]
    assert events[-1] == "no run is under way any more"
