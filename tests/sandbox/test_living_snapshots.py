"""Snapshots and forks of living sandboxes on native: files as they were, no processes, nothing from elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import belljar
from belljar.core import errors
from belljar.engine.engine import Engine
from belljar.host.box_members import found_members
from belljar.settings import load


@pytest.fixture
def engine(state_dir: Path, tmp_path: Path) -> Engine:
    return Engine(load(state_dir=str(state_dir), data_dir=str(tmp_path / "data"), backend="native"))


@pytest.fixture
def box(engine: Engine) -> Iterator[belljar.Sandbox]:
    with belljar.Sandbox(living=True, engine=engine) as box:
        yield box


def sh(box: belljar.Sandbox, line: str) -> str:
    result = box.exec(["sh", "-c", line])
    assert result.ok, result.stderr
    return result.stdout


_FILES = """
mkdir -p a/b ~/.config; echo one > a/b/one; ln a/b/one a/twin; ln -s /etc/passwd a/link; ln -s nowhere a/none
echo '#!/bin/sh' > a/run; chmod 4755 a/run; echo secret > a/locked; chmod 000 a/locked
mkdir a/closed; echo x > a/closed/x; chmod 000 a/closed; mkfifo a/pipe; touch -d '2020-01-02 03:04:05 UTC' a/old
echo c > ~/.config/c; echo t > /tmp/t
printf 'odd' > "$(printf 'a/\\377 \\n')"; truncate -s 1M a/sparse; echo end >> a/sparse
"""
_LOOK = """
cat a/b/one; stat -c '%a %h %Y' a/old a/run a/locked a/closed; stat -c %h a/twin; readlink a/link a/none
chmod 700 a/closed a/locked; cat a/locked a/closed/x ~/.config/c /tmp/t; find a -print0 | tr -cd '\\0' | wc -c
cat a/*odd 2>/dev/null; tail -c 4 a/sparse; id -u; test -e a/pipe && echo pipe; test -O a/run && echo mine; true
"""


def expected(box: belljar.Sandbox) -> str:
    """What the original shows, without what no copy has: the pipe, and the right to be somebody else."""
    return sh(box, "rm a/pipe; " + _LOOK).replace("4755", "755")


def test_a_fork_has_the_files_of_that_moment_and_goes_its_own_way(box: belljar.Sandbox) -> None:
    sh(box, _FILES)
    server = box.start("sleep 100")
    with box.fork(labels={"copy": "1"}) as other:
        assert server.running and not box.paused
        assert [one.command for one in other.processes()] == []
        sh(other, "echo two > a/b/one; rm a/old; echo new > fresh")
        sh(box, "echo three > a/b/one")
        assert (sh(other, "cat a/twin fresh"), sh(box, "cat a/twin")) == ("two\nnew\n", "three\n")
        assert not box.files.exists("fresh") and other.labels == {"copy": "1"} and box.labels == {}
        with other.fork() as third:
            assert sh(third, "cat a/twin fresh; ls a/b") == "two\nnew\none\n"
    assert box.exec(["true"]).ok


def test_a_fork_and_a_snapshot_are_the_same_as_the_original(box: belljar.Sandbox, engine: Engine) -> None:
    sh(box, _FILES)
    snapshot = box.snapshot(labels={"task": "42"})
    fork = box.fork()
    wanted = expected(box)
    assert sh(fork, _LOOK) == wanted
    fork.close()
    with belljar.Sandbox.open(snapshot=snapshot, engine=engine) as again:
        assert sh(again, _LOOK) == wanted
    with belljar.Sandbox.open(snapshot=snapshot.id, engine=engine, user="root", home="/root") as as_root:
        assert sh(as_root, "cat ~/.config/c; id -u; stat -c %u a/run") == "c\n0\n0\n"
    assert snapshot.quiet == ("pause" in engine._capabilities["native"].living)  # type: ignore[operator]
    assert (snapshot.home, snapshot.files, snapshot.left_out) == ("/home/user", 10, ())
    assert belljar.list_snapshots({"task": "42"}, engine=engine) == (snapshot,)
    assert belljar.list_snapshots({"task": "43"}, engine=engine) == ()


def test_a_second_snapshot_takes_only_what_is_new(box: belljar.Sandbox, engine: Engine, tmp_path: Path) -> None:
    sh(box, "head -c 3000000 /dev/urandom > big; echo 1 > small")
    first = box.snapshot()
    sh(box, "echo 2 > small; cp big copy")
    second = box.snapshot()
    assert first.stored > 3_000_000 and second.stored < 100_000 and second.size > 6_000_000
    belljar.remove_snapshot(first.id, engine=engine)
    with belljar.Sandbox(snapshot=second, engine=engine) as again:
        assert sh(again, "cmp big copy && cat small") == "2\n"
    belljar.remove_snapshot(second.id, engine=engine)
    assert not [path for path in (tmp_path / "data/snapshots/contents").rglob("*") if path.is_file()]
    with pytest.raises(errors.NotFound, match="no snapshot"):
        belljar.Sandbox.open(snapshot=second, engine=engine)


def test_a_sandbox_that_writes_all_the_time_is_copied_at_one_moment(box: belljar.Sandbox, engine: Engine) -> None:
    if "pause" not in (engine._capabilities["native"].living or ()):
        pytest.skip("no control group that could stop a sandbox")
    box.start("i=0; while :; do i=$((i+1)); echo $i > first; echo $i > second; done")
    deadline = time.monotonic() + 20
    while not box.files.exists("second"):
        assert time.monotonic() < deadline
    for _ in range(3):
        with box.fork() as fork:
            first, second = (int(sh(fork, f"cat {name}") or -1) for name in ("first", "second"))
            assert first - second in (0, 1) or -1 in (first, second), "one of them was being written"
    assert box.snapshot().quiet and not box.paused


def test_a_paused_sandbox_is_copied_and_stays_paused(box: belljar.Sandbox, engine: Engine) -> None:
    if "pause" not in (engine._capabilities["native"].living or ()):
        pytest.skip("no control group that could stop a sandbox")
    sh(box, "echo 1 > x")
    box.pause()
    snapshot = box.snapshot()
    with box.fork() as fork:
        assert sh(fork, "cat x") == "1\n" and not fork.paused
    assert snapshot.quiet and box.paused
    with pytest.raises(errors.InvalidRequest, match="resume"):
        box.exec(["true"])
    box.resume()
    assert sh(box, "cat x") == "1\n"


def test_a_granted_folder_is_not_in_a_snapshot_which_says_so(engine: Engine, open_folder: Path) -> None:
    (open_folder / "host.txt").write_text("of the host")
    with belljar.Sandbox(living=True, engine=engine, workspace=open_folder, write=True) as box:
        box.files.write("~/mine", "1")
        snapshot = box.snapshot()
        with box.fork() as fork:
            assert sh(fork, "cat host.txt ~/mine") == "of the host1"
    assert "/workspace" not in snapshot.folders and snapshot.files == 1
    assert any("/workspace is a folder of the host" in line for line in snapshot.warnings)
    with belljar.Sandbox(snapshot=snapshot, engine=engine) as again:
        assert sh(again, "ls; cat ~/mine") == "1"
        own = again.snapshot()
    with pytest.raises(errors.InvalidRequest, match="where a folder of the host is granted"):
        belljar.Sandbox.open(snapshot=own, engine=engine, workspace=open_folder)


def test_what_takes_more_than_it_may_is_refused_with_its_name(box: belljar.Sandbox, engine: Engine) -> None:
    sh(box, "truncate -s 100G bomb")
    with pytest.raises(errors.PolicyDenied, match="more than 2G"):
        box.snapshot()
    with box.fork() as fork:
        assert sh(fork, "stat -c '%s %b' bomb") == f"{100 << 30} 0\n", "without what was never written"
    sh(box, "rm bomb; head -c 3000000 /dev/zero > a")
    snapshot = box.snapshot()
    with pytest.raises(errors.InvalidRequest, match="disk: the new sandbox has room for 1M"):
        belljar.Sandbox.open(snapshot=snapshot, engine=engine, disk="1M")
    assert box.exec(["true"]).ok


_SWAPS = """
mkdir -p d; echo own > d/f
while :; do
  rm -rf d; ln -s /etc d; rm d; mkdir d; ln -s /etc/shadow d/f; rm d/f; mkfifo d/f; rm d/f; echo own > d/f
done
"""


def test_names_that_are_swapped_while_they_are_read_lead_nowhere(
    box: belljar.Sandbox, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Without the pause, as on a system that has no control groups."""
    sh(box, "true")
    monkeypatch.setattr("belljar.backends.native.living.box.NativeLivingBox.pause", _never)
    box.start(_SWAPS)
    seen: set[str] = set()
    for _ in range(15):
        snapshot = box.snapshot()
        assert not snapshot.quiet and any("ran on" in line for line in snapshot.warnings)
        with belljar.living.snapshots.store_of(engine).opened(snapshot.id) as (_, below):
            for one in below("/workspace"):
                content = b"".join(one.checked())
                assert content in (b"", b"own\n"), "of the host"
                seen.add(one.member.kind)
                assert one.member.name in ("workspace", "workspace/d", "workspace/d/f")
        belljar.remove_snapshot(snapshot.id, engine=engine)
    assert "folder" in seen


async def _never(self: Any) -> None:
    raise TimeoutError("a process could not be stopped")


def test_a_fork_that_fails_leaves_the_original_as_it_was(
    box: belljar.Sandbox, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    server = box.start("sleep 100")

    def full(*args: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("belljar.host.box_tree.lay", full)
    with pytest.raises(errors.InvalidRequest, match="has room for"):
        box.fork()
    assert (
        server.running
        and box.exec(["true"]).ok
        and len(engine._capacity._taken if hasattr(engine._capacity, "_taken") else [1]) == 1
    )


def test_a_sandbox_that_is_closed_while_it_is_copied_ends_at_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    begun, go_on, calls = threading.Event(), threading.Event(), list[int]()

    def slow(*args: Any) -> Iterator[Any]:
        calls.append(1)
        for one in found_members(*args):
            if len(calls) == 2:  # the first time, it still runs
                begun.set()
                assert go_on.wait(20)
            yield one

    monkeypatch.setattr("belljar.host.box_tree.found_members", slow)
    outcome: list[object] = []

    def take(box: belljar.Sandbox) -> None:
        try:
            outcome.append(box.snapshot())
        except belljar.BelljarError as error:
            outcome.append(error)

    with belljar.Sandbox(living=True, engine=engine) as box:
        box.files.write("a", "1")
        server = box.start("sleep 100")
        thread = threading.Thread(target=take, args=(box,))
        thread.start()
        assert begun.wait(20)
        started = time.monotonic()
    assert time.monotonic() - started < 10 and not server.running, "although it was stopped for the copy"
    go_on.set()
    thread.join(20)
    assert len(outcome) == 1 and engine._capacity._free == engine.settings.max_containers


def test_what_cannot_be_copied_is_told(
    box: belljar.Sandbox, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    deep = "/".join(["d"] * 10)
    sh(box, f"mkdir -p {deep}; touch {deep}/last")
    monkeypatch.setattr("belljar.host.box_members._MAX_DEPTH", 5)
    snapshot = box.snapshot()
    with box.fork() as fork:
        left_out = fork.left_out
    assert snapshot.left_out == left_out == ("/workspace/d/d/d/d/d: lies 5 folders deep, what is in it was left out",)
    with belljar.Sandbox(snapshot=snapshot, engine=engine) as again:
        assert again.left_out == left_out


def test_a_sandbox_whose_files_take_its_memory_says_so_when_it_has_none_left(engine: Engine) -> None:
    with belljar.Sandbox(living=True, engine=engine, memory="64M", disk="64M") as box:
        sh(box, "head -c 50000000 /dev/zero > big")
        result = box.run("x = bytearray(60_000_000)")
        assert result.status == "oom_killed" and result.error
        assert result.error.suggestion.startswith(
            "disk is memory here, and files in /workspace, /tmp and the home take 4"
        )
