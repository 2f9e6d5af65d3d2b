"""The gate of every surface: who asks, and whether they may.

Somebody we know who is refused is written down. Strangers are counted only: they could fill any log.
"""

from __future__ import annotations

from collections.abc import Mapping

from belljar.core import errors
from belljar.engine import audit, tracing
from belljar.protocol.records import Caller, Scope
from belljar.service.auth.access import allow
from belljar.service.service import Service


async def known(service: Service, headers: Mapping[str, str]) -> Caller:
    try:
        caller = await service.access.known(headers)
    except errors.Unauthorized as refusal:
        service.refusals.count(refusal)
        raise
    audit.caller.set(caller.name)
    tracing.join(headers)
    return caller


async def admit(service: Service, headers: Mapping[str, str], *scopes: Scope) -> Caller:
    """Who asks, if they have one of these scopes."""
    caller = await known(service, headers)
    await require(service, caller, *scopes)
    return caller


async def require(service: Service, caller: Caller, *scopes: Scope) -> None:
    try:
        allow(caller, *scopes)
    except errors.PolicyDenied as refusal:
        await service.refusals.record(refusal, scope=scopes[0])
        raise
