"""deploy/docker-compose.yml, built and brought up by Compose itself, on a Docker with networks and a firewall.

Only two things are not as shipped: where the engine's socket is, and that Redis is Debian's.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from belljar.core.labels import LABEL
from belljar.host.seccomp.guest_profile import PROFILE_PATH
from composing import FILE, compose
from engines import IMAGE
from service_image import Host, host, import_packages
from witness import eventually

pytestmark = [
    pytest.mark.engine,
    pytest.mark.containers,
    pytest.mark.exhaustive("the image of the service is built and Compose started"),
]
SERVICES = yaml.safe_load(FILE.read_text())["services"]
CONNECT = """
import socket, sys
for place in sys.argv[1:]:
    try:
        socket.create_connection(place.split(":"), timeout=2).close()
        print(place)
    except OSError:
        pass
"""


class Stack(NamedTuple):
    """What was brought up, and the key that was made before."""

    here: Host
    compose: Callable[..., str]
    key: str

    def facts(self, service: str) -> dict[str, Any]:
        return dict(json.loads(self.here.docker("inspect", self.compose("ps", "-q", service)))[0])

    def addresses(self, service: str) -> list[str]:
        return [each["IPAddress"] for each in self.facts(service)["NetworkSettings"]["Networks"].values()]

    def run(self, code: str) -> dict[str, Any]:
        said = self.here.ask("/api/sandbox/execute", self.key, language="python", code=code)
        return dict(json.loads(said))


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """As the file's first lines say: build, a key, up."""
    program, here = compose(), host()
    file = program.file(here.context / "deploy")
    real = {"services": {"engine-proxy": {"volumes": [f"{here.socket}:/var/run/docker.sock"]}}}
    (file.parent / "override.yml").write_text(json.dumps(real))
    import_packages(here, SERVICES["redis"]["image"], "redis-server", variant="extract")
    env = {
        "DOCKER_HOST": f"unix://{here.socket}", "DOCKER_GID": str(os.stat(here.socket).st_gid), "BELLJAR_IMAGE": IMAGE,
        "SERVICE_SECCOMP_PROFILE": str(PROFILE_PATH), "DOCKER_BUILDKIT": "0", "COMPOSE_DOCKER_CLI_BUILD": "0",
    }  # fmt: skip

    def call(*words: str, check: bool = True) -> str:
        return program.call(file, *words, check=check, **env).stdout.strip()

    try:
        call("build", "--build-arg", f"BASE={IMAGE}")
        words = ("run", "--rm", "belljar", "keys", "create", "me", "--scope", "run", "--scope", "read")
        key = call(*words).split()[-1]
        call("up", "-d")
        assert eventually(lambda: "alive" in here.ask("/healthz"), 60), call("logs", "belljar", check=False)
        yield Stack(here, call, key)
    finally:
        call("down", "-v", "-t", "5", check=False)
        here.docker("rmi", "-f", SERVICES["redis"]["image"], check=False)


def test_a_snippet_runs_in_a_container_of_the_engine_which_is_asked_through_the_proxy(stack: Stack) -> None:
    began = f"{time.time() - 1:.3f}"
    result = stack.run("print(6 * 7)")
    assert (result["stdout"], result["backend"]) == ("42\n", "docker"), stack.compose("logs", "engine-proxy")
    events = ("events", "--since", began, "--until", f"{time.time() + 1:.3f}", "--filter", f"label={LABEL}=1")
    made = stack.here.docker(*events, "--filter", "event=start", "--format", "{{.Actor.Attributes.name}}")
    assert result["id"] in made
    assert "docker.sock" not in str(stack.facts("belljar")["Mounts"])


def test_without_the_key_nobody_is_answered(stack: Stack) -> None:
    said = json.loads(stack.here.ask("/api/sandbox/execute", "", language="python", code="print(1)"))
    assert said["status"] == 401


def test_it_is_ready_and_the_lines_of_a_run_pass_through_redis(stack: Stack) -> None:
    def ready() -> dict[str, Any]:
        return dict(json.loads(stack.here.ask("/readyz")))

    assert eventually(lambda: set(ready()["parts"].values()) == {"ok"}, 30), ready()
    assert ready()["ready"] is True

    def published() -> int:
        said = stack.compose("exec", "-T", "redis", "redis-cli", "info", "commandstats")
        [*_, counted] = ["0", *(line for line in said.splitlines() if line.startswith("cmdstat_publish:"))]
        return int(counted.partition("calls=")[2].partition(",")[0] or 0)

    before = published()
    assert stack.run("for n in range(3): print(n)")["stdout"] == "0\n1\n2\n"
    assert eventually(lambda: published() > before, 15)
    assert "sandbox_bus_up 1.0" in stack.here.ask("/metrics", stack.key)


