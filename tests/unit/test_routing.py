"""The backend is chosen by what was asked and what is proved, never by something weaker, and the reasons are told."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st

import belljar
import belljar.backends
from belljar.backends.fake import Fake, FakeBox, FakeProcess, Program
from belljar.core import errors, policy, routing
from belljar.core.capabilities import Capabilities, Guarantees, Isolation
from belljar.core.plan import Needs, Plan
from belljar.core.request import Egress, Limits, RunRequest, Workspace
from belljar.core.settings import Settings
from belljar.core.values import GIB
from belljar.engine.engine import Engine

patient = trials(deadline=None)  # a machine that is busy with other things is not a failure

LISTED = Egress(mode="listed", hosts=frozenset({"example.org"}))


def offer(name: str, isolation: Isolation | None = Isolation.NAMESPACE, **fields: Any) -> Capabilities:
    guarantees = Guarantees(isolation=isolation) if isolation else None
    return Capabilities(**{"backend": name, "available": True, "guarantees": guarantees} | fields)


ABSENT = offer("wasm", available=False, why_not="no wasmtime", fix="pip install wasmtime")


# As the real ones describe themselves: wasm is preferred and does less.
NATIVE = offer("native")
WASM = offer("wasm", commands=False, processes=False, languages={"python"}, modules={"json", "numpy"}, memory=4 * GIB)
NO_NATIVE = offer("native", available=False, why_not="no bubblewrap", fix="install bubblewrap")


def code(*modules: str, system: tuple[str, ...] = (), soft: tuple[str, ...] = (), **fields: Any) -> Plan:
    return Plan(language="python", needs=Needs(modules=frozenset(modules), system=system, soft=soft), **fields)


def test_auto_takes_the_first_that_can() -> None:
    choice = routing.choose(Plan(), [offer("a"), offer("b")])
    assert (choice.backend, choice.reasons) == ("a", ("a chosen: first that can do what was asked",))


def test_every_backend_passed_over_is_named_with_its_reason() -> None:
    offers = [ABSENT, offer("weak", Isolation.NONE), offer("unproved", None), offer("native"), offer("never asked")]
    choice = routing.choose(Plan(), offers)
    assert choice.backend == "native"
    assert choice.reasons == (
        "wasm passed over: no wasmtime",
        "weak passed over: isolation none is weaker than wasm",
        "unproved passed over: it proved no guarantee",
        "native chosen: first that can do what was asked",
    )


def test_nothing_available_is_our_failure_and_names_every_fix() -> None:
    other = offer("docker", available=False, why_not="no daemon", fix="start docker")
    with pytest.raises(
        errors.NotAvailable, match=r"wasm passed over: no wasmtime; docker passed over: no daemon"
    ) as caught:
        routing.choose(Plan(), [ABSENT, other])
    assert caught.value.fix == "wasm: pip install wasmtime; docker: start docker"
    assert len(caught.value.context["reasons"]) == 2


def test_no_backend_at_all_is_said_so() -> None:
    with pytest.raises(errors.NotAvailable, match="no backend is configured"):
        routing.choose(Plan(), [])


@pytest.mark.parametrize(
    ("asked", "fields", "said"),
    [
        ({"isolation": Isolation.KERNEL}, {}, "isolation namespace is weaker than kernel"),
        ({"egress": LISTED}, {}, "the hosts example.org cannot be reached"),
        ({"egress": Egress(mode="open")}, {"egress": {"none", "listed"}}, "an open network cannot be reached"),
        ({"workspace": Workspace(path="/x")}, {}, "cannot be granted a folder"),
        ({"packages": "/x"}, {}, "cannot be granted a Python environment"),
    ],
)  # fmt: skip
def test_what_a_working_sandbox_cannot_do_is_refused_and_never_done_weaker(
    asked: dict[str, Any], fields: dict[str, Any], said: str
) -> None:
    for name in ("auto", "native"):
        with pytest.raises(errors.PolicyDenied, match=said):
            routing.choose(Plan(backend=name, **asked), [offer("native", **fields)])


def test_what_is_offered_is_taken() -> None:
    able = offer("native", Isolation.KERNEL, egress={"none", "listed"}, workspace=True, packages=True)
    plan = Plan(isolation=Isolation.KERNEL, egress=LISTED, workspace=Workspace(path="/x"), packages="/v")
    assert routing.choose(plan, [able]).backend == "native"


def test_a_backend_asked_for_by_name_is_the_only_one_considered() -> None:
    choice = routing.choose(Plan(backend="b"), [offer("a"), offer("b")])
    assert (choice.backend, choice.reasons) == ("b", ("b chosen: asked for by name",))


def test_a_named_backend_that_does_not_work_is_not_replaced_and_says_its_fix() -> None:
    with pytest.raises(errors.NotAvailable, match=r"wasm: no wasmtime.*pip install wasmtime") as caught:
        routing.choose(Plan(backend="wasm"), [ABSENT, offer("native")])
    assert caught.value.context["backend"] == "wasm"


def test_a_backend_nobody_knows_is_an_invalid_request_naming_those_there_are() -> None:
    with pytest.raises(errors.InvalidRequest, match=r"backend: there is no backend 'xen'.*auto, a, b"):
        routing.choose(Plan(backend="xen"), [offer("a"), offer("b")])


def test_code_that_fits_wasm_goes_there() -> None:
    choice = routing.choose(code("json", "numpy"), [WASM, NATIVE])
    assert (choice.backend, choice.reasons) == ("wasm", ("wasm chosen: first that can do what was asked",))


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (code("requests", "json"), "the code imports requests, which wasm lacks"),
        (code(*"abcdefg"), "the code imports a, b, c, d, e and 2 more, which wasm lacks"),
        (code(system=("may start threads (x)",)), "the code may start threads (x), and wasm is no operating system"),
        (code(limits=Limits(memory=5 * GIB)), "its guests never have more than 4G of memory"),
        (Plan(), "nothing is known yet of what will be run, and it cannot run everything"),
    ],
)
def test_what_wasm_may_lack_goes_to_native_and_if_there_is_none_to_wasm_with_a_warning(plan: Plan, said: str) -> None:
    choice = routing.choose(plan, [WASM, NATIVE])
    assert choice.backend == "native"
    assert choice.reasons == (f"wasm passed over: {said}", "native chosen: first that can do what was asked")
    choice = routing.choose(plan, [WASM, NO_NATIVE])
    assert choice.backend == "wasm"
    assert choice.reasons == (
        f"wasm passed over: {said}",
        "native passed over: no bubblewrap",
        f"wasm chosen for want of another, though {said}",
    )


DEEP = ("may recurse deeply (f with a cache)",)


def test_a_package_that_wasm_has_outweighs_a_recursion_that_may_be_deep() -> None:
    choice = routing.choose(
        code("functools", "numpy", soft=DEEP), [WASM.model_copy(update={"modules": {"functools", "numpy"}}), NATIVE]
    )
    assert choice == ("wasm", ("wasm chosen: it has numpy, though the code may recurse deeply (f with a cache)",))


@pytest.mark.parametrize(
    "plan",
    [
        code("json", soft=DEEP),
        code("numpy", soft=DEEP, system=("may start processes (x)",)),
        code("numpy", "torch", soft=DEEP),
    ],
)
def test_it_outweighs_nothing_else_and_without_a_package_native_has_the_larger_stack(plan: Plan) -> None:
    assert routing.choose(plan, [WASM, NATIVE]).backend == "native"


def test_a_granted_environment_has_the_packages_so_that_the_recursion_decides() -> None:
    plan = code("numpy", soft=DEEP, packages="/venv")
    assert routing.choose(plan, [WASM, offer("native", packages=True)]).backend == "native"


def test_a_session_goes_to_wasm_if_nothing_speaks_against_it() -> None:
    wasm, native = WASM.model_copy(update={"sessions": {"python"}}), offer("native", sessions={"python"})
    assert routing.choose(Plan(session=True), [wasm, native]).backend == "wasm"
    assert (
        routing.choose(
            Plan(session=True, egress=LISTED), [wasm, offer("native", sessions={"python"}, egress={"listed"})]
        ).backend
        == "native"
    )
    assert (
        routing.choose(Plan(session=True), [WASM, native]).reasons[0]
        == "wasm passed over: it has no sessions of python"
    )


def test_a_language_that_is_not_installed_goes_where_it_is_or_the_fixes_of_all_are_told() -> None:
    plan = Plan(language="typescript")
    wasm = WASM.model_copy(update={"languages": {"python", "typescript"}, "partly": {"typescript": "QuickJS"}})
    old = offer("native", not_installed={"typescript": "install Node 24"})
    choice = routing.choose(plan, [wasm, old])
    assert choice.backend == "wasm"
    assert choice.reasons[1] == "native passed over: typescript cannot be run by native here"
    with pytest.raises(errors.NotAvailable) as told:
        routing.choose(plan, [ABSENT.model_copy(update={"fix": "belljar setup wasm"}), old])
    assert told.value.fix == "wasm: belljar setup wasm; native: install Node 24"


def test_an_administrators_fuel_sends_nothing_away_and_a_callers_does() -> None:
    settings = Settings(defaults=Limits(fuel=400_000_000))
    by_default = policy.decide(RunRequest(code="1", language="bash"), settings)
    assert by_default.limits.fuel == 400_000_000
    assert routing.choose(by_default, [NATIVE]).backend == "native"
    asked = policy.decide(RunRequest(code="1", language="bash", limits=Limits(fuel=5)), settings)
    with pytest.raises(errors.PolicyDenied, match="cannot count fuel"):
        routing.choose(asked, [NATIVE])


def test_where_only_wasm_can_work_the_refusal_is_one_line_with_one_command() -> None:
    wasm = offer("wasm", available=False, why_not="not compiled", fix="belljar setup wasm", setup="compile it, once",
                 commands=False, languages={"python"})  # fmt: skip
    with pytest.raises(errors.NotAvailable) as told:
        routing.choose(code("json"), [wasm, NO_NATIVE])
    assert told.value.message == "no sandbox works here yet, but wasm will: compile it, once"
    assert told.value.fix == "belljar setup wasm"
    assert "native passed over: no bubblewrap" in told.value.context["reasons"], "the rest is there for who looks"
    for plan in (Plan(command=True), Plan(language="go"), code(egress=LISTED)):
        with pytest.raises(errors.NotAvailable, match="native passed over"):
            routing.choose(plan, [wasm, NO_NATIVE])


def test_all_doubts_are_told_at_once() -> None:
    reasons = routing.choose(code("requests", system=("may use sockets (x)",)), [WASM, NO_NATIVE]).reasons
    assert "imports requests, which wasm lacks; the code may use sockets (x), and wasm" in reasons[-1]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan(language="bash"), "it does not speak bash"),
        (Plan(command=True), "it runs code, not commands"),
        (code(egress=LISTED), "cannot be reached"),
        (code(isolation=Isolation.KERNEL), "weaker than kernel"),
        (code(workspace=Workspace(path="/x")), "cannot be granted a folder"),
    ],
)
def test_what_wasm_cannot_do_it_does_not_do_for_want_of_another_either(plan: Plan, said: str) -> None:
    with pytest.raises(errors.PolicyDenied, match=f"wasm passed over: .*{said}.*native passed over: no bubblewrap"):
        routing.choose(plan, [WASM, NO_NATIVE])


def test_a_backend_asked_for_by_name_is_kept_whatever_the_code_seems_to_need() -> None:
    plan = code("requests", system=("may start threads (x)",), backend="wasm")
    assert routing.choose(plan, [WASM, NATIVE]) == ("wasm", ("wasm chosen: asked for by name",))


# --- a second run ------------------------------------------------------------------------------

CODE = "import torch"


class Stage(Fake):
    """A fake under the name of a real backend, which counts what it is asked to run."""

    def __init__(self, name: str, program: Program, **fields: Any) -> None:
        super().__init__({CODE: program})
        self.name = name
        self.fields = {"processes": name != "wasm"} | fields
        self.runs = 0

    async def probe(self) -> Capabilities:
        return (await super().probe()).model_copy(update=self.fields)

    @asynccontextmanager
    async def open(self, plan: Plan) -> AsyncIterator[FakeBox]:
        self.runs += 1
        async with super().open(plan) as box:
            yield box


async def lacks_it(process: FakeProcess) -> int:
    await process.out("half an answer\n")
    raise ModuleNotFoundError("No module named 'torch'")


async def has_it(process: FakeProcess) -> int:
    await process.out("the answer\n")
    return 0


def staged(*backends: Stage, **settings: Any) -> Engine:
    return Engine(Settings(**settings), extra=backends)


def test_what_failed_for_want_of_something_runs_again_on_the_next_backend_if_asked_to() -> None:
    wasm, native = Stage("wasm", lacks_it), Stage("native", has_it)
    heard: list[str] = []
    result = belljar.run(CODE, engine=staged(wasm, native), retry="stronger", on_stdout=heard.append)
    assert (result.status, result.backend, result.stdout, result.stderr) == ("success", "native", "the answer\n", "")
    assert heard == ["the answer\n"], "of a run that was thrown away nothing is heard"
    assert result.reasons[:2] == (
        "wasm ran it first: ModuleNotFoundError: No module named 'torch'",
        "native chosen: first that can do what was asked",
    )
    assert (wasm.runs, native.runs) == (1, 1)


async def test_both_runs_are_told_and_recorded_under_the_name_that_was_given(tmp_path: Path) -> None:
    log, told = tmp_path / "audit.log", list[str]()
    engine = Engine(
        Settings(audit_log=str(log)), extra=(Stage("wasm", lacks_it), Stage("native", has_it)),
        sinks=[lambda event: told.append(event.run)],
    )  # fmt: skip
    result = await engine.run(RunRequest(code=CODE, retry="stronger"), id="bj-given")
    assert (result.backend, result.container_id, {*told}) == ("native", "bj-given", {"bj-given"})
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["created", "requested", "finished", "destroyed"] * 2
    assert {line["run"] for line in lines} == {"bj-given"}


def test_without_being_asked_to_nothing_runs_twice() -> None:
    wasm, native = Stage("wasm", lacks_it), Stage("native", has_it)
    result = belljar.run(CODE, engine=staged(wasm, native))
    assert (result.backend, result.stdout, native.runs) == ("wasm", "half an answer\n", 0)
    assert result.error is not None and result.error.context["stronger"] is True


@pytest.mark.parametrize(("options", "settings"), [({"backend": "wasm"}, {}), ({}, {"backend": "wasm"})])
def test_a_backend_asked_for_by_name_is_not_changed_for_a_second_run(
    options: dict[str, str], settings: dict[str, str]
) -> None:
    native = Stage("native", has_it)
    engine = staged(Stage("wasm", lacks_it), native, **settings)
    result = belljar.run(CODE, engine=engine, retry="stronger", **options)  # type: ignore[arg-type]
    assert (result.backend, result.status, native.runs) == ("wasm", "error", 0)


def test_a_failure_of_the_guest_s_own_making_is_not_repeated() -> None:
    def fails(process: FakeProcess) -> int:
        raise ValueError("mine")

    native, heard = Stage("native", has_it), list[str]()
    engine = staged(Stage("wasm", fails), native)
    result = belljar.run(CODE, engine=engine, retry="stronger", on_event=lambda event: heard.append(event.kind))
    assert (result.backend, result.status, native.runs) == ("wasm", "error", 0)
    assert heard == ["started", "stderr", "finished"], "what stands is heard after all"


def test_no_second_run_is_weaker_than_the_first_and_the_result_says_so() -> None:
    weak = Guarantees(isolation=Isolation.NAMESPACE)
    last: list[belljar.Result] = []
    native = Stage("native", has_it, guarantees=weak)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(belljar.engine.engine, "NAMES", ())
        engine = staged(Stage("wasm", lacks_it), native)
        result = belljar.run(
            CODE,
            engine=engine,
            retry="stronger",
            on_event=lambda event: last.extend([event.result] if event.result else []),
        )
    assert (result.backend, native.runs) == ("wasm", 0)
    assert result.reasons[-1].startswith("not run again: ") and "weaker than kernel" in result.reasons[-1]
    assert last[-1] == result


def test_an_open_sandbox_refuses_to_be_run_again_elsewhere() -> None:
    box = belljar.Sandbox(engine=staged(Stage("native", has_it)), retry="stronger")
    with pytest.raises(errors.InvalidRequest, match="retry: an open sandbox stays where it is"), box:
        pass


# --- whatever is asked and offered --------------------------------------------------------------

offers = st.lists(
    st.builds(
        offer,
        st.sampled_from("abc"),
        st.none() | st.sampled_from(Isolation),
        available=st.booleans(),
        egress=st.sets(st.sampled_from(["none", "listed", "open"])),
        workspace=st.booleans(),
        packages=st.booleans(),
        processes=st.booleans(),
        modules=st.none() | st.just({"json"}),
    ),
    max_size=4,
    unique_by=lambda each: each.backend,
)
plans = st.builds(
    Plan,
    backend=st.sampled_from(["auto", "a", "b"]),
    isolation=st.sampled_from(Isolation),
    egress=st.sampled_from([Egress(), LISTED, Egress(mode="open")]),
    workspace=st.none() | st.just(Workspace(path="/x")),
    packages=st.none() | st.just("/v"),
    language=st.none() | st.just("python"),
    needs=st.builds(
        Needs, modules=st.sets(st.sampled_from(["json", "yaml"])), system=st.sampled_from([(), ("forks",)])
    ),
)


@patient
@given(plans, offers)
def test_a_choice_is_never_weaker_than_asked_and_a_refusal_is_always_explained(
    plan: Plan, given_offers: list[Capabilities]
) -> None:
    by_name = {each.backend: each for each in given_offers}
    try:
        choice = routing.choose(plan, given_offers)
    except errors.BelljarError as error:
        assert error.message and error.fix
        return
    chosen = by_name[choice.backend]
    assert chosen.available and chosen.guarantees
    assert chosen.guarantees.isolation.rank >= plan.isolation.rank
    assert plan.egress.mode in chosen.egress
    assert chosen.workspace or not plan.workspace
    assert chosen.packages or not plan.packages
    assert plan.backend in ("auto", choice.backend)
    if plan.backend == "auto":
        told = [reason.split(" ")[0] for reason in choice.reasons]
        wanting = "for want of another" in choice.reasons[-1]
        before = list(by_name) if wanting else list(by_name)[: list(by_name).index(choice.backend)]
        assert told == [*before, choice.backend], "every backend looked at is explained, in order"
        assert wanting != routing.suits(plan, chosen)
        assert not (wanting and any(routing.suits(plan, each) for each in given_offers))


def test_an_image_that_a_backend_cannot_have_is_an_objection_which_names_it() -> None:
    with_images = offer("docker", images=True)
    choice = routing.choose(Plan(image="team/app:1"), [NATIVE, with_images])
    assert choice.backend == "docker"
    assert choice.reasons[0] == "native passed over: it runs in no image, and team/app:1 is asked for"
    with pytest.raises(errors.PolicyDenied, match="team/app:1 is asked for") as caught:
        routing.choose(Plan(image="team/app:1", backend="native"), [NATIVE])
    assert "leave out the image" in caught.value.fix


def test_a_living_sandbox_is_not_sent_to_a_runtime_that_has_none() -> None:
    runc, runsc = Guarantees(isolation=Isolation.NAMESPACE), Guarantees(isolation=Isolation.KERNEL)
    docker = offer(
        "docker", guarantees=runc, runtimes={"runc": runc, "runsc": runsc}, living=frozenset({"pty"}),
        lifeless={"runsc": "it cannot end one program for its memory"},
    )  # fmt: skip
    assert routing.choose(Plan(living=True), [docker]).backend == "docker"
    assert routing.choose(Plan(isolation=Isolation.KERNEL), [docker]).backend == "docker"
    for asked in ({"isolation": Isolation.KERNEL}, {"runtime": "runsc"}):
        for backend in ("auto", "docker"):
            with pytest.raises(errors.PolicyDenied, match="no living sandboxes on runsc: it cannot end one program"):
                routing.choose(Plan(living=True, backend=backend, **asked), [docker])
    strict = offer("vm", Isolation.KERNEL, living=frozenset())
    assert routing.choose(Plan(living=True, isolation=Isolation.KERNEL), [docker, strict]).backend == "vm"
