"""A change of what an open sandbox may reach."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from belljar.core.model import Model
from belljar.core.net_entries import ANY_HOST, NAMED_SETS, NetEntryText, covered, covers
from belljar.core.request import Egress

_MOST = 256


class NetworkChange(Model):
    """What is to be changed, in this order: the whole list, what comes to it, what is taken away."""

    net: tuple[NetEntryText, ...] | None = Field(None, max_length=_MOST, description="the whole list instead")
    allow: tuple[NetEntryText, ...] = Field((), max_length=_MOST, description="entries that come to it")
    deny: tuple[NetEntryText, ...] = Field((), max_length=_MOST, description="entries that are refused from now on")

    @property
    def asked(self) -> Egress:
        """What it asks for, for those who say whether that may be had."""
        return Egress.of((*(self.net or ()), *self.allow))

    @property
    def named_sets(self) -> frozenset[str]:
        """The named sets in it."""
        return frozenset((*(self.net or ()), *self.allow, *self.deny)).intersection(NAMED_SETS)

    def applied(self, now: Egress) -> Egress:
        """Returns what is in force after it; named sets must have been replaced by their hosts."""
        wanted = Egress.of(self.net) if self.net is not None else now
        return _without(_with(wanted, self.allow), self.deny)


def _with(now: Egress, more: Iterable[str]) -> Egress:
    entries = tuple(more)
    if not entries:
        return now
    denied = frozenset(one for one in now.denied if not covered(one, entries))
    return Egress.of((*now.entries, *entries), denied)


def _without(now: Egress, gone: Iterable[str]) -> Egress:
    """What a wider entry would still allow is denied by name."""
    entries = tuple(gone)
    if not entries:
        return now
    if ANY_HOST in entries:
        return Egress()
    left = [one for one in now.entries if one == ANY_HOST or not covered(one, entries)]
    still = {one for one in entries if any(covers(wide, one) for wide in left)}
    return Egress.of(left, now.denied | still)


class NetworkRecord(Model):
    """What a sandbox may reach now."""

    mode: str = Field(description="none, listed or open")
    net: tuple[str, ...] = Field((), description="the list; * is any host")
    denied: tuple[str, ...] = Field((), description="what is refused although the list would allow it")

    @classmethod
    def of(cls, egress: Egress) -> NetworkRecord:
        """Tells what is in force."""
        return cls(mode=egress.mode, net=egress.entries, denied=tuple(sorted(egress.denied)))
