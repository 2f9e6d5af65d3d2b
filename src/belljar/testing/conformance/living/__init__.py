"""The checks of living sandboxes: one machine for all its commands. Skipped where a backend has none."""

from belljar.testing.conformance.living import (
    files,
    interpreters,
    life,
    machine,
    output,
    ports,
    processes,
    snapshots,
    terminals,
    transfer,
)

AREAS = (processes, output, terminals, ports, files, transfer, interpreters, life, machine, snapshots)
