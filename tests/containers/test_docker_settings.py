"""What an administrator sets reaches the kernel, or is refused in words; what is not set leaves every wall standing."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from aiodocker.exceptions import DockerError

import belljar
from belljar.backends.containers.backend import Containers
from belljar.core import errors
from belljar.core.labels import LABEL, RUN_LABEL
from belljar.core.request import Egress
from belljar.engine.audit import Audit
from belljar.engine.engine import Engine
from belljar.host.docker_api import connected
from belljar.host.seccomp.guest_profile import PROFILE_PATH
from engines import IMAGE, PODMAN_AGAIN, engines

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.containers]
SHARED_KERNEL = ("docker", "podman")
UP = "import os, time\nos.write(1, b'up\\n')\ntime.sleep(1)"
ROOT = "print(next(line.split()[5] for line in open('/proc/self/mountinfo') if line.split()[4] == '/').split(',')[0])"
BOUNDING = "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('CapBnd')))"
INTERFACES = "print(*sorted(line.split(':')[0].strip() for line in open('/proc/net/dev') if ':' in line))"
LINK = "import os\nos.symlink('a', '/tmp/b')\nprint('linked')"
OPEN = Egress(mode="open")


@pytest.fixture(params=["docker", PODMAN_AGAIN])
def flavour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def engine_with(flavour: str, *, language_file: str = "", **container: Any) -> Engine:
    images = {"execution": IMAGE, "node-execution": IMAGE} | container.pop("images", {})
    return engines().engine(flavour, language_file=language_file, container={"images": images, **container})


def language_file(folder: Path, **table: Any) -> str:
    path = folder / "languages.json"
    path.write_text(json.dumps(table))
    return str(path)


async def run(engine: Engine, code: str, **options: Any) -> belljar.Result:
    return await belljar.arun(code, engine=engine, backend=engine.settings.backend, **options)


async def seen_by_the_engine(engine: Engine, **options: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """A running container as the engine shows it, and its limits on block I/O as the host's kernel shows them."""
    backend = engine.backend(engine.settings.backend)
    assert isinstance(backend, Containers)
    found: list[tuple[dict[str, Any], dict[str, str]]] = []

    async def look(_: str) -> None:
        async with connected(backend.known_address) as client:
            for each in await client.containers.list(filters={"label": [f"{LABEL}=1"]}):
                shown = await each.show()
                if pid := int(shown["State"]["Pid"]):  # else it is somebody else's, and has just ended
                    found.append((shown, throttles(pid)))

    result = await run(engine, UP, on_stdout=look, **options)
    assert (result.stdout, result.stderr) == ("up\n", "")
    return next(one for one in found if one[0]["Config"]["Labels"][RUN_LABEL] == result.container_id)


