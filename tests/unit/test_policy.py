"""A request becomes a finished plan, or a refusal that names the field, the cap and what to do."""

from __future__ import annotations

import posixpath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st

from belljar.core import errors, policy
from belljar.core.capabilities import Capabilities, Guarantees, Isolation
from belljar.core.languages import BUILTIN, Language
from belljar.core.plan import Needs
from belljar.core.request import Egress, Limits, RunRequest, Workspace
from belljar.core.settings import Caps, ContainerSettings, ContainerType, Settings
from belljar.core.values import GIB, MIB

patient = trials(deadline=None)  # a machine that is busy with other things is not a failure

SETTINGS = Settings(home="/home/me")


def decide(settings: Settings = SETTINGS, *, spoken: Language | None = None, **fields: Any) -> Any:
    return policy.decide(RunRequest(**fields), settings, language=spoken)


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


# --- container types ---


def typed(**types: ContainerType) -> Settings:
    return Settings(container=ContainerSettings(types=types))


def test_a_type_s_memory_and_time_are_the_defaults_of_the_run() -> None:
    plan = decide(type="test-runner")
    assert (plan.type, plan.limits.memory, plan.limits.timeout) == ("test-runner", 2 * GIB, 300)
    assert plan.limits.pids == 100
    assert decide(type="execution").limits == decide().limits


def test_a_type_s_defaults_are_cut_to_the_caps_and_give_way_to_what_is_asked() -> None:
    assert decide(type="preview").limits.timeout == SETTINGS.caps.timeout == 300
    assert decide(Settings(caps=Caps(timeout=3600)), type="preview").limits.timeout == 1800
    assert decide(type="preview", limits={"timeout": 7, "memory": "64M"}).limits.timeout == 7
    with pytest.raises(errors.PolicyDenied, match=r"limits\.memory: "):
        decide(type="test-runner", limits={"memory": "64G"})


@pytest.mark.parametrize(
    "fields",
    [{}, {"type": "test-runner"}, {"type": "preview"}, {"limits": Limits(memory=64 * MIB)}, {"command": ("true",)}],
)
def test_the_limits_of_a_run_are_known_without_a_plan_and_are_the_plan_s(fields: dict[str, Any]) -> None:
    assert policy.run_limits(RunRequest(**fields), SETTINGS) == decide(**fields).limits


def test_an_unknown_type_is_refused_naming_those_there_are() -> None:
    with pytest.raises(errors.InvalidRequest, match=r"type: there is no container type 'lint'.*execution.*preview"):
        decide(type="lint")
    assert decide(typed(lint=ContainerType(memory=64 * MIB)), type="lint").limits.memory == 64 * MIB


def test_without_a_named_type_the_language_s_usual_one_speaks_if_the_administrator_gave_it_limits() -> None:
    settings = typed(**{"execution": ContainerType(memory=GIB), "node-execution": ContainerType(timeout=9)})
    assert decide(settings, code="1", spoken=BUILTIN["python"]).limits.memory == GIB
    assert decide(settings, command=("true",)).limits.memory == GIB
    node = decide(settings, code="1", language="javascript", spoken=BUILTIN["javascript"]).limits
    assert (node.memory, node.timeout) == (512 * MIB, 9)


# --- what the administrators say of a language ---


def python(**fields: Any) -> Language:
    return BUILTIN["python"].model_copy(update=fields)


def test_a_language_s_memory_is_its_default_over_its_usual_type_s_and_under_a_named_one_s() -> None:
    assert decide(code="1", spoken=python(memory=GIB)).limits.memory == GIB
    assert decide(typed(execution=ContainerType(memory=2 * GIB)), spoken=python(memory=GIB)).limits.memory == GIB
    assert decide(type="test-runner", code="1", spoken=python(memory=GIB)).limits.memory == 2 * GIB
    assert decide(type="execution", code="1", spoken=python(memory=GIB)).limits.memory == GIB
    assert decide(code="1", limits={"memory": "64M"}, spoken=python(memory=GIB)).limits.memory == 64 * MIB
    assert decide(Settings(caps=Caps(memory=128 * MIB)), spoken=python(memory=GIB)).limits.memory == 128 * MIB


@pytest.mark.parametrize("egress", [Egress(mode="open"), Egress(mode="listed", hosts=frozenset({"example.org"}))])
def test_a_language_that_may_have_no_network_is_refused_any(egress: Egress) -> None:
    with pytest.raises(errors.PolicyDenied, match=r"egress: python may have no network.*administrator"):
        decide(code="1", egress=egress, spoken=python(allow_network=False))
    assert decide(code="1", spoken=python(allow_network=False)).egress.mode == "none"
    for allowed in (None, True):
        assert decide(code="1", egress=egress, spoken=python(allow_network=allowed)).egress == egress


