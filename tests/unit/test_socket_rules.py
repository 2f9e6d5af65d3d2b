"""What the socket proxy lets through and what not, by the rules alone: bodies and request lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from belljar.backends.containers import spec
from belljar.core.request import Limits, Workspace
from belljar.core.settings import Caps
from belljar.core.values import MIB
from belljar.host.engine_address import PODMAN
from belljar.host.seccomp.guest_profile import PROFILE_PATH
from belljar.socket_proxy import bodies, calls
from belljar.socket_proxy.rules import MAX_PIDS, CallRefused, ProxyRules
from container_bodies import body, told

OURS = "a" * 64

# --- bodies ---


def changed(path: str, value: Any) -> bytes:
    """The same with one field more, or another."""
    whole = body()
    *folders, name = path.split(".")
    place = whole
    for folder in folders:
        place = place[folder]
    place[name] = value
    return json.dumps(whole).encode()


@pytest.mark.parametrize(
    "guest",
    [
        {},
        {"flavour": PODMAN},
        {"own_kernel": True, "runtime": "runsc"},
        {"small_buffers": True, "declared": ("/data",), "env": {"A": "b"}},
        {"volumes": {"bj-1-tmp": "/tmp", "bj-1-workspace": "/workspace"}, "locked": ("/workspace",)},
        {"beside": OURS},
        {"limits": Limits(io_bps=MIB, io_iops=100), "options": spec.Options(disk="/dev/sda", io_weight=100)},
        {"options": spec.Options(cpu_shares=512, capabilities=("CHOWN",))},
        {"limits": Limits(pids=Caps().pids), "own_kernel": True},
        {"limits": Limits(pids=Caps().pids, disk=Caps().disk), "flavour": PODMAN},
        {"limits": Limits(io_bps=MIB), "options": spec.Options(disk="/dev/mapper/vg0-data")},
        {"limits": Limits(io_bps=MIB), "options": spec.Options(disk="/dev/nvme0n1p2")},
        {"options": spec.Options(security=("apparmor=belljar", "label=type:container_t"))},
        {"options": spec.Options(network="belljar-sandbox", dns=("192.0.2.53",))},
    ],
)  # fmt: skip
def test_whatever_belljar_itself_asks_for_is_let_through(guest: dict[str, Any]) -> None:
    asked = body(**guest)
    rules = ProxyRules(networks=("belljar-sandbox",))
    assert bodies.check_body("create", json.dumps(asked, sort_keys=True).encode(), rules) == asked


def test_the_volumes_that_belljar_makes_are_let_through_and_those_of_the_host_are_not() -> None:
    asked = spec.volume("bj-1-tmp", Limits(disk=64 * MIB), "o", "r")
    assert bodies.check_body("volume_create", json.dumps(asked).encode(), ProxyRules()) == asked
    for options in (
        {"type": "none", "device": "/", "o": "bind"},
        {"type": "tmpfs", "device": "tmpfs", "o": "bind,nosuid"},
        {"type": "tmpfs", "device": "tmpfs", "o": "nosuid,nodev,suid"},
        {"type": "tmpfs", "device": "tmpfs", "o": "nosuid,nodev"},
        {"type": "tmpfs", "device": "tmpfs", "o": "nosuid,nodev,nr_blocks=0"},
        {"type": "tmpfs", "device": "tmpfs", "o": "nosuid,nr_blocks=1"},
        {"type": "nfs", "device": ":/", "o": "addr=192.0.2.1,nosuid"},
    ):
        with pytest.raises(CallRefused):
            bodies.check_body("volume_create", json.dumps(asked | {"DriverOpts": options}).encode(), ProxyRules())
    for change in ({"Driver": "vieux/sshfs"}, {"Labels": {}}, {"ClusterVolumeSpec": {}}, {"Name": "../x"}):
        with pytest.raises(CallRefused):
            bodies.check_body("volume_create", json.dumps(asked | change).encode(), ProxyRules())


def test_what_only_some_administrators_want_has_to_be_said_to_the_proxy() -> None:
    asked = json.dumps(body(options=spec.Options(writable_root=True), limits=Limits(pids=Caps().pids * 4))).encode()
    for rules in (ProxyRules(), ProxyRules(writable_root=True), ProxyRules(max_pids=Caps().pids * 4)):
        with pytest.raises(CallRefused, match=r"--writable-root|--max-pids"):
            bodies.check_body("create", asked, rules)
    assert bodies.check_body("create", asked, ProxyRules(writable_root=True, max_pids=Caps().pids * 4))
    assert Caps().pids == MAX_PIDS


HOSTILE: list[tuple[str, Any]] = [
    *(("HostConfig.Tmpfs", {"/tmp": options}) for options in (
        "", "rw", "rw,suid,dev,exec,size=1k", "rw,nosuid,nodev", "rw,nosuid,nodev,size=0",
        "rw,nosuid,nodev,nr_blocks=0", "rw,nosuid,nodev,size=1k,size=0", "rw,nosuid,nodev,size=1k,nr_inodes=0",
        "rw,nosuid,size=1k", "rw,nodev,size=1k", "ro,rw,size=1k", "rw,nosuid,nodev,size=1k,mpol=bind:0",
        "rw,nosuid,nodev,size=1k,huge=always",
        "rw,nosuid,nodev,size=50%", "rw,nosuid,nodev,size=1k,shared", "rw,nosuid,nodev,size=1k,mode=4777",
    )),
    *(("HostConfig.Tmpfs", {path: "rw,nosuid,nodev,size=1k"})
      for path in ("/", "tmp", "/tmp/../etc", "//tmp", "/tmp/")),
    ("HostConfig.ReadonlyRootfs", False), ("HostConfig.ReadonlyRootfs", 0), ("HostConfig.ReadonlyRootfs", None),
    ("HostConfig.PidsLimit", 10**9), ("HostConfig.PidsLimit", 0), ("HostConfig.PidsLimit", 2.0**60),
    *(("HostConfig.Ulimits", rows) for rows in (
        [], None, [{"Name": "nofile", "Soft": 1024, "Hard": 1024}], [{"Name": "core", "Soft": -1, "Hard": -1}],
        [{"Name": "core", "Soft": 0, "Hard": 2**40}], [{"Name": "core", "Soft": 2**40, "Hard": 2**40}],
        [{"Name": "core", "Soft": 0, "Hard": 0}, {"Name": "core", "Soft": -1, "Hard": -1}],
        [{"Name": "core", "Soft": 0, "Hard": 0}, {"Name": "memlock", "Soft": -1, "Hard": -1}],
        [{"Name": "core", "Soft": 0, "Hard": 0}, {"Name": "nofile", "Soft": 10**6, "Hard": 10**6}],
        [{"Name": "core", "Soft": 0, "Hard": 0}, {"Name": "nproc", "Soft": -1, "Hard": -1}],
    )),
    *((f"HostConfig.BlkioDevice{way}", [{"Path": path, "Rate": 1}])
      for way in ("ReadBps", "WriteIOps")
      for path in ("/etc/shadow", "/dev/../etc/shadow", "/dev/fd/3", "/dev/shm/x", "sda", "/dev/a/b/c", "", 7)),
    *((f"HostConfig.{name}", True) for name in ("Privileged", "privileged", "PRIVILEGED", "PublishAllPorts")),
    ("HostConfig.Privileged", 1), ("HostConfig.Privileged", "true"), ("HostConfig.Privileged", None),
    *((f"HostConfig.{name}", "host") for name in ("NetworkMode", "PidMode", "IpcMode", "UTSMode", "UsernsMode")),
    *((f"HostConfig.{name}", "host") for name in ("CgroupnsMode", "pidmode", "networkmode")),
    ("HostConfig.NetworkMode", "bridge"), ("HostConfig.NetworkMode", "container:../x"),
    ("HostConfig.IpcMode", f"container:{OURS}"), ("HostConfig.PidMode", f"container:{OURS}"),
    ("HostConfig.Binds", ["/:/host:rw"]), ("HostConfig.Binds", ["/var/run/docker.sock:/s:rw"]),
    ("HostConfig.Binds", ["./x:/host:rw"]), ("HostConfig.Binds", ["x:/host:rw,rshared"]),
    ("HostConfig.Binds", "x:/host:rw"), ("HostConfig.binds", ["/:/host:rw"]),
    ("HostConfig.CapAdd", ["SYS_ADMIN"]), ("HostConfig.CapAdd", ["ALL"]), ("HostConfig.CapAdd", ["sys_ptrace"]),
    ("HostConfig.CapDrop", []), ("HostConfig.CapDrop", ["CHOWN"]), ("HostConfig.Devices", [{"PathOnHost": "/dev/sda"}]),
    ("HostConfig.DeviceRequests", []), ("HostConfig.DeviceCgroupRules", ["a *:* rwm"]),
    ("HostConfig.VolumesFrom", ["x"]), ("HostConfig.CgroupParent", "/"), ("HostConfig.GroupAdd", ["0"]),
    ("HostConfig.MaskedPaths", []), ("HostConfig.ReadonlyPaths", []), ("HostConfig.OomScoreAdj", -1000),
    ("HostConfig.SecurityOpt", []), ("HostConfig.SecurityOpt", ["no-new-privileges", "seccomp=unconfined"]),
    ("HostConfig.SecurityOpt", ["no-new-privileges"]), ("HostConfig.SecurityOpt", ["no-new-privileges:false"]),
    ("HostConfig.SecurityOpt", ["no-new-privileges", 'seccomp={"defaultAction":"SCMP_ACT_ALLOW"}']),
    ("HostConfig.SecurityOpt", ["no-new-privileges", "seccomp=/etc/passwd"]),
    ("HostConfig.SecurityOpt", ["no-new-privileges", f"seccomp={PROFILE_PATH}", "apparmor=unconfined"]),
    ("HostConfig.SecurityOpt", ["no-new-privileges", f"seccomp={PROFILE_PATH}", "label=disable"]),
    ("HostConfig.SecurityOpt", ["no-new-privileges", f"seccomp={PROFILE_PATH}", "systempaths=unconfined"]),
    ("HostConfig.SecurityOpt", ["no-new-privileges", f"seccomp={PROFILE_PATH}", "seccomp:unconfined"]),
    ("HostConfig.Sysctls", {"kernel.core_pattern": "|/x"}), ("HostConfig.Runtime", "/tmp/evil"),
    ("HostConfig.Memory", 0), ("HostConfig.PidsLimit", -1), ("HostConfig.LogConfig", {"Type": "syslog", "Config": {}}),
    ("HostConfig.RestartPolicy", {"Name": "always"}), ("HostConfig.AutoRemove", False), ("HostConfig.Links", ["x"]),
    ("HostConfig.ſecurityOpt", []), ("HostConfig.PortBindings", {"80/tcp": [{"HostPort": "80"}]}),
    ("HostConfig.Mounts", [{"Type": "volume", "Source": "x", "Target": "/x"}]),
    ("User", "0:0"), ("User", "root"), ("User", ""), ("User", "1000"), ("User", "1000:0"), ("User", "00:1"),
    ("User", "1\u0660:1"),
    ("Labels", {}), ("Labels", {"belljar": "0"}), ("labels", {"belljar": "1"}), ("Volumes", {"/x": {}}),
    ("Entrypoint", ["/bin/sh"]), ("Healthcheck", {"Test": ["CMD", "x"]}), ("NetworkingConfig", {}), ("hostconfig", {}),
    ("ExposedPorts", {}), ("OnBuild", []), ("Tty", True),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), HOSTILE, ids=[f"{path}={value}"[:60] for path, value in HOSTILE])
def test_a_container_with_anything_else_is_refused(path: str, value: Any) -> None:
    with pytest.raises(CallRefused):
        bodies.check_body("create", changed(path, value), ProxyRules())


@pytest.mark.parametrize("name", bodies._NEEDED_WALLS)
def test_a_wall_that_is_left_out_is_refused(name: str) -> None:
    asked = body()
    del asked["HostConfig"][name]
    with pytest.raises(CallRefused, match="missing"):
        bodies.check_body("create", json.dumps(asked).encode(), ProxyRules())


@pytest.mark.parametrize(
    "text",
    [
        b'"Privileged":false,"Privileged":true', b'"Privileged":false,"privileged":true',
        b'"Privileged":false,"\\u0050rivileged":true', b'"Memory":NaN', b'"Memory":1e400',
    ],
)  # fmt: skip
def test_a_field_that_comes_twice_or_is_no_number_is_refused(text: bytes) -> None:
    asked = json.dumps(body()).encode()
    name = text[1:].partition(b'"')[0]
    plain = {b"Privileged": b'"Privileged": false', b"Memory": b'"Memory": %d' % body()["HostConfig"]["Memory"]}[name]
    assert plain in asked
    with pytest.raises(CallRefused):
        bodies.check_body("create", asked.replace(plain, text), ProxyRules())


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"{} {}", b"\xff{}", b"[" * 100_000, b'{"a":1}{"a":2}'])
def test_what_is_not_one_plain_object_is_refused(text: bytes) -> None:
    with pytest.raises(CallRefused):
        bodies.check_body("create", text, ProxyRules())


def test_a_folder_is_shown_only_below_a_root_and_never_by_a_link_or_with_the_engine_in_it(tmp_path: Path) -> None:
    root, sock = tmp_path / "root", tmp_path / "root" / "run" / "docker.sock"
    (root / "project").mkdir(parents=True)
    sock.parent.mkdir()
    sock.touch()
    (root / "link").symlink_to("/etc")
    (root / "alias").symlink_to(sock)
    rules = ProxyRules(engine=str(sock), roots=(str(root),))

    def ask(path: str) -> None:
        asked = body(workspace=Workspace(path=path))
        bodies.check_body("create", json.dumps(asked).encode(), rules)

    ask(str(root / "project"))
    for path in (root / "link", root / "alias", sock, sock.parent, root, tmp_path, "/", "/etc", root / "absent"):
        with pytest.raises(CallRefused):
            ask(str(path))
    for text in (f"{root}/project/../../x", f"{root}//project", "project"):
        asked = body(workspace=Workspace(path=str(root / "project")))
        asked["HostConfig"]["Mounts"][0]["Source"] = text
        with pytest.raises(CallRefused):
            bodies.check_body("create", json.dumps(asked).encode(), rules)
    with pytest.raises(CallRefused):
        asked = body(workspace=Workspace(path=str(root / "project")))
        asked["HostConfig"]["Mounts"][0]["BindOptions"]["Propagation"] = "rshared"
        bodies.check_body("create", json.dumps(asked).encode(), rules)


def test_a_program_in_a_container_is_never_root_and_never_privileged() -> None:
    asked = {"Cmd": ["sh"], "User": "60998:60998", "Privileged": False, "Container": "x", "Env": None, "detachKeys": ""}
    found = bodies.check_body("exec", json.dumps(asked).encode(), ProxyRules())
    assert found is not None
    assert "Container" not in found
    for change in ({"Privileged": True}, {"privileged": True}, {"User": ""}, {"User": "0:0"}, {"Tty": 1}):
        with pytest.raises(CallRefused):
            bodies.check_body("exec", json.dumps(asked | change).encode(), ProxyRules())


# --- containers that are there already ---


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("Config.Labels", None), ("Config.Labels", {"belljar": "1"}), ("Config.Labels", {"belljar.owner": "o"}),
        ("Config.User", ""), ("Config.User", "0:0"), ("Config.User", "root"), ("HostConfig.Privileged", True),
        ("HostConfig.Privileged", None), ("HostConfig.PidMode", "host"), ("HostConfig.PidMode", f"container:{OURS}"),
        ("HostConfig.IpcMode", "host"), ("HostConfig.UTSMode", "host"), ("HostConfig.NetworkMode", "host"),
        ("HostConfig.NetworkMode", "bridge"), ("HostConfig.Devices", [{"PathOnHost": "/dev/sda"}]),
        ("HostConfig", None), ("Mounts", [{"Type": "bind", "Source": "/"}]),
        ("Mounts", [{"Type": "bind", "Source": "/root/../etc"}]),
    ],
)  # fmt: skip
def test_a_container_that_could_not_have_been_made_here_is_not_ours_whatever_its_labels(path: str, value: Any) -> None:
    rules = ProxyRules(networks=("belljar-sandbox",), roots=("/root",))
    assert bodies.foreign(told(OURS, path, value), rules).startswith("is not one of Belljar's")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("", None), ("HostConfig.NetworkMode", "belljar-sandbox"), ("HostConfig.NetworkMode", f"container:{OURS}"),
        ("HostConfig.PidMode", "private"), ("Mounts", [{"Type": "bind", "Source": "/srv/a"}, {"Type": "volume"}]),
    ],
)  # fmt: skip
def test_one_that_was_made_before_the_proxy_was_started_again_is_ours_still(path: str, value: Any) -> None:
    rules = ProxyRules(networks=("belljar-sandbox",), roots=("/srv",))
    assert bodies.foreign(told(OURS, path, value), rules) == ""


# --- paths ---


@pytest.mark.parametrize(
    "line",
    [
        "GET http://engine/v1.41/info", "GET //v1.41/info", "GET /v1.41//info", "GET /v1.41/containers/..%2finfo",
        "GET /v1.41/containers/../info", "GET /v1.41/./info", "GET /v1.40/info", "GET /info", "GET /v1.41/INFO",
        "GET /v4.0.0/libpod/info", "GET /v1.41/v1.41/info", "get /v1.41/info", "POST /v1.41/info", "GET /V1.41/info",
        "GET /v1.41/containers/x/archive?path=/", "PUT /v1.41/containers/x/archive?path=/", "POST /v1.41/commit",
        "GET /v1.41/containers/x/logs", "GET /v1.41/containers/x/export", "POST /v1.41/containers/x/update",
        "POST /v1.41/containers/x/rename?name=y", "POST /v1.41/containers/prune", "POST /v1.41/volumes/prune",
        "GET /v1.41/secrets", "POST /v1.41/swarm/init", "POST /v1.41/plugins/pull", "GET /v1.41/events",
        "POST /v1.41/networks/create", "POST /v1.41/networks/x/connect", "POST /session", "POST /v1.41/session",
        "POST /v1.41/grpc", "GET /v1.41/images/x/get", "POST /v1.41/images/load", "POST /v1.41/images/x/push",
        "POST /v1.41/images/create?fromImage=x", "POST /v1.41/build?networkmode=none", "DELETE /v1.41/images/x",
        "GET /v1.41/containers/json", "GET /v1.41/containers/json?all=1", "GET /v1.41/volumes",
        "GET /v1.41/containers/json?filters=%7B%22label%22%3A%5B%22x%22%5D%7D", "GET /v1.41/info?x=1",
        "GET /v1.41/containers/json?filters=%7B%22name%22%3A%5B%22x%22%5D%7D", "GET /v1.41/containers/x%2fy/json",
        "POST /v1.41/containers/create?name=a&name=b", "POST /v1.41/containers/create?platform=x", "GET \\v1.41\\info",
        "GET /v1.41/containers/x/json#y", "GET *", "OPTIONS *", "CONNECT engine:80", "GET /v1.41/containers/x/json;y",
    ],
)  # fmt: skip
def test_a_request_line_that_is_not_on_the_list_is_refused(line: str) -> None:
    with pytest.raises(CallRefused):
        calls.judge(*line.split(" "), ProxyRules())


def test_images_are_touched_only_where_that_was_said_and_without_the_hosts_network() -> None:
    rules = ProxyRules(images=True)
    for line in ("POST /v1.41/images/create?fromImage=a%2Fb&tag=c", "DELETE /v1.41/images/a/b:c?force=False",
                 "POST /v1.41/build?networkmode=none&t=x", "GET /v1.41/containers/json?all=1"):  # fmt: skip
        assert calls.judge(*line.split(" "), rules)
    for line in ("POST /v1.41/images/create?fromSrc=http%3A%2F%2Fx", "POST /v1.41/build?networkmode=host&t=x",
                 "POST /v1.41/build?t=x", "POST /v1.41/build?networkmode=none&remote=x", "POST /v1.41/images/load",
                 "POST /v1.41/build?networkmode=none&nsoptions=%5B%7B%22Host%22%3Atrue%7D%5D"):  # fmt: skip
        with pytest.raises(CallRefused):
            calls.judge(*line.split(" "), rules)
