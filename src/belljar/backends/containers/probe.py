"""Proves what a container engine holds: runs a guest in each runtime, which prints what the kernel says of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import anyio

from belljar.backends.base import Box
from belljar.backends.containers import egress_relay, evidence, spec
from belljar.backends.containers.facts import EngineFacts, has_own_kernel, living_features, no_life, security
from belljar.backends.containers.images_for import ImagesFor
from belljar.backends.guest_text import shell_script
from belljar.backends.session_agents import LANGUAGES
from belljar.control.control import Control
from belljar.core import errors
from belljar.core.capabilities import Capabilities, Guarantees
from belljar.core.languages import Language
from belljar.core.plan import Command, Plan
from belljar.core.request import Limits
from belljar.core.settings import ContainerSettings
from belljar.host import ownership
from belljar.host.docker_api import asking
from belljar.host.loops import lone_errors

if TYPE_CHECKING:
    from aiodocker import Docker

EgressMode = Literal["none", "listed", "open"]
_NOTE_LENGTH = 200


@dataclass
class Knowledge:
    """What is known of an engine: first what it says of itself, and after the probe what was proved."""

    facts: EngineFacts
    runtimes: dict[str, Guarantees] = field(default_factory=dict)
    unweighed: set[str] = field(default_factory=set)  # runtimes that cannot take a weight of block I/O here
    image: str = ""  # what it was proved in: the usual one, or else one that somebody named
    has_python: bool = False  # has that image a Python, which the egress relay needs?

    def runtime_for(self, plan: Plan, usual: str) -> str | None:
        """Returns the runtime that the plan names, else the first that is as strict as asked, else the usual one."""
        if plan.runtime:
            return plan.runtime
        strict = [name for name, held in self.runtimes.items() if held.isolation.rank >= plan.isolation.rank]
        return strict[0] if strict else usual or None

    def options_for(self, plan: Plan, options: ContainerSettings, language: Language | None) -> spec.Options:
        """Returns what the settings, the plan's network and the language's own profile make of the walls."""
        runtime = self.runtime_for(plan, options.runtime) or self.facts.default
        network = options.network_mode if plan.egress.mode == "open" else "none"
        return spec.Options(
            cpu_shares=options.cpu_shares, cpu_affinity=options.cpu_affinity,
            io_weight=None if runtime in self.unweighed else options.io_weight,
            disk=self.facts.disk, network="" if network == "none" else network, dns=options.dns,
            writable_root=not options.read_only_root, capabilities=options.capabilities,
            profile=(language.seccomp_profile if language else "") or options.seccomp_profile,
            security=security(options, self.facts, runtime),
        )  # fmt: skip


class Probe:
    """One probe of an engine. What it finds goes into the `Knowledge` that it was given."""

    def __init__(
        self,
        knowledge: Knowledge,
        options: ContainerSettings,
        images: ImagesFor,
        state_dir: Path,
        open_box: Callable[[Plan], AbstractAsyncContextManager[Box]],
    ) -> None:
        self._knowledge = knowledge
        self._facts = knowledge.facts
        self._options = options
        self._images = images
        self._state_dir = state_dir
        self._open_box = open_box
        self._notes: list[str] = []

    async def run(self, client: Docker) -> Capabilities:
        """Proves each runtime that is worth it, and returns what the engine can do.

        Raises:
            BelljarError: The runtime that the settings choose does not hold what it must.
        """
        facts, name = self._facts, self._facts.address.flavour.name
        image = self._knowledge.image
        if not await self._images.is_here(client, image):
            setup = f"its image, {image}, must be pulled" if self._images.may_pull else ""
            return Capabilities(backend=name, available=False, setup=setup, **image_missing(name, image))
        wanted = self._options.runtime or facts.default
        if wanted not in facts.runtimes:
            known = ", ".join(facts.runtimes)
            raise errors.NotAvailable(f"the engine has no runtime {wanted!r}", fix=f"choose from: {known}")
        runtimes = self._knowledge.runtimes = await self._prove_all(wanted)
        egress = await self._egress(client)
        living = living_features(facts, wanted)
        if living is None:
            self._note(f"no living sandboxes: {no_life(facts, wanted)}")
        return Capabilities(
            backend=name, available=True, version=facts.version, guarantees=runtimes[wanted], egress=egress,
            sessions=LANGUAGES, workspace=True, images=True, runtimes=runtimes, notes=tuple(self._notes),
            living=living, lifeless={} if living is None else self._lifeless(runtimes),
        )  # fmt: skip

    def _lifeless(self, runtimes: Iterable[str]) -> dict[str, str]:
        return {name: why for name in runtimes if (why := no_life(self._facts, name))}

    def _note(self, text: str) -> None:
        self._notes.append(text[:_NOTE_LENGTH])

    # --- walls ---

    async def _prove_all(self, wanted: str) -> dict[str, Guarantees]:
        """What the wanted runtime holds, and each other one that has a kernel of its own, all of them at once."""
        proved: dict[str, Guarantees] = {}

        async def try_other(runtime: str) -> None:
            try:
                proved[runtime] = await self._prove(runtime)
            except errors.BelljarError as error:
                self._note(f"runtime {runtime}: {error.message}")

        with lone_errors():
            async with anyio.create_task_group() as tasks:
                for other in self._facts.runtimes:
                    if other != wanted and has_own_kernel(other):  # one more that shares the kernel proves nothing new
                        tasks.start_soon(try_other, other)
                first = await self._prove(wanted)
        return {wanted: first} | {name: proved[name] for name in self._facts.runtimes if name in proved}

    async def _prove(self, runtime: str) -> Guarantees:
        """Runs a guest that prints what the kernel says of it. What is not seen here is not promised."""
        knowledge = self._knowledge
        knowledge.unweighed.discard(runtime)
        seen = evidence.read(await self._ask_guest(runtime), self._facts, self._options)
        knowledge.has_python = seen.python
        if not seen.weighted and not seen.own_kernel:
            knowledge.unweighed.add(runtime)
        return evidence.promise(self._facts, seen, self._options, self._images.languages)

    async def _ask_guest(self, runtime: str) -> str:
        """Tries with all that was set first, and then with less: a kernel may lack weights and throttles."""
        limits, plain = evidence.limits_to_show(self._facts.disk), evidence.limits_to_show("")
        try:
            return await self._run_guest(runtime, limits)
        except errors.StartFailed:
            if self._options.io_weight is None and limits == plain:
                raise
        self._knowledge.unweighed.add(runtime)
        try:
            return await self._run_guest(runtime, limits)
        except errors.StartFailed:
            if limits == plain:
                raise
        return await self._run_guest(runtime, plain)

    async def _run_guest(self, runtime: str, limits: Limits) -> str:
        argv = ("/bin/sh", "-c", shell_script("containers/probe"))
        command = Command(argv=argv, cwd="/", files={"probe.txt": b"x"})
        async with self._open_box(Plan(image=self._knowledge.image, limits=limits, runtime=runtime)) as box:
            return (await box.run(command, _ignore, Control())).stdout

    # --- egress ---

    async def _egress(self, client: Docker) -> frozenset[EgressMode]:
        """None; listed hosts, where a relay can run; an open network, where the administrator named one."""
        offered: set[EgressMode] = {"none"}
        if objection := self._no_relay():
            self._note(f"no listed hosts: {objection}")
        else:
            offered.add("listed")
            if self._options.network_mode == "none":
                offered.add("open")
        if (name := self._options.network_mode) != "none":
            try:
                await _require_network(client, name)
                offered.add("open")
            except errors.BelljarError as error:
                self._note(f"no open network (container.network_mode): {error.message}")
        return frozenset(offered)

    def _no_relay(self) -> str:
        """Why listed hosts cannot be offered; empty if they can."""
        facts = self._facts
        if facts.address.outside:
            return "the engine is outside of the container that Belljar is in"
        if not facts.address.local:
            return "the engine is on another machine"
        if facts.labelled:
            return "SELinux keeps a container from our socket"
        if not self._knowledge.has_python:
            return f"the image {self._knowledge.image} has no python3, which the egress relay needs"
        if has_own_kernel(runtime := self._options.runtime or facts.default):
            return own_network_stack(runtime)
        if len(os.fsencode(self._state_dir)) > egress_relay.LONGEST_FOLDER_BYTES:
            return f"the name of the state directory {self._state_dir} is too long for a socket in it"
        try:
            ownership.prepare(self._state_dir)
        except errors.BelljarError as error:
            return error.message
        return ""


async def _require_network(client: Docker, name: str) -> None:
    async with asking(f"the network {name}", errors.NotAvailable):
        driver = (await (await client.networks.get(name)).show()).get("Driver")
    if driver == "host":
        raise errors.NotAvailable(f"{name} is the host's own")


def image_missing(backend: str, image: str) -> dict[str, str]:
    """Why a backend cannot be used without its image, and what to do about it."""
    fix = f"belljar images pull {image}" + (" --engine podman" if backend == "podman" else "")
    return {"why_not": f"the image {image} is not here", "fix": fix}


def own_network_stack(runtime: str) -> str:
    """Why a runtime with a kernel of its own has no listed hosts."""
    return f"{runtime} has a network stack of its own, which no second container can join"


async def _ignore(kind: str, text: str) -> None:
    return None
