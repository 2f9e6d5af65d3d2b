"""One sandbox of the backend `apple`: a virtual machine of its own, its commands and its files.

The machine is one `container run` that we hold by its stdin: when that is closed, by us or because we died, the
machine's first program ends, and with it the machine. Commands are `container exec`, as a uid that nothing else has.
"""

from __future__ import annotations

import random
import re
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from typing import NamedTuple

import anyio
import anyio.to_thread

from belljar.backends import inputs
from belljar.backends.apple import arguments, output
from belljar.backends.apple.arguments import AppleMachine, GuestLaunch
from belljar.backends.apple.cli import Cli, CliCall, Said
from belljar.backends.apple.run import AppleJob, AppleRun, MachineFigures, figures
from belljar.backends.base import Emit, ImageUsed
from belljar.backends.containers import archive as docker_files
from belljar.backends.containers import file_stream
from belljar.backends.containers.inside import as_os_error
from belljar.backends.containers.spec import KEEPER
from belljar.backends.granted import GrantedCopy
from belljar.backends.guest_text import shell_script
from belljar.backends.pipe_interpreter import PipeInterpreter
from belljar.control.control import Control
from belljar.core import errors
from belljar.core.plan import Command, Plan
from belljar.core.result import Collected, Entry, File, Result
from belljar.core.values import WORKSPACE
from belljar.host import files, process
from belljar.host.guest_uid import GuestUid
from belljar.host.tree_copy import CopiedTree, TreeNode

_BOOT_SECONDS = 120.0
_STOP_SECONDS = 10.0
_INSIDE_SECONDS = 30.0


class AppleHost(NamedTuple):
    """What a box needs of the backend that opened it."""

    cli: Cli
    owner: str
    uids: range
    own_kernel: bool
    sure: bool  # were "no new privileges" promised?
    filter: str
    image_for: Callable[[Plan], str]
    gid: int | None = None  # of all guests; None: each one's own


