"""A living box of a container engine: one container for all its commands, which the engine starts in it.

The container's first program is ours, and does nothing; it runs as another user than the guest, who can end all that is
its own and not that. It ends with our end of its stdin, so that a Belljar that dies leaves nothing running.
"""

from __future__ import annotations

import posixpath
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio

from belljar.backends.base import Emit
from belljar.backends.containers import inside, spec, typescript
from belljar.backends.containers.box import ContainerHost, DockerBox
from belljar.backends.containers.cleanup import Leftovers
from belljar.backends.containers.living.command import LivingCommand, Machine
from belljar.backends.containers.living.inputs import Delivery
from belljar.backends.containers.standby import Standby
from belljar.backends.guest_text import shell_script
from belljar.control.control import Control
from belljar.core import errors
from belljar.core.plan import INPUTS, Command, Plan
from belljar.core.result import Result, Usage
from belljar.core.values import MIB, WORKSPACE
from belljar.host import egress
from belljar.host.docker_api import asking
from belljar.host.loops import lone_errors

if TYPE_CHECKING:
    from aiodocker.containers import DockerContainer

_KERNEL_BYTES = 256 * MIB  # that a kernel in user space may take beside what its guests use
_OWN_PIDS = 64  # for what is ours beside the commands
_RUN_BYTES = 64 * MIB
_READY_SECONDS = 60.0
_USUAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SHIMS = f"{INPUTS}/.belljar/bin"
_READY = shell_script("containers/ready")


