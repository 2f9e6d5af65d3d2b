"""Snapshots on disk: contents are kept once, what was cut is never seen, and whatever they say is judged when read."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.core import errors
from belljar.core.box_snapshot import MOST_LEFT_OUT, BoxSnapshot
from belljar.core.settings import LivingSettings
from belljar.host import archives, files
from belljar.host.archives import Member
from belljar.host.box_members import FoundMember, found_members
from belljar.host.snapshot_store import SnapshotStore, _parsed

Entry = tuple[Member, Iterator[bytes]]
WORKSPACE = ("/workspace", "/home/user")


def about(number: int = 1, **more: object) -> BoxSnapshot:
    facts = {"id": f"snap-{number:016x}", "created": float(number), "folders": WORKSPACE, **more}
    return BoxSnapshot.model_validate(facts)


def file(name: str, content: bytes, mode: int = 0o644) -> Entry:
    return Member(name, "file", mode, 5.0, len(content)), iter((content,) if content else ())


def take(store: SnapshotStore, about: BoxSnapshot, found: Iterator[Entry], left_out: list[str]) -> BoxSnapshot:
    with store.taking() as taking:
        taking.unpack(found)
        return taking.finish(about, left_out)


def named(name: str, kind: str, target: str = "") -> Entry:
    return Member(name, kind, 0o755, 5.0, target=target), iter(())  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "snapshots"


@pytest.fixture
def store(folder: Path) -> SnapshotStore:
    return SnapshotStore(folder, LivingSettings())


def contents(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "contents").rglob("*") if path.is_file())


def held(store: SnapshotStore, id: str, where: str = "/workspace") -> dict[str, tuple[str, bytes | str]]:
    with store.opened(id) as (_, below):
        return {
            one.member.name: (one.member.kind, b"".join(one.checked()) or one.member.target) for one in below(where)
        }  # fmt: skip


def test_what_was_taken_is_read_again_with_kinds_modes_and_times(store: SnapshotStore) -> None:
    found = [
        named("workspace", "folder"), file("workspace/run", b"#!", 0o4755),
        named("workspace/link", "link", "/etc/passwd"), named("workspace/twin", "twin", "workspace/run"),
        named("home/user", "folder"), file("home/user/\udcff", b"x" * 300_000),
        named("home/user/other", "twin", "workspace/run"),
    ]  # fmt: skip
    taken = take(store, about(labels={"a": "b"}), iter(found), ["/tmp/x: may not be read"])
    assert (taken.files, taken.size, taken.left_out) == (4, 300_002, ("/tmp/x: may not be read",))
    assert store.all() == (taken,) and store.find(taken.id) == taken
    assert held(store, taken.id) == {
        "workspace": ("folder", ""), "workspace/run": ("file", b"#!"), "workspace/link": ("link", "/etc/passwd"),
        "workspace/twin": ("twin", "workspace/run"),
    }  # fmt: skip
    assert held(store, taken.id, "/home/user")["home/user/other"] == ("file", b"#!"), "the other name lies elsewhere"
    with store.opened(taken.id) as (_, below):
        run = next(one.member for one in below("/workspace") if one.member.name.endswith("run"))
    assert (run.mode, run.modified) == (0o755, 5.0), "without the right to become somebody else"


def test_contents_are_kept_once_and_go_with_the_last_that_needs_them(store: SnapshotStore, folder: Path) -> None:
    same, large = file("workspace/a", b"same"), b"l" * 1_000_000
    first = take(store, about(1), iter([same, file("workspace/l", large)]), [])
    second = take(store, about(2), iter([file("workspace/b", b"same"), file("workspace/l", large)]), [])
    assert first.stored > 1_000_000 > 10_000 > second.stored > 0, "its list of entries is another"
    assert len(contents(folder)) == 4
    store.remove(first.id)
    assert held(store, second.id) == {"workspace/b": ("file", b"same"), "workspace/l": ("file", large)}
    store.remove(second.id)
    assert contents(folder) == [] and store.all() == ()
    for gone in (first.id, "snap-x", "../heads", "snap-0000000000000009"):
        with pytest.raises(errors.NotFound, match="no snapshot"):
            store.remove(gone)


def test_what_changed_while_a_snapshot_was_prepared_is_swept_away(store: SnapshotStore, folder: Path) -> None:
    def found(*contents: bytes) -> Iterator[FoundMember]:
        for number, content in enumerate(contents):
            fd = os.memfd_create("content")
            try:
                os.write(fd, content)
                yield FoundMember(Member(f"workspace/{number}", "file", 0o644, 0.0, len(content)), fd)
            finally:
                os.close(fd)

    large = b"l" * 400_000
    with store.taking() as taking:
        taking.prepare(found(large, b"before"))
        taking.read(found(large, b"after"))
        first = taking.finish(about(1), [])
    assert len(contents(folder)) == 4
    assert store.all() == (first,) and len(contents(folder)) == 3
    assert held(store, first.id) == {"workspace/0": ("file", large), "workspace/1": ("file", b"after")}


def test_a_disk_that_has_no_files_without_a_name_is_good_enough(
    store: SnapshotStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.delattr(os, "O_TMPFILE")
    for number in (1, 2):
        taken = take(store, about(number), iter([file("workspace/a", b"a"), file("workspace/l", b"l" * 400_000)]), [])
    assert held(store, taken.id)["workspace/l"] == ("file", b"l" * 400_000)
    assert len(contents(folder)) == 3 and os.listdir(folder / "unfinished") == []


def test_nobody_but_its_owner_finds_a_snapshot(store: SnapshotStore) -> None:
    taken = take(store, about(owner="ann"), iter([file("workspace/a", b"")]), [])
    assert store.find(taken.id, "ann") == store.find(taken.id)
    for wrong in (lambda: store.find(taken.id, "bob"), lambda: store.remove(taken.id, "bob")):
        with pytest.raises(errors.NotFound):
            wrong()
    assert store.all() == (taken,)


def test_only_the_owner_of_the_folder_can_read_it(store: SnapshotStore, folder: Path) -> None:
    take(store, about(), iter([file("workspace/a", b"secret", 0o777)]), [])
    assert all(not path.stat().st_mode & 0o077 for path in [folder, *folder.rglob("*")])
    folder.chmod(0o755)
    with pytest.raises(errors.NotAvailable, match="not ours alone"):
        take(store, about(2), iter(()), [])


# --- quotas ---


def test_a_snapshot_over_a_limit_is_refused_and_leaves_nothing(folder: Path) -> None:
    small = SnapshotStore(folder, LivingSettings(snapshot_size=1000, snapshots=1, snapshots_size=20_000))
    sparse = Member("workspace/sparse", "file", 0o644, 0.0, 10**15)
    with pytest.raises(errors.PolicyDenied, match="the files of one would take more than") as refused:
        take(small, about(), iter([(sparse, iter(()))]), [])
    assert refused.value.context["field"] == "living.snapshot_size" and contents(folder) == []
    many = (file(f"workspace/{number}", str(number).encode()) for number in range(100))
    with pytest.raises(errors.PolicyDenied, match="all snapshots would take more than"):
        take(small, about(), many, [])
    assert contents(folder) == [] and small.all() == ()
    take(small, about(1), iter([file("workspace/a", b"a")]), [])
    with pytest.raises(errors.PolicyDenied, match="there are 1 already"):
        take(small, about(2), iter([file("workspace/b", b"b")]), [])
    assert len(contents(folder)) == 2


def test_all_snapshots_together_take_no_more_than_they_may(folder: Path) -> None:
    small = SnapshotStore(folder, LivingSettings(snapshots_size=20_000))
    take(small, about(1), iter([file("workspace/a", b"a" * 9000)]), [])
    with pytest.raises(errors.PolicyDenied, match="all of them would take"):
        take(small, about(2), iter([file("workspace/b", b"b" * 9000)]), [])
    assert [one.id for one in small.all()] == [about(1).id] and len(contents(folder)) == 2


def test_more_entries_than_can_be_kept_are_refused(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("belljar.host.snapshot_store.MAX_MEMBERS", 10)
    with pytest.raises(errors.PolicyDenied, match="more than 10 files and folders"):
        take(store, about(), (named(f"workspace/{number}", "folder") for number in range(11)), [])


# --- hostile archives ---


def archive(*entries: tarfile.TarInfo) -> Iterator[Entry]:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as packed:
        for one in entries:
            packed.addfile(one, io.BytesIO(bytes(one.size)))
    return archives.members(iter((whole.getvalue(),)))


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    return made


@pytest.mark.parametrize(
    "entry",
    [
        member("workspace/../../etc/passwd"), member("/etc/passwd"), member("workspace/disk", tarfile.BLKTYPE),
        member("workspace/null", tarfile.CHRTYPE), member("workspace/pipe", tarfile.FIFOTYPE),
        member("workspace/twin", tarfile.LNKTYPE, "../etc/shadow"),
        member("workspace/twin", tarfile.LNKTYPE, "workspace/none"),
    ],
    ids=lambda entry: f"{entry.name} {entry.type!r}",
)  # fmt: skip
def test_an_archive_that_leads_out_or_holds_a_device_is_refused_whole(
    store: SnapshotStore, folder: Path, entry: tarfile.TarInfo
) -> None:
    with pytest.raises(ValueError):
        take(store, about(), archive(member("workspace/good"), entry), [])
    assert store.all() == () and contents(folder) == []


def cut(text: str) -> str:
    return text[: len(text) // 2]


@pytest.mark.parametrize(
    "spoil",
    [
        cut,
        lambda text: text.replace('"format":1', '"format":2'),
        lambda text: text.replace('"entries":2', '"entries":1'),
        lambda text: text.replace('"entries":2', '"entries":3'),
        lambda text: text.replace('"/workspace"', '"/elsewhere"'),
        lambda text: text.replace('"format":1', '"format":1,"more":[]'),
        lambda text: "[" * 100_000,
        lambda text: text.replace("snap-", "snap-f", 1).replace("f0", "f", 1),
    ],
)
def test_a_head_that_was_changed_is_no_snapshot(
    store: SnapshotStore, folder: Path, spoil: Callable[[str], str]
) -> None:
    taken = take(store, about(), iter([file("workspace/a", b"a"), file("workspace/b", b"b")]), [])
    head = folder / "heads" / taken.id
    head.write_text(spoil(head.read_text()))
    with pytest.raises((ValueError, errors.NotFound)), store.opened(taken.id) as (_, below):
        list(below("/workspace"))


ROW = ["f", "workspace/a", 0o644, 5.0, 1, "0" * 64, ""]


@pytest.mark.parametrize(
    "changes",
    [
        {1: "workspace/../../etc/passwd"}, {1: "/workspace/a"}, {1: "etc/passwd"}, {1: "workspace/a\0"}, {1: 7},
        {1: "workspace//a"}, {2: 0o4755}, {2: -1}, {2: True}, {3: 1e300}, {3: "now"}, {4: -1}, {4: 1.5},
        {5: "../../etc/passwd"}, {5: ""}, {5: "G" * 64}, {0: "b"}, {0: ["f"]}, {0: "l", 5: "", 4: 0, 6: ""},
        {0: "t", 6: "../x"}, {0: "t", 6: "etc/passwd"}, {0: "d", 4: 7, 5: ""},
    ],
)  # fmt: skip
def test_an_entry_that_was_changed_is_refused(store: SnapshotStore, folder: Path, changes: dict[int, object]) -> None:
    taken = take(store, about(), iter([file("workspace/a", b"a")]), [])
    row = [changes.get(place, value) for place, value in enumerate(ROW)]
    with forged(store, folder, taken.id, json.dumps(row).encode() + b"\n"), pytest.raises(ValueError):
        held(store, taken.id)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["f", "d", "l", "t", "0" * 64]),
    lambda inner: st.lists(inner, max_size=8),
    max_leaves=10,
)
ROWS = st.tuples(
    st.sampled_from(["f", "d", "l", "t", "x"]), st.sampled_from(["workspace/a", "..", "home/../x", "/"]) | st.text(),
    st.integers(-1, 0o10000), st.floats() | st.integers(), st.integers(-5, 5), st.sampled_from(["", "0" * 64, "../x"]),
    st.sampled_from(["", "workspace/b", "../x", "/etc"]) | st.text(),
).map(list)  # fmt: skip


@given(ROWS | JSON)
def test_whatever_an_entry_says_it_is_refused_or_lies_in_the_folders(row: Any) -> None:
    try:
        kept = _parsed(json.dumps(row).encode(), WORKSPACE)
    except ValueError:
        return
    parts = kept.member.name.split("/")
    assert ".." not in parts and f"/{kept.member.name}/".startswith(("/workspace/", "/home/user/"))
    assert 0 <= kept.member.mode <= 0o777 and kept.member.size >= 0 and (not kept.digest or len(kept.digest) == 64)


class forged:
    """Gives a snapshot another list of entries, as somebody who can write to the folder would."""

    def __init__(self, store: SnapshotStore, folder: Path, id: str, listed: bytes) -> None:
        with store._contents.adding():
            kept = store._contents.put(iter((listed,)))
        path = folder / "heads" / id
        head = json.loads(path.read_text())
        path.write_text(json.dumps(head | {"list": kept.digest, "list_bytes": kept.size}))

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_a_content_that_was_changed_or_is_gone_is_noticed(store: SnapshotStore, folder: Path) -> None:
    taken = take(store, about(), iter([file("workspace/a", b"original")]), [])
    path = next(path for path in contents(folder) if path.read_bytes() == b"original")
    path.write_bytes(b"replaced")
    with pytest.raises(ValueError, match="damaged"):
        held(store, taken.id)
    path.unlink()
    with pytest.raises(ValueError, match="missing"):
        held(store, taken.id)
    os.mkfifo(path)
    with pytest.raises(ValueError, match="no file"):
        held(store, taken.id)
    path.unlink()
    path.write_bytes(b"cut")  # as a crash of the machine may leave it
    again = take(store, about(2), iter([file("workspace/a", b"original")]), [])
    assert held(store, again.id) == {"workspace/a": ("file", b"original")}


def test_a_head_that_is_a_link_or_somebody_elses_is_not_followed(store: SnapshotStore, folder: Path) -> None:
    taken = take(store, about(), iter([file("workspace/a", b"a")]), [])
    head = folder / "heads" / taken.id
    head.rename(folder / "moved")
    head.symlink_to(folder / "moved")
    assert store.all() == ()


# --- at the same time, and cut ---

_KILLED = """
import os, sys
from pathlib import Path
from belljar.core.box_snapshot import MOST_LEFT_OUT, BoxSnapshot
from belljar.core.settings import LivingSettings
from belljar.host.archives import Member
from belljar.host.snapshot_store import SnapshotStore

