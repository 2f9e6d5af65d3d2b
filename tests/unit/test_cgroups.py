"""Control groups: version 1 and 2 on trees made for the test, and the real ones where we may make groups."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from belljar.core.request import Limits
from belljar.core.values import MIB
from belljar.host import cgroups, kernel_log, ownership
from belljar.host.block_device import disk_of
from belljar.host.cgroup_limits import limit_rows
from belljar.host.cgroups import PREFIX, Cgroups, Group, GroupTotals, detect

LIMITS = Limits(memory=64 * MIB, pids=7, cpus=0.5)


# --- version 2 ---


@pytest.fixture
def v2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree as the kernel shows it: the root, a service, and our own group below it, which holds processes."""
    write = Path.write_text

    def as_the_kernel_does(path: Path, text: str) -> int:
        if path.name == "cgroup.subtree_control" and text.startswith("+"):
            gained = text[1:]
            if (path.parent / "cgroup.procs").read_text():
                if gained not in ("cpu", "pids"):
                    raise OSError(16, "Device or resource busy")
                write(path.parent / "cgroup.type", "domain threaded\n")
            text = f"{path.read_text()} {gained}"
            for child in path.parent.glob("*/cgroup.controllers"):
                write(child, f"{child.read_text()} {gained}")
        if path.name == "cgroup.procs" and path.parent.name == cgroups._LEAF:  # who enters here leaves there
            if "threaded" in (path.parents[1] / "cgroup.type").read_text():
                raise OSError(95, "Operation not supported")
            before = path.parents[1] / "cgroup.procs"
            write(before, "".join(f"{pid}\n" for pid in before.read_text().split() if pid != text))
            text = (path.read_text() if path.exists() else "") + f"{text}\n"
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", as_the_kernel_does)
    make_v2(tmp_path / "cg", "memory pids cpu io")
    make_v2(tmp_path / "cg" / "service", "memory pids cpu")
    make_v2(tmp_path / "cg" / "service" / "own", "")
    (tmp_path / "cg" / "service" / "own" / "cgroup.procs").write_text("123\n")
    (tmp_path / "membership").write_text("0::/service/own\n")
    return tmp_path / "cg"


