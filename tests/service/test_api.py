"""The HTTP service as a client meets it: a real server on a real socket, real sandboxes behind it."""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

import belljar
from belljar.core import errors
from serving import Server, served
from witness import eventually

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    roots = tmp_path_factory.mktemp("projects")
    roots.chmod(0o755)
    (roots / "mine").mkdir()
    (roots / "mine" / "data.txt").write_text("of the project\n")
    with served(BELLJAR_PROJECTS=str(roots), MAX_CONTAINERS="4") as server:
        server.roots = roots
        yield server


@pytest.fixture
def http(server: Server) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client


def execute(http: httpx2.Client, **body: object) -> httpx2.Response:
    return http.post("/api/sandbox/execute", json=body)


# --- running ---


def test_a_snippet_is_run_and_answered_in_the_mission_s_words(http: httpx2.Client) -> None:
    answer = execute(http, language="python", code="print(6 * 7)", environment={}, timeout_seconds=30)
    assert answer.status_code == 200
    told = answer.json()
    assert (told["exit_code"], told["stdout"], told["stderr"], told["status"]) == (0, "42\n", "", "success")
    assert told["duration_ms"] > 0
    assert {
        "memory_used_mb",
        "error",
        "backend",
        "guarantees",
        "reasons",
        "denied",
        "left_out",
        "warnings",
        "truncated",
        "id",
    } <= told.keys()
    assert told["container_id"] == told["id"]


def test_context_files_environment_and_stdin_reach_the_guest_and_files_come_back(http: httpx2.Client) -> None:
    code = """import os, sys
open('out.bin', 'wb').write(open('in.bin', 'rb').read())
open('out.txt', 'w').write('text')
print(os.environ['A'], sys.stdin.read())"""
    body = base64.b64encode(bytes(range(256))).decode()
    told = execute(
        http, code=code, context_files={"in.bin": {"base64": body}}, environment={"A": "b"}, stdin="read",
        collect=["out.*"],
    ).json()  # fmt: skip
    assert told["stdout"] == "b read\n"
    files = {file["path"]: file["content"] for file in told["files"]}
    assert files == {"out.bin": {"base64": body}, "out.txt": "text"}


@pytest.mark.parametrize(
    "body, status",
    [
        (b'{"code": "print(1)", "backend": "wasm"}', 200),
        (b'{"code": "print(1)", "wait": false}', 202),
        (b"{}", 422),
        (b'{"code": "print(1)", "colour": "red"}', 422),
        (b'{"code": "print(1)"', 422),
        (b"[" * 100_000, 422),
        (b"", 422),
        (b'{"code": "print(1)", "backend": "no such"}', 422),
        (b'{"code": "print(1)", "project_path": "/"}', 403),
        (b'{"command": ["ls"], "backend": "wasm"}', 403),
    ],
)
def test_a_request_gets_the_same_answer_whole_in_pieces_and_under_a_key(
    http: httpx2.Client, body: bytes, status: int
) -> None:
    kind, key = {"content-type": "application/json"}, {"idempotency-key": uuid.uuid4().hex}
    ways: list[tuple[Any, dict[str, str]]] = [
        (body, kind),
        (body, {"content-type": "application/json; charset=utf-8"}),
        (iter([body[:9], body[9:]]), kind),
        (body, kind | key),
    ]
    answers = [http.post("/api/sandbox/execute", content=content, headers=headers) for content, headers in ways]
    assert [answer.status_code for answer in answers] == [status] * len(ways), answers[0].text
    assert len({frozenset(answer.json()) for answer in answers}) == 1
    assert len({answer.json().get("detail") for answer in answers}) == 1
    assert len({answer.headers["content-type"] for answer in answers}) == 1


@pytest.mark.parametrize(
    "headers",
    [{"content-type": "text/plain"}, {"content-type": "application/json", "idempotency-key": "k" * 256}, {}],
)
def test_a_body_that_is_not_called_json_and_a_key_that_is_too_long_are_refused(
    http: httpx2.Client, headers: dict[str, str]
) -> None:
    answer = http.post("/api/sandbox/execute", content=b'{"code": "print(1)"}', headers=headers)
    assert (answer.status_code, answer.json()["kind"]) == (422, "invalid_request")


