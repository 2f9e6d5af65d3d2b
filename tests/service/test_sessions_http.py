"""Sessions over HTTP where something is repeated, cut off, refused or looked into afterwards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from belljar import Client
from belljar.core import errors
from serving import Server, posted, served
from witness import eventually

pytestmark = pytest.mark.engine
SESSIONS = "/api/sandbox/sessions"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "audit.log"


@pytest.fixture(scope="module")
def server(log: Path) -> Iterator[Server]:
    with served(MAX_CONTAINERS="8", BELLJAR_AUDIT_LOG=str(log)) as server:
        yield server


@pytest.fixture
def http(server: Server) -> Iterator[httpx2.Client]:
    """Whatever a test leaves open is closed after it."""
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client
        for record in client.get(SESSIONS).json():
            client.delete(f"{SESSIONS}/{record['id']}")


def opened(http: httpx2.Client, **body: object) -> str:
    answer = http.post(SESSIONS, json={"backend": "wasm"} | body)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def turn(http: httpx2.Client, id: str, code: str, key: str = "", **body: object) -> httpx2.Response:
    headers = {"Idempotency-Key": key} if key else {}
    return http.post(f"{SESSIONS}/{id}/run", json={"code": code} | body, headers=headers)


def shown(answer: httpx2.Response) -> str:
    return str(answer.json()["results"][0]["text/plain"])


def lines(log: Path, **facts: str) -> list[dict[str, Any]]:
    every = [json.loads(line) for line in log.read_text().splitlines()]
    return [line for line in every if facts.items() <= line.items()]


def until_it_says(http: httpx2.Client, run: str) -> None:
    assert eventually(lambda: http.get(f"/api/sandbox/{run}/logs").json()["lines"], 30)


# --- what is known of one ---


def test_figures_of_a_session_lie_under_its_own_name_and_those_of_a_turn_under_both(http: httpx2.Client) -> None:
    id = opened(http, kind="sandbox", backend="native")
    code = "import time\nend = time.monotonic() + 1\nwhile time.monotonic() < end: pass"
    told = turn(http, id, code).json()
    assert told["container_id"] == id
    figures = http.get(f"/api/sandbox/{id}/metrics").json()
    assert figures["container_id"] == id
    assert max(sample["cpu_percent"] for sample in figures["samples"]) > 20
    assert http.get(f"/api/sandbox/{told['id']}/metrics").json()["samples"] == figures["samples"]
    http.delete(f"{SESSIONS}/{id}")
    assert http.get(f"/api/sandbox/{id}/metrics").status_code == 404
    assert http.get(f"/api/sandbox/{told['id']}/metrics").json()["samples"] == figures["samples"]


@pytest.mark.parametrize(("kind", "backend"), [("session", "wasm"), ("session", "native"), ("sandbox", "native")])
def test_an_auditor_finds_a_turn_by_its_run_and_by_its_session(
    http: httpx2.Client, server: Server, log: Path, kind: str, backend: str
) -> None:
    id = opened(http, kind=kind, backend=backend)
    run = turn(http, id, "print(1)").json()["id"]
    http.delete(f"{SESSIONS}/{id}")
    assert [line["kind"] for line in lines(log, run=run)] == ["requested", "finished"]
    assert all(line["session"] == id for line in lines(log, run=run))
    assert [line["kind"] for line in lines(log, run=id)] == ["created", "destroyed"]
    told = json.loads(server.belljar("audit", "show", "--run", id, "--json").stdout)
    assert [line["kind"] for line in told] == ["created", "requested", "finished", "destroyed"]


def test_a_fork_has_a_name_of_its_own_in_the_audit_log(http: httpx2.Client, log: Path) -> None:
    id = opened(http)
    fork = http.post(f"{SESSIONS}/{id}/fork", json={}).json()["id"]
    assert [line["backend"] for line in lines(log, run=fork, kind="created")] == ["wasm"]


def test_a_folder_that_is_refused_to_a_session_is_recorded_and_counted_like_one_refused_to_a_run(
    http: httpx2.Client, log: Path
) -> None:
    def counted() -> float:
        found = re.search(r"refus\w*\{[^}]*policy_denied[^}]*\} ([\d.]+)", http.get("/metrics").text)
        return float(found[1]) if found else 0.0

    before, known = counted(), len(lines(log, kind="refused"))
    assert http.post(SESSIONS, json={"project_path": "/etc"}).status_code == 403
    assert counted() == before + 1
    (line,) = lines(log, kind="refused")[known:]
    assert line["error"] == "policy_denied" and "project_path" in line["message"]
    assert line["workspace"]["path"] == "/etc"


# --- the same request again ---


def test_the_same_key_is_one_turn_and_gets_its_answer_even_when_the_session_is_closed(http: httpx2.Client) -> None:
    id = opened(http)
    turn(http, id, "n = 0")
    told = [turn(http, id, "n += 1; n", "one turn").json() for _ in range(2)]
    assert told[0] == told[1] and shown(turn(http, id, "n")) == "1"
    taken = turn(http, id, "n += 1; n", "one turn", wait=False)
    assert (taken.status_code, taken.json()["id"]) == (202, told[0]["id"])
    other = turn(http, id, "n += 2; n", "one turn")
    assert (other.status_code, other.json()["kind"]) == (422, "invalid_request")
    http.delete(f"{SESSIONS}/{id}")
    assert turn(http, id, "n += 1; n", "one turn").json() == told[0]


def test_a_turn_that_was_turned_away_leaves_its_key_free(http: httpx2.Client) -> None:
    id = opened(http)
    wrong = http.post(f"{SESSIONS}/{id}/run", json={"command": ["ls"]}, headers={"Idempotency-Key": "twice"})
    assert wrong.status_code == 422
    assert shown(turn(http, id, "6 * 7", "twice")) == "42"


def test_the_same_key_opens_one_session_though_it_is_sent_twice_at_once(http: httpx2.Client) -> None:
    headers = {"Idempotency-Key": "one session"}
    with ThreadPoolExecutor(4) as threads:
        sent = [threads.submit(http.post, SESSIONS, json={"backend": "wasm"}, headers=headers) for _ in range(4)]
        told = [each.result() for each in sent]
    assert [answer.status_code for answer in told] == [201] * 4, [answer.text for answer in told]
    (id,) = {answer.json()["id"] for answer in told}
    assert [record["id"] for record in http.get(SESSIONS).json()] == [id]
    other = http.post(SESSIONS, json={"backend": "native"}, headers=headers)
    assert (other.status_code, other.json()["kind"]) == (422, "invalid_request")
    http.delete(f"{SESSIONS}/{id}")
    again = http.post(SESSIONS, json={"backend": "wasm"}, headers=headers)
    assert again.status_code == 201 and again.json()["id"] != id, "that one is closed"


def test_a_session_that_was_refused_leaves_its_key_free(http: httpx2.Client) -> None:
    headers = {"Idempotency-Key": "refused first"}
    assert http.post(SESSIONS, json={"project_path": "/etc"}, headers=headers).status_code == 403
    assert http.post(SESSIONS, json={"backend": "wasm"}, headers=headers).status_code == 201


def test_the_same_key_is_one_checkpoint_one_fork_and_one_way_back(http: httpx2.Client) -> None:
    id = opened(http)

    def post(what: str, body: dict[str, str], key: str) -> httpx2.Response:
        return http.post(f"{SESSIONS}/{id}/{what}", json=body, headers={"Idempotency-Key": key})

    turn(http, id, "x = 1")
    points = [post("checkpoints", {}, "a checkpoint").json() for _ in range(2)]
    assert points[0] == points[1]
    forks = [post("fork", {}, "a fork").json() for _ in range(2)]
    assert forks[0] == forks[1] and len(http.get(SESSIONS).json()) == 2
    turn(http, id, "x = 2")
    back = {"checkpoint": points[0]["id"]}
    assert post("rollback", back, "back").status_code == 204
    turn(http, id, "x += 10")
    assert post("rollback", back, "back").status_code == 204
    assert shown(turn(http, id, "x")) == "11", "it went back a second time"
    assert post("rollback", back, "a fork").status_code == 422


# --- who goes away, and who gives up ---


def latest(http: httpx2.Client, session: str) -> str:
    def found() -> list[str]:
        return [run["id"] for run in http.get("/api/sandbox/runs").json() if run["session"] == session]

    ids = eventually(found)
    assert isinstance(ids, list) and ids, "the turn was never taken in"
    return str(ids[0])


def ended(http: httpx2.Client, run: str) -> dict[str, Any]:
    def record() -> dict[str, Any]:
        told: dict[str, Any] = http.get(f"/api/sandbox/runs/{run}").json()
        return told if told["ended"] else {}

    return dict(eventually(record, 20) or {})  # type: ignore[call-overload]


def test_a_client_that_vanishes_takes_its_turn_along_unless_it_has_a_key_to_come_back_with(
    server: Server, http: httpx2.Client
) -> None:
    id = opened(http, kind="sandbox", backend="native")
    path = f"{SESSIONS}/{id}/run"
    with posted(server, path, {"command": ["sh", "-c", "echo up; sleep 4321"]}):
        first = latest(http, id)
        until_it_says(http, first)
    assert ended(http, first)["result"]["status"] == "aborted"
    body: dict[str, object] = {"command": ["sh", "-c", "echo up; sleep 1; echo over"]}
    headers = {"Idempotency-Key": "a turn to come back to"}
    with posted(server, path, body, **headers):
        assert eventually(lambda: latest(http, id) != first)
        until_it_says(http, latest(http, id))
    again = http.post(path, json=body, headers=headers)
    assert (again.status_code, again.json()["stdout"]) == (200, "up\nover\n")


def test_who_gives_up_while_another_has_the_turn_takes_nothing_from_them(http: httpx2.Client) -> None:
    id = opened(http, backend="native")
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(turn, http, id, "import time\nprint('up', flush=True)\ntime.sleep(2)\nx = 1")
        until_it_says(http, latest(http, id))
        second = turn(http, id, "x = 2", wait=False).json()["id"]
        given_up = http.post(f"/api/sandbox/runs/{second}/cancel").json()
        assert given_up["result"]["status"] == "aborted"
        assert not first.done(), "it waited for the other"
        assert first.result().json()["status"] == "success"
    assert shown(turn(http, id, "x")) == "1"


def test_a_session_ends_its_idle_time_after_a_turn_that_was_longer(http: httpx2.Client) -> None:
    id = opened(http, backend="native", idle=1.0)
    assert turn(http, id, "import time; time.sleep(2)").json()["status"] == "success"
    assert eventually(lambda: http.get(f"{SESSIONS}/{id}").status_code == 404, 8)


# --- from Python ---


def test_the_client_sends_what_got_no_answer_again_and_it_is_done_once(
    server: Server, http: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(server.url)
    really, lost = client._core._transport.once, set[str]()

    async def once(method: str, path: str, **options: Any) -> bytes:
        """Loses the first answer to each POST."""
        answer = await really(method, path, **options)
        if method == "POST" and path not in lost:
            lost.add(path)
            raise _unanswered()
        return answer

    monkeypatch.setattr(client._core._transport, "once", once)
    with client.session(backend="wasm") as session:
        assert session.run("n = globals().get('n', 0) + 1; n").results[0]["text/plain"] == "1"
        point = session.checkpoint()
        session.run("n = 5")
        session.rollback(point)
        assert session.run("n").results[0]["text/plain"] == "1"
        with session.fork():
            assert len(http.get(SESSIONS).json()) == 2
    assert len(lost) == 5


def _unanswered() -> errors.BelljarError:
    from belljar.client.connections import Unanswered

    return Unanswered("the answer was lost", sent=True)
