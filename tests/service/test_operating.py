"""What operators do: the first key from a file, keys in a server's folder, pruning, a store that is gone."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from serving import Server, served
from witness import eventually

pytestmark = pytest.mark.engine
LANGUAGES = "/api/languages"


def asked(server: Server, key: str) -> int:
    return httpx2.get(f"{server.url}{LANGUAGES}", headers={"X-API-Key": key}, timeout=60).status_code


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("secret") / "key"


@pytest.fixture(scope="module")
def server(first: Path) -> Iterator[Server]:
    """One whose first key is in a file, and which lets go of records at once."""
    config = "[service]\nkeep = 0.001\nprune_every = 1\n"
    with served(start=False, config=config, BELLJAR_FIRST_KEY_FILE=str(first), BELLJAR_LOG_FORMAT="json") as it:
        first.write_text(it.belljar("keys", "generate").stdout)
        it.start()
        yield it


def test_the_first_key_comes_from_a_file_and_nobody_else_is_let_in(server: Server, first: Path) -> None:
    key = first.read_text().strip()
    assert (asked(server, key), asked(server, ""), asked(server, f"bj_{'0' * 12}_{'0' * 64}")) == (200, 401, 401)
    assert key.split("_")[2] not in server.log
    assert key not in json.dumps(json.loads(server.belljar("keys", "list", "--json").stdout))


def test_a_key_for_the_servers_folder_is_known_there_whatever_the_settings_name(server: Server) -> None:
    folder = str(server.data_dir)
    made = server.belljar("keys", "create", "ci", "--scope", "read", "--data-dir", folder)
    assert made.returncode == 0, made.stderr
    assert "records.db" in made.stderr
    assert eventually(lambda: asked(server, made.stdout.strip()) == 200, 30)


def test_a_folder_that_no_server_reads_gets_no_key(server: Server, tmp_path: Path) -> None:
    refused = server.belljar("keys", "create", "ci", "--scope", "read", "--data-dir", str(tmp_path / "typo"))
    assert refused.returncode != 0
    assert "no server reads it" in refused.stderr
    assert not (tmp_path / "typo").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="SKIPPED: only root can give a folder to somebody else")
def test_a_folder_of_another_user_gets_no_files_that_its_server_could_not_write(server: Server, tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, 65534)
    refused = server.belljar("keys", "create", "ci", "--scope", "read", "--data-dir", str(tmp_path))
    assert refused.returncode != 0
    assert "runuser -u" in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_old_records_go_by_themselves_where_that_is_set(server: Server, first: Path) -> None:
    headers = {"X-API-Key": first.read_text().strip()}
    with httpx2.Client(base_url=server.url, headers=headers, timeout=60) as http:
        id = http.post("/api/sandbox/execute", json={"code": "print(1)"}).json()["id"]
        assert eventually(lambda: http.get(f"/api/sandbox/runs/{id}").status_code == 404, 60)
    assert eventually(lambda: "old records were removed" in server.log, 30)


def test_a_first_key_that_was_revoked_stays_revoked(server: Server, first: Path) -> None:
    key = first.read_text().strip()
    assert server.belljar("keys", "revoke", key).returncode == 0
    server.restart()
    assert asked(server, key) == 401


@pytest.mark.parametrize("text", [None, "hunter2"])
def test_a_file_without_a_key_stops_the_start_and_says_what_to_do(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "key"
    if text is not None:
        file.write_text(text)
    with served(start=False, BELLJAR_FIRST_KEY_FILE=str(file)) as server:
        done = server.belljar("serve", "--port", "0")
    assert done.returncode != 0
    assert "service.first_key_file" in done.stderr
    assert "belljar keys generate" in done.stderr


def test_a_store_that_is_gone_is_told_by_readyz_before_anybody_runs_anything() -> None:
    with served() as server:
        ready = httpx2.get(f"{server.url}/readyz", timeout=60)
        assert (ready.status_code, ready.json()["parts"]["store"]) == (200, "ok")
        shutil.move(server.data_dir / "records.db", server.data_dir / "moved.db")

        def unwell() -> httpx2.Response | None:
            answer = httpx2.get(f"{server.url}/readyz", timeout=60)
            return answer if answer.status_code == 503 else None

        told = eventually(unwell, 60)
        assert isinstance(told, httpx2.Response)
        assert "removed or replaced" in told.json()["parts"]["store"]
        assert told.json()["problem"] == told.json()["parts"]["store"]
        shutil.move(server.data_dir / "moved.db", server.data_dir / "records.db")
        assert eventually(lambda: httpx2.get(f"{server.url}/readyz", timeout=60).status_code == 200, 60)
