"""Keys that lie in memory, and how somebody who holds one asks."""

from __future__ import annotations

import time
from typing import Any

import anyio
import pytest

from belljar.core import errors
from belljar.core.settings import ServiceSettings, Settings
from belljar.protocol.records import Caller, Key
from belljar.service.auth.access import Access, allow


class Keys:
    """A store of keys in memory, which counts how often it is asked."""

    def __init__(self, *keys: Key) -> None:
        self.all = {key.id: key for key in keys}
        self.asked = 0

    async def keys(self) -> list[Key]:
        self.asked += 1
        await anyio.lowlevel.checkpoint()
        return list(self.all.values())

    async def add_key(self, key: Key) -> None:
        self.all[key.id] = key

    async def revoke_key(self, id: str) -> bool:
        key = self.all.get(id)
        if key is None or key.revoked is not None:
            return False
        self.all[id] = key.model_copy(update={"revoked": time.time()})
        return True


def settings(**service: Any) -> Settings:
    return Settings(service=ServiceSettings(**service))


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def ask(access: Access, headers: dict[str, str], scope: Any) -> Caller:
    caller = await access.known(headers)
    allow(caller, scope)
    return caller


async def refusal(access: Access, headers: dict[str, str], scope: Any = "run") -> errors.PolicyDenied:
    with pytest.raises(errors.PolicyDenied) as caught:
        await ask(access, headers, scope)
    for value in headers.values():
        for word in value.replace(".", " ").replace("_", " ").split():
            assert len(word) < 20 or word not in f"{caught.value}{caught.value.as_dict()}", "a secret in a message"
    return caught.value
