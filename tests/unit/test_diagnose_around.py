"""What to do about a failure depends on what the run had around it, and on what there is elsewhere."""

from __future__ import annotations

import pytest

from belljar.core.diagnose import Around, diagnose
from belljar.core.request import Egress, Limits
from belljar.core.result import ErrorType, Failure, Result, Status


def python(headline: str, around: Around, *before: str) -> Failure:
    trace = 'Traceback (most recent call last):\n  File "/workspace/main.py", line 1, in <module>\n    x\n'
    result = Result(status=Status.ERROR, exit_code=1, stderr="".join(f"{line}\n" for line in before) + trace + headline)
    return diagnose(result, language="python", limits=Limits(), processes=True, around=around)


def shell(said: str, code: int, egress: Egress | None = None) -> Failure:
    around = Around(egress=egress or Egress())
    result = Result(status=Status.ERROR, exit_code=code, stderr=said)
    return diagnose(result, language="bash", limits=Limits(), processes=True, around=around)


def ended(status: Status, around: Around, limits: Limits | None = None) -> str:
    result = Result(status=status, exit_code=124)
    return diagnose(
        result, language="python", limits=limits or Limits(), processes=not around.counts_fuel, around=around
    ).suggestion


def test_a_folder_that_was_granted_read_only_is_to_be_granted_for_writing() -> None:
    headline = "OSError: [Errno 30] Read-only file system: '/workspace/x'"
    assert "write=True" in python(headline, Around(read_only=True)).suggestion
    assert "only /workspace and /tmp" in python(headline, Around()).suggestion


@pytest.mark.parametrize("way", ["ask for backend=wasm", "run `belljar setup wasm` once and ask for backend=wasm"])
def test_a_package_that_the_wasm_runtime_has_is_to_be_had_there(way: str) -> None:
    around = Around(wasm=way, wasm_modules=frozenset({"numpy"}))
    numpy = python("ModuleNotFoundError: No module named 'numpy.linalg'", around)
    assert f"the wasm runtime has it: {way}, or grant" in numpy.suggestion
    assert "wasm" not in python("ModuleNotFoundError: No module named 'torch'", around).suggestion
    assert "wasm" not in python("ModuleNotFoundError: No module named 'numpy'", Around()).suggestion


def test_a_module_that_python_is_to_run_and_has_not_is_a_missing_package() -> None:
    failed = shell("/usr/bin/python3: No module named pytest\n", 1)
    assert failed.error_type is ErrorType.MISSING_PACKAGE and "pytest is not installed" in failed.suggestion


def test_a_loop_that_took_all_of_its_time_on_wasm_is_faster_on_native_and_cheaper_with_fuel() -> None:
    wasm = Around(counts_fuel=True)
    assert "with backend=native" in ended(Status.TIMEOUT, wasm)
    assert "fuel=400000000" in ended(Status.TIMEOUT, wasm) and "BELLJAR_DEFAULT_FUEL" in ended(Status.TIMEOUT, wasm)
    assert "fuel=" not in ended(Status.TIMEOUT, wasm, Limits(fuel=10**9)), "it has some already"
    assert "native" not in ended(Status.TIMEOUT, Around()) and "fuel" not in ended(Status.TIMEOUT, Around())


def test_where_disk_is_memory_the_advice_says_so() -> None:
    tmpfs = Around(disk_in_memory=True)
    for status in (Status.OOM_KILLED, Status.DISK_LIMIT):
        assert "disk is memory here" in ended(status, tmpfs)
        assert "disk is memory here" not in ended(status, Around())
    assert 'memory="<size>"' in ended(Status.DISK_LIMIT, tmpfs)


def test_a_guest_whose_files_took_the_memory_is_not_told_to_hold_less() -> None:
    full = Around(disk_in_memory=True, files=300 << 20, memory=512 << 20)
    said = ended(Status.OOM_KILLED, full)
    assert said.startswith("disk is memory here") and "take 300M of it" in said and "hold less" not in said
    assert "take 300M of it" in python("MemoryError", full).suggestion
    assert "hold less" in ended(Status.OOM_KILLED, full._replace(files=100 << 20))


PIP = "ERROR: Could not find a version that satisfies the requirement x (from versions: none)\n"


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (f"{PIP}ERROR: No matching distribution found for x\n", 1),
        (
            "ERROR: Could not install: Could not find a suitable TLS CA certificate bundle\n",
            1,
        ),
        ("npm error code EAI_AGAIN\nnpm error syscall getaddrinfo\nnpm error A complete log of this run is in x\n", 1),
        ("fatal: unable to access 'https://a.example/x.git/': Could not resolve host: a.example\n", 128),
        ("curl: (6) Could not resolve host: a.example\n", 6),
        ("wget: unable to resolve host address 'a.example'\n", 4),
    ],
)
def test_a_client_without_a_network_fails_of_that_and_the_remedy_is_the_list_of_hosts(said: str, code: int) -> None:
    failure = shell(said, code)
    assert failure.error_type is ErrorType.NETWORK_ERROR
    assert "there is no network in this sandbox" in failure.suggestion and "net=[...]" in failure.suggestion


def test_a_progress_bar_is_not_the_message() -> None:
    assert shell("  0 %\r 50 %\rcurl: (6) Could not resolve host: a.example\n", 6).message == (
        "exit code 6: curl: (6) Could not resolve host: a.example"
    )
    meter = "\r  0     0    0     0    0     0      0      0 --:--:-- --:--:-- --:--:--     0"  # and no new line
    assert shell(f"{meter}curl: (6) Could not resolve host: a.example\n", 6).message == (
        "exit code 6: curl: (6) Could not resolve host: a.example"
    )


def test_python_that_starts_such_a_client_and_checks_it_fails_of_the_same() -> None:
    headline = "subprocess.CalledProcessError: Command '['pip', 'install', 'x']' returned non-zero exit status 1."
    assert python(headline, Around(), PIP, "ERROR: No matching distribution found for x").error_type is (
        ErrorType.NETWORK_ERROR
    )
    assert python(headline, Around(), "ERROR: something else").error_type is ErrorType.RUNTIME_ERROR
