"""One side of the comparison, in a process of its own, so that all sides are timed alike.

Reads the name of a contender on each line of stdin, runs it once, answers with a line of JSON: {"ms": ...}
or {"error": ...}. A contender returns what the guest printed, or the milliseconds if only a part of it counts.
Started by bench.py with a JSON object of facts: `side`, `python`, `bubblewrap`, `node`, `main`, `uid`.
The standard library only, apart from what is compared: llm-sandbox's environment has nothing of ours.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import sides_containers
import sides_wasm

CODE = "print(1)"
ENV = {
    "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin",
    "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1",
}  # fmt: skip
Contenders = dict[str, Callable[[], str | float]]


def read(argv: list[str], fds: tuple[int, ...] = ()) -> str:
    for fd in fds:  # bubblewrap reads its data from where the last run left off
        os.lseek(fd, 0, os.SEEK_SET)
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, text=True, env=ENV, cwd="/", pass_fds=fds
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"exit code {done.returncode}")
    return done.stdout


def hand(facts: dict[str, Any]) -> Contenders:
    """What someone would type: Python as it is, and bubblewrap around it."""
    python, main = facts["python"], facts["main"]
    names = ("user", "pid", "net", "ipc", "uts", "cgroup")
    jail = [facts["bubblewrap"], *(f"--unshare-{name}" for name in names), "--disable-userns", "--die-with-parent"]
    jail += ["--new-session", "--cap-drop", "ALL", "--uid", "1000", "--gid", "1000", "--clearenv"]
    jail += [part for name, value in ENV.items() for part in ("--setenv", name, value)]
    jail += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "lib", "lib64"):
        if os.path.islink(f"/{name}"):
            jail += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            jail += ["--ro-bind", f"/{name}", f"/{name}"]
    jail += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/workspace"]
    jail += ["--ro-bind", main, "/workspace/main.py", "--chdir", "/workspace", "--", python, "main.py"]
    return {
        "python3 -I -S": lambda: read([python, "-I", "-S", main]),
        "python3": lambda: read([python, main]),
        "bwrap by hand": lambda: read(jail),
        "node -e": lambda: read([facts["node"], "-e", "console.log(1)"]),
    }


def walls(facts: dict[str, Any]) -> Contenders:
    """bubblewrap with the very arguments that Belljar gives it: all of its work, and nothing of ours."""
    from belljar.backends.native import jail

    stack = ExitStack()  # its descriptors stay open as long as this process
    space = jail.Jail(
        env=ENV, cwd="/workspace", disk=1 << 30, files={"main.py": CODE.encode()}, inputs="/workspace", grants=(),
        workspace=None, space=jail.Space(),
    )  # fmt: skip
    args, fds = jail.arguments(space, stack)
    line = [facts["bubblewrap"], *args, "--", facts["python"], "main.py"]
    return {"bwrap with Belljar's walls": lambda keep=stack: read(line, tuple(fds))}  # type: ignore[misc]


def belljar(facts: dict[str, Any]) -> Contenders:
    """Ours, as users call it. It drops root by itself."""
    import belljar as ours

    def run() -> str:
        return said(ours.run(CODE, backend="native"))

    def sandbox() -> str:
        with ours.Sandbox(backend="native") as box:
            return said(box.exec(["python3", "-c", CODE]))

    def said(result: Any) -> str:
        if not result.ok:
            raise RuntimeError(f"{result.status}: {result.error or result.stderr}")
        return str(result.stdout)

    stack = ExitStack()
    sessions: list[Any] = []

    def turn() -> str:
        if not sessions:
            sessions.append(stack.enter_context(ours.Session(backend="native")))
        return said(sessions[0].run(CODE))

    def parallel(width: int, total: int = 32) -> Callable[[], str]:
        def measure() -> str:
            with ThreadPoolExecutor(width) as threads:
                return max(threads.map(lambda _: run(), range(total)))

        return measure

    contenders: Contenders = {"belljar.run": run, "Sandbox open + exec": sandbox, "Session turn": turn}
    contenders |= {f"32 runs, {width} at a time": parallel(width) for width in (1, 2, 4, 8)}
    contenders["close"] = lambda: (stack.close(), "1\n")[1]
    return contenders


def llm_sandbox(facts: dict[str, Any]) -> Contenders:
    """The peer. Its environment setup makes a venv at each opening (seconds); left out, since our run makes none."""
    from llm_sandbox import SandboxSession  # type: ignore[import-not-found]

    def session(**options: Any) -> str:
        with SandboxSession(backend="bubblewrap", lang="python", **options) as box:
            return str(box.run(CODE).stdout)

    return {
        "llm-sandbox": lambda: session(skip_environment_setup=True),
        "llm-sandbox, default setup": session,
    }


SIDES = (
    {"hand": hand, "walls": walls, "belljar": belljar, "llm-sandbox": llm_sandbox}
    | sides_wasm.SIDES
    | sides_containers.SIDES
)


def main() -> None:
    facts = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is not an answer
    contenders = SIDES[facts["side"]](facts)
    if not facts.get("slow"):  # a side whose every run takes seconds is not run once more
        first = next(iter(contenders.values()))
        first()  # all imports and caches, while everything can still be read
    if facts["uid"] is not None and facts["side"] != "belljar":
        os.setgroups([])
        os.setresgid(facts["uid"], facts["uid"], facts["uid"])
        os.setresuid(facts["uid"], facts["uid"], facts["uid"])
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        began = time.perf_counter()
        try:
            said = contenders[line.strip()]()
            ms = said if isinstance(said, float) else (time.perf_counter() - began) * 1000
            wrong = isinstance(said, str) and said != "1\n"
            answer = {"error": f"it printed {said[:200]!r}"} if wrong else {"ms": ms}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
