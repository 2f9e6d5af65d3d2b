"""Guests, images and callers that mean harm to what stands around a container: launcher, pool, way out, files."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import belljar
from belljar.backends.containers.backend import Containers
from belljar.control.callbacks import Cancel
from belljar.core.labels import LABEL
from belljar.engine.backends import containers
from belljar.engine.engine import Engine
from belljar.host import files
from belljar.host.docker_api import connected, list_containers
from engines import FLAVOURS, IMAGE, PODMAN_AGAIN, backend_of, engines, nothing_left, run

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.engine,
    pytest.mark.containers,
    pytest.mark.second_try("an engine that is killed, flooded or counted may miss a deadline on a busy machine"),
]
ADDRESS = "127.0.0.78"  # a loopback address that nobody else listens on


@pytest.fixture(params=FLAVOURS)
def engine(request: pytest.FixtureRequest) -> Engine:
    return engines().engine(request.param)


def pooled(flavour: str, **options: Any) -> Engine:
    container = {"runtime": FLAVOURS[flavour][1], "images": {"execution": IMAGE}, "pool": 1} | options
    return engines().engine(flavour, container=container)


async def running(engine: Engine) -> list[str]:
    """The names of our containers that are up, whoever made them."""
    async with connected(backend_of(engine).known_address) as client:
        found = await list_containers(client, label=f"{LABEL}=1", running=True)
    return [str(each["Names"][0]).lstrip("/") for each in found]


async def filled(engine: Engine) -> str:
    """The name of the one that waits, once it is the only one there is."""
    with anyio.move_on_after(60):
        while True:
            pool = backend_of(engine).pool
            names = set(await running(engine))
            if pool and len(names) == 1 and pool.waiting == 1 and names == pool.names:
                return names.pop()
            await anyio.sleep(0.05)
    raise AssertionError(f"not one that waits: {names}")


# --- the launcher ---

FULL = """
import os, time
for fd in (1, 2):
    os.set_blocking(fd, False)
until = time.monotonic() + 0.3
while time.monotonic() < until:
    for fd in (1, 2):
        try: os.write(fd, b'x' * 4096)
        except BlockingIOError: pass
os._exit(3)
"""


async def test_a_guest_that_leaves_its_streams_full_and_non_blocking_keeps_its_exit_code(engine: Engine) -> None:
    async def slowly(_: str) -> None:
        await anyio.sleep(0.03)

    result = await run(engine, FULL, on_stdout=slowly, timeout=15)
    assert (result.status, result.exit_code) == ("error", 3), result.duration_ms


async def test_a_slow_listener_hears_all_that_a_guest_said_before_its_container_ended(engine: Engine) -> None:
    heard: list[str] = []

    async def slowly(text: str) -> None:
        await anyio.sleep(0.1)
        heard.append(text)

    code = (
        "import os, time\nfor n in range(20):\n    os.write(1, b'%d\\n' % n)\n    time.sleep(0.02)\n"
        "os.kill(os.getppid(), 9)\ntime.sleep(60)"
    )
    result = await run(engine, code, on_stdout=slowly, timeout=30)
    assert result.stdout.split() == [str(n) for n in range(20)]
    assert "".join(heard) == result.stdout


# Finds the word in the launcher's memory and says with it that all is over, then goes on for as long as it may.
FORGE = """
import os, re, time
parent = os.getppid()
said = b''
for line in open(f'/proc/{parent}/maps'):
    low, high = (int(word, 16) for word in line.split()[0].split('-'))
    if 'heap' in line or 'stack' in line or line.split()[4] == '0' and 'rw' in line:
        try:
            with open(f'/proc/{parent}/mem', 'rb', 0) as memory:
                memory.seek(low)
                said += memory.read(high - low)
        except (OSError, ValueError, OverflowError): pass
words = set(re.findall(rb'(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])', said))
print(len(words), flush=True)
for word in words:
    os.write(2, word + b' 999\\n')
    os.write(1, word + b'\\n')
while True:
    open('late.txt', 'w').write(str(time.time()))
