"""The files of a living sandbox, kept and copied; never its processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from belljar.backends.fake import FakeProcess
from belljar.core.box_snapshot import BoxSnapshot
from belljar.core.errors import NotFound
from belljar.sandbox import AsyncSandbox, alist_snapshots, aremove_snapshot
from belljar.testing.conformance.bench import Bench, check, equal, expect, guest, printed, refused, succeeded
from belljar.testing.conformance.living.guests import LASTING
from belljar.testing.conformance.living.waiting import done, until

_AREA = "snapshots"
_NEEDS = ("living", "snapshot")


def _play_laying(p: FakeProcess) -> None:
    for name in ("/workspace/src/run", f"{p.env['HOME']}/notes", "/var/tmp/cache"):
        p.write(name, b"as it was\n")
    p.chmod("/workspace/src/run", 0o750)
    p.link("way", "src/run")


_LAYING = guest(
    'mkdir -p src; for f in src/run "$HOME/notes" /var/tmp/cache; do echo as it was > "$f"; done; '
    "chmod 750 src/run; ln -s src/run way",
    _play_laying,
)
_SHOWING = guest('cat src/run "$HOME/notes" /var/tmp/cache', lambda p: p.out("as it was\n" * 3))


@asynccontextmanager
async def _kept(bench: Bench, box: AsyncSandbox) -> AsyncIterator[BoxSnapshot]:
    """A snapshot that is removed in the end."""
    snapshot = await box.snapshot(labels={"check": "conformance"})
    try:
        yield snapshot
    finally:
        with suppress(NotFound):
            await aremove_snapshot(snapshot.id, engine=bench.engine)


@check(_AREA, "a sandbox begins with the files of a snapshot, as they were, and with no process", *_NEEDS)
async def _begins(bench: Bench) -> None:
    async with bench.machine() as box:
        succeeded(await done(box, _LAYING))
        await box.start(LASTING)
        async with _kept(bench, box) as snapshot:
            await box.files.write("src/run", "changed afterwards")
            async with bench.machine(snapshot=snapshot) as again:
                printed(await done(again, _SHOWING), "as it was\n" * 3)
                equal((await again.files.stat("src/run")).mode, 0o750, "permissions")
                equal((await again.files.stat("way")).target, "src/run", "where the link leads")
                equal(await again.processes(), (), "what runs")
                await again.files.write("src/run", "changed in the copy")
            async with bench.machine(snapshot=snapshot.id) as third:
                printed(await done(third, _SHOWING), "as it was\n" * 3)


@check(_AREA, "a snapshot is listed with its labels until it is removed, and cannot be opened then", *_NEEDS)
async def _removed(bench: Bench) -> None:
    async def found() -> list[str]:
        listed = await alist_snapshots({"check": "conformance"}, engine=bench.engine)
        return [one.id for one in listed if one.id == snapshot.id]

    async def opened() -> None:
        async with bench.machine(snapshot=snapshot.id):
            pass

    async with bench.machine() as box:
        await box.files.write("file", "x")
        async with _kept(bench, box) as snapshot:
            equal(await found(), [snapshot.id], "the list")
        equal(await found(), [], "the list afterwards")
        await refused(NotFound, opened())


@check(_AREA, "a fork has the files of that moment, and neither sees what the other does", *_NEEDS)
async def _forked(bench: Bench) -> None:
    async with bench.machine(labels={"task": "42"}) as box:
        succeeded(await done(box, _LAYING))
        await box.start(LASTING)
        async with await box.fork() as branch:
            printed(await done(branch, _SHOWING), "as it was\n" * 3)
            equal((await branch.processes(), dict(branch.labels)), ((), {"task": "42"}), "(what runs, labels)")
            await branch.files.write("src/run", "of the branch")
            await box.files.write("~/notes", "of the original")
            equal(await branch.files.read("~/notes"), b"as it was\n", "a file of the branch")
            equal(await box.files.read("src/run"), b"as it was\n", "a file of the original")
        equal([one.command for one in await box.processes()], ["sleep 3600"], "what runs in the original")


@check("life", "a sandbox that nobody uses ends when its idle time is over", "living")
async def _idle(bench: Bench) -> None:
    async with bench.machine(idle=0.5) as box:

        async def ended() -> bool:
            return bool(box.ended)

        await until(ended, "it has not ended")
        expect(box.ended != "it was closed", f"it ended because {box.ended!r}")
