"""Which hosts a caller may ask for: lists, sets, patterns, and who needs none."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from belljar.core import errors
from belljar.core.request import Egress
from belljar.core.settings import ServiceEgress
from belljar.protocol.records import Caller
from belljar.service.auth.access import new_key
from belljar.service.auth.hosts import check_hosts

SETTINGS = ServiceEgress(hosts=("a.example", "@web"), sets={"web": ("*.web.example",), "more": ("more.example",)})


def may(host: str, *, net: tuple[str, ...] | None = None, settings: ServiceEgress = SETTINGS) -> bool:
    try:
        check_hosts(Egress(mode="listed", hosts=frozenset({host})), Caller(name="x", net=net), settings)
    except errors.PolicyDenied as error:
        assert host in error.message and error.fix
        return False
    return True


@pytest.mark.parametrize("host", ["a.example", "b.web.example", "*.web.example", "*.b.web.example"])
def test_what_is_listed_may_be_asked_for(host: str) -> None:
    assert may(host)


@pytest.mark.parametrize(
    "host", ["b.example", "*.example", "web.example", "more.example", "evilweb.example", "*.a.example"]
)
def test_what_is_not_listed_may_not(host: str) -> None:
    assert not may(host)


def test_nothing_is_listed_at_first_and_a_star_stands_for_every_host() -> None:
    assert not may("a.example", settings=ServiceEgress())
    assert may("any.example", settings=ServiceEgress(hosts=("*",)))


def test_a_list_of_ones_own_takes_the_place_of_that_for_all() -> None:
    assert may("more.example", net=("@more",))
    assert not may("a.example", net=("@more",))
    assert not may("a.example", net=())
    assert not may("a.example", net=("@unknown",)), "a set that was removed grants nothing"


def test_whoever_asks_for_any_host_needs_the_star_or_to_be_an_administrator() -> None:
    anything = Egress(mode="open")
    with pytest.raises(errors.PolicyDenied):
        check_hosts(anything, Caller(name="x"), SETTINGS)
    check_hosts(anything, Caller(name="x", net=("*",)), SETTINGS)
    check_hosts(anything, Caller(name="x", scopes=frozenset({"admin"})), SETTINGS)
    check_hosts(Egress(), Caller(name="x"), ServiceEgress())


def test_a_set_that_is_not_defined_and_what_is_no_host_are_refused() -> None:
    with pytest.raises(ValidationError, match="there is no set '@nowhere'"):
        ServiceEgress(hosts=("@nowhere",))
    with pytest.raises(ValidationError, match="is an address"):
        ServiceEgress(sets={"a": ("10.1.2.3",)})
    with pytest.raises(errors.InvalidRequest, match="net"):
        new_key("ci", frozenset({"run"}), net=["not a host"])
