"""How a check waits for something of a living sandbox: never for a time, always with a deadline."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import anyio

from belljar.core.result import Result
from belljar.living.process import AsyncProcess
from belljar.sandbox import AsyncSandbox
from belljar.testing.conformance.bench import CheckFailed

SECONDS = 30.0  # that anything may take: other checks, and others, keep the machine busy
_LOOK_SECONDS = 0.05


async def heard(process: AsyncProcess, text: str, since: int = 0) -> str:
    """Waits until a process has printed something, and returns its output up to there."""
    seen = b""
    with anyio.move_on_after(SECONDS):
        async for chunk in process.output(since):
            seen += chunk.data
            if text.encode() in seen:
                return seen.decode("utf-8", "replace")
    raise CheckFailed(f"the output of {process!r} is {seen[-200:]!r}, and should have {text!r}")


async def until(holds: Callable[[], Awaitable[bool]], otherwise: str, seconds: float = SECONDS) -> None:
    """Waits until it holds."""
    with anyio.move_on_after(seconds):
        while True:
            if await holds():
                return
            await anyio.sleep(_LOOK_SECONDS)
    raise CheckFailed(f"{otherwise}, after {seconds:g} seconds")


async def done(box: AsyncSandbox, line: str, *, env: Mapping[str, str] | None = None, cwd: str | None = None) -> Result:
    """Runs a line of shell to its end."""
    process = await box.start(line, env=env, cwd=cwd)
    return await process.wait(SECONDS)


async def commands(box: AsyncSandbox) -> list[str]:
    """The command lines of what runs in a sandbox."""
    return sorted(one.command for one in await box.processes())