"""


async def test_a_guest_that_forges_its_end_writes_no_more_into_a_kept_folder(engine: Engine) -> None:
    async with belljar.AsyncSandbox(engine=engine, backend=engine.settings.backend) as box:
        result = await box.run(FORGE, timeout=5)
        if result.stdout.startswith("0") or result.status == "timeout":
            pytest.skip(f"NOTHING was forged here: {result.stdout!r} {result.stderr[-200:]!r}")
        assert result.exit_code is not None
        assert result.exit_code <= 255
        first = await box.read("late.txt")
        assert (await box.run("import time; time.sleep(0.3)")).status == "success"
        assert await box.read("late.txt") == first
    assert await nothing_left(engine)


async def test_a_program_whose_name_looks_like_an_option_is_a_program_that_is_not_there(engine: Engine) -> None:
    result = await belljar.arun(command=["-i"], engine=engine, backend=engine.settings.backend)
    assert (result.exit_code, result.stdout) == (127, "")


# --- what guests leave ---


async def test_names_that_look_like_the_lines_of_a_list_do_not_cost_the_run_its_result(engine: Engine) -> None:
    code = (
        "import os\nfor line in ('x\\n1 f ' + '7' * 200 + ' 5 .', 'x\\n1 f 644 ' + '9' * 200 + ' .'):\n"
        "    os.mkdir(line); open(line + '/forged', 'w')\nopen('true.txt', 'w').write('true')\nprint('done')"
    )
    result = await run(engine, code, collect=["**"])
    assert result.stdout == "done\n"
    assert [file.path for file in result.files if file.content] == ["true.txt"]


async def test_a_forged_size_takes_no_more_out_than_may_be_collected(engine: Engine) -> None:
    code = (
        "import os\nopen('big', 'wb').truncate(40 << 20)\nfake = 'x\\n1 f 644 0 .'\nos.mkdir(fake)\n"
        "for n in range(20):\n    os.link('big', f'link{n}'); open(f'{fake}/link{n}', 'w')"
    )
    result = await run(engine, code, collect=["**"], timeout=60)
    assert result.status == "success", result.stderr
    assert sum(len(file.content) for file in result.files) <= files.MAX_COLLECTED


async def test_more_names_than_may_be_listed_do_not_cost_the_run_its_result() -> None:
    code = (
        "import os\nfor _ in range(15):\n    os.mkdir('d' * 250); os.chdir('d' * 250)\n"
        "for n in range(9000):\n    os.mkdir(f'{n}')\nprint('done')"
    )
    result = await run(engines().engine("docker"), code, collect=["**"], timeout=60)
    assert result.stdout == "done\n", result.stderr
    assert [reason for reason in result.left_out if "the rest was not looked at" in reason]


async def test_a_granted_folder_of_many_files_loses_none_of_them(open_folder: Path) -> None:
    for number in range(files.MAX_ENTRIES + 200):
        (open_folder / f"{number}.txt").write_text("mine")
    grant = {"path": str(open_folder), "write": True}
    result = await run(engines().engine("docker"), "open('new.txt', 'w').write('x')", workspace=grant, timeout=60)
    assert result.status == "success", result.stderr
    assert len(os.listdir(open_folder)) == files.MAX_ENTRIES + 201


# --- the pool ---


async def test_a_run_that_is_stopped_before_it_starts_takes_nothing_from_the_pool() -> None:
    engine = pooled("docker")
    await run(engine, "print('first')")
    waiting = await filled(engine)
    cancel = Cancel()
    cancel.cancel()
    assert (await run(engine, "print('second')", cancel=cancel)).status == "aborted"
    assert await filled(engine) == waiting


async def test_what_waits_in_a_loop_that_was_closed_without_a_word_is_let_go() -> None:
    engine = pooled("docker")

    def once() -> None:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(run(engine, "print(1)"))
        loop.run_until_complete(filled(engine))
        loop.close()

    await anyio.to_thread.run_sync(once)
    [old] = await running(engine)
    await run(engine, "print(2)")
    assert await filled(engine) != old


# How many processes there are, once they are no more than so many, or five seconds later.
COUNT = 'n=50; while set -- /proc/[0-9]*; [ $# -gt "$0" ] && [ $n -gt 0 ]; do n=$((n-1)); sleep 0.1; done; echo $#'


async def test_a_pooled_guest_has_as_many_processes_as_any_other(engine: Engine) -> None:
    async def count(engine: Engine, most: str) -> str:
        words = ["sh", "-c", COUNT, most]
        return (await belljar.arun(command=words, engine=engine, backend=engine.settings.backend)).stdout.strip()

    plain = await count(engine, "99")
    other = pooled("gvisor" if engine.settings.container.runtime else engine.settings.backend)
    await count(other, plain)
    await filled(other)
    assert await count(other, plain) == plain


# --- images ---


@pytest.fixture
async def greedy(engine: Engine) -> AsyncIterator[str]:
    """An image that declares a volume that anyone may write to, and has its health looked after all the time."""
    limits = [{"Name": name, "Soft": 1024, "Hard": 1024} for name in ("nproc", "nofile")]  # Podman's own are too high
    walls = {"NetworkMode": "none", "Ulimits": limits}
    body = {"Image": IMAGE, "Cmd": ["mkdir", "-m", "1777", "/scratch"], "HostConfig": walls}
    changes = ["VOLUME /scratch"]
    if engine.settings.backend == "docker":  # Podman's images know no health
        changes.append('HEALTHCHECK --interval=1s CMD ["true"]')
    async with connected(backend_of(engine).known_address) as client:
        container = await client.containers.create(body)
        try:
            await container.start()
            await container.wait()
            await container.commit(repository="belljar-test/greedy", tag="1", changes=changes, config={})
            yield "belljar-test/greedy:1"
            await client.images.delete("belljar-test/greedy:1", force=True)
        finally:
            await container.delete(force=True, v=True)


async def test_an_image_s_volumes_are_held_by_the_disk_limit_and_nobody_looks_after_its_health(
    engine: Engine, greedy: str
) -> None:
    shown: list[dict[str, Any]] = []

    async def look(_: str) -> None:
        async with connected(backend_of(engine).known_address) as client:
            for each in await client.containers.list(filters={"label": [f"{LABEL}=1"]}):
                shown.append(await each.show())

    code = "import os\nos.write(1, b'up')\nopen('/scratch/big', 'wb').write(bytes(16 << 20))"
    result = await run(engine, code, image=greedy, on_stdout=look, disk="8M")
    assert (result.status, result.stdout) == ("disk_limit", "up"), result.stderr
    assert shown
    assert not [mount for each in shown for mount in each["Mounts"] if mount["Type"] == "volume"]
    assert all((each["Config"].get("Healthcheck") or {}).get("Test") in (None, ["NONE"]) for each in shown)
    assert await nothing_left(engine)


# --- the way out ---


@pytest.fixture
def breaking() -> Iterator[None]:
    """A server on 127.0.0.78:443 that breaks each connection when something was said."""
    server = socket.create_server((ADDRESS, 443))

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.recv(1024)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join(10)


def with_names(flavour: str, state_dir: Path) -> Containers:
    """A backend to which every name is our server."""

    async def resolver(host: str, port: int) -> Sequence[str]:
        return [ADDRESS]

    own = {"state_dir": str(state_dir), "egress": {"private": [f"{ADDRESS}:443"]}}
    settings = engines().engine(flavour, **own).settings
    name = "podman" if flavour == "podman" else "docker"
    return containers(name, settings, resolver=resolver)


BREAK = """
import socket
for _ in range(3):
    s = socket.create_connection(('127.0.0.1', 3128), timeout=20)
    s.sendall(b'CONNECT {name}:443 HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n')
    print(s.recv(100).split()[1].decode(), flush=True)
    try: s.sendall(b'hello'); s.recv(100)
    except OSError: pass
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT checked: only root can listen on port 443 of the loopback")
@pytest.mark.parametrize("flavour", ["docker", "podman"])
async def test_a_tunnel_that_breaks_ends_itself_and_not_the_run(flavour: str, state_dir: Path, breaking: None) -> None:
    backend = with_names(flavour, state_dir)
    result = await belljar.arun(BREAK.format(name="a.example"), backend=backend, net=["a.example"])
    assert (result.status, result.stdout.split()) == ("success", ["200"] * 3), result.stderr


