"""Runs on a server: what is sent for one, how it is run once however often it is sent, and how it is followed."""

from __future__ import annotations

import inspect
import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar

import anyio
from pydantic import TypeAdapter, ValidationError

from belljar.client.connections import Unanswered
from belljar.client.log_stream import LogFollower, event_of
from belljar.client.transport import MAX_RETRY_AFTER_SECONDS, Transport
from belljar.control.callbacks import Listener
from belljar.control.control import Control
from belljar.core import errors
from belljar.core.request import RunRequest
from belljar.core.result import Event, Result, Status
from belljar.core.spelling import heard, respelled
from belljar.core.values import WORKSPACE
from belljar.host.loops import lone_errors
from belljar.protocol.records import LogLine, RunRecord

T = TypeVar("T")
RUNS = "/api/sandbox/runs"
EXECUTE = "/api/sandbox/execute"
_ENDING_SECONDS = 15.0  # to end what nobody waits for any more
_ANSWER_SECONDS = 300.0  # to wait for the answer to a run that has no timeout, before we follow it instead
GRACE_SECONDS = 30.0  # over its timeout after which we stop waiting for an answer, and ask what became of the run
_validators: dict[Any, TypeAdapter[Any]] = {}  # by kind of answer: to build one takes longer than most requests


def parse(kind: type[T], answer: bytes) -> T:
    """Reads an answer of the server. Fields that we do not know are ignored: it may be younger than its client."""
    if kind not in _validators:
        _validators[kind] = TypeAdapter(kind)
    try:
        found: T = _validators[kind].validate_json(answer, extra="ignore")
        return found
    except ValidationError as error:
        wrong = errors.from_validation(error, "answer").message[:200]
        told = f"this server answers what we do not understand: {wrong}"
        raise errors.NotAvailable(told, fix="is it a Belljar?") from None


def path_part(id: str) -> str:
    """Returns an id that can be nothing but one part of a path, or raises InvalidRequest."""
    if not isinstance(id, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,80}", id):
        raise errors.InvalidRequest(f"id: {str(id)[:80]!r} is not one of the server's")
    return id


# --- what is sent ---


def opening(asked: RunRequest) -> dict[str, Any]:
    """Returns the body that opens a sandbox: only what was asked for."""
    return _of_sandbox(asked, asked.model_dump(mode="json", exclude_unset=True))


def execution(asked: RunRequest) -> dict[str, Any]:
    """Returns the body that executes a run."""
    said = asked.model_dump(mode="json", exclude_unset=True)
    rest = (
        "language",
        "code",
        "command",
        "args",
        "stdin",
        "collect",
        "packages",
        "profile",
        "retry",
        "deterministic",
        "require_libraries",
    )
    return _of_sandbox(asked, said) | {name: said[name] for name in rest if said.get(name) is not None}


def _of_sandbox(asked: RunRequest, said: Mapping[str, Any]) -> dict[str, Any]:
    refused = (
        ("egress", asked.egress.mode == "open"), ("workdir", asked.workdir != WORKSPACE),
        ("auto_remove", asked.auto_remove is False),
    )  # fmt: skip
    if what := next((name for name, given in refused if given), ""):
        raise errors.InvalidRequest(f"{what}: a server does not take this", fix="leave it out, or run it here")
    same = ("limits", "backend", "isolation", "image", "runtime", "type", "language")
    body: dict[str, Any] = {name: said[name] for name in same if said.get(name)}
    body |= {"context_files": said["files"]} if asked.files else {}
    body |= {"environment": said["env"]} if asked.env else {}
    body |= {"net": sorted(asked.egress.hosts)} if asked.egress.hosts else {}
    if asked.workspace:
        body |= {"project_path": asked.workspace.path, "write": asked.workspace.write}
        body |= {"write_git": True} if asked.workspace.write_git else {}
    return body


