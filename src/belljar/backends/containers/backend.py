"""The backends `docker` and `podman`: proves what a container engine can do here, and opens sandboxes on it.

`spec` holds the walls; `facts` what the engine says of itself, `probe` and `evidence` what is proved of it;
`images_for` chooses images; `box` is a sandbox and its files, `standby` one container, `pool` those that were started
beforehand, `run` one command from start to verdict, `egress_relay` the way out to listed hosts; `cleanup` and `orphans`
remove what is left.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, finalize

import anyio
import anyio.lowlevel
import anyio.to_thread

from belljar.backends.containers import orphans, spec
from belljar.backends.containers.box import ContainerHost, DockerBox
from belljar.backends.containers.cleanup import Cleanup
from belljar.backends.containers.facts import EngineFacts, ask_facts, has_own_kernel, no_life
from belljar.backends.containers.images_for import ImagesFor
from belljar.backends.containers.living import again
from belljar.backends.containers.living.box import LivingBox
from belljar.backends.containers.pool import Pool
from belljar.backends.containers.probe import Knowledge, Probe, image_missing, own_network_stack
from belljar.core import errors
from belljar.core.capabilities import Capabilities, LanguageSupport
from belljar.core.container_block import registered
from belljar.core.languages import Language
from belljar.core.plan import Plan
from belljar.core.settings import PRIVATE_UIDS, ContainerSettings
from belljar.host import git_settings, ownership
from belljar.host.docker_api import connected
from belljar.host.egress.access import USUAL, Outside
from belljar.host.engine_address import EngineAddress
from belljar.host.guest_uid import GuestUid

if TYPE_CHECKING:
    from aiodocker import Docker

_PROBE_SECONDS = 60


class Containers:
    """Sandboxes on a container engine: Docker, or Podman at its own socket.

    Its life: it is made without a word to the engine; the first `probe` or `open` asks what the engine is
    (`Knowledge`); `probe` proves what that is worth, and may be called again; `open` may be called at any time. A pool,
    if the settings want one, is made by the first `open`, and let go with the backend.
    """

    def __init__(
        self,
        address: EngineAddress,
        options: ContainerSettings,
        images: ImagesFor,
        state_dir: Path,
        *,
        first_uid: int,
        uids: int = PRIVATE_UIDS,
        gid: int | None = None,
        outside: Outside = USUAL,
    ) -> None:
        """Remembers where the engine is; nothing is asked yet.

        Args:
            address: Where the engine listens.
            options: The administrator's settings for containers.
            images: Chooses the images.
            state_dir: Where the sockets of egress relays go.
            first_uid: The first uid of guests.
            uids: How many there are; 1: all guests share it.
            gid: The group of all of them; None: each one's own.
            outside: What the administrator says of the way to listed hosts.
        """
        self.name: str = address.flavour.name
        self.address = address
        self.images = images
        self.cleanup: Cleanup = Cleanup(address, self.reap, options.reap_interval)
        self.pool: Pool | None = None
        self._options = options
        self._uids = range(first_uid, first_uid + uids)
        self._gid = gid
        self._outside = outside
        self._state_dir = state_dir
        self._knowledge: Knowledge | None = None
        self._named = ""  # the image that `setup` was told of, for a probe where the usual one is missing
        self._capabilities: Capabilities | None = None
        self._proved_at = 0.0
        self._locks: WeakKeyDictionary[Any, anyio.Lock] = WeakKeyDictionary()  # one for each event loop

    @property
    def known_address(self) -> EngineAddress:
        """The engine's address with the version of its API once that is known: Podman takes 0.3 s of CPU to tell it."""
        return self._knowledge.facts.address if self._knowledge else self.address

    # --- what it can do here ---

    async def probe(self) -> Capabilities:
        """Runs a real guest and looks at what really holds around it. Who asks meanwhile gets the same answer."""
        asked = time.monotonic()
        async with self._locks.setdefault(anyio.lowlevel.current_token().native_token, anyio.Lock()):
            if self._capabilities is None or self._proved_at < asked:
                self._capabilities = await self._probe_in_time()
                self._proved_at = time.monotonic()
            return self._capabilities

    async def _probe_in_time(self) -> Capabilities:
        try:
            with anyio.fail_after(_PROBE_SECONDS):
                async with connected(self.address) as client:
                    return await self._probe(client)
        except errors.BelljarError as error:
            why_not, fix = error.message, error.fix
        except (OSError, TimeoutError) as error:
            why_not, fix = str(error) or "no answer in time", self.address.flavour.start
        return Capabilities(backend=self.name, available=False, why_not=why_not, fix=fix)

    async def _probe(self, client: Docker) -> Capabilities:
        knowledge = self._knowledge = await self._ask(client)
        await orphans.reap(client, self.cleanup, self._state_dir)
        knowledge.image = await self.images.choose(client, None)
        if self._named and not await self.images.is_here(client, knowledge.image):
            knowledge.image = self._named
        open_box = partial(self.open, pooled=False)
        return await Probe(knowledge, self._options, self.images, self._state_dir, open_box).run(client)

    async def _ask(self, client: Docker) -> Knowledge:
        facts = await ask_facts(client, self.address, self._options)
        self.cleanup.address = facts.address
        runtime = registered(self._options.runtime, facts.runtimes)
        self._options = self._options.model_copy(update={"runtime": runtime})
        return Knowledge(facts)

    async def languages(self) -> tuple[LanguageSupport, ...]:
        """Tells of each language whether it can be run here: it can if its image is on the engine."""
        async with connected(self.known_address) as client:
            return tuple([await self._support(client, language) for language in self.images.languages])

    async def _support(self, client: Docker, language: Language) -> LanguageSupport:
        name = language.name
        if not self.images.image_of(language):
            return LanguageSupport(
                name=name, available=False, fix=f"set container.images.{name} to an image that has it"
            )
        try:
            image = await self.images.choose(client, name)
            if await self.images.is_here(client, image):
                return LanguageSupport(name=name, available=True, program=image)
        except errors.BelljarError as error:
            return LanguageSupport(name=name, available=False, fix=error.fix)
        setup = f"its image, {image}, is pulled" if self.images.may_pull else ""
        return LanguageSupport(name=name, available=False, fix=image_missing(self.name, image)["fix"], setup=setup)

    async def setup(self, told: Callable[[str], object], image: str | None = None) -> None:
        """Brings the image that is named, or else that of snippets, by the rules for images; it will do for a probe."""
        async with connected(self.known_address) as client:
            self._named = image or await self.images.choose(client, None)
            await self.images.ready(client, self._named, told)

    # --- sandboxes ---

    @asynccontextmanager
    async def open(self, plan: Plan, *, pooled: bool = True) -> AsyncIterator[DockerBox]:
        """Opens a sandbox, and removes it in the end.

        Args:
            plan: What it may do.
            pooled: Whether a container that was started beforehand may serve it.

        Raises:
            InvalidRequest: The granted folder is not there.
            PolicyDenied: The runtime cannot let the sandbox out to listed hosts.
        """
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(connected(self.known_address))
            knowledge = self._knowledge = self._knowledge or await self._ask(client)
            if plan.workspace and not os.path.isdir(plan.workspace.path):
                raise errors.InvalidRequest(
                    f"workspace.path: {plan.workspace.path} is not a folder", fix="check the path"
                )
            uid, copies = await anyio.to_thread.run_sync(self._who, plan, knowledge.facts, stack.callback)
            host = self._host(client, plan, knowledge, pooled, copies)
            if host.own_kernel and (plan.egress.mode == "listed" or (plan.egress.mode == "open" and not host.direct)):
                raise errors.PolicyDenied(
                    f"{self.name}: {own_network_stack(host.runtime or knowledge.facts.default)}",
                    fix="ask for listed hosts on another runtime or backend",
                )
            if plan.living:
                runtime = host.runtime or knowledge.facts.default
                if why_not := no_life(knowledge.facts, runtime):
                    raise errors.NotAvailable(
                        f"{self.name} has no living sandboxes here: {why_not}", fix="choose another runtime or backend"
                    )
                living = LivingBox(host, plan, uid)
                await stack.enter_async_context(living.living())
                yield living
                return
            box = DockerBox(host, plan, uid)
            if plan.keep_files or box.copies or await box.needs_holder():
                await stack.enter_async_context(box.holding())
            yield box

    @asynccontextmanager
    async def find(self, plan: Plan, place: Mapping[str, str | int]) -> AsyncIterator[DockerBox]:
        """Takes over a living sandbox that an earlier process left, and removes it in the end.

        Args:
            plan: What it may do.
            place: What it told of itself (`LivingBox.place`).

        Raises:
            SessionEnded: It is not there any more, or not what it was.
        """
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(connected(self.address))
            knowledge = self._knowledge = self._knowledge or await self._ask(client)
            host, uid = self._host(client, plan, knowledge, False, copies=False), int(place["uid"])
            if why_not := no_life(knowledge.facts, host.runtime or knowledge.facts.default):
                raise errors.SessionEnded(f"{self.name} has no living sandboxes here any more: {why_not}")
            claim = await anyio.to_thread.run_sync(ownership.claim_again, uid, self._uids)
            stack.callback(claim.close)
            box = LivingBox(host, plan, uid)
            await stack.enter_async_context(box.found(place))
            yield box

    async def discard(self, id: str, place: Mapping[str, str | int]) -> None:
        """Removes one that nobody takes over, if it is still there and ours."""
        async with connected(self.address) as client:
            await again.discard(client, id, place)

    def _host(self, client: Docker, plan: Plan, knowledge: Knowledge, pooled: bool, copies: bool) -> ContainerHost:
        facts, images = knowledge.facts, self.images
        address, runtime = facts.address, knowledge.runtime_for(plan, self._options.runtime)
        own_kernel = has_own_kernel(runtime or facts.default)

        def options_for(language: str | None) -> spec.Options:
            return knowledge.options_for(plan, self._options, images.language(language))

        return ContainerHost(
            client, address.flavour, images, knowledge.image, runtime, ownership.name_of(os.getpid()), self.cleanup,
            self._open_pool(facts) if pooled else None, self._outside, self._state_dir,
            address.local, own_kernel,
            small_buffers=facts.cgroup == "cgroup v1" and address.local and not own_kernel, copies=copies,
            options_for=options_for, direct=self._options.network_mode != "none",
        )  # fmt: skip

    def _open_pool(self, facts: EngineFacts) -> Pool:
        if self.pool is None:
            uids = range(0) if facts.maps_uids else self._uids
            self.pool = Pool(facts.address, self.cleanup, self._options.pool, self._options.pool_idle, uids, self._gid)
            finalize(self, self.pool.close)
        return self.pool

    @property
    def waiting(self) -> int:
        """How many containers of the pool are started and wait."""
        return self.pool.waiting if self.pool else 0

    def _who(
        self, plan: Plan, facts: EngineFacts, on_close: Callable[[Callable[[], object]], object]
    ) -> tuple[int, bool]:
        """The guest's uid, and whether a granted folder must be copied for it.

        A fresh uid, or the owner of a granted folder, who may read and write it; never root. Where the engine maps
        uids, labels files, or is on another machine, the folder's owner means nothing inside. An engine mounts by
        name, and a guest of another sandbox could put a link there: so git's settings cannot be mounted read-only.
        """
        foreign = facts.maps_uids or facts.labelled or not facts.address.local
        if plan.workspace and not foreign and not git_settings.guarded(plan.workspace):
            folder_owner = os.stat(plan.workspace.path).st_uid
            if folder_owner != 0:
                return GuestUid.of(folder_owner, self._gid), False
        if facts.maps_uids:
            return spec.PLAIN_GUEST, True
        uid, claim = ownership.claim_uid(self._uids)
        on_close(claim.close)
        return GuestUid.of(uid, self._gid), True

    # --- what is left behind ---

    async def reap(self) -> int:
        """Removes what dead Belljars left on the engine; returns how many containers that were."""
        async with connected(self.known_address) as client:
            return await orphans.reap(client, self.cleanup, self._state_dir)
