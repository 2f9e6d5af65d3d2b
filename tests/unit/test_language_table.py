"""Which languages there are: the table, and the administrators' file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from belljar.core import errors
from belljar.core.languages import BUILTIN, Languages
from belljar.engine import language_file

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
        ({"ruby": RUBY | {"seccomp_profile": "ruby.json"}}, r"ruby\.seccomp_profile: .*/ruby\.json: .*No such file"),
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
