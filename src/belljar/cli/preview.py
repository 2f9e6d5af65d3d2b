"""`belljar preview`: a project's server in a sandbox of this machine, seen in a browser, until Ctrl-C."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import anyio.to_thread
import typer

from belljar.cli import options as opt
from belljar.cli import process, terminal
from belljar.core import errors

if TYPE_CHECKING:
    from belljar.preview.server import PreviewServer

_LIFE_SECONDS = 8 * 3600.0
_ENDED = 1  # the exit code when the server has ended by itself
_DRAIN_SECONDS = 0.5  # for the last lines of its output


def preview(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The project's folder.")] = Path(),
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND…]", help="What serves it; found in the project if left out."),
    ] = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="At which it listens inside.")] = 3000,
    here: Annotated[int, typer.Option("--local-port", min=0, max=65535, help="Of this machine; 0: any.")] = 0,
    open_: Annotated[bool, typer.Option("--open", help="Open it in a browser when it runs.")] = False,
    live: Annotated[bool, typer.Option("--live", help="The folder itself, read-only, and no copy of it.")] = False,
    rw: Annotated[bool, typer.Option("--rw", help="The folder itself, and let the guest change it.")] = False,
    api: Annotated[str, typer.Option("--api", metavar="URL", help="The backend that answers /api.")] = "",
    expires: Annotated[str, typer.Option("--expires", metavar="TIME", help="Until it ends.")] = "8h",
    backend: opt.Backend = "auto", memory: opt.Memory = None, cpus: opt.Cpus = None, env: opt.Env = None,
    net: opt.Net = None, packages: opt.Packages = None, image: opt.Image = None, as_json: opt.Json = False,
) -> None:  # fmt: skip
    """Show a project in a browser: its server runs in a sandbox, and is seen at an address of this machine."""
    from belljar.preview.project import usual_command

    folder = path.absolute()
    if not folder.is_dir():
        raise errors.InvalidRequest(f"{path} is no folder", fix="belljar preview DIR")
    words: Any = command[0] if command and len(command) == 1 else command or usual_command(str(folder), port)
    given: dict[str, Any] = {
        "memory": memory, "cpus": cpus, "env": opt.read_env(env) or None, "net": net, "image": image,
        "packages": opt.packages(packages), "expires": terminal.seconds(expires),
        "workspace": str(folder) if live or rw else None, "write": rw or None,
    }  # fmt: skip
    options = {name: value for name, value in given.items() if value is not None}
    shown = _Shown(words, port, None if live or rw else str(folder), api, open_, as_json)
    raise typer.Exit(process.run_async(lambda: shown.run(here, backend, options)))


class _Shown:
    def __init__(
        self, command: str | list[str], port: int, copied: str | None, api: str, opens: bool, as_json: bool
    ) -> None:
        self._command = command
        self._port = port
        self._copied = copied
        self._api = api
        self._opens = opens
        self._json = as_json

    async def run(self, here: int, backend: str, options: dict[str, Any]) -> int:
        """Shows it until it ends, or somebody ends it; returns the exit code."""
        from belljar.preview.backend import ApiBackend
        from belljar.preview.server import PreviewServer
        from belljar.sandbox import AsyncSandbox

        api = ApiBackend.parse(self._api) if self._api else None
        serving = _serving()
        with serving.listening(here) as listener:
            async with AsyncSandbox(
                living=True, type="preview", backend=backend, engine=process.make_engine(), **options
            ) as box:
                server = PreviewServer(box, self._command, self._port, copied=self._copied, backend=api)
                await server.begin()
                async with anyio.create_task_group() as tasks:
                    shown = serving.LocalPreview(server, self._port, listener)
                    url = shown.url
                    tasks.start_soon(shown.serve)
                    self._tell(url, server)
                    tasks.start_soon(self._relay, server)
                    await server.settled.wait()
                    if server.status == "running":
                        await self._opened(url, server)
                        await server.over.wait()
                    with anyio.move_on_after(_DRAIN_SECONDS):
                        await server.heard.wait()
                    tasks.cancel_scope.cancel()
        self._tell(url, server)
        return _ENDED

    async def _opened(self, url: str, server: PreviewServer) -> None:
        self._tell(url, server)
        if self._opens and not await anyio.to_thread.run_sync(webbrowser.open, url):
            terminal.note(f"no browser was found: open {url}")

    async def _relay(self, server: PreviewServer) -> None:
        """Prints what it writes, and what was found in that."""
        seen = 0
        async for chunk in server.output():
            if not self._json:
                terminal.print_guest(chunk.text)
            for found in server.findings[seen:]:
                if self._json:
                    terminal.print_json({"finding": found.model_dump(mode="json")})
                else:
                    terminal.note(f"{found.kind}: {found.message}: {found.suggestion}")
            seen = len(server.findings)

    def _tell(self, url: str, server: PreviewServer) -> None:
        if self._json:
            told = {"url": url, "status": server.status, "port": self._port}
            more = {"reason": server.reason, "suggestion": server.suggestion, "logs": list(server.lines)}
            terminal.print_json(told | (more if server.status == "error" else {}))
        elif server.status == "error":
            terminal.note(f"{server.reason}. {server.suggestion}".rstrip(" ."))
        elif server.status == "running":
            terminal.say(f"it runs: {url}  (Ctrl-C ends it)")
        else:
            terminal.say(f"starting: {url}")


def _serving() -> ModuleType:
    """Returns what serves a preview, where that is installed."""
    try:
        from belljar.preview import serving
    except ImportError as error:
        raise errors.NotAvailable(
            f"previews need a package that is not installed: {error.name}",
            fix="pip install 'belljar-sandbox[service]'",
        ) from None
    return serving