def found():
    for number in range(50):
        content = b"%d" % number * 1000
        yield Member(f"workspace/{number}", "file", 0o644, 0.0, len(content)), iter((content,))
    print("half", flush=True)
    sys.stdin.read()

store = SnapshotStore(Path(sys.argv[1]), LivingSettings())
with store.taking() as taking:
    taking.unpack(found())
"""


def test_a_snapshot_whose_process_is_killed_is_never_seen_and_is_swept_away(store: SnapshotStore, folder: Path) -> None:
    kept = take(store, about(1), iter([file("workspace/0", b"0" * 1000)]), [])
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"half\n"
        assert len(contents(folder)) == 51
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    assert store.all() == (kept,)
    assert len(contents(folder)) == 2, "the first who looks sweeps"
    after = take(store, about(2), iter([file("workspace/x", b"x")]), [])
    assert {one.id for one in store.all()} == {kept.id, after.id}
    assert len(contents(folder)) == 4 and list((folder / "unfinished").iterdir()) == []
    assert held(store, kept.id) == {"workspace/0": ("file", b"0" * 1000)}


def test_what_somebody_takes_or_reads_is_not_swept_away_meanwhile(
    store: SnapshotStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    old = take(store, about(1), iter([file("workspace/a", b"shared")]), [])
    half, go_on, done = threading.Event(), threading.Event(), []

    def slow() -> Iterator[Entry]:
        yield file("workspace/a", b"shared")
        half.set()
        assert go_on.wait(10)
        yield file("workspace/b", b"b")

    thread = threading.Thread(
        target=lambda: done.append(take(SnapshotStore(folder, LivingSettings()), about(2), slow(), []))
    )
    thread.start()
    try:
        assert half.wait(10)
        with store.opened(old.id) as (_, below):
            monkeypatch.setattr("belljar.host.snapshot_store._SWEEP_SECONDS", 0.0)
            store.remove(old.id)
            assert [b"".join(one.checked()) for one in below("/workspace")] == [b"shared"]
    finally:
        go_on.set()
        thread.join(10)
    assert held(store, done[0].id) == {"workspace/a": ("file", b"shared"), "workspace/b": ("file", b"b")}
    assert store.all() == (done[0],)


def test_several_processes_take_snapshots_at_once(store: SnapshotStore, folder: Path) -> None:
    results: list[BoxSnapshot] = []

    def one(number: int) -> None:
        mine = SnapshotStore(folder, LivingSettings())
        found = [file(f"workspace/{n}", b"%d" % (n % 20)) for n in range(100)]
        results.append(take(mine, about(number), iter(found), []))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == len(store.all()) == 6 and len(contents(folder)) == 21
    assert os.listdir(folder / "unfinished") == []


def test_not_all_that_a_guest_has_us_leave_out_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("belljar.host.box_members._MAX_DEPTH", 1)
    for number in range(MOST_LEFT_OUT + 50):
        (tmp_path / "workspace" / str(number)).mkdir(parents=True)
    left_out: list[str] = []
    with files.opened(str(tmp_path)) as root:
        assert len(list(found_members(root, ["/workspace"], left_out))) == MOST_LEFT_OUT + 51
    assert len(left_out) == MOST_LEFT_OUT + 1 and left_out[-1] == "and more"
