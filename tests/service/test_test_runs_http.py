"""`POST /api/sandbox/test` on a real server: the specified body and answer, live lines, cancellation, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from belljar.client.client import Client
from belljar.core import errors
from serving import Server, served
from small_projects import HANGS, LEAVES, project
from witness import eventually

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("projects")
    folder.chmod(0o755)
    project(folder / "sums")
    project(folder / "leaves", LEAVES)
    project(folder / "hangs", HANGS)
    (folder / "empty").mkdir()
    return folder


@pytest.fixture(scope="module")
def server(projects: Path) -> Iterator[Server]:
    with served(BELLJAR_PROJECTS=str(projects), BELLJAR_BACKEND="native") as server:
        yield server


@pytest.fixture
def http(server: Server) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=90) as client:
        yield client


def test_the_bodies_of_the_specification_are_taken_and_answered(http: httpx2.Client, projects: Path) -> None:
    body = {
        "project_path": str(projects / "sums"), "test_command": "python3 -m unittest", "environment": {"A": 1},
        "timeout_seconds": 60,
    }  # fmt: skip
    answer = http.post("/api/sandbox/test", json=body)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert (told["passed"], told["failed"], told["skipped"], told["status"]) == (1, 1, 1, "failed")
    assert told["coverage"] is None and told["error"] is None and "one is not two" in told["output"]
    (failure,) = told["failures"]
    assert (failure["file"], failure["line"], failure["kind"]) == ("test_it.py", 6, "failed")
    assert told["framework"] == "unittest" and told["guarantees"]["isolation"] == "namespace"
    lines = http.get(f"/api/sandbox/{told['id']}/logs").json()["lines"]
    assert sum(line["stream"] == "display" and "test_it.Sums" in line["message"] for line in lines) == 3
    assert http.get(f"/api/sandbox/runs/{told['id']}").json()["state"] == "finished"


def test_the_same_key_is_answered_from_one_run_and_without_waiting_comes_a_record(
    http: httpx2.Client, projects: Path
) -> None:
    body, key = {"project_path": str(projects / "sums")}, {"Idempotency-Key": "tests-1"}
    first, second = (http.post("/api/sandbox/test", json=body, headers=key).json() for _ in range(2))
    assert first == second and first["status"] == "failed"
    taken = http.post("/api/sandbox/test", json=body | {"wait": False})
    assert taken.status_code == 202 and taken.json()["id"] != first["id"]


def test_what_crashed_or_hung_has_its_own_status_and_a_run_can_be_cancelled(
    http: httpx2.Client, projects: Path
) -> None:
    crashed = http.post("/api/sandbox/test", json={"project_path": str(projects / "leaves")}).json()
    assert (crashed["status"], crashed["failed"]) == ("crashed", 0) and crashed["error"]["message"]
    hangs = {"project_path": str(projects / "hangs")}
    late = http.post("/api/sandbox/test", json=hangs | {"timeout_seconds": 2}).json()
    assert (late["status"], late["error"]["error_type"]) == ("timeout", "TIMEOUT")
    id = http.post("/api/sandbox/test", json=hangs | {"wait": False}).json()["id"]
    eventually(lambda: http.get(f"/api/sandbox/runs/{id}").json()["backend"] == "native", 30)
    ended = http.post(f"/api/sandbox/runs/{id}/cancel").json()
    assert ended["result"]["status"] == "aborted" or ended["state"] == "failed"


def test_what_may_not_be_or_makes_no_sense_is_refused_and_nothing_is_run(http: httpx2.Client, projects: Path) -> None:
    for body, code in (
        ({"project_path": "/etc"}, 403), ({"project_path": str(projects / "empty")}, 422), ({}, 422),
        ({"project_path": str(projects / "sums"), "timeout_seconds": 301}, 403),
        ({"project_path": str(projects / "sums"), "shard": "3/2"}, 422),
        ({"project_path": str(projects / "sums"), "reports": ["../../etc/*"]}, 422),
        ({"project_path": str(projects / "sums"), "test_command": False}, 422),
    ):  # fmt: skip
        answer = http.post("/api/sandbox/test", json=body)
        assert answer.status_code == code, (body, answer.text)
        assert answer.json()["kind"], answer.text


def test_the_client_gets_the_same_report_with_each_test_as_it_ends(server: Server, projects: Path) -> None:
    heard: list[str] = []
    with Client(server.url) as client:
        report = client.test(
            projects / "sums", on_event=lambda event: heard.append(event.text) if event.kind == "display" else None
        )
        assert (report.status, report.passed, report.failed) == ("failed", 1, 1)
        assert len(heard) == 3 and any("failed test_it.Sums.test_bad" in text for text in heard)
        again = client.test(projects / "sums", only=[one.id for one in report.failures])
        assert [case.id for case in again.tests] == ["test_it.Sums.test_bad"]
        with pytest.raises(errors.PolicyDenied):
            client.test("/etc")
        with client.sandbox(living=True, backend="native") as box:
            box.files.upload(projects / "sums")
            mine = box.test()
    assert (mine.status, mine.passed, mine.failed, mine.skipped) == ("failed", 1, 1, 1)
