"""What the block `container` of the settings may say in other words, and what it cannot have, with the reason. Pure."""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

# What people call an engine, and the OCI runtime that it stands for, by the names under which it is registered with
# Docker: the first is assumed unless the engine knows one of the others.
RUNTIMES: Mapping[str, tuple[str, ...]] = {
    "gvisor": ("runsc", "gvisor", "io.containerd.runsc.v1"),
    "kata": ("kata", "kata-runtime", "kata-qemu", "kata-clh", "io.containerd.kata.v2"),
    "firecracker": ("kata-fc", "firecracker", "io.containerd.kata-fc.v2", "aws.firecracker"),
}
NO_KERNEL_MEMORY = (
    "container.kernel_memory is left out: engines and kernels gave that limit up; what the kernel holds for a guest "
    "counts as the guest's own memory, under memory_limit"
)
_ENGINES = ("docker", "podman", "apple", "macos-container")
_EVERY_PROTOCOL = {"tcp", "udp", "icmp"}
_MOST_CPUS = 4096
_NETWORK_LIMITS = ("bandwidth", "connections")
_NOT_HERE = {
    "ports": "no port of a guest can be exposed yet: nothing can connect to a guest",
}
_OTHER_WORDS = {
    "network_bandwidth": "bandwidth", "max_connections": "connections", "port_exposure": "ports",
    "exposed_ports": "ports", "expose": "ports", "cpuset": "cpu_affinity", "cpuset_cpus": "cpu_affinity",
}  # fmt: skip


def settled(block: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the block with each thing under its one name, and the engine as one of ours with a runtime of its own.

    Raises:
        ValueError: It asks for what cannot be done here, or says one thing twice.
    """
    result: dict[str, Any] = {}
    for name, value in block.items():
        own = _OTHER_WORDS.get(name, name)
        if own in result:
            raise ValueError(f"container.{name} and container.{own} are one setting: leave one of them out")
        result[own] = value
    for name in _NETWORK_LIMITS:
        if not result.get(name, True):  # what asks for nothing is granted
            del result[name]
    for name, why in _NOT_HERE.items():
        if result.pop(name, None):  # what asks for nothing is granted
            raise ValueError(f"container.{name}: {why}")
    return result | _engine(result)


def _engine(block: Mapping[str, Any]) -> dict[str, str]:
    """The engine as one of ours and, where its name is that of a runtime, that runtime."""
    engine = block.get("engine", "")
    if not isinstance(engine, str) or engine not in ("", *_ENGINES, *RUNTIMES):
        raise ValueError(
            f"container.engine: choose from {', '.join((*_ENGINES, *RUNTIMES))} (got {str(engine)[:40]!r})"
        )
    if engine in RUNTIMES:
        return {"engine": "docker", "runtime": block.get("runtime") or RUNTIMES[engine][0]}
    return {"engine": "apple"} if engine == "macos-container" else {}


def registered(runtime: str, known: Iterable[str]) -> str:
    """Returns the name under which an engine knows a runtime: its own or, of those that stand for it, the first known.

    Args:
        runtime: The name in the settings.
        known: The names that the engine has registered.
    """
    known = tuple(known)
    if runtime in known:
        return runtime
    kin = next((names for word, names in RUNTIMES.items() if runtime in (word, names[0])), ())
    return next((name for name in kin if name in known), runtime)


def check_protocols(protocols: Iterable[str], network: str) -> None:
    """Raises ValueError where the protocols that guests may speak are not those that they can speak."""
    named = set(protocols)
    if not named or named >= _EVERY_PROTOCOL:
        return
    if network != "none":
        raise ValueError(
            f"protocols: the network {network!r} carries every protocol: set network_mode to none, where guests have "
            "https to listed hosts and nothing else, or leave protocols out"
        )
    if not named & {"tcp", "https"}:
        raise ValueError("protocols: what guests may speak is https, to listed hosts: name it, or leave protocols out")


def _cpus(value: object) -> object:
    """`"0-3,5"` or `[0, 1, 2, 3, 5]`, as the kernel writes it."""
    if isinstance(value, bool | int) or value is None:
        value = [value]
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")] if value else []
    if not isinstance(value, list | tuple):
        raise ValueError(_CPU_LIST)
    parts = [str(part) for part in value]
    for part in parts:
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part, re.ASCII)
        if not match or not int(match[1]) <= int(match[2] or match[1]) < _MOST_CPUS:
            raise ValueError(_CPU_LIST)
    return ",".join(parts)


_CPU_LIST = 'write the numbers of CPUs, such as "0-3,5" or [0, 1]'
CpuList = Annotated[str, BeforeValidator(_cpus), WithJsonSchema({"type": "string"})]
