"""Container engines by their API: what works here, proved, and boxes to run in. Docker here; Podman is a row of data.

`docker_spec` holds the walls, `docker_proof` what is claimed of them, `docker_box` a sandbox and its files,
`docker_ready` one container, `docker_pool` those that wait, `docker_run` one command from start to verdict,
`docker_door` the way out to listed hosts, `docker_engine` the conversation, `docker_broom` the clearing up.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary, finalize

import anyio
import anyio.lowlevel
import anyio.to_thread

from belljar.backends.containers import egress_relay, spec
from belljar.backends.containers import probe as docker_proof
from belljar.backends.containers.box import ContainerHost, DockerBox
from belljar.backends.containers.cleanup import Cleanup, Leftovers, remove
from belljar.backends.containers.pool import Pool
from belljar.backends.containers.probe import Facts
from belljar.backends.control import Control
from belljar.core import errors
from belljar.core.capabilities import Capabilities, Guarantees, LanguageSupport
from belljar.core.languages import Language, Languages
from belljar.core.plan import Command, Plan
from belljar.core.request import Egress, Limits
from belljar.core.settings import EXECUTION, ContainerSettings, Settings
from belljar.host import ownership
from belljar.host.docker_api import asking, connected, list_containers, list_volumes
from belljar.host.egress import Proxy, Resolve, Told, resolve
from belljar.host.engine_address import EngineAddress, is_outside

if TYPE_CHECKING:
    from aiodocker import Docker

    from belljar.images.images import Images

_MINIMUM_API = (1, 41)  # Docker 20.10, Podman 4
_SHARED_KERNEL = re.compile(r"runc|crun|youki|io\.containerd\.runc\..*")  # not worth a second proof
_VOUCHED = 60.0  # seconds that an image's lock, signature and scan need not be looked at again
_REMEMBERED = 10.0  # seconds that a name is taken to mean the same image
_ABANDONED = 3600  # seconds after which a container of an earlier boot is nobody's


class Containers:
    """The backends `docker` and `podman`."""

    def __init__(
        self,
        address: EngineAddress,
        settings: Settings,
        languages: Languages | None = None,
        resolver: Resolve = resolve,
        private_network: bool = False,
    ) -> None:
        self.name = address.flavour.name
        self.address = address
        self._settings = settings
        self._options: ContainerSettings = settings.container
        self._vouched: dict[str, tuple[float, str]] = {}  # image -> until when it counts, and its id
        self._declared: dict[str, tuple[float, tuple[str, ...]]] = {}  # image -> until when it counts, and its volumes
        self._languages = languages or Languages()
        self._unweighed: set[str] = set()  # runtimes that cannot take a weight of block I/O here
        self._first_uid = settings.user_uid
        self._network = (resolver, private_network)
        self._state_dir = Path(settings.state_dir)
        self._speaks_python = False  # has the image of snippets a Python, for the way out?
        self._facts: Facts | None = None
        self._runtimes: dict[str, Guarantees] = {}
        self._offer: Capabilities | None = None
        self._proved = 0.0
        self._locks: WeakKeyDictionary[Any, anyio.Lock] = WeakKeyDictionary()  # one for each event loop
        self.cleanup = Cleanup(address, self.reap, self._options.reap_interval)
        self.pool: Pool | None = None

    # --- what it can do here ---

    async def probe(self) -> Capabilities:
        """Runs a real guest and looks at what really holds around it; who asks meanwhile gets the same answer."""
        asked = time.monotonic()
        async with self._locks.setdefault(anyio.lowlevel.current_token().native_token, anyio.Lock()):
            if self._offer is None or self._proved < asked:
                self._offer = await self._probe_in_time()
                self._proved = time.monotonic()
            return self._offer

    async def _probe_in_time(self) -> Capabilities:
        try:
            with anyio.fail_after(60):
                async with connected(self.address) as client:
                    return await self._probe(client)
        except errors.BelljarError as error:
            absent = error.context.get("absent") and self._settings.images.image_pull_policy != "never"
            setup = f"its image, {error.context['absent']}, must be pulled" if absent else ""
            return Capabilities(backend=self.name, available=False, why_not=error.message, fix=error.fix, setup=setup)
        except (OSError, TimeoutError) as error:
            fix = self.address.flavour.start
            return Capabilities(backend=self.name, available=False, why_not=str(error) or "no answer in time", fix=fix)

    async def _probe(self, client: Docker) -> Capabilities:
        self._facts = facts = await self._ask(client)
        await self._reap(client)
        await self._require_image(client, self.image_for(None))
        wanted = self._options.runtime or facts.default
        if wanted not in facts.runtimes:
            known = ", ".join(facts.runtimes)
            raise errors.NotAvailable(f"the engine has no runtime {wanted!r}", fix=f"choose from: {known}")
        notes: list[str] = []
        self._runtimes = {wanted: await self._prove(facts, wanted)}
        for other in facts.runtimes:
            if other == wanted or _SHARED_KERNEL.fullmatch(other):
                continue
            try:
                self._runtimes[other] = await self._prove(facts, other)
            except errors.BelljarError as error:
                notes.append(f"runtime {other}: {error.message}"[:200])
        return Capabilities(
            backend=self.name, available=True, version=facts.version, guarantees=self._runtimes[wanted],
            egress=await self._egress(client, facts, notes),
            sessions=frozenset({"python"}), workspace=True, images=True, runtimes=self._runtimes, notes=tuple(notes),
        )  # fmt: skip

    async def _ask(self, client: Docker) -> Facts:
        flavour = self.address.flavour
        async with asking(f"{self.name} at {self.address}", errors.NotAvailable, seconds=30, fix=flavour.start):
            version = await client.version()
            said: dict[str, Any] = dict(await client.system.info())
            api = tuple(int(part) for part in str(version["ApiVersion"]).split("."))
            outside = await anyio.to_thread.run_sync(is_outside, self.address.url)
            address = self.address._replace(version="v" + ".".join(map(str, api)), outside=outside)
        if api < _MINIMUM_API:
            raise errors.NotAvailable(
                f"{self.name} {version.get('Version')} is too old", fix="Docker 20.10, Podman 4, or later is needed"
            )
        self.cleanup.address = address
        found = docker_proof.facts(address, f"{self.name} {version.get('Version')}", said)
        docker_proof.security(self._options, found)
        return found

    async def _egress(
        self, client: Docker, facts: Facts, notes: list[str]
    ) -> frozenset[Literal["none", "listed", "open"]]:
        """None; listed hosts, where a relay can be built; an open one where the administrator named a network."""
        offered: set[Literal["none", "listed", "open"]] = {"none"}
        if objection := self._no_egress_relay(facts):
            notes.append(f"no listed hosts: {objection}")
        else:
            offered.add("listed")
        if (name := self._options.network_mode) != "none":
            try:
                async with asking(f"the network {name}", errors.NotAvailable):
                    driver = (await (await client.networks.get(name)).show()).get("Driver")
                if driver == "host":
                    raise errors.NotAvailable(f"{name} is the host's own")
                offered.add("open")
            except errors.BelljarError as error:
                notes.append(f"no open network (container.network_mode): {error.message}"[:200])
        return frozenset(offered)

    def _no_egress_relay(self, facts: Facts) -> str:
        """Why listed hosts cannot be offered; empty if they can."""
        if facts.address.outside:
            return "the engine is outside of the container that Belljar is in"
        if not facts.address.local:
            return "the engine is on another machine"
        if facts.labelled:
            return "SELinux keeps a container from our socket"
        if not self._speaks_python:
            return f"the image {self.image_for(None)} has no python3, which the way out needs"
        if not _SHARED_KERNEL.fullmatch(runtime := self._options.runtime or facts.default):
            return _own_stack(runtime)
        if len(os.fsencode(self._state_dir)) > egress_relay.LONGEST_FOLDER:
            return f"the name of the state directory {self._state_dir} is too long for a socket in it"
        try:
            ownership.prepare(self._state_dir)
        except errors.BelljarError as error:
            return error.message
        return ""

    async def _require_image(self, client: Docker, image: str) -> None:
        try:
            async with asking(f"the image {image}", errors.NotAvailable):
                await client.images.inspect(image)
        except errors.BelljarError as error:
            if error.context.get("status") != 404:
                raise
            fix = f"belljar images pull {image}" + (" --engine podman" if self.name == "podman" else "")
            raise errors.NotAvailable(f"the image {image} is not here", fix=fix, context={"absent": image}) from None

    async def _prove(self, facts: Facts, runtime: str) -> Guarantees:
        """A guest that prints what the kernel says of it. What is not seen here is not claimed."""
        self._unweighed.discard(runtime)
        seen = docker_proof.read(await self._look(facts, runtime), facts, self._options)
        self._speaks_python = seen.python
        if not seen.weighted and not seen.own_kernel:
            self._unweighed.add(runtime)
        return docker_proof.promise(facts, seen, self._options, self._languages)

    async def _look(self, facts: Facts, runtime: str) -> str:
        """What the guest printed. All that was set goes first; a kernel may lack weights and throttles."""
        limits, plain = docker_proof.limits_to_show(facts.disk), docker_proof.limits_to_show("")
        try:
            return await self._hear(runtime, limits)
        except errors.StartFailed:
            if self._options.io_weight is None and limits == plain:
                raise
        self._unweighed.add(runtime)
        try:
            return await self._hear(runtime, limits)
        except errors.StartFailed:
            if limits == plain:
                raise
        return await self._hear(runtime, plain)

    async def _hear(self, runtime: str, limits: Limits) -> str:
        command = Command(argv=("/bin/sh", "-c", docker_proof.LOOK), cwd="/", files={"probe.txt": b"x"})
        async with self.open(Plan(limits=limits, runtime=runtime), pooled=False) as box:
            return (await box.run(command, _ignore, Control())).stdout

    async def languages(self) -> tuple[LanguageSupport, ...]:
        """A language is there if its image is."""
        found: list[LanguageSupport] = []
        async with connected(self.address) as client:
            for language in self._languages:
                image = self._image_of(language)
                fix = f"set container.images.{language.name} to an image that has it"
                try:
                    if image:
                        await self._require_image(client, image)
                except errors.BelljarError as error:
                    image, fix = "", error.fix
                found.append(LanguageSupport(name=language.name, available=bool(image), program=image, fix=fix))
        return tuple(found)

    def image_for(self, language: str | None, kind: str | None = None) -> str:
        """Of the type of work that was named; else the language's own, its type's, or that of snippets."""
        known = None if kind else self._language(language)
        image = (self._image_of(known) if known else "") or self._options.image_of(kind or EXECUTION)
        if image:
            return image
        raise errors.InvalidRequest(
            f"the container type {kind or EXECUTION} runs in the project's image, and nobody said which that is",
            fix=f'give image=…, "image" in the block `sandbox` of the project\'s JSON, '
            f"or container.images.{kind or EXECUTION} in the settings",
        )

    def _image_of(self, language: Language) -> str:
        options = self._options
        return (
            language.image or options.images.get(language.name, "") or options.image_of(options.type_of(language.name))
        )

    def _language(self, name: str | None) -> Language | None:
        with suppress(errors.InvalidRequest):
            return self._languages.get(name) if name else None
        return None

    def options_for(self, plan: Plan, language: str | None = None) -> spec.Options:
        """What the settings, the plan's network and the language's own profile make of the walls."""
        facts, options, known = self._facts, self._options, self._language(language)
        assert facts is not None
        runtime = self._runtime(plan) or facts.default
        network = options.network_mode if plan.egress.mode == "open" else "none"
        return spec.Options(
            cpu_shares=options.cpu_shares, io_weight=None if runtime in self._unweighed else options.io_weight,
            disk=facts.disk, network="" if network == "none" else network, dns=options.dns,
            writable_root=not options.read_only_root, capabilities=options.capabilities,
            profile=(known.seccomp_profile if known else "") or options.seccomp_profile,
            security=docker_proof.security(options, facts),
        )  # fmt: skip

    async def setup(self, told: Callable[[str], object]) -> None:
        """Pulls the image of snippets, by the rules for images."""
        image = self.image_for(None)
        told(f"pulling {image}")
        await self._images().pull(image)

    def _images(self) -> Images:
        from belljar.images.images import Images

        return Images(self._settings, self.address)

    async def _trusted(self, image: str) -> str:
        """What to run: where the rules ask for more than a name, the id of what they let through, for a minute."""
        rules = self._settings.images
        asked = rules.require_lock or rules.require_signature or rules.require_scan
        if not asked and rules.image_pull_policy != "always":
            return image
        until, known = self._vouched.get(image, (0.0, ""))
        if time.monotonic() > until:
            known = (await self._images().pull(image)).image.id
            self._vouched[image] = (time.monotonic() + _VOUCHED, known)
        return known

    async def _volumes_of(self, client: Docker, image: str) -> tuple[str, ...]:
        until, known = self._declared.get(image, (0.0, ()))
        if time.monotonic() > until:
            with suppress(errors.ImageNotFound):  # which its container's creation says with a remedy
                async with asking("the image", errors.StartFailed):
                    config = (await client.images.inspect(image)).get("Config") or {}
                known = tuple(sorted({os.path.normpath(path) for path in config.get("Volumes") or {}}))
                self._declared[image] = (time.monotonic() + _REMEMBERED, known)
        return known

    # --- sandboxes ---

    @asynccontextmanager
    async def open(self, plan: Plan, *, pooled: bool = True) -> AsyncIterator[DockerBox]:
        async with AsyncExitStack() as stack:
            address = self._facts.address if self._facts else self.address
            client = await stack.enter_async_context(connected(address))
            facts = self._facts = self._facts or await self._ask(client)
            address = facts.address
            if plan.workspace and not os.path.isdir(plan.workspace.path):
                raise errors.InvalidRequest(
                    f"workspace.path: {plan.workspace.path} is not a folder", fix="check the path"
                )
            uid, copies = await anyio.to_thread.run_sync(self._who, plan, facts, stack.callback)
            runtime = self._runtime(plan)
            own_kernel = not _SHARED_KERNEL.fullmatch(runtime or facts.default)
            host = ContainerHost(
                client, address.flavour, self.image_for, partial(self._volumes_of, client), self._trusted,
                runtime, self._owner(), self.cleanup,
                self._open_pool(facts) if pooled else None, self._proxy, self._state_dir,
                address.local, own_kernel,
                small_buffers=facts.cgroup == "cgroup v1" and address.local and not own_kernel, copies=copies,
                options_for=partial(self.options_for, plan),
            )  # fmt: skip
            if own_kernel and plan.egress.mode == "listed":
                raise errors.PolicyDenied(
                    f"{self.name}: {_own_stack(runtime or facts.default)}",
                    fix="ask for listed hosts on another runtime or backend",
                )
            box = DockerBox(host, plan, uid)
            if plan.keep_files or box.copies:
                await stack.enter_async_context(box.holding())
            yield box

    def _proxy(self, allowed: Egress, told: Told) -> Proxy:
        resolver, private = self._network
        return Proxy(allowed, told, resolver=resolver, private=private)

    def _open_pool(self, facts: Facts) -> Pool:
        if self.pool is None:
            uids = range(0) if facts.maps_uids else range(self._first_uid, self._first_uid + ownership.UIDS)
            self.pool = Pool(facts.address, self.cleanup, self._options.pool, self._options.pool_idle, uids)
            finalize(self, self.pool.close)
        return self.pool

    @property
    def waiting(self) -> int:
        """How many containers of the pool are up and wait."""
        return self.pool.waiting if self.pool else 0

    def _runtime(self, plan: Plan) -> str | None:
        """What the plan names, else ours, else the first that is as strict as asked."""
        if plan.runtime:
            return plan.runtime
        strict = [name for name, held in self._runtimes.items() if held.isolation.rank >= plan.isolation.rank]
        return strict[0] if strict else self._options.runtime or None

    def _who(self, plan: Plan, facts: Facts, on_close: Callable[[Callable[[], object]], object]) -> tuple[int, bool]:
        """The guest's uid, and whether a granted folder must be copied for it.

        A fresh uid, or the owner of a granted folder, who may read and write it; never root. Where the engine maps
        uids, labels files, or is on another machine, the folder's owner means nothing inside.
        """
        if plan.workspace and not (facts.maps_uids or facts.labelled or not facts.address.local):
            folder_owner = os.stat(plan.workspace.path).st_uid
            if folder_owner != 0:
                return folder_owner, False
        if facts.maps_uids:
            return spec.PLAIN_GUEST, True
        uid, claim = ownership.claim_uid(range(self._first_uid, self._first_uid + ownership.UIDS))
        on_close(claim.close)
        return uid, True

    def _owner(self) -> str:
        pid = os.getpid()
        return f"{ownership._namespace()}.{pid}.{ownership._started(pid)}"

    # --- what is left behind ---

    async def reap(self) -> int:
        async with connected(self.address) as client:
            return await self._reap(client)

    async def _reap(self, client: Docker) -> int:
        """Removes the containers, and then the volumes, whose owner is dead."""
        egress_relay.reap(self._state_dir)
        left, self.cleanup.left = self.cleanup.left, []  # what would not go earlier; the engine may have been restarted
        for leftovers in left:
            self.cleanup.remove_later(leftovers)
        async with asking("the list of containers"):
            containers = await list_containers(client, label=f"{spec.LABEL}=1")
            volumes = await list_volumes(client, label=f"{spec.LABEL}=1")
        dead = [
            str(each["Id"]) for each in containers if _is_orphan(each.get("Labels"), each.get("State") == "running")
        ]
        folders = [str(each["Name"]) for each in volumes if _is_orphan(each.get("Labels"), False)]
        async with anyio.create_task_group() as tasks:
            for each in dead:
                tasks.start_soon(self._put_away, client, Leftovers([each]))
        await self._put_away(client, Leftovers((), folders))
        return len(dead)

    async def _put_away(self, client: Docker, leftovers: Leftovers) -> None:
        """What an engine does not let go of at once is left to the cleanup, which asks again."""
        if not await remove(client, leftovers):
            self.cleanup.remove_later(leftovers)


def _is_orphan(labels: Mapping[str, str] | None, running: bool) -> bool:
    labels = labels or {}
    if labels.get(f"{spec.LABEL}.boot") == spec.boot():
        return ownership.is_dead(labels.get(f"{spec.LABEL}.owner", ""))
    made = labels.get(f"{spec.LABEL}.created", "")
    return not running and made.isdigit() and time.time() - int(made) > _ABANDONED


async def _ignore(kind: str, text: str) -> None:
    return None


def _own_stack(runtime: str) -> str:
    return f"{runtime} has a network stack of its own, which no second container can join"
