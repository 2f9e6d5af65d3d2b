"""What a check is made of: its name, the guests it runs, the bench it runs them on, and how it says no."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar, overload

from belljar.backends.base import Backend
from belljar.backends.fake import FakeProcess, Program
from belljar.core import errors
from belljar.core.capabilities import Capabilities, LanguageSupport
from belljar.core.result import Event, Result
from belljar.core.routing import LACKS
from belljar.engine.engine import Engine
from belljar.sandbox import AsyncSandbox, arun
from belljar.testing.conformance.machines import UsedMachines

if TYPE_CHECKING:
    from belljar.session.session import AsyncSession

T = TypeVar("T")
Refusal = TypeVar("Refusal", bound=Exception)


class CheckFailed(Exception):
    """The backend broke its contract; the message says where."""


class Bench:
    """A backend on trial. All a check may use: it never sees which backend it is, only what that can do."""

    def __init__(
        self, engine: Engine, backend: str, capabilities: Capabilities, languages: Sequence[LanguageSupport]
    ) -> None:
        self.engine = engine
        self.backend = backend
        self.capabilities = capabilities
        self.languages: frozenset[str] = frozenset(support.name for support in languages if support.available)
        self._machines: UsedMachines | None = None
        self.had_used: bool = False  # did a check get a living sandbox in which another check had been?

    def sharing(self, machines: UsedMachines) -> Self:
        """Returns a bench for one check, whose living sandboxes may have served other checks."""
        other = copy.copy(self)
        other._machines = machines
        return other

    async def run(self, guest: str | Sequence[str], **options: Any) -> Result:
        """A snippet (a string) or a command (a sequence) in a sandbox of its own."""
        asked: dict[str, Any] = {"backend": self.backend, "engine": self.engine, **options}
        if isinstance(guest, str):
            return await arun(guest, **asked)
        return await arun(command=guest, **asked)

    async def watch(self, guest: str | Sequence[str], **options: Any) -> tuple[Result, list[Event]]:
        """`run`, with the events that were told on the way."""
        events: list[Event] = []
        result = await self.run(guest, on_event=events.append, **options)
        return result, events

    def sandbox(self, **options: Any) -> AsyncSandbox:
        return AsyncSandbox(backend=self.backend, engine=self.engine, **options)

    def machine(self, **options: Any) -> AbstractAsyncContextManager[AsyncSandbox]:
        """A living sandbox; for a check that is `shared` and names no options, one that may have served others."""
        if self._machines is None or options:
            return self.sandbox(living=True, **options)
        return self._machines.one(partial(self.sandbox, living=True), self._note_used)

    def _note_used(self) -> None:
        self.had_used = True

    def session(self, **options: Any) -> AsyncSession:
        from belljar.session.session import AsyncSession

        return AsyncSession(backend=self.backend, engine=self.engine, **options)

    def engine_with(self, **settings: Any) -> Engine:
        """Another engine over the same backend, with some settings changed."""
        same: Backend = self.engine.backend(self.backend)
        return Engine(self.engine.settings.model_copy(update=settings), extra=(same,))

    def lacks(self, need: str) -> str:
        """Why a check that needs this cannot be run here; empty if it can. The only reasons for a skip."""
        kind, _, name = need.partition(":")
        offer = self.capabilities
        limits = offer.guarantees.limits if offer.guarantees else {}
        match kind:
            case "session":
                return "" if name in offer.sessions else f"{self.backend} has no {name} sessions"
            case "language":
                return "" if name in self.languages else f"{self.backend} cannot run {name} here"
            case "limit":
                return f"{self.backend} does not limit {name} here" if limits.get(name) == "not limited" else ""
            case "workspace":
                return "" if offer.workspace else f"{self.backend} cannot be granted a folder of the host"
            case "commands":
                return "" if offer.commands else f"{self.backend} runs code, not commands"
            case "processes":
                return "" if offer.processes else f"{self.backend} has no processes beside the guest"
            case "checkpoints":
                return "" if offer.checkpoints else f"{self.backend} cannot copy a session"
            case "fuel":
                return "" if offer.fuel else f"{self.backend} cannot count fuel or fix clock and seed"
            case "posix":  # users, file modes, /proc: what a guest has where it is a process among others
                return "" if offer.processes else f"{self.backend} is no POSIX system to its guests"
            case "living":
                return "" if offer.living is not None else f"{self.backend} has no living sandboxes"
            case "pty" | "dial" | "pause" | "watch" | "snapshot" | "root":
                return "" if kind in (offer.living or ()) else f"living sandboxes of {self.backend} {LACKS[kind]}"
        raise ValueError(f"{need!r} is not something a check can need")


CheckBody = Callable[[Bench], Awaitable[None]]


class Check(NamedTuple):
    """One promise of a backend: a sentence, the code that tries it, and what that code cannot do without.

    A check that is `alone` measures time or crowds the machine, so no other check runs beside it. The living sandboxes
    of one that is `shared` may have served others before: it claims nothing that only a new one could show.
    """

    area: str
    name: str
    body: CheckBody
    needs: tuple[str, ...] = ()
    alone: bool = False
    shared: bool = False


CHECKS: dict[str, Check] = {}
SCRIPTS: dict[str, Program] = {}


def check(
    area: str, name: str, *needs: str, alone: bool = False, shared: bool = False
) -> Callable[[CheckBody], CheckBody]:
    """Registers a check.

    Args:
        area: the part of the contract it belongs to.
        name: a sentence that is true of every backend that conforms.
        needs: what a backend must offer for the check to be run, as `Bench.lacks` knows it.
        alone: whether no other check may run beside it, because it measures time or crowds the machine.
        shared: whether its living sandboxes may have served other checks, and been emptied since.

    Returns:
        A decorator that registers an async function and leaves it as it is.

    Raises:
        ValueError: there is a check of this name already.
    """

    def register(body: CheckBody) -> CheckBody:
        if name in CHECKS:
            raise ValueError(f"there are two checks named {name!r}")
        CHECKS[name] = Check(area, name, body, needs, alone, shared)
        return body

    return register


@overload
def guest(program: str, twin: Program) -> str: ...
@overload
def guest(program: tuple[str, ...], twin: Program) -> tuple[str, ...]: ...
def guest(program: str | tuple[str, ...], twin: Program) -> str | tuple[str, ...]:
    """A guest program, and beside it the function that plays it on the fake."""
    key = program if isinstance(program, str) else shlex.join(program)
    if key in SCRIPTS:
        raise ValueError(f"two guests share one program: {key[:60]!r}")
    SCRIPTS[key] = twin
    return program


def says(out: str | bytes = "", err: str | bytes = "", code: int = 0) -> Program:
    """A twin that only prints and leaves."""

    async def play(p: FakeProcess) -> int:
        await p.out(out)
        await p.err(err)
        return code

    return play


# --- how a check says no ---


def expect(holds: bool, otherwise: str) -> None:
    """Not `assert`: that one is gone under `python -O`, and a check must always be able to fail."""
    if not holds:
        raise CheckFailed(otherwise)


def equal(seen: object, wanted: object, what: str) -> None:
    expect(seen == wanted, f"{what} is {_short(seen)}, and should be {_short(wanted)}")


def succeeded(result: Result) -> Result:
    why = result.error.message if result.error else ""
    expect(
        result.status == "success" and result.exit_code == 0,
        f"status {result.status}, exit code {result.exit_code}, {why} stderr {_short(result.stderr[-300:])}",
    )
    return result


def printed(result: Result, wanted: str) -> None:
    """It ran well, and this is all it printed."""
    succeeded(result)
    equal(result.stdout, wanted, "stdout")


async def refused(kind: type[Refusal], attempt: Awaitable[Any]) -> Refusal:
    """This must be an exception of that kind: not a result, and not another exception. It is returned."""
    try:
        answer = await attempt
    except kind as error:
        return error
    except (errors.BelljarError, OSError) as error:
        raise CheckFailed(f"raised {type(error).__name__} ({error}), and should raise {kind.__name__}") from None
    raise CheckFailed(f"gave {_short(answer)}, and should raise {kind.__name__}")


def present(value: T | None, what: str) -> T:
    if value is None:
        raise CheckFailed(f"{what} is missing")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:120]} ... {text[-60:]} ({len(text)} characters)"
