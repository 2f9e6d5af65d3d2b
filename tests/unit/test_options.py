"""The options that users type are typed: they are those of the models, and type checkers find a wrong one."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from pydantic import TypeAdapter

import belljar
from belljar.core import errors, options
from belljar.core.options import CommandOptions, LivingOptions, RunOptions, SandboxOptions, SessionOptions, request
from belljar.core.request import Life, Limits, RunRequest

GOOD = """import belljar

def work() -> str:
    result = belljar.run("print(1)", timeout=5, memory="256M", net=["example.org"], isolation="kernel", on_stdout=print)
    with belljar.Sandbox(image="python:3.13", cpus=0.5) as box, belljar.Session(packages="/venv") as session:
        box.run("print(2)", stdin="in", collect=["*.csv"])
        session.run(path="notebook.py", timeout=3)
    with belljar.Client("http://127.0.0.1:8080") as client, client.session(memory=2**28) as remote:
        remote.run("1")
    with belljar.stream("print(3)", language="python") as run:
        texts = [event.text for event in run]
    for backend in belljar.list_backends():
        print(backend.available)
    return result.stdout + "".join(texts)

async def more() -> belljar.Result:
    async with belljar.AsyncSandbox(memory="1G") as box:
        await box.exec(["ls"], timeout=1)
    session = await belljar.AsyncSession.open(backend="wasm")
    branch = await session.fork()
    await branch.close()
    async with belljar.astream("1") as run:
        async for event in run:
            print(event.kind)
    return await belljar.arun(path="main.py")"""
WRONG = {
    'belljar.run("1", tiemout=5)': "tiemout",
    'belljar.run("1", timeout="5")': "timeout",
    'belljar.run("1", isolation="strong")': "isolation",
    "belljar.Sandbox(memroy=1)": "memroy",
    "belljar.Session(stdin=b'')": "stdin",
    'belljar.Sandbox.open(imagine="x")': "imagine",
    'belljar.Client("http://x").run("1", langauge="go")': "langauge",
    'belljar.Client("http://x").session(packages="/venv")': "packages",
    'belljar.run_in_container(["ls"], imgae="x")': "imgae",
    'belljar.run("1").reason': "reason",
}


def names(kind: Any) -> set[str]:
    return set(get_type_hints(kind))


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_the_options_of_a_run_are_the_fields_of_the_models() -> None:
    own = {"net", "write", "write_git"}  # short for fields of `egress` and `workspace`
    fields = RunRequest.model_fields.keys() | Limits.model_fields.keys() | own
    assert names(RunOptions) == fields - {"code", "backend"} - {"living"}, "two are parameters, a run does not live on"
    assert names(LivingOptions) | {"idle"} == {"living", *Life.model_fields}, "a server's sandboxes have one anyway"
    for function in (belljar.run, belljar.arun, belljar.stream, belljar.Client.run, belljar.AsyncClient.run):
        assert {"code", "backend", "path", "options"} <= parameters(function)
    assert names(SessionOptions) < names(SandboxOptions) - names(LivingOptions) - {"idle"} < names(RunOptions)
    assert names(LivingOptions) < names(SandboxOptions)
    assert names(CommandOptions) < names(RunOptions)


def test_the_type_of_each_option_takes_what_its_model_has_as_default() -> None:
    hints = get_type_hints(RunOptions)
    for model in (RunRequest, Limits):
        for name, field in model.model_fields.items():
            if name in hints:
                adapter: TypeAdapter[Any] = TypeAdapter(hints[name], config={"arbitrary_types_allowed": True})
                adapter.validate_python(field.get_default(call_default_factory=True))


def test_every_option_has_a_sentence_of_its_own() -> None:
    source = inspect.getsource(options)
    for name in names(RunOptions) | names(SandboxOptions):
        after = source.partition(f"    {name}: ")[2].partition("\n")[2]
        assert after.lstrip().startswith('"""'), f"{name} is not explained"


def test_an_option_that_is_none_counts_as_not_given() -> None:
    given = dict.fromkeys(names(RunOptions))
    assert request("1", **given) == request("1")  # type: ignore[arg-type]


@pytest.mark.parametrize("option", sorted(names(RunOptions) - {"files", "env", "limits"}))
def test_a_value_of_the_wrong_kind_is_refused_by_the_name_of_its_option(option: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=f"{option}: "):
        request("1", **{"workspace": "/tmp", option: object()})  # type: ignore[arg-type]


