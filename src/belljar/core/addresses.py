"""Which addresses a guest may be connected to: those of the public internet, and what an administrator lists besides.

The table is ours and explicit. What a library calls "global" changes with its version, and leaves out multicast,
relays, and addresses that carry another one inside.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple

IPAddress = IPv4Address | IPv6Address
HTTPS_PORT = 443

_NOT_PUBLIC = {
    "0.0.0.0/8": "no address of another machine",
    "10.0.0.0/8": "a private network",
    "100.64.0.0/10": "a provider's private network",
    "127.0.0.0/8": "this machine's loopback",
    "168.63.129.16/32": "a cloud's metadata",
    "169.254.0.0/16": "link-local, where clouds have their metadata",
    "172.16.0.0/12": "a private network",
    "192.0.0.0/24": "reserved for protocols",
    "192.0.2.0/24": "reserved for documentation",
    "192.31.196.0/24": "reserved for name servers of private networks",
    "192.52.193.0/24": "a relay for multicast",
    "192.88.99.0/24": "a relay for 6to4",
    "192.168.0.0/16": "a private network",
    "192.175.48.0/24": "reserved for name servers of private networks",
    "198.18.0.0/15": "reserved for benchmarks",
    "198.51.100.0/24": "reserved for documentation",
    "203.0.113.0/24": "reserved for documentation",
    "224.0.0.0/4": "multicast",
    "240.0.0.0/4": "reserved",
    "::/128": "no address of another machine",
    "::1/128": "this machine's loopback",
    "64:ff9b:1::/48": "a private network's translation of addresses",
    "100::/64": "where packets are thrown away",
    "100:0:0:1::/64": "reserved for protocols",
    "2001::/23": "reserved for protocols (Teredo, ORCHID, benchmarks)",
    "2001:db8::/32": "reserved for documentation",
    "2620:4f:8000::/48": "reserved for name servers of private networks",
    "3fff::/20": "reserved for documentation",
    "5f00::/16": "reserved for segment routing",
    "fc00::/7": "a private network",
    "fe80::/10": "link-local",
    "fec0::/10": "site-local, a private network",
    "ff00::/8": "multicast",
}
# IPv6 addresses that stand for an IPv4 address, and how far from the right that one begins, in bits.
_CARRIERS = {"::/96": 0, "::ffff:0:0/96": 0, "::ffff:0:0:0/96": 0, "64:ff9b::/96": 0, "2002::/16": 80}
_ISATAP = (0x00005EFE, 0x02005EFE)  # the third quarter of an address whose last quarter is an IPv4 address
_UNICAST = "2000::/3"  # all of IPv6 that has been given out
_ENDPOINT = re.compile(r"(?:\[(?P<six>[0-9a-fA-F:.]+(?:/\d{1,3})?)\]|(?P<four>[\d.]+(?:/\d{1,2})?)):(?P<port>\d{1,5})")


class Endpoint(NamedTuple):
    """Addresses and the port at which they may be reached."""

    network: IPv4Network | IPv6Network
    port: int

    def holds(self, address: IPAddress, port: int) -> bool:
        """Whether an address and a port are among these."""
        return port == self.port and address in self.network


def endpoint(text: str) -> Endpoint:
    """Reads `10.1.2.3:8443`, `10.1.0.0/16:443` or `[fd00::5]:443`.

    Raises:
        ValueError: it is none of these.
    """
    match = _ENDPOINT.fullmatch(text)
    try:
        if match and 0 < int(match["port"]) < 65536:
            return Endpoint(ip_network(match["six"] or match["four"]), int(match["port"]))
        reason = ""
    except ValueError as error:
        reason = f" ({error})"
    raise ValueError(
        f"{text[:80]!r} is no address with a port{reason}: write 10.1.2.3:8443, 10.1.0.0/16:443 or [fd00::5]:443"
    )


@cache
def _table() -> dict[IPv4Network | IPv6Network, str]:
    return {ip_network(text): what for text, what in _NOT_PUBLIC.items()}


@cache
def _carriers() -> dict[IPv4Network | IPv6Network, int]:
    return {ip_network(text): shift for text, shift in _CARRIERS.items()}


def forms(text: str) -> tuple[IPAddress, ...]:
    """Returns an address, and after it the IPv4 address that it stands for, if it is an IPv6 address that has one."""
    address = ip_address(text)
    return (address, *_carried(address)) if isinstance(address, IPv6Address) else (address,)


def _carried(address: IPv6Address) -> Iterator[IPv4Address]:
    bits = int(address)
    for network, shift in _carriers().items():
        if address in network:
            yield IPv4Address(bits >> shift & 0xFFFFFFFF)
    if bits >> 32 & 0xFFFFFFFF in _ISATAP:
        yield IPv4Address(bits & 0xFFFFFFFF)


def why_not_public(text: str) -> str:
    """Says what an address is instead of public, such as "a private network"; empty if it is public."""
    found = forms(text)
    for form in found:
        what = next((what for network, what in _table().items() if form in network), "")
        if what:
            return what if form == found[0] else f"{form} in another form: {what}"
    given_out = found[0].version == 4 or any(found[0] in network for network in (ip_network(_UNICAST), *_carriers()))
    return "" if given_out else "not given out to anybody"
