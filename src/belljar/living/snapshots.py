"""Snapshots of living sandboxes, and forks: their files at one moment, kept or laid into another sandbox at once.

Processes are not copied. A granted folder is not, either: it stays the host's.
"""

from __future__ import annotations

import errno
import os
import posixpath
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.from_thread
import anyio.to_thread
from pydantic import ValidationError

from belljar.core import errors
from belljar.core.box_snapshot import BoxSnapshot
from belljar.core.options import check_seconds
from belljar.core.values import WORKSPACE, format_size
from belljar.host import archives, portal
from belljar.host.archives import Member
from belljar.host.box_members import FoundMember
from belljar.host.box_tree import HostTree
from belljar.host.snapshot_store import SnapshotStore

if TYPE_CHECKING:
    from belljar.backends.base import Living
    from belljar.engine.engine import Engine
    from belljar.engine.lease import Lease
    from belljar.living.machine import Beginning, LivingMachine
    from belljar.living.part import AsyncLivingPart, PartT

T = TypeVar("T")
_MOST_SECONDS = 900.0  # that reading or laying all files of a sandbox may take
_PIECE_BYTES = 1 << 20
_END = bytes(1024)  # of an archive


def store_of(engine: Engine) -> SnapshotStore:
    """Returns where an engine's snapshots are kept: below the data folder, as they outlive everything else."""
    settings = engine.settings
    return SnapshotStore(Path(settings.data_dir or settings.state_dir, "snapshots"), settings.living)


async def find(engine: Engine, id: str, *, owner: str | None = None) -> BoxSnapshot:
    """Returns a snapshot by its id.

    Args:
        engine: whose settings say where snapshots are.
        id: its name.
        owner: whose it must be; None: anybody's.

    Raises:
        NotFound: there is none.
    """
    return await _with_store(lambda: store_of(engine).find(id, owner))


async def listed(
    engine: Engine, labels: Mapping[str, str] | None = None, owner: str | None = None
) -> tuple[BoxSnapshot, ...]:  # fmt: skip
    """Lists snapshots, the newest first; with labels: those that have all of them."""
    wanted = (labels or {}).items()
    found = await _with_store(store_of(engine).all)
    return tuple(one for one in found if wanted <= one.labels.items() and owner in (None, one.owner))


async def removed(engine: Engine, id: str, owner: str | None = None) -> None:
    """Removes a snapshot; sandboxes that began with it keep their files.

    Raises:
        NotFound: there is none.
    """
    await _with_store(lambda: store_of(engine).remove(id, owner))


# --- taken ---


async def taken(machine: LivingMachine, labels: Mapping[str, str] | None, owner: str) -> BoxSnapshot:
    """Keeps the files of a sandbox."""
    with _judged("snapshot: the sandbox gave a bad archive"):
        snapshot = await _taken(machine, labels, owner)
    await machine.tell("snapshot", snapshot=snapshot.id)
    return snapshot


async def _taken(machine: LivingMachine, labels: Mapping[str, str] | None, owner: str) -> BoxSnapshot:
    box, lease = _readable(machine)
    left_out: list[str] = []
    async with _bounded("snapshot"), _in_threads(store_of(lease.engine).taking()) as taking:
        if isinstance(box.tree, HostTree):
            with box.tree.found(box.own_folders, []) as found:  # first while it runs on, so that it stops for less long
                await _with_store(lambda: taking.prepare(_stoppable(found)))
        async with machine.quiet() as quiet:
            about = _described(machine, labels, owner, quiet)
            if isinstance(box.tree, HostTree):
                with box.tree.found(box.own_folders, left_out) as found:
                    await _with_store(lambda: taking.read(_stoppable(found)))
            else:
                async with box.tree.packing(box.own_folders) as pieces:
                    await _with_store(lambda: taking.unpack(archives.members(_pulled(pieces))))
        return await _with_store(lambda: taking.finish(about, left_out))


def _described(
    machine: LivingMachine, labels: Mapping[str, str] | None, owner: str, quiet: bool
) -> BoxSnapshot:  # fmt: skip
    lease, warnings = machine.lease, []
    if lease.plan.workspace:
        warnings.append(f"{WORKSPACE} is a folder of the host that was granted: what is in it was not kept")
    if not quiet:
        warnings.append("the sandbox ran on while its files were read: they may be of different moments")
    try:
        return BoxSnapshot(
            id=f"snap-{os.urandom(8).hex()}", created=round(time.time(), 3), labels=labels or {},
            folders=machine.resting_box.own_folders, home=lease.plan.home, box=lease.box.id,
            backend=lease.capabilities.backend, quiet=quiet, warnings=tuple(warnings), owner=owner,
        )  # fmt: skip
    except ValidationError as error:
        raise errors.from_validation(error, "snapshot", BoxSnapshot) from None


