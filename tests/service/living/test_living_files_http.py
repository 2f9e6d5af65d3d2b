"""Files of living sandboxes over HTTP: by any path, streamed, as archives, watched; and the errors of the guest."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterator

import pytest

from boxes import OpenBox
from serving import Server
from watching import Refused, resident
from witness import eventually

pytestmark = pytest.mark.engine
MIB = 1 << 20


def test_files_are_written_read_told_and_moved_by_any_path(box: OpenBox) -> None:
    assert box.put("files/content", b"one\n", path="~/a/b.txt", mode="750").status_code == 204
    assert box.get("files/content", path="/home/user/a/b.txt").content == b"one\n"
    told = box.get("files/stat", path="~/a/b.txt").json()
    assert (told["path"], told["kind"], told["size"], told["mode"]) == ("/home/user/a/b.txt", "file", 4, 0o750)
    assert box.put("files/content", b"two\n", path="~/a/b.txt").status_code == 204
    assert box.get("files/stat", path="~/a/b.txt").json()["mode"] == 0o750, "it keeps what it had"
    assert box.post("files/make_dir", {"path": "d/e"}).json() == {"made": True}
    assert box.post("files/make_dir", {"path": "d/e"}).json() == {"made": False}
    assert box.post("files/copy", {"path": "~/a", "to": "d/a"}).status_code == 204
    assert box.post("files/move", {"path": "d/a/b.txt", "to": "/tmp/c"}).status_code == 204
    assert box.sh("cat /tmp/c; ls d/a | wc -l") == "two\n0\n"
    assert box.get("files/exists", path="/tmp/c").json() == {"exists": True}
    assert box.delete("files", path="/tmp/c").status_code == 204
    assert box.get("files/exists", path="/tmp/c").json() == {"exists": False}


def test_a_folder_is_listed_page_by_page_and_as_deep_as_asked(box: OpenBox) -> None:
    box.sh("mkdir -p t/u/v; touch t/a t/b t/u/c t/u/v/d")

    def paths(**params: object) -> list[str]:
        return [
            one["path"].removeprefix("/workspace/t/") for one in box.get("files", path="t", **params).json()["files"]
        ]

    assert paths() == ["a", "b", "u"]
    assert paths(depth=3) == ["a", "b", "u", "u/c", "u/v", "u/v/d"]
    first = box.get("files", path="t", depth=3, limit=4).json()
    assert first["more"] is True and paths(depth=3, after=first["files"][-1]["path"]) == ["u/v", "u/v/d"]
    assert box.get("files", path="t", depth=3, after="/workspace/t/u/c").json()["more"] is False


def test_what_goes_wrong_is_the_error_that_the_guest_would_get(box: OpenBox) -> None:
    box.sh("mkdir d; ln -s /etc/passwd link")
    for answer, status, errno in (
        (box.get("files/content", path="none"), 404, "ENOENT"),
        (box.get("files/content", path="d"), 422, "EISDIR"),
        (box.get("files/content", path="link"), 422, "ELOOP"),
        (box.put("files/content", b"x", path="d"), 422, "EISDIR"),
        (box.put("files/content", b"x" * 2 * MIB, path="d"), 422, "EISDIR"),
        (box.put("files/content", b"x", path="/usr/bin/x"), 403, "EROFS"),
        (box.delete("files", path="none"), 404, "ENOENT"),
        (box.post("files/move", {"path": "none", "to": "x"}), 404, "ENOENT"),
        (box.get("files", path="d/none"), 404, "ENOENT"),
        (box.get("files/archive", path="none"), 404, "ENOENT"),
        (box.get("files/content", path="/proc/1/environ"), 403, "EACCES"),
    ):
        assert (answer.status_code, answer.json().get("context", {}).get("errno")) == (status, errno), answer.text
    assert box.get("files/content", path="/etc/passwd").status_code == 200


def test_a_range_is_a_part_of_the_file(box: OpenBox) -> None:
    box.sh("seq 1 400000 > numbers")
    whole = box.get("files/content", path="numbers").content

    def part(asked: str) -> tuple[int, bytes]:
        answer = box.http.get(f"{box.path}/files/content", params={"path": "numbers"}, headers={"Range": asked})
        return answer.status_code, answer.content

    assert part("bytes=0-9") == (206, whole[:10])
    assert part("bytes=1048570-1048585") == (206, whole[1048570:1048586])
    assert part("bytes=2000000-") == (206, whole[2000000:]) and part(f"bytes={len(whole)}-") == (206, b"")
    assert part("lines=1-2")[0] == 422 == part("bytes=5-2")[0]


def test_a_large_file_goes_in_and_out_without_being_held(box: OpenBox, server: Server) -> None:
    size, digest = 192 * MIB, hashlib.sha256()
    piece = bytes(range(256)) * 4096

    def pieces() -> Iterator[bytes]:
        for _ in range(size // MIB):
            digest.update(piece)
            yield piece

    before = resident(server.pid)
    headers = {"Content-Length": str(size)}
    answer = box.http.put(f"{box.path}/files/content?path=big", content=pieces(), headers=headers, timeout=120)
    assert answer.status_code == 204, answer.text
    heard = hashlib.sha256()
    with box.http.stream("GET", f"{box.path}/files/content", params={"path": "big"}) as answer:
        for got in answer.iter_bytes():
            heard.update(got)
    assert heard.digest() == digest.digest()
    assert resident(server.pid) - before < 96 * MIB


def test_a_disk_that_is_full_is_told_and_leaves_no_half_of_a_file(box: OpenBox, http: object) -> None:
    small = OpenBox.opened(box.http, box.url, limits={"disk": "4M"})
    full = small.put("files/content", b"x" * 8 * MIB, path="big")
    assert (full.status_code, full.json()["context"]["errno"]) == (403, "ENOSPC"), full.text
    assert small.get("files").json()["files"] == []


def test_folders_go_in_and_out_as_archives(box: OpenBox) -> None:
    box.sh("mkdir -p src/pkg; echo 1 > src/pkg/a.py; ln -s a.py src/pkg/b.py; chmod 755 src/pkg/a.py")
    packed = box.get("files/archive", path="src")
    assert packed.headers["content-type"] == "application/x-tar"
    with tarfile.open(fileobj=io.BytesIO(packed.content)) as archive:
        assert {entry.name.removeprefix("workspace/") for entry in archive} >= {"src/pkg/a.py", "src/pkg/b.py"}
    assert box.put("files/archive", packed.content, path="~/copy").status_code == 204
    assert box.sh("cat ~/copy/workspace/src/pkg/b.py; stat -c %a ~/copy/workspace/src/pkg/a.py") == "1\n755\n"


@pytest.mark.parametrize("name", ["../../escape", "/etc/escape", "d/../../escape"])
def test_an_archive_that_leads_out_is_refused(box: OpenBox, name: str) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as writing:
        entry = tarfile.TarInfo(name)
        entry.size = 1
        writing.addfile(entry, io.BytesIO(b"x"))
    refused = box.put("files/archive", archive.getvalue())
    assert (refused.status_code, refused.json()["kind"]) == (422, "invalid_request"), refused.text
    assert box.put("files/archive", b"no archive at all" * 100).status_code == 422


def test_changes_of_a_folder_are_told_as_they_happen(box: OpenBox) -> None:
    box.sh("mkdir -p w/in")
    with box.attach("files/watch?path=w&recursive=true") as watcher:
        assert next(watcher.messages()) == {"watching": "/workspace/w"}
        box.sh("echo x > w/in/new")
        told = watcher.until(lambda told: isinstance(told, dict) and told["path"].endswith("new"))
        assert told == {"kind": "created", "path": "/workspace/w/in/new"}
    with pytest.raises(Refused) as caught:
        box.attach("files/watch?path=none")
    assert caught.value.status == 404


def test_a_box_has_so_many_watchers_and_gets_their_places_back(box: OpenBox) -> None:
    watchers = [box.attach("files/watch") for _ in range(16)]
    with pytest.raises(Refused) as caught:
        box.attach("files/watch")
    assert caught.value.status == 429
    for watcher in watchers:
        watcher.cut()

    def again() -> bool:
        try:
            with box.attach("files/watch") as watcher:
                return next(watcher.messages()) == {"watching": "/workspace"}
        except Refused:
            return False

    assert eventually(again, 30)
