"""A stand-in for Apple's `container`, for machines that are no Mac: it is not Apple's program and proves nothing of it.

It takes the very arguments that the backend `apple` gives, refuses any that Apple's program does not know, and really
runs them on Docker (or Podman). What a container of these is not, a virtual machine, it cannot show.

    container.py ENGINE-PROGRAM ENGINE-ADDRESS STYLE ARGUMENT...

STYLE is the release whose JSON it prints: 0.12, 1.0 or 1.4.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import NoReturn

APPLE_LEAST_MEMORY = 200 << 20
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def fail(words: str, code: int = 1) -> NoReturn:
    print(f"Error: {words}", file=sys.stderr)
    sys.exit(code)


class Parser(argparse.ArgumentParser):
    """Apple's program ends with 64 when it is asked for what it does not know."""

    def error(self, message: str) -> NoReturn:
        fail(f"Unknown option or value: {message}", 64)


def parser(name: str) -> Parser:
    return Parser(prog=f"container {name}", allow_abbrev=False, add_help=False)


def run_parser() -> Parser:
    words = parser("run")
    for flag in ("--interactive", "--rm", "--read-only", "--init", "--help"):
        words.add_argument(flag, action="store_true")
    for flag in ("--label", "--mount", "--cap-drop"):
        words.add_argument(flag, action="append", default=[])
    for flag in ("--name", "--network", "--user", "--workdir", "--entrypoint", "--memory"):
        words.add_argument(flag)
    words.add_argument("--cpus", type=int)  # Apple takes whole ones only
    words.add_argument("--progress", choices=["none", "ansi", "plain"])
    words.add_argument("image", nargs="?")
    words.add_argument("arguments", nargs=argparse.REMAINDER)
    return words


def size(text: str) -> int:
    return int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)


def mount(text: str) -> list[str]:
    fields = dict(part.partition("=")[::2] for part in text.split(","))
    if fields.pop("type", "") != "tmpfs" or not fields.keys() <= {"target", "size", "mode"}:
        fail(f"unknown directive when parsing mount {text}")
    mebibytes = size(fields["size"]) // (1 << 20)  # Apple rounds down
    return ["--tmpfs", f"{fields['target']}:rw,exec,nosuid,nodev,size={mebibytes}m,mode={fields['mode']}"]


def run(engine: list[str], words: list[str]) -> None:
    asked = run_parser().parse_args(words)
    if asked.help:
        print(run_parser().format_help())
        return
    memory = size(asked.memory)
    if memory < APPLE_LEAST_MEMORY:
        fail(f"invalidArgument: minimum memory amount allowed is 200 MiB (got {memory} bytes)")
    if asked.network != "none":
        fail("this stand-in has no network to give")
    # A virtual machine has no swap.
    given = ["run", "--network", "none", "--memory", str(memory), "--memory-swap", str(memory), "--pull", "never"]
    given += ["--cpus", str(min(asked.cpus, os.cpu_count() or 1)), "--name", asked.name, "--user", asked.user]
    given += ["--workdir", asked.workdir, "--entrypoint", asked.entrypoint]
    if "--remote" in engine:  # Podman's own defaults are more than a container of ours may have
        given += ["--ulimit", "nofile=4096:4096", "--ulimit", "nproc=30000:30000"]
    for flag in ("interactive", "rm", "read_only", "init"):
        given += [f"--{flag.replace('_', '-')}"] if getattr(asked, flag) else []
    for flag, values in (("--label", asked.label), ("--cap-drop", asked.cap_drop)):
        given += [word for value in values for word in (flag, value)]
    given += [word for value in asked.mount for word in mount(value)]
    become([*engine, *given, asked.image, *asked.arguments])


