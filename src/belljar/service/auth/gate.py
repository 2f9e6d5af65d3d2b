"""Authenticates and authorises the requests of every surface (HTTP, WebSocket, MCP).

The refusal of a known caller is written to the audit log. Refusals of unknown callers are only counted: anybody could
fill the log with them.
"""

from __future__ import annotations

from collections.abc import Mapping

from belljar.core import errors
from belljar.engine import audit, tracing
from belljar.protocol.records import Caller, Scope
from belljar.service.auth.access import allow
from belljar.service.service import Service


async def known(service: Service, headers: Mapping[str, str]) -> Caller:
    """Returns the caller that sent these headers, or raises Unauthorized.

    What this task does from now on is audited under the caller's name, and traced as a part of the caller's trace.
    """
    try:
        caller = await service.access.known(headers)
    except errors.Unauthorized as refusal:
        service.refusals.count(refusal)
        raise
    audit.caller.set(caller.name)
    tracing.join(headers)
    return caller


async def admit(service: Service, headers: Mapping[str, str], *scopes: Scope) -> Caller:
    """Returns the caller that sent these headers, if they have one of these scopes; else raises PolicyDenied."""
    caller = await known(service, headers)
    await require(service, caller, *scopes)
    return caller


async def require(service: Service, caller: Caller, *scopes: Scope) -> None:
    """Raises PolicyDenied for a caller that has none of these scopes, and records that."""
    try:
        allow(caller, *scopes)
    except errors.PolicyDenied as refusal:
        await service.refusals.record(refusal, scope=scopes[0])
        raise
