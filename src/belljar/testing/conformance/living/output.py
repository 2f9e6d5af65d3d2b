"""What processes of a living sandbox print and read: numbered, kept, replayed, fed."""

from __future__ import annotations

import hashlib

import anyio

from belljar.backends.fake import FakeProcess
from belljar.testing.conformance.bench import Bench, check, equal, expect, refused, succeeded
from belljar.testing.conformance.living.guests import CAT, LASTING, python
from belljar.testing.conformance.living.waiting import SECONDS, heard

_AREA = "living output"
_MOST_KEPT = 3 * 2**20


async def _play_turns(p: FakeProcess) -> None:
    while word := await p.receive():
        await (p.err if word == b"e\n" else p.out)(word)


# Each piece waits for the one before to be heard: that is what makes the order of two pipes certain.
_TURNS = python(
    "import sys\n"
    "for line in iter(sys.stdin.readline, ''):\n"
    "    print(line, end='', file=sys.stderr if line == 'e\\n' else sys.stdout, flush=True)",
    _play_turns,
)


@check(_AREA, "output is numbered from one, both streams in the order in which it came", "living", shared=True)
async def _numbered(bench: Bench) -> None:
    async with bench.machine() as box:
        process = await box.start(_TURNS)
        heard_so_far = process.output()
        for word in ("a", "e", "b", "e"):
            await process.write(f"{word}\n")
            with anyio.fail_after(SECONDS):
                await anext(heard_so_far)
        await process.close_stdin()
        result = succeeded(await process.wait(SECONDS))
        told = [(chunk.seq, chunk.stream, chunk.text) for chunk in process.kept()]
        wanted = [(1, "stdout", "a\n"), (2, "stderr", "e\n"), (3, "stdout", "b\n"), (4, "stderr", "e\n")]
        equal(told, wanted, "the output")
        equal((result.stdout, result.stderr), ("a\nb\n", "e\ne\n"), "(stdout, stderr)")


@check(
    _AREA, "a second reader gets all of the output, and one that comes back what is new to it", "living", shared=True
)
async def _replay(bench: Bench) -> None:
    async with bench.machine() as box:
        process = await box.start(CAT)
        await process.write("one\n")
        first = await heard(process, "one\n")
        last = process.kept()[-1].seq
        await process.write("two\n")
        equal(await heard(process, "two\n"), f"{first}two\n", "what a second reader gets")
        equal(await heard(process, "two\n", since=last), "two\n", "what one that comes back gets")
        await process.close_stdin()
        await process.wait(SECONDS)
        equal([chunk.text async for chunk in process.output(since=last)], ["two\n"], "what is there afterwards")


async def _play_flood(p: FakeProcess) -> None:
    for number in range(80):
        await p.out(f"{number:05}" + "x" * 65530 + "\n")
    await p.out("the end\n")


_FLOOD = python(
    "import os\n"
    "def put(data):\n"
    "    while data:\n"
    "        data = data[os.write(1, data):]\n"
    "for number in range(80):\n"
    "    put(b'%05d' % number + b'x' * 65530 + b'\\n')\n"
    "put(b'the end\\n')",
    _play_flood,
)


@check(_AREA, "a reader that stands still slows nobody", "living", shared=True)
async def _hung_reader(bench: Bench) -> None:
    async with bench.machine() as box:
        process = await box.start(_FLOOD)
        still = process.output()
        with anyio.fail_after(SECONDS):
            first = await anext(still)
        succeeded(await process.wait(SECONDS))
        equal(first.seq, 1, "the number of what the slow reader has")
        rest = [chunk async for chunk in still]
        expect(rest[-1].text.endswith("the end\n"), f"it then reads {rest[-1].text[-20:]!r} last")


@check(_AREA, "of more output than is kept the head and the tail are there, and the gap is told", "living", shared=True)
async def _bounded(bench: Bench) -> None:
    async with bench.machine() as box:
        process = await box.start(_FLOOD)
        result = succeeded(await process.wait(SECONDS))
        kept = process.kept()
        size, missed = sum(len(chunk.data) for chunk in kept), sum(chunk.missed for chunk in kept)
        equal(size + missed, 80 * 65536 + 8, "bytes that are kept and missed")
        expect(size <= _MOST_KEPT, f"{size} bytes are kept")
        expect(kept[0].text.startswith("00000x"), f"the head is {kept[0].text[:20]!r}")
        expect(result.stdout.startswith("00000x") and result.stdout.endswith("the end\n"), "the result lacks an end")
        equal(result.truncated, True, "whether the result says that it was cut")


_ALL_BYTES = bytes(range(256))


async def _play_bytes(p: FakeProcess) -> None:
    await p.out(_ALL_BYTES)


_BYTES = python("import os\nos.write(1, bytes(range(256)))", _play_bytes)


@check(_AREA, "output is bytes, and what is not UTF-8 is kept as it is", "living", shared=True)
async def _bytes(bench: Bench) -> None:
    async with bench.machine() as box:
        process = await box.start(_BYTES)
        succeeded(await process.wait(SECONDS))
        equal(b"".join(chunk.data for chunk in process.kept()), _ALL_BYTES, "the output")


async def _play_digest(p: FakeProcess) -> None:
    digest = hashlib.sha256()
    while piece := await p.receive():
        digest.update(piece)
    await p.out(digest.hexdigest())


_DIGEST = python(
    "import hashlib, sys\nprint(hashlib.sha256(sys.stdin.buffer.read()).hexdigest(), end='')", _play_digest
)


@check(_AREA, "two megabytes of input arrive whole, and the end of input is told", "living", shared=True)
async def _much_input(bench: Bench) -> None:
    data = bytes(range(256)) * 8192
    async with bench.machine() as box:
        process = await box.start(_DIGEST)
        with anyio.fail_after(SECONDS):
            await process.write(data)
        await process.close_stdin()
        result = succeeded(await process.wait(SECONDS))
        equal(result.stdout, hashlib.sha256(data).hexdigest(), "the digest of what arrived")


@check(_AREA, "input is read while the process runs, and closing it ends it", "living", shared=True)
async def _live_input(bench: Bench) -> None:
    async with bench.machine() as box:
        process = await box.start(CAT)
        for word in ("one\n", "two\n"):
            await process.write(word)
            await heard(process, word)
        await process.close_stdin()
        equal((await process.wait(SECONDS)).stdout, "one\ntwo\n", "the output")


@check(
    _AREA, "writing to a process that has ended, or whose input is closed, is BrokenPipeError", "living", shared=True
)
async def _broken_pipe(bench: Bench) -> None:
    async with bench.machine() as box:
        process = await box.start(LASTING)
        await process.close_stdin()
        await refused(BrokenPipeError, process.write("late"))
        await process.kill()
        await refused(BrokenPipeError, process.write("too late"))
