"""The attacks that take more than one command, or go through what Belljar itself does with names and files."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from belljar import settings
from belljar.backends.base import Backend
from belljar.control.callbacks import Cancel
from belljar.core import errors
from belljar.core.capabilities import Isolation
from belljar.core.result import Result, Status
from belljar.engine.engine import Engine
from belljar.sandbox import AsyncSandbox, arun
from belljar.testing.escape.attacks import PRELUDE
from belljar.testing.escape.bait import Bait

_OF_A_COMMAND = {  # options that a living sandbox leaves to its commands
    "command", "language", "args", "stdin", "collect", "workdir", "files", "env", "timeout", "output", "on_stdout",
    "cancel",
}  # fmt: skip


@dataclass(frozen=True)
class Range:
    """Where an attack takes place: a backend, the bait around it, and the payload made ready for it."""

    backend: str | Backend
    engine: Engine
    bait: Bait
    payload: str
    options: dict[str, Any]
    living: bool = False

    def sandbox(self, **options: Any) -> AsyncSandbox:
        given = {**self.options, **options}
        if self.living:
            given["living"] = True
        return AsyncSandbox(backend=self.backend, engine=self.engine, **given)

    def ready(self, payload: str) -> str:
        """Returns Python code of an attack as it is run."""
        return self.bait.fill(PRELUDE + payload)

    async def run(self, code: str | None = None, **options: Any) -> Result:
        """Runs code, or a command, in a sandbox of its own."""
        if not self.living:
            return await arun(code, backend=self.backend, engine=self.engine, **options)
        own = {name: value for name, value in options.items() if name in _OF_A_COMMAND}
        rest = {name: value for name, value in options.items() if name not in own}
        async with AsyncSandbox(backend=self.backend, engine=self.engine, living=True, **rest) as box:
            if "command" in own:
                return await box.exec(own.pop("command"), **own)
            return await box.run(code, **own)


async def _refused(action: Callable[[], Awaitable[object]]) -> str:
    """Empty if Belljar refused; otherwise what came back."""
    try:
        got = await action()
    except (errors.InvalidRequest, errors.PolicyDenied, OSError):
        return ""
    return repr(got)[:80]


def escaped_by(result: Result, detail: str) -> Result:
    """Returns the result with the verdict that the attack got through."""
    return result.model_copy(update={"stdout": f"ESCAPED {detail}\n"})


_IS_THE_HOSTS_ETC = """
import hashlib
def read():
    text = open("passwd", "rb").read()
    if hashlib.sha256(text).hexdigest() != "@passwd@":
        raise OSError(0, "not the host's")
    return "the host's /etc is the workspace"
refused("read", read)
"""


_READ_INPUT = """
import os
if not os.path.exists("input.txt"):
    os.chdir("/inputs")
print(open("input.txt").read())
"""


async def inputs_of_the_next(range_: Range) -> Result:
    async with range_.sandbox() as box:
        result = await box.run(range_.payload)
        after = await box.run(_READ_INPUT)
    return result if after.stdout == "as it was\n" else escaped_by(result, f"the next command found {after.stdout!r}")


async def sockets_of_engines(range_: Range) -> Result:
    """Those that the settings name, and one of the bait, which stands for an engine's at a place nobody thought of."""
    known = (range_.engine.settings.docker_socket, range_.engine.settings.podman_socket)
    paths = [name.removeprefix("unix://") for name in known if "/" in name] + [range_.bait.words["socket"]]
    return await range_.run(range_.payload, env={"SOCKETS": ":".join(paths)}, **range_.options)


def _of_all(name: str) -> Iterator[str]:
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            yield (entry / name).read_text(errors="replace")


def scores() -> set[int]:
    """The host's processes' own: how willingly the OOM killer takes them."""
    return {int(text) for text in _of_all("oom_score_adj") if text.strip()}


def niceness() -> set[int]:
    return {int(text.rpartition(")")[2].split()[16]) for text in _of_all("stat") if ")" in text}


def _open_devices() -> set[tuple[str, int]]:
    """Which process of the host has which device open."""
    found = set()
    for path in glob.iglob("/proc/[0-9]*/fd/*"):
        with suppress(OSError):
            facts = os.stat(path)
            if stat.S_ISCHR(facts.st_mode):
                found.add((path.split("/")[2], facts.st_rdev))
    return found


