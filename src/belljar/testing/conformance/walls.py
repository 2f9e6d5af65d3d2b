"""The plainest of the walls, as a user meets them. Attacks are `belljar.testing.escape`."""

from __future__ import annotations

import tempfile

import anyio
from anyio.abc import SocketAttribute, SocketStream

from belljar.testing.conformance.bench import Bench, check, equal, expect, guest, printed, says, succeeded

# A call that is missing is no network either: WASI has neither connect nor getaddrinfo.
_CONNECT = guest(
    "import os, socket\n"
    "try:\n"
    "    plug = socket.socket(socket.AF_INET, socket.SOCK_STREAM)\n"
    "    plug.settimeout(3)\n"
    "    plug.connect((os.environ['TARGET'], int(os.environ['PORT'])))\n"
    "    print('connected')\n"
    "except (OSError, AttributeError):\n"
    "    print('no way')",
    says("no way\n"),
)
_RESOLVE = guest(
    "import socket\n"
    "try:\n"
    "    print(socket.getaddrinfo('example.org', 443))\n"
    "except (OSError, AttributeError):\n"
    "    print('no way')",
    says("no way\n"),
)


async def _hang_up(connection: SocketStream) -> None:
    await connection.aclose()


@check("network", "a port on the host's loopback cannot be reached")
async def _loopback(bench: Bench) -> None:
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, _hang_up)
        port = listener.extra(SocketAttribute.local_port)
        try:
            printed(await bench.run(_CONNECT, env={"TARGET": "127.0.0.1", "PORT": str(port)}), "no way\n")
        finally:
            tasks.cancel_scope.cancel()


@check("network", "an address of the internet cannot be reached")
async def _internet(bench: Bench) -> None:
    printed(await bench.run(_CONNECT, env={"TARGET": "1.1.1.1", "PORT": "53"}), "no way\n")


@check("network", "no name can be resolved")
async def _names(bench: Bench) -> None:
    printed(await bench.run(_RESOLVE, timeout=40), "no way\n")


_IDENTITY = guest(
    "import ctypes, os\n"
    "status = dict(line.split(':\\t', 1) for line in open('/proc/self/status').read().splitlines() if ':\\t' in line)\n"
    "no_new_privs = ctypes.CDLL(None).prctl(39, 0, 0, 0, 0)  # gVisor's status does not have it\n"
    "print(os.getuid() != 0, os.geteuid() != 0, int(status['CapEff'], 16), no_new_privs)",
    says("True True 0 1\n"),
)


@check("walls", "the guest is not root, has no capability and cannot gain any", "posix")
async def _not_root(bench: Bench) -> None:
    printed(await bench.run(_IDENTITY), "True True 0 1\n")


_WRITE = guest(
    "for path in ('/usr/bin/x', '/etc/x', '/bin/x', '/x', '/dev/x'):\n"
    "    try:\n"
    "        open(path, 'w').write('x')\n"
    "        print('wrote', path)\n"
    "    except OSError:\n"
    "        pass\n"
    "print('done')",
    says("done\n"),
)


@check("walls", "nothing can be written outside the writable folders")
async def _read_only(bench: Bench) -> None:
    printed(await bench.run(_WRITE), "done\n")


_LOOK = guest(
    "import os\npath = os.environ['HOST_FILE']\nprint(os.path.exists(path), os.path.exists(os.path.dirname(path)))",
    says("False False\n"),
)


@check("walls", "a file of the host is not visible")
async def _host_file(bench: Bench) -> None:
    with tempfile.TemporaryDirectory(prefix="belljar-conformance-") as folder:
        path = anyio.Path(folder, "secret.txt")
        await path.write_text("of the host")
        printed(await bench.run(_LOOK, env={"HOST_FILE": str(path)}), "False False\n")


_PROCESSES = guest(
    "import os\nprint(sum(name.isdigit() for name in os.listdir('/proc')) if os.path.isdir('/proc') else 0)",
    says("2\n"),
)


@check("walls", "no process of the host is visible")
async def _processes(bench: Bench) -> None:
    count = int(succeeded(await bench.run(_PROCESSES)).stdout)
    least = 0 if bench.lacks("processes") else 1  # who is a process must at least see itself
    expect(least <= count <= 5, f"the guest sees {count} processes")


_READ = guest(("cat", "hello.txt"), says("from the host"))


@check("walls", "a granted folder is readable, and read-only unless granted otherwise", "workspace", "commands")
async def _grant(bench: Bench) -> None:
    with tempfile.TemporaryDirectory(prefix="belljar-conformance-") as folder:
        await anyio.Path(folder, "hello.txt").write_text("from the host")
        printed(await bench.run(_READ, workspace=folder), "from the host")
        refused = await bench.run(("touch", "made.txt"), workspace=folder)
        written = await bench.run(("touch", "made.txt"), workspace=folder, write=True)
        there = await anyio.Path(folder, "made.txt").exists()
    equal(refused.status, "error", "status of a write to a read-only folder")
    equal((written.status, there), ("success", True), "(status, file there) of a granted write")


@check("walls", "a snippet leaves no litter in a granted folder", "workspace")
async def _litter(bench: Bench) -> None:
    with tempfile.TemporaryDirectory(prefix="belljar-conformance-") as folder:
        await anyio.Path(folder, "mine.txt").write_text("mine")
        succeeded(await bench.run("print(1)", workspace=folder, write=True, files={"given.txt": "x"}))
        names = sorted([path.name async for path in anyio.Path(folder).iterdir()])
    equal(names, ["mine.txt"], "what is in the folder")
