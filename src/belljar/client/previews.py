"""A preview on a server: a project's web app in a sandbox, seen in a browser."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from belljar.client.runs import parse, path_part
from belljar.client.transport import Transport
from belljar.core import errors
from belljar.core.options import StrPath, check_port, check_seconds
from belljar.host import portal
from belljar.protocol.previews import PREVIEW_PORT, PreviewRecord

PREVIEWS = "/api/sandbox/preview"
_OPENING_SECONDS = 180.0  # the project is copied, and its port awaited
_CLOSING_SECONDS = 60.0


class AsyncRemotePreview:
    """A preview on a server: `async with await client.preview("/srv/web", "npm run dev") as preview: preview.url`.

    A block ends it. Without one it lives until `close`, or until its time is over, whatever becomes of this process.
    """

    def __init__(self, transport: Transport, record: PreviewRecord) -> None:
        """Is made by `AsyncClient.preview`."""
        self._transport = transport
        self._record = record

    def __repr__(self) -> str:
        return f"<preview {self.id}, {self.record.status}>"

    @property
    def record(self) -> PreviewRecord:
        """What the server said of it when it was last asked; `refresh` asks again."""
        return self._record

    @property
    def id(self) -> str:
        """Its id, which is that of its sandbox, too."""
        return self._record.container_id

    @property
    def url(self) -> str:
        """Where a browser sees it."""
        return self._record.url

    async def refresh(self) -> PreviewRecord:
        """Asks the server how it is, and returns the answer."""
        self._record = parse(PreviewRecord, await self._transport.ask("GET", f"{PREVIEWS}/{path_part(self.id)}"))
        return self._record

    async def extend(self, seconds: float) -> None:
        """Moves its end to so many seconds from now."""
        check_seconds(seconds=seconds)
        path = f"{PREVIEWS}/{path_part(self.id)}/extend"
        answer = await self._transport.ask("POST", path, again=True, json={"seconds": seconds})
        self._record = parse(PreviewRecord, answer)

    async def close(self) -> None:
        """Ends it: SIGTERM to its command, SIGKILL after its grace. Closing twice does no harm."""
        with suppress(errors.NotFound):
            await self._transport.ask("DELETE", f"{PREVIEWS}/{path_part(self.id)}", read=_CLOSING_SECONDS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class RemotePreview:
    """A preview on a server from blocking code: `with client.preview(...) as preview: preview.url`."""

    def __init__(self, core: AsyncRemotePreview) -> None:
        """Is made by `Client.preview`."""
        self._core = core

    def __repr__(self) -> str:
        return repr(self._core)

    @property
    def record(self) -> PreviewRecord:
        """What the server said of it when it was last asked; `refresh` asks again."""
        return self._core.record

    @property
    def id(self) -> str:
        """Its id, which is that of its sandbox, too."""
        return self._core.id

    @property
    def url(self) -> str:
        """Where a browser sees it."""
        return self._core.url

    def refresh(self) -> PreviewRecord:
        """Asks the server how it is, and returns the answer."""
        return portal.call(self._core.refresh)

    def extend(self, seconds: float) -> None:
        """Moves its end to so many seconds from now."""
        portal.call(self._core.extend, seconds)

    def close(self) -> None:
        """Ends it: see `AsyncRemotePreview.close`."""
        portal.call(self._core.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def started(
    transport: Transport, project_path: StrPath, command: str | Iterable[str], port: int = PREVIEW_PORT, *,
    env: Mapping[str, str] | None = None, live: bool = False, write: bool = False, api: str = "",
    expires: float | None = None, wait: float = 10.0, **more: Any,
) -> AsyncRemotePreview:  # fmt: skip
    """Starts a preview: see `AsyncClient.preview`."""
    check_port(port)
    body: dict[str, Any] = {
        "project_path": str(project_path), "command": command if isinstance(command, str) else list(command),
        "port": port, "environment": dict(env or {}), "live": live, "write": write, "api": api,
        "wait_seconds": wait,
    }  # fmt: skip
    body |= {"expires": expires} if expires is not None else {}
    body |= {name: value for name, value in more.items() if value is not None}
    headers = {"Idempotency-Key": uuid.uuid4().hex}
    answer = await transport.ask(
        "POST", PREVIEWS, again=True, json=body, headers=headers, read=_OPENING_SECONDS + max(0.0, wait)
    )
    return AsyncRemotePreview(transport, parse(PreviewRecord, answer))
