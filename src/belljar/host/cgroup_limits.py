"""The limits of a sandbox in the words of the kernel's control groups, of both versions."""

from __future__ import annotations

from belljar.core.request import Limits

_PERIOD_US = 100_000


def limit_rows(version: int, limits: Limits, device: str | None) -> list[tuple[str, str, str]]:
    """The limits as rows of controller, file and value."""
    memory, quota = str(limits.memory), max(1000, int(limits.cpus * _PERIOD_US))
    if version == 2:
        rows = [
            ("memory", "memory.max", memory),
            ("memory", "memory.swap.max", "0"),
            ("memory", "memory.oom.group", "1"),
            ("pids", "pids.max", str(limits.pids)),
            ("cpu", "cpu.max", f"{quota} {_PERIOD_US}"),
        ]
        rates = {"rbps": limits.io_bps, "wbps": limits.io_bps, "riops": limits.io_iops, "wiops": limits.io_iops}
        if device and any(rates.values()):
            rows.append(("io", "io.max", " ".join([device, *(f"{k}={v}" for k, v in rates.items() if v)])))
        return rows
    rows = [
        ("memory", "memory.limit_in_bytes", memory),
        ("memory", "memory.memsw.limit_in_bytes", memory),
        ("memory", "memory.kmem.tcp.limit_in_bytes", memory),  # what waits in sockets is counted apart
        ("pids", "pids.max", str(limits.pids)),
        ("cpu", "cpu.cfs_period_us", str(_PERIOD_US)),
        ("cpu", "cpu.cfs_quota_us", str(quota)),
    ]
    for name, value in (("bps", limits.io_bps), ("iops", limits.io_iops)):
        if device and value:
            rows += [("blkio", f"blkio.throttle.{way}_{name}_device", f"{device} {value}") for way in ("read", "write")]
    return rows
