"""The sides of bench_containers.py: the engines' own commands, ours cold and from the pool, and llm-sandbox.

Loaded by worker.py. Guests drop root by themselves, in a container each.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

CODE = "print(1)"
POOL = 2
PATIENCE = 60.0  # seconds for a pool to be full again
Contenders = dict[str, Callable[[], str | float]]
# What Belljar asks an engine for, as somebody would type it who wants the same walls.
WALLS = [
    "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--init", "--user=60999:60999",
    "--memory=512m", "--memory-swap=512m", "--cpus=1", "--pids-limit=100", "--tmpfs=/tmp:rw,size=1g",
    "--tmpfs=/workspace:rw,size=1g", "--log-driver=none",
]  # fmt: skip


def since(began: float) -> float:
    return (time.perf_counter() - began) * 1000


def typed(facts: dict[str, Any]) -> Contenders:
    """What someone would type."""

    def read(*argv: str) -> str:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip()[-300:] or f"exit code {done.returncode}")
        return done.stdout

    run, what = ("run", "--rm", "--network=none"), (facts["image"], "python3", "-c", CODE)
    docker = ("docker", "-H", f"unix://{facts['sockets'].get('docker')}")
    podman = ("podman", "--remote", "--url", f"unix://{facts['sockets'].get('podman')}")
    return {
        "docker run": lambda: read(*docker, *run, *what),
        "docker run, walls": lambda: read(*docker, *run, *WALLS, *what),
        "docker run, runsc": lambda: read(*docker, *run, "--runtime=runsc", *what),
        # Its own default limits are over what an ordinary host lets it set.
        "podman run": lambda: read(*podman, *run, "--ulimit=nofile=1024:1024", "--ulimit=nproc=16384:16384", *what),
    }


def ours(facts: dict[str, Any]) -> Contenders:
    """As users call it, cold and from a pool that is full; what fills it again is not timed, and disturbs nobody."""
    import belljar
    from belljar.engine.engine import Engine
    from belljar.settings import load

    def engine(backend: str, runtime: str, pool: int) -> Engine:
        container = {"runtime": runtime, "pool": pool, "images": {"execution": facts["image"]}}
        sockets = {f"{name}_socket": path for name, path in facts["sockets"].items()}
        return Engine(load(container=container, backend=backend, **sockets))

    def once(backend: str, one: Engine) -> float:
        began = time.perf_counter()
        result = belljar.run(CODE, engine=one, backend=backend)
        ms = since(began)
        if result.stdout != "1\n":
            raise RuntimeError(f"{result.status}: {result.error or result.stderr}")
        settle(backend, one)
        return ms

    def settle(backend: str, one: Engine) -> None:
        """Until the container is removed, and the pool full again."""
        containers: Any = one.backend(backend)
        containers.cleanup.drain(PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while one.settings.container.pool and containers.waiting < POOL:
            if time.monotonic() > deadline:
                raise RuntimeError("the pool was not filled")
            time.sleep(0.01)

    contenders: Contenders = {}
    for name, (backend, runtime) in facts["flavours"].items():
        for how, pool in (("cold", 0), ("pooled", POOL)):
            one = engine(backend, runtime, pool)
            contenders[f"{name}, {how}"] = lambda backend=backend, one=one: once(backend, one)  # type: ignore[misc]
    return contenders


def llm_sandbox(facts: dict[str, Any]) -> Contenders:
    """The peer, with the same image; its environment setup left out, as in bench.py. Its closing takes ten seconds."""
    os.environ["DOCKER_HOST"] = f"unix://{facts['sockets']['docker']}"
    from llm_sandbox import SandboxSession  # type: ignore[import-not-found]

    def session() -> float:
        began = time.perf_counter()
        with SandboxSession(
            backend="docker", lang="python", image=facts["peer_image"], skip_environment_setup=True,
            runtime_configs={"network_mode": "none"},
        ) as box:  # fmt: skip
            said = str(box.run(CODE).stdout)
            ms = since(began)
        if said != "1\n":
            raise RuntimeError(f"it printed {said!r}")
        closed.append(since(began))
        return ms

    closed: list[float] = []
    return {"llm-sandbox": session, "llm-sandbox, and closed": lambda: closed[-1]}


SIDES = {"engines": typed, "belljar on containers": ours, "llm-sandbox on docker": llm_sandbox}