# --- laid ---


async def beginning_with(engine: Engine, id: str) -> Beginning:
    """Returns what lays the files of a snapshot into a new sandbox.

    Raises:
        NotFound: there is none of this id.
    """
    await find(engine, id)
    store = store_of(engine)

    async def begin(machine: LivingMachine) -> None:
        with ExitStack() as stack, _judged(f"the snapshot {id} cannot be read"), _laying(machine):
            snapshot, below = await _with_store(lambda: stack.enter_context(store.opened(id)))
            async with _bounded("snapshot"):
                places = _places(snapshot, machine)
                machine.left_out += snapshot.left_out
                machine.left_out += [f"{one}: no such folder here" for one in snapshot.folders if one not in places]
                for folder, place in places.items():
                    await _lay(machine, below(folder), folder, place)

    return begin


async def _lay(machine: LivingMachine, entries: Iterator[FoundMember], folder: str, place: str) -> None:
    """Lays what lies in a folder into a place of a new sandbox."""
    tree = machine.resting_box.tree
    if isinstance(tree, HostTree):
        await tree.lay(entries if folder == place else _moved(entries, folder.strip("/"), place.strip("/")))
    else:
        await tree.unpack(place, portal.in_threads(_joined(_archive(entries, folder.strip("/")))))


async def forked(
    machine: LivingMachine, other: PartT, labels: Mapping[str, str] | None, expires: float | None
) -> PartT:  # fmt: skip
    """Opens another sandbox with the files of this one."""
    prepare_fork(machine, other, labels, expires)
    await other
    await tell_fork(machine, other)
    return other


def prepare_fork(
    machine: LivingMachine, other: PartT, labels: Mapping[str, str] | None, expires: float | None
) -> None:  # fmt: skip
    """Has another sandbox, which is not open yet, begin with the files of this one when it is opened."""
    if expires is not None:
        check_seconds(expires=expires)
    _readable(machine)
    changes = {"labels": labels, "expires": expires, "snapshot": ""}
    asked = machine.asked.model_copy(update={name: value for name, value in changes.items() if value is not None})
    other._begin_as(asked, beginning_like(machine))


async def tell_fork(machine: LivingMachine, other: AsyncLivingPart) -> None:
    """Records that another sandbox has begun with the files of this one."""
    await machine.tell("forked", fork=other._alive().lease.box.id)


def beginning_like(origin: LivingMachine) -> Beginning:
    """Returns what lays the files of an open sandbox into a new one."""

    async def begin(machine: LivingMachine) -> None:
        box, _ = _readable(origin)
        tree, left_out = machine.resting_box.tree, machine.left_out
        with _judged("fork: the sandbox gave a bad archive"), _laying(machine):
            async with _bounded("fork"), origin.quiet():
                if isinstance(tree, HostTree) and isinstance(box.tree, HostTree):
                    with box.tree.found(box.own_folders, left_out) as found:
                        await tree.lay(found)
                    return
                for folder in box.own_folders:
                    async with box.tree.packing([folder]) as pieces:
                        renamed = _relative(archives.members(_pulled(pieces)), folder.strip("/"))
                        await tree.unpack(folder, portal.in_threads(_joined(renamed)))

    return begin


def _places(snapshot: BoxSnapshot, machine: LivingMachine) -> dict[str, str]:
    """Where each folder of a snapshot goes: its home becomes the new one's."""
    own = machine.resting_box.own_folders
    found = {folder: machine.lease.plan.home if folder == snapshot.home else folder for folder in snapshot.folders}
    if WORKSPACE in found.values() and machine.lease.plan.workspace:
        raise errors.InvalidRequest(
            f"snapshot: it has files of {WORKSPACE}, where a folder of the host is granted",
            fix="leave out workspace, or take another snapshot",
        )
    return {folder: place for folder, place in found.items() if any(f"{place}/".startswith(f"{one}/") for one in own)}


