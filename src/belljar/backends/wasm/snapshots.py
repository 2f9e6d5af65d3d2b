"""Copies of a session on the wasm backend: taken from a box, and laid into one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio.to_thread

from belljar.backends.snapshot import Snapshot
from belljar.backends.wasm import store
from belljar.core import errors
from belljar.core.model import ours
from belljar.core.plan import Command, Plan
from belljar.core.values import MIB, format_size
from belljar.host import files

if TYPE_CHECKING:
    from belljar.backends.wasm.box import WasmBox

_COPY_SECONDS = 60.0
_PAGE_BYTES, _NUMBER_BYTES = 4096, 4
_PYTHON = ours(Command)(argv=("python3",))


async def take(box: WasmBox) -> Snapshot:
    """Copies the session of a box.

    The pages are ours to allocate: the memory of a copy must not count against the guest's limit.

    Raises:
        ExecutionFailed: the worker is gone, or some file cannot be copied.
    """
    async with box.one_at_a_time:
        measured = await box.worker.answer({"do": "measure"}, _COPY_SECONDS)
        count, size = int(measured["pages"]), int(measured["size"])
        if not 0 <= count * _PAGE_BYTES <= size <= box.plan.limits.memory + MIB:
            raise errors.ExecutionFailed("the wasm worker does not know its own memory")
        copy = Snapshot(store.binary(), size, count, files.unnamed())
        if count and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(copy.pages, 0, count * (_PAGE_BYTES + _NUMBER_BYTES))
        await box.worker.answer({"do": "copy_out"}, _COPY_SECONDS, [copy.pages])
        files.seal(copy.pages)  # branches map it
        copy.files, copy.folders = await anyio.to_thread.run_sync(box.folder.session_tree)
    return copy


async def take_after_imports(box: WasmBox, modules: Sequence[str]) -> Snapshot:
    """Copies a fresh interpreter after these imports, and nothing else: what a profile is made of."""
    request = box.request(_PYTHON, box.plan.limits)
    request |= {"do": "import", "modules": modules}
    answer = await box.worker.answer(request, _COPY_SECONDS)
    if answer.get("trap") or answer.get("exit_code"):
        raise errors.StartFailed(f"{', '.join(modules)} cannot be imported: {answer.get('trap') or 'it raised'}")
    return await take(box)


def check(plan: Plan, snapshot: Snapshot) -> None:
    """Raises if a box of this plan could not use the snapshot."""
    if snapshot.size > plan.limits.memory:
        raise errors.ExecutionFailed(
            f"the checkpoint needs {format_size(snapshot.size)} of memory, more than this session may have",
            fix=f'ask for memory="{format_size(snapshot.size)}" or more',
        )
    if snapshot.binary != store.binary():
        raise errors.InvalidRequest(
            f"this checkpoint was made by {snapshot.binary}, and here is {store.binary()}",
            fix="use it where it was made",
        )


async def restore(box: WasmBox, snapshot: Snapshot) -> None:
    """Makes a box what another was; its session then goes on from there.

    Raises:
        ExecutionFailed: the worker could not use the copy.
    """
    check(box.plan, snapshot)
    async with box.one_at_a_time:
        await box.revive_if_dead()
        await anyio.to_thread.run_sync(box.folder.replace, snapshot.files, snapshot.folders)
        if box.plan.workspace:
            box.folder.write_inputs(box.plan.files, _PYTHON)
        request = box.request(_PYTHON, box.plan.limits)
        request |= {"do": "copy_in", "size": snapshot.size, "pages": snapshot.count}
        with _only_read(snapshot.pages) as pages:
            answer = await box.worker.answer(request, _COPY_SECONDS, [pages])
    if refused := answer.get("refused"):
        raise errors.ExecutionFailed(f"the checkpoint cannot be used: {refused}", fix="make a new one")
    box.restored = True


@contextmanager
def _only_read(fd: int) -> Iterator[int]:
    """Opens the same file, not to be written: a branch must not change what others start from."""
    try:
        reading = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # not Linux
        reading = os.dup(fd)
    try:
        yield reading
    finally:
        os.close(reading)
