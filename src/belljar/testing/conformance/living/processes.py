"""Processes of a living sandbox: side by side, in the background, ended, found again."""

from __future__ import annotations

import time

import anyio

from belljar.backends.fake import FakeProcess
from belljar.core.errors import InvalidRequest, NotFound
from belljar.core.result import Result
from belljar.testing.conformance.bench import Bench, check, equal, expect, guest, printed, refused, says
from belljar.testing.conformance.living.guests import CAT, LASTING, READY, TRAP, forever, python
from belljar.testing.conformance.living.waiting import SECONDS, commands, done, heard, until

_AREA = "living processes"


async def _play_meeting(p: FakeProcess) -> None:
    p.write(p.env["MINE"], b"")
    while p.env["OTHER"] not in p.files:
        await p.sleep(0.01)
    await p.out("met\n")


_MEETING = guest(
    'touch "$MINE"; for i in $(seq 300); do [ -e "$OTHER" ] && echo met && exit; sleep 0.1; done; exit 1',
    _play_meeting,
)


@check(_AREA, "commands of one sandbox run side by side", "living", shared=True)
async def _side_by_side(bench: Bench) -> None:
    async with bench.machine() as box:
        first = await box.start(_MEETING, env={"MINE": "a", "OTHER": "b"})
        printed(await done(box, _MEETING, env={"MINE": "b", "OTHER": "a"}), "met\n")
        printed(await first.wait(SECONDS), "met\n")


_HELLO = guest("echo hello", says("hello\n"))


@check(_AREA, "a process goes on while commands come and go, until it is ended", "living", shared=True)
async def _goes_on(bench: Bench) -> None:
    async with bench.machine() as box:
        process = await box.start(LASTING)
        expect(process.running and process.pid > 0, f"it is {process!r}, with pid {process.pid}")
        for _ in range(2):
            printed(await done(box, _HELLO), "hello\n")
        expect(process.running, f"it is {process!r}, and should run")
        ended = await process.kill()
        equal((ended.status, process.running), ("aborted", False), "(status, running)")


async def _play_leaving(p: FakeProcess) -> None:
    p.background(forever, "sleep 3602")
    await p.out("left\n")


_LEAVING = guest("sleep 3602 >/dev/null 2>&1 & echo left", _play_leaving)


@check(_AREA, "what a command leaves in the background outlives it", "living")
async def _background(bench: Bench) -> None:
    async with bench.machine() as box:
        printed(await done(box, _LEAVING), "left\n")
        printed(await done(box, _HELLO), "hello\n")
        equal(await commands(box), ["sleep 3602"], "what runs afterwards")


async def _play_open_output(p: FakeProcess) -> None:
    p.background(forever, "sleep 3603")
    await p.out("left\n")


_OPEN_OUTPUT = guest("sleep 3603 & echo left", _play_open_output)
_OPEN_IN_EXEC = guest(("sh", "-c", _OPEN_OUTPUT), _play_open_output)


@check(_AREA, "a command ends at its own end, whoever still has its output open", "living")
async def _open_output(bench: Bench) -> None:
    async with bench.machine() as box:
        with anyio.fail_after(SECONDS):
            printed(await box.exec(_OPEN_IN_EXEC), "left\n")
        printed(await done(box, _OPEN_OUTPUT), "left\n")

        async def both() -> bool:  # what was just left behind may still be about to become that
            return await commands(box) == ["sleep 3603"] * 2

        await until(both, "what runs afterwards is not what was left")


def _play_exit(p: FakeProcess) -> int:
    return int(p.env["CODE"])


_EXIT = guest('exit "$CODE"', _play_exit)


@check(_AREA, "an exit code is the one that the process ended with", "living", shared=True)
async def _exit_codes(bench: Bench) -> None:
    async with bench.machine() as box:
        for code in (0, 3, 255):
            result = await done(box, _EXIT, env={"CODE": str(code)})
            equal((result.exit_code, result.ok), (code, code == 0), "(exit code, ok)")


_MISSING = guest(("no-such-program-anywhere",), says(err="no such program", code=127))


@check(_AREA, "starting a program that does not exist is a result with exit code 127", "living", shared=True)
async def _no_program(bench: Bench) -> None:
    async with bench.machine() as box:
        equal((await (await box.start(_MISSING)).wait(SECONDS)).exit_code, 127, "the exit code")
        printed(await done(box, _HELLO), "hello\n")


