"""What breaks around a service: itself, brokers, database, disk. Runs end, records agree, nothing is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from redis import Redis

from brokers import NatsServer, RedisServer
from postgres_server import postgres_server
from serving import Server, served
from witness import Traces, descendants, eventually

pytestmark = pytest.mark.engine


def client(server: Server) -> httpx2.Client:
    return httpx2.Client(base_url=server.url, timeout=60)


def execute(http: httpx2.Client, headers: dict[str, str] | None = None, **body: object) -> httpx2.Response:
    return http.post("/api/sandbox/execute", json=body, headers=headers)


def record_of(http: httpx2.Client, id: str) -> dict[str, Any]:
    return http.get(f"/api/sandbox/runs/{id}").json()  # type: ignore[no-any-return]


def final(http: httpx2.Client, id: str, seconds: float = 30.0) -> dict[str, Any]:
    eventually(lambda: record_of(http, id)["ended"], seconds)
    return record_of(http, id)


def parts(http: httpx2.Client) -> dict[str, str]:
    return http.get("/readyz").json()["parts"]  # type: ignore[no-any-return]


# --- ourselves ---


@pytest.mark.usefixtures("counting")
def test_a_killed_server_leaves_nothing_behind_and_every_run_has_a_final_state(tmp_path: Path) -> None:
    config = "[service]\ncpu_overcommit = 100\nmemory_headroom = 0\ndrain = 1\n"
    with served(config=config, MAX_CONTAINERS="20", BELLJAR_AUDIT_LOG=str(tmp_path / "audit.jsonl")) as server:
        traces = Traces(server.state_dir)
        code = f"import time; print('up', flush=True); time.sleep(300)  # {traces.word}"
        bodies = [{"command": ["sh", "-c", f"echo up; sleep 300; : {traces.word}"], "backend": "native"}] * 10
        bodies += [{"code": code, "backend": "wasm"}] * 10
        headers = {"Idempotency-Key": "the first"}
        with client(server) as http, ThreadPoolExecutor(4) as threads:
            first = execute(http, headers, **bodies[0], wait=False).json()["id"]
            ids = [first, *threads.map(lambda body: execute(http, **body, wait=False).json()["id"], bodies[1:])]
            assert eventually(lambda: all(_printed(http, id) for id in ids), 60)
            assert len(traces.processes()) >= 20
        below = descendants(server.pid)
        server.restart(kill=True)
        with client(server) as http:
            records = [record_of(http, id) for id in ids]
            assert {record["state"] for record in records} == {"lost"}
            assert {record["problem"]["kind"] for record in records} == {"execution_failed"}
            assert all(record["ended"] for record in records)
            again = execute(http, headers, **bodies[0])
            assert (again.status_code, again.json()["kind"]) == (500, "execution_failed")
            assert "died" in again.json()["detail"] and "key" in again.json()["fix"]
            assert [line["message"] for line in http.get(f"/api/sandbox/{first}/logs").json()["lines"]] == ["up"]
            assert eventually(lambda: not _left(traces, below, server), 10), _left(traces, below, server)
            assert execute(http, code="print(1)").json()["stdout"] == "1\n"
        told = server.belljar("audit", "verify")
        assert told.returncode == 0, told.stdout + told.stderr
        lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
        assert sorted(line["run"] for line in lines if line["kind"] == "lost") == sorted(ids)


def _printed(http: httpx2.Client, id: str) -> bool:
    return bool(http.get(f"/api/sandbox/{id}/logs").json()["lines"])


def _left(traces: Traces, before: set[int], server: Server) -> dict[str, list[object]]:
    """What is there still, apart from what the server that runs now has."""
    own = descendants(server.pid) | {server.pid}
    found = traces.all()
    found["processes"] = [pid for pid in {*traces.processes(), *_alive(before)} if pid not in own]
    found["files"] = [name for name in found.get("files", []) if f".{server.pid}." not in str(name)]
    return {kind: what for kind, what in found.items() if what}


def _alive(pids: set[int]) -> list[int]:
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


# --- brokers ---


def test_redis_and_nats_may_die_in_mid_run_and_each_event_is_told_once_and_in_order_when_they_are_back() -> None:
    """Lines over Redis are for who listens at that moment; all of them are in the store."""
    code = "import time\nfor i in range(60):\n    print(i, flush=True); time.sleep(0.05)"
    with (
        RedisServer() as redis,
        NatsServer() as nats,
        served(BELLJAR_REDIS=redis.url, BELLJAR_NATS=nats.url) as server,
        client(server) as http,
    ):
        assert eventually(lambda: set(parts(http).values()) == {"ok"}), parts(http)
        id = execute(http, code=code, wait=False).json()["id"]
        assert eventually(lambda: _printed(http, id))
        redis.kill()
        nats.kill()
        assert eventually(lambda: parts(http)["logs"] != "ok" and parts(http)["events"] != "ok"), parts(http)
        ready = http.get("/readyz")
        assert (ready.status_code, ready.json()["ready"]) == (200, True)  # it can do its work
        other = execute(http, code="print('meanwhile')").json()
        assert other["stdout"] == "meanwhile\n"
        record = final(http, id)
        assert record["result"]["stdout"] == "".join(f"{i}\n" for i in range(60))
        lines = http.get(f"/api/sandbox/{id}/logs").json()["lines"]
        assert [line["message"] for line in lines] == [str(i) for i in range(60)]
        redis.restart()
        nats.restart()
        assert eventually(lambda: set(parts(http).values()) == {"ok"}, 20), parts(http)
        with Redis.from_url(redis.url) as connection, connection.pubsub() as heard:
            heard.psubscribe("belljar.logs.*")
            assert heard.get_message(timeout=5)
            last = execute(http, code="print('after')").json()
            assert eventually(lambda: b"after" in (heard.get_message(timeout=0.2) or {"data": b""})["data"])
        told = eventually(
            lambda: (found := _events(nats.url)) and f"belljar.events.ended.{last['id']}" in found and found, 20
        )
        wanted = [
            f"belljar.events.{what}.{run}"
            for run in (id, other["id"], last["id"])
            for what in ("running", "started", "ended")
        ]
        for run in (id, other["id"], last["id"]):  # `/readyz` has runs of its own
            own = [subject for subject in told if subject.endswith(run)]  # type: ignore[union-attr, attr-defined]
            assert own == [subject for subject in wanted if subject.endswith(run)]


def _events(url: str) -> list[str]:
    """The subjects of all that the stream holds, in its order."""
    program = f"""
