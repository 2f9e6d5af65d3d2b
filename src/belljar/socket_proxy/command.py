"""The command line of the socket proxy: `belljar socket-proxy`, or `python -m belljar.socket_proxy`."""

from __future__ import annotations

import logging
import signal
import socket
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import anyio
import typer

from belljar.core import errors
from belljar.socket_proxy.rules import MAX_PIDS, ProxyRules

_BACKLOG = 256


def socket_proxy(
    listen: Annotated[str, typer.Option(metavar="unix://PATH")] = "unix:///run/belljar/docker.sock",
    engine: Annotated[str, typer.Option(metavar="PATH", help="The engine's own socket.")] = "/var/run/docker.sock",
    root: Annotated[list[Path] | None, typer.Option(help="A folder of the host that guests may be shown.")] = None,
    network: Annotated[list[str] | None, typer.Option(help="A network of the engine that guests may have.")] = None,
    seccomp: Annotated[list[Path] | None, typer.Option(help="A seccomp profile beside Belljar's own.")] = None,
    images: Annotated[bool, typer.Option("--images", help="Let images be pulled, built and removed.")] = False,
    writable_root: Annotated[
        bool, typer.Option("--writable-root", help="Let guests write to their root (container.read_only_root = false).")
    ] = False,
    max_pids: Annotated[int, typer.Option(min=1, max=2**22, help="Processes that a guest may have.")] = MAX_PIDS,
    mode: Annotated[str, typer.Option(help="Of the socket that is made, in octal.")] = "660",
) -> None:
    """Let only Belljar's own calls through to a container engine."""
    path = Path(listen.removeprefix("unix://"))
    if not listen.startswith("unix:///") or not mode.isdigit() or int(mode, 8) & ~0o660:
        raise errors.InvalidRequest("listen: give unix:///PATH, and a mode up to 660", fix="nobody else may use it")
    if "host" in (network or ()):
        raise errors.InvalidRequest("network: no guest gets the host's own", fix="name another network")
    for profile in seccomp or ():
        if not profile.is_file():
            raise errors.InvalidRequest(f"seccomp: {profile} is not there", fix="check the path")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    rules = ProxyRules(
        engine, tuple(map(str, root or ())), tuple(network or ()), tuple(map(str, seccomp or ())), images,
        writable_root, max_pids,
    )  # fmt: skip
    listener = open_listener(path, int(mode, 8))
    try:
        print(f"listening at {path} for {engine}", flush=True)
        anyio.run(_serve, rules, listener)
    finally:
        listener.close()
        path.unlink(missing_ok=True)


def main() -> None:
    """Runs the proxy as a program of its own; an error of ours is one line, and its own exit code."""
    try:
        typer.run(socket_proxy)
    except errors.BelljarError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None


async def _serve(rules: ProxyRules, listener: socket.socket) -> None:
    from belljar.socket_proxy.proxy import SocketProxy

    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(SocketProxy(rules).serve, listener)
            async for _ in signals:
                tasks.cancel_scope.cancel()


def open_listener(path: Path, mode: int) -> socket.socket:
    """Opens a listening socket that has its mode from the first moment; one that a dead proxy left is taken away.

    Raises:
        InvalidRequest: Something else is at the path, or another proxy listens there.
        NotAvailable: The socket cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise errors.InvalidRequest(f"listen: {path} is there, and is no socket", fix="choose another path")
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(path)) == 0:
                    raise errors.InvalidRequest(f"listen: somebody listens at {path}", fix="is a proxy running?")
            path.unlink()
        listener.bind(str(path))  # nobody can connect before it listens
        path.chmod(mode)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise errors.NotAvailable(f"{path}: {error.strerror}", fix="is the folder there, and ours?") from None
    except errors.BelljarError:
        listener.close()
        raise
    return listener
