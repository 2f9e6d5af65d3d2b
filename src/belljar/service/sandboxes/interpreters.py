"""Interpreters of living sandboxes: opened, given turns that are runs with records of their own, and closed."""

from __future__ import annotations

import hashlib

from belljar.control.callbacks import Cancel, Listener
from belljar.control.control import Control
from belljar.core import errors
from belljar.core.options import request
from belljar.core.result import Result
from belljar.living.interpreter import AsyncBoxInterpreter
from belljar.protocol.living import InterpreterRecord, InterpreterTurn, OpenInterpreter
from belljar.protocol.records import Caller, RunRecord, new_id, now
from belljar.service.run_lifecycle import Demand, Run
from belljar.service.sandboxes.held import HeldSandbox
from belljar.service.service import Service
from belljar.service.store.statements import Claim

_MOST = 16  # of one sandbox


def record_of(id: str, interpreter: AsyncBoxInterpreter) -> InterpreterRecord:
    """Returns an interpreter as its caller is told of it."""
    conversation = interpreter._open_conversation
    return InterpreterRecord(
        id=id, language=interpreter.language, turns=conversation.turns, busy=conversation.busy, ended=interpreter.ended
    )


async def open_one(held: HeldSandbox, body: OpenInterpreter) -> InterpreterRecord:
    """Opens one more in a sandbox.

    Raises:
        Busy: there are as many as may be.
    """
    if len(held.interpreters) + held.opening >= _MOST:
        raise errors.Busy(f"this sandbox has {_MOST} interpreters", retry_after=5, fix="close one")
    held.opening += 1
    try:
        interpreter = await held.box.interpreter(body.language, env=body.environment)
    finally:
        held.opening -= 1
    held.interpreters[id := new_id("bi")] = interpreter
    return record_of(id, interpreter)


def find(held: HeldSandbox, id: str) -> AsyncBoxInterpreter:
    """Returns one that is open.

    Raises:
        NotFound: there is none.
    """
    if id not in held.interpreters:
        raise errors.NotFound(f"this sandbox has no interpreter {id[:80]!r}", fix="list those that it has")
    return held.interpreters[id]


async def close(held: HeldSandbox, id: str) -> None:
    """Ends one."""
    interpreter = find(held, id)
    del held.interpreters[id]
    await interpreter.close()


async def take(
    service: Service, held: HeldSandbox, id: str, caller: Caller, body: InterpreterTurn, key: str = ""
) -> Run:  # fmt: skip
    """Starts one turn, with a record and lines of its own.

    Args:
        service: where it is recorded.
        held: the sandbox.
        id: the interpreter.
        caller: who asks.
        body: what is to be run.
        key: an idempotency key: the same turn with the same key is run once.
    """
    interpreter, name = find(held, id), new_id()
    sha256 = hashlib.sha256(body.code.encode()).hexdigest()
    request(body.code, timeout=body.timeout_seconds)  # which raises what is wrong with it
    record = RunRecord(
        id=name, caller=caller.name, instance=service.instance.name, created=now(), session=held.record.id,
        language=interpreter.language, backend=held.told().backend, sha256=sha256,
    )  # fmt: skip

    async def work(listener: Listener, control: Control) -> Result:
        cancel = Cancel()
        control.on_stop(lambda _: cancel.cancel())
        async with held.used():
            return await interpreter.run(
                body.code, timeout=body.timeout_seconds, on_event=listener, cancel=cancel, id=name
            )

    async def start(claim: Claim | None) -> Run:
        return await service.lifecycle.start(record, caller, work, Demand(request_bytes=len(body.code)), claim)

    asked = hashlib.sha256(repr((held.record.id, id, body.code, body.timeout_seconds)).encode()).hexdigest()
    return await service.repeats.once(caller, key, asked if key else "", name, start)
