"""The backend `apple`: Apple's `container` on macOS 26, where each sandbox is a Linux machine with its own kernel.

`arguments` holds the walls, `box` a machine and its files, `run` one command from its start to its result, `output`
reads what the program prints. No Mac was at hand: see docs/apple.md for what was tested, and how.
"""

from __future__ import annotations

import base64
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from belljar.backends.apple import arguments, output, ownership
from belljar.backends.apple.box import AppleBox, AppleHost
from belljar.backends.apple.cli import Cli
from belljar.backends.apple.ownership import MachineOwner
from belljar.backends.guest_text import shell_script
from belljar.control.control import Control
from belljar.core import errors, image_name
from belljar.core.capabilities import Capabilities, Guarantees, Isolation, LanguageSupport
from belljar.core.languages import BUILTIN, Language
from belljar.core.plan import Command, Plan
from belljar.core.request import Limits
from belljar.core.settings import PRIVATE_UIDS, UNPRIVILEGED_UIDS
from belljar.core.values import MIB
from belljar.host import ownership as owners
from belljar.host.seccomp import PROFILES
from belljar.images import dockerfile
from belljar.images.build_log import BuildReport

_LEAST_VERSION = (0, 12)  # the first that can take capabilities away
_FOLDERS = ("/usr/local/bin", "/opt/homebrew/bin", "/opt/local/bin")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PULL_SECONDS = 1800.0
_TYPES_STRIPPED = (23, 6)  # from this Node on TypeScript runs as it is
_EXECUTION, _NODE = "execution", "node-execution"
_IMAGES = {_EXECUTION: "python:3.12-slim", _NODE: "node:20-slim"}