def make_v2(folder: Path, handed_down: str) -> None:
    folder.mkdir(parents=True)
    (folder / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    (folder / "cgroup.subtree_control").write_text(handed_down)
    (folder / "cgroup.procs").write_text("")


def found(root: Path) -> Cgroups:
    result = detect(root, root.parent / "membership")
    assert isinstance(result, Cgroups), result
    return result


def test_version_2_walks_up_to_the_nearest_group_that_hands_controllers_down(v2: Path) -> None:
    groups = found(v2)
    assert groups.version == 2
    assert dict(groups.bases) == dict.fromkeys(("memory", "pids", "cpu", "io"), v2 / "service")
    assert groups.limits == {"memory", "pids", "cpus", "io"}
    assert not (v2 / "service" / "own" / "cgroup.type").exists()  # it was not made the root of a threaded tree


def test_version_2_uses_its_own_group_when_that_was_delegated(v2: Path) -> None:
    (v2 / "service" / "own" / "cgroup.subtree_control").write_text("cpu memory pids")
    assert set(found(v2).bases.values()) == {v2 / "service" / "own"}


def test_version_2_hands_the_controllers_down_itself_where_it_may(v2: Path) -> None:
    (v2 / "service" / "own" / "cgroup.procs").write_text("")
    groups = found(v2)
    assert set(groups.bases.values()) == {v2 / "service" / "own"}
    assert groups.limits == {"memory", "pids", "cpus", "io"}


def as_systemd_does(v2: Path) -> Path:
    """The root hands down memory and pids only, so that the service has no cpu and no io to give."""
    (v2 / "cgroup.subtree_control").write_text("memory pids")
    (v2 / "service" / "cgroup.subtree_control").write_text("memory pids")
    (v2 / "service" / "cgroup.controllers").write_text("memory pids\n")
    return v2 / "service"


def test_version_2_hands_cpu_and_io_down_from_the_top_where_it_may(v2: Path) -> None:
    service = as_systemd_does(v2)
    assert dict(found(v2).bases) == dict.fromkeys(("memory", "pids", "cpu", "io"), service)
    assert set((v2 / "cgroup.subtree_control").read_text().split()) == {"memory", "pids", "cpu", "io"}


def test_version_2_does_with_memory_and_pids_where_the_top_is_not_ours(v2: Path) -> None:
    service = as_systemd_does(v2)
    (v2 / "cgroup.procs").unlink()
    groups = found(v2)
    assert dict(groups.bases) == dict.fromkeys(("memory", "pids"), service)
    assert groups.limits == {"memory", "pids"}


def test_version_2_asks_again_for_a_controller_that_was_taken_back(v2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = cgroups._write

    def as_the_kernel_does(path: str, text: str) -> None:
        if path.endswith("/cpu.max") and "cpu" not in (v2 / "service" / "cgroup.subtree_control").read_text():
            raise PermissionError(13, "Permission denied")
        write(path, text)

    monkeypatch.setattr(cgroups, "_write", as_the_kernel_does)
    groups = found(v2)
    monkeypatch.setattr(Group, "destroy", lambda group: shutil.rmtree(group.paths[0]))
    as_systemd_does(v2)
    group = groups.create("me-1", LIMITS)
    assert (group.paths[0] / "cpu.max").read_text() == "50000 100000"


def alone(v2: Path) -> Path:
    """Our own group as a service with Delegate=yes or a container has it: ours, full, and nothing above is ours."""
    for folder in (v2, v2 / "service"):
        (folder / "cgroup.procs").unlink()
    own = v2 / "service" / "own"
    (own / "cgroup.type").write_text("domain\n")
    (own / "cgroup.procs").write_text("123\n124\n")
    return own


def test_version_2_makes_room_in_a_delegated_group_that_holds_its_processes(v2: Path) -> None:
    own = alone(v2)
    groups = found(v2)
    assert dict(groups.bases) == dict.fromkeys(("memory", "pids", "cpu", "io"), own)
    assert (own / "cgroup.procs").read_text() == ""
    assert (own / cgroups._LEAF / "cgroup.procs").read_text() == "123\n124\n"
    assert groups.orphans(lambda _: True) == []
    (v2.parent / "membership").write_text(f"0::/service/own/{cgroups._LEAF}\n")  # the next one to look
    assert set(found(v2).bases.values()) == {own}


@pytest.mark.parametrize("why", ["a process we do not see", "the root", "no memory controller"])
def test_version_2_moves_no_process_where_that_would_not_help(v2: Path, why: str) -> None:
    own = alone(v2)
    if why == "the root":
        (own / "cgroup.type").unlink()
    elif why == "no memory controller":
        (own / "cgroup.controllers").write_text("cpu pids\n")
    else:
        (own / "cgroup.procs").write_text("0\n123\n")
    before = (own / "cgroup.procs").read_text()
    assert isinstance(detect(v2, v2.parent / "membership"), str)
    assert (own / "cgroup.procs").read_text() == before


def test_version_2_without_delegation_says_how_to_get_it(v2: Path) -> None:
    for folder in (v2, v2 / "service", v2 / "service" / "own"):
        (folder / "cgroup.procs").unlink()
    said = detect(v2, v2.parent / "membership")
    assert isinstance(said, str) and "Delegate=yes" in said


def test_version_2_needs_both_memory_and_pids(v2: Path) -> None:
    for folder in (v2, v2 / "service", v2 / "service" / "own"):
        (folder / "cgroup.controllers").write_text("cpu memory")
    assert isinstance(detect(v2, v2.parent / "membership"), str)


def test_no_membership_is_a_sentence_and_no_exception(tmp_path: Path) -> None:
    said = detect(tmp_path, tmp_path / "none")
    assert isinstance(said, str) and said.startswith("no control groups")


def test_version_2_s_group_has_its_limits_and_one_file_to_join_by(v2: Path) -> None:
    (v2 / "service" / "own" / "cgroup.subtree_control").write_text("cpu io memory pids")
    limits = LIMITS.model_copy(update={"io_bps": 4096, "io_iops": 9})
    group = found(v2).create("me-1", limits, device="8:0")
    folder = v2 / "service" / "own" / f"{PREFIX}me-1"
    assert group.paths == (folder,)
    assert group.join_files == (folder / "cgroup.procs",)
    assert {file.name: file.read_text() for file in folder.iterdir()} == {
        "memory.max": str(64 * MIB),
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "pids.max": "7",
        "cpu.max": "50000 100000",
        "io.max": "8:0 rbps=4096 wbps=4096 riops=9 wiops=9",
        "cgroup.subtree_control": "+cpu",  # so that nobody can take the controller back meanwhile
    }


def test_version_2_s_group_of_a_kept_box_hands_all_down_and_limits_memory_for_all_inside(v2: Path) -> None:
    (v2 / "service" / "own" / "cgroup.subtree_control").write_text("cpu memory pids")
    group = found(v2).create("me-1", None)
    group.hold(64 * MIB)
    folder = v2 / "service" / "own" / f"{PREFIX}me-1"
    assert {file.name: file.read_text() for file in folder.iterdir()} == {
        "cgroup.subtree_control": "+memory +pids +cpu",
        "memory.max": str(96 * MIB),  # so much more that a full one can be cleared
        "memory.swap.max": "0",  # and no memory.oom.group, by which the holder would die with a command
    }
    inner = group.inside("me-2", LIMITS)
    assert inner.join_files == (folder / "me-2" / "cgroup.procs",)
    assert (folder / "me-2" / "memory.max").read_text() == str(64 * MIB)
    assert (folder / "me-2" / "memory.oom.group").read_text() == "1"
    group.hold(128 * MIB)
    assert (folder / "memory.max").read_text() == str(160 * MIB)


def test_version_2_s_usage_is_read_and_what_is_missing_is_none(tmp_path: Path) -> None:
    group = Group(2, dict.fromkeys(("memory", "pids", "cpu"), tmp_path))
    assert group.usage() == GroupTotals(None, None, 0, 0)
    (tmp_path / "memory.peak").write_text("4096\n")
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\noom 2\noom_kill 1\n")
    (tmp_path / "pids.events").write_text("max 3\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 1500\nuser_usec 1000\n")
    assert group.usage() == GroupTotals(4096, 1.5, 1, 3)
    assert Group(2, dict.fromkeys(("memory", "pids"), tmp_path)).usage().cpu_ms == 1.5  # counted without cpu, too


def test_version_2_kills_by_the_switch_where_there_is_one(tmp_path: Path) -> None:
    group = Group(2, {"memory": tmp_path})
    (tmp_path / "cgroup.kill").write_text("")
    group.kill()
    assert (tmp_path / "cgroup.kill").read_text() == "1"


# --- version 1 ---


@pytest.fixture
def v1(tmp_path: Path) -> Path:
    root = tmp_path / "cg"
    for controllers in ("memory", "pids", "cpu,cpuacct", "blkio"):
        (root / controllers / "own").mkdir(parents=True)
    for name in ("cpu", "cpuacct"):
        (root / name).symlink_to("cpu,cpuacct")
    lines = ["5:memory:/own", "4:pids:/own", "3:cpu,cpuacct:/own", "2:blkio:/own", "1:name=systemd:/x", "9:cpuset:/own"]
    (tmp_path / "membership").write_text("\n".join(lines) + "\n")
    return root


def test_version_1_has_a_base_for_each_controller(v1: Path) -> None:
    groups = found(v1)
    assert groups.version == 1
    assert dict(groups.bases) == {name: v1 / name / "own" for name in ("memory", "pids", "cpu", "cpuacct", "blkio")}
    assert groups.limits == {"memory", "pids", "cpus", "io"}


def test_version_1_without_memory_or_pids_is_refused_in_a_sentence(v1: Path) -> None:
    (v1 / "pids" / "own").rmdir()
    said = detect(v1, v1.parent / "membership")
    assert isinstance(said, str) and "no right to make control groups" in said


def test_version_1_s_limits_are_written_for_each_controller() -> None:
    limits = LIMITS.model_copy(update={"io_bps": 4096, "io_iops": 9})
    knobs = {name: value for _, name, value in limit_rows(1, limits, "8:0")}
    assert knobs == {
        "memory.limit_in_bytes": str(64 * MIB),
        "memory.memsw.limit_in_bytes": str(64 * MIB),
        "memory.kmem.tcp.limit_in_bytes": str(64 * MIB),
        "pids.max": "7",
        "cpu.cfs_period_us": "100000",
        "cpu.cfs_quota_us": "50000",
        "blkio.throttle.read_bps_device": "8:0 4096",
        "blkio.throttle.write_bps_device": "8:0 4096",
        "blkio.throttle.read_iops_device": "8:0 9",
        "blkio.throttle.write_iops_device": "8:0 9",
    }


@pytest.mark.parametrize("version", [1, 2])
def test_without_a_disk_no_rate_is_set_and_a_tiny_share_still_runs(version: int) -> None:
    limits = Limits(cpus=0.001, io_bps=4096)
    knobs = {name: value for _, name, value in limit_rows(version, limits, None)}
    assert not any("throttle" in name or name == "io.max" for name in knobs)
    assert knobs.get("cpu.cfs_quota_us", knobs.get("cpu.max", "").split(" ")[0]) == "1000"


def test_version_1_s_usage_is_read_from_each_controller(tmp_path: Path) -> None:
    dirs = {name: tmp_path / name for name in ("memory", "pids", "cpuacct")}
    for folder in dirs.values():
        folder.mkdir()
    (dirs["memory"] / "memory.max_usage_in_bytes").write_text("4096")
    (dirs["memory"] / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    (dirs["pids"] / "pids.events").write_text("max 5\n")
    (dirs["cpuacct"] / "cpuacct.usage").write_text("2000000")
    group = Group(1, dirs)
    assert group.usage() == GroupTotals(4096, 2.0, 2, 5)
    assert group.join_files == tuple(folder / "tasks" for folder in dirs.values())


# --- both ---


def test_only_the_groups_of_the_dead_are_orphans(v2: Path) -> None:
    groups = Cgroups(2, {"memory": v2})
    for name in ("12.ab-1", "12.ab-2", "13.cd-1"):
        (v2 / f"{PREFIX}{name}").mkdir()
    (v2 / "somebody-else-1").mkdir()
    orphans = groups.orphans(lambda owner: owner == "12.ab")
    assert [path.name for group in orphans for path in group.paths] == [f"{PREFIX}12.ab-1", f"{PREFIX}12.ab-2"]


def test_a_main_limit_that_cannot_be_set_is_an_error_and_leaves_no_group(
    v2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> None:
        def as_the_kernel_refuses(path: str, text: str) -> None:
            if path.endswith(f"/{name}"):
                raise OSError(22, "Invalid argument")

        monkeypatch.setattr("belljar.host.cgroups._write", as_the_kernel_refuses)

    groups = Cgroups(2, dict.fromkeys(("memory", "pids", "cpu"), v2))
    refuse("memory.max")
    with pytest.raises(OSError, match="Invalid argument"):
        groups.create("me-1", LIMITS)
    assert not list(v2.glob(PREFIX + "*"))
    refuse("memory.swap.max")  # not every kernel counts swap
    assert groups.create("me-2", LIMITS).remove()


def test_a_group_is_empty_when_that_is_known_and_only_then(tmp_path: Path) -> None:
    group = Group(1, {"memory": tmp_path / "group"})
    assert group.is_empty(), "it is gone"
    (tmp_path / "group").mkdir()
    listed = tmp_path / "group" / "cgroup.procs"
    listed.write_text("17\n")
    assert not group.is_empty()
    listed.write_text("")
    assert group.is_empty()
    listed.unlink()
    listed.mkdir()
    assert not group.is_empty(), "what cannot be read may hold anything"


def test_removing_twice_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    group = Group(2, {"memory": tmp_path / "x"})
    assert group.remove() and group.remove() and group.destroy()


def test_a_disk_is_told_by_its_numbers_and_what_has_no_disk_by_none() -> None:
    assert disk_of("/proc") is None
    disk = disk_of("/usr")
    assert disk is None or [part.isdigit() for part in disk.split(":")] == [True, True]


# --- the real ones ---


@pytest.fixture
def real() -> Iterator[Cgroups]:
    groups = detect()
    if isinstance(groups, str):
        pytest.skip(f"SKIPPED: {groups}")
    yield groups


def own_name(last: str) -> str:
    """A name as this process's sandboxes have it, so that no other Belljar takes the group for an orphan."""
    return f"{ownership._namespace()}.{os.getpid()}.{ownership._started(os.getpid())}-{last}"


def test_a_real_group_holds_a_process_counts_it_kills_it_and_goes(real: Cgroups) -> None:
    group = real.create(own_name("unit1"), LIMITS)
    child = None
    try:
        join = 'for door in "$@"; do echo 0 > "$door"; done; echo in; exec sleep 60'
        doors = [str(path) for path in group.join_files]
        child = subprocess.Popen(["/bin/sh", "-c", join, "sh", *doors], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"in\n"
        assert group.pids() == [child.pid]
        assert not group.remove()
        group.kill()
        assert child.wait(10) == -9
        assert (group.usage().memory_peak or 1) > 0
    finally:
        if child:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()
        assert group.destroy()
    assert not any(path.exists() for path in group.paths)


def test_a_real_group_refuses_forks_over_its_limit_and_counts_them(real: Cgroups) -> None:
    group = real.create(own_name("unit2"), LIMITS.model_copy(update={"pids": 3}))
    try:
        script = 'for door in "$@"; do echo 0 > "$door"; done; sleep 60 & sleep 60 & sleep 60 & sleep 60 & wait'
        subprocess.run(
            ["/bin/sh", "-c", script, "sh", *map(str, group.join_files)],
            stderr=subprocess.DEVNULL,
            timeout=20,
            check=False,
        )
        deadline = time.monotonic() + 5
        while not group.usage().forks_refused and time.monotonic() < deadline:
            time.sleep(0.01)
        assert group.usage().forks_refused >= 1
    finally:
        assert group.destroy()


# --- a group that somebody else made ---


@pytest.mark.parametrize("version", [1, 2])
def test_the_group_of_a_container_is_found_by_its_process_and_its_name(version: int, tmp_path: Path) -> None:
    root, proc = tmp_path / "cg", tmp_path / "proc"
    (proc / "7").mkdir(parents=True)
    where = [root / "docker/abc"] if version == 2 else [root / kind / "docker/abc" for kind in ("memory", "cpuacct")]
    for folder in where:
        folder.mkdir(parents=True)
    if version == 2:
        (root / "cgroup.controllers").write_text("memory\n")
    rows = "0::/docker/abc\n" if version == 2 else "9:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n"
    (proc / "7" / "cgroup").write_text(rows)
    (where[0] / ("memory.peak" if version == 2 else "memory.max_usage_in_bytes")).write_text("4096\n")
    found = cgroups.group_of(7, "abc", root, proc)
    assert found is not None
    assert (found.version, found.usage().memory_peak) == (version, 4096)
    assert cgroups.group_of(7, "another", root, proc) is None, "a process of another machine can have the same number"
    assert cgroups.group_of(8, "abc", root, proc) is None


def test_the_kernels_log_tells_of_a_group_that_is_gone() -> None:
    tree = detect()
    if isinstance(tree, str) or not os.access("/dev/kmsg", os.R_OK):
        pytest.skip("NOTHING was checked of the kernel's log: only root may read it, and make groups")
    name = f"0.0.0-{os.urandom(8).hex()}"
    group = tree.create(name, Limits(memory=16 * MIB))
    try:
        enter = "; ".join(f"echo 0 > {path}" for path in group.join_files)
        done = subprocess.run(["sh", "-c", f"{enter}; exec head -c 200M /dev/zero | tail"], check=False, timeout=30)
        assert done.returncode != 0
        assert group.usage().oom_kills > 0
    finally:
        group.destroy()
    assert kernel_log.killed_for_memory(name)
    assert not kernel_log.killed_for_memory(f"{name}x")
