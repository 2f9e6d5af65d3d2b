"""What the administrator says of containers: each setting that would open one is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from belljar import settings
from belljar.core import errors
from belljar.core import settings as core_settings
from belljar.core.settings import GRANTABLE, TYPES, ContainerSettings, ContainerType, Settings
from belljar.core.values import GIB, MIB
from belljar.host.seccomp.profiles import read_profile
from settings_home import home, load, user_file

__all__ = ["home"]  # a fixture

PROFILE = {"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [{"names": ["read"], "action": "SCMP_ACT_ALLOW"}]}


def profile_file(home: Path, content: object = PROFILE) -> Path:
    path = home / "profile.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_by_default_containers_have_all_their_walls_and_no_network(home: Path) -> None:
    options = load(home).container
    assert (options.read_only_root, options.capabilities, options.network_mode) == (True, (), "none")
    assert (options.seccomp_profile, options.apparmor_profile, options.selinux_label) == ("", "", "")


def test_the_whole_block_of_the_mission_is_read_from_a_file(home: Path) -> None:
    user_file(
        home,
        f"""
[container]
engine = "podman"
cpu_shares = 512
memory_limit = "256M"
disk_quota = "100M"
network_mode = "bridge"
dns = ["192.0.2.53", "2001:db8::35"]
read_only_root = false
capabilities = ["CAP_CHOWN", "net_raw"]
seccomp_profile = "{profile_file(home)}"
image_registry = "images.example"
image_pull_policy = "never"
""",
    )
    found = load(home)
    options = found.container
    assert (options.engine, options.cpu_shares, options.network_mode) == ("podman", 512, "bridge")
    assert (options.dns, options.capabilities) == (("192.0.2.53", "2001:db8::35"), ("CHOWN", "NET_RAW"))
    assert (options.read_only_root, options.seccomp_profile) == (False, str(home / "profile.json"))
    assert (found.defaults.memory, found.defaults.disk) == (256 * MIB, 100 * MIB)
    assert (found.images.image_registry, found.images.image_pull_policy) == ("images.example", "never")


def test_another_name_of_a_setting_goes_by_its_layer_like_any_other(home: Path) -> None:
    user_file(home, '[container]\nmemory_limit = "100M"\n')
    assert load(home).defaults.memory == 100 * MIB
    assert load(home, env={"BELLJAR_DEFAULT_MEMORY": "200M"}).defaults.memory == 200 * MIB
    assert load(home, env={"BELLJAR_DEFAULT_MEMORY": "200M"}, container={"memory_limit": "300M"}).defaults.memory == (
        300 * MIB
    )
    assert Settings.model_validate({"container": {"disk_quota": "64M"}}).defaults.disk == 64 * MIB


@pytest.mark.parametrize(
    ("name", "block", "field"),
    [
        ("memory_limit", "defaults", "memory"), ("disk_quota", "defaults", "disk"),
        ("image_registry", "images", "image_registry"), ("image_pull_policy", "images", "image_pull_policy"),
    ],
)  # fmt: skip
def test_two_names_of_one_setting_that_disagree_in_one_layer_are_refused(
    home: Path, name: str, block: str, field: str
) -> None:
    one, other = ("always", "never") if "policy" in name else ("100M", "200M")
    user_file(home, f'[container]\n{name} = "{one}"\n[{block}]\n{field} = "{other}"\n')
    with pytest.raises(
        errors.InvalidRequest, match=rf"config\.toml: container\.{name} and {block}\.{field} .*different"
    ):
        load(home)
    user_file(home, f'[container]\n{name} = "{one}"\n[{block}]\n{field} = "{one}"\n')
    assert getattr(getattr(load(home), block), field) in (one, 100 * MIB)


def test_two_names_that_say_the_same_in_other_words_agree(home: Path) -> None:
    found = load(home, container={"memory_limit": "1G"}, defaults={"memory": GIB})
    assert found.defaults.memory == GIB


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"engine": "lxc"}, r"container\.engine: "),
        ({"cpu_shares": 1}, r"container\.cpu_shares: "),
        ({"io_weight": 9}, r"container\.io_weight: "),
        ({"io_weight": 1001}, r"container\.io_weight: "),
        ({"memory_limit": "lots"}, r"defaults\.memory: .*512M"),
        ({"network_mode": "host"}, r"container\.network_mode: .*never host"),
        ({"network_mode": "container:abc"}, r"container\.network_mode: .*never host"),
        ({"network_mode": "ns:/proc/1/ns/net"}, r"container\.network_mode: "),
        ({"network_mode": ""}, r"container\.network_mode: "),
        ({"dns": ["dns.example"]}, r"container\.dns\.0: 'dns\.example' is no address"),
        ({"read_only_root": "no"}, r"container\.read_only_root: "),
        ({"capabilities": ["SYS_ADMIN"]}, r"container\.capabilities\.0: 'SYS_ADMIN' cannot be given.*CHOWN"),
        ({"capabilities": ["ALL"]}, r"container\.capabilities\.0: "),
        ({"capabilities": ["CHOWN", "cap_bpf"]}, r"container\.capabilities\.1: "),
        ({"apparmor_profile": "unconfined"}, r"container\.apparmor_profile: .*cannot be switched off"),
        ({"selinux_label": "disable"}, r"container\.selinux_label: .*cannot be switched off"),
        ({"selinux_label": "type:spc_t"}, r"container\.selinux_label: "),
        ({"seccomp_profile": "unconfined"}, r"container\.seccomp_profile: .*not an absolute path"),
        ({"seccomp_profile": "/nowhere/x.json"}, r"container\.seccomp_profile: .*No such file"),
        ({"types": {"preview": {"memory": "1"}}}, r"container\.types\.preview\.memory: "),
        ({"types": {"preview": {"colour": 1}}}, r"container\.types\.preview\.colour: "),
        ({"types": {"preview": 3}}, r"container\.types\.preview: "),
    ],
)
def test_what_would_open_a_container_or_makes_no_sense_is_refused_by_name(
    home: Path, block: dict[str, Any], said: str
) -> None:
    with pytest.raises(errors.InvalidRequest, match=rf"the flags: {said}"):
        load(home, container=block)


def test_all_that_can_be_given_back_is_docker_s_own_default(home: Path) -> None:
    assert load(home, container={"capabilities": [*GRANTABLE]}).container.capabilities == GRANTABLE
    assert not {"SYS_ADMIN", "SYS_PTRACE", "NET_ADMIN", "SYS_MODULE", "BPF", "DAC_READ_SEARCH"} & set(GRANTABLE)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "it is no JSON"), ("{", "it is no JSON"), ("[]", "it is no object"), ("[" * 100_000, "it is no JSON"),
        ({}, "defaultAction must be one of"), ({"defaultAction": "ALLOW"}, "defaultAction must be one of"),
        (PROFILE | {"syscall": []}, "there is no key 'syscall'"), (PROFILE | {"syscalls": {}}, "must be a list"),
        (PROFILE | {"syscalls": [3]}, r"syscalls\.0: a rule is an object"),
        (PROFILE | {"syscalls": [{"names": [], "action": "SCMP_ACT_ALLOW"}]}, r"syscalls\.0: names must be"),
        (PROFILE | {"syscalls": [{"action": "SCMP_ACT_ALLOW"}]}, r"syscalls\.0: names must be"),
        (PROFILE | {"syscalls": [{"names": ["read"], "action": "allow"}]}, r"syscalls\.0: action must be"),
        (PROFILE | {"syscalls": [{"names": ["read"], "action": "SCMP_ACT_ALLOW", "x": 1}]}, "no key 'x'"),
    ],
)  # fmt: skip
def test_a_seccomp_profile_that_is_none_is_refused_when_the_settings_are_read(
    home: Path, content: object, said: str
) -> None:
    path = profile_file(home, content)
    with pytest.raises(errors.InvalidRequest, match=rf"container\.seccomp_profile: .*profile\.json: .*{said}"):
        load(home, container={"seccomp_profile": str(path)})


def test_our_own_profile_is_one_by_the_same_rules() -> None:
    ours = Path(settings.__file__).parent / "host" / "seccomp" / "guest.json"
    assert read_profile(str(ours)) == ours.read_text()


def test_every_setting_of_containers_is_on_the_page_about_them() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    rows = " ".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    assert {*ContainerSettings.model_fields, *core_settings._OTHER_NAMES} <= {word.strip("`,") for word in rows.split()}


# --- container types ---


def test_the_mission_s_container_types_are_there(home: Path) -> None:
    types = load(home).container.types
    assert {name: (kind.image, kind.memory, kind.timeout) for name, kind in types.items()} == {
        "execution": ("python:3.12-slim", None, None),
        "node-execution": ("node:20-slim", None, None),
        "test-runner": ("", 2 * GIB, 300),
        "preview": ("", GIB, 1800),
    }


def test_an_administrator_changes_one_field_of_a_type_and_adds_others(home: Path) -> None:
    user_file(home, '[container.types.preview]\nmemory = "3G"\n[container.types.lint]\nimage = "lint:1"\ntimeout = 5\n')
    types = load(home).container.types
    assert (types["preview"].memory, types["preview"].timeout) == (3 * GIB, 1800)
    assert (types["lint"].image, types["lint"].timeout) == ("lint:1", 5)
    assert types["execution"] == ContainerType(**TYPES["execution"])


def test_a_type_s_image_is_that_of_the_short_form_before_its_own(home: Path) -> None:
    options = load(home, container={"images": {"preview": "app:1"}, "types": {"preview": {"image": "app:0"}}}).container
    assert options.image_of("preview") == "app:1"
    assert options.image_of("execution") == "python:3.12-slim"
    assert options.image_of("test-runner") == options.image_of("unheard") == ""