def test_a_refusal_s_remedy_is_in_the_words_of_the_surface(http: httpx2.Client, server: Server) -> None:
    refused = execute(http, code="1", language="python", backend="none").json()
    assert "(GET /api/backends shows which work here)" in refused["fix"], refused
    with belljar.Client(server.url) as client, pytest.raises(errors.PolicyDenied) as heard:
        client.run("1", backend="none")
    assert "(`belljar doctor` shows which work here)" in (heard.value.fix or ""), heard.value.fix


def test_a_command_is_run(http: httpx2.Client) -> None:
    assert execute(http, command=["sh", "-c", "echo hi; exit 3"], backend="native").json()["exit_code"] == 3


def test_a_guest_s_failure_is_an_answer_and_not_an_error(http: httpx2.Client) -> None:
    answer = execute(http, code="1/0")
    assert answer.status_code == 200
    assert answer.json()["error"]["error_type"] == "RUNTIME_ERROR"
    timeout = execute(http, code="while True: pass", timeout_seconds=0.3)
    assert (timeout.status_code, timeout.json()["status"]) == (200, "timeout")


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"code": "1", "nonsense": 1}, 422, "invalid_request"),
        ({}, 422, "invalid_request"),
        ({"code": "1", "command": ["x"]}, 422, "invalid_request"),
        ({"code": "1", "limits": {"memory": "999T"}}, 422, "invalid_request"),
        ({"code": "1", "limits": {"memory": "64G"}}, 403, "policy_denied"),
        ({"code": "1", "timeout_seconds": 3000}, 403, "policy_denied"),
        ({"code": "1", "project_path": "/etc"}, 403, "policy_denied"),
        ({"code": "1", "backend": "none"}, 403, "policy_denied"),
        *(
            ({"code": "1", "backend": "docker", "image": image}, 422, "invalid_request")
            for image in ("Not An Image", "UPPER/case", "-v", "a:b:c", "x@sha256:12", "../up", "/")
        ),
        ({"code": "1", "language": "cobol"}, 422, "invalid_request"),
    ],
)
def test_nonsense_and_refusals_are_problems_of_different_kinds(
    http: httpx2.Client, body: dict[str, object], status: int, kind: str
) -> None:
    answer = execute(http, **body)
    assert (answer.status_code, answer.json()["kind"]) == (status, kind), answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["detail"]


