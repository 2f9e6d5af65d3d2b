"""Interpreters of a living sandbox: each keeps its variables from turn to turn, and there may be any number of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar

from belljar.backends.base import Emit, Interpreting
from belljar.control.callbacks import Cancel, Listener, OutputCallback, listening
from belljar.core import errors, policy
from belljar.core.options import StrPath, request
from belljar.core.request import MAX_TIMEOUT_SECONDS
from belljar.core.result import Result
from belljar.host.source import turn_code
from belljar.living.conversation import Conversation, named_alike
from belljar.living.handles import InterpreterHandle

if TYPE_CHECKING:
    from belljar.living.machine import LivingMachine


class AsyncBoxInterpreter(InterpreterHandle):
    """An interpreter of a living sandbox: `async with box.interpreter() as python: await python.run("x = 1")`.

    Or `python = await box.interpreter()` and `await python.close()`. It ends with its sandbox at the latest. A turn
    has no timeout unless one is given; one that is over it is interrupted, and the interpreter lives on.
    """

    _kind: ClassVar[str] = "interpreter"

    def __init__(
        self, machine: Callable[[], LivingMachine], language: str = "python", env: Mapping[str, str] | None = None
    ) -> None:
        """Nothing is started yet: `AsyncSandbox.interpreter` makes one."""
        self.language: str = language
        self._machine = machine
        self._env = dict(env or {})
        self._conversation: Conversation | None = None

    async def run(
        self, code: str | None = None, *, path: StrPath | None = None, timeout: float | None = None,
        on_event: Listener | None = None, on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None, cancel: Cancel | None = None, id: str = "",
    ) -> Result:  # fmt: skip
        """Runs one turn, after those before it. Values that it shows are in the result's `results`.

        Args:
            code: the code.
            path: a file of this machine to run instead.
            timeout: seconds for this turn; none unless given.
            on_event: called with each event, in order.
            on_stdout: called with each piece of standard output.
            on_stderr: called with each piece of standard error.
            cancel: a handle that stops the turn.
            id: the name under which the turn is recorded; the sandbox's unless given.

        Raises:
            SessionEnded: it has ended before.
        """
        machine, conversation = self._machine(), self._open_conversation
        lease = machine.lease
        asked = request(await turn_code(code, path), language=self.language, timeout=timeout)
        limits = lease.limits(asked)

        async def work(emit: Emit) -> Result:
            return await conversation.turn(asked.code or "", limits, emit, cancel or Cancel())

        with machine.in_use():
            return await lease.conduct(asked, work, listener=listening(on_event, on_stdout, on_stderr), id=id)

    def interrupt(self) -> bool:
        """Interrupts the turn under way, as Ctrl-C does; the interpreter lives on. False: no turn is under way."""
        return self._open_conversation.interrupt()

    async def complete(self, text: str) -> tuple[str, ...]:
        """Returns the names that a half-typed one, such as "os.pa", may become, as the guest says."""
        return await named_alike(self._open_conversation, text, self._machine().lease.plan.limits)

    @property
    def ended(self) -> str:
        """Says how it ended; empty while it lives."""
        return self._open_conversation.ended

    @property
    def _open_conversation(self) -> Conversation:
        if self._conversation is None:
            raise errors.InvalidRequest("this interpreter is not open", fix="use it in a `with` block")
        return self._conversation

    @asynccontextmanager
    async def _living(self) -> AsyncIterator[None]:
        machine = self._machine()
        box, lease = machine.box, machine.lease
        known = ", ".join(sorted(lease.capabilities.sessions)) or "none"
        try:
            language = lease.engine.languages.get(self.language)
        except errors.InvalidRequest as error:
            raise errors.InvalidRequest(error.message, fix=f"choose from: {known}") from None
        if language.name not in lease.capabilities.sessions or not isinstance(box, Interpreting):
            raise errors.NotAvailable(
                f"{lease.capabilities.backend} has no interpreter of {language.name}", fix=f"choose from: {known}"
            )
        policy.check_language(language, lease.plan.egress, lease.capabilities)
        interpreter = box.interpreter({**lease.usual_env, **self._env}, MAX_TIMEOUT_SECONDS, language.name)
        conversation = Conversation(
            interpreter, box.id, idle=MAX_TIMEOUT_SECONDS, lifetime=MAX_TIMEOUT_SECONDS, turns=0
        )
        await conversation.open(machine.tasks, lease.emitter(None, box.id))
        self._conversation = conversation
        machine.interpreters.add(self)
        try:
            yield
        finally:
            machine.interpreters.discard(self)
            await conversation.close()
