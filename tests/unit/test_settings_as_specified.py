"""The configuration examples of the specification, as written there but for the images that it leaves open."""

from __future__ import annotations

import json
import pwd
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from belljar.core import errors
from belljar.core.container_block import NO_KERNEL_MEMORY, registered
from belljar.core.policy import decide, run_limits
from belljar.core.request import RunRequest
from belljar.core.values import GIB, MIB
from belljar.engine import language_file
from belljar.engine.engine import Engine
from settings_home import home, load, user_file

__all__ = ["home"]  # a fixture

PROFILE = json.dumps({"defaultAction": "SCMP_ACT_ERRNO", "syscalls": []})

# --- a language file ---

LANGUAGES = """
{"python3.10": {"image": "registry.example/sandbox-python:3.10.12-slim", "seccomp_profile": "python3.json",
                "default_memory_mb": 256},
 "nodejs18": {"image": "registry.example/sandbox-node:18", "seccomp_profile": "default.json",
              "default_memory_mb": 192, "allow_network": false}}
"""
AS_TOML = """
["python3.10"]
image = "registry.example/sandbox-python:3.10.12-slim"
seccomp_profile = "python3.json"
default_memory_mb = 256
[nodejs18]
image = "registry.example/sandbox-node:18"
seccomp_profile = "default.json"
default_memory_mb = 192
allow_network = false
"""


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A folder with the profiles that the language file names."""
    for name in ("python3.json", "default.json"):
        (tmp_path / name).write_text(PROFILE)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text"),
    [("l.json", LANGUAGES), ("l.yaml", yaml.safe_dump(json.loads(LANGUAGES))), ("l.toml", AS_TOML)],
)
def test_the_language_file_of_the_specification_is_taken_in_each_format(
    beside: Path, home: Path, name: str, text: str
) -> None:
    (beside / name).write_text(text)
    found = load(home, env={"SANDBOX_LANGUAGE_CONFIG_FILE": str(beside / name)})
    table = language_file.load(found.language_file)
    python, node = table.get("python3.10"), table.get("nodejs18")
    assert (python.image, python.memory) == ("registry.example/sandbox-python:3.10.12-slim", 256 * MIB)
    assert (python.filename, python.argv) == ("main.py", ("python3.10", "main.py"))
    assert (node.memory, node.allow_network, node.filename) == (192 * MIB, False, "main.js")
    assert node.argv == ("node", "main.js")
    assert python.seccomp_profile == str(beside / "python3.json")
    assert node.seccomp_profile == str(beside / "default.json")
    request = RunRequest(code="1", language="nodejs18")
    assert run_limits(request, found, node).memory == 192 * MIB
    with pytest.raises(errors.PolicyDenied, match="nodejs18 may have no network here"):
        decide(RunRequest.model_validate({"code": "1", "egress": {"mode": "open"}}), found, language=node)


def test_a_language_of_a_family_takes_no_file_and_no_alias_from_the_family(tmp_path: Path) -> None:
    (tmp_path / "l.json").write_text('{"python3.10": {"image": "a:1"}, "golang1.22": {"image": "b:1"}}')
    table = language_file.load(str(tmp_path / "l.json"))
    assert table.of_file("x.py").name == "python"
    assert (table.get("py").name, table.get("golang").name) == ("python", "go")
    go = table.get("golang1.22")
    assert (go.filename, go.program) == ("main.go", "golang1.22")  # on the host there is no such program


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"default_memory_mb": "256"}, r"python3\.10\.default_memory_mb: must be a number of megabytes"),
        ({"default_memory_mb": 256, "memory": "256M"}, r"python3\.10\.memory: .*leave one of them out"),
        ({"seccomp_profile": "none.json"}, r"python3\.10\.seccomp_profile: .*none\.json: .*No such file"),
    ],
)
def test_what_makes_no_sense_under_the_specification_s_names_is_refused(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    (tmp_path / "l.json").write_text(json.dumps({"python3.10": fields}))
    with pytest.raises(errors.InvalidRequest, match=said):
        language_file.load(str(tmp_path / "l.json"))


def test_a_command_of_its_own_may_be_written_as_one_text(tmp_path: Path) -> None:
    (tmp_path / "l.json").write_text('{"nodejs18": {"command": "node18 --no-warnings main.js"}}')
    node = language_file.load(str(tmp_path / "l.json")).get("nodejs18")
    assert (node.argv, node.program) == (("node18", "--no-warnings", "main.js"), "node18")


def test_a_language_of_no_known_family_still_has_to_say_how_it_runs(tmp_path: Path) -> None:
    (tmp_path / "l.json").write_text('{"cobol85": {"image": "a:1"}}')
    with pytest.raises(errors.InvalidRequest, match=r"cobol85\.filename: "):
        language_file.load(str(tmp_path / "l.json"))


# --- the block `container` ---

BLOCK = """
container:
  engine: docker
  cpu_shares: 100
  memory_limit: 134217728
  disk_quota: 1073741824
  network_mode: none
  read_only_root: true
  capabilities: []
  seccomp_profile: profiles/default.json
  image_registry: registry.example
  image_pull_policy: if-not-present
