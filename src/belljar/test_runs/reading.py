"""Reads the reports that a test run left in its sandbox: hostile files, bounded before anything is parsed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

import anyio.to_thread

from belljar.core.process import FileStat
from belljar.core.result import Result
from belljar.core.test_results import junit, lines, tap
from belljar.core.test_results.cargo import has_tests, parse_cargo
from belljar.core.test_results.coverage import parse_coverage
from belljar.core.test_results.go import parse_go
from belljar.core.test_results.model import Coverage
from belljar.core.test_results.parsed import MAX_REPORT_BYTES, ParsedReport, merged
from belljar.core.test_results.verdict import Reported
from belljar.core.values import MIB, WORKSPACE
from belljar.living.files import AsyncFiles

_MAX_FILES = 2000  # reports of one run
_MAX_DEPTH = 8
_LIVE_BYTES = 8 * MIB  # of a report that is still written


async def read_reports(
    files: AsyncFiles, out: str, patterns: Sequence[str], result: Result, framework: str
) -> tuple[Reported, Coverage | None]:
    """Returns what the runner of a run reported, and what was measured of its coverage.

    Args:
        files: of the sandbox.
        out: the folder of our reporters.
        patterns: further reports, in the project.
        result: of the command.
        framework: that it names; one that has a reporter here is not believed what it prints.
    """
    problems: list[str] = []
    names = await _listed(files, out, problems)
    names += [name for name in await matching(files, patterns) if name not in names]
    reports: list[ParsedReport] = []
    coverages: list[Coverage] = []
    room = MAX_REPORT_BYTES
    for name in names[:_MAX_FILES]:
        text = await _content(files, name, room, problems)
        if text is None:
            continue
        room -= len(text)
        try:
            found = await anyio.to_thread.run_sync(_parsed, name, text)
        except ValueError as error:
            problems.append(f"{name.rpartition('/')[2][:80]}: {error}")
            continue
        if isinstance(found, Coverage):
            coverages.append(found)
        elif found is not None:
            reports.append(found)
    reported = Reported(merged(reports) if reports else None, unreadable=tuple(problems))
    if problems and reports:  # part of the run is not known
        reported = reported._replace(report=merged([*reports, ParsedReport(reports[0].framework, complete=False)]))
    if not reports and not problems and not framework:
        reported = _printed(result)
    return reported, max(coverages, key=lambda one: len(one.files), default=None)


async def _listed(files: AsyncFiles, out: str, problems: list[str]) -> list[str]:
    try:
        found = await files.list(out, _MAX_DEPTH)
    except OSError as error:
        problems.append(f"the folder of the reports: {error.strerror}")
        return []
    names = [_whole(out, one) for one in found if one.kind == "file"]
    if len(names) > _MAX_FILES:
        problems.append(f"there are more than {_MAX_FILES} reports")
    return sorted(names)


async def matching(files: AsyncFiles, patterns: Sequence[str]) -> list[str]:
    """Returns the files of the project that patterns name, whole."""
    found: dict[str, None] = {}
    for pattern in patterns:
        fixed = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
        base = fixed.rpartition("/")[0]
        folder = f"{WORKSPACE}/{base}".rstrip("/")
        depth = 1 if "/" not in pattern[len(base) + 1 :] and "**" not in pattern else 16
        try:
            entries = await files.list(folder, depth)
        except OSError:
            continue
        for one in entries:
            whole = _whole(folder, one)
            if one.kind == "file" and _fits(whole.removeprefix(f"{WORKSPACE}/"), pattern):
                found[whole] = None
    return sorted(found)


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, pattern.replace("**/", ""))


def _whole(folder: str, entry: FileStat) -> str:
    return entry.path if entry.path.startswith("/") else f"{folder}/{entry.path}"


async def _content(files: AsyncFiles, name: str, room: int, problems: list[str]) -> bytes | None:
    parts, size = [], 0
    try:
        async with files.open(name) as coming:
            async for piece in coming:
                size += len(piece)
                if size > room:
                    problems.append(f"{name.rpartition('/')[2][:80]}: it is larger than reports may be")
                    return None
                parts.append(piece)
    except OSError as error:
        problems.append(f"{name.rpartition('/')[2][:80]}: {error.strerror}")
        return None
    return b"".join(parts)


def _parsed(name: str, text: bytes) -> ParsedReport | Coverage | None:
    base = name.rpartition("/")[2]
    if base.endswith(".go.json"):
        return parse_go(text) if b"{" in text else None  # what does not build may report nothing
    if base.endswith(".cargo.txt"):
        return parse_cargo(text) if has_tests(text) else None
    if base.endswith(".jsonl"):
        return lines.parse_lines(text)
    if base.endswith((".json", ".out")):
        return parse_coverage(text)
    if base.endswith(".tap") or tap.is_tap(text):
        return tap.parse_tap(text)
    if base.endswith(".xml"):
        return junit.parse_junit(text)
    return None


def _printed(result: Result) -> Reported:
    """What a command printed that names no framework: believed if it is TAP as a whole, and said to be printed."""
    text = result.stdout.encode("utf-8", "replace")
    if not tap.is_tap(text) or result.truncated:
        return Reported(None)
    try:
        return Reported(tap.parse_tap(text), printed=True)
    except ValueError as error:
        return Reported(None, unreadable=(f"what was printed: {error}",))


async def so_far(files: AsyncFiles, out: str) -> ParsedReport | None:
    """Returns what our reporters have written until now; None if that cannot be told."""
    reports, unheard = [], list[str]()
    for name in await _listed(files, out, unheard):
        if not name.endswith(".jsonl"):
            continue
        text = await _content(files, name, _LIVE_BYTES, unheard)
        if text:
            try:
                reports.append(lines.parse_lines(text, part=True))
            except ValueError:
                continue
    return merged(reports) if reports else None
