"""`POST /api/sandbox/test`: the tests of a project, with parsed results."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from belljar.protocol.requests import RunTests
from belljar.protocol.responses import Tested
from belljar.service.http.dependencies import ACCEPTED, BoundedRoute, Key, Runner, TheService, stop_when_gone
from belljar.service.http.request_log import note
from belljar.service.tests import report_of_run, submit_tests

router: APIRouter = APIRouter(prefix="/api/sandbox", tags=["runs"], route_class=BoundedRoute)


@router.post("/test", response_model=Tested, responses=ACCEPTED)
async def run_tests(
    body: RunTests, request: Request, service: TheService, caller: Runner, idempotency_key: Key = None
) -> Response:
    """Run a project's tests in a sandbox of its own. Tests that fail are an answer like any other; a run that crashed,
    timed out or found no test has a status of its own, and is not "0 failed". What it prints, and a line for each test,
    is told live under `/api/sandbox/{id}/logs`."""
    run = await submit_tests(service, body, caller, key=idempotency_key or "")
    note(request.scope, run=run.id)
    if not body.wait:
        return JSONResponse(run.record.model_dump(mode="json"), 202)
    if not idempotency_key and not run.done.is_set():
        stop_when_gone(run, request)
    report = await report_of_run(run)
    answer = Tested(id=run.id, **{name: getattr(report, name) for name in type(report).model_fields})
    return Response(answer.model_dump_json(), media_type="application/json")