async def _unheard_of(range_: Range, env: dict[str, str], heard_of: Callable[[str], bool]) -> Result:
    """What a guest does to a kernel of its own is no escape: if it has one, and the host's never heard of it."""
    cancel, told, heard = Cancel(), [""], list[bool]()

    def hear(text: str) -> None:
        told[0] += text
        if not heard and (staying := re.search(r"^STAYING (.*)\n", told[0], re.MULTILINE)):
            heard.append(heard_of(staying[1]))
            cancel.cancel()

    result = await range_.run(range_.payload, env=env, on_stdout=hear, cancel=cancel, **range_.options)
    if not heard:
        return result
    isolation = result.guarantees.isolation if result.guarantees else Isolation.NAMESPACE
    if heard[0] or isolation.rank < Isolation.KERNEL.rank or result.status is not Status.ABORTED:
        return escaped_by(result, told[0].replace("STAYING", "it worked:"))
    return result.model_copy(update={"stdout": "HELD in a kernel of its own; the host's did not hear of it\n"})


def number_inside(look: Callable[[], set[int]], values: range) -> Callable[[Range], Awaitable[Result]]:
    """Has the guest give itself a number that no process of the host has."""

    async def scenario(range_: Range) -> Result:
        taken = look()
        mark = next((value for value in values if value not in taken), values[0])
        return await _unheard_of(range_, {"MARK": str(mark)}, lambda _: mark in look())

    return scenario


async def devices_inside(range_: Range) -> Result:
    before = _open_devices()

    def heard_of(said: str) -> bool:
        numbers = {int(number) for number in re.findall(r"=(\d+)", said)}
        # Without root nobody sees what others have open.
        return os.geteuid() != 0 or any(number in numbers for _, number in _open_devices() - before)

    return await _unheard_of(range_, {}, heard_of)


async def climbing_names(range_: Range) -> Result:
    name = "../" * 12 + str(range_.bait.folder / "canary").lstrip("/")
    async with range_.sandbox() as box:
        result = await box.run(range_.payload)
        attempts: dict[str, Callable[[], Awaitable[object]]] = {
            "write": lambda: box.write(name, b"x"),
            "write by an absolute name": lambda: box.write(str(range_.bait.drop / "x"), b"x"),
            "write with a NUL": lambda: box.write("a\0b", b"x"),
            "read": lambda: box.read(name),
            "collect": lambda: range_.run(range_.payload, collect=(name,)),
            "files": lambda: range_.run(range_.payload, files={name: b"x"}),
            "workdir": lambda: range_.run(range_.payload, workdir="/workspace/../etc"),
            "workspace": lambda: range_.run(range_.payload, workspace="/tmp/../etc"),
        }
        if range_.living:  # where a command may start in any folder that the sandbox has
            del attempts["workdir"]
        for what, action in attempts.items():
            if came_back := await _refused(action):
                return escaped_by(result, f"{what} was not refused: {came_back}")
    return result


async def write_through_link(range_: Range) -> Result:
    async with range_.sandbox() as box:
        result = await box.run(range_.payload)
        await _refused(lambda: box.write("inbox/planted.txt", b"x"))
    return result


async def read_through_link(range_: Range) -> Result:
    async with range_.sandbox() as box:
        result = await box.run(range_.payload)
        if content := await _refused(lambda: box.read("report.txt")):
            return escaped_by(result, f"read {content}")
    return result


async def files_over_links(range_: Range) -> Result:
    """Whether the second command runs or is refused does not matter: only what the host finds afterwards."""
    async with range_.sandbox() as box:
        result = await box.run(range_.payload)
        for name in ("first.txt", "second.txt", "third/by-folder", "fourth/by-climbing"):
            try:
                await box.run("print(1)", files={name: b"x"})
            except errors.BelljarError:
                continue
    return result


async def granted_link(range_: Range) -> Result:
    """The guest of one run plants a link where the next run's granted folder was."""
    project = range_.bait.drop.parent / "granted"
    project.mkdir()
    project.chmod(0o777)
    result = await range_.run(range_.payload, workspace=str(project), write=True)
    if not (project / "src").is_symlink():
        return result  # links do not leave this backend's sandboxes
    look = range_.bait.fill(PRELUDE + _IS_THE_HOSTS_ETC)
    try:
        return await range_.run(look, workspace=str(project / "src"))
    except errors.BelljarError:
        return result


