"""Output: what the guest prints arrives whole, in order, in time, and a cut is always flagged."""

from __future__ import annotations

from belljar.backends.fake import FakeProcess
from belljar.control.callbacks import Cancel
from belljar.core.result import Event
from belljar.testing.conformance.bench import Bench, check, equal, expect, guest, present, printed, says, succeeded

_MIB = 1 << 20


def _raw(data: str) -> str:
    """A guest that writes these bytes (a Python expression) to stdout, as they are."""
    return f"import sys\nsys.stdout.buffer.write({data})"


def _text(events: list[Event], kind: str) -> str:
    return "".join(event.text for event in events if event.kind == kind)


_OUT = guest("print('to stdout')", says("to stdout\n"))
_ERR = guest("import sys\nprint('to stderr', file=sys.stderr)", says(err="to stderr\n"))


@check("streams", "what is printed to stdout is in stdout and nowhere else")
async def _stdout(bench: Bench) -> None:
    result = await bench.run(_OUT)
    printed(result, "to stdout\n")
    equal(result.stderr, "", "stderr")


@check("streams", "what is printed to stderr is in stderr and nowhere else")
async def _stderr(bench: Bench) -> None:
    result = succeeded(await bench.run(_ERR))
    equal((result.stdout, result.stderr), ("", "to stderr\n"), "(stdout, stderr)")


async def _play_both(p: FakeProcess) -> None:
    for i in range(5):
        await p.out(f"o{i}\n")
        await p.err(f"e{i}\n")


_BOTH = guest(
    "import sys\nfor i in range(5):\n    print(f'o{i}', flush=True)\n    print(f'e{i}', file=sys.stderr, flush=True)",
    _play_both,
)


@check("streams", "stdout and stderr written in turns are kept apart")
async def _apart(bench: Bench) -> None:
    result = succeeded(await bench.run(_BOTH))
    equal(result.stdout, "o0\no1\no2\no3\no4\n", "stdout")
    equal(result.stderr, "e0\ne1\ne2\ne3\ne4\n", "stderr")


@check("streams", "events of one stream, put together, are that stream of the result")
async def _joined(bench: Bench) -> None:
    result, events = await bench.watch(_BOTH)
    succeeded(result)
    equal(_text(events, "stdout"), "o0\no1\no2\no3\no4\n", "the stdout events")
    equal((_text(events, "stdout"), _text(events, "stderr")), (result.stdout, result.stderr), "the events' text")


async def _play_count(p: FakeProcess) -> None:
    for i in range(2000):
        await p.out(f"{i}\n")


_COUNT = guest("for i in range(2000):\n    print(i)", _play_count)


@check("streams", "two thousand lines arrive in the order they were printed")
async def _order(bench: Bench) -> None:
    result, events = await bench.watch(_COUNT)
    printed(result, "".join(f"{i}\n" for i in range(2000)))
    equal(_text(events, "stdout"), result.stdout, "the stdout events")


@check("streams", "events are numbered from 1 without a gap and name one run")
async def _numbered(bench: Bench) -> None:
    _, events = await bench.watch(_BOTH)
    expect(len(events) >= 4, f"only {len(events)} events were told")
    equal([event.seq for event in events], list(range(1, len(events) + 1)), "the numbers")
    equal(len({event.run for event in events}), 1, "the number of run ids")


@check("streams", "the first event is started and there is one of it")
async def _started(bench: Bench) -> None:
    _, events = await bench.watch(_BOTH)
    kinds = [event.kind for event in events]
    equal((kinds[:1], kinds.count("started")), (["started"], 1), "(first event, number of started)")


@check("streams", "the last event is finished and carries the result that is returned")
async def _finished(bench: Bench) -> None:
    result, events = await bench.watch(_BOTH)
    equal([event.kind for event in events].count("finished"), 1, "the number of finished events")
    equal(events[-1].kind, "finished", "the last event")
    equal(present(events[-1].result, "the event's result"), result, "the event's result")


async def _play_then_wait(p: FakeProcess) -> None:
    await p.out("early\n")
    await p.sleep(60)


# One write: `print` without a buffer makes two, and the run may be aborted between them.
_THEN_WAIT = guest("import os, time\nos.write(1, b'early\\n')\ntime.sleep(60)", _play_then_wait)


@check("streams", "output is told while the guest still runs")
async def _live(bench: Bench) -> None:
    """The guest would outlive its timeout; only somebody who hears it early can abort it first."""
    cancel = Cancel()
    result = await bench.run(_THEN_WAIT, timeout=10, cancel=cancel, on_stdout=lambda text: cancel.cancel())
    equal((result.status, result.stdout), ("aborted", "early\n"), "(status, stdout)")


_UNICODE = (
    "h\u00e9llo \U0001f514 \u05e9\u05dc\u05d5\u05dd \u202ertl\u202c e\u0301 "
    "\U0001f469\u200d\U0001f467 \ufdfd \U0001d518 \u6f22\u5b57"
)
_SPEAK = guest(f"print({_UNICODE!r})", says(_UNICODE + "\n"))


@check("streams", "emoji, right-to-left text and combining marks come through unchanged")
async def _unicode(bench: Bench) -> None:
    printed(await bench.run(_SPEAK), _UNICODE + "\n")


async def _play_split(p: FakeProcess) -> None:
    await p.out(b"<\xf0\x9f")
    await p.sleep(0.3)
    await p.out(b"\x94\x94>")


_SPLIT = guest(
    "import os, time\nos.write(1, b'<\\xf0\\x9f')\ntime.sleep(0.3)\nos.write(1, b'\\x94\\x94>')", _play_split
)


