"""Other tenants, broken clients and hostile guests against the HTTP side of living sandboxes."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from attaching import Attached
from boxes import SANDBOXES, OpenBox
from serving import Server, served
from watching import Refused, resident
from witness import eventually

pytestmark = pytest.mark.engine
MIB = 1 << 20


# --- other tenants ---


def key_of(server: Server, name: str, *scopes: str) -> dict[str, str]:
    words = [word for scope in scopes for word in ("--scope", scope)]
    told = server.belljar("keys", "create", name, *words, "--json")
    assert told.returncode == 0, told.stderr
    return {"Authorization": f"Bearer {json.loads(told.stdout)['key']}"}


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Server, dict[str, dict[str, str]]]]:
    with served(MAX_CONTAINERS="12", start=False) as server:
        keys = {
            "ann": key_of(server, "ann", "sessions", "files"), "bob": key_of(server, "bob", "sessions", "files"),
            "reader": key_of(server, "reader", "read", "run"), "plain": key_of(server, "plain", "sessions"),
        }  # fmt: skip
        server.start()
        yield server, keys


@pytest.fixture
def anns(shared: tuple[Server, dict[str, dict[str, str]]]) -> Iterator[OpenBox]:
    server, keys = shared
    with httpx2.Client(base_url=server.url, timeout=60, headers=keys["ann"]) as http:
        box = OpenBox.opened(http, server.url, labels={"of": "ann"})
        yield box
        box.delete()


ROUTES: tuple[tuple[str, str, Any], ...] = (
    ("GET", "", None), ("DELETE", "", None), ("POST", "extend", {"seconds": 5}), ("POST", "pause", None),
    ("POST", "resume", None), ("POST", "run", {"code": "1"}), ("POST", "snapshots", {}), ("POST", "fork", {}),
    ("POST", "processes", {"command": "id"}), ("GET", "processes", None), ("GET", "ps", None),
    ("GET", "processes/mine", None), ("GET", "processes/mine/wait?timeout=0", None),
    ("GET", "processes/mine/output", None), ("POST", "processes/mine/signal", {"signal": 9}),
    ("POST", "processes/mine/kill", None), ("POST", "processes/mine/stdin", None),
    ("DELETE", "processes/mine/stdin", None), ("POST", "processes/mine/resize", {"columns": 1, "rows": 1}),
    ("GET", "files", None), ("GET", "files/content?path=a", None), ("PUT", "files/content?path=a", None),
    ("GET", "files/stat?path=a", None), ("GET", "files/exists?path=a", None), ("DELETE", "files?path=a", None),
    ("POST", "files/make_dir", {"path": "d"}), ("POST", "files/move", {"path": "a", "to": "b"}),
    ("POST", "files/copy", {"path": "a", "to": "b"}), ("GET", "files/archive", None), ("PUT", "files/archive", None),
    ("POST", "files/links", {"path": "a"}), ("GET", "ports/80/wait?timeout=0", None), ("GET", "interpreters", None),
    ("POST", "interpreters", {}),
)  # fmt: skip
SOCKETS = ("processes/mine/output", "processes/mine/terminal", "files/watch", "ports/80/dial")


def test_another_caller_finds_nothing_of_a_sandbox(
    anns: OpenBox, shared: tuple[Server, dict[str, dict[str, str]]]
) -> None:
    server, keys = shared
    anns.start("sleep 1000", id="mine")
    snapshot = anns.post("snapshots", {}).json()["id"]
    with httpx2.Client(base_url=server.url, timeout=60, headers=keys["bob"]) as bob:
        assert bob.get(SANDBOXES).json() == [] == bob.get("/api/snapshots").json()
        for method, path, body in ROUTES:
            answer = bob.request(method, f"{anns.path}/{path}".rstrip("/"), json=body)
            assert (answer.status_code, answer.json()["kind"]) == (404, "not_found"), (method, path, answer.text)
        for path in SOCKETS:
            with pytest.raises(Refused) as caught:
                Attached(server.url, f"{anns.path}/{path}", headers=keys["bob"])
            assert caught.value.status == 404, path
        assert bob.post(SANDBOXES, json={"backend": "native", "snapshot": snapshot}).status_code == 404
        assert bob.delete(f"/api/snapshots/{snapshot}").status_code == 404
    assert anns.process("mine")["state"] == "running"
    anns.http.delete(f"/api/snapshots/{snapshot}")
    anns.delete()
    with httpx2.Client(base_url=server.url, timeout=60, headers=keys["bob"]) as bob:
        assert bob.get(anns.path).status_code == 404, "nor how it ended"


def test_who_lacks_a_scope_is_refused_before_anything_is_looked_up(
    anns: OpenBox, shared: tuple[Server, dict[str, dict[str, str]]]
) -> None:
    server, keys = shared
    with httpx2.Client(base_url=server.url, timeout=60, headers=keys["reader"]) as reader:
        for method, path, body in ROUTES:
            answer = reader.request(method, f"{anns.path}/{path}".rstrip("/"), json=body)
            assert (answer.status_code, answer.json()["kind"]) == (403, "policy_denied"), (method, path, answer.text)
    with httpx2.Client(base_url=server.url, timeout=60, headers=keys["plain"]) as plain:
        assert plain.get(f"{anns.path}/files").status_code == 403
        assert plain.get(f"{anns.path}/processes").status_code == 404
    for headers, path, status in ((keys["plain"], "files/watch", 403), ({}, "ports/80/dial", 401)):
        with pytest.raises(Refused) as caught:
            Attached(server.url, f"{anns.path}/{path}", headers=headers)
        assert caught.value.status == status


@pytest.mark.exhaustive("who listens is asked again every 15 seconds")
def test_a_key_that_is_revoked_ends_what_is_attached(shared: tuple[Server, dict[str, dict[str, str]]]) -> None:
    server, _ = shared
    made = json.loads(server.belljar("keys", "create", "eve", "--scope", "sessions", "--json").stdout)
    headers = {"Authorization": f"Bearer {made['key']}"}
    with httpx2.Client(base_url=server.url, timeout=60, headers=headers) as http:
        assert eventually(lambda: http.get(SANDBOXES).status_code == 200, 15)
        box = OpenBox.opened(http, server.url)
        id = box.start("sleep 1000")
        with Attached(server.url, f"{box.path}/processes/{id}/terminal", headers=headers) as attached:
            server.belljar("keys", "revoke", made["id"])
            assert list(attached.messages()) == [] and attached.end and attached.end[0] == 1008


# --- broken and hostile clients ---


def test_a_message_that_is_too_large_ends_the_connection_and_not_the_process(box: OpenBox) -> None:
    id = box.start("cat")
    with box.attach(f"processes/{id}/terminal") as attached:
        attached.send(b"x" * (64 * 1024 + 1))
        list(attached.messages())
        assert attached.end and attached.end[0] == 1009
    assert box.process(id)["state"] == "running"


def test_what_is_no_message_ends_the_connection_and_not_the_process(box: OpenBox) -> None:
    id = box.start("cat")
    with box.attach(f"processes/{id}/terminal") as attached:
        attached.push(b"\xff" * 64)
        list(attached.messages())
    assert box.process(id)["state"] == "running" and box.sh("echo fine") == "fine\n"


def test_a_reader_that_hangs_slows_nobody_and_fills_no_memory(box: OpenBox, server: Server) -> None:
    flood = box.start("head -c 100000000 /dev/zero | tr '\\0' x; echo over >&2")
    hung = [box.attach(f"processes/{flood}/terminal", buffer=4096) for _ in range(4)]
    before = resident(server.pid)
    with box.attach(f"processes/{flood}/output") as reader:
        told = reader.until(lambda told: isinstance(told, dict) and "ended" in told)
    assert isinstance(told, dict) and told["ended"]["exit_code"] == 0
    assert resident(server.pid) - before < 64 * MIB
    assert box.sh("echo fine") == "fine\n"
    for one in hung:
        one.cut()


def test_a_late_reader_is_told_how_much_is_gone(box: OpenBox) -> None:
    id = box.start("head -c 5000000 /dev/zero | tr '\\0' x")
    assert box.ended(id)["result"]["truncated"] is True
    heard = missed = 0
    with box.attach(f"processes/{id}/output") as reader:
        for told in reader.messages():
            if isinstance(told, dict) and "seq" in told:
                heard, missed = heard + len(told["data"]), missed + told["missed"]
    assert heard + missed == 5_000_000 and missed > 0


def test_half_open_connections_are_no_more_than_a_caller_may_have(box: OpenBox) -> None:
    id = box.start("sleep 1000")
    open_ones: list[Attached] = []
    with pytest.raises(Refused) as caught:
        for _ in range(300):
            open_ones.append(box.attach(f"processes/{id}/output"))
    assert (caught.value.status, len(open_ones)) == (429, 256)
    for one in open_ones:
        one.cut()

    def again() -> bool:
        try:
            box.attach(f"processes/{id}/output").cut()
        except Refused:
            return False
        return True

    assert eventually(again, 30)


def test_an_upload_that_stops_half_way_leaves_nothing_and_holds_nothing(box: OpenBox, server: Server) -> None:
    port = int(server.url.rpartition(":")[2])
    stuck = []
    for number in range(6):
        one = socket.create_connection(("127.0.0.1", port), timeout=30)
        target = f"{box.path}/files/content?path=u{number}"
        head = f"PUT {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n\r\n"
        one.sendall(head.encode() + b"x" * 100_000)
        stuck.append(one)

    assert eventually(lambda: box.sh("ls -A | wc -l") == "6\n", 30), "all of them have begun"
    seventh = box.put("files/content", b"x" * 2 * MIB, path="a")
    assert (seventh.status_code, seventh.json()["kind"]) == (429, "busy"), seventh.text
    assert box.put("files/content", b"x", path="a").status_code == 204, "but not a small one"
    assert box.sh("echo fine") == "fine\n"
    for one in stuck:
        one.close()
    assert eventually(lambda: box.put("files/content", b"x" * 2 * MIB, path="a").status_code == 204, 30)
    assert [one["path"] for one in box.get("files").json()["files"]] == ["/workspace/a"]


@pytest.mark.parametrize(
    "path", ["../../etc/shadow", "/proc/self/root/etc/shadow", "/workspace/../proc/1/mem", "/dev/null/x", "link/shadow"]
)
def test_a_path_leads_nowhere_that_the_guest_could_not_go(box: OpenBox, path: str) -> None:
    box.sh("ln -s /etc link")
    for answer in (
        box.get("files/content", path=path), box.put("files/content", b"x", path=path), box.delete("files", path=path),
        box.post("files/copy", {"path": path, "to": "x"}), box.get("files/archive", path=path),
    ):  # fmt: skip
        assert answer.status_code in (403, 404, 422), (answer.status_code, answer.text[:300])
        assert "errno" in answer.json()["context"], answer.text
    assert box.put("files/content", b"x", path="a\0b").status_code == 422
    assert box.put("files/content", b"x", path="p" * 5000).status_code == 422


def test_stdin_that_nobody_reads_takes_no_more_than_it_may(box: OpenBox) -> None:
    id = box.start("sleep 1000")
    large = box.http.post(f"{box.path}/processes/{id}/stdin", content=b"x" * (MIB + 1))
    assert (large.status_code, large.json()["kind"]) == (413, "invalid_request")


def test_a_box_that_is_closed_ends_what_is_attached_to_it(box: OpenBox) -> None:
    id = box.start("sleep 1000")
    with box.attach(f"processes/{id}/output") as output, box.attach("files/watch") as watcher:
        next(watcher.messages())
        box.delete()
        told = list(output.messages())
        assert isinstance(told[-1], dict) and told[-1]["ended"]["state"] in ("ended", "lost")
        list(watcher.messages())
        assert watcher.end and watcher.end[0] == 1000 and output.end and output.end[0] == 1000


def test_a_service_that_leaves_says_so_to_who_is_attached_and_leaves_nothing_behind() -> None:
    with served(MAX_CONTAINERS="4") as server, httpx2.Client(base_url=server.url, timeout=60) as http:
        box = OpenBox.opened(http, server.url)
        id = box.start("sleep 98765")
        with box.attach(f"processes/{id}/output") as output:
            assert server.stop() == 0
            list(output.messages())
            assert output.end and output.end[0] in (1000, 1012)
        assert not _running("98765")


def _running(word: str) -> bool:
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cmdline").read_bytes() == b"sleep\0" + word.encode() + b"\0":
                return True
        except OSError:
            continue
    return False