def test_a_plan_carries_the_seccomp_profile_of_its_language() -> None:
    assert decide(code="1", spoken=python(seccomp_profile="/x.json")).seccomp_profile == "/x.json"
    assert decide(code="1", spoken=python()).seccomp_profile == ""


def test_a_backend_that_cannot_take_a_language_s_profile_does_not_run_it() -> None:
    held = Guarantees(isolation=Isolation.NAMESPACE)
    native = Capabilities(backend="native", available=True, guarantees=held)
    docker = Capabilities(backend="docker", available=True, guarantees=held, runtimes={"runc": held})
    with pytest.raises(
        errors.PolicyDenied, match=r"native cannot take the seccomp profile that python must have.*docker"
    ):
        policy.check_language(python(seccomp_profile="/x.json"), Egress(), native)
    policy.check_language(python(seccomp_profile="/x.json"), Egress(), docker)
    policy.check_language(python(), Egress(), native)
    with pytest.raises(errors.PolicyDenied, match="may have no network"):
        policy.check_language(python(allow_network=False), Egress(mode="open"), docker)


def test_a_command_in_an_open_box_gets_the_box_s_limits_but_for_its_own_type_or_language() -> None:
    plan = decide(limits={"pids": 7})

    def limits(spoken: Language | None = None, plan: Any = plan, **fields: Any) -> Limits:
        return policy.command_limits(RunRequest(**fields), plan, SETTINGS, spoken)

    assert limits() == plan.limits
    tests = limits(type="test-runner")
    assert (tests.memory, tests.timeout, tests.pids) == (2 * GIB, 300, 7)
    assert limits(python(memory=GIB), code="1").memory == GIB
    assert limits(python(memory=GIB), code="1", limits={"memory": "64M"}).memory == 64 * MIB
    assert limits(python(memory=GIB), decide(type="test-runner"), code="1").memory == 2 * GIB


# --- a project's image ---


def with_project_image(**more: Any) -> Settings:
    images = dict.fromkeys(("execution", "node-execution", "test-runner", "preview"), "team/app:1")
    return Settings(project_image="team/app:1", container=ContainerSettings(images=images | more))


def test_a_project_s_image_counts_like_one_that_the_request_names_and_the_reasons_say_so() -> None:
    for fields in ({"code": "1"}, {"command": ("true",)}, {"command": ("true",), "type": "test-runner"}):
        plan = decide(with_project_image(), spoken=BUILTIN["python"] if "code" in fields else None, **fields)
        assert (plan.image, plan.notes) == ("team/app:1", ("image team/app:1: the project's file names it",))
    assert decide(with_project_image(), image="mine:1").image == "mine:1"


def test_a_project_s_image_gives_way_to_the_language_file_and_the_environment_and_that_is_told() -> None:
    own = BUILTIN["python"].model_copy(update={"image": "registry.example/python:3.10"})
    plan = decide(with_project_image(), spoken=own, code="1")
    assert plan.image is None
    told = "the project's image team/app:1 is not used: registry.example/python:3.10 is set for this kind of run"
    assert plan.notes == (told,)
    assert decide(with_project_image(execution="env:1"), command=("true",)).image is None


def test_a_container_is_kept_if_the_request_says_so_or_else_the_settings() -> None:
    assert decide().auto_remove
    assert not decide(auto_remove=False).auto_remove
    assert not decide(Settings(auto_remove=False)).auto_remove
    assert decide(Settings(auto_remove=False), auto_remove=True).auto_remove


@pytest.mark.parametrize("limits", [{"net_bandwidth": MIB}, {"net_connections": 8}])
def test_an_open_network_together_with_a_limit_of_the_network_is_refused(limits: dict[str, int]) -> None:
    direct = Settings(container=ContainerSettings(network_mode="bridge"))
    with pytest.raises(errors.PolicyDenied, match="an open network of a container engine cannot be limited"):
        decide(direct, egress=Egress(mode="open"), limits=Limits(**limits))
    assert decide(direct, egress=Egress(mode="open")).limits.net_bandwidth is None
    assert decide(egress=Egress(mode="open"), limits=Limits(**limits)).egress.mode == "open", (
        "by way of the proxy it can"
    )
    listed = Egress(mode="listed", hosts=frozenset({"example.org"}))
    assert decide(egress=listed, limits=Limits(**limits)).limits.named().items() >= limits.items()
