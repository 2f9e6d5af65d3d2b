"""The life of a living sandbox: paused, ended by its time or its caller, and by itself among others."""

from __future__ import annotations

import time

import anyio

from belljar.backends.fake import FakeProcess
from belljar.core.errors import BelljarError, InvalidRequest, SessionEnded
from belljar.sandbox import AsyncSandbox
from belljar.testing.conformance.bench import Bench, check, equal, expect, guest, printed, refused, says, succeeded
from belljar.testing.conformance.living.guests import CAT, LASTING, PORT, SERVER, forever
from belljar.testing.conformance.living.waiting import SECONDS, commands, done, heard, until

_AREA = "life"
_STILL_SECONDS, _SILENT_SECONDS = 10.0, 0.7  # a paused sandbox says nothing for so long, and is so soon


async def _play_counting(p: FakeProcess) -> None:
    number = 0
    while True:
        number += 1
        await p.out(f"{number}\n")
        await p.sleep(0.05)


_COUNTING = guest("n=0; while :; do n=$((n + 1)); echo $n; sleep 0.05; done", _play_counting)
_HELLO = guest("echo hello there", says("hello there\n"))


@check(_AREA, "a paused sandbox stands still, and goes on where it was", "living", "pause")
async def _pause(bench: Bench) -> None:
    async with bench.machine() as box:
        process = await box.start(_COUNTING)
        await heard(process, "3\n")
        await box.pause()
        expect(box.paused, "it does not say that it is paused")

        async def still() -> bool:
            before = process.log.last
            await anyio.sleep(_SILENT_SECONDS)
            return process.log.last == before

        await until(still, "its process goes on", seconds=_STILL_SECONDS)
        last = process.log.last
        await box.resume()
        expect(not box.paused, "it still says that it is paused")
        with anyio.fail_after(SECONDS):
            await anext(process.output(last))
        lines = "".join(chunk.text for chunk in process.kept()).split()
        await process.kill()  # of which a shell may have its own to say
        equal(lines, [str(number + 1) for number in range(len(lines))], "what it counted")


@check(_AREA, "a paused sandbox starts nothing, and says why; pausing twice does no harm", "living", "pause")
async def _paused(bench: Bench) -> None:
    async with bench.machine() as box:
        process = await box.start(CAT)
        for _ in range(2):
            await box.pause()
        await refused(InvalidRequest, box.start(LASTING))
        await refused(InvalidRequest, box.files.write("file", "x"))
        await process.write("written meanwhile\n")
        for _ in range(2):
            await box.resume()
        await heard(process, "written meanwhile\n")
        printed(await done(box, _HELLO), "hello there\n")


@check(_AREA, "a paused sandbox can be closed", "living", "pause")
async def _closed_paused(bench: Bench) -> None:
    with anyio.fail_after(SECONDS):
        async with bench.machine() as box:
            process = await box.start(LASTING)
            await box.pause()
            expect(box.paused, "it does not say that it is paused")
    expect(not process.running, f"it is {process!r}")


@check(_AREA, "a sandbox ends when its time is over, with all that runs in it", "living")
async def _expires(bench: Bench) -> None:
    async with bench.machine(expires=3600) as box:
        expect(abs((box.expires or 0) - time.time() - 3600) < 600, f"it ends at {box.expires}")
        process = await box.start(LASTING)
        box.extend(0.3)
        equal((await process.wait(SECONDS)).status, "killed", "the status of what ran")
        expect("time" in box.ended, f"it ended because {box.ended!r}")
        await refused(SessionEnded, box.start(LASTING))
        await refused(SessionEnded, box.exec(LASTING))


@check(_AREA, "a sandbox that was given more time lives on", "living")
async def _extended(bench: Bench) -> None:
    async with bench.machine(expires=3600) as box:
        process = await box.start(_COUNTING)
        box.extend(0.3)
        box.extend(1800)
        expect(abs((box.expires or 0) - time.time() - 1800) < 600, f"it ends at {box.expires}")
        await heard(process, "20\n")
        expect(process.running and not box.ended, f"it ended: {box.ended}")
    async with bench.machine() as box:
        equal(box.expires, None, "the end of a sandbox that was given none")


@check(_AREA, "a sandbox can pause when its time is over, and gets that time again", "living", "pause")
async def _pauses(bench: Bench) -> None:
    async with bench.machine(expires=3600, on_expire="pause") as box:
        process = await box.start(CAT)
        box.extend(0.3)

        async def paused() -> bool:
            return box.paused

        await until(paused, "it is not paused")
        equal((box.ended, process.running), ("", True), "(ended, running)")
        await box.resume()
        expect(abs((box.expires or 0) - time.time() - 3600) < 600, f"it ends at {box.expires}")
        await process.write("on\n")
        await heard(process, "on\n")


