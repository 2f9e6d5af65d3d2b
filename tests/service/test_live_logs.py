"""Lines as they come: over WebSockets that are cut, that nobody reads, and of which there are a thousand."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import httpx2
import pytest

from serving import Server, served
from watching import Refused, Watcher, forget_peak, peak, resident
from witness import eventually

pytestmark = pytest.mark.engine

MB = 1_000_000


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 8192:
        pytest.skip(f"NOTHING of many watchers was checked: a process may open {hard} files here, and 8192 are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 8192), hard))  # the server inherits it
    config = "[service]\ndrain = 1\nlog_memory = 65536\n"
    with served(config=config, MAX_CONTAINERS="4") as server:
        yield server
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def http(server: Server) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client


def started(http: httpx2.Client, code: str, **more: object) -> tuple[str, str]:
    """The id of a run, and where its lines are told."""
    body = {"code": code, "backend": "native", "wait": False, **more}
    id = http.post("/api/sandbox/execute", json=body).json()["id"]
    return id, f"/api/sandbox/{id}/logs"


def state(http: httpx2.Client, id: str) -> str:
    return str(http.get(f"/api/sandbox/runs/{id}").json()["state"])


def ended(http: httpx2.Client, id: str, seconds: float = 60.0) -> dict[str, object]:
    assert eventually(lambda: state(http, id) not in ("queued", "running"), seconds)
    return http.get(f"/api/sandbox/runs/{id}").json()  # type: ignore[no-any-return]


def test_a_watcher_gets_every_line_with_its_number_and_the_state_as_the_reason(
    http: httpx2.Client, server: Server
) -> None:
    code = "import sys\nfor i in range(3): print(i)\nprint('bad', file=sys.stderr)\nsys.stdout.write('no end')"
    id, path = started(http, code)
    with Watcher(server.url, path) as watcher:
        lines = list(watcher.lines())
    assert [line["number"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["message"] for line in lines if line["stream"] == "stdout"] == ["0", "1", "2", "no end"]
    assert [line["message"] for line in lines if line["stream"] == "stderr"] == ["bad"]
    assert {line["container_id"] for line in lines} == {id}
    assert watcher.end == (1000, "finished")
    with Watcher(server.url, f"{path}?after=4") as late:  # of a run that is over
        assert [line["number"] for line in late.lines()] == [5]
    assert late.end == (1000, "finished")


def test_a_watcher_that_is_cut_again_and_again_misses_nothing_and_gets_nothing_twice(
    http: httpx2.Client, server: Server
) -> None:
    code = "import time\nfor i in range(1, 1501):\n    print(i, flush=True)\n    if not i % 10: time.sleep(0.005)"
    _, path = started(http, code)
    heard: list[int] = []
    cuts = 0
    end = None
    while end is None:
        watcher = Watcher(server.url, f"{path}?after={len(heard)}")
        for line in watcher.lines():
            assert line["message"] == str(line["number"])
            heard.append(line["number"])
            if len(heard) % 97 == 0:
                break
        end = watcher.end
        cuts += end is None
        watcher.cut()
    assert heard == list(range(1, 1501))
    assert cuts == 15
    assert end == (1000, "finished")


def test_events_resume_after_the_last_one_that_was_heard(http: httpx2.Client) -> None:
    code = "import time\nfor i in range(1, 301):\n    print(i, flush=True); time.sleep(0.002)"
    _, path = started(http, code)
    heard: list[int] = []
    while len(heard) < 300:
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(len(heard))}
        with http.stream("GET", path, headers=headers) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    heard.append(json.loads(line[6:])["number"])
                    if len(heard) % 70 == 0:
                        break
    assert heard == list(range(1, 301))


def test_watchers_that_never_read_neither_slow_the_run_nor_cost_memory(http: httpx2.Client, server: Server) -> None:
    code = """import time
start = time.monotonic()
for i in range(300):
    print('x' * 30_000)
