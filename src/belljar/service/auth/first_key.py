"""The first key of a server, from a file: a Secret of Kubernetes, a credential of systemd, a secret of Compose.

Without it, the first key would have to be made on the server itself, before it may listen to anybody.
"""

from __future__ import annotations

import logging
import time

import anyio

from belljar.core import errors
from belljar.protocol.records import SCOPES, Key
from belljar.service.auth.access import KeyStore, digest_of, parse_key
from belljar.service.telemetry.server_log import facts

NAME = "first"
_MAX_BYTES = 4096
_log = logging.getLogger("belljar")


async def add_first_key(path: str, keys: KeyStore) -> None:
    """Adds the key that a file holds, with every scope, unless the store knows it already, be it as a revoked one.

    Raises:
        InvalidRequest: The file cannot be read, or holds no key.
    """
    identity, secret = _parts(path, await _read(path))
    if await _is_known(keys, identity):
        return
    key = Key(
        id=identity, name=NAME, digest=digest_of(secret), scopes=frozenset(SCOPES), created=time.time(), expires=None
    )
    try:
        await keys.add_key(key)
    except errors.BelljarError:
        if not await _is_known(keys, identity):  # else another server of the same store was quicker
            raise
    _log.info("the first key was taken from its file", extra=facts(key=identity, name=NAME))


async def _is_known(keys: KeyStore, identity: str) -> bool:
    return any(key.id == identity for key in await keys.keys())


async def _read(path: str) -> bytes:
    try:
        async with await anyio.open_file(path, "rb") as file:
            return await file.read(_MAX_BYTES)
    except OSError as error:
        raise errors.InvalidRequest(
            f"service.first_key_file: {path}: {error.strerror or error}", fix="belljar keys generate > FILE"
        ) from None


def _parts(path: str, text: bytes) -> tuple[str, str]:
    found = parse_key(text.decode("ascii", "replace").strip())
    if found is None:
        raise errors.InvalidRequest(
            f"service.first_key_file: {path} holds no key of Belljar", fix="belljar keys generate > FILE"
        )
    return found
