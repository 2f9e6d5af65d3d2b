"""The seccomp profile in real containers: all that it forbids is refused, and ordinary work goes on unharmed."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from belljar.core.result import Result
from belljar.engine.engine import Engine
from belljar.host.seccomp.guest_profile import PROFILE_PATH
from engines import FLAVOURS, IMAGE, PODMAN_AGAIN, engines, run
from image_engine import TOOLCHAINS, ImageEngine, base_for

pyseccomp = pytest.importorskip("pyseccomp", reason="NO call was tried: apt install libseccomp2, make setup")
pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.containers]

PROFILE = json.loads(PROFILE_PATH.read_text())
# What every profile has to stop, by the project's own demands.
LEAST = {
    "mount", "umount2", "pivot_root", "fsopen", "fsmount", "fsconfig", "fspick", "move_mount", "open_tree",
    "mount_setattr", "ptrace", "process_vm_readv", "process_vm_writev", "add_key", "request_key", "keyctl", "bpf",
    "perf_event_open", "kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "userfaultfd",
    "io_uring_setup", "io_uring_enter", "io_uring_register", "unshare", "setns",
}  # fmt: skip
NAMESPACES = {f"CLONE_NEW{name}": bit for name, bit in
              (("NS", 1 << 17), ("CGROUP", 1 << 25), ("UTS", 1 << 26), ("IPC", 1 << 27), ("USER", 1 << 28),
               ("PID", 1 << 29), ("NET", 1 << 30))}  # fmt: skip
CREATING = (os.O_CREAT, os.O_TMPFILE)
NODES = [kind | 0o600 for kind in (stat.S_IFBLK, stat.S_IFCHR)]
NODES += [kind | bit | 0o755 for kind in (stat.S_IFREG, stat.S_IFIFO) for bit in (stat.S_ISUID, stat.S_ISGID)]
# Where the profile looks at arguments: what to try, of which it must refuse the rest.
ASKED: dict[str, list[tuple[int, ...]]] = {
    "clone": [(bit | 17, 0, 0, 0, 0) for bit in NAMESPACES.values()],
    "chmod": [(-1, 0o4755), (-1, 0o2755)],
    "fchmod": [(-1, 0o4755), (-1, 0o2755)],
    "fchmodat": [(-1, -1, 0o4755), (-1, -1, 0o2755)],
    "creat": [(-1, 0o4755), (-1, 0o2755)],
    "open": [(-1, flags, mode) for flags in CREATING for mode in (0o4755, 0o2755)],
    "openat": [(-1, -1, flags, mode) for flags in CREATING for mode in (0o4755, 0o2755)],
    "mknod": [(-1, kind, 0x800) for kind in NODES],
    "mknodat": [(-1, -1, kind, 0x800) for kind in NODES],
    "socket": [(family, kind, 0) for family in range(46) for kind in (1, 2, 3)] + [(16, 3, n) for n in range(1, 22)],
    "personality": [(0x40000,), (0x400000,), (4,)],
}
TRY = """
import ctypes, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
said = []
for number, args in json.load(sys.stdin):
    ctypes.set_errno(0)
    value = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(argument) for argument in args])
    if value == 0 and number == CLONE:
        os._exit(0)  # a child of a clone that was not refused
    said.append(ctypes.get_errno() if value == -1 else 0)