_TWIST = (
    PRELUDE
    + """
import shutil
os.unlink("file"); os.mkdir("file"); open("file/inside", "w").close()
shutil.rmtree("folder"); open("folder", "w").close()
if os.path.exists("huge"):  # a backend that copies may well have left it out
    os.unlink("huge")
held("twisted")
"""
)


async def twisted_workspace(range_: Range) -> Result:
    """Whoever copies a granted folder back must cope with what became of it: an exception would lose the result."""
    project = range_.bait.drop.parent / "twisted"
    project.mkdir()
    project.chmod(0o777)
    first = await range_.run(range_.payload, workspace=str(project), write=True, disk="32M")
    if not first.ok:
        return first
    return await range_.run(_TWIST, workspace=str(project), write=True, disk="32M")


async def settings_file(range_: Range) -> Result:
    project = range_.bait.drop.parent / "project"
    project.mkdir(exist_ok=True)
    project.chmod(0o777)  # the guest's uid is not ours
    before = settings.load(environ={}, project=range_.bait.drop).caps
    result = await range_.run(range_.payload, workspace=str(project), write=True)
    if not (project / ".belljar.toml").exists():
        return escaped_by(result, "no settings file was written, which proves nothing")
    try:
        after = settings.load(environ={}, project=project).caps
    except errors.InvalidRequest:
        return result
    return result if after == before else escaped_by(result, f"the caps are now {after}")


# In Python, in the parser, the compiler, a C decoder, `repr`, and in taking a deep chain apart.
_STACKS = (
    "def f(): return f()\nf()",
    "eval('(' * 100_000 + ')' * 100_000)",
    "compile('-' * 200_000 + '1', '', 'eval')",
    "import json\njson.loads('[' * 200_000)",
    "kept = []\nfor _ in range(200_000):\n    kept = [kept]\nrepr(kept)",
    "kept = ()\nfor _ in range(400_000):\n    kept = (kept,)\ndel kept",
)


async def exhausted_stack(range_: Range) -> Result:
    ends: list[str] = []
    for code in _STACKS:
        ended = await range_.run(f"import sys\nsys.setrecursionlimit(10**8)\n{code}", **range_.options)
        ends.append(ended.status.value)
        after = await range_.run("print(6 * 7)", **range_.options)
        if after.stdout != "42\n":
            return escaped_by(
                after, f"after {code!r} the next guest does not run: {after.status.value}, {after.stderr}"
            )
    return after.model_copy(update={"stdout": f"HELD the next guest runs after each: {', '.join(ends)}\n"})


def state_for_the_next(look: str) -> Callable[[Range], Awaitable[Result]]:
    """The same backend and limits, one after the other: a worker, if there is one, is met again."""

    async def scenario(range_: Range) -> Result:
        first = await range_.run(range_.payload, **range_.options)
        if "HELD" not in first.stdout:
            return first
        return await range_.run(range_.bait.fill(PRELUDE + look), **range_.options)

    return scenario


async def cancelled_guest(range_: Range) -> Result:
    """The caller goes away (its task is cancelled) while the guest talks; then others come."""
    ready = anyio.Event()

    def hear(text: str) -> None:
        if "READY" in text:
            ready.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: range_.run(range_.payload, on_stdout=hear, **range_.options))
        with anyio.fail_after(20):
            await ready.wait()
        tasks.cancel_scope.cancel()
    for _ in range(2):
        after = await range_.run("print('HELD only mine')", **range_.options)
        if after.stdout != "HELD only mine\n":
            return escaped_by(after, f"the next caller got {after.stdout[:80]!r}, {after.status.value}")
    return after


async def two_at_once(range_: Range) -> Result:
    said: dict[str, Result] = {}

    async def speak(box: AsyncSandbox, word: str) -> None:
        code = f"import time\nfor _ in range(4):\n    print({word!r}, flush=True)\n    time.sleep(0.1)"
        said[word] = await box.run(code)

    async with range_.sandbox() as box, anyio.create_task_group() as tasks:
        for word in ("one", "two"):
            tasks.start_soon(speak, box, word)
    for word, result in said.items():
        if result.stdout != f"{word}\n" * 4:
            return escaped_by(result, f"{word} was told {result.stdout[:60]!r}, {result.status.value}")
    return result.model_copy(update={"stdout": "HELD each got its own\n"})
