"""Container engines by their API: what works here, proved, and boxes to run in. Docker here; Podman is a row of data.

`docker_spec` holds the walls, `docker_box` a sandbox and its files, `docker_run` one command from start to verdict,
`docker_engine` the conversation, `docker_broom` the clearing up.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import anyio
import anyio.lowlevel
import anyio.to_thread

from belljar import errors, languages
from belljar.backends import docker_spec, owner
from belljar.backends.base import Control
from belljar.backends.docker_box import DockerBox, Host
from belljar.backends.docker_broom import Broom, Litter, remove
from belljar.backends.docker_engine import Address, asking, connected, docker_address
from belljar.backends.docker_pool import Pool
from belljar.languages import Language
from belljar.models import MIB, Capabilities, Command, Guarantees, Isolation, LanguageSupport, Limits, Plan
from belljar.settings import Container, Settings

if TYPE_CHECKING:
    from aiodocker import Docker

    from belljar.images import Images

IMAGES = {"execution": "python:3.12-slim", "node-execution": "node:20-slim"}  # the mission's container types
_TYPES = {"python": "execution", "bash": "execution", "javascript": "node-execution"}
_MINIMUM_API = (1, 41)  # Docker 20.10, Podman 4
_SHARED_KERNEL = re.compile(r"runc|crun|youki|io\.containerd\..*")  # not worth a second proof
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "uts")
_VOUCHED = 60.0  # seconds that an image's lock, signature and scan need not be looked at again
_ABANDONED = 3600  # seconds after which a container of an earlier boot is nobody's
_LOOK = (
    "uname -rv; echo uid $(id -u); cat /proc/self/status; ls /sys/class/net /proc/scsi 2>&1; cat /proc/net/dev; "
    "for n in cgroup ipc mnt net pid uts; do echo ns $n $(readlink /proc/self/ns/$n); done; "
    "( : > /usr/belljar-probe ) 2>&1; cat /proc/keys /proc/timer_list 2>/dev/null | head -c 100"
)


def create(settings: Settings) -> Containers:
    return Containers(docker_address(settings.docker_socket), settings)


class Facts(NamedTuple):
    """What an engine says of itself."""

    version: str
    address: Address
    kernel: str
    cgroup: str
    limits: Mapping[str, bool]
    runtimes: tuple[str, ...]
    default: str
    maps_uids: bool
    labelled: bool


class Containers:
    """The backends `docker` and `podman`."""

    def __init__(self, address: Address, settings: Settings) -> None:
        self.name = address.flavour.name
        self._address = address
        self._settings = settings
        self._options: Container = settings.container
        self._vouched: dict[str, tuple[float, str]] = {}  # image -> until when it counts, and its id
        self._languages = {language.name: language for language in languages.load(settings.language_file)}
        self._first_uid = settings.user_uid
        self._facts: Facts | None = None
        self._runtimes: dict[str, Guarantees] = {}
        self._offer: Capabilities | None = None
        self._proved = 0.0
        self._locks: WeakKeyDictionary[Any, anyio.Lock] = WeakKeyDictionary()  # one for each event loop
        self.broom = Broom(address)
        self._ready: Pool | None = None

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
                async with connected(self._address) as client:
                    return await self._probe(client)
        except errors.BelljarError as error:
            absent = error.context.get("absent") and self._settings.images.image_pull_policy != "never"
            setup = f"its image, {error.context['absent']}, must be pulled" if absent else ""
            return Capabilities(backend=self.name, available=False, why_not=error.message, fix=error.fix, setup=setup)
        except (OSError, TimeoutError) as error:
            fix = self._address.flavour.start
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
            sessions=frozenset({"python"}), workspace=True, images=True, runtimes=self._runtimes, notes=tuple(notes),
        )  # fmt: skip

    async def _ask(self, client: Docker) -> Facts:
        flavour = self._address.flavour
        async with asking(f"{self.name} at {self._address}", errors.NotAvailable, seconds=30, fix=flavour.start):
            version = await client.version()
            said: dict[str, Any] = dict(await client.system.info())
            api = tuple(int(part) for part in str(version["ApiVersion"]).split("."))
            kernel, security = str(said.get("KernelVersion", "")), " ".join(map(str, said.get("SecurityOptions") or ()))
            default = os.path.basename(str(said.get("DefaultRuntime") or ""))  # Podman tells its path
            address = self._address._replace(version="v" + ".".join(map(str, api)))
        if api < _MINIMUM_API:
            raise errors.NotAvailable(
                f"{self.name} {version.get('Version')} is too old", fix="Docker 20.10, Podman 4, or later is needed"
            )
        self.broom.address = address
        return Facts(
            version=f"{self.name} {version.get('Version')}", address=address, kernel=kernel,
            cgroup=f"cgroup v{said.get('CgroupVersion', '1')}",
            limits={name: bool(said.get(key)) for name, key in
                    (("memory", "MemoryLimit"), ("pids", "PidsLimit"), ("cpus", "CpuCfsQuota"))},
            runtimes=(default,) if flavour.one_runtime else tuple(said.get("Runtimes") or {}),
            default=default,
            maps_uids=bool(re.search(r"name=(rootless|userns)|rootless", security)), labelled="selinux" in security,
        )  # fmt: skip

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
        plan = Plan(limits=Limits(timeout=30, memory=256 * MIB, disk=MIB), runtime=runtime)
        async with self.open(plan) as box:
            command = Command(argv=("/bin/sh", "-c", _LOOK), cwd="/", files={"probe.txt": b"x"})
            said = (await box.run(command, _ignore, Control())).stdout
        own_kernel = not said.startswith(f"{facts.kernel} ")
        proofs = {
            "a uid that is not root": r"^uid [1-9]\d*$",
            "no capabilities": r"(?s)^CapEff:\s+0+$.*^CapBnd:\s+0+$",
            "read-only root": r"Read-only file system|Permission denied",
            "no new privileges": r"^NoNewPrivs:\s+1$",
            "seccomp filter": r"^Seccomp:\s+2$",
        }
        seen = [wall for wall, pattern in proofs.items() if re.search(pattern, said, re.MULTILINE)]
        # A kernel of its own may not show the last two; it is the wall that they would be.
        for wall in list(proofs)[: 3 if own_kernel else 5]:
            if wall not in seen:
                raise errors.NotAvailable(f"the probe could not prove: {wall}", context={"output": said[:2000]})
        spaces = [] if own_kernel else self._namespaces(facts, said)
        unseen = [wall for wall in proofs if wall not in seen]
        if spaces and "cgroup namespace" not in spaces:
            unseen.append("cgroup namespace")
        return _promise(facts, [*(["a kernel of its own"] if own_kernel else spaces), *seen], own_kernel, unseen)

    def _namespaces(self, facts: Facts, said: str) -> list[str]:
        walls = []
        for name in _NAMESPACES if facts.address.local and os.path.exists("/proc/self/ns") else ():
            outside = f"{name}:[{os.stat(f'/proc/self/ns/{name}').st_ino}]"
            if f"ns {name} {outside}" not in said and f"ns {name} {name}:[" in said:
                walls.append(f"{name} namespace")
            elif name != "cgroup":  # without it a guest can read the names of groups, and no more
                raise errors.NotAvailable(f"the guest was not in a {name} namespace of its own")
        return walls

    async def languages(self) -> tuple[LanguageSupport, ...]:
        """A language is there if its image is."""
        found: list[LanguageSupport] = []
        async with connected(self._address) as client:
            for language in self._languages.values():
                image = self._image_of(language)
                fix = f"set container.images.{language.name} to an image that has it"
                try:
                    if image:
                        await self._require_image(client, image)
                except errors.BelljarError as error:
                    image, fix = "", error.fix
                found.append(LanguageSupport(name=language.name, available=bool(image), program=image, fix=fix))
        return tuple(found)

    def image_for(self, language: str | None) -> str:
        known = self._languages.get(language or "")
        image = self._image_of(known) if known else ""
        return image or self._options.images.get("execution") or IMAGES["execution"]

    def _image_of(self, language: Language) -> str:
        given, kind = self._options.images, _TYPES.get(language.name, "")
        return language.image or given.get(language.name) or given.get(kind) or IMAGES.get(kind, "")

    async def setup(self, told: Callable[[str], object]) -> None:
        """Pulls the image of snippets, by the rules for images."""
        image = self.image_for(None)
        told(f"pulling {image}")
        await self._images().pull(image)

    def _images(self) -> Images:
        from belljar.images import Images

        return Images(self._settings, url=self._address.url)

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

    # --- sandboxes ---

    @asynccontextmanager
    async def open(self, plan: Plan) -> AsyncIterator[DockerBox]:
        async with AsyncExitStack() as stack:
            address = self._facts.address if self._facts else self._address
            client = await stack.enter_async_context(connected(address))
            facts = self._facts = self._facts or await self._ask(client)
            if plan.workspace and not os.path.isdir(plan.workspace.path):
                raise errors.InvalidRequest(
                    f"workspace.path: {plan.workspace.path} is not a folder", fix="check the path"
                )
            uid, copies = await anyio.to_thread.run_sync(self._who, plan, facts, stack.callback)
            runtime = self._runtime(plan)
            own_kernel = not _SHARED_KERNEL.fullmatch(runtime or facts.default)
            host = Host(
                client, address.flavour, self.image_for, self._trusted, runtime, self._owner(), self.broom,
                self._pool(facts), address.local, own_kernel,
                small_buffers=facts.cgroup == "cgroup v1" and address.local and not own_kernel, copies=copies,
            )  # fmt: skip
            box = DockerBox(host, plan, uid)
            if plan.keep_files or box.copies:
                await stack.enter_async_context(box.holding())
            yield box

    def _pool(self, facts: Facts) -> Pool:
        if self._ready is None:
            uids = range(0) if facts.maps_uids else range(self._first_uid, self._first_uid + owner.UIDS)
            self._ready = Pool(facts.address, self.broom, self._options.pool, self._options.pool_idle, uids)
        return self._ready

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
            return docker_spec.PLAIN_GUEST, True
        uid, claim = owner.claim_uid(range(self._first_uid, self._first_uid + owner.UIDS))
        on_close(claim.close)
        return uid, True

    def _owner(self) -> str:
        pid = os.getpid()
        return f"{owner._namespace()}.{pid}.{owner._started(pid)}"

    # --- what is left behind ---

    async def reap(self) -> int:
        async with connected(self._address) as client:
            return await self._reap(client)

    async def _reap(self, client: Docker) -> int:
        """Removes the containers, and then the volumes, whose owner is dead."""
        left, self.broom.left = self.broom.left, []  # what would not go earlier; the engine may have been restarted
        for litter in left:
            self.broom.take(litter)
        filters = {"label": [f"{docker_spec.LABEL}=1"]}
        async with asking("the list of containers"):
            containers = [each._container for each in await client.containers.list(all=True, filters=filters)]
            volumes = (await client.volumes.list(filters=filters)).get("Volumes") or []  # type: ignore[no-untyped-call]
        dead = [
            str(each["Id"]) for each in containers if _is_orphan(each.get("Labels"), each.get("State") == "running")
        ]
        folders = [str(each["Name"]) for each in volumes if _is_orphan(each.get("Labels"), False)]
        async with anyio.create_task_group() as tasks:
            for each in dead:
                tasks.start_soon(remove, client, Litter([each]))
        await remove(client, Litter((), folders))
        return len(dead)


def _is_orphan(labels: Mapping[str, str] | None, running: bool) -> bool:
    labels = labels or {}
    if labels.get(f"{docker_spec.LABEL}.boot") == docker_spec.boot():
        return owner.is_dead(labels.get(f"{docker_spec.LABEL}.owner", ""))
    made = labels.get(f"{docker_spec.LABEL}.created", "")
    return not running and made.isdigit() and time.time() - int(made) > _ABANDONED


def _promise(facts: Facts, walls: Sequence[str], own_kernel: bool, unseen: Sequence[str]) -> Guarantees:
    limits = {name: facts.cgroup if given else "not limited" for name, given in facts.limits.items()}
    limits |= {"io": "not limited", "disk": "tmpfs size", "timeout": "watchdog", "output": "watchdog"}
    if own_kernel:
        limits["pids"] = "rlimit inside, and a wider one around"
    weaker = [f"{name} is not limited" for name, how in limits.items() if how == "not limited"]
    return Guarantees(
        isolation=Isolation.KERNEL if own_kernel else Isolation.NAMESPACE, walls=tuple(walls), limits=limits,
        network="none", weaker=(*weaker, *(f"not seen by the probe: {wall}" for wall in unseen)),
    )  # fmt: skip


async def _ignore(kind: str, text: str) -> None:
    return None
