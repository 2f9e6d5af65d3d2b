"""Makes one report of a run: of what its runner reported, and of how the sandbox saw its command end.

The report was written by the guest. So it is never believed alone: the command's exit code, which is the kernel's word,
has to say the same, or there is no verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from belljar.core.result import ErrorType, Failure, Result, Status
from belljar.core.test_results.model import (
    MAX_CASES,
    MAX_FAILURES,
    Coverage,
    FlakyTest,
    RunStatus,
    TestCase,
    TestFailure,
    TestReport,
)
from belljar.core.test_results.parsed import FoundTest, ParsedReport, clean

_LIMITS: Mapping[Status, RunStatus] = {
    Status.TIMEOUT: "timeout", Status.OOM_KILLED: "oom_killed", Status.OUTPUT_LIMIT: "output_limit",
    Status.DISK_LIMIT: "disk_limit", Status.KILLED: "killed", Status.ABORTED: "aborted",
}  # fmt: skip
_NO_SUCH_COMMAND = (126, 127)
_MOST_TEXT = 8 * 1024 * 1024  # characters of all tracebacks and outputs of a report together


class Reported(NamedTuple):
    """What the runner of one run left behind.

    Attributes:
        report: what was read; None: there was no report.
        printed: whether that is from what the command printed.
        unreadable: why reports could not be read.
    """

    report: ParsedReport | None
    printed: bool = False
    unreadable: tuple[str, ...] = ()


class Asked(NamedTuple):
    """What is said of a run before it begins: its command, its framework, and how both were found."""

    command: str
    framework: str = ""
    reasons: tuple[str, ...] = ()


def judge(result: Result, reported: Reported) -> tuple[RunStatus, Failure | None]:
    """Returns how a run ended, and why there is no verdict, if there is none."""
    report = reported.report
    if result.status in _LIMITS and not (result.status is Status.OUTPUT_LIMIT and result.exit_code is not None):
        return _LIMITS[result.status], result.error or Failure(
            error_type=ErrorType.RUNTIME_ERROR, message=f"the run was {result.status} before the tests had ended",
            suggestion="run them again",
        )  # fmt: skip
    if report is None:
        return _without_report(result, reported)
    failed = sum(test.outcome in ("failed", "error") for test in report.tests)
    if not report.complete:
        return "crashed", _failure(
            f"the test runner ended before it had reported all tests: exit code {result.exit_code}",
            "look at the end of the output: a test may have ended or crashed the runner's process", result,
        )  # fmt: skip
    if not report.tests:
        if result.exit_code in (0, 5) or report.collected == 0:
            return "no_tests", _failure("no test was found", "name a command or a folder that has some", result)
        return "crashed", _failure(
            f"no test was run, and the command ended with exit code {result.exit_code}", "look at the output", result
        )
    if bool(failed) != (result.exit_code != 0):
        return "inconsistent", _contradiction(failed, result)
    return ("failed" if failed else "passed"), None


def _without_report(result: Result, reported: Reported) -> tuple[RunStatus, Failure | None]:
    if reported.unreadable:
        return "crashed", _failure(
            f"the report of the tests cannot be read: {reported.unreadable[0]}", "look at the output", result
        )
    if result.exit_code == 0:
        return "no_report", _failure(
            "the command ended well, but nothing says which tests it ran",
            "use a framework that is known here, or have JUnit XML or TAP written to the folder $BELLJAR_REPORTS",
            result,
        )  # fmt: skip
    if result.exit_code in _NO_SUCH_COMMAND:
        return "crashed", _failure(
            "the command of the tests cannot be run here: there is no such program", "name its packages, or an image",
            result,
        )  # fmt: skip
    if result.error is not None and result.error.error_type is not ErrorType.RUNTIME_ERROR:
        return "crashed", result.error
    return "crashed", _failure(
        f"the command ended before any test was reported: exit code {result.exit_code}", "look at the output", result
    )


def _contradiction(failed: int, result: Result) -> Failure:
    said = f"{failed} failed" if failed else "none failed"
    return _failure(
        f"the report says that {said}, but the command ended with exit code {result.exit_code}",
        "something else in the command decides its exit code (a coverage threshold, `|| true`), or a test forged one "
        "of the two", result,
    )  # fmt: skip


def _failure(message: str, suggestion: str, result: Result) -> Failure:
    context = {} if result.exit_code is None else {"exit_code": result.exit_code}
    return Failure(error_type=ErrorType.RUNTIME_ERROR, message=message, suggestion=suggestion, context=context)


def report_of(asked: Asked, result: Result, reported: Reported, coverage: Coverage | None = None) -> TestReport:
    """Returns the report of one run."""
    status, error = judge(result, reported)
    found = reported.report or ParsedReport("")
    counts = {name: sum(test.outcome == name for test in found.tests) for name in ("passed", "skipped")}
    failures = [test for test in found.tests if test.outcome in ("failed", "error")]
    warnings = (*result.warnings, *found.notes)
    if reported.report is not None:
        warnings += tuple(f"a report was not read: {why}" for why in reported.unreadable[:5])
    told, cut = _failures(failures)
    return TestReport(
        status=status, passed=counts["passed"], failed=len(failures), skipped=counts["skipped"], error=error,
        output=result.stdout + result.stderr, failures=told, coverage=coverage,
        framework=found.framework or asked.framework, command=asked.command,
        source="" if reported.report is None else "printed" if reported.printed else "report",
        exit_code=result.exit_code, duration_ms=result.duration_ms, tests=tuple(map(_case, found.tests[:MAX_CASES])),
        truncated=result.truncated or cut or len(found.tests) > MAX_CASES, backend=result.backend,
        container_id=result.container_id, guarantees=result.guarantees, reasons=(*asked.reasons, *result.reasons),
        denied=result.denied, warnings=warnings,
    )  # fmt: skip


def _case(test: FoundTest) -> TestCase:
    return TestCase(
        id=test.id, name=test.name, file=test.file, line=test.line, outcome=test.outcome, duration_ms=_ms(test),
        message=clean(test.message, 300),
    )  # fmt: skip


def _ms(test: FoundTest) -> float | None:
    return None if test.seconds is None else round(test.seconds * 1000, 3)


def _failures(tests: Sequence[FoundTest]) -> tuple[tuple[TestFailure, ...], bool]:
    """The first failures, for as long as there is room for their texts; whether some were cut."""
    room, told = _MOST_TEXT, []
    for test in tests[:MAX_FAILURES]:
        fits = len(test.traceback) + len(test.output) <= room
        room -= len(test.traceback) + len(test.output) if fits else 0
        told.append(
            TestFailure(
                id=test.id, name=test.name, kind="error" if test.outcome == "error" else "failed", file=test.file,
                line=test.fail_line or test.line, message=test.message, traceback=test.traceback if fits else "",
                output=test.output if fits else "", duration_ms=_ms(test),
            )
        )  # fmt: skip
    return tuple(told), len(tests) > MAX_FAILURES or room < _MOST_TEXT // 100


def combined(reports: Sequence[TestReport]) -> TestReport:
    """Returns several runs of the same tests as one report: counts of the worst, and which tests were flaky."""
    if len(reports) == 1:
        return reports[0]
    order = ("passed", "failed")
    worst = max(reports, key=lambda one: (one.status not in order, one.failed))
    outcomes: dict[str, list[str]] = {}
    for one in reports:
        for case in one.tests:
            outcomes.setdefault(case.id, []).append(case.outcome)
    flaky = tuple(
        FlakyTest(id=id, passed=seen.count("passed"), failed=sum(how in ("failed", "error") for how in seen))
        for id, seen in outcomes.items()
        if "passed" in seen and not {"failed", "error"}.isdisjoint(seen)
    )
    return worst.model_copy(
        update={"flaky": flaky, "runs": len(reports), "duration_ms": sum(one.duration_ms for one in reports)}
    )