"""


def config(home: Path, text: str, name: str = "config.yaml") -> Path:
    folder = home / "home" / ".config" / "belljar"
    (folder / "profiles").mkdir(parents=True, exist_ok=True)
    (folder / "profiles" / "default.json").write_text(PROFILE)
    (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("name", ["config.yaml", "config.yml", "config.json"])
def test_the_container_block_of_the_specification_is_taken(home: Path, name: str) -> None:
    text = json.dumps(yaml.safe_load(BLOCK)) if name.endswith("json") else BLOCK
    folder = config(home, text, name)
    found = load(home)
    options = found.container
    assert (options.engine, options.runtime, options.cpu_shares) == ("docker", "", 100)
    assert (found.defaults.memory, found.defaults.disk) == (128 * MIB, GIB)
    assert (options.network_mode, options.read_only_root, options.capabilities) == ("none", True, ())
    assert options.seccomp_profile == str(folder / "profiles" / "default.json")
    assert (found.images.image_registry, found.images.image_pull_policy) == ("registry.example", "if-not-present")


@pytest.mark.parametrize(
    ("engine", "backend", "runtime"),
    [
        ("docker", "docker", ""), ("podman", "podman", ""), ("gvisor", "docker", "runsc"), ("kata", "docker", "kata"),
        ("firecracker", "docker", "kata-fc"), ("macos-container", "apple", ""),
    ],
)  # fmt: skip
def test_an_engine_is_one_of_ours_or_docker_with_a_runtime_of_that_kind(
    home: Path, engine: str, backend: str, runtime: str
) -> None:
    config(home, BLOCK.replace("engine: docker", f"engine: {engine}"))
    found = load(home).container
    assert (found.engine, found.runtime) == (backend, runtime)


def test_a_runtime_that_is_named_itself_goes_over_the_engine_s_usual_one(home: Path) -> None:
    assert load(home, container={"engine": "gvisor", "runtime": "runsc-kvm"}).container.runtime == "runsc-kvm"
    config(home, BLOCK.replace("engine: docker", "engine: kata"))
    assert load(home, env={"BELLJAR_RUNTIME": "kata-clh"}).container.runtime == "kata-clh"


def test_a_runtime_is_found_under_the_name_that_the_engine_has_for_it() -> None:
    assert registered("runsc", ("runc", "runsc")) == "runsc"
    assert registered("runsc", ("runc", "gvisor")) == "gvisor"
    assert registered("kata", ("runc", "io.containerd.kata.v2")) == "io.containerd.kata.v2"
    assert registered("gvisor", ("runc", "runsc")) == "runsc"
    assert registered("kata", ("runc",)) == "kata"  # which is then missed by its name
    assert registered("", ("runc",)) == ""


@pytest.mark.parametrize(
    ("given", "meant"), [("0-3,5", "0-3,5"), ([0, 2], "0,2"), ("0, 1", "0,1"), (3, "3"), ("", ""), ([], "")]
)
def test_cpu_affinity_is_a_list_of_cpus(home: Path, given: object, meant: str) -> None:
    assert load(home, container={"cpu_affinity": given}).container.cpu_affinity == meant
    assert load(home, container={"cpuset_cpus": given}).container.cpu_affinity == meant


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"bandwidth": "fast"}, r"defaults\.net_bandwidth: "),
        ({"connections": 65}, r"defaults\.net_connections: "),
        ({"ports": [8080]}, r"container\.ports: no port of a guest can be exposed yet"),
        ({"port_exposure": [8080]}, r"container\.ports: "),
        ({"protocols": ["udp"]}, r"protocols: what guests may speak is https"),
        ({"protocols": ["tcp"], "network_mode": "bridge"}, r"protocols: the network 'bridge' carries every protocol"),
        ({"protocols": ["sctp"]}, r"container\.protocols\.0: "),
        ({"cpu_affinity": "all"}, r"container\.cpu_affinity: write the numbers of CPUs"),
        ({"cpu_affinity": "3-1"}, r"container\.cpu_affinity: "),
        ({"cpu_affinity": True}, r"container\.cpu_affinity: "),
        ({"cpuset": "1", "cpu_affinity": "1"}, r"are one setting"),
        ({"engine": "lxc"}, r"container\.engine: choose from docker, .*gvisor, kata, firecracker"),
        ({"kernel_memory": "lots"}, r"container\.kernel_memory: "),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_reason(home: Path, block: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=said):
        load(home, container=block)


def test_bandwidth_and_connections_are_defaults_of_every_run(home: Path) -> None:
    found = load(home, container={"network_bandwidth": "10M", "max_connections": 8}).defaults
    assert (found.net_bandwidth, found.net_connections) == (10 * MIB, 8)


def test_what_asks_for_no_more_than_there_is_is_granted(home: Path) -> None:
    nothing = {"bandwidth": None, "connections": 0, "ports": [], "protocols": ["https"]}
    assert load(home, container=nothing).container.protocols == ("https",)
    assert load(home, container={"protocols": ["tcp", "udp", "icmp"], "network_mode": "bridge"}).container.protocols


def test_kernel_memory_is_left_out_and_the_reason_said(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    config(home, BLOCK + "  kernel_memory: 67108864\n")
    assert load(home).container.kernel_memory == 64 * MIB
    assert NO_KERNEL_MEMORY in caplog.text


def test_two_settings_files_beside_each_other_are_refused(home: Path) -> None:
    config(home, BLOCK)
    user_file(home, "max_containers = 3\n")
    with pytest.raises(errors.InvalidRequest, match=r"there are config\.toml and config\.yaml, and only one can count"):
        load(home)


def test_a_key_that_is_there_twice_in_a_settings_file_is_refused(home: Path) -> None:
    config(home, BLOCK + "  cpu_shares: 200\n")
    with pytest.raises(errors.InvalidRequest, match=r"config\.yaml: 'cpu_shares' is there twice"):
        load(home)


def test_a_language_file_that_is_named_by_a_relative_path_is_beside_the_settings(home: Path) -> None:
    folder = config(home, "language_file: languages.yaml\n")
    assert load(home).language_file == str(folder / "languages.yaml")


def test_an_empty_yaml_file_says_nothing(home: Path) -> None:
    config(home, "# nothing yet\n")
    assert load(home) == load(home, "home")


# --- an existing project JSON ---

PROJECT = """{"testCommands": ["bun test"], "sandbox": {"enabled": true, "backend": "auto", "image": "oven/bun:1",
 "memoryLimit": "4G", "cpuLimit": 2, "timeoutMs": 300000, "autoRemove": true}}"""


def project(home: Path, text: str = PROJECT, name: str = ".openagents/project.json") -> None:
    path = home / "project" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("name", [".openagents/project.json", "package.json", ".belljar.json"])
def test_the_project_json_of_the_specification_is_read_where_it_lies(home: Path, name: str) -> None:
    project(home, name=name)
    found = load(home)
    assert (found.backend, found.defaults.memory, found.defaults.cpus) == ("auto", 4 * GIB, 2)
    assert (found.defaults.timeout, found.switched_off) == (300, "")
    assert set(found.container.images.values()) == {"oven/bun:1"} == {found.project_image}
    assert found.auto_remove
    assert decide(RunRequest(command=("bun", "test")), found).limits.timeout == 300


@pytest.mark.parametrize(("name", "backend"), [("docker", "docker"), ("macos-container", "apple"), ("wasm", "wasm")])
def test_a_project_names_its_backend_by_our_name_or_that_of_other_tools(home: Path, name: str, backend: str) -> None:
    project(home, PROJECT.replace('"auto"', f'"{name}"'))
    assert decide(RunRequest(code="1"), load(home)).backend == backend


@pytest.mark.parametrize(
    ("name", "said"),
    [("seatbelt", "no backend for macOS's sandbox-exec.*macos-container"), ("none", "no sandbox was asked for")],
)
def test_a_backend_that_belljar_does_not_have_is_refused_with_the_reason(home: Path, name: str, said: str) -> None:
    project(home, PROJECT.replace('"auto"', f'"{name}"'))
    with pytest.raises(errors.PolicyDenied, match=said):
        decide(RunRequest(code="1"), load(home))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"timeoutMs": 300000', '"timeoutMs": 0', r"sandbox\.timeoutMs: "),
        ('"timeoutMs": 300000', '"timeoutMs": "soon"', r"sandbox\.timeoutMs: "),
        ('"autoRemove": true', '"autoRemove": "yes"', r"sandbox\.autoRemove: "),
        ('"cpuLimit": 2', '"cpuLimit": 2, "cpuLimit": 4', r"'cpuLimit' is there twice"),
    ],
)
def test_a_wrong_value_in_the_project_json_is_refused_by_its_name(home: Path, old: str, new: str, said: str) -> None:
    assert old in PROJECT
    project(home, PROJECT.replace(old, new))
    with pytest.raises(errors.InvalidRequest, match=rf"project\.json: {said}"):
        load(home)


def test_what_the_project_says_twice_elsewhere_stops_nobody(home: Path) -> None:
    project(home, PROJECT.replace('"testCommands"', '"testCommands": [], "testCommands"'))
    assert load(home).defaults.cpus == 2


def test_a_project_may_write_its_defaults_in_yaml(home: Path) -> None:
    (home / "project" / ".belljar.yaml").write_text("backend: native\ndefaults: {timeout: 60, memory: 1G}\n")
    found = load(home)
    assert (found.backend, found.defaults.timeout, found.defaults.memory) == ("native", 60, GIB)
    (home / "project" / ".belljar.yaml").write_text("container: {read_only_root: false}\n")
    with pytest.raises(errors.InvalidRequest, match=r"\.belljar\.yaml: container cannot be set by a project"):
        load(home)


def test_on_a_mac_apple_s_container_is_looked_for_before_docker(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    engine = Engine(load(home))
    assert engine.known.index("docker") < engine.known.index("apple")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert engine.known.index("apple") < engine.known.index("docker")
    named = Engine(load(home, container={"engine": "docker"}))
    assert named.known.index("docker") < named.known.index("apple")


# --- the user of guests ---

NOBODY = next((account for account in pwd.getpwall() if account.pw_uid == account.pw_gid and account.pw_uid), None)


@pytest.mark.parametrize(
    ("text", "first", "many"),
    [
        ("70000", 70000, 65_536), ("70000:70000", 70000, 65_536), ("1000:1000", 1000, 1), ("1000", 1000, 1),
        (" 1000 ", 1000, 1),
    ],
)  # fmt: skip
def test_the_user_of_guests_is_taken_as_uid_and_gid(home: Path, text: str, first: int, many: int) -> None:
    found = load(home, env={"SANDBOX_DEFAULT_USER_UID_GID": text})
    assert (found.user_uid, found.user_uids) == (first, many)


def test_a_group_with_another_number_than_the_user_is_that_of_all_guests(home: Path) -> None:
    for text, uid, gid in (("1000:100", 1000, 100), ("70000:1000", 70000, 1000), ("1000:1000", 1000, None)):
        found = load(home, env={"SANDBOX_DEFAULT_USER_UID_GID": text})
        assert (found.user_uid, found.user_gid) == (uid, gid)


@pytest.mark.skipif(NOBODY is None, reason="SKIPPED: no account here has a group of its own number")
def test_the_user_of_guests_is_taken_by_name(home: Path) -> None:
    import grp

    assert NOBODY is not None
    group = grp.getgrgid(NOBODY.pw_gid).gr_name
    for text in (NOBODY.pw_name, f"{NOBODY.pw_name}:{group}", f"{NOBODY.pw_name}:{NOBODY.pw_gid}"):
        found = load(home, env={"SANDBOX_DEFAULT_USER_UID_GID": text})
        assert (found.user_uid, found.user_uids) == (NOBODY.pw_uid, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no-such-account", "there is no account or group 'no-such-account' here"),
        ("1000:no-such-group", "there is no account or group 'no-such-group' here"),
        ("1000:0", "user_gid"),
        ("0:0", "user_uid"),
        ("root", "user_uid"),
    ],
)
def test_a_user_that_guests_cannot_be_is_refused_with_the_reason(home: Path, text: str, said: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=said) as caught:
        load(home, env={"SANDBOX_DEFAULT_USER_UID_GID": text})
    assert "SANDBOX_DEFAULT_USER_UID_GID" in caught.value.message