print(json.dumps(said))
"""
NOTHING = (-1,) * 6  # no descriptor, no address, no flag: a call that is let through does no harm


def matches(rule: dict[str, Any], args: tuple[int, ...]) -> bool:
    for condition in rule.get("args", ()):
        given, value = args[condition["index"]] & (2**64 - 1), condition["value"]
        if condition["op"] == "SCMP_CMP_MASKED_EQ":
            given, value = given & condition["value"], condition["valueTwo"]
        if given != value:
            return False
    return True


def rules(name: str, args: tuple[int, ...]) -> list[dict[str, Any]]:
    return [rule for rule in PROFILE["syscalls"] if name in rule["names"] and matches(rule, args)]


def answer(name: str, args: tuple[int, ...]) -> int:
    """The error that the profile promises; 0 if it lets the call through."""
    for rule in rules(name, args):
        return 0 if rule["action"] == "SCMP_ACT_ALLOW" else int(rule["errnoRet"])
    return int(PROFILE["defaultErrnoRet"])


def numbered() -> Iterator[tuple[str, int]]:
    """Every call of this machine that libseccomp has a name for."""
    for number in range(512):
        try:
            yield pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, number).decode(), number
        except ValueError:
            continue


def forbidden() -> dict[tuple[str, tuple[int, ...]], tuple[int, int]]:
    """By name and arguments: the call's number and the error that is promised."""
    tries = [(name, number, args) for name, number in numbered() for args in ASKED.get(name, [NOTHING])]
    return {(name, args): (number, promised) for name, number, args in tries if (promised := answer(name, args)) != 0}


def code_of(name: str) -> str:
    return TRY.replace("CLONE", str(pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)))


def asked(calls: dict[tuple[str, tuple[int, ...]], tuple[int, int]]) -> str:
    return json.dumps([(number, args) for (_, args), (number, _) in calls.items()])


def test_the_profile_stops_at_least_what_the_project_promises() -> None:
    calls = forbidden()
    assert {name for name, args in calls if args == NOTHING} >= LEAST
    refused = {args[0] for name, args in calls if name == "clone"}
    assert refused == {bit | 17 for bit in NAMESPACES.values()}
    assert answer("clone3", NOTHING) == errno.ENOSYS, "or else C libraries would start no thread"
    assert {name for name, _ in calls} >= set(ASKED), "of each call whose arguments count, something is tried"


def expected(flavour: str, version: str, call: tuple[str, tuple[int, ...]], promised: int) -> set[int]:
    if flavour == "gvisor":  # which of the two it says is its own choice
        return {errno.EPERM, errno.ENOSYS} | ({errno.EFAULT, errno.EINVAL} if call[0] == "clone3" else set())
    # Docker before 23 does not know of `defaultErrnoRet`, and says EPERM of what the profile does not name.
    old = flavour == "docker" and int(version.split()[1].partition(".")[0]) < 23
    return {promised, errno.EPERM} if old and not rules(*call) else {promised}


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_every_call_that_the_profile_forbids_is_refused(flavour: str) -> None:
    engine, calls = engines().engine(flavour), forbidden()
    version = (await engine.capabilities(engine.settings.backend)).version
    result = await run(engine, code_of("clone"), stdin=asked(calls), timeout=60)
    assert result.status == "success", result.stderr
    said = zip(calls.items(), json.loads(result.stdout), strict=True)
    wrong = {
        call: code for (call, (_, promised)), code in said if code not in expected(flavour, version, call, promised)
    }
    assert wrong == {}


