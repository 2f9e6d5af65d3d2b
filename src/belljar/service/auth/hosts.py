"""Which hosts a caller may ask for: those that the administrator lists, for all or for one key."""

from __future__ import annotations

from belljar.core import errors
from belljar.core.net_entries import ANY_HOST, covered
from belljar.core.request import Egress
from belljar.core.settings import ServiceEgress
from belljar.core.values import few
from belljar.protocol.records import Caller


def check_hosts(asked: Egress, caller: Caller, settings: ServiceEgress) -> None:
    """Raises PolicyDenied where a run asks for a host that its caller may not have.

    Args:
        asked: What the run is to reach.
        caller: Who asks. With the scope `admin` one may ask for anything.
        settings: The administrator's hosts and sets.
    """
    if asked.mode == "none" or caller.may("admin"):
        return
    granted = settings.patterns(caller.net)
    told = f"this caller may reach only {few(granted)}" if granted else "this caller may reach no host"
    for host in asked.entries:
        if not covered(host, granted):
            raise errors.PolicyDenied(
                f"net: {'any host' if host == ANY_HOST else host} may not be reached from here: {told}",
                fix="do without, or have the administrator list it in service.egress or give the key it (--net)",
                context={"field": "net", "host": host},
            )
