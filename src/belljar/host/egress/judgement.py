"""Decides whether a guest may be connected: by the host it asks for, and by the address behind that host."""

from __future__ import annotations

import re
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from typing import NamedTuple

import anyio

from belljar.core.addresses import HTTPS_PORT, Endpoint, IPAddress, forms, why_not_public
from belljar.core.net_entries import NAMED_SETS, USUAL_PORTS, Scheme, net_entry
from belljar.core.request import Egress
from belljar.core.values import few

_TARGET = re.compile(rb"(?:(?P<name>[A-Za-z0-9.-]{1,253})|\[(?P<six>[0-9A-Fa-f:.]{2,45})\]):(?P<port>\d{1,5})")
_MAIL_PORT = 25  # which an open network does not reach: nobody should send mail from here unasked

Told = Callable[[str], Awaitable[None]]
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class EgressDecision(NamedTuple):
    """Whether a guest may connect to a host, and if not, why, and what would help."""

    host: str
    port: int
    objection: str = ""  # empty: allowed
    fix: str = ""
    tls: bool = True  # may it be spoken to over TLS?
    plain: bool = False  # and in plain HTTP?
    address: bool = False  # is the host an address?
    raw: bool = False  # may it be spoken to in any way?
    named_port: bool = False  # was it listed with a port of its own, or is the network open?

    def refused(self, objection: str, fix: str) -> EgressDecision:
        """The same target, refused."""
        return self._replace(objection=objection, fix=fix)

    @property
    def shown(self) -> str:
        """The target as it is told."""
        where = f"[{self.host}]" if ":" in self.host and self.address else self.host
        return f"{where}:{self.port}" if self.port else where

    def words(self) -> str:
        """What is told of a refusal; `core.diagnose` reads it."""
        return f"network: {self.shown} was refused: {self.objection} — {self.fix}"


async def resolve(host: str, port: int) -> Sequence[str]:
    """Looks up the addresses of a name, as the host sees them."""
    found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def judge(
    target: bytes, allowed: Egress, ports: Collection[int] = (HTTPS_PORT,), *, plain: bool = False
) -> EgressDecision:
    """Decides on a target by its name, or by its address, alone.

    Args:
        target: what the guest wrote: host and port.
        allowed: what it was granted.
        ports: those at which a plain name of the list may be asked for: 443, and those of `egress.private`.
        plain: whether it is a request in plain HTTP, and no `CONNECT`.

    Returns:
        The decision; where it allows the target, the addresses behind it are still to be judged.
    """
    match = _TARGET.fullmatch(target)
    if not match or not 0 < int(match["port"]) < 65536:
        text = target[:60].decode("ascii", "backslashreplace")
        return EgressDecision(text, 0, "only host names can be reached", "ask for a name of the list")
    if match["six"] or re.fullmatch(rb"[\d.]+", match["name"]):
        return _judge_literal((match["six"] or match["name"]).decode(), int(match["port"]), allowed, plain)
    found = EgressDecision(match["name"].decode().lower().rstrip("."), int(match["port"]))
    entries = [net_entry(text) for text in allowed.hosts if text not in NAMED_SETS]
    if any(one.meets(found.host, found.port, scheme) for one in map(net_entry, allowed.denied) for scheme in _SCHEMES):
        return found.refused("it was denied to this sandbox", f'allow it with net=["{found.host}"]')
    if allowed.mode == "open":
        return _open(found, plain)
    tls = not plain and any(one.meets(found.host, found.port, "https") for one in entries)
    in_clear = any(one.meets(found.host, found.port, "http") for one in entries)
    if tls or in_clear:
        return found._replace(tls=tls, plain=in_clear, named_port=(tls and found.port != HTTPS_PORT) or in_clear)
    usual = any(one.meets(found.host, HTTPS_PORT, "https") for one in entries)
    if usual and not plain and found.port in ports:
        return found
    return found.refused(*_unlisted(found, allowed, usual=usual, plain=plain, ports=ports))


_SCHEMES: tuple[Scheme, Scheme] = ("https", "http")


def _unlisted(
    found: EgressDecision, allowed: Egress, *, usual: bool, plain: bool, ports: Collection[int]
) -> tuple[str, str]:
    """Why a name is refused, and what would help."""
    entry = net_entry(f"{'http://' if plain else ''}{found.host}:{found.port}").text
    if usual and plain:
        return "plain HTTP is not let out", f'use https, or list net=["{entry}"]'
    if usual:
        shown = " and ".join(map(str, sorted(ports)))
        plural = "ports" if len(ports) > 1 else "port"
        return f"only {plural} {shown} can be reached", f'list the port: net=["{entry}"]'
    return f"it is not on the list ({few(allowed.hosts)})", f'allow it with net=["{entry}"]'


def _open(found: EgressDecision, plain: bool) -> EgressDecision:
    if found.port == _MAIL_PORT:
        return found.refused("mail is not let out of an open network", f'list it: net=["{found.host}:{found.port}"]')
    if not plain and found.port not in USUAL_PORTS.values():
        return found._replace(raw=True, named_port=True)
    return found._replace(tls=not plain, plain=found.port != HTTPS_PORT or plain, named_port=True)


def _judge_literal(text: str, port: int, allowed: Egress, plain: bool) -> EgressDecision:
    """Decides on an address that the guest wrote itself, which only an entry of addresses can allow."""
    from ipaddress import ip_address

    found = EgressDecision(text, port, address=True)
    no_name = "only host names can be reached, not addresses that are not listed"
    try:
        address = ip_address(text)
    except ValueError:
        return found.refused("only host names can be reached", "ask for a name of the list")
    found = found._replace(host=str(address))
    schemes: list[Scheme] = [
        scheme
        for scheme in _SCHEMES
        if any(net_entry(one).meets_address(address, port, scheme) for one in allowed.hosts if one not in NAMED_SETS)
    ]
    if any(net_entry(one).meets_address(address, port, scheme) for one in allowed.denied for scheme in _SCHEMES):
        return found.refused("it was denied to this sandbox", f'allow it with net=["{found.shown}"]')
    if allowed.mode == "open":
        return _open(found, plain)
    if not schemes or (plain and "http" not in schemes):
        return found.refused(no_name, f'ask for a name of the list, or list net=["{found.shown}"]')
    return found._replace(tls=not plain and "https" in schemes, plain="http" in schemes, named_port=True)


def judge_address(found: EgressDecision, address: str, private: Sequence[Endpoint]) -> EgressDecision:
    """Decides on one address of a target that was allowed."""
    itself, *_ = known = forms(address)
    if any(one.holds(itself, found.port) for one in private):
        return found
    if found.port != HTTPS_PORT and not found.named_port:
        return found.refused(f"only port {HTTPS_PORT} can be reached", f'list the port: net=["{found.shown}"]')
    what = why_not_public(address) or ("this machine itself" if any(map(_is_own, known)) else "")
    shown = f"[{itself}]" if itself.version == 6 else str(itself)
    fix = f'if that is meant, an administrator lists "{shown}:{found.port}" in egress.private'
    leads = "it is not public" if found.address else f"it leads to {address}, which is not public"
    return found.refused(f"{leads} but {what}", fix) if what else found


def _is_own(address: IPAddress) -> bool:
    """Whether an address is one of this machine's: then the kernel would send from it to itself. Nothing is sent."""
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((str(address), HTTPS_PORT))
        return str(probe.getsockname()[0]) == str(address)
    return False
