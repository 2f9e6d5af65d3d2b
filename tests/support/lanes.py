"""Which tests run, in which order and beside which others: two tiers, and two processes that share the work.

Tests of one file stay in one process, because they share servers and engines; so does one suite on one backend. Long
groups go first, so that both processes end at about the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import hypothesis
import pytest

TESTS = Path(__file__).parents[1]
# Seconds that the longest groups take on two cores; what is not named takes less. Only their order matters.
SECONDS: dict[str, float] = {
    "images/test_images_pull.py": 120,
    "containers/test_docker_faults.py": 110,
    "containers/test_docker_settings.py": 100,
    "containers/test_docker_seccomp.py": 100,
    "conformance on gvisor": 90,
    "containers/test_docker_hostile.py": 90,
    "containers/test_docker_pool.py": 80,
    "conformance on podman": 70,
    "escape on gvisor": 60,
    "conformance on apple's stand-in": 60,
    "escape on apple's stand-in": 60,
    "images/test_images_build.py": 60,
    "wasm/test_wasm.py": 60,
    "mcp/test_mcp.py": 50,
    "native/test_unprivileged.py": 50,
    "conformance on docker": 45,
    "escape on podman": 40,
    "escape on docker": 40,
    "escape/test_attacks_hold.py": 40,
    "escape/test_controls.py": 40,
    "service/test_faults.py": 40,
    "service/test_access_http.py": 35,
    "native/test_leaks.py": 35,
    "wasm/test_wasm_sessions.py": 35,
    "containers/test_docker.py": 35,
    "sandbox/test_egress.py": 35,
    "service/test_drain.py": 25,
    "wasm/test_wasm_javascript_files.py": 25,
    "cli/test_cli.py": 25,
    "store/test_sync.py": 20,
    "docs/test_docs.py": 20,
    "wasm/test_soak.py": 20,
}


def group_of(item: pytest.Item) -> str:
    """The name of what the test must share a process with: its marker's, else its file's."""
    marker = item.get_closest_marker("xdist_group")
    return str(marker.args[0]) if marker else item.path.relative_to(TESTS).as_posix()


def arrange(items: list[pytest.Item]) -> None:
    """Puts each test into a group, and the longest groups first."""
    groups = {item: group_of(item) for item in items}
    for item, group in groups.items():
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(group))
    places = {group: number for number, group in enumerate(dict.fromkeys(groups.values()))}
    items.sort(key=lambda item: (-SECONDS.get(groups[item], 0), places[groups[item]]))


def allow_second_tries(items: Sequence[pytest.Item]) -> None:
    """A test marked `second_try` is run once more if it fails, and the last line counts it; the marker says why."""
    for item in items:
        if marker := item.get_closest_marker("second_try"):
            if not marker.args or not str(marker.args[0]).strip():
                raise pytest.UsageError(f"{item.nodeid}: second_try needs a reason")
            item.add_marker(pytest.mark.flaky(reruns=1))


def examples(full: int) -> int:
    """How many examples Hypothesis tries: all in `make test-all`, a fifth before each commit."""
    return full if hypothesis.settings.get_current_profile_name() == "full" else max(5, full // 5)


def leave_out_exhaustive(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what only `make test-all` runs."""
    if config.getoption("--exhaustive"):
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    config.hook.pytest_deselected(items=left_out)
