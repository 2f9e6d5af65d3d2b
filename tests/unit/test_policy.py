"""A request becomes a finished plan, or a refusal that names the field, the cap and what to do."""

from __future__ import annotations

import posixpath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st

from belljar import errors, policy
from belljar.models import GIB, MIB, Isolation, Limits, Needs, RunRequest, Workspace
from belljar.settings import Caps, Settings

patient = trials(deadline=None)  # a machine that is busy with other things is not a failure

SETTINGS = Settings(home="/home/me")


def decide(settings: Settings = SETTINGS, **fields: Any) -> Any:
    return policy.decide(RunRequest(**fields), settings)


def test_a_request_that_names_nothing_gets_the_defaults_of_the_mission() -> None:
    plan = decide()
    assert plan.limits == Limits(cpus=1, memory=512 * MIB, disk=GIB, pids=100, timeout=30, output=10 * MIB)
    assert plan.egress.mode == "none"
    assert plan.isolation is Isolation.WASM


def test_a_request_s_limits_go_over_the_administrator_s_defaults_one_by_one() -> None:
    settings = Settings(defaults=Limits(memory=GIB, timeout=7))
    limits = decide(settings, limits=Limits(timeout=3)).limits
    assert (limits.memory, limits.timeout, limits.pids) == (GIB, 3, 100)


@pytest.mark.parametrize("name", Caps.model_fields)
def test_a_limit_over_its_cap_is_refused_naming_field_and_cap(name: str) -> None:
    cap = getattr(SETTINGS.caps, name)
    assert getattr(decide(limits={name: cap}).limits, name) == cap
    with pytest.raises(
        errors.PolicyDenied, match=rf"limits\.{name}: .* is over the cap of .*ask for at most"
    ) as caught:
        decide(limits={name: cap + 1})
    assert caught.value.context == {"field": name, "asked": cap + 1, "cap": cap}
    assert caught.value.exit_code == 126


def test_a_default_over_a_cap_is_cut_to_it_since_nobody_asked() -> None:
    settings = Settings(caps=Caps(timeout=5, memory=64 * MIB))
    limits = decide(settings).limits
    assert (limits.timeout, limits.memory) == (5, 64 * MIB)


@patient
@given(
    asked=st.fixed_dictionaries(
        {},
        optional={
            "cpus": st.floats(0.01, 1024), "memory": st.integers(8 * MIB, 2**46), "pids": st.integers(1, 2**22),
            "timeout": st.floats(0.01, 600_000), "output": st.integers(0, GIB), "disk": st.integers(65536, 2**46),
        },
    ),
    caps=st.builds(
        Caps, cpus=st.floats(0.1, 100), memory=st.integers(8 * MIB, 2**40), pids=st.integers(1, 10_000),
        timeout=st.floats(1, 1000), output=st.integers(0, GIB), disk=st.integers(65536, 2**40),
    ),
)  # fmt: skip
def test_no_request_ever_gets_more_than_a_cap(asked: dict[str, Any], caps: Caps) -> None:
    try:
        limits = policy.limits(Limits(**asked), Limits(), caps)
    except errors.PolicyDenied as error:
        field = error.context["field"]
        assert asked[field] > getattr(caps, field)
        return
    for name, cap in caps.model_dump().items():
        assert getattr(limits, name) <= cap
        if name in asked:
            assert getattr(limits, name) == asked[name]


def test_a_cap_below_the_least_that_works_is_told_by_field() -> None:
    with pytest.raises(errors.InvalidRequest, match="memory: "):
        policy.limits(Limits(), Limits(), Caps(memory=1))


# --- folders of the host ---


@pytest.mark.parametrize(
    "path",
    [
        "/", "//", "/etc", "//etc", "///etc", "/etc/ssl", "/./etc", "/x/../etc", "/proc", "/proc/1", "/sys",
        "/dev/shm", "/run",
        "/run/docker", "/var/run", "/var/run/docker", "/var", "/var/lib", "/boot/x", "/root", "/usr", "/home",
        "/home/me",
        "/home/me/", "/home/me/project/..",
    ],
)  # fmt: skip
def test_a_folder_that_would_hand_over_the_host_is_never_granted(path: str) -> None:
    with pytest.raises(errors.PolicyDenied, match=r"workspace\.path: .* would expose .*grant a project folder"):
        decide(workspace=Workspace(path=path))


@pytest.mark.parametrize(
    "path", ["/home/me/project", "/srv/x", "/etcetera", "/root/project", "/var/lib/ci/job", "/tmp/a/../b"]
)
def test_a_project_folder_is_granted_read_only_unless_writing_was_asked_for(path: str) -> None:
    assert decide(workspace=Workspace(path=path)).workspace == Workspace(path=posixpath.normpath(path), write=False)
    assert decide(workspace=Workspace(path=path, write=True)).workspace.write


@pytest.mark.parametrize("path", [".", "project", "../x"])
def test_a_relative_folder_is_refused_with_a_remedy(path: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=r"workspace\.path: .*absolute"):
        decide(workspace=Workspace(path=path))


@patient
@given(
    st.lists(st.sampled_from(["/", "//", "..", ".", "etc", "proc", "home", "me", "x", "usr"]), max_size=8).map("/".join)
)
def test_however_it_is_spelt_no_granted_path_is_or_holds_a_guarded_one(text: str) -> None:
    try:
        granted = decide(workspace=Workspace(path="/" + text)).workspace.path
    except errors.PolicyDenied:
        return
    assert granted == posixpath.normpath(granted) and not granted.startswith("//")
    for guarded in ("/etc", "/proc", "/home/me", "/usr"):
        assert not (guarded + "/").startswith(granted + "/")
    assert not granted.startswith(("/etc/", "/proc/"))


# --- the rest of the plan ---


@pytest.mark.parametrize(
    ("asked", "set_", "got"), [("auto", "auto", "auto"), ("auto", "native", "native"), ("x", "native", "x")]
)
def test_the_request_s_backend_goes_over_the_settings(asked: str, set_: str, got: str) -> None:
    assert decide(Settings(backend=set_), backend=asked).backend == got


def test_files_are_kept_when_they_will_be_asked_for() -> None:
    assert not decide().keep_files
    assert decide(collect=("*.txt",)).keep_files
    assert policy.decide(RunRequest(), SETTINGS, keep_files=True).keep_files


def test_a_plan_carries_what_was_asked_unchanged() -> None:
    egress = {"mode": "listed", "hosts": ["example.org"]}
    plan = decide(files={"a": b"1"}, egress=egress, isolation="kernel", packages="/srv/venv")
    assert (dict(plan.files), plan.packages, plan.isolation) == ({"a": b"1"}, "/srv/venv", Isolation.KERNEL)
    assert plan.egress.hosts == {"example.org"}
    assert plan.id.startswith("bj-") and plan.id != decide().id


def test_a_plan_says_what_its_code_seems_to_need_the_files_beside_it_included() -> None:
    plan = decide(code="import requests, near", files={"near.py": b"import os\nos.fork()"})
    assert plan.needs.modules == {"requests", "os"}
    assert plan.needs.system == ("may start processes (os.fork)",)


@pytest.mark.parametrize(
    "fields", [{}, {"command": ("python3", "-c", "import os")}, {"code": "os", "language": "bash"}]
)
def test_what_is_no_python_code_is_not_looked_into(fields: dict[str, Any]) -> None:
    assert decide(**fields).needs == Needs()
