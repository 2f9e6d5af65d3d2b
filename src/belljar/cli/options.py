"""The options that several commands have, and how their values are read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from belljar.core import errors

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Backend = Annotated[str, typer.Option("--backend", "-b", help="auto, or a backend's name.")]
Isolation = Annotated[
    str | None, typer.Option("--isolation", help="The least isolation to accept: namespace or kernel.")
]
Timeout = Annotated[float | None, typer.Option("--timeout", "-t", help="Seconds of wall clock.")]
Grace = Annotated[float | None, typer.Option("--grace", help="Seconds from SIGTERM to SIGKILL at a timeout or Ctrl-C.")]
Memory = Annotated[str | None, typer.Option("--memory", "-m", help='Such as "512M" or "4G".')]
Cpus = Annotated[float | None, typer.Option("--cpus")]
Pids = Annotated[int | None, typer.Option("--pids", help="The most processes and threads at once.")]
Disk = Annotated[str | None, typer.Option("--disk", help="Size of /workspace and of /tmp, each.")]
Stdin = Annotated[str | None, typer.Option("--stdin", metavar="FILE", help="What the guest reads; - is our own stdin.")]
InFiles = Annotated[list[str] | None, typer.Option("--file", "-f", metavar="PATH[:NAME]", help="Given read-only.")]
Env = Annotated[list[str] | None, typer.Option("--env", "-e", metavar="K=V")]
Collect = Annotated[list[str] | None, typer.Option("--collect", metavar="GLOB", help="Files to bring back.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where collected files and figures go.")]
Net = Annotated[list[str] | None, typer.Option("--net", metavar="HOST", help="A host the guest may reach.")]
Fuel = Annotated[int | None, typer.Option("--fuel", help="The most WebAssembly instructions, about.")]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Fix clock and randomness: a run that can be repeated.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Of a deterministic run's randomness.")]
Profile = Annotated[str | None, typer.Option("--profile", help="Packages to find imported, such as numeric.")]
Require = Annotated[
    list[str] | None, typer.Option("--require-library", metavar="MODULE", help="Must import: finds who has it.")
]
Retry = Annotated[bool, typer.Option("--retry-stronger", help="If auto's choice lacks something, run it on another.")]
Image = Annotated[str | None, typer.Option("--image", help="Of a container; by default the language's.")]
Type = Annotated[str | None, typer.Option("--type", help="Kind of work, such as test-runner: image and limits.")]
Runtime = Annotated[str | None, typer.Option("--runtime", help="Of containers: runc, runsc (gVisor), …")]
Packages = Annotated[
    list[str] | None,
    typer.Option(
        "--packages", metavar="NAME", help="To be there, such as numpy==2.* or npm:lodash; or a venv's folder."
    ),
]

Workspace = Annotated[Path | None, typer.Option("--workspace", "-w", metavar="DIR", help="At /workspace, read-only.")]
Rw = Annotated[bool, typer.Option("--rw", help="Let the guest change the workspace.")]
RwGit = Annotated[bool, typer.Option("--rw-git", help="And git's configuration and hooks in it.")]


def check_grant(workspace: Path | None, rw: bool, rw_git: bool) -> None:
    """Refuses options that grant more of a folder than was granted."""
    if rw and workspace is None:
        raise errors.InvalidRequest("--rw goes with --workspace DIR")
    if rw_git and not rw:
        raise errors.InvalidRequest("--rw-git goes with --rw")


def packages(given: list[str] | None) -> str | tuple[str, ...] | None:
    """Reads each `--packages`: names of packages, or one folder of a Python environment."""
    if not given:
        return None
    folders = [name for name in given if _is_environment(name)]
    if folders and len(given) > 1:
        raise errors.InvalidRequest(
            f"--packages {folders[0]}: a folder goes with no other packages", fix="install them into it, or name all"
        )
    return absolute(Path(folders[0])) if folders else tuple(given)


def _is_environment(name: str) -> bool:
    plain = name.startswith("npm:") or not ("/" in name or name.startswith("."))
    return not plain or Path(name, "pyvenv.cfg").is_file()


def read_code(path: str) -> str:
    """Reads a file of code, or stdin for `-`; raises InvalidRequest where that cannot be."""
    from belljar.host.source import decode_source, read_source

    return decode_source("stdin", _read(path)) if path == "-" else read_source(path, waits=True)


def read_stdin(path: str | None) -> bytes | None:
    """Reads what `--stdin` names: the bytes that the guest gets as its own stdin."""
    return None if path is None else _read(path)


def read_files(names: list[str] | None) -> dict[str, bytes]:
    """Reads each `--file PATH[:NAME]` and returns name -> content."""
    given = {}
    for name in names or ():
        path, _, target = name.partition(":")
        given[target or Path(path).name] = _read(path)
    return given


def read_env(pairs: list[str] | None, option: str = "--env") -> dict[str, str]:
    """Splits each `--env NAME=VALUE`, or that of another option."""
    env = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals:
            raise errors.InvalidRequest(f"{option} {pair!r} has no value", fix=f"write {option} NAME=VALUE")
        env[name] = value
    return env


def absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


def _read(path: str) -> bytes:
    if path == "-" and sys.stdin is None:
        raise errors.InvalidRequest("stdin is closed", fix="give a file, or code with -c")
    try:
        return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise errors.InvalidRequest(f"{path}: {error.strerror}", fix="check the path") from None