@pytest.mark.parametrize("names", [("Sandbox",), ("Session",), ("Client",), ("RemoteSession",), ("RemoteSandbox",)])
def test_a_blocking_class_has_what_its_async_twin_has_with_the_same_parameters(names: tuple[str]) -> None:
    blocking, twin = getattr(belljar, names[0]), getattr(belljar, f"Async{names[0]}")
    public = {name for name in dir(blocking) if not name.startswith("_")}
    assert public == {name for name in dir(twin) if not name.startswith("_")} - {"lease", "another", "execute"}
    for name in public:
        if callable(getattr(blocking, name)):
            assert parameters(getattr(blocking, name)) == parameters(getattr(twin, name)), name


@pytest.mark.parametrize("name", ["Process", "Files", "BoxInterpreter"])
def test_what_a_living_sandbox_gives_to_blocking_code_can_do_what_its_async_twin_can(name: str) -> None:
    blocking, twin = getattr(belljar, name), getattr(belljar, f"Async{name}")
    methods = {one for one in dir(blocking) if not one.startswith("_") and callable(getattr(blocking, one))}
    theirs = {one for one in dir(twin) if not one.startswith("_") and callable(getattr(twin, one))}
    inner = {"begin", "forgo", "found_again", "gone", "join", "mark", "open", "stop"}  # what the sandbox calls
    assert methods - {"open"} == theirs - inner
    for one in methods & theirs:
        assert parameters(getattr(blocking, one)) == parameters(getattr(twin, one)), one


@pytest.mark.parametrize("name", ["run", "stream", "list_backends", "supported_languages", "detect", "build_image"])
def test_a_blocking_function_has_an_async_twin_with_the_same_parameters(name: str) -> None:
    assert parameters(getattr(belljar, name)) == parameters(getattr(belljar, f"a{name}"))


def test_every_public_name_is_listed_once_and_can_be_had() -> None:
    assert sorted(belljar.__all__) == sorted({*belljar._PUBLIC, "__version__"})
    source = Path(belljar.__file__).read_text().partition("if TYPE_CHECKING:")[2]
    for name in belljar._PUBLIC:
        assert getattr(belljar, name) is not None
        assert f"from belljar.{belljar._PUBLIC[name]} import {name} as {name}\n" in source, "type checkers see it too"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        belljar.nothing  # noqa: B018


# --- in the user's program ---


def program(folder: Path, *lines: str) -> Path:
    folder.joinpath("program.py").write_text("\n".join((GOOD, *lines)) + "\n")
    return folder


def environment() -> dict[str, str]:
    beside = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}", "MYPYPATH": ""}


def mypy(folder: Path) -> str:
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        "--cache-dir",
        str(folder / "c"),
        "program.py",
    ]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False).stdout


def pyright(folder: Path) -> dict[int, str]:
    """What pyright has against each line."""
    command = [sys.executable, "-m", "basedpyright", "--level", "error", "--outputjson", "program.py"]
    folder.joinpath("pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {one["range"]["start"]["line"] + 1: one["message"] for one in found}


@pytest.mark.timeout(300)
def test_mypy_finds_wrong_options_in_a_users_program_and_nothing_else(tmp_path: Path) -> None:
    told = mypy(program(tmp_path, *WRONG))
    first = len(GOOD.splitlines()) + 1
    lines = {int(line.split(":")[1]): line for line in told.splitlines() if ": error:" in line}
    assert sorted(lines) == list(range(first, first + len(WRONG))), told
    for number, word in enumerate(WRONG.values(), first):
        assert word in lines[number]


@pytest.mark.timeout(300)
def test_pyright_finds_wrong_options_in_a_users_program_and_nothing_else(tmp_path: Path) -> None:
    found = pyright(program(tmp_path, *WRONG))
    first = len(GOOD.splitlines()) + 1
    assert sorted(found) == list(range(first, first + len(WRONG))), found
    for number, word in enumerate(WRONG.values(), first):
        assert word in found[number]


@pytest.mark.timeout(300)
def test_the_type_of_everything_that_can_be_imported_is_known_to_pyright(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "basedpyright", "--verifytypes", "belljar", "--ignoreexternal", "--outputjson"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    symbols = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    assert len(symbols) > 1000
    unclear = [one["name"] for one in symbols if not one["isTypeKnown"] or one["isTypeAmbiguous"]]
    assert unclear == []