import asyncio, nats
async def main():
    connection = await nats.connect({url!r})
    stream = connection.jetstream()
    for number in range(1, (await stream.stream_info('BELLJAR')).state.last_seq + 1):
        print((await stream.get_msg('BELLJAR', number)).subject)
    await connection.close()
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.split()


def test_postgres_may_die_in_mid_run_nothing_new_runs_unrecorded_and_the_end_is_recorded_when_it_is_back() -> None:
    code = "import time; print('up', flush=True); time.sleep(2); print('over')"
    with (
        postgres_server() as postgres,
        served(BELLJAR_STORE=postgres.new_url(), MAX_CONTAINERS="1") as server,
        client(server) as http,
    ):
        assert execute(http, code="print(1)").json()["stdout"] == "1\n"
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(lambda: httpx2.post(
                f"{server.url}/api/sandbox/execute", json={"code": code, "backend": "native"}, timeout=60
            ))  # fmt: skip
            running = eventually(lambda: http.get("/api/sandbox/runs?state=running").json())
            id = running[0]["id"]  # type: ignore[index]
            assert eventually(lambda: _printed(http, id))
            queued = execute(http, code="print('its turn comes while nothing can be recorded')", wait=False).json()[
                "id"
            ]
            postgres.kill()
            refused = execute(http, code="print('never')")
            assert (refused.status_code, refused.json()["kind"]) == (503, "not_available"), refused.text
            assert refused.json()["fix"]
            ready = eventually(lambda: (told := http.get("/readyz")).status_code == 503 and told, 10)
            assert ready and ready.json()["parts"]["store"] != "ok"  # type: ignore[attr-defined]
            done = answer.result(60)
            assert (done.status_code, done.json()["stdout"]) == (200, "up\nover\n"), done.text
            postgres.start()
        assert eventually(lambda: http.get("/readyz").status_code == 200, 20), http.get("/readyz").text
        assert execute(http, code="print('again')").json()["stdout"] == "again\n"
        record = final(http, id)
        assert (record["state"], record["result"]["stdout"]) == ("finished", "up\nover\n")
        lines = [line["message"] for line in http.get(f"/api/sandbox/{id}/logs").json()["lines"]]
        assert lines == ["up", "over"]
        assert {each["state"] for each in http.get("/api/sandbox/runs").json()} <= {"finished", "failed"}
        waited = final(http, queued)
        assert waited["state"] == "finished" or waited["problem"]["kind"] == "not_available", waited
        postgres.kill()  # and nobody asks for a run
        assert eventually(lambda: parts(http)["store"] != "ok", 15)
        assert (ready := http.get("/readyz")).status_code == 503, ready.text  # type: ignore[attr-defined]


