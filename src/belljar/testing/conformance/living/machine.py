"""A machine that feels like one: home, user, programs, limits, walls, a granted folder."""

from __future__ import annotations

import tempfile
from pathlib import Path

import anyio
from anyio.abc import SocketAttribute, SocketStream

from belljar.backends.fake import FakeProcess
from belljar.testing.conformance.bench import Bench, check, equal, expect, guest, printed, says, succeeded
from belljar.testing.conformance.living.guests import LASTING, forever, python
from belljar.testing.conformance.living.waiting import SECONDS, done, heard, until

_AREA = "machine"
_LIMITS = "living limits"


async def _play_home(p: FakeProcess) -> None:
    home = p.env["HOME"]
    p.write(f"{home}/.config/app", b"x")
    await p.out(f"{home} {home} {home}\n")


_HOME = guest(
    'mkdir -p ~/.config && touch ~/.config/app && echo "$HOME" ~ "$(getent passwd "$(id -u)" | cut -d: -f6)"',
    _play_home,
)


@check(_AREA, "HOME, ~ and the user's entry are one folder, which can be written to", "living", shared=True)
async def _home(bench: Bench) -> None:
    async with bench.machine() as box:
        printed(await done(box, _HOME), f"{box.home} {box.home} {box.home}\n")
        expect(box.home.startswith("/home/"), f"the home is {box.home}")
        equal(await box.files.exists("~/.config/app"), True, "whether it is there for the caller")


@check(_AREA, "the home is where it was asked to be", "living")
async def _other_home(bench: Bench) -> None:
    async with bench.machine(home="/home/ada") as box:
        equal(box.home, "/home/ada", "the home")
        printed(await done(box, _HOME), "/home/ada /home/ada /home/ada\n")


_USER = guest('echo "$(id -un)" "$USER"; test "$(id -u)" -gt 0 && grep -q "^$USER:" /etc/passwd', says("user user\n"))


@check(_AREA, "its user has a name, and is not root", "living", shared=True)
async def _user(bench: Bench) -> None:
    async with bench.machine() as box:
        names = succeeded(await done(box, _USER)).stdout.split()
        expect(len(names) == 2 and names[0] == names[1], f"id and USER say {names}")


_PYTHONS = guest('python -c "print(1)"; python3 -c "print(3)"; bash -c "python3 -c \'print(4)\'"', says("1\n3\n4\n"))


@check(_AREA, "python is there under both of its names, also in a shell of its own", "living", shared=True)
async def _pythons(bench: Bench) -> None:
    async with bench.machine() as box:
        printed(await done(box, _PYTHONS), "1\n3\n4\n")


_SYSTEM = guest('. /etc/os-release && test -n "$ID" && grep -q "^root:" /etc/passwd && echo known', says("known\n"))


@check(_AREA, "a program can tell which system it is on", "living", shared=True)
async def _system(bench: Bench) -> None:
    async with bench.machine() as box:
        printed(await done(box, _SYSTEM), "known\n")


def _play_install(p: FakeProcess) -> None:
    p.write(f"{p.env['HOME']}/.local/bin/greet", b"#!/bin/sh\necho greeted\n", executable=True)


_INSTALL = guest(
    'mkdir -p ~/.local/bin; printf "#!/bin/sh\\necho greeted\\n" > ~/.local/bin/greet; chmod +x ~/.local/bin/greet',
    _play_install,
)
_GREET, _GREET_BY_NAME = guest("greet", says("greeted\n")), guest(("bash", "-c", "greet"), says("greeted\n"))


@check(_AREA, "what is installed into ~/.local/bin is found by its name", "living", shared=True)
async def _local_bin(bench: Bench) -> None:
    async with bench.machine() as box:
        succeeded(await done(box, _INSTALL))
        printed(await done(box, _GREET), "greeted\n")
        printed(await box.exec(_GREET_BY_NAME), "greeted\n")


_LIBRARY = guest(
    'd=$(python3 -m site --user-site); mkdir -p "$d" && echo "WORD = 42" > "$d/installed.py"',
    lambda p: p.write(f"{p.env['HOME']}/.local/lib/python3/site-packages/installed.py", b"WORD = 42\n"),
)
_IMPORTED = guest("import installed\nprint(installed.WORD)", says("42\n"))


@check(_AREA, "what is installed for Python's user is imported", "living", shared=True)
async def _user_site(bench: Bench) -> None:
    async with bench.machine() as box:
        succeeded(await done(box, _LIBRARY))
        printed(await box.run(_IMPORTED), "42\n")


