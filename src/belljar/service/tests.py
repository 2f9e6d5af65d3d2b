"""Test runs of callers, in living sandboxes of type `test-runner`: admitted, recorded and followed as every other."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager
from functools import partial

from belljar.control.callbacks import Cancel, Listener
from belljar.control.control import Control
from belljar.core import errors
from belljar.core.options import request
from belljar.core.request import RunRequest
from belljar.core.result import Result
from belljar.core.test_results.asked import TestOptions
from belljar.core.test_results.model import TestReport, report_in
from belljar.project_tests import TEST_RUNNER, test_folder, usual_seconds
from belljar.protocol.records import Caller, RunRecord, new_id, now
from belljar.protocol.requests import RunTests
from belljar.service.run_lifecycle import Demand, Run
from belljar.service.sandboxes.held import HeldSandbox
from belljar.service.service import Service
from belljar.test_runs.runs import run_tests


async def submit_tests(service: Service, body: RunTests, caller: Caller, *, key: str = "") -> Run:
    """Takes a test run in: returns when it is recorded and runs or waits.

    Args:
        service: what runs it.
        body: what is to be run.
        caller: who asks.
        key: an idempotency key: the same request with the same key is run once.

    Raises:
        PolicyDenied: it was turned away, or the folder is not below a root of service.projects.
        NotAvailable: it could not be recorded.
    """
    body.test_options(usual_seconds(service.settings))  # which raises, before anything is recorded
    asked = await service.check(_sandbox(body), caller)  # the folder by its real name
    assert asked.workspace is not None
    record = service.new_record(_named(body, asked), caller)
    work = partial(_work, service, body, asked, record.id, caller.name)
    start = partial(service.lifecycle.start, record, caller, work, service.demand(asked, kept=True))
    fingerprint = hashlib.sha256(body.model_dump_json(exclude={"wait"}).encode()).hexdigest() if key else ""
    return await service.repeats.once(caller, key, fingerprint, record.id, start)


def _sandbox(body: RunTests) -> RunRequest:
    """The sandbox as a request, for whoever judges folders, hosts and limits."""
    return request(
        living=True, backend=body.backend, type=TEST_RUNNER, workspace=body.project_path, **body.sandbox_options()
    )


def _named(body: RunTests, asked: RunRequest) -> RunRequest:
    """The same with the command, for its record."""
    line = body.test_command
    words = ("sh", "-c", line) if isinstance(line, str) else line or ("belljar", "test")
    return asked.model_copy(update={"command": words})


async def _work(
    service: Service, body: RunTests, asked: RunRequest, id: str, owner: str, listener: Listener, control: Control
) -> Result:
    cancel = Cancel()
    control.on_stop(lambda _: cancel.cancel())
    assert asked.workspace is not None
    options = {**body.sandbox_options(), "packages": asked.packages}
    with _granted(service, asked):
        _, result = await test_folder(
            asked.workspace.path, body.test_options(usual_seconds(service.settings)), keep=body.keep,
            install=body.install, on_event=listener,
            cancel=cancel, backend=asked.backend, engine=service.engine, id=id, owner=owner, options=options,
        )  # fmt: skip
    return result


def _granted(service: Service, asked: RunRequest) -> AbstractContextManager[None]:
    environment = asked.packages if isinstance(asked.packages, str) else None
    assert asked.workspace is not None
    return service.grants.given((environment, False), (asked.workspace.path, False))


async def report_of_run(run: Run) -> TestReport:
    """Waits for the end of a test run, and returns its report or raises the error that came instead."""
    report = report_in(await run.result())
    if report is None:
        raise errors.ExecutionFailed(f"{run.id} ended without a report of its tests")
    return report


async def submit_tests_in(service: Service, held: HeldSandbox, asked: TestOptions, caller: Caller) -> Run:
    """Takes in a run of the tests of the project in an open living sandbox's /workspace.

    Raises:
        NotAvailable: it could not be recorded.
    """
    line = asked.command if isinstance(asked.command, str) else "\0".join(asked.command or ("belljar", "test"))
    record = RunRecord(
        id=new_id(), caller=caller.name, instance=service.instance.name, created=now(), session=held.record.id,
        backend=held.told().backend, sha256=hashlib.sha256(line.encode()).hexdigest(),
    )  # fmt: skip

    async def work(listener: Listener, control: Control) -> Result:
        cancel = Cancel()
        control.on_stop(lambda _: cancel.cancel())
        async with held.used():
            _, result = await run_tests(held.box, asked, on_event=listener, cancel=cancel)
        return result

    return await service.lifecycle.start(record, caller, work, Demand())  # its box has its place already