def throttles(pid: int) -> dict[str, str]:
    """The files of the process's control group that limit block I/O, by name."""
    rows = [row.split(":", 2) for row in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    old = [Path("/sys/fs/cgroup/blkio") / path.lstrip("/") for _, kinds, path in rows if "blkio" in kinds.split(",")]
    new = [Path("/sys/fs/cgroup") / path.lstrip("/") for number, _, path in rows if number == "0"]
    files = [*(old[0].glob("blkio.throttle.*_device") if old else ()), *(base / "io.max" for base in new)]
    return {file.name: file.read_text().strip() for file in files if file.exists()}


# --- shares, weights, block I/O ---


async def test_cpu_shares_reach_the_guest_s_control_group(flavour: str) -> None:
    engine = engine_with(flavour, cpu_shares=512)
    code = (
        "import os\nold, new = '/sys/fs/cgroup/cpu/cpu.shares', '/sys/fs/cgroup/cpu.weight'\n"
        "print(*('shares', open(old).read()) if os.path.exists(old) else ('weight', open(new).read()))"
    )
    kind, value = (await run(engine, code)).stdout.split()
    assert int(value) == 512 if kind == "shares" else int(value) not in (0, 100)
    shown, _ = await seen_by_the_engine(engine)
    assert shown["HostConfig"]["CpuShares"] == 512


async def test_limits_of_block_io_reach_the_kernel(flavour: str) -> None:
    engine = engine_with(flavour)
    offer = await engine.capabilities(engine.settings.backend)
    assert offer.guarantees
    if offer.guarantees.limits["io"] == "not limited":
        pytest.skip(f"NOTHING of block I/O was checked on {flavour}: this kernel, or the disk below it, takes no limit")
    shown, kernel = await seen_by_the_engine(engine, io_bps="1M", io_iops=77)
    assert [row["Rate"] for row in shown["HostConfig"]["BlkioDeviceReadBps"]] == [2**20]
    numbers = sorted(int(word) for text in kernel.values() for word in text.replace("=", " ").split() if word.isdigit())
    assert numbers == [77, 77, 2**20, 2**20]
    _, without = await seen_by_the_engine(engine)
    assert not any(word.isdigit() for text in without.values() for word in text.replace("=", " ").split())


async def test_gvisor_shows_no_limit_of_block_io_so_none_is_promised() -> None:
    engine = engine_with("gvisor", runtime="runsc")
    with pytest.raises(errors.PolicyDenied, match="cannot limit block I/O"):
        await run(engine, "print(1)", io_bps="1M")
    beside = engine_with("gvisor")
    with pytest.raises(errors.PolicyDenied, match="cannot limit block I/O"):
        await run(beside, "print(1)", io_bps="1M", runtime="runsc")


async def test_a_weight_of_block_io_holds_or_is_left_out_and_told(flavour: str) -> None:
    engine = engine_with(flavour, io_weight=300)
    result = await run(engine, "print(1)")
    assert (result.stdout, result.stderr) == ("1\n", "")
    assert result.guarantees
    shown, _ = await seen_by_the_engine(engine)
    told = any("io_weight is left out" in line for line in result.guarantees.weaker)
    assert told != (shown["HostConfig"].get("BlkioWeight") == 300)


# --- walls that an administrator may take down ---


async def test_a_writable_root_is_told_and_no_wall_is_claimed_for_it(flavour: str) -> None:
    usual = await run(engine_with(flavour), ROOT)
    assert usual.stdout == "ro\n"
    assert usual.guarantees and "read-only root" in usual.guarantees.walls
    result = await run(engine_with(flavour, read_only_root=False), ROOT)
    assert result.stdout == "rw\n"
    assert result.guarantees
    assert "read-only root" not in result.guarantees.walls
    assert result.guarantees.limits["disk"] == "not limited"
    assert any("the root is writable" in line for line in result.guarantees.weaker)


async def test_a_capability_that_is_given_back_is_the_only_one_and_is_told(flavour: str) -> None:
    assert int((await run(engine_with(flavour), BOUNDING)).stdout, 16) == 0
    result = await run(engine_with(flavour, capabilities=["CAP_CHOWN", "KILL"]), BOUNDING)
    assert int(result.stdout, 16) == 1 << 0 | 1 << 5
    assert result.guarantees
    assert "no capabilities" not in result.guarantees.walls
    assert any("CHOWN, KILL" in line for line in result.guarantees.weaker)


def profile_without_links(folder: Path) -> str:
    """Our own profile, but for links: to see which one holds."""
    profile = json.loads(PROFILE_PATH.read_text())
    for rule in profile["syscalls"]:
        rule["names"] = [name for name in rule["names"] if name not in ("symlink", "symlinkat")]
    rules = [rule for rule in profile["syscalls"] if rule["names"]]
    rules.append({"names": ["symlink", "symlinkat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 13})
    path = folder / "without-links.json"
    path.write_text(json.dumps(profile | {"syscalls": rules}))
    return str(path)


async def test_the_administrator_s_seccomp_profile_holds_instead_of_ours(flavour: str, tmp_path: Path) -> None:
    assert (await run(engine_with(flavour), LINK)).stdout == "linked\n"
    path = profile_without_links(tmp_path)
    result = await run(engine_with(flavour, seccomp_profile=path), LINK)
    assert "PermissionError: [Errno 13]" in result.stderr
    assert result.guarantees and any(path in line for line in result.guarantees.weaker)


async def test_a_language_s_seccomp_profile_holds_for_it_alone(flavour: str, tmp_path: Path) -> None:
    table = language_file(tmp_path, python={"seccomp_profile": profile_without_links(tmp_path)})
    engine = engine_with(flavour, language_file=table)
    assert "PermissionError: [Errno 13]" in (await run(engine, LINK)).stderr
    shell = "ln -s a /tmp/b && echo linked"
    assert (await run(engine, shell, language="bash")).stdout == "linked\n"
    async with belljar.AsyncSandbox(engine=engine, backend=engine.settings.backend) as box:
        assert "PermissionError: [Errno 13]" in (await box.run(LINK)).stderr
        assert (await box.run(shell, language="bash")).stdout == "linked\n"
    async with belljar.AsyncSession(engine=engine, backend=engine.settings.backend) as session:
        failed = await session.run(LINK)
        assert failed.error and "Errno 13" in failed.stderr + failed.error.message


async def test_a_language_with_a_profile_of_its_own_is_refused_where_it_would_not_hold(tmp_path: Path) -> None:
    table = language_file(tmp_path, python={"seccomp_profile": profile_without_links(tmp_path)})
    engine = engine_with("docker", language_file=table)
    if not (await engine.capabilities("native")).available:
        pytest.skip("NOTHING of native was checked: it does not work here; `belljar doctor` says why")
    with pytest.raises(errors.PolicyDenied, match=r"native.* cannot take the seccomp profile that python must have"):
        await belljar.arun(LINK, engine=engine, backend="native")
    async with belljar.AsyncSandbox(engine=engine, backend="native") as box:
        assert (await box.run("echo hi", language="bash")).stdout == "hi\n"
        with pytest.raises(errors.PolicyDenied, match=r"native cannot take the seccomp profile.*backend=docker"):
            await box.run(LINK)
    with pytest.raises(errors.PolicyDenied, match="native cannot take the seccomp profile"):
        async with belljar.AsyncSession(engine=engine, backend="native"):
            pass


async def test_a_wall_that_the_engine_does_not_have_makes_it_unavailable_in_words(flavour: str) -> None:
    usual = await engine_with(flavour).capabilities(flavour)
    assert usual.available and usual.guarantees
    if any(wall.startswith(("AppArmor", "SELinux")) for wall in usual.guarantees.walls):
        pytest.skip("NOTHING was checked of engines without AppArmor and SELinux: this machine has one of them")
    for name, value in (("apparmor_profile", "belljar"), ("selinux_label", "type:container_t")):
        offer = await engine_with(flavour, **{name: value}).capabilities(flavour)
        assert not offer.available
        assert f"container.{name} is '{value}'" in offer.why_not
        assert f"unset container.{name}" in offer.fix


# --- network ---


@asynccontextmanager
async def inner_network(flavour: str) -> AsyncIterator[str]:
    """A network of the test's own, in the engine that the tests started: it leads nowhere."""
    if flavour == "podman":
        pytest.skip("NOTHING of open networks was checked on podman: it would write rules into the host's firewall")
    backend = engine_with(flavour).backend(flavour)
    assert isinstance(backend, Containers)
    name = f"belljar-test-{secrets.token_hex(4)}"
    async with connected(backend.known_address) as client:
        try:
            await client.networks.create({"Name": name, "Driver": "bridge", "Internal": True, "CheckDuplicate": True})
        except Exception as error:
            pytest.skip(f"NOTHING of open networks was checked on {flavour}: it can make none here: {error}")
        try:
            yield name
        finally:
            with anyio.fail_after(30):  # what ran there is cleared away behind the answer's back
                while not await removed(client, name):
                    await anyio.sleep(0.05)


async def removed(client: Any, network: str) -> bool:
    if await client.containers.list(all=True, filters={"label": [f"{LABEL}=1"]}):
        return False
    try:
        return bool(await (await client.networks.get(network)).delete())
    except DockerError as error:
        assert "active" in str(error) or "in use" in str(error) or "associated" in str(error)
        return False


async def test_by_default_there_is_no_network_but_the_way_to_the_proxy_for_those_who_ask(flavour: str) -> None:
    engine = engine_with(flavour, dns=["192.0.2.53"])
    assert (await run(engine, INTERFACES)).stdout == "lo\n"
    if "open" not in (await engine.capabilities(flavour)).egress:  # no listed hosts either: there is no relay here
        with pytest.raises(errors.PolicyDenied, match="an open network cannot be reached"):
            await run(engine, INTERFACES, egress=OPEN)
        return
    result = await run(engine, INTERFACES, egress=OPEN)
    assert result.stdout == "lo\n", "what it reaches it reaches by the proxy"
    assert result.guarantees and result.guarantees.network == "open: any public host, through a filtering proxy"
    ask = "import urllib.request as u\ntry: u.urlopen('http://127.0.0.1/')\nexcept OSError as error: print(error)\n"
    private = ask.replace("127.0.0.1", "169.254.169.254")
    assert "not public but link-local" in (await run(engine, private, egress=OPEN)).stdout


async def test_an_open_network_is_for_those_who_ask_and_only_the_one_that_was_set(flavour: str) -> None:
    async with inner_network(flavour) as name:
        engine = engine_with(flavour, network_mode=name, dns=["192.0.2.53"])
        offer = await engine.capabilities(flavour)
        assert offer.egress >= {"none", "open"}, offer.notes
        assert (await run(engine, INTERFACES)).stdout == "lo\n"
        result = await run(engine, INTERFACES, egress=OPEN)
        assert result.stdout == "eth0 lo\n"
        assert result.guarantees and result.guarantees.network.startswith("open")
        shown, _ = await seen_by_the_engine(engine, egress=OPEN)
        assert shown["HostConfig"]["Dns"] == ["192.0.2.53"]
        assert list(shown["NetworkSettings"]["Networks"]) == [name]


SERVE = """
import os, socket
server = socket.create_server(("0.0.0.0", 4000))
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
probe.connect((open("/etc/hosts").read().split("belljar")[0].split()[-1], 9))
os.write(1, probe.getsockname()[0].encode() + b"\\n")
peer, _ = server.accept()
peer.sendall(b"hello from the neighbour")
"""


async def test_two_guests_on_the_open_network_meet_and_one_without_it_stays_alone(flavour: str) -> None:
    async with inner_network(flavour) as name:
        engine = engine_with(flavour, network_mode=name)
        address = anyio.Event()
        heard: list[str] = []

        def note(text: str) -> None:
            heard.append(text)
            if text.endswith("\n"):
                address.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: run(engine, SERVE, egress=OPEN, on_stdout=note))
            with anyio.fail_after(30):
                await address.wait()
            place = "".join(heard).strip()
            assert place.count(".") == 3, place
            ask = f"import socket\nprint(socket.create_connection(({place!r}, 4000), 5).recv(99).decode())"
            alone = await run(engine, ask)
            assert "Network is unreachable" in alone.stderr
            assert (await run(engine, ask, egress=OPEN)).stdout == "hello from the neighbour\n"


async def test_a_network_that_is_not_there_is_not_offered(flavour: str) -> None:
    engine = engine_with(flavour, network_mode="belljar-test-nowhere")
    offer = await engine.capabilities(flavour)
    assert offer.available
    assert "open" not in offer.egress
    assert any("container.network_mode" in note for note in offer.notes)


async def test_a_language_that_may_have_no_network_gets_none_in_a_box_that_has_one(tmp_path: Path) -> None:
    async with inner_network("docker") as name:
        table = language_file(tmp_path, bash={"allow_network": False}, python={"allow_network": True})
        engine = engine_with("docker", network_mode=name, language_file=table)
        with pytest.raises(errors.PolicyDenied, match="bash may have no network here"):
            await run(engine, "true", language="bash", egress=OPEN)
        async with belljar.AsyncSandbox(engine=engine, backend="docker", egress=OPEN) as box:
            assert (await box.run(INTERFACES)).stdout == "eth0 lo\n"
            with pytest.raises(errors.PolicyDenied, match="bash may have no network here"):
                await box.run("true", language="bash")


# --- types, images, languages ---


@asynccontextmanager
async def another_image(engine: Engine) -> AsyncIterator[str]:
    """The same image by another name, so that one can tell which was asked for."""
    backend = engine.backend(engine.settings.backend)
    assert isinstance(backend, Containers)
    name = f"localhost/belljar-test/other-{secrets.token_hex(4)}"
    async with connected(backend.known_address) as client:
        await client.images.tag(IMAGE, repo=name, tag="1")
        try:
            yield f"{name}:1"
        finally:
            await client.images.delete(f"{name}:1")


async def test_a_named_type_brings_its_image_and_its_limits(flavour: str) -> None:
    async with another_image(engine_with(flavour)) as image:
        engine = engine_with(flavour, images={"test-runner": image}, types={"small": {"image": image, "memory": "64M"}})
        shown, _ = await seen_by_the_engine(engine, type="test-runner")
        assert (shown["Config"]["Image"], shown["HostConfig"]["Memory"]) == (image, 2 * 2**30)
        shown, _ = await seen_by_the_engine(engine, type="small", image=IMAGE)
        assert (shown["Config"]["Image"].removeprefix("docker.io/"), shown["HostConfig"]["Memory"]) == (IMAGE, 2**26)
        shown, _ = await seen_by_the_engine(engine)
        assert shown["HostConfig"]["Memory"] == 2**29
        async with belljar.AsyncSandbox(engine=engine, backend=flavour, type="small") as box:
            assert (await box.exec(["true"])).status == "success"
            hungry = await box.run("print(len(bytearray(200 << 20)))")
            assert hungry.status == "oom_killed"
            assert (await box.run("print(len(bytearray(200 << 20)))", type="test-runner")).stdout == "209715200\n"


async def test_a_type_that_wants_the_project_s_image_says_what_to_set(flavour: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=r"preview runs in the project's image.*container\.images\.preview"):
        await run(engine_with(flavour), "print(1)", type="preview")


async def test_a_language_s_image_and_memory_are_those_of_the_administrators_file(flavour: str, tmp_path: Path) -> None:
    async with another_image(engine_with(flavour)) as image:
        table = language_file(tmp_path, python={"image": image, "memory": "200M"})
        shown, _ = await seen_by_the_engine(engine_with(flavour, language_file=table))
        assert (shown["Config"]["Image"], shown["HostConfig"]["Memory"]) == (image, 200 * 2**20)


async def test_the_preferred_engine_is_taken_first() -> None:
    for name in SHARED_KERNEL:
        engine = engine_with(name, engine=name)
        assert (await belljar.arun_in_container(["true"], engine=engine)).backend == name


async def test_the_image_that_a_run_had_is_in_the_audit_log_by_name_and_id(flavour: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    engine = engines().engine(flavour, audit_log=str(log), container={"images": {"execution": IMAGE}})
    assert (await run(engine, "print(1)")).ok
    backend = engine.backend(engine.settings.backend)
    assert isinstance(backend, Containers)
    async with connected(backend.known_address) as client:
        id = (await client.images.inspect(IMAGE))["Id"]
    [line] = [line for line in Audit(log).lines() if line["kind"] == "requested"]
    assert (line["image"], line["image_id"]) == (IMAGE, id)


_WATCH = """
import ctypes, fcntl, os, select
libc, lock = ctypes.CDLL(None), os.open("/usr/bin/env", os.O_RDONLY)
watch = libc.inotify_init1(0)
assert libc.inotify_add_watch(watch, b"/usr/share", 0x21) > 0
fcntl.flock(lock, fcntl.LOCK_EX)
os.write(1, b"up\\n")
select.select([watch], [], [])
os.write(1, b"heard\\n")
"""
_TOUCH = """
import fcntl, os
os.listdir("/usr/share")
fcntl.flock(os.open("/usr/bin/env", os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
print("free")
"""


@pytest.mark.exhaustive
async def test_a_guest_neither_hears_nor_locks_the_files_of_another_of_the_same_image(flavour: str) -> None:
    engine, stop, other = engine_with(flavour), belljar.Cancel(), list[belljar.Result]()

    async def touch(_: str) -> None:
        other.append(await run(engine, _TOUCH))
        stop.cancel()

    watcher = await run(engine, _WATCH, on_stdout=touch, cancel=stop)
    assert [result.stdout for result in other] == ["free\n"], other
    assert (watcher.status, watcher.stdout) == ("aborted", "up\n")


async def test_a_guest_stays_on_the_cpus_and_the_account_that_were_set(flavour: str) -> None:
    container = {"images": {"execution": IMAGE}, "cpu_affinity": "0", "kernel_memory": "64M"}
    engine = engines().engine(flavour, user_uid=4321, user_uids=1, user_gid=5678, container=container)
    code = "import os\nopen('f', 'w').close()\n"
    code += "print(os.sched_getaffinity(0), os.getuid(), os.getgid(), os.stat('f').st_gid)"
    one, other = [await run(engine, code) for _ in range(2)]
    assert (one.stdout, other.stdout) == ("{0} 4321 5678 5678\n", "{0} 4321 5678 5678\n")
    assert one.guarantees
    assert any("kernel_memory is left out" in line for line in one.guarantees.weaker)


async def test_cpus_that_the_machine_lacks_are_refused_in_the_engine_s_words(flavour: str) -> None:
    with pytest.raises(errors.NotAvailable, match=r"(?i)cpu"):
        await run(engine_with(flavour, cpu_affinity="4000"), "print(1)")


async def test_the_engine_gvisor_is_docker_with_its_runtime() -> None:
    engine = engines().engine("gvisor", container={"engine": "gvisor", "images": {"execution": IMAGE}})
    result = await run(engine, "print(1)")
    assert result.guarantees
    assert (result.backend, result.guarantees.isolation) == ("docker", "kernel")


async def test_an_engine_whose_runtime_is_not_registered_is_missed_by_name() -> None:
    engine = engines().engine("docker", container={"engine": "firecracker", "images": {"execution": IMAGE}})
    with pytest.raises(errors.NotAvailable, match=r"no runtime 'kata-fc'.*choose from: .*runc"):
        await run(engine, "print(1)")


async def test_a_version_of_python_runs_by_the_specification_s_language_file(tmp_path: Path, flavour: str) -> None:
    (tmp_path / "python3.json").write_text(PROFILE_PATH.read_text())
    fields = {"image": IMAGE, "seccomp_profile": "python3.json", "default_memory_mb": 96}
    asked = await run(engines().engine(flavour), "import sys; print(f'python3.{sys.version_info.minor}', end='')")
    engine = engine_with(flavour, language_file=language_file(tmp_path, **{asked.stdout: fields}))
    code = "import sys\nprint(sys.executable)\nx = bytearray(200 << 20)"
    result = await run(engine, code, language=asked.stdout)
    assert (result.status, result.stdout.strip().endswith(asked.stdout)) == ("oom_killed", True)
