"""A living box of a container engine: one container for all its commands, which the engine starts in it.

The container's first program is ours, and does nothing; it runs as another user than the guest, who can end all that is
its own and not that. It ends with our end of its stdin, so that a Belljar that dies leaves nothing running.
"""

from __future__ import annotations

import posixpath
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
from anyio.abc import ByteStream, TaskGroup

from belljar.backends.base import Emit
from belljar.backends.containers import archive as docker_files
from belljar.backends.containers import inside, spec, typescript
from belljar.backends.containers.box import ContainerHost, DockerBox
from belljar.backends.containers.cleanup import Leftovers
from belljar.backends.containers.living import again, upkeep, user_entry
from belljar.backends.containers.living.command import LivingCommand, LivingContainer
from belljar.backends.containers.living.from_host import AccessFromHost, can_reach
from belljar.backends.containers.living.inputs import Delivery
from belljar.backends.containers.living.upkeep import Upkeep
from belljar.backends.containers.standby import Standby
from belljar.backends.granted import GrantedCopy
from belljar.backends.guest_text import shell_script
from belljar.control.box_tree import BoxTree
from belljar.control.control import Control
from belljar.core import errors
from belljar.core.plan import INPUTS, Command, Plan
from belljar.core.process import BoxProcess
from belljar.core.request import Limits
from belljar.core.result import Result, Usage
from belljar.core.values import MIB, WORKSPACE
from belljar.host.docker_api import asking
from belljar.host.egress import guest
from belljar.host.egress.proxy import Proxy
from belljar.host.loops import lone_errors
from belljar.host.tree_copy import TreeNode

if TYPE_CHECKING:
    from aiodocker.containers import DockerContainer

_OWN_PIDS = 2  # for what is ours beside the commands: the engine's init and the keeper are counted by `spec`
_STARTING_PIDS = 32  # for an engine that starts a program: its own threads count, too
_RUN_BYTES = 64 * MIB
_LOOK_SECONDS = 1.0  # between looks whether the container lives
_LAST_WORDS_SECONDS = 5.0  # that an engine has to say how a container ended
_FIRST_LOOKS_SECONDS = (0.0, 0.1, 0.3)
_LAST_LOOKS_SECONDS = (0.1, 0.4, 1.0, 1.0, 1.0)
_PAUSE_TRIES_SECONDS = (0.2, 0.5, 1.0)
_USUAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SHIMS = f"{INPUTS}/.belljar/bin"
_READY = shell_script("containers/ready")


