"""Who may ask a running service for what, how much of it, and in which order: over real sockets."""

from __future__ import annotations

import json
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from serving import Server, served
from watching import Refused, Watcher
from wheels import pip_is_here, wheel
from witness import eventually

pytestmark = pytest.mark.engine

SLEEP = {"code": "import time; print('up', flush=True); time.sleep(60)", "backend": "native", "wait": False}


def create(server: Server, name: str, *scopes: str, **options: str) -> dict[str, Any]:
    words = [word for scope in scopes for word in ("--scope", scope)]
    words += [word for name, value in options.items() for word in (f"--{name}", value)]
    told = server.belljar("keys", "create", name, *words, "--json")
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)  # type: ignore[no-any-return]


def client(server: Server, key: dict[str, Any] | None = None) -> httpx2.Client:
    headers = {"Authorization": f"Bearer {key['key']}"} if key else {}
    return httpx2.Client(base_url=server.url, timeout=60, headers=headers)


def told(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["kind"]


def end_all(http: httpx2.Client) -> None:
    for state in ("queued", "running"):
        for record in http.get(f"/api/sandbox/runs?state={state}").json():
            http.post(f"/api/sandbox/runs/{record['id']}/cancel")


# --- without a key ---


@pytest.fixture(scope="module")
def local() -> Iterator[Server]:
    with served(MAX_CONTAINERS="1", config="[service]\nqueue = 2\ndrain = 1\n") as server:
        yield server


def test_the_queue_has_an_end_and_a_run_in_it_a_position(local: Server) -> None:
    with client(local) as http:
        end_all(http)
        ids = [http.post("/api/sandbox/execute", json=SLEEP).json()["id"] for _ in range(3)]
        refused = http.post("/api/sandbox/execute", json=SLEEP, headers={"Idempotency-Key": "turned away"})
        assert told(refused) == (503, "busy"), refused.text
        assert int(refused.headers["retry-after"]) >= 1
        records = [http.get(f"/api/sandbox/runs/{id}").json() for id in ids]
        assert [record["state"] for record in records] == ["running", "queued", "queued"]
        assert [record["position"] for record in records] == [None, 1, 2]
        ready = http.get("/readyz")  # it does its work, which is why it has no place for another
        assert (ready.status_code, ready.json()["waiting"]) == (200, 2)
        left = http.post(f"/api/sandbox/runs/{ids[1]}/cancel").json()
        assert (left["state"], left["problem"]["kind"]) == ("failed", "aborted")
        assert eventually(lambda: http.get(f"/api/sandbox/runs/{ids[2]}").json()["position"] == 1)
        assert eventually(lambda: http.get(f"/api/sandbox/runs/{ids[0]}").json()["backend"], 60)  # its box is open
        assert http.post(f"/api/sandbox/runs/{ids[0]}/cancel").json()["result"]["status"] == "aborted"
        assert eventually(lambda: http.get(f"/api/sandbox/runs/{ids[2]}").json()["state"] == "running")
        end_all(http)
        assert not http.get("/api/sandbox/runs?state=running").json()


def test_a_request_that_was_turned_away_may_come_again_with_its_key(local: Server) -> None:
    body = SLEEP | {"code": "print(1)", "wait": True}
    headers = {"Idempotency-Key": "comes again"}
    with client(local) as http:
        for _ in range(3):
            http.post("/api/sandbox/execute", json=SLEEP)
        assert told(http.post("/api/sandbox/execute", json=body, headers=headers)) == (503, "busy")
        end_all(http)
        again = http.post("/api/sandbox/execute", json=body, headers=headers)
        assert (again.status_code, again.json().get("stdout")) == (200, "1\n"), again.text


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
    ids=lambda headers: " ".join(headers.values()),
)
def test_a_web_page_can_ask_nothing_of_a_service_on_its_reader_s_machine(
    local: Server, headers: dict[str, str]
) -> None:
    with client(local) as http:
        assert told(http.post("/api/sandbox/execute", json={"code": "1"}, headers=headers)) == (403, "policy_denied")
        id = http.post("/api/sandbox/execute", json={"code": "print(1)"}).json()["id"]
    with pytest.raises(Refused) as refused:
        Watcher(local.url, f"/api/sandbox/{id}/logs", headers=headers)
    assert refused.value.status == 403
    own = {"Origin": local.url}
    with Watcher(local.url, f"/api/sandbox/{id}/logs", headers=own) as watcher:
        assert [line["message"] for line in watcher.lines()] == ["1"]


