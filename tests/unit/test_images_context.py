"""Dockerfiles, .dockerignore, what is sent to a build, and what a build says: all of it hostile."""

from __future__ import annotations

import io
import os
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from belljar.core import errors
from belljar.images import context, dockerfile
from belljar.images.build_log import BuildLog
from belljar.images.context import Ignore

D1 = f"sha256:{'1' * 64}"


def test_the_images_a_dockerfile_takes_from_are_found_and_its_own_stages_are_not() -> None:
    text = """
        # FROM comment:1
        ARG BASE=python:3.12
        FROM	${BASE} AS first
        FROM node:20 \\

            # a comment and an empty line do not end it
            as Second
        COPY --from=first /a /b
        COPY --from=0 /a /b
        COPY --chown=1 --from=tools:9 /a /b
        FROM second
        FROM scratch
        COPY --from=other/tools:9 /a /b
    """
    assert dockerfile.bases(text) == ("python:3.12", "node:20", "tools:9", "other/tools:9")
    assert dockerfile.bases(text, {"BASE": D1})[0] == D1


@pytest.mark.parametrize(
    "text", ["ARG X\nFROM $X", "FROM ${X:-a}", "FROM", "# escape=`\nFROM a", "FROM --platform=x a"]
)
def test_a_dockerfile_whose_base_cannot_be_told_is_refused(text: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="Dockerfile"):
        dockerfile.bases(text)


@pytest.mark.parametrize(
    "line",
    ["ADD http://x/a /", "add\tHTTPS://x /", "ADD \\\n\n # c\n  git://x /", 'ADD ["http://x", "/"]', "ADD $WHERE /",
     "ONBUILD ADD http://x /", "ADD git@x.example:y /"],
)  # fmt: skip
def test_a_build_without_network_has_no_other_way_to_fetch_either(line: str) -> None:
    with pytest.raises(errors.PolicyDenied, match="may fetch something"):
        dockerfile.check_sources(f"\ufeffFROM a\n{line}\n")
    dockerfile.check_sources("FROM a\nADD files.tar /\nRUN curl http://x\n# ADD http://x /\n")


@pytest.mark.parametrize("file", ["/etc/passwd", "../Dockerfile", "a/../../b", ".", "", "a\0b"])
def test_a_dockerfile_outside_the_context_is_refused(file: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="not in the context"):
        dockerfile.build_file(file)


@pytest.mark.parametrize(
    ("rules", "ignored", "kept"),
    [
        ("node_modules", ["node_modules", "node_modules/x/y"], ["src/node_modules", "node_modules2"]),
        ("**/node_modules", ["node_modules", "a/b/node_modules/c"], ["node_module"]),
        ("*.log\n!keep.log", ["a.log"], ["keep.log", "sub/a.log"]),
        ("secrets/\n!secrets/public.txt", ["secrets/key"], ["secrets/public.txt"]),
        ("# comment\n\n/top", ["top"], ["sub/top"]),
        ("a[^b]c", ["axc"], ["abc"]),
        ("**.pyc", ["x.pyc", "deep/down/x.pyc"], ["x.py"]),
        (r"a\*b", ["a*b"], ["axb"]),
        ("*", ["a", "a/b"], []),
        ("a\n!a\na", ["a"], []),
        ("./x/../y", ["y"], ["x"]),
        (".\n!", [], ["a"]),
    ],
)  # fmt: skip
def test_dockerignore_means_what_docker_means_by_it(rules: str, ignored: list[str], kept: list[str]) -> None:
    found = Ignore(rules)
    assert [path for path in ignored + kept if found.ignores(path)] == ignored


def test_a_hostile_dockerignore_takes_neither_long_nor_much() -> None:
    began = time.monotonic()
    assert not Ignore("**/*a*a*a*a*a*a*a*a*b/**/**/**/c\n" * 50).ignores("/".join(["a" * 200] * 20))
    assert time.monotonic() - began < 10
    for text in ("a**b/c**d", "x\n" * 2001):
        with pytest.raises(errors.InvalidRequest):
            Ignore(text)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / "Dockerfile").write_text("FROM scratch\nCOPY . /\n")
    (folder / "src" / "main.py").write_text("print(1)\n")
    return folder


