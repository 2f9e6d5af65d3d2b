"""Links by which whoever has one can read or write one file of a living sandbox for a while, without a key.

A link says what it is for and is signed with a secret of the data folder, which only this account can read. It counts
no longer than the sandbox, and than the key of the caller who made it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import anyio.to_thread
from pydantic import ValidationError

from belljar.core import errors
from belljar.core.model import Model
from belljar.protocol.living import MakeLink, SignedLink
from belljar.protocol.records import Caller
from belljar.service.auth.access import LOCAL_USER, Access, allow

PREFIX = "/links"
_SECRET_BYTES = 32
_LONGEST = 32 * 1024  # characters of what a link says


class Granted(Model):
    """What a link is for."""

    sandbox: str
    caller: str
    key: str
    method: str
    path: str
    until: int


class Links:
    """Makes links and judges them."""

    def __init__(self, data_dir: Path, access: Access) -> None:
        self._file = data_dir / "links.key"
        self._access = access
        self._secret = b""

    async def make(self, sandbox: str, caller: Caller, body: MakeLink, path: str) -> SignedLink:
        """Returns a link to a file of a caller's sandbox.

        Args:
            sandbox: its id.
            caller: who makes it.
            body: what it is for.
            path: the whole path of the file.
        """
        until = int(time.time() + body.seconds) + 1
        granted = Granted(
            sandbox=sandbox, caller=caller.name, key=caller.key, method=body.method, path=path, until=until
        )
        said = base64.urlsafe_b64encode(granted.model_dump_json().encode()).decode().rstrip("=")
        signature = await self.signature(said)
        return SignedLink(url=f"{PREFIX}/{quote(said)}?signature={signature}", method=body.method, expires=until)

    async def judge(self, said: str, signature: str, method: str) -> tuple[Granted, Caller]:
        """Returns what a link is for, and whose it is.

        Raises:
            Unauthorized: it is none of ours, was changed, is over, or is for something else.
        """
        right = await self.signature(said)
        if len(said) > _LONGEST or not hmac.compare_digest(right.encode(), signature.encode()):
            raise errors.Unauthorized("this is no link of this service", fix="ask for a new one")
        try:
            granted = Granted.model_validate(json.loads(base64.urlsafe_b64decode(said + "=" * (-len(said) % 4))))
        except (ValueError, ValidationError):
            raise errors.Unauthorized("this is no link of this service", fix="ask for a new one") from None
        if granted.until <= time.time():
            raise errors.Unauthorized("this link has expired", fix="ask for a new one")
        if granted.method != method:
            raise errors.Unauthorized(f"this link is for {granted.method}", fix="ask for another one")
        return granted, await self._maker(granted)

    async def _maker(self, granted: Granted) -> Caller:
        """Returns who made a link, if they may still do what it is for."""
        if granted.key:
            caller = await self._access.holder(granted.key)
            allow(caller, "files")
            return caller
        if granted.caller == LOCAL_USER and await self._access.required():
            raise errors.Unauthorized("a key is needed here by now", fix="ask for a new link")
        return Caller(name=granted.caller, scopes=frozenset({"files"}))

    async def signature(self, said: str) -> str:
        """Returns the signature of a text, by the secret of the data folder."""
        if not self._secret:
            self._secret = await anyio.to_thread.run_sync(_secret_of, self._file)
        return hmac.new(self._secret, said.encode(), hashlib.sha256).hexdigest()


def _secret_of(file: Path) -> bytes:
    """Returns the secret of a data folder, which is made when it is first asked for."""
    try:
        if not file.exists():
            _make_secret(file)
        found = file.read_bytes()
    except OSError as error:
        raise errors.NotAvailable(f"no link can be signed: {error.strerror}", fix="look at the data folder") from None
    if len(found) != _SECRET_BYTES:
        raise errors.NotAvailable("no link can be signed: the secret is damaged", fix=f"remove {file.name}")
    return found


def _make_secret(file: Path) -> None:
    draft = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as made:
        made.write(secrets.token_bytes(_SECRET_BYTES))
    try:
        with suppress(FileExistsError):
            os.link(draft, file)  # whole, or another server's
    finally:
        draft.unlink()