@check(_AREA, "a signal reaches its process, and no other", "living", shared=True)
async def _signal(bench: Bench) -> None:
    async with bench.machine() as box:
        one, other = await box.start(TRAP), await box.start(TRAP)
        for process in (one, other):
            await heard(process, "ready")
        equal(await one.signal("TERM"), True, "whether it was sent")
        result = await one.wait(SECONDS)
        equal((result.exit_code, result.stdout), (7, "ready\nbye\n"), "(exit code, stdout)")
        expect(other.running, f"the other one is {other!r}")
        equal(other.result, None, "its result")


@check(_AREA, "the exit code of a process that dies of a signal tells which", "living", shared=True)
async def _dies(bench: Bench) -> None:
    async with bench.machine() as box:
        for name, code in (("KILL", 137), ("TERM", 143)):
            process = await box.start(LASTING)
            await process.signal(name)
            equal((await process.wait(SECONDS)).exit_code, code, f"the exit code after SIG{name}")


@check(
    _AREA, "a signal to what has ended is told as not sent, and one of no known name is refused", "living", shared=True
)
async def _no_signal(bench: Bench) -> None:
    async with bench.machine() as box:
        process = await box.start(_HELLO)
        await process.wait(SECONDS)
        equal(await process.signal("TERM"), False, "whether it was sent")
        await refused(InvalidRequest, process.signal("TREM"))


async def _play_family(p: FakeProcess) -> None:
    await p.out("ready\n")
    await forever(p)


_FAMILY = guest("sleep 3604 & (trap '' TERM; echo ready; exec sleep 3607) & wait", _play_family)


@check(_AREA, "killing a process ends what it started, and nothing else", "living", shared=True)
async def _kill(bench: Bench) -> None:
    async with bench.machine() as box:
        family, other = await box.start(_FAMILY), await box.start(LASTING)
        await heard(family, "ready")
        result = await family.kill()
        equal((result.status, result.stdout), ("aborted", "ready\n"), "(status, stdout)")

        expect(other.running, f"the other one is {other!r}")

        async def alone() -> bool:
            return await commands(box) == ["sleep 3600"]

        await until(alone, f"what runs is {await commands(box)}, and should be the other process alone")


async def _play_saving(p: FakeProcess) -> int:
    over = anyio.Event()
    p.on_signal(15, over.set)
    await p.out("ready\n")
    await over.wait()
    p.write("saved", b"all\n")
    return 143


_SAVING = guest(
    "sh -c 'trap \"sleep 0.3; echo all > saved; exit\" TERM; echo ready; while :; do sleep 0.1; done' & wait",
    _play_saving,
)


@check(_AREA, "what a process started has the same time as it to end by itself", "living")
async def _grace(bench: Bench) -> None:
    async with bench.machine(grace=10) as box:
        process = await box.start(_SAVING)
        await heard(process, "ready")
        equal((await process.kill()).status, "aborted", "the status")
        equal(await box.files.read("saved"), b"all\n", "what it saved")
        equal(await box.processes(), (), "what runs")


@check(_AREA, "a process' timeout ends it alone, and its output is returned", "living", shared=True)
async def _timeout(bench: Bench) -> None:
    async with bench.machine() as box:
        late, other = await box.start(READY, timeout=3), await box.start(LASTING)
        result = await late.wait(SECONDS)
        equal((result.status, result.stdout), ("timeout", "ready\n"), "(status, stdout)")
        expect(other.running, f"the other one is {other!r}")


@check(_AREA, "a command in a living sandbox has the timeout that it was given", "living", shared=True)
async def _exec_timeout(bench: Bench) -> None:
    async with bench.machine() as box:
        equal((await box.exec(LASTING, timeout=1)).status, "timeout", "the status")
        printed(await done(box, _HELLO), "hello\n")


@check(_AREA, "waiting for a process ends with the time that one has, and the process goes on", "living", shared=True)
async def _wait(bench: Bench) -> None:
    async with bench.machine() as box:
        process = await box.start(LASTING)
        await refused(TimeoutError, process.wait(0.2))
        expect(process.running and process.result is None, f"it is {process!r}")


_PWD = guest("pwd", lambda p: p.out(f"{p.cwd}\n"))


@check(_AREA, "a process starts in /workspace, or in the folder that was named", "living", shared=True)
async def _cwd(bench: Bench) -> None:
    async with bench.machine() as box:
        await box.files.make_dir("app/src")
        for named, there in ((None, "/workspace"), ("app/src", "/workspace/app/src"), ("/tmp", "/tmp")):
            printed(await done(box, _PWD, cwd=named), f"{there}\n")