CROWD = """
import os, socket, time
many = []
try:
    for _ in range(900):
        many.append(socket.create_connection(('127.0.0.1', 3128), timeout=2))
except OSError: pass
os.write(1, b'%d' % len(many))
time.sleep(60)
"""


@pytest.mark.parametrize("flavour", ["docker", PODMAN_AGAIN])
async def test_a_crowd_of_connections_takes_few_of_our_descriptors_and_closes_nobody_else_s_door(
    flavour: str, state_dir: Path
) -> None:
    backend = with_names(flavour, state_dir)
    before = len(os.listdir("/proc/self/fd"))
    taken: list[int] = []
    said: list[str] = []

    async def meanwhile(_: str) -> None:
        if taken:  # one number may come in two pieces
            return
        taken.append(len(os.listdir("/proc/self/fd")) - before)
        other = BREAK.format(name="a.example")
        said.append((await belljar.arun(other, backend=backend, net=["b.example"])).stdout)
        cancel.cancel()

    cancel = Cancel()
    result = await belljar.arun(
        CROWD, backend=backend, net=["a.example"], on_stdout=meanwhile, cancel=cancel, timeout=60
    )
    assert result.status == "aborted"
    assert 200 < int(result.stdout) <= 900, result.stderr
    assert said == ["403\n403\n403\n"], "its own list, and not that of its neighbour"
    assert taken[0] < 100
    assert list(state_dir.glob("*.sock")) == []
