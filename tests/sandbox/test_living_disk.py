"""Living sandboxes of native whose files lie on a disk of their own: no memory, nothing on the host, nothing left."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import belljar
from belljar.core import errors
from belljar.engine.engine import Engine
from belljar.host import disk_image
from belljar.settings import load
from witness import eventually

MIB = 1 << 20


def engine_with(backing: str, state_dir: Path, tmp_path: Path) -> Engine:
    living = {"disk_backing": backing}
    return Engine(load(state_dir=str(state_dir), data_dir=str(tmp_path / "data"), backend="native", living=living))


@pytest.fixture
def engine(state_dir: Path, tmp_path: Path) -> Iterator[Engine]:
    if why := disk_image.why_not(tmp_path, 256 * MIB):
        pytest.skip(f"no disk can be made for a sandbox: {why}")
    yield engine_with("file", state_dir, tmp_path)
    assert eventually(lambda: not disks(state_dir), 30), "the loop device was let go"


def disks(state_dir: Path) -> list[str]:
    """The files behind loop devices that lie in a state directory: they have no name there."""
    found = []
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            found.append(path.read_text().strip())
        except OSError:  # let go meanwhile
            continue
    return [one for one in found if str(state_dir) in one]


def test_files_take_disk_and_no_memory_and_are_copied_as_ever(engine: Engine, state_dir: Path) -> None:
    with belljar.Sandbox(living=True, engine=engine, memory="64M", disk="200M") as box:
        done = box.exec(
            ["sh", "-c", "head -c 120000000 /dev/urandom > big && sha256sum big; echo y > ~/y; echo z > /tmp/z"]
        )
        assert done.ok and len(disks(state_dir)) == 1
        assert str(state_dir) not in Path("/proc/mounts").read_text() and not list(state_dir.glob("*image*"))
        snapshot = box.snapshot()
        with box.fork() as fork:
            assert fork.exec(["sh", "-c", "sha256sum big"]).stdout == done.stdout
            assert fork.exec(["sh", "-c", "cat ~/y /tmp/z"]).stdout == "y\nz\n" and len(disks(state_dir)) == 2
        with belljar.Sandbox(engine=engine, snapshot=snapshot, memory="64M", disk="200M") as again:
            assert again.exec(["sha256sum", "big"]).stdout == done.stdout


def test_a_guest_has_the_folders_and_not_the_disk(engine: Engine) -> None:
    with belljar.Sandbox(living=True, engine=engine, disk="64M", home="/workspace/home") as box:
        mounts = box.exec(["cat", "/proc/self/mounts"]).stdout.splitlines()
        mine = [line.split() for line in mounts if " ext4 " in line and line.startswith("/dev/loop")]
        assert {"/workspace", "/tmp", "/var/tmp"} == {words[1] for words in mine}
        assert all({"nosuid", "nodev"} <= set(words[3].split(",")) for words in mine)
        look = box.exec(
            ["sh", "-c", "ls /dev | grep loop; ls -A /workspace /tmp /var/tmp; cd ~ && touch own; umount /tmp"]
        )
        assert "loop" not in look.stdout and "lost+found" not in look.stdout and not look.ok
        assert box.files.exists("/workspace/home/own")


def test_a_full_disk_is_said_to_be_full_and_not_to_be_memory(engine: Engine) -> None:
    with belljar.Sandbox(living=True, engine=engine, memory="256M", disk="16M") as box:
        full = box.run("open('/workspace/f', 'wb').write(bytes(40_000_000))")
        assert full.guarantees and full.guarantees.limits["disk"] == "size of its file system"
        assert full.status == "disk_limit" and full.error and "memory" not in full.error.suggestion
        assert box.exec(["sh", "-c", "rm f; echo x > y; cat y"]).stdout == "x\n"


_KILLED = """
import sys, belljar
from belljar.engine.engine import Engine
from belljar.settings import load
engine = Engine(load(state_dir=sys.argv[1], living={"disk_backing": "file"}))
box = belljar.Sandbox.open(living=True, engine=engine, backend="native", disk="64M")
box.start("while :; do echo x >> f; done")
print("open", flush=True)
sys.stdin.read()
"""


def test_nothing_is_left_when_its_belljar_is_killed(engine: Engine, state_dir: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(state_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"open\n"
        assert len(disks(state_dir)) == 1
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    assert eventually(lambda: not disks(state_dir), 30), "the kernel let the disk go"
    assert not [path for path in state_dir.rglob("*") if path.is_file() and path.stat().st_size > MIB]


def test_where_no_disk_can_be_made_it_is_refused_or_kept_in_memory(
    state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(disk_image, "why_not", lambda folder, size: "there are no loop devices here")
    with pytest.raises(errors.NotAvailable, match="no loop devices"):
        belljar.Sandbox.open(living=True, engine=engine_with("file", state_dir, tmp_path))
    with belljar.Sandbox(living=True, engine=engine_with("auto", state_dir, tmp_path), memory="64M") as box:
        assert "/dev/loop" not in box.exec(["cat", "/proc/self/mounts"]).stdout
        full = box.run("open('/workspace/f', 'wb').write(bytes(100_000_000))", language="python")
        assert full.error and "disk is memory here" in full.error.suggestion