def test_a_guest_reaches_neither_redis_nor_the_service_whatever_its_network(stack: Stack) -> None:
    doors = [f"{address}:6379" for address in stack.addresses("redis")]
    doors += [f"{address}:8080" for address in stack.addresses("belljar")]
    mine = stack.compose("exec", "-T", "belljar", "python3", "-S", "-c", CONNECT, *doors)
    assert mine.split() == doors  # else silence would prove nothing
    guest = stack.run(f"import sys; sys.argv[1:] = {doors}\n{CONNECT}")
    assert (guest["status"], guest["stdout"]) == ("success", "")
    [gateway] = [each["Gateway"] for each in stack.facts("sandbox-network")["NetworkSettings"]["Networks"].values()]
    assert gateway.startswith("172.28.")
    doors += [f"{gateway}:8080", f"{gateway}:6379", f"{stack.addresses('sandbox-network')[0]}:8080"]
    networked = ("run", "--rm", "--network", "belljar-sandbox", IMAGE, "python3", "-S", "-c", CONNECT)
    assert stack.here.docker(*networked, *doors) == ""


def test_the_engine_sees_no_folder_of_the_service_so_hosts_are_refused_at_once_and_folders_copied(stack: Stack) -> None:
    refused = json.loads(
        stack.here.ask("/api/sandbox/execute", stack.key, language="python", code="1", net=["example.org"])
    )
    assert (refused["status"], refused["kind"]) == (403, "policy_denied"), refused
    inside = ("exec", "-T", "belljar", "sh", "-c")
    said = stack.compose(*inside, "python3 -m belljar doctor --json || true")
    [docker] = [each for each in json.loads(said)["backends"] if each["backend"] == "docker"]
    assert any("outside of the container" in note for note in docker["notes"])
    folder = "/var/lib/belljar/project"
    grant = f"mkdir {folder} && echo shown >{folder}/a.txt && python3 -m belljar exec -w {folder} -- cat a.txt"
    assert stack.compose(*inside, grant) == "shown"


def test_a_project_below_the_granted_folder_is_seen_read_only_by_the_service(stack: Stack) -> None:
    folder = stack.here.context / "deploy" / "projects" / "app"
    folder.mkdir()
    (folder / "a.txt").write_text("shown")
    inside = ("exec", "-T", "belljar", "sh", "-c")
    assert stack.compose(*inside, "cat /projects/app/a.txt; touch /projects/x 2>/dev/null || echo ' read-only'") == (
        "shown read-only"
    )
    env = stack.facts("belljar")["Config"]["Env"]
    assert {"SANDBOX_NETWORK=belljar-sandbox", "MAX_CONTAINERS=10", "BELLJAR_PROJECTS=/projects"} <= set(env)
    assert any(word.startswith("seccomp=") for word in stack.facts("belljar")["HostConfig"]["SecurityOpt"])


@pytest.mark.parametrize("name", SERVICES)
def test_what_was_started_has_its_walls_by_the_kernels_own_word(stack: Stack, name: str) -> None:
    facts = stack.facts(name)
    pid = facts["State"]["Pid"]
    said = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    assert {said[each] for each in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (said["NoNewPrivs"], said["Seccomp"]) == ("1", "2")
    assert "0" not in said["Uid"].split() + said["Gid"].split() + said["Groups"].split()
    root = next(line for line in Path(f"/proc/{pid}/mounts").read_text().splitlines() if line.split()[1] == "/")
    assert root.split()[3].startswith("ro,")
    limits = facts["HostConfig"]
    assert all(limits[each] > 0 for each in ("Memory", "PidsLimit", "NanoCpus"))


def test_a_stop_is_an_orderly_end_and_a_start_finds_the_key_again(stack: Stack) -> None:
    stack.compose("stop", "belljar")
    name = stack.compose("ps", "-a", "-q", "belljar")
    assert stack.here.docker("inspect", "-f", "{{.State.ExitCode}}", name) == "0"
    stack.compose("up", "-d")
    assert eventually(lambda: "alive" in stack.here.ask("/healthz"), 60)
    assert stack.run("print(1)")["stdout"] == "1\n"


def test_taken_down_nothing_of_it_is_left(stack: Stack) -> None:
    stack.compose("down", "-v", "-t", "45")
    assert stack.here.docker("ps", "-aq") == ""
    assert stack.here.docker("volume", "ls", "-q") == ""
    networks = stack.here.docker("network", "ls", "--format", "{{.Name}}").split()
    assert sorted(networks) == ["bridge", "host", "none"]
    assert stack.here.shell("ip", "-br", "link", "show", "type", "veth") == ""
