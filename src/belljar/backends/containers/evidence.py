"""Reads what the probe's guest printed of its walls, and says what may be promised after that.

What was not seen is not promised, and what an administrator gave up is said. Pure: `probe` runs the guest, which is
`guest/shell/containers/probe.sh`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

from belljar.backends.containers.facts import EngineFacts
from belljar.core import errors
from belljar.core.capabilities import Guarantees, Isolation
from belljar.core.container_block import NO_KERNEL_MEMORY
from belljar.core.languages import Language
from belljar.core.request import Limits
from belljar.core.settings import ContainerSettings
from belljar.core.values import MIB

_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "uts")
_PLAIN = Limits(timeout=30, memory=256 * MIB, disk=MIB)
_BPS, _IOPS = 2**40, 2**30  # as good as none, but the kernel shows whether it took them
_ROOT, _CAPABILITIES = "read-only root", "no capabilities"
_PROOFS = {
    "a uid that is not root": r"^uid [1-9]\d*$",
    _CAPABILITIES: r"(?s)^CapEff:\s+0+$.*^CapBnd:\s+0+$",
    _ROOT: r"(?s)\A(?!.*^root rw\b).*^root ro\b",  # by the mount: a guest that is not root may write to little anyway
    "no new privileges": r"^NoNewPrivs:\s+1$",
    "seccomp filter": r"^Seccomp:\s+2$",
}
# What a kernel of the guest's own need not show: it is the wall that they would be.
_KERNEL_S_OWN = ("no new privileges", "seccomp filter")
_BITS = {
    "CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7, "SETPCAP": 8,
    "NET_BIND_SERVICE": 10, "NET_RAW": 13, "SYS_CHROOT": 18, "MKNOD": 27, "AUDIT_WRITE": 29, "SETFCAP": 31,
}  # fmt: skip


def limits_to_show(disk: str) -> Limits:
    """What the probe's guest gets: small, and where block I/O may be limited, with limits that can be seen."""
    return _PLAIN.model_copy(update={"io_bps": _BPS, "io_iops": _IOPS}) if disk else _PLAIN


class Seen(NamedTuple):
    """The walls that the guest's words prove, and those that they do not."""

    walls: tuple[str, ...]
    unseen: tuple[str, ...]
    own_kernel: bool
    throttled: bool  # did the limits of block I/O arrive?
    weighted: bool  # did the weight of block I/O arrive?
    python: bool  # is there one in the image?


def read(said: str, facts: EngineFacts, options: ContainerSettings) -> Seen:
    """Reads the walls from what the guest printed.

    Raises:
        NotAvailable: A wall that must stand was not seen.
    """
    own_kernel = not said.startswith(f"{facts.kernel} ")
    given_up = {_ROOT} if not options.read_only_root else set()
    given_up |= {_CAPABILITIES} if options.capabilities else set()
    wanted = {wall: pattern for wall, pattern in _PROOFS.items() if wall not in given_up}
    seen = [wall for wall, pattern in wanted.items() if re.search(pattern, said, re.MULTILINE)]
    for wall in wanted:
        if wall not in seen and not (own_kernel and wall in _KERNEL_S_OWN):
            raise _unproved(wall, said)
    _check_capabilities(said, options)
    spaces = [] if own_kernel else _namespaces(facts, said)
    unseen = [wall for wall in wanted if wall not in seen]
    if spaces and "cgroup namespace" not in spaces:
        unseen.append("cgroup namespace")
    confined = "" if own_kernel else confinement(said)
    for wall in () if own_kernel else _named(options):
        if not confined.startswith(wall):
            raise _unproved(wall, said)
    if not confined and re.search("apparmor|selinux", facts.security):
        unseen.append("AppArmor or SELinux, of which the engine speaks")
    python = bool(re.search(r"^python /", said, re.MULTILINE))
    walls = [*(["a kernel of its own"] if own_kernel else spaces), *seen, *([confined] if confined else [])]
    return Seen(tuple(walls), tuple(unseen), own_kernel, _throttled(said), _weighted(said, options.io_weight), python)


def _named(options: ContainerSettings) -> Iterable[str]:
    """The walls of the host's own that the settings name, in the words of `confinement`."""
    if options.apparmor_profile:
        yield f"AppArmor profile {options.apparmor_profile}"
    if options.selinux_label:
        kind, _, value = options.selinux_label.partition(":")
        yield f"SELinux type {value if kind == 'type' else ''}"


