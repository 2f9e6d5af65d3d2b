"""An interpreter of a living sandbox on a server: an `AsyncBoxInterpreter` over HTTP."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar

import anyio

from belljar.client.runs import conduct, parse
from belljar.client.transport import Transport
from belljar.control.callbacks import Cancel, Listener, OutputCallback, control_for, listening
from belljar.core import errors
from belljar.core.options import StrPath, request
from belljar.core.result import Result
from belljar.host.source import turn_code
from belljar.living.handles import InterpreterHandle
from belljar.protocol.living import InterpreterRecord, Interrupted, Names

_OPENING_SECONDS = 60.0
_CLOSING_SECONDS = 15.0


class AsyncRemoteInterpreter(InterpreterHandle):
    """An interpreter of a living sandbox on a server: `async with box.interpreter() as python`, or `await` it."""

    _kind: ClassVar[str] = "interpreter"

    def __init__(self, transport: Transport, sandbox: str, language: str, env: Mapping[str, str]) -> None:
        """Is made by `AsyncRemoteLivingSandbox.interpreter`; nothing is started yet."""
        self.language: str = language
        self._transport = transport
        self._parent = f"{sandbox}/interpreters"
        self._env = dict(env)
        self._record: InterpreterRecord | None = None

    @property
    def ended(self) -> str:
        """Says how it ended, as far as is known; empty while it lives."""
        return self._open_record.ended

    async def run(
        self, code: str | None = None, *, path: StrPath | None = None, timeout: float | None = None,
        on_event: Listener | None = None, on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None, cancel: Cancel | None = None, id: str = "",
    ) -> Result:  # fmt: skip
        """Runs one turn, after those before it. See `AsyncBoxInterpreter.run`; the server gives turns their ids.

        Args:
            code: the code.
            path: a file of this machine to run instead.
            timeout: seconds for this turn; none unless given.
            on_event: called with each event, in order.
            on_stdout: called with each piece of standard output.
            on_stderr: called with each piece of standard error.
            cancel: a handle that stops the turn.
            id: goes with the library only.
        """
        if id:
            raise errors.InvalidRequest("id: a server names the turns itself", fix="leave it out")
        asked = request(await turn_code(code, path), timeout=timeout)
        body: dict[str, Any] = {"code": asked.code} | ({} if timeout is None else {"timeout_seconds": timeout})
        listener, control = listening(on_event, on_stdout, on_stderr), control_for(cancel) if cancel else None
        try:
            return await conduct(
                self._transport, f"{self._path}/run", body, seconds=timeout, listener=listener, control=control
            )
        finally:
            await self._look()

    async def interrupt(self) -> bool:
        """Interrupts the turn under way, as Ctrl-C does; the interpreter lives on. False: no turn is under way."""
        return parse(Interrupted, await self._ask("POST", "/interrupt")).interrupted

    async def complete(self, text: str) -> tuple[str, ...]:
        """Returns the names that a half-typed one, such as "os.pa", may become, as the guest says."""
        return parse(Names, await self._ask("POST", "/complete", again=True, json={"text": text})).names

    @property
    def _open_record(self) -> InterpreterRecord:
        if self._record is None:
            raise errors.InvalidRequest("this interpreter is not open", fix="use it in a `with` block")
        return self._record

    @property
    def _path(self) -> str:
        return f"{self._parent}/{self._open_record.id}"

    async def _ask(self, method: str, what: str, **options: Any) -> bytes:
        return await self._transport.ask(method, self._path + what, **options)

    async def _look(self) -> None:
        """Learns whether the interpreter has ended with its turn."""
        with anyio.move_on_after(_CLOSING_SECONDS), suppress(errors.BelljarError):
            found = parse(list[InterpreterRecord], await self._transport.ask("GET", self._parent))
            mine = self._open_record
            gone = mine.model_copy(update={"ended": mine.ended or "it is gone"})
            self._record = next((one for one in found if one.id == mine.id), gone)

    @asynccontextmanager
    async def _living(self) -> AsyncIterator[None]:
        body = {"language": self.language, "environment": self._env}
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        answer = await self._transport.ask(
            "POST", self._parent, again=True, json=body, headers=headers, read=_OPENING_SECONDS
        )
        self._record = parse(InterpreterRecord, answer)
        try:
            yield
        finally:
            with anyio.move_on_after(_CLOSING_SECONDS, shield=True), suppress(errors.BelljarError):
                await self._ask("DELETE", "")
            self._record = None
