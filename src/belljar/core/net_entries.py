"""Entries of allowlists: a host, what is below a host, or addresses; each with a port, for TLS or for plain HTTP.

    example.org             the host, over TLS, at port 443          *.example.org    all below it
    example.org:8443        the same at another port                 http://example.org    plain HTTP, at port 80
    192.0.2.0/24:443        addresses, always with a port            [2001:db8::/32]:443

Two kinds of names stand for several entries: a named set (`python-packages`), whose hosts the machine knows, and `*`,
which is all.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import AfterValidator

if TYPE_CHECKING:
    from ipaddress import IPv4Network, IPv6Network

    from belljar.core.addresses import IPAddress

Scheme = Literal["https", "http"]
ANY_HOST = "*"
NAMED_SETS = ("python-packages", "javascript-packages", "go-modules", "rust-crates", "git-hosts")
SET_NAME = "[a-z0-9][a-z0-9_-]{0,62}"
USUAL_PORTS: dict[Scheme, int] = {"https": 443, "http": 80}
_NAME = re.compile(r"(\*\.)?([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)*[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SPLIT = re.compile(
    r"(?:(?P<scheme>https?)://)?"
    r"(?:\[(?P<six>[0-9a-f:.]+(?:/\d{1,3})?)\]|(?P<four>[\d.]+(?:/\d{1,2})?)|(?P<name>[^:/\[\]]*))"
    r"(?::(?P<port>\d{1,5}))?/?"
)
_MOST_CHARACTERS = 253


class NetEntry(NamedTuple):
    """One entry, read."""

    name: str  # of a host, `*.` before it for what is below it; empty: addresses
    network: IPv4Network | IPv6Network | None
    port: int
    scheme: Scheme

    def meets(self, host: str, port: int, scheme: Scheme) -> bool:
        """Whether a host with this name, asked for in this way, is among these."""
        return bool(self.name) and (port, scheme) == (self.port, self.scheme) and _below(self.name, host)

    def meets_address(self, address: IPAddress, port: int, scheme: Scheme) -> bool:
        """Whether this address, asked for by itself, is among these."""
        return self.network is not None and (port, scheme) == (self.port, self.scheme) and address in self.network

    def holds(self, other: NetEntry) -> bool:
        """Whether all that the other stands for is among these."""
        if (self.port, self.scheme) != (other.port, other.scheme):
            return False
        if self.network is None or other.network is None:
            return bool(self.name) and bool(other.name) and _below(self.name, other.name)
        return self.network.version == other.network.version and other.network.subnet_of(self.network)  # type: ignore[arg-type]

    @property
    def text(self) -> str:
        """The entry as it is written."""
        where = self.name or _bracketed(str(self.network))
        shown = f":{self.port}" if self.network is not None or self.port != USUAL_PORTS[self.scheme] else ""
        return f"{'http://' if self.scheme == 'http' else ''}{where}{shown}"


def _below(pattern: str, host: str) -> bool:
    return pattern == host or (pattern.startswith("*.") and host.endswith(pattern[1:]))


def _bracketed(network: str) -> str:
    plain = network.removesuffix("/32") if ":" not in network else network.removesuffix("/128")
    return f"[{plain}]" if ":" in plain else plain


@lru_cache(4096)
def net_entry(text: str) -> NetEntry:
    """Reads an entry.

    Raises:
        ValueError: it is none.
    """
    shown, match = repr(text[:80]), _SPLIT.fullmatch(text.lower())
    if match is None:
        raise ValueError(_no_host(shown))
    scheme: Scheme = "http" if match["scheme"] == "http" else "https"
    port = int(match["port"] or USUAL_PORTS[scheme])
    if not 0 < port < 65536:
        raise ValueError(f"{shown} has no port that there is: write 1 to 65535")
    if found := match["six"] or match["four"]:
        return NetEntry("", _network(found, shown, bool(match["port"])), port, scheme)
    name = match["name"].rstrip(".")
    if not _NAME.fullmatch(name) or len(name) > _MOST_CHARACTERS:
        raise ValueError(_no_host(shown))
    return NetEntry(name, None, port, scheme)


def _no_host(shown: str) -> str:
    return f"{shown} is not a host name: write example.org, *.example.org for what is below it, or example.org:8443"


def _network(text: str, shown: str, with_port: bool) -> IPv4Network | IPv6Network:
    from ipaddress import ip_network

    if not with_port:
        raise ValueError(f"{shown} is an address: addresses are listed with their port, such as 192.0.2.0/24:443")
    try:
        return ip_network(text)
    except ValueError as error:
        raise ValueError(f"{shown} is no address with a port: {error}") from None


def _entry(value: str) -> str:
    return value.lower() if value.lower() in (ANY_HOST, *NAMED_SETS) else net_entry(value).text


def _plain(value: str) -> str:
    return net_entry(value).text


def _entry_or_set(value: str) -> str:
    return value if re.fullmatch(f"@{SET_NAME}", value) else _entry(value)


PlainNetEntry = Annotated[str, AfterValidator(_plain)]  # one host, or addresses
NetEntryText = Annotated[str, AfterValidator(_entry)]  # the same, a named set, or all: what a request lists
NetGrant = Annotated[str, AfterValidator(_entry_or_set)]  # the same, or a set of the administrator's


def covers(pattern: str, asked: str) -> bool:
    """Whether one entry of an allowlist stands for all that another stands for."""
    if pattern in (ANY_HOST, asked):
        return True
    if asked == ANY_HOST or pattern in NAMED_SETS or asked in NAMED_SETS:
        return False
    return net_entry(pattern).holds(net_entry(asked))


def covered(asked: str, granted: Collection[str]) -> bool:
    """Whether one of the entries of an allowlist stands for all that an entry stands for."""
    return any(covers(one, asked) for one in granted)