def test_it_is_the_filter_that_refuses_and_not_the_kernel_behind_it(tmp_path: Path) -> None:
    """The same calls by the same nobody in a container without the profile: most of them get past the door."""
    found = engines()
    found.engine("docker")  # or a loud skip
    calls = {call: facts for call, facts in forbidden().items() if facts[1] == errno.EPERM}
    line = ["docker", "-H", f"unix://{found.sockets['docker']}", "run", "--rm", "-i", "--network=none",
            "--user=60999", "--cap-drop=ALL", "--security-opt=seccomp=unconfined", "--security-opt=no-new-privileges",
            IMAGE, "python3", "-c", code_of("clone")]  # fmt: skip
    done = subprocess.run(line, input=asked(calls), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    said = dict(zip(calls, json.loads(done.stdout), strict=True))
    let_in = {name for (name, _), code in said.items() if code not in (errno.EPERM, errno.ENOSYS)}
    assert let_in >= {"keyctl", "add_key", "ptrace", "unshare", "setns", "process_vm_readv", "kcmp", "userfaultfd"}


# --- unharmed ---


def wheel() -> bytes:
    """A package made by hand: one module, and what pip wants to know of it."""
    about = "tiny-1.0.dist-info"
    contents = {
        "tiny.py": "VALUE = 42\n",
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in (*contents, f"{about}/RECORD"))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, text in (*contents.items(), (f"{about}/RECORD", record)):
            archive.writestr(name, text)
    return packed.getvalue()


NUMPY = """
import numpy
a = numpy.random.default_rng(1).random((300, 300))
numpy.save("/tmp/a.npy", a)
mapped = numpy.load("/tmp/a.npy", mmap_mode="r")
print(numpy.allclose(a @ numpy.linalg.inv(a), numpy.eye(300)), mapped.shape)
"""
PYTEST = """
import subprocess, sys, threading, tempfile, multiprocessing

def test_a_folder_of_its_own(tmp_path):
    (tmp_path / "a").write_text("x")
    assert (tmp_path / "a").read_text() == "x"

def test_processes_and_threads():
    assert subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True).stdout == "42\\n"
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]

def test_output_is_captured(capfd):
    subprocess.run(["echo", "x"])
    assert capfd.readouterr().out == "x\\n"
"""
NODE = """
const { Worker } = require('worker_threads');
const { execFileSync } = require('child_process');
require('fs').writeFileSync('/tmp/a', 'x');
const worker = new Worker("require('worker_threads').parentPort.postMessage(6 * 7)", { eval: true });
worker.on('message', (value) => console.log(value, execFileSync('echo', ['child']).toString().trim()));
"""
PIP = "python3 -m pip install -q --no-index --no-cache-dir --disable-pip-version-check --find-links . --target /tmp/lib"
WORK: dict[str, dict[str, Any]] = {
    "numpy": {"code": NUMPY},
    "pip": {
        "command": ["sh", "-c", f"{PIP} tiny && PYTHONPATH=/tmp/lib python3 -c 'import tiny; print(tiny.VALUE)'"],
        "files": {"tiny-1.0-py3-none-any.whl": wheel()},
    },
    "pytest": {
        "command": ["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_work.py"],
        "files": {"test_work.py": PYTEST},
    },
    "node": {"command": ["node", "-e", NODE]},
}
SAID = {"numpy": "True (300, 300)\n", "pip": "42\n", "pytest": "3 passed", "node": "42 child\n"}


async def work(engine: Engine, **options: Any) -> Result:
    code = options.pop("code", None)
    return await run(engine, code, memory="1G", timeout=120, pids=256, **options)


@pytest.mark.parametrize("flavour", ["docker", "gvisor", PODMAN_AGAIN])
@pytest.mark.parametrize("what", WORK)
async def test_ordinary_work_runs_unharmed_under_the_profile(what: str, flavour: str) -> None:
    result = await work(engines().engine(flavour), **WORK[what])
    assert (result.status, result.exit_code) == ("success", 0), result.stderr + result.stdout
    assert SAID[what] in result.stdout


COMPILERS = {
    "go": (
        "main.go",
        'package main\n\nimport "fmt"\n\nfunc main() {\n\tanswers := make(chan int)\n'
        "\tgo func() { answers <- 6 * 7 }()\n\tfmt.Println(<-answers)\n}\n",
        "export GOCACHE=/tmp/cache GOFLAGS=-mod=mod GO111MODULE=off; go build -o /tmp/made main.go && /tmp/made",
    ),
    "rust": (
        "main.rs",
        'fn main() { println!("{}", std::thread::spawn(|| 6 * 7).join().unwrap()); }\n',
        "rustc -o /tmp/made main.rs && /tmp/made",
    ),
}


@pytest.mark.exhaustive("an archive with compilers is loaded into each engine; Python and Node run in the tests above")
@pytest.mark.parametrize("flavour", ["docker", "gvisor"])
@pytest.mark.parametrize("language", COMPILERS)
async def test_compilers_run_unharmed_under_the_profile(language: str, flavour: str, tmp_path: Path) -> None:
    engine = engines().engine(flavour)
    base_for(language, ImageEngine(engines().sockets["docker"], tmp_path))
    name, source, line = COMPILERS[language]
    result = await work(engine, command=["sh", "-c", line], files={name: source}, image=TOOLCHAINS)
    assert (result.status, result.stdout) == ("success", "42\n"), result.stderr
