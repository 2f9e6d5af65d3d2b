"""One sandbox of a container engine: its files, what it was granted, and a container for each command.

A run that leaves nothing is one container. A box whose files will be asked for also has a holder: a container that
does nothing, and keeps the folders in memory that the commands' containers share. Processes cannot outlive their
command, because its container does not.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import anyio.to_thread

from belljar.backends import inputs
from belljar.backends.base import Emit, ImageUsed
from belljar.backends.containers import archive as docker_files
from belljar.backends.containers import inside, spec, typescript
from belljar.backends.containers.cleanup import Cleanup, Leftovers
from belljar.backends.containers.egress_relay import EgressRelay
from belljar.backends.containers.images_for import ImagesFor
from belljar.backends.containers.pool import Pool
from belljar.backends.containers.run import ContainerJob, DockerRun
from belljar.backends.containers.standby import Standby
from belljar.backends.granted import GrantedCopy
from belljar.backends.pipe_interpreter import PipeInterpreter
from belljar.control.control import Control
from belljar.core import errors
from belljar.core.plan import INPUTS, Command, Plan
from belljar.core.request import Egress, Limits
from belljar.core.result import Collected, Entry, File, Result, Status, Usage
from belljar.core.values import MIB, WORKSPACE, format_size
from belljar.host import files
from belljar.host.cgroups import RESERVE_BYTES
from belljar.host.docker_api import ProgramStreams, asking
from belljar.host.egress import guest as egress_guest
from belljar.host.egress.access import NetworkAccess, Outside
from belljar.host.egress.proxy import Proxy
from belljar.host.engine_address import Flavour
from belljar.host.loops import lone_errors
from belljar.host.tree_copy import CopiedTree, TreeNode

if TYPE_CHECKING:
    from aiodocker import Docker
    from aiodocker.containers import DockerContainer

_LEAST_KERNEL_BYTES = 64 * MIB  # that a command has in a full box, where a kernel in user space has to live in it, too
_WORDS_BYTES = 4096  # that a program inside may say of what the box holds


class ContainerHost(NamedTuple):
    """What a box needs of the backend that opened it."""

    client: Docker
    flavour: Flavour
    images: ImagesFor
    relay_image: str  # of egress relays; empty: the usual one
    runtime: str | None
    owner: str
    cleanup: Cleanup
    pool: Pool | None
    outside: Outside  # what the administrator says of the way to listed hosts
    state_dir: Path
    local: bool  # are the guest's processes on this machine?
    own_kernel: bool  # is the runtime one with a kernel of its own?
    small_buffers: bool
    copies: bool  # must granted folders be copied, because the guest could not use them where they are?
    options_for: Callable[[str | None], spec.Options]  # a language -> what the settings change of the walls
    direct: bool = False  # does an open network mean one of the engine's?


class _BoxFull(Exception):
    """The files of a box hold all of its memory."""


class DockerBox:
    """One sandbox of a container engine."""

    def __init__(self, host: ContainerHost, plan: Plan, uid: int) -> None:
        self.id: str = plan.id
        self.plan = plan
        self.uid = uid
        self.network: NetworkAccess = NetworkAccess(plan.egress, host.outside)
        self._host = host
        self._holder: DockerContainer | None = None
        self._volumes: dict[str, str] = {}
        self._granted = self._copy_of_grant()
        self._leftovers: list[str] = []
        self._kept: list[str] = []  # containers that are not removed
        self._one_at_a_time = anyio.Lock()
        self._current: DockerRun | None = None
        self._held = 0  # bytes in the shared folders before the last command began

    @property
    def proxied(self) -> bool:
        """Whether its commands get a way to the proxy."""
        return self.network.proxied and not (self.network.allowed.mode == "open" and self._host.direct)

    async def change_network(self, allowed: Egress) -> None:
        """Changes what its guests may reach, at once."""
        direct = self._host.direct and "open" in (allowed.mode, self.network.allowed.mode)
        if direct or (self._host.own_kernel and allowed.mode != "none"):
            raise errors.NotAvailable(
                f"network: that of this sandbox is {self._host.flavour.name}'s own, and cannot be changed now",
                fix="open another sandbox with what it is to reach",
            )
        if allowed.mode != "none" and not self.network.proxied and self._current:
            raise errors.NotAvailable(
                "network: what runs in this sandbox began without a way out", fix="open it with net=[...] of one host"
            )
        self.network.change(allowed)
        await self.open_network()

    async def open_network(self) -> None:
        """Each command has a way out of its own."""

    @property
    def copies(self) -> bool:
        """Whether a granted folder is copied in, and changes back."""
        return self._granted is not None

    def _copy_of_grant(self) -> GrantedCopy | None:
        if not self.plan.workspace or not self._host.copies:
            return None

        async def put(tree: Sequence[TreeNode]) -> None:
            if tree:
                await self._lay_grant(tree)

        async def get() -> CopiedTree:
            listing = await self._listing(files.MANY)
            chosen, known = docker_files.whole(listing, self.plan.limits.disk)
            said = await self._fetched(chosen)
            return await anyio.to_thread.run_sync(docker_files.unpacked_tree, said, chosen, known)

        return GrantedCopy(self.plan.workspace, self.plan.limits.disk, put=put, get=get)

    async def _lay_grant(self, tree: Sequence[TreeNode]) -> None:
        await self._inside(docker_files.LAY, docker_files.pack(tree), what="the granted folder")

    async def needs_holder(self) -> bool:
        """Whether only a shared folder can be written to: the image has a /workspace, which closes a fresh one."""
        if self.plan.workspace or self._host.flavour.owned_folders:
            return False
        images, client = self._host.images, self._host.client
        image = await images.ready(client, await self._image_for(self.plan.language, None))
        return await images.has_workspace(client, image)

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """Makes the shared folders, and the container that keeps them."""
        places = ["/tmp", *((INPUTS,) if self.plan.workspace else ())]
        places += [WORKSPACE] if self.copies or not self.plan.workspace else []
        self._volumes = {f"{self.id}-{place[1:]}": place for place in places}
        name = f"{self.id}-holder"
        images, client = self._host.images, self._host.client
        image = await images.ready(client, await self._image_for(None, None))
        try:
            async with AsyncExitStack() as stack:
                with anyio.CancelScope(shield=True):
                    await self._make_volumes()
                    async with asking("the sandbox's folders could not be made", errors.StartFailed):
                        declared = await images.volumes_of(client, image)
                        body = spec.container(self._holder_facts(image, declared))
                        holder = await client.containers.create(body, name=name)
                attached = holder.attach(stdin=True, stdout=True, stderr=True)
                await stack.enter_async_context(ProgramStreams.open(attached, "the holder's streams"))
                async with asking("the sandbox's folders could not be held", errors.StartFailed):
                    await holder.start()
                self._holder = holder
                if self._granted:
                    await self._granted.copy_in()
                    stack.push_async_callback(self._granted.close)
                yield
        finally:
            self._holder = None
            self._host.cleanup.remove_later(Leftovers([name], () if self._kept else list(self._volumes)))

    async def _make_volumes(self) -> None:
        for name in self._volumes:
            body = spec.volume(name, self.plan.limits, self._host.owner, self.id, kept=not self.plan.auto_remove)
            async with asking("the sandbox's folders could not be made", errors.StartFailed):
                await self._host.client.volumes.create(body)  # type: ignore[no-untyped-call]

    def _holder_facts(self, image: str, declared: tuple[str, ...]) -> spec.ContainerSpec:
        room = 3 * self.plan.limits.kept_bytes + 64 * MIB  # what is written through it counts as its own
        limits = self.plan.limits.model_copy(update={"memory": room, "pids": 64})
        return spec.ContainerSpec(
            self._host.flavour, image, ("/bin/sh", "-c", spec.HOLD), spec.KEEPER, limits,
            self._host.owner, self.id, runtime=self._host.runtime, volumes=self._volumes,
            workspace=None if self.copies else self.plan.workspace, own_kernel=self._host.own_kernel, declared=declared,
        )  # fmt: skip

    async def _image_for(self, language: str | None, kind: str | None) -> str:
        host = self._host
        return self.plan.image or await host.images.choose(host.client, language, kind or self.plan.type)

    async def image(self, language: str | None, kind: str | None) -> ImageUsed:
        """Returns the image for commands of a language and a type of work."""
        name, images, client = await self._image_for(language, kind), self._host.images, self._host.client
        return ImageUsed(name, await images.id_of(client, await images.ready(client, name)))

    # --- files ---

    async def put(self, files_in: Sequence[File]) -> None:
        """Writes files into /workspace, as the guest's own."""
        inputs.check_writable(self.plan, files_in)
        names = [file.path for file in files_in]
        try:
            await self._inside(docker_files.REPLACE, docker_files.archive(files_in), names, what="the file")
        except inside.FailedInside as failure:
            raise inside.as_os_error(failure.code, failure.words, names[0]) or failure from None
        if self._granted:
            self._granted.note_change()

    def reading(self, path: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Opens a file of /workspace as the guest would."""
        argv = ["/bin/sh", "-c", docker_files.READ, WORKSPACE, path]
        return inputs.reading(self.plan, path) or inside.reading(self._keeper(), argv, self.uid, path)

    async def get(self, patterns: Sequence[str]) -> Collected:
        """Reads the regular files of /workspace that match."""
        chosen, left_out = docker_files.wanted(await self._listing(files.MAX_ENTRIES), patterns)
        said = await self._fetched(chosen)
        collected = await anyio.to_thread.run_sync(docker_files.unpacked, said, chosen)
        return Collected(collected.files, (*left_out, *collected.left_out))

    async def _fetched(self, chosen: Sequence[docker_files.Found]) -> bytes:
        """An archive of these; empty if they changed while it was made."""
        if not chosen:
            return b""
        names = "".join(f"./{item.path}\n" for item in chosen).encode()
        try:
            return await self._inside(docker_files.FETCH, names, limit=docker_files.room(chosen), strict=False)
        except errors.ExecutionFailed:
            return b""

    async def list(self) -> tuple[Entry, ...]:
        """Lists what is in /workspace."""
        return inputs.listed(self.plan, docker_files.entries(await self._listing(files.MAX_ENTRIES)))

    async def _listing(self, most: int) -> bytes:
        """Lists twice as many entries, because what the keeper put in is not counted."""
        return await self._inside(docker_files.LIST, words=[str(2 * most)], limit=docker_files.LIST_LIMIT)

    async def _inside(
        self, script: str, stdin: bytes = b"", words: Sequence[str] = (), *, limit: int = 0, what: str = "the files",
        strict: bool = True,
    ) -> bytes:  # fmt: skip
        """Runs one of our small programs in the holder, with the guest's rights."""
        argv = ["/bin/sh", "-c", script, WORKSPACE, *words]
        return await inside.execute(self._keeper(), argv, self.uid, stdin, limit=limit, what=what, strict=strict)

    def _keeper(self) -> DockerContainer:
        if self._holder is None:
            raise errors.ExecutionFailed("this sandbox keeps no files", fix="open it with keep_files")
        return self._holder

    # --- running ---

    def interpreter(self, env: Mapping[str, str], lifetime: float, language: str = "python") -> PipeInterpreter:
        return PipeInterpreter(self, self.plan, env, lifetime, language)

    async def run(self, command: Command, emit: Emit, control: Control) -> Result:
        """Runs a command in a container of its own; another waits for it."""
        async with self._one_at_a_time:
            try:
                result = await self._run(command, emit, control)
            finally:
                self._current = None
                self._host.cleanup.remove_later(Leftovers(self._leftovers))
                self._leftovers = []
            if self._kept:
                result = result.model_copy(update={"warnings": (*result.warnings, self._how_to_remove())})
            return await self._granted.finish(result) if self._granted else result

    def _how_to_remove(self) -> str:
        engine, name = self._host.flavour.name, self._kept[-1]
        remove = f"{engine} rm -f {name}" + (
            f" && {engine} volume rm {' '.join(self._volumes)}" if self._volumes else ""
        )
        return f"the container was kept: look with `{engine} inspect {name}`, remove it with `{remove}`"

    async def measure(self) -> Usage | None:
        """Returns what the running command uses and what those before it left in memory; None if none runs."""
        figures = await self._current.measure() if self._current else None
        if figures is None or figures.memory is None:
            return figures
        return figures._replace(memory=figures.memory + self._held)

    async def _run(self, command: Command, emit: Emit, control: Control) -> Result:
        """Runs it, and once more where the engine has lost the image since it was last asked."""
        command = typescript.prepared(command, self.plan.inputs)
        wanted = await self._image_for(command.language, command.type)
        image = await self._ready(wanted, emit)
        try:
            return await self._run_in(image, command, emit, control)
        except errors.ImageNotFound:
            self._host.images.forget()
            return await self._run_in(await self._ready(wanted, emit), command, emit, control)

    async def _ready(self, image: str, emit: Emit) -> str:
        """Brings an image by the rules; whoever follows the run hears how far that is."""
        send, receive = anyio.create_memory_object_stream[str](math.inf)

        async def tell() -> None:
            async for step in receive:
                await emit("progress", step)

        found = ""
        with lone_errors():
            async with receive, anyio.create_task_group() as tasks:
                tasks.start_soon(tell)
                with send:
                    found = await self._host.images.ready(self._host.client, image, send.send_nowait)
        return found

    async def _run_in(self, image: str, command: Command, emit: Emit, control: Control) -> Result:
        given = dict(self.plan.files) | dict(command.files)
        declared = await self._host.images.volumes_of(self._host.client, image)
        limits = command.limits or self.plan.limits
        body = self._body(command, limits, bool(given), image, declared)
        relay = await self._relay() if self.proxied else None
        alone = self._holder or self.plan.workspace or not self.plan.auto_remove or control.stopping
        pool = None if alone else self._host.pool
        waiting = pool.claim(body) if pool else None
        try:
            if waiting is not None:
                run = self._current = DockerRun(self._job(command, given, body, relay, waiting), emit, control)
                try:
                    return await run.go()
                except errors.BelljarError:
                    if run.begun:
                        raise  # else it had died while it waited, and the guest was never there
            closed = not self.plan.workspace and await self._host.images.has_workspace(self._host.client, image)
            self._current = DockerRun(self._job(command, given, body, relay, open_up=closed), emit, control)
            return await self._current.go()
        except _BoxFull:
            return self._full(limits)

    def _job(
        self, command: Command, given: dict[str, bytes], body: dict[str, Any], relay: EgressRelay | None,
        waiting: Standby | None = None, *, open_up: bool = False,
    ) -> ContainerJob:  # fmt: skip
        name = waiting.name if waiting else f"{self.id}-{secrets.token_hex(4)}"

        async def create() -> Standby:
            if self._holder:  # in a kept folder the last command's files have to go
                await self._deliver(self._holder, given)
                if self._held > body["HostConfig"]["Memory"] + RESERVE_BYTES:
                    raise _BoxFull
            (self._leftovers if self.plan.auto_remove else self._kept).append(name)
            return waiting or await Standby.create(self._host.client, name, self._with_memory_left(body))

        async def deliver(standby: Standby) -> None:
            if not standby.up:
                await standby.start(local=self._host.local)
            # A keeper that waits has to go, even without files: it counts as a process of the guest's. And it opens a
            # folder that the image has closed.
            if not self._holder and (given or waiting or open_up):
                await standby.lay(docker_files.archive(_inputs(given), sticky=True), self.plan.inputs)

        return ContainerJob(
            self.id, spec.order(command.cwd, self._env(command), command.argv), command.stdin,
            command.limits or self.plan.limits, create, deliver, relay,
            lambda told: Proxy(self.network, told, self.plan.limits), own_kernel=self._host.own_kernel,
            lasting=bool(self._holder or self.plan.workspace),
        )  # fmt: skip

    def _with_memory_left(self, body: dict[str, Any]) -> dict[str, Any]:
        """Lowers the memory of a container by what its box holds already: engines charge that to nobody any more."""
        walls = body["HostConfig"]
        least = _LEAST_KERNEL_BYTES if self._host.own_kernel else RESERVE_BYTES
        left = max(walls["Memory"] - self._held, min(walls["Memory"], least))
        return body | {"HostConfig": walls | {"Memory": left, "MemorySwap": left}}

    def _full(self, limits: Limits) -> Result:
        """The result of a command that no memory is left for."""
        held, most = (format_size(number // MIB * MIB) for number in (self._held, limits.memory))
        said = f"the files of this sandbox hold {held} of its {most} of memory: open another, or give it more\n"
        return Result(status=Status.OOM_KILLED, container_id=self.id, stderr=said)

    async def _relay(self) -> EgressRelay:
        host = self._host
        image = await host.images.ready(host.client, host.relay_image or await host.images.choose(host.client, None))
        return EgressRelay(
            host.client, host.flavour, host.cleanup, image, host.owner, self.id, host.state_dir, host.runtime
        )

    def _body(
        self, command: Command, limits: Limits, given: bool, image: str, declared: tuple[str, ...]
    ) -> dict[str, Any]:
        locked = (WORKSPACE,) if self.copies and self.plan.workspace and not self.plan.workspace.write else ()
        guest = spec.ContainerSpec(
            self._host.flavour, image, spec.LAUNCHER if self.plan.auto_remove else spec.KEPT_LAUNCHER, self.uid, limits,
            self._host.owner, self.id, kept=not self.plan.auto_remove, runtime=self._host.runtime, env=spec.GUEST_ENV,
            volumes=self._volumes,
            workspace=None if self.copies else self.plan.workspace, inputs=given and self.plan.workspace is not None,
            locked=locked, declared=declared, own_kernel=self._host.own_kernel, small_buffers=self._host.small_buffers,
            options=self._host.options_for(command.language),
        )  # fmt: skip
        return spec.container(guest)

    def _env(self, command: Command) -> dict[str, str]:
        env = (egress_guest.ENV if self.proxied else {}) | dict(command.env)
        if self._host.own_kernel:
            # gVisor may take only a part of a large write, and Python without buffers then drops the rest, silently.
            env.pop("PYTHONUNBUFFERED", None)
        return env

    async def _deliver(self, container: DockerContainer, given: dict[str, bytes]) -> None:
        """As the keeper's, whom the guest cannot touch; below a folder that the guest made, as the guest's own."""
        tree = _inputs(given)
        argv = ["/bin/sh", "-c", docker_files.DELIVER, self.plan.inputs, *self._volumes.values()]
        data = docker_files.archive(tree, sticky=True)
        try:
            said = await inside.execute(container, argv, spec.KEEPER, data, limit=_WORDS_BYTES, what="the input files")
            self._held = docker_files.held(said)
        except errors.ExecutionFailed:
            argv = ["/bin/sh", "-c", docker_files.LAY, self.plan.inputs]
            data = docker_files.archive(tree)
            await inside.execute(container, argv, self.uid, data, what="the input files")


def _inputs(given: dict[str, bytes]) -> list[File]:
    return [File(path=path, content=content, read_only=True) for path, content in given.items()]