class Apple:
    """The backend `apple`."""

    name = "apple"

    def __init__(
        self,
        state_dir: Path,
        *,
        path: str = "/usr/local/bin",
        images: Mapping[str, str] | None = None,
        spoken: Sequence[Language] | None = None,
        first_uid: int = UNPRIVILEGED_UIDS,
        uids: int = PRIVATE_UIDS,
        gid: int | None = None,
        platform: str = sys.platform,
        binary: str = "",
    ) -> None:
        self.state_dir = state_dir
        self._images = _IMAGES | dict(images or {})
        self._languages = tuple(BUILTIN.values() if spoken is None else spoken)
        self._uids = range(first_uid, first_uid + uids)
        self._gid = gid
        self._platform = platform
        self._binary = binary
        self._path = path
        self._owner: MachineOwner | None = None
        self._own_kernel = self._sure = False
        self._filter = ""
        self._named = ""  # the image that `setup` was told of, for a probe where the usual one is missing
        self._programs: dict[str, dict[str, str]] = {}

    # --- what it can do here ---

    async def probe(self) -> Capabilities:
        """Boots a real machine and looks at what really holds in it."""
        setup = ""
        try:
            cli, version = await self._installed()
            image = self.image_for(Plan())
            if self._named and not await self._has(cli, image):
                image = self._named
            if not await self._has(cli, image):
                setup = f"pulling the image {image}"
                raise errors.ImageNotFound(f"the image {image} is not here", fix=f"container image pull {image}")
            await self._prepare(cli)
            guarantees, python = await self._prove(image)
        except errors.BelljarError as error:
            return Capabilities(backend=self.name, available=False, why_not=error.message, fix=error.fix, setup=setup)
        except OSError as error:
            return Capabilities(backend=self.name, available=False, why_not=str(error), fix="run `belljar doctor`")
        return Capabilities(
            backend=self.name, available=True, version=f"container {version}", guarantees=guarantees,
            sessions=frozenset({"python"} if python else ()), workspace=True, images=True, grace=False,
            notes=(
                "granted folders are copied in, and what changed is copied back",
                "in images that have Python our seccomp profile is added, unpromised",
            ),
        )  # fmt: skip

    async def _installed(self) -> tuple[Cli, str]:
        """The program, once it is sure that it can be used: the right system, there, recent, its services running."""
        if self._platform != "darwin":
            raise errors.NotAvailable("apple needs macOS 26 on Apple silicon", fix="use another backend on this system")
        cli = self._cli()
        try:
            said = await cli.call(["--version"], deadline=10)
        except errors.BelljarError as error:
            raise errors.NotAvailable(error.message, fix=output.UPGRADE) from None
        version = output.version(said.text)
        if version < _LEAST_VERSION:
            told = " ".join(said.text.split())[:60] or "unreadable"
            raise errors.NotAvailable(f"{cli.binary} is {told}, and 0.12 or later is needed", fix=output.UPGRADE)
        status = await cli.call(["system", "status", "--format", "json"], deadline=20)
        service = output.service(status.code, status.text)
        if not service.running:
            why = service.words or " ".join(status.words.split())[:200]
            raise errors.NotAvailable(
                f"the services of Apple's container do not run{f' ({why})' if why else ''}",
                fix="container system start",
            )
        words = (await cli.call(["run", "--help"], deadline=10)).text
        if missing := [word for word in arguments.NEEDED if word not in words]:
            raise errors.NotAvailable(f"this container has no option {missing[0]}", fix=output.UPGRADE)
        return cli, ".".join(map(str, version))

    def _cli(self) -> Cli:
        found = self._binary or shutil.which("container", path=os.pathsep.join((self._path, *_FOLDERS)))
        if not found or not os.access(found, os.X_OK):
            raise errors.NotAvailable(
                "Apple's container is not installed", fix="install it from its releases page, or brew install container"
            )
        return Cli(found)

    async def _has(self, cli: Cli, image: str) -> bool:
        return (await cli.call(["image", "inspect", image], limit=4096)).code == 0

    async def setup(self, told: Callable[[str], object], image: str | None = None) -> None:
        """Pulls the image that is named, or else the one that snippets run in; the next probe starts it."""
        cli, _ = await self._installed()
        image = self._named = image or self.image_for(Plan())
        if not await self._has(cli, image):
            told(f"pulling the image {image}")
            said = await cli.call(["image", "pull", image], deadline=_PULL_SECONDS)
            if said.code:
                raise output.failure(said.words, f"the image {image} could not be pulled")

    async def _prove(self, image: str) -> tuple[Guarantees, bool]:
        """Runs a guest that prints what its kernel says of it. What is not seen there is not claimed."""
        self._sure, self._filter = False, ""
        small = Limits(timeout=20, memory=arguments.LEAST_MEMORY, disk=MIB)
        async with self.open(Plan(image=image, limits=small)) as box:
            command = Command(
                argv=("/bin/sh", "-c", shell_script("apple/probe"), "sh", *arguments.TOOLS, "python3"), cwd="/"
            )
            heard = (await box.run(command, _ignore, Control())).stdout
        parts = _parts(heard)
        _require_tools(parts.get("tools", ""))
        walls = _walls(heard, parts)
        own = _boot_id() != parts.get("boot", "").strip() != ""
        self._own_kernel = own
        if own:
            walls.insert(0, "a kernel of its own")
        self._sure, self._filter = "no new privileges" in walls, _filter()
        weaker = [
            "cpus: a machine has whole processors, at least one, so less than one cannot be enforced",
            "disk: each writable folder is in the machine's memory, and at most three eighths of it",
            "io is not limited",
        ]
        if not self._sure:
            weaker.append("a setuid program may change the uid: the image has no setpriv (it gains no capability)")
        if "seccomp filter" not in walls:
            weaker.append("no seccomp filter is promised: system calls reach the guest's own kernel")
        limits = {
            "memory": "memory of the virtual machine", "pids": "rlimit", "cpus": "not limited", "io": "not limited",
            "disk": "tmpfs size", "timeout": "watchdog", "output": "watchdog",
        }  # fmt: skip
        isolation = Isolation.KERNEL if own else Isolation.NAMESPACE
        guarantees = Guarantees(isolation=isolation, walls=tuple(walls), limits=limits, weaker=tuple(weaker))
        return guarantees, "/python3" in parts["tools"]

    # --- languages and images ---

    def image_for(self, plan: Plan) -> str:
        """The image that was asked for, the language's own, or that of its container type."""
        if plan.image:
            return plan.image
        if plan.type:
            return self._images.get(plan.type) or self._no_image(plan.type)
        own = next((one.image for one in self._languages if one.name == plan.language and one.image), "")
        kind = _NODE if plan.language in ("javascript", "typescript") else _EXECUTION
        return self._images.get(plan.language or "") or own or self._images[kind]

    def _no_image(self, kind: str) -> str:
        raise errors.InvalidRequest(
            f"the container type {kind} runs in the project's image, and nobody said which that is",
            fix=f"give image=…, or container.images.{kind} in the settings",
        )

    async def languages(self) -> tuple[LanguageSupport, ...]:
        cli, _ = await self._installed()
        return tuple([await self._support(cli, language) for language in self._languages])

    async def _support(self, cli: Cli, language: Language) -> LanguageSupport:
        image = self.image_for(Plan(language=language.name))
        if image not in self._programs:
            self._programs[image] = await self._look(image) if await self._has(cli, image) else {}
        found = self._programs[image]
        version = found.get(language.program)
        old = language.name == "typescript" and output.version(version or "") < _TYPES_STRIPPED
        if version is None or old:
            fix = f"choose an image that has {language.program} (container.images.{language.name})"
            return LanguageSupport(
                name=language.name, available=False, fix=fix if found else f"container image pull {image}"
            )
        return LanguageSupport(name=language.name, available=True, version=version, program=language.program)

    async def _look(self, image: str) -> dict[str, str]:
        """The languages' programs that an image has, and their versions."""
        programs = sorted({language.program for language in self._languages})
        async with self.open(Plan(image=image, limits=Limits(timeout=30))) as box:
            command = Command(argv=("/bin/sh", "-c", shell_script("apple/program_versions"), "sh", *programs), cwd="/")
            said = (await box.run(command, _ignore, Control())).stdout
        return {name: ".".join(map(str, output.version(rest))) for name, rest in re.findall(r"^(\S+)(.*)$", said, re.M)}

    async def build(
        self, context_dir: str, tag: str, *, file: str = "Dockerfile", memory: int | None = None,
        cpus: float | None = None, told: Callable[[str], object] = lambda line: None,
    ) -> BuildReport:  # fmt: skip
        """Builds a folder, telling each line of progress. A step that fails is a report, not an exception."""
        if not os.path.isdir(context_dir):
            raise errors.InvalidRequest(f"context_dir: {context_dir} is not a folder", fix="check the path")
        name = str(image_name.parse(tag))
        cli, _ = await self._installed()
        began = time.perf_counter()
        context = os.path.abspath(context_dir)  # the program is started in another folder
        file = os.path.join(context, dockerfile.build_file(file))
        words = arguments.build(context, name, file=file, memory_bytes=memory, cpus=cpus)
        said = await cli.follow(words, told, deadline=_PULL_SECONDS)
        spent = round((time.perf_counter() - began) * 1000, 1)
        lines = tuple(line for line in said.words.splitlines() if line.strip())[-20:]
        if said.code:
            code = said.code if said.code > 0 else None
            return BuildReport(
                ok=False, tag=name, exit_code=code, problem=lines[-1] if lines else "container said nothing",
                last_lines=lines, duration_ms=spent,
            )  # fmt: skip
        return BuildReport(ok=True, tag=name, last_lines=lines, duration_ms=spent)

    # --- sandboxes ---

    async def _prepare(self, cli: Cli) -> MachineOwner:
        """Signs in as an owner, once for each process, and clears up after dead ones."""
        if self._owner is None or self._owner.pid != os.getpid():
            owners.prepare(self.state_dir)
            await self._reap(cli)
            self._owner = MachineOwner(self.state_dir)
        return self._owner

    async def reap(self) -> int:
        cli, _ = await self._installed()
        owners.prepare(self.state_dir)
        return await self._reap(cli)

    async def _reap(self, cli: Cli) -> int:
        def dead(found: Sequence[output.ListedMachine]) -> list[str]:
            owned = [one for one in found if arguments.LABEL in one.labels]
            return [one.id for one in owned if ownership.is_dead(one.labels.get(arguments.OWNER, ""), self.state_dir)]

        left = dead(await self._listed(cli))
        if left:
            await cli.call(["delete", "--force", *left], deadline=60)
        stubborn = dead(await self._listed(cli)) if left else []
        if stubborn:
            raise errors.CleanupFailed(
                f"{len(stubborn)} machines of a dead Belljar cannot be removed",
                fix=f"container delete --force {stubborn[0]}",
            )
        ownership.forget_dead(self.state_dir)
        return len(left)

    async def _listed(self, cli: Cli) -> tuple[output.ListedMachine, ...]:
        said = await cli.call(["list", "--all", "--format", "json"], limit=16 * MIB)
        if said.code:
            raise output.failure(said.words, "the machines could not be listed")
        return output.containers(said.text)

    @asynccontextmanager
    async def open(self, plan: Plan) -> AsyncIterator[AppleBox]:
        cli = self._cli()
        if plan.workspace and not os.path.isdir(plan.workspace.path):
            raise errors.InvalidRequest(f"workspace.path: {plan.workspace.path} is not a folder", fix="check the path")
        image = str(image_name.parse(self.image_for(plan)))
        if not await self._has(cli, image):  # `run` would fetch it, whatever the policy on that is
            raise errors.ImageNotFound(f"the image {image} is not here", fix=f"container image pull {image}")
        owner = (await self._prepare(cli)).name
        host = AppleHost(cli, owner, self._uids, self._own_kernel, self._sure, self._filter, self.image_for, self._gid)
        box = AppleBox(host, plan, image)
        async with box.running():
            yield box