def test_a_body_that_is_no_json_is_told_as_that(http: httpx2.Client) -> None:
    answer = http.post("/api/sandbox/execute", content=b"{", headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"


# --- projects ---


def test_a_project_below_a_listed_root_is_mounted_read_only(http: httpx2.Client, server: Server) -> None:
    path = str(server.roots / "mine")
    told = execute(http, command=["sh", "-c", "cat data.txt; touch x"], project_path=path, backend="native").json()
    assert told["stdout"] == "of the project\n"
    assert told["exit_code"] != 0
    assert not (server.roots / "mine" / "x").exists()


def test_gits_configuration_in_a_project_is_read_only_unless_granted_by_name(
    http: httpx2.Client, server: Server
) -> None:
    config = server.roots / "with-git" / ".git" / "config"
    config.parent.mkdir(parents=True)
    config.write_text("of the host")
    body: dict[str, Any] = {"project_path": str(server.roots / "with-git"), "backend": "native", "write": True}
    command = ["sh", "-c", "echo x > .git/config"]
    assert "Read-only file system" in execute(http, command=command, **body).json()["stderr"]
    id = http.post("/api/sandbox/sessions", json={"kind": "sandbox", **body}).json()["id"]
    path = f"/api/sandbox/sessions/{id}"
    assert "Read-only" in http.post(f"{path}/run", json={"command": command}).json()["stderr"]
    refused = http.put(f"/api/sandbox/{id}/files/.git/hooks/pre-commit", content=b"x")
    assert (refused.status_code // 100, "write_git" in refused.text) == (4, True), refused.text
    assert http.delete(path).status_code == 204
    assert config.read_text() == "of the host"
    assert execute(http, command=command, write_git=True, **body).json()["exit_code"] == 0
    assert config.read_text() == "x\n"
    assert execute(http, command=command, write_git=True, **(body | {"write": False})).status_code == 422


@pytest.mark.parametrize("path", ["/etc", "{root}/../..", "{root}/link", "{root}/nothing", "mine"])
def test_a_project_outside_the_roots_is_refused(http: httpx2.Client, server: Server, path: str) -> None:
    link = server.roots / "link"
    if not link.is_symlink():
        link.symlink_to("/etc")
    answer = execute(http, code="1", project_path=path.format(root=server.roots))
    assert (answer.status_code, answer.json()["kind"]) == (403, "policy_denied")


def test_a_file_of_a_project_is_run_and_its_extension_tells_its_language(http: httpx2.Client, server: Server) -> None:
    mine = server.roots / "mine"
    (mine / "sub").mkdir(exist_ok=True)
    (mine / "sub" / "main.sh").write_text("cat data.txt")
    (mine / "plain").write_text("print(open('data.txt').read(), end='')")
    for path, more in (("sub/main.sh", {}), ("/workspace/sub/main.sh", {}), ("plain", {"language": "python"})):
        told = execute(http, path=path, project_path=str(mine), backend="native", **more).json()
        assert told.get("stdout") == "of the project\n", told
    answer = execute(http, path="plain", project_path=str(mine))
    assert (answer.status_code, answer.json()["kind"]) == (422, "invalid_request")


def test_no_path_leads_out_of_a_project(http: httpx2.Client, server: Server) -> None:
    mine = server.roots / "mine"
    for name, target in (("link.py", "/etc/passwd"), ("folder", "/etc")):
        if not (mine / name).is_symlink():
            (mine / name).symlink_to(target)
    for path in ("link.py", "folder/passwd", "missing.py", "../mine/plain", "/etc/passwd", "sub", ""):
        answer = execute(http, path=path, project_path=str(mine), language="python")
        assert (answer.status_code, answer.json()["kind"]) == (422, "invalid_request"), path
        assert "root:" not in answer.text
    for body in ({}, {"project_path": str(mine), "code": "1"}, {"project_path": str(mine), "command": ["ls"]}):
        assert execute(http, path="plain", **body).status_code == 422
    assert execute(http, path="passwd", project_path="/etc").status_code == 403


def test_a_turn_runs_a_file_of_its_sessions_project(http: httpx2.Client, server: Server) -> None:
    mine = server.roots / "mine"
    (mine / "turn.py").write_text(
        "count = globals().get('count', 0) + 1; print(count, open('data.txt').read(), end='')"
    )
    (mine / "turn.sh").write_text("cat data.txt")
    if not (mine / "link.py").is_symlink():
        (mine / "link.py").symlink_to("/etc/passwd")

    @contextmanager
    def opened(**body: object) -> Iterator[str]:
        id = str(http.post("/api/sandbox/sessions", json=body).json()["id"])
        yield id
        assert http.delete(f"/api/sandbox/sessions/{id}").status_code == 204

    def turn(id: str, **body: object) -> httpx2.Response:
        return http.post(f"/api/sandbox/sessions/{id}/run", json=body)

    with opened(backend="native", project_path=str(mine)) as id:
        told = [turn(id, path=path).json().get("stdout") for path in ("turn.py", "/workspace/turn.py")]
        assert told == ["1 of the project\n", "2 of the project\n"]
        for body in ({"path": "link.py"}, {"path": "no.py"}, {"path": "../x"}, {"path": "turn.py", "code": "1"}, {}):
            answer = turn(id, **body)
            assert (answer.status_code, answer.json()["kind"]) == (422, "invalid_request"), body
            assert "root:" not in answer.text
    with opened(backend="native", kind="sandbox", project_path=str(mine)) as id:
        assert turn(id, path="turn.sh").json()["stdout"] == "of the project\n"
    with opened(backend="native", kind="sandbox") as id:
        assert "opened without one" in turn(id, path="turn.py").json()["detail"]


# --- records ---


def test_a_run_can_be_inspected_afterwards_with_its_result(http: httpx2.Client) -> None:
    told = execute(http, code="print('kept')").json()
    record = http.get(f"/api/sandbox/runs/{told['id']}").json()
    assert record["state"] == "finished"
    assert record["result"]["stdout"] == "kept\n"
    assert record["sha256"] == hashlib.sha256(b"print('kept')").hexdigest()
    assert record["id"] in [each["id"] for each in http.get("/api/sandbox/runs").json()]


def test_a_refused_run_keeps_its_reason(http: httpx2.Client) -> None:
    taken = execute(http, code="1", limits={"memory": "64G"}, wait=False).json()
    record = _until_final(http, taken["id"])
    assert (record["state"], record["problem"]["kind"]) == ("refused", "policy_denied")


def test_a_run_that_is_not_waited_for_is_followed_by_its_id_and_can_be_cancelled(http: httpx2.Client) -> None:
    answer = execute(http, code="import time; print('up', flush=True); time.sleep(60)", wait=False, backend="native")
    assert answer.status_code == 202
    id = answer.json()["id"]
    _until_line(http, id, "up")
    record = http.post(f"/api/sandbox/runs/{id}/cancel").json()
    assert (record["state"], record["result"]["status"], record["result"]["stdout"]) == ("finished", "aborted", "up\n")
    assert http.get(f"/api/sandbox/runs/{id}").json()["state"] == "finished"


def test_an_unknown_run_is_not_found_whatever_is_asked_of_it(http: httpx2.Client) -> None:
    for path in ("runs/bj-nothing", "bj-nothing/logs", "bj-nothing/metrics", "bj-nothing/files", "sessions/bs-nothing"):
        answer = http.get(f"/api/sandbox/{path}")
        assert (answer.status_code, answer.json()["kind"]) == (404, "not_found"), path


def test_the_same_idempotency_key_runs_it_once(http: httpx2.Client) -> None:
    body = {"code": "import uuid; print(uuid.uuid4())"}
    headers = {"Idempotency-Key": "one and the same"}

    def send(_: int) -> dict[str, object]:
        answer = http.post("/api/sandbox/execute", json=body, headers=headers)
        if answer.status_code == 503:  # its twin is just being taken in
            return send(_)
        return answer.json()  # type: ignore[no-any-return]

    with ThreadPoolExecutor(4) as threads:
        told = list(threads.map(send, range(4)))
    assert len({(each["id"], each["stdout"]) for each in told}) == 1
    other = http.post("/api/sandbox/execute", json={"code": "print(2)"}, headers=headers)
    assert (other.status_code, other.json()["kind"]) == (422, "invalid_request")


def test_a_deterministic_result_is_served_again_when_asked_and_says_so(http: httpx2.Client) -> None:
    body = {"code": "import random; print(random.random())", "deterministic": True, "cached": True, "backend": "wasm"}
    first, second = execute(http, **body).json(), execute(http, **body).json()
    assert first["stdout"] == second["stdout"]
    assert not any("from the store" in reason for reason in first["reasons"])
    assert any("from the store" in reason for reason in second["reasons"])
    again = execute(http, **body).json()
    assert len(again["reasons"]) == len(second["reasons"])
    third = execute(http, **{**body, "cached": False}).json()
    assert not any("from the store" in reason for reason in third["reasons"])


# --- logs ---


def test_lines_are_numbered_and_can_be_read_from_any_number_on(http: httpx2.Client) -> None:
    id = execute(http, code="for i in range(20): print(i)").json()["id"]
    page = http.get(f"/api/sandbox/{id}/logs", params={"after": 15}).json()
    assert page["state"] == "finished"
    assert [(line["number"], line["message"]) for line in page["lines"]] == [(n, str(n - 1)) for n in range(16, 21)]
    assert {"container_id", "timestamp", "stream", "message"} <= page["lines"][0].keys()


def test_server_sent_events_tell_each_line_once_and_the_end(http: httpx2.Client) -> None:
    code = "import time\nfor i in range(5):\n    print(i, flush=True); time.sleep(0.05)"
    id = execute(http, code=code, wait=False).json()["id"]
    first = _events(http, id)
    assert [json.loads(data)["message"] for _, data in first[:-1]] == ["0", "1", "2", "3", "4"]
    assert first[-1] == ("end", "finished")
    assert [number for number, _ in _events(http, id, last="3")] == ["4", "5", "end"]


def _events(http: httpx2.Client, id: str, last: str | None = None) -> list[tuple[str, str]]:
    headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last} if last else {})
    found, name = [], ""
    with http.stream("GET", f"/api/sandbox/{id}/logs", headers=headers) as answer:
        for line in answer.iter_lines():
            field, _, value = line.partition(": ")
            if field in ("id", "event"):
                name = value
            elif field == "data":
                found.append((name, value))
    return found


