"""The backend is chosen by what was asked and what is proved, never by something weaker, and the reasons are told."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st

from belljar import errors, routing
from belljar.models import Capabilities, Egress, Guarantees, Isolation, Plan, Workspace

patient = trials(deadline=None)  # a machine that is busy with other things is not a failure

LISTED = Egress(mode="listed", hosts=frozenset({"example.org"}))


def offer(name: str, isolation: Isolation | None = Isolation.NAMESPACE, **fields: Any) -> Capabilities:
    guarantees = Guarantees(isolation=isolation) if isolation else None
    return Capabilities(**{"backend": name, "available": True, "guarantees": guarantees} | fields)


ABSENT = offer("wasm", available=False, why_not="no wasmtime", fix="pip install wasmtime")


def test_auto_takes_the_first_that_can() -> None:
    choice = routing.choose(Plan(), [offer("a"), offer("b")])
    assert (choice.backend, choice.reasons) == ("a", ("a chosen: first that can do what was asked",))


def test_every_backend_passed_over_is_named_with_its_reason() -> None:
    offers = [ABSENT, offer("weak", Isolation.NONE), offer("unproved", None), offer("native"), offer("never asked")]
    choice = routing.choose(Plan(), offers)
    assert choice.backend == "native"
    assert choice.reasons == (
        "wasm passed over: no wasmtime",
        "weak passed over: isolation none is weaker than namespace",
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


offers = st.lists(
    st.builds(
        offer,
        st.sampled_from("abc"),
        st.none() | st.sampled_from(Isolation),
        available=st.booleans(),
        egress=st.sets(st.sampled_from(["none", "listed", "open"])),
        workspace=st.booleans(),
        packages=st.booleans(),
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
    before = list(by_name)[: list(by_name).index(choice.backend)] if plan.backend == "auto" else []
    assert [reason.split(" ")[0] for reason in choice.reasons] == [*before, choice.backend]
