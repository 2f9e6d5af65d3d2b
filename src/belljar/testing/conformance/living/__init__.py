"""The checks of living sandboxes: one machine for all its commands. Skipped where a backend has none."""

from belljar.testing.conformance.living import output, ports, processes, terminals

AREAS = (processes, output, terminals, ports)
