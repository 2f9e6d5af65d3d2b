"""The bodies of the specification, sent and answered as they are written there, by a real server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest

import belljar
from serving import Server, served
from witness import eventually

pytestmark = pytest.mark.engine
FIGURES = {
    "cpu_percent", "memory_mb", "network_rx_bytes", "network_tx_bytes", "disk_read_bytes", "disk_write_bytes",
    "uptime_seconds",
}  # fmt: skip
_HUNGRY = "import time\nheld = b'x' * (60 << 20)\nprint('full', flush=True)\ntime.sleep(60)"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the server's projects."""
    folder = tmp_path_factory.mktemp("projects")
    folder.chmod(0o755)
    mine = folder / "mine"
    mine.mkdir()
    (mine / "utils.py").write_text("def greet(name):\n    return f'hello {name}'\n")
    (mine / "main.py").write_text("import utils\nprint(utils.greet('file'))\n")
    (mine / "out.py").symlink_to("/etc/hostname")
    return mine


@pytest.fixture(scope="module")
def server(project: Path) -> Iterator[Server]:
    with served(BELLJAR_PROJECTS=str(project.parent), MAX_CONTAINERS="4") as server:
        yield server


@pytest.fixture
def http(server: Server) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client


def execute(http: httpx2.Client, **body: object) -> dict[str, Any]:
    answer = http.post("/api/sandbox/execute", json=body)
    assert answer.is_success, answer.text
    told: dict[str, Any] = answer.json()
    return told


def is_iso(text: object) -> bool:
    return isinstance(text, str) and datetime.fromisoformat(text).utcoffset() is not None


# --- what a run tells while it goes on ---