@check("streams", "a character split across two writes is one character, in events too")
async def _split(bench: Bench) -> None:
    result, events = await bench.watch(_SPLIT)
    printed(result, "<🔔>")
    equal(_text(events, "stdout"), "<🔔>", "the stdout events")


_UNDECODABLE = guest(_raw(r"b'a\xff\xfeb\xc3'"), says(b"a\xff\xfeb\xc3"))


@check("streams", "bytes that are not UTF-8 become U+FFFD and harm nothing")
async def _undecodable(bench: Bench) -> None:
    result, events = await bench.watch(_UNDECODABLE)
    printed(result, "a\ufffd\ufffdb\ufffd")
    equal(_text(events, "stdout"), result.stdout, "the stdout events")


_NUL = guest(_raw(r"b'a\0b\0'"), says(b"a\0b\0"))
_CRLF = guest(_raw(r"b'one\r\ntwo\rthree\n\n'"), says(b"one\r\ntwo\rthree\n\n"))
_ANSI = guest(_raw(r"b'\x1b[31mred\x1b[0m\x07'"), says("\x1b[31mred\x1b[0m\x07"))
_NO_NEWLINE = guest(_raw(r"b'no newline'"), says("no newline"))
_NOTHING = guest("pass", says())
_LONG = guest("print('x' * 1_000_000)", says("x" * 1_000_000 + "\n"))


@check("streams", "NUL bytes come through")
async def _nul(bench: Bench) -> None:
    printed(await bench.run(_NUL), "a\0b\0")


@check("streams", "line ends of all kinds are left as they are")
async def _line_ends(bench: Bench) -> None:
    printed(await bench.run(_CRLF), "one\r\ntwo\rthree\n\n")


@check("streams", "terminal escape codes are data and come through")
async def _escapes(bench: Bench) -> None:
    printed(await bench.run(_ANSI), "\x1b[31mred\x1b[0m\x07")


@check("streams", "a last line without a newline is kept as it is")
async def _no_newline(bench: Bench) -> None:
    printed(await bench.run(_NO_NEWLINE), "no newline")


@check("streams", "a guest that prints nothing has empty streams")
async def _nothing(bench: Bench) -> None:
    result, events = await bench.watch(_NOTHING)
    printed(result, "")
    equal((result.stderr, result.truncated), ("", False), "(stderr, truncated)")
    equal([event.kind for event in events if event.kind in ("stdout", "stderr")], [], "the output events")


@check("streams", "a line of a million characters is not broken")
async def _long(bench: Bench) -> None:
    printed(await bench.run(_LONG), "x" * 1_000_000 + "\n")


_FIVE = guest(
    f"import sys\nfor i in range(5):\n    sys.stdout.write(str(i) * {_MIB})",
    says("".join(str(i) * _MIB for i in range(5))),
)


@check("streams", "five megabytes of output are returned whole")
async def _five(bench: Bench) -> None:
    result = await bench.run(_FIVE)
    expect(not result.truncated, "it was flagged as cut")
    printed(result, "".join(str(i) * _MIB for i in range(5)))


def _bytes(count: int) -> str:
    return guest(
        f"import sys\nsys.stdout.write('h' * 500 + 't' * {count - 500})", says("h" * 500 + "t" * (count - 500))
    )


_AT_LIMIT, _ONE_OVER, _FAR_OVER = _bytes(1000), _bytes(1001), _bytes(20_000)


@check("streams", "output of exactly the limit is neither cut nor flagged")
async def _at_limit(bench: Bench) -> None:
    result = await bench.run(_AT_LIMIT, output=1000)
    printed(result, "h" * 500 + "t" * 500)
    equal(result.truncated, False, "truncated")


@check("streams", "one byte over the limit is cut, flagged and has status output_limit")
async def _one_over(bench: Bench) -> None:
    result = await bench.run(_ONE_OVER, output=1000)
    equal((result.status, result.truncated), ("output_limit", True), "(status, truncated)")
    equal(present(result.error, "error").error_type, "OUTPUT_LIMIT", "error_type")


@check("streams", "of output over the limit the head and the tail are kept, and the cut is told")
async def _head_and_tail(bench: Bench) -> None:
    result, events = await bench.watch(_FAR_OVER, output=1000)
    equal(result.truncated, True, "truncated")
    expect(result.stdout.startswith("h" * 500), "the head is missing")
    expect(result.stdout.endswith("t" * 500), "the tail is missing")
    expect(len(result.stdout) < 1500, f"{len(result.stdout)} characters were kept under a limit of 1000")
    expect(any(event.kind == "limit" for event in events), "no limit event was told")


_LOUD_ERR = guest(
    "import sys\nprint('short')\nsys.stderr.write('e' * 5000)\nsys.exit(0)", says("short\n", err="e" * 5000)
)


@check("streams", "a cut of stderr leaves stdout whole")
async def _cut_apart(bench: Bench) -> None:
    result = await bench.run(_LOUD_ERR, output=1000)
    equal((result.stdout, result.truncated), ("short\n", True), "(stdout, truncated)")
    expect(900 < len(result.stderr) < 1500, f"{len(result.stderr)} characters of stderr were kept under 1000")


async def _play_flood(p: FakeProcess) -> None:
    while True:
        await p.out("y" * 65536)


_FLOOD = guest("import sys\nwhile True:\n    sys.stdout.write('y' * 65536)", _play_flood)


@check("streams", "a flood is ended long before its timeout")
async def _flood(bench: Bench) -> None:
    result = await bench.run(_FLOOD, output=1000, timeout=60)
    equal((result.status, result.truncated), ("output_limit", True), "(status, truncated)")
    expect(result.duration_ms < 30_000, f"it took {result.duration_ms:.0f} ms")
    expect(len(result.stdout) < 1500, f"{len(result.stdout)} characters were kept under a limit of 1000")