# --- sessions ---


def test_a_session_keeps_its_variables_and_is_gone_when_it_is_closed(http: httpx2.Client) -> None:
    opened = http.post("/api/sandbox/sessions", json={"backend": "wasm"})
    assert opened.status_code == 201
    id = opened.json()["id"]
    assert http.post(f"/api/sandbox/sessions/{id}/run", json={"code": "x = 41"}).json()["status"] == "success"
    told = http.post(f"/api/sandbox/sessions/{id}/run", json={"code": "x + 1"}).json()
    assert told["results"][0]["text/plain"] == "42"
    assert http.get(f"/api/sandbox/runs/{told['id']}").json()["session"] == id
    assert http.delete(f"/api/sandbox/sessions/{id}").status_code == 204
    assert http.get(f"/api/sandbox/sessions/{id}").status_code == 404


def test_a_session_is_forked_and_rolled_back(http: httpx2.Client) -> None:
    id = http.post("/api/sandbox/sessions", json={"backend": "wasm"}).json()["id"]
    turn = f"/api/sandbox/sessions/{id}/run"
    http.post(turn, json={"code": "x = 1"})
    point = http.post(f"/api/sandbox/sessions/{id}/checkpoints").json()
    assert point["bytes"] > 0
    http.post(turn, json={"code": "x = 2"})
    fork = http.post(f"/api/sandbox/sessions/{id}/fork", json={"checkpoint": point["id"]}).json()["id"]
    branch = http.post(f"/api/sandbox/sessions/{fork}/run", json={"code": "x"}).json()
    assert branch["results"][0]["text/plain"] == "1"
    assert http.post(f"/api/sandbox/sessions/{id}/rollback", json={"checkpoint": point["id"]}).status_code == 204
    assert http.post(turn, json={"code": "x"}).json()["results"][0]["text/plain"] == "1"
    for each in (id, fork):
        assert http.delete(f"/api/sandbox/sessions/{each}").status_code == 204


