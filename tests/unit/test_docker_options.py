"""What the administrator's settings make of a container, and how the probe reads what its guest prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from belljar.backends.containers import evidence, spec
from belljar.backends.containers.evidence import confinement
from belljar.backends.containers.facts import EngineFacts, has_own_kernel, read_facts, security
from belljar.backends.containers.images_for import ImagesFor
from belljar.backends.containers.spec import ContainerSpec, Options
from belljar.core import errors
from belljar.core.capabilities import Isolation
from belljar.core.languages import BUILTIN
from belljar.core.request import Limits
from belljar.core.settings import ContainerSettings, ImageSettings, Settings
from belljar.engine.engine import Engine
from belljar.host.engine_address import DOCKER, PODMAN, EngineAddress

ELSEWHERE = EngineAddress(DOCKER, "tcp://192.0.2.1:2375")  # so that no namespace of this machine is compared
STATUS = """\
uid 1900000007
CapInh:\t0000000000000000
CapEff:\t{effective:016x}
CapBnd:\t{bounding:016x}
NoNewPrivs:\t1
Seccomp:\t2
"""


def facts(**changes: Any) -> EngineFacts:
    said: dict[str, Any] = {
        "KernelVersion": "6.1.0", "CgroupVersion": "2", "MemoryLimit": True, "PidsLimit": True, "CpuCfsQuota": True,
        "Runtimes": {"runc": {}}, "DefaultRuntime": "/usr/bin/runc",
    }  # fmt: skip
    return read_facts(ELSEWHERE, "docker 99", said | changes)


def said(*lines: str, kernel: str = "6.1.0", effective: int = 0, bounding: int = 0, root: str = "ro,relatime") -> str:
    status = STATUS.format(effective=effective, bounding=bounding)
    return "\n".join([f"{kernel} #1 SMP", status, f"root {root}", *lines])


def walls(options: Options, limits: Limits | None = None, flavour: Any = DOCKER) -> dict[str, Any]:
    guest = ContainerSpec(flavour, "app:1", ("true",), 1000, limits or Limits(), "me", "bj-1", options=options)
    return {**spec.container(guest), **spec.container(guest)["HostConfig"]}


# --- what the engine is asked for ---


def test_without_options_a_container_has_no_network_no_capability_and_a_read_only_root() -> None:
    body = walls(Options())
    assert (body["NetworkMode"], body["NetworkDisabled"], body["ReadonlyRootfs"]) == ("none", True, True)
    assert body["CapDrop"] == ["ALL"]
    assert not {"CapAdd", "CpuShares", "BlkioWeight", "Dns", "BlkioDeviceReadBps"} & body.keys()


def test_each_option_reaches_the_engine_and_no_wall_falls_with_it() -> None:
    options = Options(
        cpu_shares=512, io_weight=300, network="inner", dns=("192.0.2.53",), writable_root=True,
        capabilities=("CHOWN",), security=("apparmor=mine", "label=type:mine_t"),
    )  # fmt: skip
    body = walls(options)
    assert (body["CpuShares"], body["BlkioWeight"], body["CapAdd"]) == (512, 300, ["CHOWN"])
    assert (body["NetworkMode"], body["NetworkDisabled"], body["Dns"]) == ("inner", False, ["192.0.2.53"])
    assert body["ReadonlyRootfs"] is False
    assert body["SecurityOpt"][-2:] == ["apparmor=mine", "label=type:mine_t"]
    assert "no-new-privileges" in body["SecurityOpt"]
    assert body["Privileged"] is False
    assert body["CapDrop"] == ["ALL"]


def test_name_servers_without_a_network_are_not_asked_for() -> None:
    assert "Dns" not in walls(Options(dns=("192.0.2.53",)))


def test_limits_of_block_io_go_both_ways_to_the_disk_that_is_known() -> None:
    limits = Limits(io_bps=2**20, io_iops=50)
    body = walls(Options(disk="/dev/vda"), limits)
    for way in ("Read", "Write"):
        assert body[f"BlkioDevice{way}Bps"] == [{"Path": "/dev/vda", "Rate": 2**20}]
        assert body[f"BlkioDevice{way}IOps"] == [{"Path": "/dev/vda", "Rate": 50}]
    assert "BlkioDeviceReadBps" not in walls(Options(disk=""), limits)
    assert "BlkioDeviceReadIOps" not in walls(Options(disk="/dev/vda"), Limits(io_bps=2**20))


def test_a_profile_of_the_administrator_s_replaces_ours_and_one_that_vanished_stops_the_run(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"defaultAction": "SCMP_ACT_ERRNO", "comment": "theirs"}))
    assert walls(Options(profile=str(path)))["SecurityOpt"][1] == f"seccomp={path.read_text()}"
    assert walls(Options(profile=str(path)), flavour=PODMAN)["SecurityOpt"][1] == f"seccomp={path}"
    path.unlink()
    for flavour in (DOCKER, PODMAN):
        with pytest.raises(errors.NotAvailable, match=r"profile\.json.*No such file"):
            walls(Options(profile=str(path)), flavour=flavour)


# --- what the probe's guest prints ---


@pytest.mark.parametrize(
    ("line", "wall"),
    [
        ("attr docker-default (enforce)", "AppArmor profile docker-default"),
        ("attr cri-containerd.apparmor.d (enforce)", "AppArmor profile cri-containerd.apparmor.d"),
        ("attr docker-default (complain)", ""),
        ("attr unconfined", ""),
        ("attr system_u:system_r:container_t:s0:c12,c34", "SELinux type container_t"),
        ("attr system_u:system_r:container_t:s0:c12,c34\0", "SELinux type container_t"),
        ("attr unconfined_u:unconfined_r:unconfined_t:s0-s0:c0.c1023", ""),
        ("attr system_u:system_r:spc_t:s0", ""),
        ("attr", ""),
        ("attr ", ""),
        ("the attr docker-default (enforce)", ""),
    ],
)
def test_the_host_s_own_wall_is_read_from_what_the_kernel_says_of_the_guest(line: str, wall: str) -> None:
    assert confinement(f"before\n{line}\nafter") == wall


def test_a_wall_of_the_host_s_own_is_claimed_when_seen_and_told_when_the_engine_only_speaks_of_it() -> None:
    apparmor = facts(SecurityOptions=["name=apparmor", "name=seccomp,profile=default"])
    seen = evidence.read(said("attr docker-default (enforce)"), apparmor, ContainerSettings())
    assert seen.walls[-1] == "AppArmor profile docker-default"
    unseen = evidence.read(said("attr"), apparmor, ContainerSettings())
    assert unseen.unseen == ("AppArmor or SELinux, of which the engine speaks",)
    assert evidence.read(said("attr"), facts(), ContainerSettings()).unseen == ()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (ContainerSettings(apparmor_profile="mine"), "attr docker-default (enforce)"),
        (ContainerSettings(apparmor_profile="mine"), "attr mine (complain)"),
        (ContainerSettings(selinux_label="type:mine_t"), "attr system_u:system_r:container_t:s0:c1,c2"),
        (ContainerSettings(selinux_label="level:s0:c1,c2"), "attr"),
    ],
)
def test_a_named_profile_that_does_not_hold_is_an_error(options: ContainerSettings, line: str) -> None:
    with pytest.raises(errors.NotAvailable, match=r"could not prove: (AppArmor|SELinux)"):
        evidence.read(said(line), facts(SecurityOptions=["name=apparmor", "name=selinux"]), options)


def test_a_named_profile_is_passed_on_where_the_engine_has_such_walls_and_refused_where_not() -> None:
    options = ContainerSettings(apparmor_profile="mine", selinux_label="type:mine_t")
    both = facts(SecurityOptions=["name=apparmor", "name=selinux"])
    assert security(options, both) == ("apparmor=mine", "label=type:mine_t")
    with pytest.raises(errors.NotAvailable, match=r"container\.apparmor_profile is 'mine'.*no apparmor.*unset"):
        security(options, facts(SecurityOptions=["name=seccomp"]))
    with pytest.raises(errors.NotAvailable, match=r"container\.selinux_label"):
        security(ContainerSettings(selinux_label="type:x_t"), facts(SecurityOptions=["name=apparmor"]))
    assert security(ContainerSettings(), facts()) == ()


def test_walls_that_were_given_up_are_not_claimed_and_are_told() -> None:
    options = ContainerSettings(read_only_root=False, capabilities=("CHOWN", "NET_RAW"), io_weight=300)
    seen = evidence.read(said(bounding=1 << 13 | 1, root="rw,relatime"), facts(), options)
    held = evidence.promise(facts(), seen, options, BUILTIN.values())
    assert not {"read-only root", "no capabilities"} & set(held.walls)
    assert held.isolation is Isolation.NAMESPACE
    told = "; ".join(held.weaker)
    for words in ("disk is not limited", "the root is writable", "CHOWN, NET_RAW", "io_weight is left out"):
        assert words in told


@pytest.mark.parametrize("name", ["effective", "bounding"])
def test_a_capability_that_nobody_gave_back_is_an_error(name: str) -> None:
    for options in (ContainerSettings(), ContainerSettings(capabilities=("CHOWN",))):
        with pytest.raises(errors.NotAvailable, match="could not prove: no capabilities"):
            evidence.read(said(**{name: 1 << 21}), facts(), options)


def test_a_writable_root_that_nobody_asked_for_is_an_error() -> None:
    with pytest.raises(errors.NotAvailable, match="could not prove: read-only root"):
        evidence.read(said(root="rw,relatime"), facts(), ContainerSettings())


V1 = [f"io 254:0 {rate}" for rate in (2**40, 2**40, 2**30, 2**30)]
V2 = [f"io 254:0 rbps={2**40} wbps={2**40} riops={2**30} wiops={2**30}"]


@pytest.mark.parametrize(
    ("lines", "held"),
    [
        (V1, True),
        (V2, True),
        (V1[:3], False),
        ([], False),
        (["io"] * 4, False),
        (["io 254:0 rbps=max wbps=max"], False),
    ],
)
def test_block_io_is_offered_only_where_the_guest_s_own_group_shows_all_four_limits(
    lines: list[str], held: bool
) -> None:
    seen = evidence.read(said(*lines), facts(), ContainerSettings())
    limits = evidence.promise(facts(), seen, ContainerSettings(), ()).limits
    assert limits["io"] == ("cgroup v2" if held else "not limited")


@pytest.mark.parametrize(
    ("line", "held"),
    [
        ("weight 300", True), ("weight default 300", True), ("weight default 2930", True), ("weight 100", False),
        ("weight", False), ("io 300", False),
    ],
)  # fmt: skip
def test_a_weight_of_block_io_counts_where_the_guest_s_own_group_shows_it(line: str, held: bool) -> None:
    assert evidence.read(said(line), facts(), ContainerSettings(io_weight=300)).weighted is held


def test_an_engine_elsewhere_or_one_that_warns_has_no_disk_to_limit(tmp_path: Path) -> None:
    assert facts(DockerRootDir="/").disk == ""
    here, root = EngineAddress(DOCKER, "unix:///x.sock"), {"DockerRootDir": str(tmp_path)}
    for warning in ("WARNING: No blkio throttle.read_bps_device support", "WARNING: No io.max (rbps) support"):
        assert read_facts(here, "docker", root | {"Warnings": [warning]}).disk == ""
    assert read_facts(here, "docker", {"DockerRootDir": "/nowhere"}).disk == ""


# --- images and order ---


def images_for(**options: Any) -> ImagesFor:
    return ImagesFor(ContainerSettings(**options), ImageSettings(), pytest.fail)


def test_a_named_type_s_image_is_its_own_and_the_language_s_otherwise() -> None:
    images = images_for(images={"test-runner": "app:1", "go": "go:1"}, types={"lint": {"image": "lint:1"}})
    assert images.image_for("python", "test-runner") == "app:1"
    assert images.image_for(None, "lint") == "lint:1"
    assert images.image_for("go") == "go:1"
    assert images.image_for("javascript") == images.image_for("typescript") == "node:20-slim"
    assert images.image_for("rust") == "rust:1.90-slim-bookworm"
    assert images.image_for("python3.10") == images.image_for(None) == "python:3.12-slim"


def test_a_type_that_wants_the_project_s_image_and_got_none_says_what_to_set() -> None:
    with pytest.raises(
        errors.InvalidRequest, match=r"preview runs in the project's image.*image=.*container\.images\.preview"
    ):
        images_for().image_for(None, "preview")


@pytest.mark.parametrize(
    ("preferred", "order"),
    [
        ("", ("wasm", "native", "docker", "podman", "apple")),
        ("podman", ("wasm", "native", "podman", "docker", "apple")),
        ("apple", ("wasm", "native", "apple", "docker", "podman")),
    ],
)
def test_the_preferred_container_engine_comes_first_among_its_kind(preferred: str, order: tuple[str, ...]) -> None:
    assert Engine(Settings(container=ContainerSettings(engine=preferred))).known == order


# What Docker 20.10 tells of itself where gVisor is installed: three of these are runc.
@pytest.mark.parametrize(
    ("runtime", "own"),
    [
        ("runc", False), ("crun", False), ("io.containerd.runc.v2", False), ("io.containerd.runtime.v1.linux", False),
        ("runsc", True), ("kata-runtime", True), ("io.containerd.runsc.v1", True),
    ],
)  # fmt: skip
def test_only_a_runtime_with_a_kernel_of_its_own_is_taken_for_one(runtime: str, own: bool) -> None:
    assert has_own_kernel(runtime) is own