print('took', time.monotonic() - start, flush=True)"""
    alone = ended(http, started(http, code)[0])
    forget_peak(server.pid)
    before = resident(server.pid)
    with ExitStack() as stack:
        id, path = started(http, "import time; time.sleep(1)\n" + code)
        for _ in range(50):
            stack.enter_context(Watcher(server.url, path, buffer=4096))
        assert state(http, id) == "running"
        crowd = ended(http, id)
        assert state(http, id) == "finished"
        assert http.get("/healthz").status_code == 200
        grown = peak(server.pid) - before
    assert grown < 150 * MB, f"{grown // MB} MB more"  # of which the result is 9, and its copies
    took = [float(run["result"]["stdout"].split()[-1]) for run in (alone, crowd)]  # type: ignore[index]
    assert took[1] < took[0] + 5, took


@pytest.mark.exhaustive("a thousand WebSockets take a quarter of a minute; fifty are in the test above")
def test_a_thousand_watchers_of_one_run_get_all_of_its_lines(http: httpx2.Client, server: Server) -> None:
    code = "import time\nprint('up', flush=True); time.sleep(8)\nfor i in range(20): print(i, flush=True)"
    _, path = started(http, code, timeout_seconds=60)
    with ExitStack() as stack:
        with ThreadPoolExecutor(8) as threads:
            watchers = list(threads.map(lambda _: Watcher(server.url, path), range(1000)))
        for watcher in watchers:
            stack.enter_context(watcher)
        for watcher in watchers:
            assert [line["message"] for line in watcher.lines()] == ["up", *map(str, range(20))]
            assert watcher.end == (1000, "finished")
    assert eventually(lambda: http.get("/healthz").status_code == 200)


@pytest.mark.exhaustive("three gigabytes; the conformance suite has a flood on each backend")
@pytest.mark.parametrize("length", [0, 99, 100_000])
def test_a_flood_of_a_gigabyte_ends_the_run_and_leaves_the_server_as_it_was(
    http: httpx2.Client, server: Server, length: int
) -> None:
    code = f"""import os
block = ('x' * {length} + '\\n').encode() * {1_000_000 // (length + 1) + 1}
for _ in range(1000):
    rest = memoryview(block)
    while rest:
        rest = rest[os.write(1, rest):]"""
    for backend in ("wasm", "native"):  # whatever a first run loads is not the flood's
        http.post("/api/sandbox/execute", json={"code": "print(1)", "backend": backend})
    forget_peak(server.pid)
    before = resident(server.pid)
    id, path = started(http, code, timeout_seconds=60)
    slowest = 0.0
    while state(http, id) in ("queued", "running"):
        start = time.monotonic()
        other = http.post("/api/sandbox/execute", json={"code": "print(1)", "backend": "wasm"})
        slowest = max(slowest, time.monotonic() - start)
        assert other.json()["stdout"] == "1\n"
    record = http.get(f"/api/sandbox/runs/{id}").json()
    assert record["result"]["status"] == "output_limit", record["result"]["status"]
    assert len(record["result"]["stdout"]) < 10.1 * 1024 * 1024
    assert slowest < 10, f"another request took {slowest:.1f} s"
    grown = peak(server.pid) - before
    assert grown < 150 * MB, f"{grown // MB} MB more"
    page = http.get(path, params={"limit": 100}).json()
    assert page["lines"][0]["number"] == 1
    assert page["lines"][0]["message"] == "x" * min(length, 64 * 1024)
    assert page["state"] == "finished"
    with Watcher(server.url, path) as watcher:
        numbers = [told["number"] for _, told in zip(range(2000), watcher.lines(), strict=False)]
    assert numbers == sorted(set(numbers))


def test_an_unknown_run_is_refused_before_the_socket_is_open(server: Server) -> None:
    with pytest.raises(Refused) as refused:
        Watcher(server.url, "/api/sandbox/bj-nothing/logs")
    assert refused.value.status in (403, 404)
    with suppress(ValueError):
        assert json.loads(refused.value.body)["kind"] == "not_found"
