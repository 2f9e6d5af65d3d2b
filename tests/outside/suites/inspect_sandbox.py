"""inspect_ai's checks of a sandbox provider, on a living sandbox of ours. Run by `test_inspect_ai.py`, apart."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from inspect_ai.util import (  # type: ignore[import-not-found]
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUserUnsupportedError,
)
from inspect_ai.util._sandbox.self_check import *  # type: ignore[import-not-found]  # noqa: F403

import belljar

pytestmark = pytest.mark.anyio
CANNOT_EXECUTE = 126
NO_OTHER_USERS = "a living sandbox has one user; a second account needs privileges that no guest gets"


class Provider(SandboxEnvironment):  # type: ignore[misc]
    """What somebody who brings Belljar to inspect_ai would write."""

    def __init__(self, box: belljar.AsyncSandbox) -> None:
        super().__init__()
        self._box = box

    async def exec(
        self, cmd: list[str], input: str | bytes | None = None, cwd: str | None = None,
        env: Mapping[str, str] | None = None, user: str | None = None, timeout: int | None = None, **_: Any,
    ) -> ExecResult:  # fmt: skip
        if user is not None:
            raise SandboxUserUnsupportedError(user)
        result = await self._box.exec(
            cmd, stdin=input, workdir=cwd or ".", env=env or {}, **({"timeout": timeout} if timeout else {})
        )
        if result.status == "timeout":
            raise TimeoutError(result.error and result.error.message)
        if result.exit_code == CANNOT_EXECUTE:
            raise PermissionError(result.stderr)
        code = -1 if result.exit_code is None else result.exit_code
        return ExecResult(code == 0, code, result.stdout, result.stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        await self._box.files.write(file, contents)

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        held = b""
        async with self._box.files.open(file) as pieces:
            async for piece in pieces:
                held += piece
                if len(held) > SandboxEnvironmentLimits.MAX_READ_FILE_SIZE:
                    raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return held.decode() if text else held

    @classmethod
    async def sample_cleanup(cls, *_: Any) -> None:
        """The fixture ends it."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def sandbox_env(request: pytest.FixtureRequest) -> AsyncIterator[Provider]:
    if request.node.originalname == "test_exec_as_user":
        request.applymarker(pytest.mark.xfail(reason=NO_OTHER_USERS, strict=True))
    async with belljar.AsyncSandbox(backend="native", living=True) as box:
        yield Provider(box)