def confinement(said: str) -> str:
    """The wall in /proc/self/attr/current: AppArmor's profile if it is enforced, or SELinux's type if it confines."""
    found = re.search(r"^attr (\S+)(?: \((\w+)\))?\0?$", said, re.MULTILINE)
    if not found:
        return ""
    label, mode = found[1].rstrip("\0"), found[2]
    if mode is not None:
        return f"AppArmor profile {label}" if mode == "enforce" else ""
    parts = label.split(":")
    if len(parts) < 4 or re.search(r"unconfined|^spc_t$", parts[2]):
        return ""
    return f"SELinux type {parts[2]}"


def _unproved(wall: str, said: str) -> errors.NotAvailable:
    return errors.NotAvailable(f"the probe could not prove: {wall}", context={"output": said[:2000]})


def _check_capabilities(said: str, options: ContainerSettings) -> None:
    """Those that were given back may be there, and no other."""
    most = sum(1 << _BITS[name] for name in options.capabilities)
    for name in ("CapEff", "CapBnd"):
        found = re.search(rf"^{name}:\s+([0-9a-f]+)$", said, re.MULTILINE)
        if found is None or int(found[1], 16) & ~most:
            raise _unproved("no capabilities but those given back", said)


def _namespaces(facts: EngineFacts, said: str) -> list[str]:
    walls = []
    for name in _NAMESPACES if facts.address.local and os.path.exists("/proc/self/ns") else ():
        outside = f"{name}:[{os.stat(f'/proc/self/ns/{name}').st_ino}]"
        if f"ns {name} {outside}" not in said and f"ns {name} {name}:[" in said:
            walls.append(f"{name} namespace")
        elif name != "cgroup":  # without it a guest can read the names of groups, and no more
            raise errors.NotAvailable(f"the guest was not in a {name} namespace of its own")
    return walls


def _throttled(said: str) -> bool:
    """Both ways, bytes and operations: one file for each with control groups version 1, one for all with version 2."""
    shown = " ".join(re.findall(r"^io (.+)$", said, re.MULTILINE))
    return all(len(re.findall(rf"\b{rate}\b", shown)) == 2 for rate in (_BPS, _IOPS))


def _weighted(said: str, weight: int | None) -> bool:
    if weight is None:
        return False
    # Version 2 counts from 1 to 10000, and the runtime translates.
    ours = {str(weight), str(1 + (weight - 10) * 9999 // 990)}
    return any(set(line.split()) & ours for line in re.findall(r"^weight (.+)$", said, re.MULTILINE))


def promise(facts: EngineFacts, seen: Seen, options: ContainerSettings, spoken: Iterable[Language]) -> Guarantees:
    """Returns what a runtime may be said to guarantee, and where it is weaker than one might think."""
    limits = {name: facts.cgroup if given else "not limited" for name, given in facts.limits.items()}
    limits |= {"io": facts.cgroup if seen.throttled else "not limited"}
    limits |= {"disk": "tmpfs size" if options.read_only_root else "not limited"}
    limits |= {"timeout": "watchdog", "output": "watchdog"}
    if seen.own_kernel:
        limits["pids"] = "rlimit inside, and a wider one around"
    weaker = [f"{name} is not limited" for name, how in limits.items() if how == "not limited"]
    weaker += [f"not seen by the probe: {wall}" for wall in seen.unseen]
    return Guarantees(
        isolation=Isolation.KERNEL if seen.own_kernel else Isolation.NAMESPACE, walls=seen.walls, limits=limits,
        network="none", weaker=(*weaker, *_given_up(options, spoken, seen.weighted)),
    )  # fmt: skip


def _given_up(options: ContainerSettings, spoken: Iterable[Language], weighted: bool) -> Iterable[str]:
    """What the settings took from the walls, in words."""
    if not options.read_only_root:
        yield "the root is writable (container.read_only_root): what is written there fills the engine's disk"
    if options.capabilities:
        yield f"guests may have capabilities (container.capabilities): {', '.join(options.capabilities)}"
    if options.seccomp_profile:
        yield f"the seccomp profile is not ours but {options.seccomp_profile} (container.seccomp_profile)"
    for language in spoken:
        if language.seccomp_profile:
            yield f"{language.name} has a seccomp profile of its own: {language.seccomp_profile}"
    if options.kernel_memory is not None:
        yield NO_KERNEL_MEMORY
    if options.io_weight is not None and not weighted:
        yield "container.io_weight is left out: the probe saw no weight of block I/O in the guest's control group"