async def _ignore(kind: str, text: str) -> None:
    return None


def _parts(said: str) -> dict[str, str]:
    """The answers of `guest/shell/apple/probe.sh` by their headings."""
    pieces = re.split(r"^(boot|devices|routes|root|tools|end):$", said, flags=re.MULTILINE)
    return {"status": pieces[0], **dict(zip(pieces[1::2], pieces[2::2], strict=False))}


def _require_tools(said: str) -> None:
    if missing := [tool for tool in arguments.TOOLS if not re.search(rf"(^|/){tool}$", said, re.MULTILINE)]:
        raise errors.NotAvailable(f"the image has no {missing[0]}", fix="choose one made from Debian or Alpine")


def _walls(said: str, parts: Mapping[str, str]) -> list[str]:
    """What was seen to hold. Without the first four there is no sandbox."""
    routes = [line for line in parts.get("routes", "x\nx").strip().splitlines()[1:] if line.strip()]
    devices = re.findall(r"^\s*(eth|en|wl|veth)\w*:", parts.get("devices", ""), re.MULTILINE)
    required = {
        "no root": re.search(r"^Uid:\s+[1-9]\d*\s+[1-9]", said, re.MULTILINE),
        "no capabilities": re.search(r"^CapEff:\s+0+$", said, re.MULTILINE)
        and re.search(r"^CapBnd:\s+0+$", said, re.MULTILINE),
        "read-only root": re.search(r"Read-only file system", parts.get("root", "")),
        "no network": "lo:" in parts.get("devices", "") and not routes and not devices,
    }
    for wall, held in required.items():
        if not held:
            raise errors.NotAvailable(f"the probe could not prove: {wall}", context={"output": said[:2000]})
    optional = {"no new privileges": r"^NoNewPrivs:\s+1$", "seccomp filter": r"^Seccomp:\s+2$"}
    return [*required, *(wall for wall, pattern in optional.items() if re.search(pattern, said, re.MULTILINE))]


def _filter() -> str:
    """Our seccomp profile for the guests' processor, which is the host's."""
    machine = {"arm64": "aarch64"}.get(platform.machine(), platform.machine())
    path = PROFILES / f"guest.{machine}.bpf"
    return base64.b64encode(path.read_bytes()).decode() if path.is_file() else ""


def _boot_id() -> str | None:
    """Of the host's kernel, if that is Linux: a guest that tells the same one has no kernel of its own."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return None