def execute(engine: list[str], words: list[str]) -> None:
    asked = parser("exec")
    asked.add_argument("--interactive", action="store_true")
    asked.add_argument("--user")
    asked.add_argument("--workdir")
    asked.add_argument("id")
    asked.add_argument("arguments", nargs=argparse.REMAINDER)
    given = asked.parse_args(words)
    flags = ["--interactive"] if given.interactive else []
    become([*engine, "exec", *flags, "--user", given.user, "--workdir", given.workdir, given.id, *given.arguments])


def rows(engine: list[str]) -> list[dict[str, object]]:
    names = ask([*engine, "ps", "--all", "--quiet", "--no-trunc"]).split()
    return json.loads(ask([*engine, "inspect", *names])) if names else []


def listing(engine: list[str], style: str) -> None:
    """As Apple prints it: before 1.0 `status` is a word, from then on an object."""
    printed = []
    for row in rows(engine):
        name, state = str(row["Name"]).lstrip("/"), "running" if row["State"]["Running"] else "stopped"  # type: ignore[index]
        configuration = {"id": name, "labels": row["Config"]["Labels"] or {}, "mounts": [], "resources": {"cpus": 1}}  # type: ignore[index]
        if style.startswith("0"):
            printed.append({"status": state, "configuration": configuration, "networks": []})
        else:
            printed.append({"id": name, "configuration": configuration, "status": {"state": state, "networks": []}})
    print(json.dumps(printed))


def status(engine: list[str], style: str) -> None:
    if subprocess.run([*engine, "ps", "--quiet"], capture_output=True, check=False).returncode:
        print(json.dumps({"status": "not running"}))
        sys.exit(1)
    nested = {"status": "running", "client": {"version": style}, "server": {"version": style}, "paths": {}}
    print(json.dumps(nested if style == "1.4" else {"status": "running", "apiServerVersion": style, "appRoot": "/"}))


def image(engine: list[str], words: list[str]) -> None:
    match words:
        case ["inspect", name]:
            if subprocess.run([*engine, "image", "inspect", name], capture_output=True, check=False).returncode:
                fail(f"image not found: {name}")
            print("[{}]")
        case ["pull", name]:
            become([*engine, "pull", name])
        case _:
            fail(f"Unknown option {words}", 64)


def build(engine: list[str], words: list[str]) -> None:
    asked = parser("build")
    for flag in ("--tag", "--file", "--memory", "--progress"):
        asked.add_argument(flag)
    asked.add_argument("--cpus", type=int)
    asked.add_argument("context")
    given = asked.parse_args(words)
    flags = ["--file", given.file] if given.file else []
    flags += ["--memory", str(size(given.memory))] if given.memory else []
    flags += ["--cpu-period", "100000", "--cpu-quota", str(given.cpus * 100_000)] if given.cpus else []
    os.environ["DOCKER_BUILDKIT"] = "0"
    become([*engine, "build", "--network", "none", "--tag", given.tag, *flags, given.context])


def delete(engine: list[str], words: list[str]) -> None:
    force, *names = words
    if force != "--force" or not names:
        fail("Unknown option", 64)
    become([*engine, "rm", "--force", *names])


def ask(argv: list[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        fail(done.stderr.strip())
    return done.stdout


def become(argv: list[str]) -> NoReturn:
    os.execvp(argv[0], argv)


def main(program: str, address: str, style: str, command: str, *words: str) -> None:
    engine = [program, *(["--remote", "--url"] if "podman" in program else ["--host"]), address]
    rest = list(words)
    match command:
        case "--version":
            print(f"container CLI version {style}.0 (build: stand-in, commit: 0000000)")
        case "system" if rest == ["status", "--format", "json"]:
            status(engine, style)
        case "list" if rest == ["--all", "--format", "json"]:
            listing(engine, style)
        case "run":
            run(engine, rest)
        case "exec":
            execute(engine, rest)
        case "image":
            image(engine, rest)
        case "build":
            build(engine, rest)
        case "delete":
            delete(engine, rest)
        case _:
            fail(f"Unknown option or command: {command} {' '.join(rest)}", 64)


if __name__ == "__main__":
    main(*sys.argv[1:])
