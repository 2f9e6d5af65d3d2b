"""What is shipped for operators says what it must: each demand on each container, and the unit as systemd reads it."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from belljar.cli.commands import COMMANDS
from belljar.host.seccomp.guest_profile import PROFILE_PATH
from belljar.service.http.app import create_app
from belljar.service.http.guard import Guard
from belljar.settings import _VARIABLES, load
from composing import compose

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]
MANIFESTS = {path.stem: yaml.safe_load(path.read_text()) for path in (DEPLOY / "kubernetes").glob("*.yaml")}
POD = MANIFESTS["deployment"]["spec"]["template"]["spec"]
UNIT = (DEPLOY / "belljar.service").read_text()
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
_THEIRS = {"HOME", "PATH", "LANG", "XDG_CACHE_HOME"}  # not ours to know


def known(names: set[str]) -> bool:
    names = {name for name in names if not name.startswith("PYTHON")}
    assert names <= _THEIRS | set(_VARIABLES), sorted(names - _THEIRS - set(_VARIABLES))
    return True


# --- Compose ---


def test_belljar_redis_and_the_sandbox_network_are_there() -> None:
    assert {"belljar", "redis", "engine-proxy"} <= set(SERVICES)
    assert COMPOSE["networks"]["sandbox"]["ipam"]["config"] == [{"subnet": "172.28.0.0/16"}]


def test_only_the_proxy_sees_the_engines_socket_and_it_has_no_network() -> None:
    holders = [name for name, service in SERVICES.items() if "docker.sock:" in str(service.get("volumes"))]
    assert holders == ["engine-proxy"]
    assert "docker.sock" not in str(COMPOSE["volumes"])
    assert SERVICES["engine-proxy"]["network_mode"] == "none"
    assert "networks" not in SERVICES["engine-proxy"]


def test_the_service_speaks_to_the_proxy_over_a_folder_that_it_cannot_write_to() -> None:
    assert SERVICES["belljar"]["environment"]["DOCKER_HOST"] == "unix:///run/belljar/docker.sock"
    assert "engine:/run/belljar:ro" in SERVICES["belljar"]["volumes"]
    command = SERVICES["engine-proxy"]["command"]
    assert command[command.index("--listen") + 1] == "unix:///run/belljar/docker.sock"
    assert command[command.index("--network") + 1] == COMPOSE["networks"]["sandbox"]["name"]
    assert "--images" not in command
    assert "--root" not in command


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_of_compose_has_its_walls(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"][0] == "no-new-privileges:true"
    assert "unconfined" not in str(service["security_opt"])
    uid, gid = service["user"].split(":")
    assert int(uid) > 0
    assert int(gid) > 0
    for limit in ("mem_limit", "pids_limit", "cpus"):
        assert service[limit]
    assert service["logging"]["options"].keys() == {"max-size", "max-file"}
    for never in ("privileged", "cap_add", "devices", "pid", "ipc", "userns_mode", "volumes_from", "cgroup_parent"):
        assert never not in service
    assert service.get("network_mode") in (None, "none")


def test_the_variables_and_folders_of_the_specification_are_taken() -> None:
    service = SERVICES["belljar"]
    env = service["environment"]
    assert env["SANDBOX_NETWORK"] == COMPOSE["networks"]["sandbox"]["name"] == "${SANDBOX_NETWORK:-belljar-sandbox}"
    assert env["MAX_CONTAINERS"] == "${MAX_CONTAINERS:-10}"
    assert "./projects:/projects:ro" in service["volumes"]
    assert env["BELLJAR_PROJECTS"] == "/projects"
    given = {"HOME": "/nowhere", "SANDBOX_NETWORK": "team-net", "MAX_CONTAINERS": "4", "BELLJAR_PROJECTS": "/projects"}
    found = load(given, Path("/nowhere"))
    assert (found.container.network_mode, found.max_containers, found.service.projects) == (
        "team-net",
        4,
        ("/projects",),
    )


def test_the_service_s_own_container_has_a_seccomp_profile_which_is_the_one_of_guests() -> None:
    _, profile = SERVICES["belljar"]["security_opt"]
    default = re.fullmatch(r"seccomp:\$\{SERVICE_SECCOMP_PROFILE:-(.+)\}", profile)
    assert default
    assert (DEPLOY / default[1]).resolve() == PROFILE_PATH.resolve()


def test_no_guest_shares_a_network_with_anything_that_listens() -> None:
    inside = [name for name, service in SERVICES.items() if "sandbox" in service.get("networks", ())]
    assert inside == ["sandbox-network"]
    assert "sigwait" in str(SERVICES["sandbox-network"]["entrypoint"])
    assert COMPOSE["networks"]["back"]["internal"] is True
    assert SERVICES["redis"]["networks"] == ["back"]


def test_the_service_is_published_on_loopback_alone_and_redis_not_at_all() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {"belljar": ["127.0.0.1:8080:8080"]}


def test_compose_itself_takes_the_file_and_leaves_no_wall_out(tmp_path: Path) -> None:
    program = compose()
    file = program.file(tmp_path)
    refused = program.call(file, "config", check=False, DOCKER_GID="")
    assert refused.returncode != 0
    assert "the group of the engine's socket" in refused.stderr
    own = {"DOCKER_GID": "998", "SERVICE_SECCOMP_PROFILE": str(PROFILE_PATH)}
    understood = yaml.safe_load(program.call(file, "config", **own).stdout)["services"]
    assert understood.keys() == SERVICES.keys()
    for name, service in understood.items():
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"]), name
        profile = [f"seccomp:{PROFILE_PATH}"] if name == "belljar" else []
        assert service["security_opt"] == ["no-new-privileges:true", *profile]
        assert service["user"] == SERVICES[name]["user"]


def test_what_compose_hands_on_empty_is_as_if_it_were_not_set(tmp_path: Path) -> None:
    """`${BELLJAR_HOSTS:-}` is an empty text, not an absent one."""
    said = SERVICES["belljar"]["environment"]
    env = {name: re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value) for name, value in said.items()}
    assert "" in env.values()
    settings = load({**env, "HOME": str(tmp_path)}, tmp_path)
    plain = load({**{name: value for name, value in env.items() if value}, "HOME": str(tmp_path)}, tmp_path)
    assert settings == plain
    assert Guard(create_app(settings), settings)


def test_a_host_that_makes_no_sense_is_told_to_who_starts_the_service_and_not_to_who_asks(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "BELLJAR_HOSTS": "a,,b", "BELLJAR_PORT": "0"}
    line = [sys.executable, "-m", "belljar", "serve"]
    done = subprocess.run(line, capture_output=True, text=True, env=env, timeout=60, check=False)
    assert done.returncode != 0
    assert "service.hosts: '' is no host" in done.stderr


# --- every word is one that Belljar knows ---


def test_every_setting_that_is_written_down_is_a_setting_of_belljars() -> None:
    assert known(set(SERVICES["belljar"]["environment"]))
    assert known({item["name"] for item in POD["containers"][0]["env"]})
    lines = [line.removeprefix("Environment=") for line in UNIT.splitlines() if line.startswith("Environment=")]
    assert known({word.partition("=")[0] for line in lines for word in line.split()})
    assert known(set(re.findall(r"\b([A-Z][A-Z_]+)=(?=\S)", DOCKERFILE.partition("FROM scratch")[2])))


def test_every_command_that_is_started_is_a_command_of_belljars() -> None:
    started = {SERVICES["engine-proxy"]["command"][0], POD["containers"][0]["args"][0], "serve"}
    assert started <= set(COMMANDS)
    assert "ExecStart=/opt/belljar/bin/belljar serve" in UNIT
    assert 'CMD ["serve"]' in DOCKERFILE


# --- the image ---


def test_the_image_is_made_from_nothing_and_runs_as_nobody_special() -> None:
    last = DOCKERFILE.partition("FROM scratch")[2]
    assert last, "the last stage has layers of its base below it"
    assert re.search(r"^USER 10001:10001$", last, re.MULTILINE)
    assert "RUN" not in last
    assert "/healthz" in last.partition("HEALTHCHECK")[2].splitlines()[0]
    assert "harden.sh" in DOCKERFILE
    assert re.findall(r"^(?:ARG|ENV) .*(?:KEY|TOKEN|PASSWORD|SECRET)", DOCKERFILE, re.MULTILINE) == []


# --- systemd ---


def unit() -> dict[str, list[str]]:
    parser = configparser.RawConfigParser(strict=False, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(UNIT)
    return {name: value.split() for name, value in parser["Service"].items()}


def test_the_unit_runs_without_root_behind_the_walls_that_leave_guests_theirs() -> None:
    said = unit()
    assert said["User"] == ["belljar"]
    assert said["Delegate"] == ["yes"]
    for wall in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices", "RestrictSUIDSGID", "ProtectClock",
                 "ProtectKernelModules", "LockPersonality", "RestrictRealtime"):  # fmt: skip
        assert said[wall] == ["yes"], wall
    assert said["ProtectSystem"] == ["strict"]
    assert said["CapabilityBoundingSet"] == []
    assert "docker.sock" not in str(said)


@pytest.mark.parametrize(
    "wall",
    ["RestrictNamespaces", "PrivateUsers", "ProtectKernelTunables", "ProtectKernelLogs", "ProtectProc", "ProcSubset",
     "ProtectControlGroups", "ProtectHostname", "MemoryDenyWriteExecute"],
)  # fmt: skip
def test_a_wall_that_would_take_the_guests_theirs_is_absent_and_said_why(wall: str) -> None:
    assert wall not in unit()
    assert re.search(rf"^#.*\b{wall}\b", UNIT, re.MULTILINE)


def test_the_filter_of_calls_leaves_those_that_a_jail_is_made_of() -> None:
    filtered = unit()["SystemCallFilter"]
    assert filtered[0].startswith("~")
    assert not {"@mount", "@privileged", "@process", "@sandbox"} & {word.lstrip("~") for word in filtered}


def test_systemd_itself_takes_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if not analyze:
        pytest.skip("NOTHING was checked by systemd itself: there is no systemd-analyze here")
    copy = tmp_path / "belljar.service"
    copy.write_text(UNIT.replace("/opt/belljar/bin/belljar", "/bin/true"))  # it looks whether the program is there
    done = subprocess.run([analyze, "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False)
    assert "belljar.service" not in done.stderr, done.stderr
    line = [analyze, "security", "--offline=yes", "--threshold=45", "--no-pager", str(copy)]
    rated = subprocess.run(line, capture_output=True, text=True, check=False)
    assert rated.returncode == 0, rated.stdout[-300:]


def test_a_timer_prunes_the_records_of_the_same_server_each_day() -> None:
    units = {name: (DEPLOY / f"belljar-prune.{name}").read_text() for name in ("service", "timer")}
    assert re.search(r"^OnCalendar=daily$", units["timer"], re.MULTILINE)
    assert re.search(r"^Persistent=yes$", units["timer"], re.MULTILINE)
    assert "ExecStart=/opt/belljar/bin/belljar records prune\n" in units["service"]
    for line in ("User=belljar", "EnvironmentFile=-/etc/belljar/environment", "StateDirectory=belljar"):
        assert line in units["service"].splitlines() and line in UNIT.splitlines(), line
    [folder] = re.findall(r"BELLJAR_DATA_DIR=(\S+)", units["service"])
    assert f"BELLJAR_DATA_DIR={folder} " in UNIT


def test_systemd_itself_takes_the_timer(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if not analyze:
        pytest.skip("NOTHING was checked by systemd itself: there is no systemd-analyze here")
    for name in ("service", "timer"):
        text = (DEPLOY / f"belljar-prune.{name}").read_text()
        (tmp_path / f"belljar-prune.{name}").write_text(text.replace("/opt/belljar/bin/belljar", "/bin/true"))
    line = [
        analyze,
        "verify",
        "--man=no",
        str(tmp_path / "belljar-prune.service"),
        str(tmp_path / "belljar-prune.timer"),
    ]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert "belljar-prune" not in done.stderr, done.stderr


# --- Kubernetes ---


def test_the_namespace_lets_in_restricted_pods_alone() -> None:
    labels = MANIFESTS["namespace"]["metadata"]["labels"]
    for word in ("enforce", "audit", "warn"):
        assert labels[f"pod-security.kubernetes.io/{word}"] == "restricted"


def test_the_pod_has_no_token_no_host_and_is_nobody_special() -> None:
    assert POD["automountServiceAccountToken"] is False
    context = POD["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] > 0
    assert context["runAsGroup"] > 0
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    for never in ("hostNetwork", "hostPID", "hostIPC", "serviceAccountName"):
        assert never not in POD
    assert all({"persistentVolumeClaim", "emptyDir", "secret"} & volume.keys() for volume in POD["volumes"])


@pytest.mark.parametrize("container", POD["containers"] + POD.get("initContainers", []), ids=lambda each: each["name"])
def test_every_container_of_the_pod_has_its_walls(container: dict[str, Any]) -> None:
    context = container["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert context.get("privileged", False) is False
    for word in ("requests", "limits"):
        assert container["resources"][word].keys() == {"cpu", "memory", "ephemeral-storage"}
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
    assert mounts == {"/var/lib/belljar": False, "/tmp": False, "/etc/belljar-key": True}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in POD["volumes"]}


def test_the_probes_ask_under_a_name_that_the_service_answers_to() -> None:
    [container] = POD["containers"]
    paths = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert [asked["path"] for asked in paths.values()] == ["/healthz", "/healthz", "/readyz"]
    assert all(asked["httpHeaders"] == [{"name": "Host", "value": "127.0.0.1"}] for asked in paths.values())


def test_the_first_key_is_a_secret_that_the_pages_say_how_to_make() -> None:
    [container] = POD["containers"]
    [file] = [item["value"] for item in container["env"] if item["name"] == "BELLJAR_FIRST_KEY_FILE"]
    [volume] = [volume["secret"] for volume in POD["volumes"] if "secret" in volume]
    [mount] = [each["mountPath"] for each in container["volumeMounts"] if each["name"] == "first-key"]
    making = f"create secret generic {volume['secretName']} --from-file={Path(file).name}=first.key"
    assert file == f"{mount}/key"
    assert making in (DEPLOY.parent / "docs/deploying.md").read_text()
    assert making in (DEPLOY / "kubernetes/deployment.yaml").read_text()


def test_nothing_goes_in_or_out_that_is_not_named() -> None:
    policy = MANIFESTS["networkpolicy"]["spec"]
    assert policy["podSelector"] == {}
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert all(rule.get("from") for rule in policy["ingress"])
    assert all(rule.get("to") for rule in policy["egress"])


def test_the_manifests_fit_together() -> None:
    labels = MANIFESTS["deployment"]["spec"]["template"]["metadata"]["labels"]
    assert MANIFESTS["service"]["spec"]["selector"].items() <= labels.items()
    assert MANIFESTS["deployment"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    [claim] = [volume for volume in POD["volumes"] if "persistentVolumeClaim" in volume]
    assert claim["persistentVolumeClaim"]["claimName"] == MANIFESTS["storage"]["metadata"]["name"]
    listed = {name.removesuffix(".yaml") for name in MANIFESTS["kustomization"]["resources"]}
    assert listed == set(MANIFESTS) - {"kustomization"}
    namespaces = {each["metadata"].get("namespace") for name, each in MANIFESTS.items() if name in listed}
    assert namespaces == {None, MANIFESTS["namespace"]["metadata"]["name"]}
    assert MANIFESTS["deployment"]["spec"]["strategy"] == {"type": "Recreate"}


def test_kustomize_takes_the_folder_where_it_is_installed() -> None:
    kubectl = shutil.which("kubectl")
    if not kubectl:
        pytest.skip("NOTHING was checked by kubectl itself: it is not here")
    line = [kubectl, "kustomize", str(DEPLOY / "kubernetes")]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rendered = {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}
    assert sorted(rendered) == ["Deployment", "Namespace", "NetworkPolicy", "PersistentVolumeClaim", "Service"]
    assert rendered["Deployment"]["spec"]["template"]["spec"] == POD  # with its anchors and aliases written out