def test_files_of_a_sandbox_are_put_listed_and_got(http: httpx2.Client) -> None:
    id = http.post("/api/sandbox/sessions", json={"kind": "sandbox", "backend": "native"}).json()["id"]
    content = bytes(range(256))
    assert http.put(f"/api/sandbox/{id}/files/a/b.bin", content=content).status_code == 204
    assert {"path": "a/b.bin", "kind": "file", "size": 256} in http.get(f"/api/sandbox/{id}/files").json()["files"]
    told = http.post(f"/api/sandbox/sessions/{id}/run", json={"command": ["sha256sum", "a/b.bin"]}).json()
    assert told["stdout"].split()[0] == hashlib.sha256(content).hexdigest()
    got = http.get(f"/api/sandbox/{id}/files/a/b.bin")
    assert (got.content, got.headers["content-type"]) == (content, "application/octet-stream")
    assert http.get(f"/api/sandbox/{id}/files/nothing").status_code == 404
    assert http.put(f"/api/sandbox/{id}/files/..%2F..%2Fetc%2Fx", content=b"").status_code in (403, 404, 422)
    assert http.delete(f"/api/sandbox/sessions/{id}").status_code == 204


def test_half_a_character_that_a_guest_displays_is_its_own_fault_and_told_as_an_answer(http: httpx2.Client) -> None:
    id = http.post("/api/sandbox/sessions", json={"backend": "wasm"}).json()["id"]
    code = "class X:\n    def __repr__(self): return chr(0xd800) + 'x'\nX()"
    answer = http.post(f"/api/sandbox/sessions/{id}/run", json={"code": code})
    assert answer.status_code == 200, answer.text
    assert http.delete(f"/api/sandbox/sessions/{id}").status_code == 204