class LivingBox(DockerBox):
    """One machine: its commands share processes, ports and files, and run side by side."""

    def __init__(self, host: ContainerHost, plan: Plan, uid: int) -> None:
        super().__init__(host, plan, uid)
        self._standby: Standby
        self._machine: Machine
        self._ended = anyio.Event()
        self._state: Mapping[str, Any] = {}  # of the container, as the engine told it when it had ended
        self._deliveries = Delivery(self._lay)
        self._commands: set[LivingCommand] = set()
        self._path = _USUAL_PATH

    # --- its life ---

    @asynccontextmanager
    async def living(self) -> AsyncIterator[None]:
        """Makes and starts the container, and removes it in the end."""
        name = f"{self.id}-living"
        images, client = self._host.images, self._host.client
        image = await images.ready(client, await self._image_for(self.plan.language, None))
        declared = await images.volumes_of(client, image)
        self._path = await images.path_of(client, image) or _USUAL_PATH
        try:
            async with AsyncExitStack() as stack:
                await self._make_volumes()
                self._standby = await Standby.create(client, name, spec.container(self._facts(image, declared)))
                stack.push_async_callback(self._standby.close)
                await self._standby.start(local=self._host.local)
                self._holder = self._standby.container
                self._machine = self._as_machine(self._standby.container)
                stack.enter_context(lone_errors())
                tasks = await stack.enter_async_context(anyio.create_task_group())
                stack.callback(tasks.cancel_scope.cancel)
                tasks.start_soon(self._watch)
                await self._make_ready()
                if self._granted:
                    await self._granted.copy_in()
                    stack.push_async_callback(self._granted.close)
                yield
        finally:
            self._holder = None
            self._host.cleanup.remove_later(Leftovers([name], list(self._volumes)))

    def _facts(self, image: str, declared: tuple[str, ...]) -> spec.ContainerSpec:
        """What the files in memory take is beside what the programs may use."""
        own_kernel, limits, granted = self._host.own_kernel, self.plan.limits, self.plan.workspace
        memory = limits.kept_box_bytes + (_KERNEL_BYTES if own_kernel else 0)
        walls = limits.model_copy(update={"memory": memory, "disk": limits.kept_bytes, "pids": limits.pids + _OWN_PIDS})
        locked = (WORKSPACE,) if self.copies and granted and not granted.write else ()
        return spec.ContainerSpec(
            self._host.flavour, image, ("/bin/sh", "-c", spec.HOLD), spec.KEEPER, walls, self._host.owner, self.id,
            runtime=self._host.runtime, env=self._usual_env(), workspace=None if self.copies else granted,
            volumes=self._volumes, locked=locked, declared=declared, own_kernel=own_kernel,
            small_buffers=self._host.small_buffers, options=self._host.options_for(self.plan.language),
            places=self._places(),
        )  # fmt: skip

    def _places(self) -> dict[str, spec.Place]:
        """The writable folders, and that of the read-only files, which only the keeper can write to."""
        most = self.plan.limits.kept_bytes
        own = {place: spec.Place(self.uid, most) for place in (self.plan.home, WORKSPACE)}
        shared = {place: spec.Place(self.uid, most, 0o1777) for place in ("/tmp", "/var/tmp")}
        run = {"/run": spec.Place(self.uid, min(_RUN_BYTES, most))}
        return own | shared | run | {INPUTS: spec.Place(spec.KEEPER, most)}

    async def _make_volumes(self) -> None:
        """Where an engine cannot say whose a fresh folder is, it is a volume."""
        if self._host.flavour.owned_folders:
            return
        places = self._places()
        if self.plan.workspace and not self.copies:
            del places[WORKSPACE]
        self._volumes = {f"{self.id}-{place[1:].replace('/', '-')}": place for place in places}
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

    def _as_machine(self, container: DockerContainer) -> Machine:
        group = self._standby.group
        return Machine(
            container, self.uid, self._ended, self.how_it_ended, group=None if self._host.own_kernel else group,
            oom_kills=lambda: group.usage().oom_kills if group else 0,
            full=lambda: self._state.get("OOMKilled") is True,
        )  # fmt: skip

    async def _make_ready(self) -> None:
        """Lays the read-only files and checks that the guest can write where it must."""
        shim = {".belljar/bin/python": b'#!/bin/sh\nexec python3 "$@"\n'}
        await self._deliveries.begin(dict(self.plan.files), shim)
        places = [self.plan.home, WORKSPACE, "/tmp", "/var/tmp", "/run"]
        if self.plan.workspace and not self.copies:
            places.remove(WORKSPACE)
        argv = ["/bin/sh", "-c", _READY, "sh", *places]
        said = await inside.execute(self._keeper(), argv, self.uid, b"", limit=4096, what="the sandbox's folders")
        if said:
            closed = ", ".join(said.decode("utf-8", "replace").split())
            raise errors.StartFailed(f"the guest cannot write to {closed}", fix="choose another image, or another home")

    async def _watch(self) -> None:
        """Waits for the container's end: nothing is left of the box then."""
        container = self._standby.container
        while True:
            with suppress(Exception):
                await container.wait()
            with suppress(errors.BelljarError):
                async with asking("the container's state"):
                    state = (await container.show())["State"]
                if not state.get("Running"):
                    self._state = state
                    break
            await anyio.sleep(1.0)
        self._ended.set()

    def how_it_ended(self) -> str:
        """Says how the container ended; empty while it lives."""
        if not self._ended.is_set():
            return ""
        if self._state.get("OOMKilled") is True:
            return "it took more memory than its limit: open it with more"
        said = str(self._state.get("Error") or "") or f"exit code {self._state.get('ExitCode')}"
        return f"its container is gone ({said})"

    # --- running ---

    async def run(self, command: Command, emit: Emit, control: Control) -> Result:
        """Runs a command beside the others."""
        if how := self.how_it_ended():
            raise errors.SessionEnded(f"the sandbox has ended: {how}", fix="open another")
        command = typescript.prepared(command, self.plan.inputs)
        argv, done = await self._deliveries.give(command)
        env = (egress.ENV if self.plan.egress.mode == "listed" else {}) | dict(command.env)
        if self._host.own_kernel:
            env.pop("PYTHONUNBUFFERED", None)
        limits = command.limits or self.plan.limits
        cwd = posixpath.join(WORKSPACE, command.cwd)
        living = LivingCommand(self.id, self._machine, command, limits, emit, control)
        self._commands.add(living)
        try:
            result = await living.go(_program(argv), cwd, env)
        finally:
            self._commands.discard(living)
            done()
        return await self._granted.finish(result) if self._granted else result

    async def measure(self) -> Usage | None:
        """Returns what the whole box uses now."""
        group = self._standby.group
        return group.figures() if group and not self._ended.is_set() else None

    async def _lay(self, archive: bytes, gone: list[str]) -> None:
        argv = ["/bin/sh", "-c", shell_script("containers/lay"), INPUTS, *gone]
        await inside.execute(self._keeper(), argv, spec.KEEPER, archive, what="the input files")


def _program(argv: tuple[str, ...]) -> list[str]:
    """By `env`, which would take a=b for a variable."""
    return ["sh", "-c", 'exec "$@"', "sh", *argv] if "=" in argv[0] else list(argv)
