"""Living sandboxes over HTTP as wholes: opened, found, paused, given more time, closed, and what is told afterwards."""

from __future__ import annotations

import time
from datetime import datetime

import httpx2
import pytest

from boxes import SANDBOXES, OpenBox
from serving import Server, served
from watching import Refused
from witness import eventually

pytestmark = pytest.mark.engine


def seconds_left(record: dict[str, str]) -> float:
    return datetime.fromisoformat(record["expires"]).timestamp() - time.time()


def test_it_is_found_by_its_labels_and_told_with_what_it_can_do(http: httpx2.Client, server: Server) -> None:
    box = OpenBox.opened(http, server.url, labels={"task": "42", "by": "agent"}, home="/home/agent", expires=600)
    other = OpenBox.opened(http, server.url, labels={"task": "43"})

    def found(*labels: str) -> set[str]:
        return {record["id"] for record in http.get(SANDBOXES, params={"label": labels}).json()}

    assert found("task:42") == {box.id} and found("task") == {box.id, other.id} and found("task:42", "by:x") == set()
    told = box.get().json()
    assert (told["state"], told["home"], told["backend"]) == ("running", "/home/agent", "native")
    assert {"pty", "dial", "pause", "watch"} <= set(told["features"]) and "python" in told["interpreters"]
    assert 500 < seconds_left(told) <= 600
    assert box.sh("cd; pwd").strip() == "/home/agent"


def test_what_a_command_leaves_running_goes_on_and_files_stay(box: OpenBox) -> None:
    box.sh("echo kept > notes; sleep 100 & echo $! > pid")
    assert box.sh("cat notes; kill -0 $(cat pid) && echo lives") == "kept\nlives\n"
    told = box.post("run", {"code": "print(open('notes').read())", "cwd": "/workspace", "environment": {"A": "1"}})
    assert told.json()["stdout"] == "kept\n\n"
    assert box.post("run", {"command": ["pwd"], "cwd": "/nowhere"}).status_code == 422


def test_a_command_may_be_a_line_of_shell_and_a_body_that_is_no_json_says_what_to_send(box: OpenBox) -> None:
    assert box.post("run", {"command": "echo $((6 * 7)) | cat"}).json()["stdout"] == "42\n"
    told = box.http.post(f"{box.path}/run", content=b'{"code": "1"}').json()
    assert told["detail"] == "body: is no JSON object" and "content-type: application/json" in told["fix"]


def test_a_paused_one_does_nothing_until_it_goes_on(box: OpenBox) -> None:
    ticking = box.start("while true; do echo tick; sleep 0.02; done")
    box.said(ticking, "tick")
    assert box.post("pause").json()["state"] == "paused" == box.post("pause").json()["state"]
    last = 0

    def still() -> bool:
        nonlocal last
        last = box.process(ticking)["last"]
        return not box.get(f"processes/{ticking}/output", since=last, wait=0.3).json()["chunks"]

    assert eventually(still, 30)
    refused = box.post("run", {"command": ["true"]})
    assert (refused.status_code, refused.json()["kind"]) == (422, "invalid_request")
    assert box.post("resume").json()["state"] == "running"
    assert box.get(f"processes/{ticking}/output", since=last, wait=20).json()["chunks"]


def test_its_time_can_be_moved_but_not_beyond_the_longest_life(box: OpenBox) -> None:
    assert 90 < seconds_left(box.post("extend", {"seconds": 100}).json()) <= 100
    assert 900 < seconds_left(box.post("extend", {"seconds": 1000}).json()) <= 1000
    far = box.post("extend", {"seconds": 30 * 86400})
    assert (far.status_code, far.json()["context"]["setting"]) == (403, "service.living_lifetime")


def test_one_whose_time_is_over_is_gone_and_says_so(http: httpx2.Client, server: Server) -> None:
    box = OpenBox.opened(http, server.url, expires=0.3)
    assert eventually(lambda: box.get().json()["state"] == "ended", 30)
    assert "time was over" in box.get().json()["reason"]
    for refused in (box.post("pause"), box.get("processes"), box.get("files"), box.post("run", {"code": "1"})):
        assert (refused.status_code, refused.json()["kind"]) == (410, "session_ended"), refused.text
    with pytest.raises(Refused) as caught:
        box.attach("processes/p1/output")
    assert caught.value.status == 410


def test_one_that_pauses_when_its_time_is_over_goes_on_when_it_is_told_to(http: httpx2.Client, server: Server) -> None:
    box = OpenBox.opened(http, server.url, expires=0.3, on_expire="pause")
    assert eventually(lambda: box.get().json()["state"] == "paused", 30)
    assert box.post("extend", {"seconds": 600}).status_code == 200
    assert box.post("resume").json()["state"] == "running"
    assert box.sh("echo here") == "here\n"


