"""The files of one wasm box: a folder in its worker's private file system.

workspace/  tmp/        the guest's /workspace and /tmp
inputs/                 read-only files, where /workspace is a granted folder
stdin
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack

import anyio.to_thread

from belljar.backends import inputs
from belljar.backends.wasm.worker_process import WorkerProcess
from belljar.core import errors
from belljar.core.plan import INPUTS, Command, Plan
from belljar.core.result import Collected, Entry, File, FileTree
from belljar.core.values import WORKSPACE
from belljar.host import box_files, files

_PROJECT = "/mnt/project"  # where a guest finds a granted folder, beside /workspace
_OWN = ("workspace/", "tmp/")  # what belongs to a session


class BoxFolder:
    """The folder of one box; it is made when files are to outlive a run."""

    def __init__(self, worker: WorkerProcess, plan: Plan) -> None:
        self._worker = worker
        self._plan = plan
        self._fds = ExitStack()
        self._root = -1
        self._workspace = -1

    @property
    def made(self) -> bool:
        return self._root >= 0

    @property
    def inside(self) -> str:
        """Where the worker finds it."""
        return f"{self._worker.private}/{self._plan.id}"

    def make(self) -> None:
        """Makes and opens the folder. In this thread: a hand-over to another costs more than two mkdirs."""
        worker, name = self._worker, self._plan.id
        for folder in ("workspace", "tmp"):
            files.make_folder(worker.tmp, f"{name}/{folder}", owner=worker.uid)
        self._root = self._fds.enter_context(files.below(worker.tmp, name))
        if self._plan.workspace:
            files.make_folder(self._root, "inputs", owner=worker.uid)
            self._workspace = worker.granted
        else:
            self._workspace = self._fds.enter_context(files.below(self._root, "workspace"))

    def close(self) -> None:
        """Closes it; its files stay for as long as the worker lives or somebody has it open."""
        self._fds.close()

    async def remove(self) -> bool:
        """Removes a closed folder; False if something of it would not go, and the worker must."""
        if not self.made:  # the worker made it, if anybody, and removes it before it does anything else
            return True
        tmp, name = self._worker.tmp, self._plan.id
        files.discard(tmp, [f"{name}/workspace", f"{name}/tmp", name])
        if not files.missing(tmp, [name]):  # the guest left something: that may take longer
            return await anyio.to_thread.run_sync(lambda: files.erase(tmp, name, owner=self._worker.uid))
        return True

    def granted(self) -> Sequence[tuple[str, str, bool]]:
        """What the guest is given: (where it is, its name inside, may it write). The order is part of a checkpoint."""
        root, workspace = self.inside, self._plan.workspace
        if not workspace:
            return [(f"{root}/workspace", WORKSPACE, True), (f"{root}/tmp", "/tmp", True)]
        project = self._worker.project
        return [
            (project, WORKSPACE, workspace.write), (f"{root}/tmp", "/tmp", True), (f"{root}/inputs", INPUTS, False),
            (project, _PROJECT, workspace.write),
        ]  # fmt: skip

    # --- what the user puts and gets ---

    async def put(self, given: Iterable[File]) -> None:
        """Writes files into the guest's /workspace, as the guest would."""
        given = tuple(given)
        inputs.check_writable(self._plan, given)
        await anyio.to_thread.run_sync(lambda: box_files.put(self._workspace, given, owner=self._worker.uid))

    def reading(self, path: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Opens a file of /workspace as the guest would."""
        own = inputs.reading(self._plan, path)
        return own or box_files.reading(self._workspace, path, owner=self._worker.uid)

    async def get(self, patterns: Sequence[str]) -> Collected:
        """Reads the files of /workspace that match."""
        return await anyio.to_thread.run_sync(
            lambda: files.collect(self._workspace, tuple(patterns), owner=self._worker.uid)
        )

    async def figures(self, limit: int) -> Collected:
        """Reads the pictures that the last program left in /tmp."""
        with files.below(self._root, "tmp") as tmp:
            return await anyio.to_thread.run_sync(lambda: box_files.figures(tmp, limit, owner=self._worker.uid))

    async def list(self) -> tuple[Entry, ...]:
        found = await anyio.to_thread.run_sync(lambda: files.entries(self._workspace, owner=self._worker.uid))
        return inputs.listed(self._plan, found)

    # --- the inputs of a run ---

    def input(self, name: str) -> str:
        """Returns where a read-only file lies."""
        return f"{'inputs' if self._plan.workspace else 'workspace'}/{name}"

    def write_inputs(self, given: Mapping[str, bytes], command: Command) -> Sequence[str]:
        """Writes read-only files, stdin and the working folder; returns what was not there before."""
        owner = self._worker.uid
        names = [self.input(name) for name in given]
        made = files.missing(self._root, names)
        files.clear(self._root, names)
        tree = [File(path=self.input(name), content=data, read_only=True) for name, data in given.items()]
        try:
            if command.stdin:
                tree.append(File(path="stdin", content=command.stdin))
            files.write(self._root, tree, owner=owner)
        except OSError as error:
            raise errors.ExecutionFailed(f"the input could not be written: {error.strerror}") from None
        if command.cwd.startswith(f"{WORKSPACE}/"):
            files.make_folder(self._root, command.cwd.lstrip("/"), owner=owner)
        return made

    def discard(self, names: Sequence[str]) -> None:
        files.discard(self._root, names)

    # --- all of it, for another box ---

    def tree(self, *, whole: bool = False) -> tuple[FileTree, tuple[str, ...]]:
        """Reads all files, and the folders, empty ones too. Links stay behind; with `whole`, nothing else does."""
        folders = tuple(entry.path for entry in files.entries(self._root, most=files.MANY) if entry.kind == "folder")
        found = files.collect(self._root, ["**"], most=files.MANY, limit=2 * self._plan.limits.disk)
        lost = [left for left in found.left_out if ": link, " not in left]
        if whole and lost:
            raise errors.ExecutionFailed(
                f"the session's files cannot all be copied: {lost[0]}", fix="remove it, or give it a plainer name"
            )
        return found.files, folders

    def session_tree(self) -> tuple[FileTree, tuple[str, ...]]:
        """Reads what belongs to a session: not what was granted."""
        tree, folders = self.tree(whole=True)
        own_files = tuple(file for file in tree if file.path.startswith(_OWN))
        return own_files, tuple(folder for folder in folders if f"{folder}/".startswith(_OWN))

    def lay(self, tree: Sequence[File], folders: Sequence[str]) -> None:
        """Writes what `tree` read."""
        for folder in folders:
            files.make_folder(self._root, folder, owner=self._worker.uid)
        files.write(self._root, tree, owner=self._worker.uid)

    def replace(self, tree: Sequence[File], folders: Sequence[str]) -> None:
        """Makes these the session's only files."""
        for folder in ("workspace", "tmp"):
            with files.below(self._root, folder) as inside:
                for name in os.listdir(inside):
                    files.discard(inside, [name])
                    files.erase(inside, name, owner=self._worker.uid)
        self.lay(tree, folders)