@check(_AREA, "a folder that is missing is refused as the place to start in, and is not made", "living", shared=True)
async def _no_cwd(bench: Bench) -> None:
    async with bench.machine() as box:
        await refused(InvalidRequest, box.start(_PWD, cwd="gone"))
        await refused(InvalidRequest, box.exec(("pwd",), workdir="/workspace/gone"))
        equal(await box.files.exists("gone"), False, "whether it was made")
        await box.files.write("file", "")
        await refused(InvalidRequest, box.start(_PWD, cwd="file"))
        printed(await done(box, _PWD), "/workspace\n")


_VARIABLES = guest('echo "$ONE $TWO"', lambda p: p.out(f"{p.env.get('ONE', '')} {p.env.get('TWO', '')}\n"))


@check(_AREA, "variables are those of the sandbox, and of the process before them", "living")
async def _env(bench: Bench) -> None:
    async with bench.machine(env={"ONE": "1", "TWO": "2"}) as box:
        printed(await done(box, _VARIABLES), "1 2\n")
        printed(await done(box, _VARIABLES, env={"TWO": "a b"}), "1 a b\n")
        printed(await done(box, _VARIABLES), "1 2\n")


_SUM = "echo $((20 + 1)) '*'"
guest(_SUM, says("21 *\n"))
_WORDS = guest(("echo", _SUM), says(f"{_SUM}\n"))


@check(_AREA, "a line goes through a shell, and a list of words does not", "living", shared=True)
async def _shell(bench: Bench) -> None:
    async with bench.machine() as box:
        printed(await done(box, _SUM), "21 *\n")
        printed(await (await box.start(_WORDS)).wait(SECONDS), f"{_SUM}\n")


@check(_AREA, "the list of processes has what runs, by the kernel's word, and nothing of ours", "living")
async def _listed(bench: Bench) -> None:
    async with bench.machine() as box:
        equal(await box.processes(), (), "what runs in a new sandbox")
        process = await box.start(LASTING)
        listed = await box.processes()
        equal([(one.pid, one.command) for one in listed], [(process.pid, "sleep 3600")], "what runs")
        expect(abs(listed[0].started - time.time()) < 3600, f"it started at {listed[0].started}")
        await process.kill()
        equal(await box.processes(), (), "what runs when it has ended")


@check(_AREA, "a process is found again by its id, with its labels, while it runs and afterwards", "living")
async def _found_again(bench: Bench) -> None:
    async with bench.machine() as box:
        process = await box.start(CAT, id="web", labels={"role": "server"})
        again = box.process("web")
        expect(again is process, f"process('web') is {again!r}")
        equal((again.labels, again.command), ({"role": "server"}, "cat"), "(labels, command)")
        await refused(InvalidRequest, box.start(CAT, id="web"))
        await process.kill()
        equal([(one.id, one.running) for one in box.started], [("web", False)], "what was started")
        _expect_unknown(box)


def _expect_unknown(box: object) -> None:
    try:
        found = box.process("other")  # type: ignore[attr-defined]
    except NotFound:
        return
    expect(False, f"process('other') is {found!r}")


_ORPHANS = python(
    "import os, time\n"
    "for number in range(150):\n"
    "    if os.fork() == 0:\n"
    "        os.fork()\n"
    "        os._exit(0)\n"
    "    os.wait()\n"
    "    if number % 10 == 0:\n"
    "        time.sleep(0.05)\n"
    "print('done')",
    says("done\n"),
)


@check(_AREA, "processes that ended without a parent are no zombies, and count against no limit", "living")
async def _orphans(bench: Bench) -> None:
    async with bench.machine(pids=64) as box:
        for _ in range(2):
            printed(await (await box.start(_ORPHANS)).wait(SECONDS), "done\n")

        async def nothing() -> bool:
            return await box.processes() == ()

        await until(nothing, "something still runs")


@check(_AREA, "many processes run at once, and each ends with its own result", "living", shared=True)
async def _many(bench: Bench) -> None:
    async with bench.machine() as box:
        results: dict[int, Result] = {}

        async def one(number: int) -> None:
            results[number] = await done(box, _EXIT, env={"CODE": str(number)})

        async with anyio.create_task_group() as tasks:
            for number in range(12):
                tasks.start_soon(one, number)
        equal({n: result.exit_code for n, result in results.items()}, {n: n for n in range(12)}, "exit codes")