def test_closing_ends_all_that_runs_and_closing_again_does_no_harm(box: OpenBox) -> None:
    box.start("sleep 1000")
    assert box.delete().status_code == 204 == box.delete().status_code
    assert (box.get().json()["state"], box.get().json()["reason"]) == ("ended", "it was closed")
    assert box.http.get(SANDBOXES).json() == []
    assert box.http.delete(f"{SANDBOXES}/bs-0000000000000000").status_code == 404


def test_the_same_key_opens_one_sandbox_and_starts_one_process(http: httpx2.Client, server: Server) -> None:
    key = {"Idempotency-Key": "one sandbox"}
    ids = {http.post(SANDBOXES, json={"backend": "native"}, headers=key).json()["id"] for _ in range(2)}
    assert len(ids) == 1
    box = OpenBox(http, server.url, ids.pop())
    started = [box.post("processes", {"command": "sleep 100"}, **{"Idempotency-Key": "one"}).json() for _ in range(2)]
    assert started[0]["id"] == started[1]["id"] and len(box.get("processes").json()) == 1
    runs = [box.post("run", {"command": ["date", "+%N"]}, **{"Idempotency-Key": "a run"}).json() for _ in range(2)]
    assert runs[0] == runs[1]
    taken = box.post("run", {"command": ["date", "+%N"], "wait": False}, **{"Idempotency-Key": "a run"})
    assert (taken.status_code, taken.json()["id"]) == (202, runs[0]["id"])


def test_it_is_among_the_sessions_and_takes_one_of_their_places(server: Server, http: httpx2.Client) -> None:
    box = OpenBox.opened(http, server.url)
    assert [record["id"] for record in http.get("/api/sandbox/sessions").json()] == [box.id]
    assert http.get(f"{SANDBOXES}/{box.id}").status_code == 200
    plain = http.post("/api/sandbox/sessions", json={"kind": "sandbox", "backend": "native"}).json()["id"]
    assert http.get(f"{SANDBOXES}/{plain}").status_code == 404, "that one does not live"
    http.delete(f"/api/sandbox/sessions/{plain}")


# --- restarts and quotas, on servers of their own ---


def test_after_a_restart_it_is_told_how_they_ended() -> None:
    with served(MAX_CONTAINERS="4") as own, httpx2.Client(base_url=own.url, timeout=60) as http:
        first = OpenBox.opened(http, own.url)
        own.restart()
        assert (first.get().json()["state"], first.get().json()["reason"]) == ("ended", "the service ended")
        second = OpenBox.opened(http, own.url)
        own.restart(kill=True)
        assert second.get().json()["state"] == "lost"
        assert second.post("pause").status_code == 410 and first.get().json()["state"] == "ended"
        assert http.get(SANDBOXES).json() == []


def test_no_more_are_open_than_may_be() -> None:
    with served(MAX_CONTAINERS="4") as own, httpx2.Client(base_url=own.url, timeout=60) as http:
        boxes = [OpenBox.opened(http, own.url) for _ in range(2)]
        full = http.post(SANDBOXES, json={"backend": "native"})
        assert (full.status_code, full.json()["kind"]) == (503, "busy")
        assert boxes[0].post("fork", {}).status_code == 503
        boxes[1].delete()
        assert boxes[0].post("fork", {}).status_code == 201


def test_none_lives_longer_than_it_may_not_even_a_paused_one() -> None:
    config = "[service]\nliving_lifetime = 4\n"
    with served(MAX_CONTAINERS="4", config=config) as own, httpx2.Client(base_url=own.url, timeout=60) as http:
        assert http.post(SANDBOXES, json={"backend": "native", "expires": 5}).status_code == 403
        usual = OpenBox.opened(http, own.url, expires=None)
        assert usual.post("extend", {"seconds": 3600}).status_code in (403, 410)
        paused = OpenBox.opened(http, own.url, expires=0.2, on_expire="pause")
        for box in (usual, paused):
            assert eventually(lambda box=box: box.get().json()["state"] == "ended", 30)
        assert "longest life" in paused.get().json()["reason"]


def test_what_is_kept_of_outputs_is_bounded_and_those_that_ended_are_forgotten_first() -> None:
    flood = "head -c 4000000 /dev/zero | tr '\\0' x"
    with served(config='[service]\noutput_memory = "3M"\n') as server, httpx2.Client(base_url=server.url) as http:
        box = OpenBox.opened(http, server.url)
        for id in ("one", "two"):
            box.start(flood, id=id)
            assert box.ended(id)["result"]["truncated"] is True
        box.start("true", id="three")
        assert [one["id"] for one in box.get("processes").json()] == ["two", "three"]
        for id in ("four", "five"):
            box.start(f"{flood}; touch over-{id}; sleep 1000", id=id)
            assert eventually(lambda id=id: box.get("files/exists", path=f"over-{id}").json()["exists"], 30)
        full = box.post("processes", {"command": "true"})
        assert (full.status_code, full.json()["kind"]) == (429, "busy"), full.text
        box.post("processes/four/kill")
        assert box.start("true")