def _moved(entries: Iterator[FoundMember], folder: str, place: str) -> Iterator[FoundMember]:
    """The same entries in another folder."""
    for one in entries:
        name, target = (part.replace(folder, place, 1) for part in (one.member.name, one.member.target))
        twin = one.member.kind == "twin"
        yield one._replace(member=one.member._replace(name=name, target=target if twin else one.member.target))


def _archive(entries: Iterator[FoundMember], folder: str) -> Iterator[bytes]:
    """Gives entries as an archive, with names from a folder on."""
    return _relative(((one.member, one.checked()) for one in entries), folder)


def _relative(entries: Iterator[tuple[Member, Iterator[bytes]]], folder: str) -> Iterator[bytes]:
    """Gives entries as an archive, with names from a folder on; to be read in a thread."""
    for member, content in entries:
        if not f"{member.name}/".startswith(f"{folder}/"):
            raise ValueError(f"{member.name[:80]!r} lies elsewhere")
        size = member.size if member.kind == "file" else 0
        target = posixpath.relpath(member.target, folder) if member.kind == "twin" else member.target
        yield member._replace(name=posixpath.relpath(member.name, folder), target=target, size=size).header()
        yield from content
        yield archives.padding(size)
    yield _END


def _joined(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The same in larger pieces: each is a way between threads."""
    held = bytearray()
    for piece in pieces:
        held += piece
        if len(held) >= _PIECE_BYTES:
            yield bytes(held)
            held.clear()
    yield bytes(held)


# --- between the event loop and threads ---


def _pulled(pieces: AsyncIterator[bytes]) -> Iterator[bytes]:
    async def following() -> bytes:
        return await anext(pieces, b"")

    while piece := anyio.from_thread.run(following):
        yield piece


def _stoppable(found: Iterator[FoundMember]) -> Iterator[FoundMember]:
    for one in found:
        anyio.from_thread.check_cancelled()
        yield one


@asynccontextmanager
async def _in_threads(context: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enters and leaves in a thread what may wait for other processes."""
    given = await _with_store(context.__enter__)
    try:
        yield given
    except BaseException as error:
        leaving = partial(context.__exit__, type(error), error, error.__traceback__)
        with anyio.CancelScope(shield=True):
            await _with_store(leaving)
        raise
    with anyio.CancelScope(shield=True):
        await _with_store(lambda: context.__exit__(None, None, None))


async def _with_store(work: Callable[[], T]) -> T:
    """Does what reads or writes the store, in a thread."""
    try:
        return await anyio.to_thread.run_sync(work)
    except OSError as error:
        raise errors.NotAvailable(
            f"the folder for snapshots cannot be used: {error.strerror or error}",
            fix="make room, or set BELLJAR_DATA_DIR to another folder",
        ) from None


# --- what may go wrong ---


def _readable(machine: LivingMachine) -> tuple[Living, Lease]:
    """The box, if its files can be read now."""
    machine.require("snapshot", "cannot keep the files of a sandbox")
    box = machine.resting_box if isinstance(machine.resting_box.tree, HostTree) else machine.box
    return box, machine.lease


@asynccontextmanager
async def _bounded(what: str) -> AsyncIterator[None]:
    with anyio.move_on_after(_MOST_SECONDS) as scope:
        yield
    if scope.cancelled_caught:
        raise errors.BackendTimeout(f"{what}: the files could not be copied within {_MOST_SECONDS:g} seconds")


@contextmanager
def _judged(what: str) -> Iterator[None]:
    """Says of what is damaged or hostile that it is."""
    try:
        yield
    except errors.BelljarError:
        raise
    except ValueError as error:
        raise errors.ExecutionFailed(f"{what}: {error}") from None


@contextmanager
def _laying(machine: LivingMachine) -> Iterator[None]:
    """Says what it means for a new sandbox that its files could not be written."""
    try:
        yield
    except OSError as error:
        raise _no_room(error, machine) from None


def _no_room(error: OSError, machine: LivingMachine) -> errors.BelljarError:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return errors.StartFailed(f"the files could not be laid into the new sandbox: {error}")
    limits, on_disk = machine.lease.plan.limits, getattr(machine.resting_box, "on_disk", False)
    most = format_size(limits.disk if on_disk else limits.kept_bytes)
    return errors.InvalidRequest(
        f"disk: the new sandbox has room for {most}, and the files take more", fix="open it with more disk and memory"
    )
