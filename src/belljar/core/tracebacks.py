"""Reads how each language reports an error: one reader for each, from lines of stderr to a `ReportedError`.

The text is the guest's and hostile: patterns are bounded, and nothing is believed but where and what.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from belljar.core.result import ErrorType

_E = ErrorType
_USER_CODE = ("/workspace/", "/inputs/", "/tmp/", "./", "main.", "turn-")
MEND = "correct the code{where}; the whole report is in stderr"
READ_OUTPUT = "read stderr and stdout for what the program said"
COMPILE = "it did not compile, so nothing ran: correct the code{where}"


class ReportedError(NamedTuple):
    position: int  # the line of stderr it was found in
    headline: str
    reader: str  # whose signs to look for
    facts: dict[str, Any]
    block: str  # the headline and what belongs to it
    advice: str
    kind: ErrorType = _E.RUNTIME_ERROR


_FRAME = re.compile(r' {2}File "(?P<file>[^"]{1,300})", line (?P<line>\d{1,9})')
_EXCEPTION = re.compile(r"(?P<exception>[A-Za-z_][\w.]{0,200})(?:: (?P<text>.*))?$")
_GROUP_PREFIX = re.compile(r" {2,60}[+|] ?(?=\S| {2})")


def _python(lines: Sequence[str]) -> ReportedError | None:
    """The last traceback: its exception, and the innermost frame that is the guest's own code."""
    found = None
    frames: list[tuple[int, dict[str, Any]]] = []
    grouped = False
    plain = [_GROUP_PREFIX.sub("", line, count=1) if line.startswith("  ") else line for line in lines]
    for number, line in enumerate(plain):
        grouped = grouped or line.startswith("Exception Group Traceback")
        if frame := _FRAME.match(line):
            frames.append((number, frame.groupdict()))
        elif frames and line[:1].strip() and (headline := _EXCEPTION.match(line)):
            at, facts = next(((at, f) for at, f in reversed(frames) if _is_own(f["file"])), frames[-1])
            facts |= {"line": int(facts["line"]), "exception": headline["exception"]}
            facts["source"] = _source(plain[at + 1], facts["file"])
            found = ReportedError(number, line, "python", facts, "\n".join(plain[number : number + 6]), MEND)
            frames = []
            if grouped:  # the group is the failure; what follows are its members
                break
    return found


def _is_own(file: str) -> bool:
    return file.startswith(_USER_CODE) or (file.startswith("<") and not file.startswith("<frozen"))


def _first(pattern: re.Pattern[str], lines: Sequence[str]) -> re.Match[str] | None:
    """The first frame of a stack that is the guest's own code."""
    return next((frame for frame in map(pattern.match, lines) if frame and _is_own(frame["file"])), None)


def _place(found: re.Match[str] | None) -> dict[str, Any]:
    """File, line and column, as far as the pattern names them."""
    names = found.groupdict() if found else {}
    numbers = {name: int(names[name]) for name in ("line", "column") if name in names}
    return ({"file": names["file"]} if "file" in names else {}) | numbers


def _source(line: str, file: str) -> str:
    return line.strip()[:200] if line.startswith("    ") and not file.startswith("<") else ""


_NODE_HEADLINE = re.compile(
    r"(?:Uncaught )?\[?(?P<exception>[A-Za-z_$][\w$.]{0,100}(?:Error|Exception|Rejection)|Error)"
    r"(?: \[(?P<code>[A-Z0-9_]{1,80})\])?(?:: (?P<text>.*))?$"
)
_NODE_PLACE = re.compile(r"(?:file://)?(?P<file>(?:/|turn-)[^:]{1,300}):(?P<line>\d{1,9})$")
_NODE_FRAME = re.compile(
    r" {4,8}at (?:[^(]{0,200}\()?(?:file://)?(?P<file>(?:/|turn-)[^:]{1,300}):(?P<line>\d{1,9}):\d{1,9}\)?$"
)
_OF_SESSION = "Uncaught "  # how a session begins what it says of an error


def _node(lines: Sequence[str]) -> ReportedError | None:
    """An uncaught error: place, source and caret, then name and message, then the stack."""
    backwards = [(number, lines[number]) for number in reversed(range(len(lines)))]
    at = next((number for number, line in backwards if line.startswith("FATAL ERROR: ")), None)
    if at is None and any(line.startswith("Node.js v") for line in lines):
        carets = (number + 1 for number, line in backwards[1:] if line.strip() == "^")  # a thrown string follows it
        at = next((number for number, line in backwards if _NODE_HEADLINE.match(line)), next(carets, None))
    if at is None:
        at = next((number for number, line in backwards if line.startswith(_OF_SESSION)), None)
    if at is None:
        return None
    facts = _node_place(lines, at)
    headline = _NODE_HEADLINE.match(lines[at])
    if headline:
        facts |= {"exception": headline["exception"], "code": headline["code"]}
    said = lines[at].removeprefix(_OF_SESSION)
    message = said.strip("[]{ ") if headline else f"uncaught: {said}"
    return ReportedError(at, message, "javascript", facts, "\n".join(lines[at:]), MEND)


def _node_place(lines: Sequence[str], at: int) -> dict[str, Any]:
    for number in range(max(0, at - 12), at):
        place = _NODE_PLACE.match(lines[number])
        if place and _is_own(place["file"]):
            return _place(place) | {"source": lines[number + 1].strip()[:200]}
    return _place(_first(_NODE_FRAME, lines[at:]))


