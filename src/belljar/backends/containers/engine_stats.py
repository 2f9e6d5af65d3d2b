"""Reads what a container engine tells of a container's use of resources."""

from __future__ import annotations

from typing import Any

from belljar.core.result import Usage


def usage_of(stats: Any) -> Usage | None:
    """Reads an engine's answer about a container; what is not there or makes no sense is not known."""
    cpu, held = _at(stats, "cpu_stats", "cpu_usage", "total_usage"), _at(stats, "memory_stats", "usage")
    if not (isinstance(cpu, int) and isinstance(held, int)):
        return None
    pages = _at(stats, "memory_stats", "stats")
    cache = sum(_count(pages, name) or _count(pages, f"total_{name}") for name in ("inactive_file", "active_file"))
    rx = tx = read = written = None
    if isinstance(networks := _at(stats, "networks"), dict):
        links = [link for name, link in networks.items() if name != "lo"]
        rx, tx = (sum(_count(link, f"{way}_bytes") for link in links) for way in ("rx", "tx"))
    if isinstance(rows := _at(stats, "blkio_stats", "io_service_bytes_recursive"), list):
        read, written = (
            sum(_count(row, "value") for row in rows if str(_at(row, "op")).lower() == way) for way in ("read", "write")
        )
    return Usage(max(0, cpu) / 1e6, max(0, held - cache), rx, tx, read, written)


def _at(value: Any, *path: str) -> Any:
    for step in path:
        value = value.get(step) if isinstance(value, dict) else None
    return value


def _count(value: Any, name: str) -> int:
    found = _at(value, name)
    return found if isinstance(found, int) and found > 0 else 0
