"""The lines of an audit log, and how each is bound to the one before it. Pure: it opens no file.

A line is JSON in one form only: keys sorted, no spaces, ASCII, and its hash at the end. The hash is the SHA-256 of the
line's bytes without it, so a line that says the same in other bytes (a key twice, another order) is not the line that
was written.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, pairwise
from typing import Any, NamedTuple

from belljar.core import errors

RESUMED = "resumed"  # the kind of the line that tells that a log did not end as its head says
_FIRST = "0" * 64
_HEAD = re.compile(r"([0-9]{1,20}):([0-9a-f]{64})")
_NO_HEAD = "its head is missing or cannot be read, so lines may have been cut off at its end"
_MOST_PROBLEMS = 20


class Head(NamedTuple):
    """The last line: its number and its hash."""

    number: int = 0
    hash: str = _FIRST

    def __str__(self) -> str:
        return f"{self.number}:{self.hash}"

    @classmethod
    def parse(cls, text: str) -> Head:
        """Reads a head, or raises `InvalidRequest`."""
        if not (found := _HEAD.fullmatch(text.strip())):
            raise errors.InvalidRequest(f"{text[:80]!r} is no head of an audit log", fix="write it as NUMBER:HASH")
        return cls(int(found[1]), found[2])


class AuditReport(NamedTuple):
    """What `verify` found.

    Attributes:
        head: the last line that is what it was.
        problems: what was changed or is missing; none: every line is what it was, and none is missing.
        torn: whether a crash cut the last line short; what it was about never ran.
        unconfirmed: whether the last line is newer than the head: a crash came between the two, or somebody added it.
    """

    head: Head
    problems: tuple[str, ...]
    torn: bool = False
    unconfirmed: bool = False


class AuditEntry(NamedTuple):
    """One line of a log, as it was found.

    Attributes:
        raw: its bytes, the end of line included.
        facts: what it says; empty if it is not a JSON object.
        head: the number and hash that it says it has; None if it says none.
        problem: what is wrong with it; empty: it is what was written.
        torn: whether a crash cut it short.
    """

    raw: bytes
    facts: dict[str, Any]
    head: Head | None = None
    problem: str = ""
    torn: bool = False

    @property
    def verified(self) -> bool:
        """Whether these are the bytes that were written, in their place."""
        return not self.problem and not self.torn


def sealed(last: Head, facts: Mapping[str, Any]) -> tuple[bytes, Head]:
    """Returns the line that comes after `last`, as it is written, and the head that it makes."""
    return _written({"number": last.number + 1, "at": round(time.time(), 3), **facts, "before": last.hash})


def _written(line: Mapping[str, Any]) -> tuple[bytes, Head]:
    text = json.dumps(line, sort_keys=True, separators=(",", ":")).encode()
    digest = hashlib.sha256(text).hexdigest()
    return b'%s,"hash":"%s"}\n' % (text[:-1], digest.encode()), Head(line["number"], digest)


def head_of(raw: bytes) -> Head | None:
    """Returns the number and hash of a line that is whole and unchanged; None if it is not."""
    facts = _facts(raw) or {}
    return _claimed(facts) if _is_as_written(raw, facts) else None


def is_torn(raw: bytes) -> bool:
    """Whether this is how a crash leaves the last line of a log: it has no end, and cannot be read."""
    return not raw.endswith(b"\n") and _facts(raw) is None


def _facts(raw: bytes) -> dict[str, Any] | None:
    """What a line says; nothing, if it is JSON of another kind; None, if it cannot be read."""
    try:
        said = json.loads(raw)
    except RecursionError:
        return {}
    except ValueError:
        return None
    return said if isinstance(said, dict) else {}


def _claimed(facts: Mapping[str, Any]) -> Head | None:
    number, digest = facts.get("number"), facts.get("hash")
    return Head(number, digest) if type(number) is int and type(digest) is str else None


def _is_as_written(raw: bytes, facts: Mapping[str, Any]) -> bool:
    if _claimed(facts) is None:
        return False
    return _written({name: value for name, value in facts.items() if name != "hash"})[0] == raw


def examine(lines: Iterable[bytes]) -> Iterator[AuditEntry]:
    """Yields each line with what is wrong with it. They are the lines of a whole log, in their order."""
    last, before = Head(), Head()
    for raw, following in pairwise(chain(lines, (None,))):
        assert raw is not None
        if following is None and is_torn(raw):
            yield AuditEntry(raw, {}, torn=True)
            return
        facts = _facts(raw)
        head = _claimed(facts or {})
        yield AuditEntry(raw, facts or {}, head, _wrong(raw, facts, last, before))
        last, before = head or last, last


def _wrong(raw: bytes, facts: dict[str, Any] | None, last: Head, before: Head) -> str:
    """What is wrong with a line, by itself and by the two before it."""
    if not facts:
        return "it cannot be read"
    if not _is_as_written(raw, facts):
        return "it was changed" if raw.endswith(b"\n") else "it was changed, or its end is missing"
    if facts.get("before") != last.hash or facts["number"] != last.number + 1:
        return "lines before it are missing, or were put in another order"
    # A crash comes between a line and its head at most once; then the next line tells of it.
    if facts.get("kind") != RESUMED or facts.get("head") in (str(last), str(before)):
        return ""
    told = "missing or could not be read" if facts.get("head") is None else "another line's"
    return f"when it was written the head was {told}: lines before it may have been cut off or made up"


def conclude(
    entries: Iterable[AuditEntry],
    kept: Head | None,
    known: Head | None = None,
    each: Callable[[AuditEntry], object] | None = None,
) -> AuditReport:
    """Returns the verdict on a log.

    Args:
        entries: its lines, as `examine` yields them.
        kept: the head that lies beside it; None if there is none that can be read.
        known: a head that was kept elsewhere.
        each: is called with every line.
    """
    problems, seen, torn = list[str](), {0: Head()}, False
    before = last = Head()
    wanted = {head.number for head in (known, kept) if head}
    for place, entry in enumerate(entries, 1):
        if each:
            each(entry)
        torn = entry.torn
        if entry.problem and len(problems) < _MOST_PROBLEMS:
            problems.append(f"line {place}: {entry.problem}")
        if entry.head:
            before, last = last, entry.head
            if last.number in wanted:
                seen[last.number] = last
    problems += [said for head in (known, kept) if head and (said := _contradiction(head, last, seen))]
    if kept is None and (last.number or problems or torn):
        problems.append(_NO_HEAD)
    if kept and kept.number < before.number:
        problems.append(f"the last {last.number - kept.number} lines are newer than its head")
    return AuditReport(last, tuple(dict.fromkeys(problems)), torn, kept == before != last)


def _contradiction(head: Head, last: Head, seen: Mapping[int, Head]) -> str:
    """What speaks against a head having been this log's."""
    if head.number > last.number:
        return f"{head.number - last.number} lines are missing at the end"
    return (
        "" if seen.get(head.number) == head else f"line number {head.number} is not what it was when its head was kept"
    )
