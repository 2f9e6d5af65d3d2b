"""deploy/kubernetes/deployment.yaml without Kubernetes: its containers on a Docker, with all that the manifest says of
their user, walls, limits, volumes and variables. Docker's default seccomp profile is what `RuntimeDefault` means there.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from belljar.service.auth.access import new_key
from service_image import ROOT, SERVICE, Host, host, lay_in
from witness import eventually

pytestmark = [pytest.mark.engine, pytest.mark.containers, pytest.mark.exhaustive("the image of the service is built")]
POD = yaml.safe_load((ROOT / "deploy/kubernetes/deployment.yaml").read_text())["spec"]["template"]["spec"]
NAME = "bj-pod"
FIRST = new_key("first", frozenset(("run",)))[1]  # as `belljar keys generate` prints it


class Pod(NamedTuple):
    here: Host
    key: str

    def run(self, code: str, language: str = "python") -> dict[str, Any]:
        said = self.here.ask_inside(NAME, "/api/sandbox/execute", self.key, language=language, code=code)
        return dict(json.loads(said))


def words(container: dict[str, Any], folders: Path) -> list[str]:
    """The same for `docker run`. It has no network at all, where the pod's has a policy."""
    who, walls, most = POD["securityContext"], container["securityContext"], container["resources"]["limits"]
    assert {who["seccompProfile"]["type"], walls["seccompProfile"]["type"]} == {"RuntimeDefault"}
    line = ["--user", f"{who['runAsUser']}:{who['runAsGroup']}", "--group-add", str(who["fsGroup"])]
    line += ["--read-only"] if walls["readOnlyRootFilesystem"] else []
    line += [] if walls["allowPrivilegeEscalation"] else ["--security-opt", "no-new-privileges"]
    line += [word for name in walls["capabilities"]["drop"] for word in ("--cap-drop", name)]
    memory = most["memory"].replace("Gi", "g")
    line += ["--network", "none", "--memory", memory, "--memory-swap", memory, "--cpus", most["cpu"]]
    for mount in container["volumeMounts"]:
        line += ["-v", f"{folders / mount['name']}:{mount['mountPath']}{':ro' if mount.get('readOnly') else ''}"]
    return line + [word for item in container["env"] for word in ("-e", f"{item['name']}={item['value']}")]


def make_volumes(folders: Path) -> None:
    """As a kubelet hands them out: root's, and open to the group that the pod names."""
    folders.chmod(0o711)
    for volume in POD["volumes"]:
        path = folders / volume["name"]
        path.mkdir()
        os.chown(path, 0, POD["securityContext"]["fsGroup"])
        path.chmod(0o2777 if "emptyDir" in volume else 0o2775)
        if "secret" in volume:
            (path / "key").write_text(f"{FIRST}\n")
            os.chown(path / "key", 0, POD["securityContext"]["fsGroup"])
            (path / "key").chmod(volume["secret"]["defaultMode"])


@pytest.fixture(scope="module")
def pod() -> Iterator[Pod]:
    here, [prepare], [served] = host(), POD["initContainers"], POD["containers"]
    with tempfile.TemporaryDirectory(prefix="bj-pod-") as name:
        folders = Path(name)
        make_volumes(folders)
        lay_in(folders / "records" / "cache", POD["securityContext"]["runAsUser"], POD["securityContext"]["runAsGroup"])
        here.docker("run", "--rm", *words(prepare, folders), SERVICE, *prepare["args"])
        try:
            here.docker("run", "-d", "--name", NAME, *words(served, folders), SERVICE, *served["args"])
            assert eventually(lambda: "alive" in here.ask_inside(NAME, "/healthz"), 60), here.docker("logs", NAME)
            yield Pod(here, FIRST)
        finally:
            here.docker("rm", "-f", "-v", NAME, check=False)


def test_prepared_it_is_ready_at_once_and_runs_python_and_javascript(pod: Pod) -> None:
    ready = json.loads(pod.here.ask_inside(NAME, "/readyz"))
    assert (ready["ready"], ready["backend"]) == (True, "wasm"), ready
    assert pod.run("print(1)")["stdout"] == "1\n"
    assert pod.run("console.log(2)", "javascript")["stdout"] == "2\n"
    assert "setting up" not in pod.here.docker("logs", NAME)


def test_it_says_that_its_wall_is_webassembly_alone(pod: Pod) -> None:
    held = pod.run("print(1)")["guarantees"]
    assert (held["isolation"], held["network"]) == ("wasm", "none")
    assert any("plain process" in text for text in held["weaker"])


def test_a_guest_sees_nothing_of_the_pod(pod: Pod) -> None:
    paths = ["/etc/passwd", "/proc/self/environ", "/opt/belljar", "/var/lib/belljar/records.db", "/tmp/../etc/passwd"]
    look = f"import os\nfor path in {paths}:\n    print(os.path.exists(path))"
    assert pod.run(look)["stdout"].split() == ["False"] * len(paths)
    for path in ("/etc/passwd", "/opt/belljar", "/var/lib/belljar/records.db"):  # which are there
        pod.here.docker("exec", NAME, "ls", "-d", path)


def test_the_kernel_holds_the_pods_walls(pod: Pod) -> None:
    pid = pod.here.docker("inspect", "-f", "{{.State.Pid}}", NAME)
    said = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    assert (said["CapEff"], said["CapBnd"], said["NoNewPrivs"], said["Seccomp"]) == ("0" * 16, "0" * 16, "1", "2")