_LOCALE = guest(
    "import locale, sys\nprint(sys.stdout.encoding.lower(), locale.getpreferredencoding().lower(), 'ü')",
    says("utf-8 utf-8 ü\n"),
)


@check(_AREA, "text is UTF-8", "living", shared=True)
async def _locale(bench: Bench) -> None:
    async with bench.machine() as box:
        printed(await box.run(_LOCALE), "utf-8 utf-8 ü\n")


_PLACES = guest(
    'for d in /workspace /tmp /var/tmp /dev/shm "$HOME"; do echo x > "$d/at" && cat "$d/at"; done; echo > /dev/null',
    says("x\n" * 5),
)


@check(_AREA, "the usual places can be written to", "living")
async def _places(bench: Bench) -> None:
    async with bench.machine() as box:
        printed(await done(box, _PLACES), "x\n" * 5)


_ROOT = python(
    "import os, pwd\n"
    "status = dict(line.split(':\\t', 1) for line in open('/proc/self/status') if ':\\t' in line)\n"
    "print(os.getuid(), pwd.getpwuid(0).pw_dir == os.environ['HOME'], int(status['CapEff'], 16))\n"
    "open('made', 'w').close()\n"
    "print(os.stat('made').st_uid)\n"
    "try:\n"
    "    open('/etc/made', 'w')\n"
    "except OSError:\n"
    "    print('refused')",
    says("0 True 0\n0\nrefused\n"),
)


@check(_AREA, "a user called root is root inside, without a capability, and changes no system", "living", "root")
async def _root(bench: Bench) -> None:
    async with bench.machine(user="root") as box:
        printed(await (await box.start(_ROOT)).wait(SECONDS), "0 True 0\n0\nrefused\n")


# --- walls ---


_IDENTITY = guest(
    "import ctypes, os\n"
    "status = dict(line.split(':\\t', 1) for line in open('/proc/self/status').read().splitlines() if ':\\t' in line)\n"
    "print(os.getuid() != 0, int(status['CapEff'], 16), ctypes.CDLL(None).prctl(39, 0, 0, 0, 0))\n"
    "for path in ('/usr/bin/x', '/etc/x', '/x', '/dev/x'):\n"
    "    try:\n"
    "        open(path, 'w').write('x')\n"
    "        print('wrote', path)\n"
    "    except OSError:\n"
    "        pass",
    says("True 0 1\n"),
)


@check(
    _AREA, "its programs have no capability, gain none, and cannot change the system", "living", "posix", shared=True
)
async def _identity(bench: Bench) -> None:
    async with bench.machine() as box:
        printed(await box.run(_IDENTITY), "True 0 1\n")


_CONNECT = python(
    "import os, socket\n"
    "for host, port in (('127.0.0.1', int(os.environ['PORT'])), ('1.1.1.1', 53)):\n"
    "    try:\n"
    "        socket.create_connection((host, port), 3)\n"
    "        print('connected')\n"
    "    except OSError:\n"
    "        print('no way')",
    says("no way\nno way\n"),
)


async def _hang_up(connection: SocketStream) -> None:
    await connection.aclose()


@check(_AREA, "it reaches neither the host's ports nor the internet", "living", shared=True)
async def _no_network(bench: Bench) -> None:
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, _hang_up)
        port = listener.extra(SocketAttribute.local_port)
        try:
            async with bench.machine() as box:
                process = await box.start(_CONNECT, env={"PORT": str(port)})
                printed(await process.wait(SECONDS), "no way\nno way\n")
        finally:
            tasks.cancel_scope.cancel()


# --- a granted folder ---


_CHANGE = guest("cat given.txt; echo new > made.txt", says())


@check(_AREA, "a granted folder is /workspace, to be read or to be changed", "living", "workspace")
async def _granted(bench: Bench) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "given.txt").write_text("given\n")
        async with bench.machine(workspace=name) as box:
            result = await done(box, _CHANGE)
            equal((result.stdout, result.ok), ("given\n", False), "(stdout, ok)")
        equal((folder / "made.txt").exists(), False, "whether something was written to what may be read only")
        async with bench.machine(workspace=name, write=True) as box:
            printed(await done(box, _CHANGE), "given\n")
            equal(await box.files.read_text("made.txt"), "new\n", "what the caller reads")
            await box.files.write("~/aside", "x")
        equal((folder / "made.txt").read_text(), "new\n", "what was written")
        equal(sorted(one.name for one in folder.iterdir()), ["given.txt", "made.txt"], "what is in the folder")