def test_without_a_key_nothing_but_loopback_is_listened_on() -> None:
    with served(start=False, BELLJAR_HOST="0.0.0.0") as server:
        refused = server.belljar("serve", "--port", "0")
        assert refused.returncode == 126, refused.stderr
        assert "without a key" in refused.stderr and "keys create" in refused.stderr
        assert "Traceback" not in refused.stderr
        key = create(server, "ci", "run", "read")
        server.start()
        port = int(server.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            url = f"http://127.0.0.1:{port}"
        assert told(httpx2.post(f"{url}/api/sandbox/execute", json={"code": "1"})) == (401, "unauthorized")
        headers = {"X-API-Key": key["key"]}
        assert httpx2.post(f"{url}/api/sandbox/execute", json={"code": "print(1)"}, headers=headers).status_code == 200


# --- with keys ---


HOSTS = """
[service.egress]
hosts = ["listed.example"]
[service.egress.sets]
packages = ["index.example", "*.files.example"]
"""


@pytest.fixture(scope="module")
def keyed() -> Iterator[Server]:
    with served(start=False, MAX_CONTAINERS="4", config=f"[service]\ndrain = 1\n{HOSTS}") as server:
        server.keys = {  # type: ignore[attr-defined]
            "ada": create(server, "ada", "run", "read"),
            "bob": create(server, "bob", "run", "read", "sessions"),
            "reader": create(server, "reader", "read"),
            "admin": create(server, "admin", "admin"),
            "slow": create(server, "slow", "run", "read", rate="2/minute"),
            "one": create(server, "one", "run", "read", concurrency="1"),
            "wide": create(server, "wide", "run", net="@packages"),
            "short": create(server, "short", "run", "read", expires="5s"),
        }
        server.start()
        yield server


def of(server: Server, name: str) -> httpx2.Client:
    return client(server, server.keys[name])  # type: ignore[attr-defined]


def test_nobody_without_a_key_is_told_anything_but_that_the_service_lives(keyed: Server) -> None:
    with client(keyed) as http:
        for path in ("/api/sandbox/runs", "/api/languages", "/metrics", "/api/sandbox/sessions"):
            answer = http.get(path)
            assert told(answer) == (401, "unauthorized"), path
            assert answer.headers["www-authenticate"] == "Bearer"
        assert told(http.post("/api/sandbox/execute", json={"code": "1"})) == (401, "unauthorized")
        assert http.get("/healthz").status_code == 200
    wrong = {"Authorization": "Bearer bj_000000000000_" + "0" * 64}
    assert httpx2.get(f"{keyed.url}/api/sandbox/runs", headers=wrong).status_code == 401
    assert "bj_0" not in keyed.log


def test_a_key_can_do_what_its_scopes_say_and_no_more(keyed: Server) -> None:
    with of(keyed, "reader") as http:
        assert http.get("/api/sandbox/runs").status_code == 200
        assert told(http.post("/api/sandbox/execute", json={"code": "1"})) == (403, "policy_denied")
    with of(keyed, "ada") as http:
        assert told(http.post("/api/sandbox/sessions", json={})) == (403, "policy_denied")


@pytest.mark.parametrize(("listener", "hears"), [("bob", ["bob"]), ("admin", ["ada", "bob"])])
def test_events_are_told_to_who_asked_for_the_run_and_to_administrators(
    keyed: Server, listener: str, hears: list[str]
) -> None:
    def run(name: str) -> str:
        with of(keyed, name) as http:
            body = {"code": "while True: print(1)", "backend": "native", "timeout_seconds": 0.5}
            return str(http.post("/api/sandbox/execute", json=body).json()["container_id"])

    heard: list[str] = []
    event_stream = {"Accept": "text/event-stream"}
    with of(keyed, listener) as http, http.stream("GET", "/api/events", headers=event_stream) as answer:
        lines = answer.iter_lines()
        assert next(lines) == ": listening"
        ids = {name: run(name) for name in ("ada", "bob")}
        for line in lines:
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                heard.append(event["container_id"])
                if (event["kind"], event["container_id"]) == ("ended", ids["bob"]):
                    break
    assert list(dict.fromkeys(heard)) == [ids[name] for name in hears]


def test_a_key_may_ask_for_the_hosts_that_the_administrator_lists_or_for_its_own(keyed: Server) -> None:
    def ask(name: str, host: str, path: str = "execute", **body: Any) -> httpx2.Response:
        with of(keyed, name) as http:
            return http.post(f"/api/sandbox/{path}", json={"backend": "native", "net": [host], **body})

    run = {"code": "print(1)"}
    assert ask("ada", "listed.example", **run).json()["stdout"] == "1\n"
    assert ask("wide", "a.files.example", **run).json()["stdout"] == "1\n"
    assert ask("admin", "other.example", **run).json()["stdout"] == "1\n", "who lists them needs no list"
    for name, host in (("ada", "other.example"), ("ada", "index.example"), ("wide", "listed.example")):
        refused = ask(name, host, **run)
        assert told(refused) == (403, "policy_denied")
        assert host in refused.json()["detail"] and "service.egress" in refused.json()["fix"]
    assert "only listed.example" in ask("ada", "*.example", **run).json()["detail"]
    session = ask("bob", "other.example", "sessions", kind="sandbox")
    assert (session.status_code, session.json()["context"]["host"]) == (403, "other.example")


def test_a_key_sees_its_own_runs_and_sessions_and_the_administrator_all(keyed: Server) -> None:
    with of(keyed, "ada") as ada, of(keyed, "bob") as bob, of(keyed, "admin") as admin:
        id = ada.post("/api/sandbox/execute", json={"code": "print('hers')"}).json()["id"]
        session = bob.post("/api/sandbox/sessions", json={"backend": "wasm"}).json()["id"]
        for path in (f"runs/{id}", f"{id}/logs", f"{id}/metrics"):
            assert ada.get(f"/api/sandbox/{path}").status_code == 200
            assert told(bob.get(f"/api/sandbox/{path}")) == (404, "not_found"), path
            assert admin.get(f"/api/sandbox/{path}").status_code == 200
        assert told(bob.post(f"/api/sandbox/runs/{id}/cancel")) == (404, "not_found")
        assert id not in [run["id"] for run in bob.get("/api/sandbox/runs").json()]
        assert id in [run["id"] for run in admin.get("/api/sandbox/runs").json()]
        figures = f"/api/sandbox/{session}/metrics"
        assert [each.get(figures).status_code for each in (ada, bob, admin)] == [404, 200, 200]
        assert admin.delete(f"/api/sandbox/sessions/{session}").status_code == 204
        path = f"/api/sandbox/{id}/logs"
        headers = {name: {"X-API-Key": keyed.keys[name]["key"]} for name in ("ada", "bob")}  # type: ignore[attr-defined]
        with Watcher(keyed.url, path, headers=headers["ada"]) as watcher:
            assert [line["message"] for line in watcher.lines()] == ["hers"]
        for wrong, status in ((headers["bob"], 404), ({}, 401)):
            with pytest.raises(Refused) as refused:
                Watcher(keyed.url, path, headers=wrong)
            assert refused.value.status == status
        offer = ["belljar", f"bearer.{keyed.keys['ada']['key']}"]  # type: ignore[attr-defined]
        with Watcher(keyed.url, path, offer=offer) as browser:
            assert browser.subprotocol == "belljar"


def test_the_same_idempotency_key_of_two_callers_is_two_runs(keyed: Server) -> None:
    ids = set()
    for name in ("ada", "bob"):
        with of(keyed, name) as http:
            answer = http.post("/api/sandbox/execute", json={"code": "1"}, headers={"Idempotency-Key": "same"})
            ids.add(answer.json()["id"])
    assert len(ids) == 2


def test_a_caller_over_its_rate_is_told_when_to_come_again(keyed: Server) -> None:
    with of(keyed, "slow") as http, of(keyed, "ada") as other:
        answers = [http.post("/api/sandbox/execute", json={"code": "1"}) for _ in range(4)]
        codes = [answer.status_code for answer in answers]
        assert codes in ([200, 200, 429, 429], [200, 200, 200, 429])  # one more where a minute of the clock ends
        assert 1 <= int(answers[3].headers["retry-after"]) <= 60
        assert other.post("/api/sandbox/execute", json={"code": "1"}).status_code == 200


def test_a_caller_has_no_more_runs_at_once_than_it_may_and_others_pass_it(keyed: Server) -> None:
    with of(keyed, "one") as http, of(keyed, "ada") as other, ThreadPoolExecutor(2) as threads:
        ids = [http.post("/api/sandbox/execute", json=SLEEP).json()["id"] for _ in range(2)]
        states = [http.get(f"/api/sandbox/runs/{id}").json()["state"] for id in ids]
        assert states == ["running", "queued"]
        done = threads.submit(lambda: other.post("/api/sandbox/execute", json={"code": "print(1)"}))
        assert done.result(30).json()["stdout"] == "1\n"
        end_all(http)


def test_a_revoked_key_is_refused_within_a_second_or_so_and_an_expired_one_too(keyed: Server) -> None:
    late = create(keyed, "late", "read")
    with client(keyed, late) as http:
        assert eventually(lambda: http.get("/api/sandbox/runs").status_code == 200, 3)
        revoked = keyed.belljar("keys", "revoke", late["id"])
        assert revoked.returncode == 0, revoked.stderr
        start = time.monotonic()
        assert eventually(lambda: http.get("/api/sandbox/runs").status_code == 401, 5)
        assert time.monotonic() - start < 2.5
    with of(keyed, "short") as http:
        assert eventually(lambda: http.get("/api/sandbox/runs").status_code == 401, 10)
        assert "expired" in http.get("/api/sandbox/runs").json()["detail"]


# --- packages ---


def test_callers_have_installed_what_is_listed_for_them_and_nothing_unless_it_is(tmp_path: Path) -> None:
    if not pip_is_here():
        pytest.skip("SKIPPED: there is no pip: apt install python3-pip")
    file, content = wheel("plum", "1.0")
    (tmp_path / file).write_bytes(content)
    installers = f'[installers]\nPIP_NO_INDEX = "1"\nPIP_FIND_LINKS = "{tmp_path}"\nPIP_CONFIG_FILE = "/dev/null"\n'
    body = {"code": "import plum; print(plum.VERSION)", "packages": ["plum"], "backend": "native"}
    with tempfile.TemporaryDirectory(prefix="belljar-packages-") as folder:
        Path(folder).chmod(0o755)
        kept = f'[packages]\nfolder = "{folder}/kept"\n'
        with served(config=f'{installers}{kept}[service]\npackages = ["plum"]\n') as server, client(server) as http:
            answer = http.post("/api/sandbox/execute", json=body, timeout=240)
            assert answer.json()["stdout"] == "1.0\n", answer.text
            asked = {"kind": "session", "backend": "native", "packages": ["plum"]}
            session = http.post("/api/sandbox/sessions", json=asked).json()
            turn = http.post(f"/api/sandbox/sessions/{session['id']}/run", json={"code": body["code"]})
            assert turn.json()["stdout"] == "1.0\n", turn.text
            assert http.delete(f"/api/sandbox/sessions/{session['id']}").status_code == 204
            refused = http.post("/api/sandbox/sessions", json=asked | {"packages": ["peach"]})
            assert told(refused) == (403, "policy_denied")
            answer = http.post("/api/sandbox/execute", json=body | {"packages": ["plum", "peach"]})
            assert told(answer) == (403, "policy_denied") and "peach may not be installed" in answer.text
            answer = http.post("/api/sandbox/execute", json=body | {"packages": ["-r /etc/passwd"]})
            assert answer.status_code == 422 and "no name of a package" in answer.text
        with served(config=f"{installers}{kept}") as server, client(server) as http:
            answer = http.post("/api/sandbox/execute", json=body)
            assert told(answer) == (403, "policy_denied") and "service.packages" in answer.text
            missing = http.post("/api/sandbox/execute", json=body | {"packages": None}).json()["error"]
            assert '"packages": "/path/to/venv"' in missing["suggestion"]


def test_a_caller_can_change_the_network_of_a_sandbox_only_to_what_it_may_ask_for(keyed: Server) -> None:
    with of(keyed, "bob") as http:
        opened = http.post("/api/sandboxes", json={"backend": "native"})
        assert opened.status_code == 201, opened.text
        path = f"/api/sandboxes/{opened.json()['id']}/network"
        assert http.put(path, json={"allow": ["listed.example"]}).json()["net"] == ["listed.example"]
        for body in ({"allow": ["other.example"]}, {"net": ["*"]}, {"allow": ["listed.example:8443"]}):
            assert told(http.put(path, json=body)) == (403, "policy_denied"), body
        assert told(http.put(path, json={"allow": ["a b"]})) == (422, "invalid_request")
        assert http.put(path, json={"deny": ["*"]}).json() == {"mode": "none", "net": [], "denied": []}
        http.delete(path.removesuffix("/network"))
    with of(keyed, "ada") as http:
        assert http.get(path).status_code == 403


def test_a_host_that_is_refused_is_an_alert_once_and_is_named_to_the_guest(keyed: Server) -> None:
    ask = "import urllib.request as u\ntry: u.urlopen('https://other.example')\nexcept OSError as error: print(error)\n"
    with of(keyed, "ada") as http:
        body = {"code": ask * 2, "net": ["listed.example"], "backend": "native"}
        result = http.post("/api/sandbox/execute", json=body).json()
        assert result["stdout"].count("other.example:443 was refused: it is not on the list (listed.example)") == 2
        assert 'net=["other.example"]' in result["stdout"]
        path = f"/api/sandbox/{result['container_id']}/metrics"

        def alerts() -> list[dict[str, str]]:
            found: list[dict[str, str]] = http.get(path).json()["alerts"]
            return found

        assert eventually(lambda: bool(alerts()))
        assert [(one["kind"], "other.example:443 was refused" in one["message"]) for one in alerts()] == [
            ("network", True)
        ]