class AppleBox:
    """One virtual machine, its commands and its files."""

    def __init__(self, host: AppleHost, plan: Plan, image: str) -> None:
        self.id: str = plan.id
        self.plan = plan
        self.machine: AppleMachine = AppleMachine(plan.id, image, plan.limits, host.owner, plan.workspace)
        self._host = host
        self._cli = host.cli
        self._uid = GuestUid.of(random.choice(host.uids), host.gid)
        self._one_at_a_time = anyio.Lock()
        self._seen = MachineFigures()
        self._granted = self._copy_of_grant()
        self._used = False
        self._gone = ""

    # --- the machine ---

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Boots the machine, puts a granted folder in place, and ends the machine at the end."""
        with ExitStack() as fds:
            call = self._cli.start(arguments.run(self.machine), fds, stdin=True)
            try:
                await self._boot(call)
                if spare := arguments.ballast(self.plan.limits):
                    said = await self._inside(shell_script("apple/fill"), arguments.BALLAST, str(spare), uid=0)
                    _fit(said, "the ballast")
                if self._granted:
                    await self._granted.copy_in()
                yield
                if self._granted:
                    await self._granted.close()
            finally:
                with anyio.CancelScope(shield=True):
                    await self._close(call)

    async def _boot(self, call: CliCall) -> None:
        """It runs when its first program has said back what we told it."""
        word = f"ready {secrets.token_hex(8)}\n".encode()
        await call.feed(word)
        said = b""
        try:
            with anyio.fail_after(_BOOT_SECONDS):
                while word not in said and (data := await process.read_some(call.stdout)):
                    said = (said + data)[-4096:]
                if word not in said:
                    raise output.failure(await _last_words(call.stderr), "the sandbox could not be started")
        except TimeoutError:
            raise errors.BackendTimeout(f"the virtual machine was not up within {_BOOT_SECONDS:g} s") from None

    async def _close(self, call: CliCall) -> None:
        """Its stdin first, which is quick and clean; then by force; and it is looked whether it is gone."""
        call.end_input()
        with anyio.move_on_after(_STOP_SECONDS):
            await call.child.wait()
        if not call.child.ended():
            await self.destroy()
        await call.end()
        if not self._gone:
            self._gone = "it was closed"

    async def destroy(self) -> None:
        """Ends the machine by force. What is left then, a later Belljar finds by its label."""
        self._gone = self._gone or "its virtual machine was ended"
        with suppress(errors.BelljarError):
            await self._cli.call(["delete", "--force", self.id], deadline=_INSIDE_SECONDS)

    async def sweep(self) -> MachineFigures:
        """Ends all that the guest's uid runs, and reads what was counted so far."""
        said = await self._inside(shell_script("apple/sweep"), uid=self._uid)
        if not said.text.endswith("end:\n"):
            raise errors.ExecutionFailed(f"its virtual machine does not answer: {said.words[-200:].strip()}")
        self._seen = figures(said.text, own_kernel=self._host.own_kernel)
        return self._seen

    async def _inside(
        self, script: str, *words: str, uid: int, data: bytes | None = None, limit: int = 1 << 20
    ) -> Said:
        if self._gone:
            raise errors.ExecutionFailed(f"this sandbox is no more: {self._gone}", fix="open a new one")
        asked = arguments.inside(self.id, uid, script, *words, stdin=data is not None)
        return await self._cli.call(asked, data=data, limit=limit, deadline=_INSIDE_SECONDS)

    # --- running ---

    def interpreter(self, env: Mapping[str, str], lifetime: float, language: str = "python") -> PipeInterpreter:
        return PipeInterpreter(self, self.plan, env, lifetime, language)

    async def image(self, language: str | None, kind: str | None) -> ImageUsed:
        """Returns the machine's image: all its commands run in that one, or not at all."""
        return ImageUsed(self.machine.image)

    async def run(self, command: Command, emit: Emit, control: Control) -> Result:
        """Runs a command to its end; another waits for it."""
        async with self._one_at_a_time:
            return await self._run(command, emit, control)

    async def _run(self, command: Command, emit: Emit, control: Control) -> Result:
        wanted = self._host.image_for(self.plan.model_copy(update={"language": command.language or self.plan.language}))
        if wanted != self._host.image_for(self.plan):
            raise errors.NotAvailable(
                f"this sandbox has the image {self.machine.image}, and {command.language} runs in {wanted}",
                fix=f'open one of its own, or one with image="{wanted}"',
            )
        await self._deliver(command)
        limits = command.limits or self.plan.limits
        fed = bool(command.stdin) or control.feed is not None

        def words(mark: str) -> Sequence[str]:
            watch = GuestLaunch(mark, self._host.sure, self._host.filter)
            return arguments.guest(
                self.id, self._uid, watch, limits.pids, argv=command.argv, env=command.env, cwd=command.cwd, stdin=fed
            )

        job = AppleJob(self.id, words, command.stdin, limits, self._seen, self.sweep, self.destroy)
        result = await AppleRun(self._cli, job, emit, control).go()
        if self._used:  # the peak is the machine's, and an earlier command may have reached it
            result = result.model_copy(update={"memory_used_mb": None})
        self._used = True
        return await self._granted.finish(result) if self._granted else result

    async def _deliver(self, command: Command) -> None:
        """The read-only files, put in by the keeper, whom the guest cannot undo."""
        given = {**self.plan.files, **command.files}
        if self._used and not self.plan.workspace:
            await self._inside(shell_script("apple/clear"), WORKSPACE, *given, uid=self._uid)
        if not given and not self._used:
            return
        tree = [File(path=name, content=content) for name, content in given.items()]
        data = docker_files.archive(tree, sticky=True)
        _fit(await self._inside(docker_files.DELIVER, self.plan.inputs, uid=KEEPER, data=data), "the files")

    # --- files ---

    async def put(self, files_in: Sequence[File]) -> None:
        """Writes files into /workspace, as the guest's own."""
        inputs.check_writable(self.plan, files_in)
        names, data = [file.path for file in files_in], docker_files.archive(files_in)
        said = await self._inside(docker_files.REPLACE, WORKSPACE, *names, uid=self._uid, data=data)
        if said.code and (error := as_os_error(said.code, said.words.strip(), names[0])):
            raise error
        _fit(said, "the file")
        if self._granted:
            self._granted.note_change()

    def reading(self, path: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Opens a file of /workspace as the guest would."""
        return inputs.reading(self.plan, path) or self._reading(path)

    @asynccontextmanager
    async def _reading(self, path: str) -> AsyncIterator[AsyncIterator[bytes]]:
        with ExitStack() as fds:
            call = self._cli.start(arguments.inside(self.id, self._uid, docker_files.READ, WORKSPACE, path), fds)
            try:
                yield await file_stream.opened(lambda: process.read_some(call.stdout), path)
            finally:
                await call.end()

    async def get(self, patterns: Sequence[str]) -> Collected:
        """Reads the regular files of /workspace that match."""
        chosen, left_out = docker_files.wanted(await self._listed(), patterns)
        taken = await anyio.to_thread.run_sync(docker_files.unpacked, await self._fetched(chosen), chosen)
        return Collected(taken.files, (*left_out, *taken.left_out))

    async def list(self) -> tuple[Entry, ...]:
        """Lists what is in /workspace."""
        return inputs.listed(self.plan, docker_files.entries(await self._listed()))

    async def _listed(self, most: int = files.MAX_ENTRIES) -> bytes:
        words = (docker_files.LIST, WORKSPACE, str(2 * most))
        said = await self._inside(*words, uid=self._uid, limit=docker_files.LIST_LIMIT)
        if said.code:
            raise errors.ExecutionFailed(f"the files could not be listed: {said.words[-200:].strip()}")
        return said.stdout

    async def _fetched(self, chosen: Sequence[docker_files.Found]) -> bytes:
        if not chosen:
            return b""
        names = "".join(f"./{item.path}\n" for item in chosen).encode()
        room = docker_files.room(chosen)
        return (await self._inside(docker_files.FETCH, WORKSPACE, uid=self._uid, data=names, limit=room)).stdout

    def _copy_of_grant(self) -> GrantedCopy | None:
        """A granted folder is copied: what Apple's shared folders do with owners and links, we could not see."""
        if self.plan.workspace is None:
            return None
        limit, uid = arguments.disk(self.plan.limits), self._uid if self.plan.workspace.write else 0

        async def put(tree: Sequence[TreeNode]) -> None:
            data = docker_files.pack(tree)
            _fit(await self._inside(docker_files.LAY, WORKSPACE, uid=uid, data=data), "the granted folder")

        async def get() -> CopiedTree:
            chosen, known = docker_files.whole(await self._listed(files.MANY), limit)
            return await anyio.to_thread.run_sync(
                docker_files.unpacked_tree, await self._fetched(chosen), chosen, known
            )

        return GrantedCopy(self.plan.workspace, limit, put=put, get=get)


def _fit(said: Said, what: str) -> None:
    if said.code == 0:
        return
    full = re.search(r"no space left", said.words, re.IGNORECASE)
    why = "No space left on device" if full else said.words[-200:].strip()
    raise errors.ExecutionFailed(f"{what} could not be written: {why}", fix="raise `disk` and `memory`" if full else "")


async def _last_words(fd: int) -> str:
    said = b""
    with anyio.move_on_after(_STOP_SECONDS):
        while data := await process.read_some(fd):
            said = (said + data)[-4096:]
    return said.decode("utf-8", "replace")