# --- limits ---


async def _play_memory(p: FakeProcess) -> None:
    p.allocate(int(p.env["MEGABYTES"]) * 2**20)
    await p.out("has it\n")
    await forever(p)


_MEMORY = python(
    "import os, time\ndata = b'x' * (int(os.environ['MEGABYTES']) << 20)\nprint('has it')\ntime.sleep(3600)",
    _play_memory,
)


@check(_LIMITS, "a process over the sandbox' memory is ended, and the others go on", "living", "limit:memory")
async def _out_of_memory(bench: Bench) -> None:
    async with bench.machine(memory="128M") as box:
        other = await box.start(LASTING)
        greedy = await box.start(_MEMORY, env={"MEGABYTES": "400"})
        result = await greedy.wait(SECONDS)
        equal(result.status, "oom_killed", "the status of the one that wanted more")
        expect(other.running, f"the other one is {other!r}")
        modest = await box.start(_MEMORY, env={"MEGABYTES": "20"})
        await heard(modest, "has it")


@check(_LIMITS, "memory is limited for all processes together", "living", "limit:memory")
async def _memory_together(bench: Bench) -> None:
    async with bench.machine(memory="128M") as box:
        small, first = await box.start(LASTING), await box.start(_MEMORY, env={"MEGABYTES": "80"})
        await heard(first, "has it")
        second = await box.start(_MEMORY, env={"MEGABYTES": "80"})

        async def ended() -> bool:
            return not (first.running and second.running)

        await until(ended, "both have what is too much for the sandbox")
        expect(small.running, f"a small one is {small!r}")


async def _play_family(p: FakeProcess) -> None:
    p.spawn(12)
    await p.out("ready\n")
    await forever(p)


_FAMILY = guest("for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 3606 & done; echo ready; wait", _play_family)


async def _play_forks(p: FakeProcess) -> None:
    count = 0
    try:
        for count in range(100):  # noqa: B007
            p.spawn()
    except BlockingIOError:
        await p.out(f"{count}\n")


_FORKS = python(
    "import os, signal\n"
    "children = []\n"
    "try:\n"
    "    for _ in range(100):\n"
    "        child = os.fork()\n"
    "        if child == 0:\n"
    "            signal.pause()\n"
    "        children.append(child)\n"
    "except BlockingIOError:\n"
    "    pass\n"
    "for child in children:\n"
    "    os.kill(child, 9)\n"
    "    os.waitpid(child, 0)\n"
    "print(len(children))",
    _play_forks,
)


@check(
    _LIMITS, "processes are limited for all commands together, and one that is refused goes on", "living", "limit:pids"
)
async def _processes(bench: Bench) -> None:
    async with bench.machine(pids=24) as box:
        alone = int(succeeded(await (await box.start(_FORKS)).wait(SECONDS)).stdout)
        expect(0 < alone <= 24, f"a program alone had {alone} children, and 24 processes are allowed")
        family = await box.start(_FAMILY)
        await heard(family, "ready")
        beside = int(succeeded(await (await box.start(_FORKS)).wait(SECONDS)).stdout)
        expect(0 < beside <= 12, f"beside 13 others it had {beside} children")


def _play_fill(p: FakeProcess) -> None:
    p.write(p.env["FILE"], b"x" * 5_000_000)


_FILL = guest('head -c 5000000 /dev/zero > "$FILE"', _play_fill)


@check(
    _LIMITS,
    "the disk is limited for all commands together, and is free again when files are removed",
    "living",
    "limit:disk",
)
async def _disk(bench: Bench) -> None:
    async with bench.machine(disk="8M") as box:
        succeeded(await done(box, _FILL, env={"FILE": "one"}))
        full = await done(box, _FILL, env={"FILE": "two"})
        expect(not full.ok, f"a second command wrote as much: {full.status}")
        for name in ("one", "two"):
            if await box.files.exists(name):
                await box.files.remove(name)
        succeeded(await done(box, _FILL, env={"FILE": "three"}))


_BUSY = python("import sys\nsys.stdin.read()", forever)


@check(_LIMITS, "a sandbox has no end of time for its commands but its own", "living")
async def _no_timeout(bench: Bench) -> None:
    engine = bench.engine_with(defaults=bench.engine.settings.defaults.model_copy(update={"timeout": 0.5}))
    async with Bench(engine, bench.backend, bench.capabilities, ()).machine() as box:
        process = await box.start(_BUSY)
        await anyio.sleep(1.0)
        expect(process.running, f"it is {process!r}")