async def _play_stubborn(p: FakeProcess) -> None:
    p.on_signal(15, lambda: None)
    p.background(forever, "sleep 3605")
    await p.out("ready\n")
    await forever(p)


_STUBBORN = guest("trap '' TERM HUP INT; sleep 3605 & echo ready; wait; wait", _play_stubborn)


@check(_AREA, "closing a sandbox ends all that runs in it, whatever it does against that", "living")
async def _closing(bench: Bench) -> None:
    with anyio.fail_after(SECONDS):
        async with bench.machine() as box:
            stubborn, other = await box.start(_STUBBORN), await box.start(LASTING)
            await heard(stubborn, "ready")
        equal([one.running for one in (stubborn, other)], [False, False], "what runs")
        equal([one.result and one.result.status for one in (stubborn, other)], ["aborted"] * 2, "their statuses")
        equal(stubborn.kept()[0].text, "ready\n", "its output")
    for attempt in (box.processes(), box.start(LASTING), box.dial(PORT)):
        await refused(InvalidRequest, attempt)


_NUMBER = guest("echo $$", lambda p: p.out(f"{p.pid}\n"))


@check(_AREA, "a sandbox in which nothing runs starts nothing", "living")
async def _idle(bench: Bench) -> None:
    async with bench.machine() as box:
        first = int(succeeded(await done(box, _NUMBER)).stdout)
        await anyio.sleep(_SILENT_SECONDS)
        last = int(succeeded(await done(box, _NUMBER)).stdout)
        expect(last - first < 50, f"one process had the number {first}, and the next one {last}")


async def _play_trace(p: FakeProcess) -> None:
    for name in ("/tmp/trace", "/var/tmp/trace", f"{p.env['HOME']}/trace"):
        p.write(name, b"x")


_TRACE = guest('touch /tmp/trace /var/tmp/trace "$HOME/trace"', _play_trace)
_COUNTED = guest("ls -d /proc/[0-9]* | wc -l", says("4\n"))


@check(_AREA, "two sandboxes see nothing of each other's files and processes", "living")
async def _apart(bench: Bench) -> None:
    async with bench.machine() as one, bench.machine() as other:
        succeeded(await done(one, _TRACE))
        for _ in range(8):
            await one.start(LASTING)
        equal(await commands(one), ["sleep 3600"] * 8, "what runs in one")
        equal(await other.processes(), (), "what runs in the other")
        seen = int(succeeded(await done(other, _COUNTED)).stdout)
        expect(seen < 8, f"a program of the other sees {seen} processes")
        for name in ("/tmp/trace", "/var/tmp/trace", "~/trace"):
            equal((await one.files.exists(name), await other.files.exists(name)), (True, False), f"{name}: here, there")


@check(_AREA, "ending what one sandbox runs leaves the other's", "living")
async def _independent(bench: Bench) -> None:
    async with bench.machine() as one:
        process = await one.start(CAT)
        async with bench.machine() as other:
            await other.start(SERVER)
            await other.wait_for_port(PORT, timeout=SECONDS)
        await process.write("alive\n")
        await heard(process, "alive\n")


@check(_AREA, "a sandbox tells its labels, and every one has an id of its own", "living")
async def _labels(bench: Bench) -> None:
    async with bench.machine(labels={"task": "42"}) as one, bench.machine() as other:
        equal((dict(one.labels), dict(other.labels)), ({"task": "42"}, {}), "labels")
        ids = [succeeded(await done(box, _HELLO)).container_id for box in (one, other)]
        expect(len(set(ids)) == 2 and all(ids), f"the ids are {ids}")


@check(_AREA, "what makes no sense for a living sandbox is refused by its name", "living")
async def _nonsense(bench: Bench) -> None:
    async def opened(**options: object) -> AsyncSandbox:
        return bench.sandbox(**options)

    for wrong in ({"home": "relative"}, {"home": "/etc/x"}, {"living": False, "home": "/home/x"}, {"expires": -1.0}):
        await refused(BelljarError, opened(**wrong))
    async with bench.machine() as box:
        await refused(InvalidRequest, box.exec(LASTING, memory="64M"))
    async with bench.sandbox() as plain:
        await refused(InvalidRequest, plain.start(LASTING))