@pytest.fixture(scope="module")
def hungry(server: Server) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A run that takes almost all of its memory until it is cancelled, and the events that were told of it."""
    events: list[dict[str, Any]] = []
    ready = threading.Event()

    def listen() -> None:
        with (
            httpx2.Client(base_url=server.url, timeout=60) as client,
            client.stream("GET", "/api/events", headers={"Accept": "text/event-stream"}) as answer,
        ):
            for line in answer.iter_lines():
                ready.set()
                if line.startswith("data: "):
                    events.append(json.loads(line[len("data: ") :]))
                    if events[-1]["kind"] == "ended":
                        return

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    assert ready.wait(30)
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        body = {"code": _HUNGRY, "limits": {"memory": "64M"}, "backend": "native", "timeout_seconds": 60, "wait": False}
        id = execute(client, **body)["id"]
        alerts = f"/api/sandbox/{id}/metrics"
        assert eventually(lambda: client.get(alerts).json()["alerts"], 40)
        client.post(f"/api/sandbox/runs/{id}/cancel")
    listener.join(40)
    yield id, events


Hungry = tuple[str, list[dict[str, Any]]]


def test_metrics_answer_the_flat_model_with_the_samples_beside(http: httpx2.Client, hungry: Hungry) -> None:
    figures = http.get(f"/api/sandbox/{hungry[0]}/metrics").json()
    assert figures.keys() >= FIGURES
    assert figures["memory_mb"] > 50
    assert {name: figures[name] for name in FIGURES} == {name: figures["latest"][name] for name in FIGURES}
    assert is_iso(figures["timestamp"]) and all(is_iso(sample["timestamp"]) for sample in figures["samples"])
    later = http.get(f"/api/sandbox/{hungry[0]}/metrics", params={"after": figures["samples"][0]["timestamp"]}).json()
    assert later["samples"] == figures["samples"][1:]


def test_a_log_line_has_the_words_of_the_specification_and_an_alert_is_one_of_them(
    http: httpx2.Client, hungry: Hungry
) -> None:
    id = hungry[0]
    lines = http.get(f"/api/sandbox/{id}/logs").json()["lines"]
    assert all(line.keys() >= {"container_id", "timestamp", "stream", "message"} for line in lines)
    assert [(line["container_id"], line["message"]) for line in lines if line["stream"] == "stdout"] == [(id, "full")]
    assert all(is_iso(line["timestamp"]) for line in lines)
    alerts = [line["message"] for line in lines if line["stream"] == "alert"]
    assert alerts and alerts[0].startswith("memory: ")


def test_without_a_broker_events_are_streamed_with_the_alert_and_the_result_at_the_end(hungry: Hungry) -> None:
    id, told = hungry
    events = [event for event in told if event["container_id"] == id]
    kinds = [event["kind"] for event in events]
    assert (kinds[0], kinds[-1]) == ("running", "ended")
    assert {"started", "alert"} <= set(kinds)
    assert all(is_iso(event["timestamp"]) and isinstance(event["message"], str) for event in events)
    ended = events[-1]
    assert (ended["state"], ended["result"]["status"], ended["result"]["stdout"]) == ("finished", "aborted", "full\n")


def test_times_of_records_and_sessions_are_iso_text(http: httpx2.Client) -> None:
    id = execute(http, code="print(1)")["id"]
    record = http.get(f"/api/sandbox/runs/{id}").json()
    assert all(is_iso(record[name]) for name in ("created", "started", "ended"))
    older = http.get("/api/sandbox/runs", params={"before": record["created"]}).json()
    assert id not in [each["id"] for each in older]
    session = http.post("/api/sandbox/sessions", json={"kind": "sandbox", "backend": "native"}).json()
    assert is_iso(session["created"]) and is_iso(session["expires"])
    http.delete(f"/api/sandbox/sessions/{session['id']}")


def test_the_client_still_reads_times_as_numbers(server: Server, http: httpx2.Client) -> None:
    with belljar.Client(server.url) as client:
        id = client.run("print('x')").container_id
        record = client.inspect(id)
        assert isinstance(record.created, float) and record.ended is not None and record.ended >= record.created
        assert [(line.stream, type(line.timestamp)) for line in client.logs(id)] == [("stdout", float)]


# --- what a request may say ---


def test_execute_takes_the_body_of_the_specification_and_answers_its_fields(http: httpx2.Client) -> None:
    body = {
        "language": "python", "code": "import os, data\nprint(data.n, os.environ['PORT'], os.environ['DEBUG'])",
        "context_files": {"data.py": "n = 42"}, "environment": {"PORT": 3000, "DEBUG": True}, "timeout_seconds": 30,
    }  # fmt: skip
    told = execute(http, **body)
    assert told.keys() >= {"exit_code", "stdout", "stderr", "duration_ms", "memory_used_mb", "error"}
    assert (told["exit_code"], told["stdout"], told["error"]) == (0, "42 3000 true\n", None)


@pytest.mark.parametrize("backend", ["auto", "native"])
def test_context_files_may_be_a_list_of_files_of_the_project(http: httpx2.Client, project: Path, backend: str) -> None:
    code = "import utils\nprint(utils.greet('agent'))"
    body = {"language": "python", "code": code, "context_files": ["utils.py"], "backend": backend}
    assert execute(http, **body, project_path=str(project))["stdout"] == "hello agent\n"


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["../../etc/passwd"], "climbs out"),
        (["/etc/passwd"], "outside"),
        (["out.py"], "out.py"),
        (["missing.py"], "missing.py"),
        (["."], "names no file"),
    ],
)
def test_context_files_never_lead_out_of_the_project(
    http: httpx2.Client, project: Path, names: list[str], why: str
) -> None:
    body = {"code": "1", "context_files": names, "project_path": str(project)}
    refused = http.post("/api/sandbox/execute", json=body)
    assert (refused.status_code, why in refused.json()["detail"]) == (422, True), refused.text
    with pytest.raises(belljar.InvalidRequest, match="files"):
        belljar.run("1", files=names, workspace=project)


def test_a_list_of_files_needs_a_project(http: httpx2.Client) -> None:
    refused = http.post("/api/sandbox/execute", json={"code": "1", "context_files": ["utils.py"]}).json()
    assert "project_path" in refused["detail"] and "project_path" in refused["fix"]


def test_library_and_client_take_the_list_too(server: Server, project: Path) -> None:
    code = "import utils\nprint(utils.greet('you'))"
    assert belljar.run(code, files=["utils.py"], workspace=project, backend="native").stdout == "hello you\n"
    with belljar.Client(server.url) as client:
        assert client.run(code, files=["utils.py"], workspace=project).stdout == "hello you\n"


def test_a_misspelt_field_is_named_with_what_was_meant_and_what_to_write(http: httpx2.Client) -> None:
    for body, wrong, meant in (
        ({"cod": "print(1)"}, "cod", "code"),
        ({"code": "1", "limits": {"memroy": "1G"}}, "limits.memroy", "memory"),
        ({"code": "1", "enviroment": {}}, "enviroment", "environment"),
    ):
        refused = http.post("/api/sandbox/execute", json=body)
        told = refused.json()
        assert refused.status_code == 422
        assert told["detail"] == f"{wrong}: there is no such field; did you mean {meant}?"
        assert told["fix"].startswith(f"write {meant}")
    refused = http.post("/api/sandbox/sessions", json={"knd": "sandbox"}).json()
    assert "did you mean kind?" in refused["detail"]
    with pytest.raises(belljar.InvalidRequest, match=r"cod: there is no such option; did you mean code\?"):
        belljar.run(**{"cod": "print(1)"})  # type: ignore[arg-type]
    with pytest.raises(belljar.InvalidRequest, match=r"memroy: there is no such field; did you mean memory\?"):
        belljar.run("1", limits={"memroy": "1G"})


# --- section 7: names ---


def test_execute_code_runs_in_webassembly_unless_more_is_needed() -> None:
    assert belljar.execute_code("import json\nprint(json.dumps([1]))").backend == "wasm"
    assert belljar.execute_code("import subprocess\nprint(subprocess.run(['true']).returncode)").backend != "wasm"


def test_execute_code_finds_the_project_and_its_files(project: Path) -> None:
    code = "import utils\nprint(utils.greet('there'))"
    assert belljar.execute_code(code, project, context_files=["utils.py"]).stdout == "hello there\n"


def test_execute_code_answers_the_four_statuses_and_raises_nothing() -> None:
    ran = belljar.execute_code("print(1)")
    failed = belljar.execute_code("1 / 0")
    late = belljar.execute_code("while True: pass", timeout=0.5)
    broken = belljar.execute_code("print(1)", backend="docker", image="127.0.0.1:1/there/is/none:1")
    refused = belljar.execute_code("print(1)", memory="64G")
    assert [(one.status, one.exit_code) for one in (ran, failed, late, broken, refused)] == [
        ("success", 0), ("error", 1), ("timeout", 124), ("system_failure", -1), ("system_failure", -1),
    ]  # fmt: skip
    assert refused.error is not None and refused.error.context["kind"] == "policy_denied"
    assert json.loads(refused.model_dump_json())["status"] == "system_failure"


def test_libraries_that_are_required_are_found_or_the_answer_says_which_is_missing(http: httpx2.Client) -> None:
    code = "import numpy\nprint(numpy.arange(3).sum())"
    found = belljar.execute_code(code, require_libraries=["numpy"])
    assert (found.stdout, found.backend) == ("3\n", "wasm")
    assert "numpy" in found.reasons[0]
    every = belljar.execute_code(code, require_libraries=True)
    assert every.stdout == "3\n"
    none = belljar.execute_code("print(1)", require_libraries=["belljar_no_such_package"], backend="native")
    assert none.status == "system_failure" and none.error is not None
    assert none.error.context["missing"] == {"native": ["belljar_no_such_package"]}
    body = {"code": "print(1)", "require_libraries": ["belljar_no_such_package"], "backend": "wasm"}
    told = http.post("/api/sandbox/execute", json=body).json()
    assert (told["outcome"], told["exit_code"], told["status"]) == ("system_failure", -1, 503)
    assert told["context"]["missing"] == {"wasm": ["belljar_no_such_package"]}
    body = {"code": code, "require_libraries": True}
    assert execute(http, **body)["stdout"] == "3\n"


def test_a_refusal_is_no_system_failure_in_json(http: httpx2.Client) -> None:
    told = http.post("/api/sandbox/execute", json={"code": "1", "limits": {"memory": "64G"}}).json()
    assert (told["kind"], told.get("outcome")) == ("policy_denied", None)


def test_a_file_is_executed_by_its_path_everywhere(server: Server, http: httpx2.Client, project: Path) -> None:
    script = project / "main.py"
    assert belljar.execute_file(script, files={"utils.py": "greet = str.upper"}).stdout == "FILE\n"
    with belljar.Client(server.url) as client:
        assert client.execute_file(script, workspace=project).stdout == "hello file\n"
    assert execute(http, path="main.py", project_path=str(project))["stdout"] == "hello file\n"


def test_health_is_a_real_snippet_and_typed(server: Server) -> None:
    health = belljar.check_sandbox_health()
    assert (health.healthy, health.problem) == (True, "") and health.backend and health.duration_ms
    sick = belljar.check_sandbox_health(backend="apple")
    assert (sick.healthy, bool(sick.problem)) == (False, True)
    with belljar.Client(server.url) as client:
        assert client.check_sandbox_health().healthy


def test_the_client_streams_the_logs_of_a_container_to_its_end(server: Server) -> None:
    with belljar.Client(server.url) as client:
        id = client.run("print('a'); print('b')").container_id
        assert [line.message for line in client.stream_container_logs(id)] == ["a", "b"]


def test_a_run_over_its_time_tells_exit_code_124_and_its_fuel(http: httpx2.Client) -> None:
    told = execute(http, code="while True: pass", backend="wasm", timeout_seconds=1)
    assert (told["status"], told["exit_code"]) == ("timeout", 124)
    assert told["fuel_consumed"] > 10_000_000
