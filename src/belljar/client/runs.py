"""Runs of a server: what is sent for one, how it is sent once and no more, and how it is heard to its end."""

from __future__ import annotations

import inspect
import re
import uuid
from contextlib import suppress
from typing import Any, TypeVar

import anyio
from pydantic import ConfigDict, TypeAdapter, ValidationError

from belljar.backends.control import Control
from belljar.client.log_stream import Line, Lines, event_of
from belljar.client.transport import PATIENCE, Unanswered, Wire
from belljar.core import errors
from belljar.core.request import RunRequest
from belljar.core.result import Event, Result, Status
from belljar.core.values import WORKSPACE
from belljar.engine.lease import Listener
from belljar.host.loops import lone_errors
from belljar.protocol.records import RunRecord

T = TypeVar("T")
RUNS = "/api/sandbox/runs"
_EXECUTE = "/api/sandbox/execute"
_ENDING = 15.0  # seconds to end what nobody waits for any more
GRACE = 30.0  # seconds over its timeout after which we stop waiting for an answer, and ask what became of the run


class Record(RunRecord):
    """One run as the server knows it. `finished` has a `result`; `failed` and `refused` have a `problem`."""

    model_config = ConfigDict(extra="ignore")  # a server may be younger than its client


class _Executed(Result):
    model_config = ConfigDict(extra="ignore")


_validators: dict[Any, TypeAdapter[Any]] = {}  # by kind of answer: to build one takes longer than most requests


def parse(kind: type[T], answer: bytes) -> T:
    if kind not in _validators:
        _validators[kind] = TypeAdapter(kind)
    try:
        found: T = _validators[kind].validate_json(answer)
        return found
    except ValidationError as error:
        wrong = errors.from_validation(error, "answer").message[:200]
        told = f"this server answers what we do not understand: {wrong}"
        raise errors.NotAvailable(told, fix="is it a Belljar?") from None


def result_of(answer: bytes) -> Result:
    told = parse(_Executed, answer)
    return Result.model_construct(**{name: getattr(told, name) for name in Result.model_fields})


def word(id: str) -> str:
    """An id as a part of a path, and nothing else."""
    if not isinstance(id, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,80}", id):
        raise errors.InvalidRequest(f"id: {str(id)[:80]!r} is not one of the server's")
    return id


# --- what is sent ---


def opening(asked: RunRequest) -> dict[str, Any]:
    """A sandbox in the words of the API; only what was said."""
    said = asked.model_dump(mode="json", exclude_unset=True)
    if asked.egress.mode == "open" or asked.workdir != WORKSPACE:
        what = "egress" if asked.egress.mode == "open" else "workdir"
        raise errors.InvalidRequest(f"{what}: a server does not take this", fix="leave it out, or run it here")
    same = ("limits", "backend", "isolation", "image", "runtime", "type")
    body: dict[str, Any] = {name: said[name] for name in same if said.get(name)}
    body |= {"context_files": said["files"]} if asked.files else {}
    body |= {"environment": said["env"]} if asked.env else {}
    body |= {"net": sorted(asked.egress.hosts)} if asked.egress.hosts else {}
    if asked.workspace:
        body |= {"project_path": asked.workspace.path, "write": asked.workspace.write}
    return body


def execution(asked: RunRequest) -> dict[str, Any]:
    """A run in the words of the API."""
    said = asked.model_dump(mode="json", exclude_unset=True)
    rest = ("language", "code", "command", "stdin", "collect", "packages", "profile", "retry", "deterministic")
    return opening(asked) | {name: said[name] for name in rest if said.get(name) is not None}