_BASH = re.compile(r"(?P<file>[^: ]{1,200}): line (?P<line>\d{1,9}): (?P<text>.+)$")
_BASH_SESSION = re.compile(
    r"bash: (?:eval: )?(?P<text>.{1,400}: (?:command not found|unbound variable)|syntax error.{1,400})$"
)
_BASH_FORK = re.compile(r"(?P<file>[^: ]{1,200}): (?P<text>fork: .+)$")
_EXEC = re.compile(
    r"(?:bwrap: execvp |prlimit: failed to execute |/usr/bin/env: [‘'])(?P<program>.{1,400}?)[’']?: (?P<why>.{1,100})$"
)


def _bash(lines: Sequence[str]) -> ReportedError | None:
    """The shell's last complaint. After a syntax error it repeats the line, in quotes."""
    source = ""
    for number in reversed(range(len(lines))):
        if started := _EXEC.match(lines[number]):
            text = f"{started['program']}: {started['why']}"
            return ReportedError(number, text, "bash", {}, text, READ_OUTPUT)
        said = next(filter(None, (form.match(lines[number]) for form in (_BASH, _BASH_FORK, _BASH_SESSION))), None)
        if said and said["text"].startswith("`"):
            source = said["text"].strip("`'")
        elif said:
            block = "\n".join(lines[max(0, number - 5) : number + 1])
            return ReportedError(number, said["text"], "bash", _place(said) | {"source": source[:200]}, block, MEND)
    return None


_GO_COMPILE = re.compile(r"(?P<file>[^: ]{1,300}\.go):(?P<line>\d{1,9}):(?P<column>\d{1,9}): (?P<text>.+)$")
_GO_PANIC = re.compile(r"(?P<exception>panic|fatal error): (?P<text>.+)$")
_GO_FRAME = re.compile(r"\t(?P<file>/[^:]{1,300}\.go):(?P<line>\d{1,9})(?: |$)")


def _go(lines: Sequence[str]) -> ReportedError | None:
    for number, line in enumerate(lines):
        if panic := _GO_PANIC.match(line):
            facts = {"exception": panic["exception"]} | _place(_first(_GO_FRAME, lines[number:]))
            return ReportedError(number, line, "go", facts, "\n".join(lines[max(0, number - 2) :]), MEND)
        if wrong := _GO_COMPILE.match(line):
            return ReportedError(number, wrong["text"], "go", _place(wrong), line, COMPILE, _E.SYNTAX_ERROR)
    return None


_RUST_ERROR = re.compile(r"error(?:\[(?P<code>E\d{4})\])?: (?P<text>.+)$")
_RUST_PLACE = re.compile(r" {1,12}--> (?P<file>[^:]{1,300}):(?P<line>\d{1,9}):(?P<column>\d{1,9})$")
_RUST_SOURCE = re.compile(r"\d{1,9} {1,4}\| (?P<source>.*)$")
_RUST_PANIC = re.compile(r"thread '[^']{0,100}'(?: \(\d{1,9}\))? (?:panicked at |has overflowed its stack)")
_RUST_PANIC_PLACE = re.compile(r"(?P<file>[^\s:',]{1,300}\.rs):(?P<line>\d{1,9}):\d{1,9}:?$")


def _rust(lines: Sequence[str]) -> ReportedError | None:
    """A panic, or else the compiler's first error; errors that a program prints itself have no place below."""
    for number, line in enumerate(lines):
        if _RUST_PANIC.match(line):
            return _rust_panic(lines, number)
    compiled = any(line.startswith(("error: aborting due to", "error: could not compile")) for line in lines)
    for number, line in enumerate(lines if compiled else ()):
        if wrong := _RUST_ERROR.match(line):
            after = lines[number + 1 : number + 8]
            source = next(filter(None, map(_RUST_SOURCE.match, after)), None)
            facts = {"code": wrong["code"], "source": source["source"].strip()[:200] if source else ""}
            facts |= _place(next(filter(None, map(_RUST_PLACE.match, after)), None))
            return ReportedError(number, line, "rust", facts, line, COMPILE, _E.SYNTAX_ERROR)
    return None


def _rust_panic(lines: Sequence[str], number: int) -> ReportedError:
    """Old: `panicked at 'message', place`. New: `panicked at place:`, and the message below."""
    block = lines[number : number + 6]
    facts = {"exception": "panic"} | _place(next(filter(None, map(_RUST_PANIC_PLACE.search, block[:4])), None))
    said = lines[number].partition(" panicked at ")[2]
    if "overflowed" in lines[number]:
        message = "stack overflow: the recursion is too deep"
    elif said.startswith("'"):
        message = "panic: " + said[1:].rpartition("', ")[0] if "', " in said else "panic: " + said[1:]
    else:
        message = "panic: " + (block[1] if len(block) > 1 else "")
    return ReportedError(number, message, "rust", facts, "\n".join(block), MEND)


_READERS: dict[str, Callable[[Sequence[str]], ReportedError | None]] = {
    "python": _python, "javascript": _node, "typescript": _node, "go": _go, "rust": _rust, "bash": _bash,
}  # fmt: skip
SHELLS = ("bash", "")


def find(lines: Sequence[str], language: str) -> ReportedError | None:
    """What the language's own reader finds; a shell or a command may start anything, so there the last word counts."""
    family = "python" if language.startswith("python") else language
    own = _READERS.get(family)
    if own and family not in SHELLS and (finding := own(lines)):
        return finding
    found = [finding for read in dict.fromkeys(_READERS.values()) if (finding := read(lines))]
    return max(found, key=lambda finding: finding.position, default=None)