def packed(folder: Path, limit: int = 1 << 20, file: str = "Dockerfile") -> tuple[context.Packed, list[Any]]:
    out = io.BytesIO()
    found = context.pack(str(folder), file, out, limit=limit)
    out.seek(0)
    with tarfile.open(fileobj=out) as tar:
        return found, tar.getmembers()


def test_a_context_is_packed_without_what_is_ignored_and_without_owners_or_setuid(project: Path) -> None:
    (project / ".dockerignore").write_text("Dockerfile\n.env\nlogs\n!logs/keep\n")
    (project / ".env").write_text("SECRET=1")
    (project / "logs").mkdir()
    (project / "logs" / "keep").write_text("x")
    (project / "logs" / "drop").write_text("x")
    (project / "src" / "main.py").chmod(0o4755)
    (project / "src" / "link").symlink_to("main.py")
    os.mkfifo(project / "pipe")
    found, members = packed(project)
    names = [member.name for member in members]
    assert names == [".dockerignore", "Dockerfile", "logs", "logs/keep", "src", "src/link", "src/main.py"]
    assert {(member.uid, member.gid, member.mode & 0o7000) for member in members} == {(0, 0, 0)}
    assert found.left_out == ("pipe: neither a file nor a folder nor a link",)
    assert found.dockerfile.startswith("FROM scratch")


@pytest.mark.parametrize("target", ["/etc/passwd", "../../outside", "../..", "../../project/src/main.py"])
def test_a_link_out_of_the_context_is_refused_by_name_unless_it_is_ignored(project: Path, target: str) -> None:
    (project / "src" / "link").symlink_to(target)
    with pytest.raises(errors.PolicyDenied, match="src/link is a link out of the context"):
        packed(project)
    (project / ".dockerignore").write_text("src/link\n")
    assert "src/link" not in [member.name for member in packed(project)[1]]


def test_a_context_over_its_cap_is_refused_and_a_missing_dockerfile_or_folder_named(project: Path) -> None:
    (project / "big").write_bytes(b"x" * 5000)
    with pytest.raises(errors.PolicyDenied, match="more than"):
        packed(project, limit=4000)
    with pytest.raises(errors.InvalidRequest, match="no readable other"):
        packed(project, file="other")
    with pytest.raises(errors.InvalidRequest, match="is not a folder"):
        packed(project / "none")
    (project / "linked").symlink_to("Dockerfile")
    with pytest.raises(errors.InvalidRequest, match="no readable linked"):
        packed(project, file="linked")


def test_a_build_log_knows_its_step_and_the_last_lines_of_it() -> None:
    log = BuildLog()
    assert log.feed({"stream": "Step 1/2 : FROM a\n ---> 0123456789ab\nStep 2/2 : RUN x\n"})
    log.feed({"stream": "half"})
    log.feed({"stream": " a line\n\x1b[2Jmore\nStep 9/9 : forged\n"})
    log.feed({"aux": {"ID": D1}})
    for hostile in (None, [], {"stream": 1}, {"aux": "x"}, {"aux": {"ID": 1}}):
        assert log.feed(hostile) == ()
    assert (log.step, log.number, log.total, log.id) == ("Step 2/2 : RUN x", 2, 2, D1)
    assert log.last_lines == ("half a line", "\x1b[2Jmore", "Step 9/9 : forged")
    podman = BuildLog()
    podman.feed({"stream": "[1/2] STEP 1/2: FROM a\n--> 0123456789a\n[2/2] STEP 1/1: FROM b\n[2/2] STEP 7/7: forged\n"})
    assert (podman.step, podman.stages) == ("[2/2] STEP 1/1: FROM b", ["0123456789a"])
    log.feed({"stream": "y\n" * 1000 + "z" * 100_000})
    assert len(log.last_lines) <= 31 and max(map(len, log.last_lines)) <= 2000