class LivingBox(DockerBox):
    """One machine: its commands share processes, ports and files, and run side by side."""

    def __init__(self, host: ContainerHost, plan: Plan, uid: int) -> None:
        super().__init__(host, plan, uid)
        self._standby: Standby
        self._machine: LivingContainer
        self._ended = anyio.Event()
        self._state: Mapping[str, Any] = {}  # of the container, as the engine told it when it had ended
        self._deliveries = Delivery(self._lay)
        self._commands: set[LivingCommand] = set()
        self._way_out = False  # is there a way to the proxy?
        self._path = _USUAL_PATH
        self._starts = 0  # programs that the engine is about to start
        self._access: AccessFromHost
        self._tasks: TaskGroup
        self._owner = host.owner  # the process that made the container
        self.left: bool = False
        self.stopped: bool = False
        self.life: Callable[[], float | None] = lambda: None

    @property
    def _lasting(self) -> bool:
        """Whether it may go on without us. What a copied folder has changed is brought back by nobody else."""
        return self.plan.absence > 0 and not self.copies

    @property
    def place(self) -> Mapping[str, str | int]:
        """By which its backend finds it again."""
        if not self._lasting:
            return {}
        return again.place(str(self._standby.container.id), self._standby.first, self._owner, self.uid, self._path)

    def leave(self) -> None:
        """Has it go on when it is closed, with the processes that were started to go on."""
        self.left = self._lasting

    # --- its life ---

    @asynccontextmanager
    async def living(self) -> AsyncIterator[None]:
        """Makes and starts the container, and removes it in the end."""
        name = again.name(self.id)
        images, client = self._host.images, self._host.client
        image = await images.ready(client, await self._image_for(self.plan.language, None))
        declared = await images.volumes_of(client, image)
        self._path = await images.path_of(client, image) or _USUAL_PATH
        try:
            async with AsyncExitStack() as stack:
                await self._make_volumes()
                self._standby = await Standby.create(client, name, spec.container(self._facts(image, declared)))
                stack.push_async_callback(self._end)
                await self._standby.start(local=self._host.local, attached=not self._lasting)
                await self._attend(stack)
                await self._make_ready()
                await self._open_access(stack)
                await self._name_guest()
                if self._granted:
                    await self._granted.copy_in()
                    stack.push_async_callback(self._bring_back, self._granted)
                yield
        finally:
            self._hang_up(name)

    @asynccontextmanager
    async def found(self, place: Mapping[str, str | int]) -> AsyncIterator[None]:
        """Takes over the container that an earlier server left, and removes it in the end."""
        self._standby, self.stopped = await again.look(self._host, self.plan.id, place)
        self._path, self._owner = str(place["path"]), str(place["owner"])
        if not self._host.flavour.owned_folders:
            self._volumes = self._names_of_volumes()
        try:
            async with AsyncExitStack() as stack:
                stack.push_async_callback(self._end)
                await self._attend(stack)
                await self._deliveries.begin(dict(self.plan.files), {}, there=True)
                await self._open_access(stack)
                yield
        finally:
            self._hang_up(again.name(self.plan.id))

    async def _attend(self, stack: AsyncExitStack) -> None:
        """Notes the container's end from here on."""
        self._holder = self._standby.container
        self._machine = self._as_machine(self._standby.container)
        stack.enter_context(lone_errors())
        self._tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(self._tasks.cancel_scope.cancel)
        self._tasks.start_soon(self._watch)

    def _hang_up(self, name: str) -> None:
        self._holder = None
        if not self.left:
            self._host.cleanup.remove_later(Leftovers([name], list(self._volumes)))

    async def _end(self) -> None:
        """Ends all that runs, whatever the engine does, and hangs up."""
        with anyio.CancelScope(shield=True):
            self.left = self.left and not self._ended.is_set()
            if self._standby.up and not self._ended.is_set() and not self.left:
                await self._standby.kill()
            await self._standby.close()

    def _facts(self, image: str, declared: tuple[str, ...]) -> spec.ContainerSpec:
        """What its files take is memory that its programs cannot have."""
        limits, granted = self.plan.limits, self.plan.workspace
        walls = limits.model_copy(update={"disk": limits.kept_bytes, "pids": self._pids()})
        hold = upkeep.hold(self.plan.absence) if self._lasting else ("/bin/sh", "-c", spec.HOLD)
        return spec.ContainerSpec(
            self._host.flavour, image, hold, spec.KEEPER, walls, self._host.owner, self.id,
            runtime=self._host.runtime, env=spec.GUEST_ENV | {"PATH": self._path},
            workspace=None if self.copies else granted,
            volumes=self._volumes, declared=declared,
            small_buffers=self._host.small_buffers, options=self._host.options_for(self.plan.language),
            places=self._places(), latest=self._latest,
        )  # fmt: skip

    @property
    def _latest(self) -> float:
        """When it is nobody's, whoever started it; 0: with its owner's end."""
        return self.plan.latest + 2 * self.plan.absence if self._lasting else 0.0

    def _places(self) -> dict[str, spec.GuestFolder]:
        """The writable folders, and that of the read-only files, which only the keeper can write to."""
        most = self.plan.limits.kept_bytes
        own = {self.plan.home: spec.GuestFolder(self.uid, most), WORKSPACE: spec.GuestFolder(self._grantee, most)}
        shared = {place: spec.GuestFolder(self.uid, most, 0o1777) for place in ("/tmp", "/var/tmp")}
        run = {"/run": spec.GuestFolder(self.uid, min(_RUN_BYTES, most))}
        return own | shared | run | {INPUTS: spec.GuestFolder(spec.KEEPER, most)}

    @property
    def _grantee(self) -> int:
        """Whose /workspace is: the keeper's, where it is the copy of a folder that may only be read."""
        granted = self.plan.workspace
        return spec.KEEPER if self.copies and granted and not granted.write else self.uid

    async def _lay_grant(self, tree: Sequence[TreeNode]) -> None:
        if self._grantee == spec.KEEPER:  # who reads it is not its owner
            tree = [node._replace(mode=_readable(node.mode)) for node in tree]
        argv, data = ["/bin/sh", "-c", docker_files.LAY, WORKSPACE], docker_files.pack(tree)
        async with self._starting():
            await inside.execute(self._keeper(), argv, self._grantee, data, what="the granted folder")

    def _names_of_volumes(self) -> dict[str, str]:
        bound = WORKSPACE if self.plan.workspace and not self.copies else ""
        return {f"{self.id}-{place[1:].replace('/', '-')}": place for place in self._places() if place != bound}

    async def _make_volumes(self) -> None:
        """Where an engine cannot say whose a fresh folder is, it is a volume."""
        if self._host.flavour.owned_folders:
            return
        places = self._places()
        self._volumes = self._names_of_volumes()
        for name, path in self._volumes.items():
            body = spec.volume(name, self.plan.limits, self._host.owner, self.id, place=places[path])
            async with asking("the sandbox's folders could not be made", errors.StartFailed):
                await self._host.client.volumes.create(body)  # type: ignore[no-untyped-call]

    def _usual_env(self) -> dict[str, str]:
        home = self.plan.home
        name = "root" if self.plan.user == "root" else "user"
        return spec.GUEST_ENV | {
            "HOME": home, "USER": name, "LOGNAME": name, "PATH": f"{home}/.local/bin:{self._path}:{_SHIMS}",
            "npm_config_prefix": f"{home}/.local", "PYTHONUSERBASE": f"{home}/.local",
        }  # fmt: skip

    async def _open_access(self, stack: AsyncExitStack) -> None:
        """Comes to its files, processes and ports by the host's own hand."""
        first, group = self._standby.first, self._machine.group
        try:
            self._access = stack.enter_context(AccessFromHost.opened(first, group, self.uid, self._writable))
        except OSError as error:
            raise errors.StartFailed(f"the container ended early: {error.strerror}") from None
        await self.open_network()
        if self._lasting:
            kept = Upkeep(self.plan.absence, self._life_left, self._say)
            await kept.hold(self._access.root, stack.enter_context)
            self._tasks.start_soon(kept.renew)

    def _life_left(self) -> float | None:
        return self.life()

    async def _say(self, argv: list[str]) -> None:
        async with self._starting():
            await inside.execute(self._keeper(), argv, spec.KEEPER, b"", what="the sandbox's life")

    async def open_network(self) -> None:
        """Opens the way to the proxy, once there is something that may be reached."""
        if self.proxied and not self._way_out:
            self._way_out = True
            proxy = Proxy(self.network, self._deny, self.plan.limits)
            self._tasks.start_soon(proxy.serve, await self._access.network.listener(guest.PORT))

    async def _name_guest(self) -> None:
        """Puts the guest into the image's lists of users."""
        name = "root" if self.plan.user == "root" else "user"
        lists = await anyio.to_thread.run_sync(user_entry.entries, self._access.root, self.uid, name, self.plan.home)
        if lists:
            laid = {f"{user_entry.FOLDER}/{kind}": content for kind, content in lists.items()}
            await self._deliveries.add(laid)
            await user_entry.put_in_place(self._standby.first, lists)

    async def _bring_back(self, granted: GrantedCopy) -> None:
        """Copies back what has changed since the last command, by whomever."""
        granted.note_change()
        await granted.close()

    # --- how many processes it may have ---

    def _pids(self) -> int:
        """Those of the guest, of ours, one beside each command, and what it takes to start a program."""
        own = _OWN_PIDS + (upkeep.PIDS if self._lasting else 0) + len(self._commands)
        return self.plan.limits.pids + own + (_STARTING_PIDS if self._starts else 0)

    @asynccontextmanager
    async def _starting(self) -> AsyncIterator[None]:
        """Makes room for the engine to start a program, which takes more processes than that program."""
        self._starts += 1
        self._allow()
        try:
            yield
        finally:
            self._starts -= 1
            self._allow()

    def _allow(self) -> None:
        if self._standby.group:
            with suppress(OSError):  # the container has ended
                self._standby.group.allow(self._pids())

    async def _inside(
        self, script: str, stdin: bytes = b"", words: Sequence[str] = (), *, limit: int = 0, what: str = "the files",
        strict: bool = True,
    ) -> bytes:  # fmt: skip
        async with self._starting():
            return await super()._inside(script, stdin, words, limit=limit, what=what, strict=strict)

    async def _deny(self, words: str) -> None:
        """Nothing says which command's connection it was: all that run hear of it."""
        for command in tuple(self._commands):
            await command.outcome.deny(words)

    @property
    def _writable(self) -> tuple[str, ...]:
        """The folders that the guest may write to."""
        granted = self.plan.workspace
        closed = {INPUTS, *((WORKSPACE,) if granted and not granted.write else ())}
        return tuple(place for place in self._places() if place not in closed)

    def _as_machine(self, container: DockerContainer) -> LivingContainer:
        group = self._standby.group
        if group is None or not can_reach(self._standby.first, group):
            raise errors.NotAvailable(
                f"{self._host.flavour.name}: this host cannot come to what is in a container",
                fix="run Belljar as root beside an engine that has root, or choose another backend",
            )
        return LivingContainer(
            container, self.uid, self._ended, self.how_it_ended, self._look, group=group,
            oom_kills=lambda: group.usage().oom_kills,
            full=lambda: self._state.get("OOMKilled") is True, left=lambda: self.left,
            told=(lambda word: again.exit_code(self._access.root, word)) if self._lasting else None,
        )  # fmt: skip

    async def _make_ready(self) -> None:
        """Lays the read-only files and checks that the guest can write where it must."""
        shim = {".belljar/bin/python": b'#!/bin/sh\nexec python3 "$@"\n'}
        await self._deliveries.begin(dict(self.plan.files), shim)
        places = [self.plan.home, WORKSPACE, "/tmp", "/var/tmp", "/run"]
        if WORKSPACE not in self._writable or (self.plan.workspace and not self.copies):
            places.remove(WORKSPACE)
        argv = ["/bin/sh", "-c", _READY, "sh", *places]
        async with self._starting():
            said = await inside.execute(self._keeper(), argv, self.uid, b"", limit=4096, what="the sandbox's folders")
        if said:
            closed = ", ".join(said.decode("utf-8", "replace").split())
            raise errors.StartFailed(f"the guest cannot write to {closed}", fix="choose another image, or another home")

    async def _watch(self) -> None:
        """Waits for the container's end: nothing is left of the box then."""
        async with anyio.create_task_group() as ways:
            for way in (self._told_by_engine, self._seen_from_host):
                ways.start_soon(way, ways.cancel_scope)
        with anyio.move_on_after(_LAST_WORDS_SECONDS):
            for pause in _LAST_LOOKS_SECONDS:
                if self._state or await self._has_stopped():
                    break
                await anyio.sleep(pause)
        self._ended.set()

    async def _look(self) -> None:
        """Notes the container's end at once, if it is ending: a command has hung up without a word."""
        group = self._standby.group
        for pause in _FIRST_LOOKS_SECONDS:
            await anyio.sleep(pause)
            if self._ended.is_set():
                return
            if await self._has_stopped() or (group and group.is_empty()):
                self._ended.set()
                return

    async def _told_by_engine(self, waiting: anyio.CancelScope) -> None:
        while not await self._has_stopped():
            with suppress(Exception):
                await self._standby.container.wait()
            await anyio.sleep(_LOOK_SECONDS)
        waiting.cancel()

    async def _seen_from_host(self, waiting: anyio.CancelScope) -> None:
        """Without a word of the engine, which may have hung up or have died."""
        if group := self._standby.group:
            while True:
                await anyio.sleep(_LOOK_SECONDS)
                if group.is_empty():
                    break
            waiting.cancel()

    async def _has_stopped(self) -> bool:
        with suppress(errors.BelljarError):
            async with asking("the container's state"):
                state = (await self._standby.container.show())["State"]
            if not state.get("Running"):
                self._state = state
        return bool(self._state)

    def how_it_ended(self) -> str:
        """Says how the container ended; empty while it lives."""
        if not self._ended.is_set():
            return ""
        if self._state.get("OOMKilled") is True:
            return "it took more memory than its limit: open it with more"
        code = self._state.get("ExitCode")
        said = str(self._state.get("Error") or "") or ("its engine too" if code is None else f"exit code {code}")
        return f"its container is gone ({said})"

    # --- running ---

    async def run(self, command: Command, emit: Emit, control: Control) -> Result:
        """Runs a command beside the others."""
        self._require_life()
        command = typescript.prepared(command, self.plan.inputs)
        argv, done = await self._deliveries.give(command)
        env = self._usual_env() | (guest.ENV if self.proxied else {}) | dict(command.env)
        limits = command.limits or self.plan.limits
        cwd = posixpath.join(WORKSPACE, command.cwd)
        living = LivingCommand(self.id, self._machine, command, limits, emit, control)
        self._commands.add(living)
        try:
            result = await living.go(_program(argv), cwd, env, self._starting)
        finally:
            self._commands.discard(living)
            self._allow()
            done()
        if self._granted is None:
            return result
        async with self._one_at_a_time:
            return await self._granted.finish(result)

    async def rejoin(
        self, place: Mapping[str, str | int], limits: Limits, emit: Emit, control: Control
    ) -> Result:  # fmt: skip
        """Waits for the end of a process that an earlier server started; nothing that it prints is heard."""
        self._require_life()
        command = Command(argv=("",))
        living = LivingCommand(self.id, self._machine, command, limits, emit, control)
        self._commands.add(living)
        try:
            return await living.rejoin(place)
        finally:
            self._commands.discard(living)
            self._allow()

    async def measure(self) -> Usage | None:
        """Returns what the whole box uses now."""
        group = self._standby.group
        return group.figures() if group and not self._ended.is_set() else None

    # --- the machine ---

    @property
    def tree(self) -> BoxTree:
        """The box's files, by whole paths."""
        return self._access.tree

    @property
    def own_folders(self) -> tuple[str, ...]:
        """The folders that are the guest's own; /run is not among them, as it tells of what runs now."""
        granted = (WORKSPACE,) if self.plan.workspace else ()
        return tuple(place for place in self._places() if place not in (INPUTS, "/run", *granted))

    async def processes(self) -> tuple[BoxProcess, ...]:
        """Lists what runs in the box now."""
        self._require_life()
        return await self._access.processes()

    async def listens(self, port: int) -> bool:
        """Whether something in the box listens on a TCP port."""
        self._require_life()
        return await self._access.listens(port)

    async def dial(self, port: int) -> ByteStream:
        """Connects to a TCP port of the box's own loopback."""
        self._require_life()
        return await self._access.dial(port)

    async def pause(self) -> None:
        """Stops all processes of the box where they are."""
        self._require_life()
        for pause in _PAUSE_TRIES_SECONDS:  # a runtime may give up on a process that was just being started
            with suppress(errors.ExecutionFailed):
                async with asking("the sandbox could not be paused"):
                    await self._standby.container.pause()
                return
            await anyio.sleep(pause)
            with suppress(errors.BelljarError):
                async with asking("the container's state"):
                    if (await self._standby.container.show())["State"].get("Paused") is True:
                        return
        async with asking("the sandbox could not be paused"):
            await self._standby.container.pause()

    async def resume(self) -> None:
        """Lets them go on."""
        self._require_life()
        async with asking("the sandbox could not be resumed"):
            await self._standby.container.unpause()

    def _require_life(self) -> None:
        if how := self.how_it_ended():
            raise errors.SessionEnded(f"the sandbox has ended: {how}", fix="open another")

    async def _lay(self, archive: bytes, gone: list[str]) -> None:
        argv = ["/bin/sh", "-c", shell_script("containers/lay"), INPUTS, *gone]
        async with self._starting():
            await inside.execute(self._keeper(), argv, spec.KEEPER, archive, what="the input files")


def _readable(mode: int) -> int:
    """What its owner may read, everybody may, and nobody else may write."""
    mine = mode & 0o500
    return (mode & 0o700) | mine >> 3 | mine >> 6


def _program(argv: tuple[str, ...]) -> list[str]:
    """By `env`, which would take a=b for a variable."""
    return ["sh", "-c", 'exec "$@"', "sh", *argv] if "=" in argv[0] else list(argv)