class Sending:
    """One request under one idempotency key: however often it is sent, it runs once."""

    def __init__(self, wire: Wire, body: dict[str, Any]) -> None:
        self._wire = wire
        self._body = body
        self._key = uuid.uuid4().hex
        self._unsure = False  # was there an attempt of which we do not know whether it was taken in?

    async def wait(self, seconds: float) -> Result | None:
        """The result; None if no answer came: then what became of it has to be asked."""
        try:
            return result_of(await self._send(True, seconds))
        except (Unanswered, errors.Busy) as error:
            await self._hesitate(error, 0)
            return None

    async def submit(self) -> str:
        """Its id, as soon as it is taken in."""
        attempt = 0
        while True:
            try:
                return parse(Record, await self._send(False, self._wire.timeout)).id
            except (Unanswered, errors.Busy) as error:
                await self._hesitate(error, attempt)
            attempt += 1

    async def _send(self, wait: bool, read: float) -> bytes:
        headers = {"Idempotency-Key": self._key}
        try:
            return await self._wire.once("POST", _EXECUTE, read=read, headers=headers, json=self._body | {"wait": wait})
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(_ENDING, shield=True), suppress(errors.BelljarError):  # it may not be known there
                same = await self._wire.once("POST", _EXECUTE, headers=headers, json=self._body | {"wait": False})
                await end(self._wire, parse(Record, same).id)  # the same key, so that was how to learn its id
            raise

    async def _hesitate(self, error: Unanswered | errors.Busy, attempt: int) -> None:
        """Waits for a better moment, or raises. After a plain no nothing runs, so the next one may have a new key."""
        if attempt >= self._wire.retries:
            raise error
        if isinstance(error, Unanswered):
            self._unsure = self._unsure or error.sent
            await self._wire.pause(attempt)
            return
        if error.http_status != 503 or error.retry_after > PATIENCE:
            raise error
        if not self._unsure:
            self._key = uuid.uuid4().hex
        await anyio.sleep(error.retry_after)


# --- what comes back ---


async def look(wire: Wire, id: str) -> Record:
    return parse(Record, await wire.ask("GET", f"{RUNS}/{word(id)}"))


async def stop(wire: Wire, id: str) -> Record:
    return parse(Record, await wire.ask("POST", f"{RUNS}/{word(id)}/cancel", again=True))


async def end(wire: Wire, id: str) -> None:
    """For who leaves: nobody waits for this run any more."""
    with anyio.move_on_after(_ENDING, shield=True), suppress(errors.BelljarError):  # it has a timeout of its own
        await stop(wire, id)


async def watch(wire: Wire, id: str, listener: Listener | None, control: Control) -> Result:
    """Tells what a run says, to its end. However we leave, it does not go on without us."""

    async def stop_when_told() -> None:
        await control.stopped()
        await stop(wire, id)

    over = False
    try:
        with lone_errors():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stop_when_told)
                last = await _hear(wire, id, listener)
                record, over = await look(wire, id), True
                result = outcome(record, cancelled=control.stopping)
                await _tell(listener, Event(run=id, seq=last + 1, kind="finished", result=result))
                tasks.cancel_scope.cancel()
        return result
    finally:
        if not over:
            await end(wire, id)


async def _hear(wire: Wire, id: str, listener: Listener | None) -> int:
    lines = Lines(wire, id)

    async def hear(line: Line) -> None:
        await _tell(listener, event_of(line))

    await lines.follow(hear)
    return lines.number


async def _tell(listener: Listener | None, event: Event) -> None:
    if listener is not None and inspect.isawaitable(answer := listener(event)):
        await answer


def outcome(record: RunRecord, *, cancelled: bool = False) -> Result:
    """The result, or the error that came instead."""
    if record.result is not None:
        return record.result
    if record.problem is None:
        raise errors.ExecutionFailed(
            f"{record.id} is {record.state}: the server ended while it was under way", fix="run it again"
        )
    error = errors.from_dict(record.problem)
    if cancelled and isinstance(error, errors.Aborted):  # it never ran, which is what was wanted
        return Result(status=Status.ABORTED, container_id=record.id, warnings=(error.message,))
    raise error
