"""Which addresses are public: by a table, and by what an IPv6 address carries inside."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.core.addresses import endpoint, forms, why_not_public

PRIVATE = "a private network"


@pytest.mark.parametrize(
    ("address", "what"),
    [
        ("10.1.2.3", PRIVATE), ("172.31.0.1", PRIVATE), ("192.168.1.1", PRIVATE), ("100.100.100.200", "provider"),
        ("127.0.0.1", "loopback"), ("0.0.0.0", "no address"), ("169.254.169.254", "link-local"),
        ("168.63.129.16", "metadata"), ("192.0.0.192", "protocols"), ("192.0.2.1", "documentation"),
        ("198.51.100.1", "documentation"), ("203.0.113.1", "documentation"), ("198.19.255.255", "benchmarks"),
        ("192.88.99.1", "6to4"), ("224.0.0.251", "multicast"), ("239.255.255.250", "multicast"),
        ("255.255.255.255", "reserved"),
        ("::", "no address"), ("::1", "loopback"), ("fe80::1", "link-local"), ("fe80::1%eth0", "link-local"),
        ("fec0::1", "site-local"), ("fd00:ec2::254", PRIVATE), ("ff02::1", "multicast"), ("ff0e::1", "multicast"),
        ("2001:db8::1", "documentation"), ("3fff::1", "documentation"), ("2001:2::1", "benchmarks"),
        ("2001:0:5ef5:79fd::1", "Teredo"), ("100::1", "thrown away"), ("5f00::1", "segment"),
        ("64:ff9b:1::a00:1", "translation"), ("4000::1", "not given out"),
        ("::ffff:10.0.0.1", "10.0.0.1 in another form: a private network"),
        ("::ffff:0:10.0.0.1", "10.0.0.1 in another form"), ("::10.0.0.1", "10.0.0.1 in another form"),
        ("64:ff9b::169.254.169.254", "169.254.169.254 in another form"), ("2002:7f00:1::", "127.0.0.1 in another form"),
        ("2002:c058:6301::1", "a relay for 6to4"), ("2a00:1450::5efe:10.0.0.1", "10.0.0.1 in another form"),
        ("2a00:1450::200:5efe:192.168.0.1", "192.168.0.1 in another form"),
    ],
)  # fmt: skip
def test_it_is_said_what_an_address_is_instead_of_public(address: str, what: str) -> None:
    assert what in why_not_public(address)


@pytest.mark.parametrize(
    "address",
    ["93.184.216.34", "1.1.1.1", "223.255.255.1", "2a00:1450::1", "2606:4700::1111", "::ffff:93.184.216.34",
     "64:ff9b::93.184.216.34", "2002:5db8:d822::1"],
)  # fmt: skip
def test_what_is_public_is_let_through_in_whatever_form(address: str) -> None:
    assert why_not_public(address) == ""


@given(st.integers(0, 2**32 - 1))
def test_no_private_address_becomes_public_in_another_form(bits: int) -> None:
    inside = IPv4Address(bits)
    refused = bool(why_not_public(str(inside)))
    carried = [bits, 0xFFFF << 32 | bits, 0xFFFF << 48 | bits, 0x64FF9B << 96 | bits, 0x2002 << 112 | bits << 80]
    for number in carried:
        address = str(IPv6Address(number))
        assert inside in forms(address) or number == bits
        assert bool(why_not_public(address)) is refused, address
    if not refused:  # what is not public to a library, and not a relay or the like, is not public to us
        assert inside.is_global


@pytest.mark.parametrize(
    ("text", "address", "held"),
    [
        ("10.1.2.3:8443", "10.1.2.3", True), ("10.1.2.3:8443", "10.1.2.4", False),
        ("10.1.0.0/16:8443", "10.1.255.4", True), ("[fd00::5]:8443", "fd00::5", True),
        ("[fd00::/8]:8443", "fd12::1", True), ("[fd00::5]:8443", "10.1.2.3", False),
    ],
)  # fmt: skip
def test_an_endpoint_holds_its_addresses_at_its_port_alone(text: str, address: str, held: bool) -> None:
    assert endpoint(text).holds(forms(address)[0], 8443) is held
    assert not endpoint(text).holds(forms(address)[0], 443)


@pytest.mark.parametrize(
    "text", ["10.1.2.3", "10.1.2.3:0", "10.1.2.3:65536", "10.1.2.3/8:443", "fd00::5:443", "a:1", ""]
)
def test_what_is_no_address_with_a_port_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"write 10\.1\.2\.3:8443"):
        endpoint(text)