class Sending:
    """One request under one idempotency key: however often it is sent, it runs once."""

    def __init__(self, transport: Transport, body: dict[str, Any], path: str = EXECUTE) -> None:
        self._transport = transport
        self._path = path
        self._body = body
        self._key = uuid.uuid4().hex
        self._unsure = False  # was there an attempt of which we do not know whether it was taken in?

    async def wait(self, seconds: float) -> Result | None:
        """Sends it and returns the result; None if no answer came, and what became of it has to be asked."""
        try:
            return respelled(parse(Result, await self._send(True, seconds)), "python")
        except (Unanswered, errors.Busy) as error:
            await self._hesitate(error, 0)
            return None

    async def submit(self) -> str:
        """Sends it and returns its id, as soon as the server has taken it in."""
        attempt = 0
        while True:
            try:
                return parse(RunRecord, await self._send(False, self._transport.timeout)).id
            except (Unanswered, errors.Busy) as error:
                await self._hesitate(error, attempt)
            attempt += 1

    async def _send(self, wait: bool, read: float) -> bytes:
        headers = {"Idempotency-Key": self._key}
        try:
            return await self._transport.once(
                "POST", self._path, read=read, headers=headers, json=self._body | {"wait": wait}
            )
        except anyio.get_cancelled_exc_class():
            # The server may not know of it. The same key is how to learn its id.
            with anyio.move_on_after(_ENDING_SECONDS, shield=True), suppress(errors.BelljarError):
                same = await self._transport.once(
                    "POST", self._path, headers=headers, json=self._body | {"wait": False}
                )
                await end(self._transport, parse(RunRecord, same).id)
            raise

    async def _hesitate(self, error: Unanswered | errors.Busy, attempt: int) -> None:
        """Waits for a better moment, or raises. After a plain no nothing runs, so the next one may have a new key."""
        if attempt >= self._transport.retries:
            raise error
        if isinstance(error, Unanswered):
            self._unsure = self._unsure or error.sent
            await self._transport.pause(attempt)
            return
        if error.http_status != 503 or error.retry_after > MAX_RETRY_AFTER_SECONDS:
            raise error
        if not self._unsure:
            self._key = uuid.uuid4().hex
        await anyio.sleep(error.retry_after)


async def conduct(
    transport: Transport, path: str, body: dict[str, Any], *, seconds: float | None, listener: Listener | None,
    control: Control | None,
) -> Result:  # fmt: skip
    """Sends a run, and returns what came of it. Whoever is cancelled meanwhile has it ended.

    Args:
        transport: to the server.
        path: what takes runs there.
        body: the run.
        seconds: its timeout; None: it has none.
        listener: is told what it prints.
        control: stops it.
    """
    sending = Sending(transport, body, path)
    if listener is None and control is None:
        result = await sending.wait(_ANSWER_SECONDS if seconds is None else seconds + GRACE_SECONDS)
        if result is not None:
            return result
    return await watch(transport, await sending.submit(), listener, control or Control())


# --- what comes back ---


async def look(transport: Transport, id: str) -> RunRecord:
    """Asks for one run."""
    return parse(RunRecord, await transport.ask("GET", f"{RUNS}/{path_part(id)}"))


async def stop(transport: Transport, id: str) -> RunRecord:
    """Cancels one run."""
    return parse(RunRecord, await transport.ask("POST", f"{RUNS}/{path_part(id)}/cancel", again=True))


async def end(transport: Transport, id: str) -> None:
    """Ends a run that nobody waits for any more."""
    with anyio.move_on_after(_ENDING_SECONDS, shield=True), suppress(errors.BelljarError):  # else its timeout ends it
        await stop(transport, id)


async def watch(transport: Transport, id: str, listener: Listener | None, control: Control) -> Result:
    """Tells the listener what a run prints, and returns its result. However this is left, the run is ended."""

    async def stop_when_told() -> None:
        await control.stopped()
        await stop(transport, id)

    over = False
    try:
        with lone_errors():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stop_when_told)
                last = await _hear(transport, id, listener)
                record, over = await look(transport, id), True
                result = outcome(record, cancelled=control.stopping)
                await _tell(listener, Event(run=id, seq=last + 1, kind="finished", result=result))
                tasks.cancel_scope.cancel()
        return result
    finally:
        if not over:
            await end(transport, id)


async def _hear(transport: Transport, id: str, listener: Listener | None) -> int:
    lines = LogFollower(transport, id)

    async def hear(line: LogLine) -> None:
        await _tell(listener, event_of(line))

    await lines.follow(hear)
    return lines.number


async def _tell(listener: Listener | None, event: Event) -> None:
    if listener is not None and inspect.isawaitable(answer := listener(event)):
        await answer


def outcome(record: RunRecord, *, cancelled: bool = False) -> Result:
    """Returns the result of a run, or raises the error that came instead."""
    if record.result is not None:
        return respelled(record.result, "python")
    if record.problem is None:
        raise errors.ExecutionFailed(
            f"{record.id} is {record.state}: the server ended while it was under way", fix="run it again"
        )
    error = heard(record.problem)
    if cancelled and isinstance(error, errors.Aborted):  # it never ran, which is what was wanted
        return Result(status=Status.ABORTED, container_id=record.id, warnings=(error.message,))
    raise error
