"""Which tests run, in which order and beside which others: two tiers, and processes that share the work.

Tests of one file stay in one process, because they share servers and engines; so does one suite on one backend. Long
groups go first, so that all processes end at about the same time.
"""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

# Seconds that the longest groups take with two cores; what is not named takes less. Only their order matters.
SECONDS: dict[str, float] = {
    "conformance on gvisor": 145,
    "escape on apple's stand-in": 105,
    "conformance on podman": 220,
    "conformance on apple's stand-in": 95,
    "escape on gvisor": 125,
    "containers/test_docker_settings.py": 85,
    "conformance on docker": 100,
    "escape on podman": 75,
    "images/test_images_build.py": 75,
    "images/test_images_pull.py": 75,
    "conformance/test_conformance.py": 75,
    "containers/test_docker_pool.py": 65,
    "escape on docker": 65,
    "containers/test_docker_faults.py": 60,
    "containers/test_docker_hostile.py": 55,
    "wasm/test_wasm.py": 50,
    "apple/test_apple.py": 50,
    "mcp/test_mcp.py": 45,
    "native/test_unprivileged.py": 45,
    "escape/test_attacks_hold.py": 40,
    "service/test_faults.py": 40,
    "containers/test_docker_seccomp.py": 40,
    "sandbox/test_egress.py": 40,
    "native/test_leaks.py": 35,
    "service/test_access_http.py": 35,
    "wasm/test_wasm_sessions.py": 35,
    "containers/test_docker.py": 30,
    "cli/test_cli.py": 30,
    "images/test_images_project.py": 25,
    "service/test_drain.py": 25,
    "wasm/test_wasm_javascript_files.py": 25,
    "store/test_store_faults.py": 20,
    "sandbox/test_session.py": 20,
    "escape/test_controls.py": 20,
    "store/test_sync.py": 20,
    "docs/test_docs.py": 20,
    "wasm/test_soak.py": 20,
    "unit/test_options.py": 15,
    "native/test_living_leaks.py": 15,
}


# Test functions whose items look up the verdicts of one run of a suite; the last word of an item's id is the backend.
_SUITES = {
    "test_a_container_engine_that_was_started_for_this_conforms": "conformance",
    "test_a_backend_that_works_here_conforms": "conformance",
    "test_containers_hold_against": "escape",
}
_ON_APPLE = {
    "test_apple_over_its_stand_in_conforms": "conformance on apple's stand-in",
    "test_apple_over_its_stand_in_holds_against": "escape on apple's stand-in",
}


def suite_of(nodeid: str) -> str | None:
    """The name of the suite whose verdict a test looks up, with its backend; None: it runs something of its own."""
    function, _, parameters = nodeid.partition("::")[2].partition("[")
    if suite := _SUITES.get(function):
        return f"{suite} on {parameters.rpartition('-')[2].removesuffix(']')}"
    return _ON_APPLE.get(function)


def group_of(nodeid: str) -> str:
    """The name of what a test must share a process with: the suite on its backend, else its file."""
    return suite_of(nodeid) or nodeid.partition("::")[0].removeprefix("tests/")


class Lanes(LoadScopeScheduling):
    """Hands out whole groups, in the order of the collection: a process that has nothing left gets the next.

    `--dist loadgroup` would do, if xdist 3.8 could tell the groups to a pytest of 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def arrange(items: list[pytest.Item]) -> None:
    """Puts tests of one group together, and the longest groups first."""
    groups = {item: group_of(item.nodeid) for item in items}
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
