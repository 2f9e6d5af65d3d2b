"""Routes of the interpreters of living sandboxes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi import Path as InPath

from belljar.protocol.living import Complete, InterpreterRecord, InterpreterTurn, Interrupted, Names, OpenInterpreter
from belljar.protocol.responses import Executed
from belljar.service.http.dependencies import ACCEPTED, BoundedRoute, Key, TheRequest, answer
from belljar.service.http.sandboxes.box import PREFIX, TheBox
from belljar.service.sandboxes import interpreters

router: APIRouter = APIRouter(prefix=PREFIX, tags=["sandboxes"], route_class=BoundedRoute)
Interpreter = Annotated[str, InPath(min_length=1, max_length=64)]
_ONE = "/{id}/interpreters/{interpreter}"


@router.post("/{id}/interpreters", status_code=201)
async def open_interpreter(body: OpenInterpreter, box: TheBox, sent: TheRequest) -> InterpreterRecord:
    """One that keeps its variables from turn to turn, and sees the sandbox's files, processes and ports."""
    async with box.held() as held:
        await box.sandboxes.service.admission.count(box.caller)
        return await sent.once(lambda: interpreters.open_one(held, body), lambda _: box.id)


@router.get("/{id}/interpreters")
async def list_interpreters(box: TheBox) -> list[InterpreterRecord]:
    """Those that are open."""
    async with box.held() as held:
        return [interpreters.record_of(id, one) for id, one in held.interpreters.items()]


@router.delete(_ONE, status_code=204)
async def close_interpreter(box: TheBox, interpreter: Interpreter) -> None:
    """Ends one; its sandbox lives on."""
    async with box.held() as held:
        await interpreters.close(held, interpreter)


@router.post(_ONE + "/run", response_model=Executed, responses=ACCEPTED)
async def run_in_interpreter(
    body: InterpreterTurn, request: Request, box: TheBox, interpreter: Interpreter, idempotency_key: Key = None
) -> Response:
    """One turn, after those before it: what it defines stays."""
    async with box.held() as held:
        run = await interpreters.take(box.sandboxes.service, held, interpreter, box.caller, body, idempotency_key or "")
    return await answer(run, request, wait=body.wait, key=idempotency_key)


@router.post(_ONE + "/interrupt")
async def interrupt_turn(box: TheBox, interpreter: Interpreter) -> Interrupted:
    """Interrupts the turn under way, as Ctrl-C does; the interpreter lives on."""
    async with box.held() as held:
        return Interrupted(interrupted=interpreters.find(held, interpreter).interrupt())


@router.post(_ONE + "/complete")
async def complete_name(body: Complete, box: TheBox, interpreter: Interpreter) -> Names:
    """What a half-typed name may become, as the guest says."""
    async with box.held() as held:
        return Names(names=await interpreters.find(held, interpreter).complete(body.text))
