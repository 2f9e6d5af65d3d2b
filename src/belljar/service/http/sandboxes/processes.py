"""Routes of the processes of living sandboxes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, WebSocket
from fastapi import Path as InPath

from belljar.core.process import BoxProcess
from belljar.core.values import KIB, MIB
from belljar.protocol import file_errors
from belljar.protocol.living import (
    MAX_WAIT_SECONDS,
    OutputPage,
    ProcessRecord,
    Resize,
    SendSignal,
    SignalSent,
    StartProcess,
    StdinWritten,
)
from belljar.service.http.dependencies import BoundedRoute, TheRequest
from belljar.service.http.sandboxes import terminals
from belljar.service.http.sandboxes.box import PREFIX, Labels, TheBox
from belljar.service.http.sandboxes.sockets import attached
from belljar.service.sandboxes import processes

router: APIRouter = APIRouter(prefix=PREFIX, tags=["sandboxes"], route_class=BoundedRoute)
raw: APIRouter = APIRouter(prefix=PREFIX, tags=["sandboxes"])  # whose bodies are no JSON

Process = Annotated[str, InPath(min_length=1, max_length=64)]
Since = Annotated[int, Query(ge=0, le=2**62, description="the number of the last piece that you have")]
Timeout = Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS, allow_inf_nan=False, description="seconds to wait")]
_ONE = "/{id}/processes/{process}"


@router.post("/{id}/processes", status_code=201)
async def start_process(body: StartProcess, box: TheBox, sent: TheRequest) -> ProcessRecord:
    """Starts a process that goes on beside everything else."""
    service = box.sandboxes.service
    async with box.held() as held:
        await service.admission.count(box.caller)
        held.make_room(service.settings.service.output_memory)
        return await sent.once(lambda: processes.start(held.box, body), lambda _: box.id)


@router.get("/{id}/processes")
async def list_processes(box: TheBox, labels: Labels = []) -> list[ProcessRecord]:  # noqa: B006
    """Those that were started so: all that run, and the last that have ended."""
    async with box.used() as sandbox:
        return processes.started(sandbox, labels)


@router.get("/{id}/ps")
async def list_kernel_processes(box: TheBox) -> list[BoxProcess]:
    """All that runs in the sandbox now, by the kernel's word."""
    async with box.used() as sandbox:
        return list(await sandbox.processes())


@router.get(_ONE)
async def inspect_process(box: TheBox, process: Process) -> ProcessRecord:
    """One of them, with its result when it has ended."""
    async with box.process(process) as found:
        return processes.record_of(found)


@router.get(_ONE + "/wait")
async def wait_for_process(box: TheBox, process: Process, timeout: Timeout = 30.0) -> ProcessRecord:
    """Answers when it has ended, or when the time to wait is over."""
    async with box.process(process) as found:
        return await processes.wait(found, timeout)


@router.post(_ONE + "/signal")
async def signal_process(body: SendSignal, box: TheBox, process: Process) -> SignalSent:
    """Sends it a signal."""
    async with box.process(process) as found:
        return SignalSent(sent=await found.signal(body.signal))


@router.post(_ONE + "/kill")
async def kill_process(box: TheBox, process: Process) -> ProcessRecord:
    """Ends it and all that it started."""
    async with box.process(process) as found:
        return await processes.kill(found)


@raw.post(_ONE + "/stdin")
async def write_stdin(request: Request, box: TheBox, process: Process) -> StdinWritten:
    """Writes the body to its standard input, or types it; answers how much was taken."""
    async with box.process(process) as found:
        with file_errors.refused("stdin"):
            return await processes.write(found, await request.body())


@router.delete(_ONE + "/stdin", status_code=204)
async def close_stdin(box: TheBox, process: Process) -> None:
    """Ends its standard input."""
    async with box.process(process) as found:
        with file_errors.refused("stdin"):
            await found.close_stdin()


@router.post(_ONE + "/resize", status_code=204)
async def resize_terminal(body: Resize, box: TheBox, process: Process) -> None:
    """Gives its terminal another size."""
    async with box.process(process) as found:
        await found.resize(body.columns, body.rows)


@router.get(_ONE + "/output")
async def read_output(
    box: TheBox, process: Process, since: Since = 0, limit: Annotated[int, Query(ge=1, le=MIB)] = 256 * KIB,
    wait: Annotated[float, Query(ge=0, le=30, allow_inf_nan=False)] = 0,
) -> OutputPage:  # fmt: skip
    """What is kept of its output after a number, as much as a page holds."""
    async with box.process(process) as found:
        return await processes.output(found, since, limit, wait)


@router.websocket(_ONE + "/output")
async def follow_output(socket: WebSocket, id: str, process: Process, since: Since = 0) -> None:
    """Its output after a number, a message for each piece; at its end, how it ended."""
    async with attached(socket, id, "sessions") as joined:
        await terminals.tell(joined, joined.held.box.process(process), since)


@router.websocket(_ONE + "/terminal")
async def attach_terminal(socket: WebSocket, id: str, process: Process, since: Since = 0) -> None:
    """Its output and its input over one connection: bytes as binary messages, control as text."""
    async with attached(socket, id, "sessions") as joined:
        await terminals.attach(joined, joined.held.box.process(process), since)