def test_checkpoints_are_counted_one_after_the_other(http: httpx2.Client) -> None:
    id = http.post("/api/sandbox/sessions", json={"backend": "wasm"}).json()["id"]
    with ThreadPoolExecutor(8) as threads:
        told = list(threads.map(lambda _: http.post(f"/api/sandbox/sessions/{id}/checkpoints").status_code, range(24)))
    assert (told.count(201), told.count(429)) == (16, 8)
    assert http.delete(f"/api/sandbox/sessions/{id}").status_code == 204


# --- about ---


def test_the_server_says_what_it_can_and_how_it_is(http: httpx2.Client) -> None:
    assert "python" in {row["name"] for row in http.get("/api/languages").json()}
    assert {"wasm", "native"} <= {offer["backend"] for offer in http.get("/api/backends").json()}
    assert http.get("/healthz").json() == {"status": "alive"}
    ready = http.get("/readyz")
    assert (ready.status_code, ready.json()["ready"]) == (200, True), ready.text
    assert http.get("/api/images").json() == []


def test_prometheus_reads_the_mission_s_names(http: httpx2.Client) -> None:
    execute(http, code="print(1)")
    text = http.get("/metrics").text
    for name in (
        "sandbox_executions_total", "sandbox_execution_duration_ms", "sandbox_startup_ms", "sandbox_fuel_consumed",
        "sandbox_timeouts_total", "sandbox_oom_failures_total", "sandbox_success_rate",
    ):  # fmt: skip
        assert f"\n{name}" in text, name


def test_the_openapi_document_has_examples_and_every_problem(http: httpx2.Client) -> None:
    api = http.get("/openapi.json").json()
    assert api["components"]["schemas"]["Execute"]["examples"]
    for path, methods in api["paths"].items():
        for method in methods.values():
            assert "422" in method["responses"], path


def _until_final(http: httpx2.Client, id: str) -> dict[str, object]:
    _events(http, id)
    return http.get(f"/api/sandbox/runs/{id}").json()  # type: ignore[no-any-return]


def _until_line(http: httpx2.Client, id: str, text: str) -> None:
    with http.stream("GET", f"/api/sandbox/{id}/logs", headers={"Accept": "text/event-stream"}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: ") and json.loads(line[6:])["message"] == text:
                return
    raise AssertionError(f"{text!r} never came")


def test_top_shows_what_runs_and_what_it_uses(http: httpx2.Client, server: Server) -> None:
    id = execute(http, command=["sh", "-c", "echo up; sleep 60"], backend="native", wait=False).json()["id"]

    def shown() -> dict[str, Any] | None:
        told = server.belljar("top", "--server", server.url, "--once", "--json")
        assert told.returncode == 0, told.stderr
        return next((run for run in json.loads(told.stdout)["runs"] if run["id"] == id and run["latest"]), None)

    run = eventually(shown, 30)
    assert run
    assert (run["state"], run["backend"]) == ("running", "native")
    assert run["latest"]["memory_mb"] > 0
    table = server.belljar("top", "--server", server.url, "--once").stdout
    assert id in table and " running, " in table
    http.post(f"/api/sandbox/runs/{id}/cancel")
    assert id not in server.belljar("top", "--server", server.url, "--once").stdout