# --- the disk ---


@contextmanager
def small_disk(megabytes: int) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("NOTHING of full disks was checked: only root can mount a small one")
    folder = Path(tempfile.mkdtemp(prefix="belljar-test-disk-"))
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0711", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        folder.rmdir()
        pytest.skip(f"NOTHING of full disks was checked: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


def fill(disk: Path) -> Path:
    path = disk / "ballast"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 512, 1):
            try:
                while file.write(b"\0" * size):
                    pass
            except OSError:
                continue
    return path


def test_on_a_full_disk_nothing_is_run_and_with_room_all_goes_on() -> None:
    with small_disk(24) as disk, served(BELLJAR_DATA_DIR=str(disk / "data")) as server, client(server) as http:
        assert execute(http, code="print(1)").json()["stdout"] == "1\n"
        code = "import time; print('up', flush=True); time.sleep(1.5); print('over')"
        id = execute(http, code=code, backend="native", wait=False).json()["id"]
        assert eventually(lambda: _printed(http, id))
        ballast = fill(disk)
        refused = _until_refused(http)
        assert refused.json()["kind"] == "not_available"
        assert "room" in refused.json()["fix"], refused.text
        ready = http.get("/readyz")
        assert (ready.status_code, ready.json()["parts"]["store"]) != (200, "ok")
        assert http.get("/healthz").status_code == 200
        ballast.unlink()
        assert eventually(lambda: http.get("/readyz").status_code == 200, 15), http.get("/readyz").text
        assert execute(http, code="print(2)").json()["stdout"] == "2\n"
        record = final(http, id)
        assert (record["state"], record["result"]["stdout"]) == ("finished", "up\nover\n")


def _until_refused(http: httpx2.Client) -> httpx2.Response:
    """The journal may have some room of its own left: the disk is full when that is used up."""
    for _ in range(200):
        answer = execute(http, code="print('x' * 200_000)", headers={"Idempotency-Key": f"{time.monotonic()}"})
        if answer.status_code == 503:
            return answer
    raise AssertionError("it was never refused")


def test_without_room_for_the_audit_log_nothing_is_run() -> None:
    with small_disk(1) as disk, served(BELLJAR_AUDIT_LOG=str(disk / "audit.jsonl")) as server, client(server) as http:
        assert execute(http, code="print(1)").json()["stdout"] == "1\n"
        ballast = fill(disk)
        refused = execute(http, code="print('never')", backend="native")
        while refused.status_code == 200:  # the last page of the log has some room
            refused = execute(http, code="print('never')", backend="native")
        assert (refused.status_code, refused.json()["kind"]) == (503, "not_available")
        assert "audit log" in refused.json()["detail"] and "room" in refused.json()["fix"]
        ballast.unlink()
        assert execute(http, code="print(2)").json()["stdout"] == "2\n"
        told = server.belljar("audit", "verify")
        assert told.returncode == 0, told.stdout + told.stderr
