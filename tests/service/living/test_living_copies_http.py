"""Snapshots, forks and signed links of living sandboxes over HTTP."""

from __future__ import annotations

import json

import httpx2
import pytest

from boxes import SANDBOXES, OpenBox
from serving import Server, served
from witness import eventually

pytestmark = pytest.mark.engine


def test_a_snapshot_begins_another_sandbox_with_its_files(http: httpx2.Client, server: Server) -> None:
    box = OpenBox.opened(http, server.url)
    box.sh("echo kept > ~/notes; mkdir src; echo 1 > src/a.py")
    snapshot = box.post("snapshots", {"labels": {"task": "42"}}).json()
    box.sh("rm -r src")
    assert [one["id"] for one in http.get("/api/snapshots", params={"label": "task:42"}).json()] == [snapshot["id"]]
    assert http.get("/api/snapshots", params={"label": "task:43"}).json() == []
    again = OpenBox.opened(http, server.url, snapshot=snapshot["id"])
    assert again.sh("cat ~/notes src/a.py") == "kept\n1\n"
    assert http.delete(f"/api/snapshots/{snapshot['id']}").status_code == 204
    assert http.delete(f"/api/snapshots/{snapshot['id']}").status_code == 404
    gone = http.post(SANDBOXES, json={"backend": "native", "snapshot": snapshot["id"]})
    assert (gone.status_code, gone.json()["kind"]) == (404, "not_found")
    assert again.sh("cat src/a.py") == "1\n"


def test_a_fork_has_the_files_of_its_original_and_a_life_of_its_own(box: OpenBox) -> None:
    box.sh("echo one > file; sleep 1000 &")
    told = box.post("fork", {"labels": {"branch": "b"}, "expires": 500}).json()
    fork = OpenBox(box.http, box.url, told["id"])
    assert told["labels"] == {"branch": "b"} and fork.id != box.id
    assert fork.sh("cat file") == "one\n"
    assert not any("sleep" in one["command"] for one in fork.get("ps").json()), "processes are not copied"
    fork.sh("echo two > file")
    assert box.sh("cat file") == "one\n"
    third = box.http.post(f"{box.path}/fork")  # without a body
    assert (third.status_code, OpenBox(box.http, box.url, third.json()["id"]).sh("cat file")) == (201, "one\n")
    assert box.delete().status_code == 204 and fork.sh("cat file") == "two\n"
    assert box.post("fork", {}).status_code == 410


def test_a_link_reads_or_writes_its_one_file_until_it_is_over(box: OpenBox) -> None:
    box.sh("echo secret > a; echo other > b")
    with httpx2.Client(base_url=box.url) as stranger:

        def link(**body: object) -> str:
            answer = box.post("files/links", body)
            assert answer.status_code == 201, answer.text
            return str(answer.json()["url"])

        reading, writing = link(path="a"), link(path="~/new/c", method="PUT", seconds=600)
        answer = stranger.get(reading)
        assert (answer.status_code, answer.content) == (200, b"secret\n")
        assert "sandbox" in answer.headers["content-security-policy"]
        assert stranger.put(writing, content=b"mine").status_code == 204
        assert box.sh("cat ~/new/c") == "mine"
        said, _, signature = reading.removeprefix("/links/").partition("?signature=")
        other = link(path="b").removeprefix("/links/").partition("?signature=")[0]
        for wrong in (
            stranger.put(reading, content=b"x"), stranger.get(writing), stranger.get(f"/links/{said}"),
            stranger.get(f"/links/{other}?signature={signature}"), stranger.get(f"/links/{said}?signature=é"),
            stranger.put(f"/links/none?signature={signature}", content=b"x" * (2 << 20)),
        ):  # fmt: skip
            assert (wrong.status_code, wrong.json()["kind"]) == (401, "unauthorized"), wrong.text
        brief = link(path="a", seconds=0.1)
        assert eventually(lambda: stranger.get(brief).status_code == 401, 10)
        box.delete()
        assert stranger.get(reading).status_code == 410
    for body in ({"path": "a", "seconds": 8 * 86400}, {"path": "a", "method": "DELETE"}, {"path": "a\0"}):
        assert box.http.post(f"{box.path}/files/links", json=body).status_code in (410, 422)


def test_a_link_dies_with_the_key_of_who_made_it_and_its_signature_is_in_no_log() -> None:
    with served(MAX_CONTAINERS="4") as server:
        made = server.belljar("keys", "create", "ci", "--scope", "sessions", "--scope", "files", "--json")
        key = json.loads(made.stdout)
        headers = {"Authorization": f"Bearer {key['key']}"}
        with httpx2.Client(base_url=server.url, timeout=60, headers=headers) as http:
            assert eventually(lambda: http.get(SANDBOXES).status_code == 200, 15), "it knows the key"
            box = OpenBox.opened(http, server.url)
            box.put("files/content", b"x", path="a")
            url = box.post("files/links", {"path": "a"}).json()["url"]
            mode = (server.data_dir / "links.key").stat().st_mode & 0o777
            assert mode == 0o600 and httpx2.get(server.url + url).content == b"x"
            server.belljar("keys", "revoke", key["id"])
            assert eventually(lambda: httpx2.get(server.url + url).status_code == 401, 15)
        assert url.partition("signature=")[2] not in server.log


def test_a_link_ends_with_its_sandbox_at_a_restart_and_the_secret_stays() -> None:
    with served(MAX_CONTAINERS="4") as server, httpx2.Client(base_url=server.url, timeout=60) as own:
        box = OpenBox.opened(own, server.url)
        box.put("files/content", b"x", path="a")
        url = box.post("files/links", {"path": "a"}).json()["url"]
        secret = (server.data_dir / "links.key").read_bytes()
        server.restart()
        assert own.get(url).status_code == 410
        assert (server.data_dir / "links.key").read_bytes() == secret
