"""The audit log: every line bound to the one before, and whatever was changed, moved or taken away is found."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from hypothesis import given
from hypothesis import strategies as st

import belljar
from belljar.backends.fake import Fake
from belljar.core import errors
from belljar.core.request import RunRequest
from belljar.engine import audit, audit_chain
from belljar.engine.audit import Audit
from belljar.engine.audit_chain import AuditReport, Head
from belljar.engine.engine import Engine
from belljar.settings import load
from belljar.testing.conformance import scripts

pytestmark = pytest.mark.anyio


async def filled(path: Path, lines: int = 5) -> Audit:
    log = Audit(path)
    for number in range(lines):
        await log.record("limit", run=f"bj-{number}", message="größer")
    return log


async def test_a_log_that_nobody_touched_is_whole_and_tells_its_head(tmp_path: Path) -> None:
    log = await filled(tmp_path / "log")
    verdict = log.verify()
    assert (verdict.problems, verdict.torn, verdict.head.number) == ((), False, 5)
    assert [line["run"] for line in log.lines()] == [f"bj-{number}" for number in range(5)]
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0
    assert log.verify(Head.parse(str(verdict.head))).problems == ()


def change_a_word(lines: list[str]) -> list[str]:
    return [lines[0], lines[1].replace("bj-1", "bj-9"), *lines[2:]]


def take_one_out(lines: list[str]) -> list[str]:
    return [*lines[:2], *lines[3:]]


def swap_two(lines: list[str]) -> list[str]:
    return [lines[1], lines[0], *lines[2:]]


def cut_the_end(lines: list[str]) -> list[str]:
    return lines[:-2]


def cut_the_beginning(lines: list[str]) -> list[str]:
    return lines[1:]


def put_one_in(lines: list[str]) -> list[str]:
    made_up = json.loads(lines[1]) | {"run": "bj-forged"}
    made_up["hash"] = hashlib.sha256(b"?").hexdigest()
    return [*lines[:2], json.dumps(made_up), *lines[2:]]


def change_and_hash_anew(lines: list[str]) -> list[str]:
    line = json.loads(lines[3]) | {"run": "bj-9"}
    del line["hash"]
    return [*lines[:3], audit_chain._written(line)[0].decode().rstrip("\n"), lines[4]]


@pytest.mark.parametrize(
    "attack",
    [change_a_word, take_one_out, swap_two, cut_the_end, cut_the_beginning, put_one_in, change_and_hash_anew],
)
async def test_what_was_changed_is_found(attack: Callable[[list[str]], list[str]], tmp_path: Path) -> None:
    log = await filled(tmp_path / "log")
    log.path.write_text("\n".join(attack(log.path.read_text().splitlines())) + "\n")
    assert log.verify().problems


async def test_a_history_made_up_anew_is_found_by_a_head_that_was_kept_elsewhere(tmp_path: Path) -> None:
    kept = (await filled(tmp_path / "log")).verify().head
    for name in ("log", "log.head"):
        (tmp_path / name).unlink()
    log = await filled(tmp_path / "log", lines=6)
    assert log.verify().problems == (), "nothing inside tells"
    assert log.verify(kept).problems == ("line number 5 is not what it was when its head was kept",)


async def test_a_log_that_is_gone_while_its_head_is_there_is_missing(tmp_path: Path) -> None:
    log = await filled(tmp_path / "log")
    log.path.unlink()
    assert log.verify().problems == ("5 lines are missing at the end",)


async def test_a_line_that_a_crash_cut_short_is_told_of_and_does_not_break_the_chain(tmp_path: Path) -> None:
    log = await filled(tmp_path / "log")
    with log.path.open("a") as file:
        file.write('{"number":6,"at":1,"kind":"requ')
    verdict = log.verify()
    assert (verdict.problems, verdict.torn, verdict.head.number) == ((), True, 5)
    await log.record("limit", run="bj-after")
    verdict = log.verify()
    assert (verdict.problems, verdict.torn, verdict.head.number) == ((), False, 7)
    resumed = list(log.lines())[5]
    assert (resumed["kind"], resumed["torn_bytes"], resumed["head"][:2]) == ("resumed", 31, "5:")


async def test_a_crash_between_a_line_and_its_head_is_told_of_and_is_no_problem(tmp_path: Path) -> None:
    log = await filled(tmp_path / "log", 4)
    head = (tmp_path / "log.head").read_bytes()
    await log.record("limit", run="bj-4")
    (tmp_path / "log.head").write_bytes(head)
    verdict = log.verify()
    assert (verdict.problems, verdict.unconfirmed, verdict.head.number) == ((), True, 5)
    await log.record("limit", run="bj-5")
    verdict = log.verify()
    assert (verdict.problems, verdict.unconfirmed, verdict.head.number) == ((), False, 7)
    assert [line["kind"] for line in log.lines()][5] == "resumed"


async def test_a_last_line_that_lacks_only_its_end_is_reported(tmp_path: Path) -> None:
    log = await filled(tmp_path / "log")
    log.path.write_bytes(log.path.read_bytes()[:-1])
    assert log.verify().problems == ("line 5: it was changed, or its end is missing",)


# --- a hostile hand ---

LINES = 6


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log that nobody touched; tests change copies of it."""
    path = tmp_path_factory.mktemp("audit") / "log"
    anyio.run(filled, path, LINES)
    return path


def changed(genuine: Path, content: bytes, head: bytes | None = None) -> AuditReport:
    """What `verify` says of other bytes in the place of a log, beside its own head or another one."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "log").write_bytes(content)
        (Path(folder) / "log.head").write_bytes(genuine.with_name("log.head").read_bytes() if head is None else head)
        return Audit(Path(folder) / "log").verify()


@given(data=st.data())
def test_whatever_bytes_are_changed_is_found(genuine: Path, data: st.DataObject) -> None:
    before = genuine.read_bytes()
    start = data.draw(st.integers(0, len(before)), label="start")
    end = data.draw(st.one_of(st.integers(start, len(before)), st.just(start), st.just(start + 1)), label="end")
    piece = data.draw(st.one_of(st.binary(max_size=40), st.sampled_from(before.split(b","))), label="piece")
    after = before[:start] + piece + before[end:]
    report = changed(genuine, after)
    if after == before:
        assert (report.problems, report.torn) == ((), False)
    elif after.startswith(before):  # words without an end after the last line are what a crash leaves
        assert report.problems or report.torn
    else:
        assert report.problems


@given(data=st.data())
def test_a_torn_end_hides_no_change_of_what_comes_before_it(genuine: Path, data: st.DataObject) -> None:
    whole = genuine.read_bytes()
    torn = data.draw(st.sampled_from(whole.splitlines()).flatmap(lambda line: st.just(line[: len(line) // 2])))
    place = data.draw(st.integers(0, len(whole) - 1), label="place")
    other = data.draw(st.integers(0, 255).filter(lambda byte: byte != whole[place]), label="byte")
    assert changed(genuine, whole + torn) == (Head.parse(genuine.with_name("log.head").read_text()), (), True, False)
    assert changed(genuine, whole[:place] + bytes([other]) + whole[place + 1 :] + torn).problems


def without_hash(lines: list[bytes]) -> list[bytes]:
    return [*lines, b'{"number":7,"kind":"requested","run":"bj-forged"}\n']


def without_hash_or_end(lines: list[bytes]) -> list[bytes]:
    return [*lines, b'{"number":7,"kind":"requested","run":"bj-forged"}']


def with_a_key_twice(lines: list[bytes]) -> list[bytes]:
    return [*lines[:2], lines[2].replace(b"{", b'{"run":"bj-forged",', 1), *lines[3:]]


def in_another_order(lines: list[bytes]) -> list[bytes]:
    turned = dict(reversed(json.loads(lines[2]).items()))
    return [*lines[:2], json.dumps(turned, separators=(",", ":")).encode() + b"\n", *lines[3:]]


def with_spaces(lines: list[bytes]) -> list[bytes]:
    return [*lines[:2], lines[2].replace(b":", b": ", 1), *lines[3:]]


def with_words_between(lines: list[bytes]) -> list[bytes]:
    return [*lines[:2], b'{"number":3,"kind":"requ\n', *lines[2:]]


def with_empty_lines(lines: list[bytes]) -> list[bytes]:
    return [*lines, b"\n"]


def with_made_up_lines(lines: list[bytes]) -> list[bytes]:
    seventh, head = audit_chain.sealed(audit_chain.head_of(lines[-1]) or Head(), {"kind": "requested"})
    return [*lines, seventh, audit_chain.sealed(head, {"kind": "finished"})[0]]


@pytest.mark.parametrize(
    "attack",
    [
        without_hash, without_hash_or_end, with_a_key_twice, in_another_order, with_spaces, with_words_between,
        with_empty_lines, with_made_up_lines,
    ],
)  # fmt: skip
def test_what_looks_like_a_line_and_was_not_written_so_is_found(
    attack: Callable[[list[bytes]], list[bytes]], genuine: Path
) -> None:
    lines = genuine.read_bytes().splitlines(keepends=True)
    report = changed(genuine, b"".join(attack(lines)))
    assert report.problems
    assert not report.torn


@pytest.mark.parametrize("head", [b"", b"\n", b"5", b"6:abc", "٦:".encode() + b"0" * 64])
def test_a_head_that_cannot_be_read_is_reported(head: bytes, genuine: Path) -> None:
    lines = genuine.read_bytes().splitlines(keepends=True)
    assert changed(genuine, b"".join(lines), head).problems
    assert changed(genuine, b"".join(lines[:-2]), head).problems


@pytest.mark.parametrize("head", [None, b""])
async def test_a_cut_end_is_found_after_the_head_was_taken_and_more_was_recorded(
    head: bytes | None, tmp_path: Path
) -> None:
    log = await filled(tmp_path / "log")
    log.path.write_bytes(b"".join(log.path.read_bytes().splitlines(keepends=True)[:3]))
    (tmp_path / "log.head").unlink() if head is None else (tmp_path / "log.head").write_bytes(head)
    assert "head is missing" in log.verify().problems[0]
    await log.record("limit", run="bj-9")
    await log.record("limit", run="bj-10")
    [problem] = log.verify().problems
    assert problem.startswith("line 4: when it was written the head was missing")


async def test_several_processes_write_one_log(tmp_path: Path) -> None:
    code = (
        "import sys, anyio\nfrom belljar.engine.audit import Audit\n"
        "async def main():\n    for n in range(20): await Audit(sys.argv[1]).record('limit', run=f'bj-{n}')\n"
        "anyio.run(main)"
    )
    line = [sys.executable, "-c", code, str(tmp_path / "log")]
    writers = [subprocess.Popen(line) for _ in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    verdict = Audit(tmp_path / "log").verify()
    assert (verdict.problems, verdict.head.number) == ((), 60)


# --- with the engine ---


def engine(path: Path) -> Engine:
    return Engine(load(audit_log=str(path)), extra=(Fake(scripts()),))


async def test_a_run_is_recorded_from_its_request_to_its_end_without_its_secrets(tmp_path: Path) -> None:
    path = tmp_path / "log"
    request = RunRequest(command=("echo", "very secret"), backend="fake", env={"TOKEN": "secret too"})
    await engine(path).run(request)
    lines = list(Audit(path).lines())
    assert [line["kind"] for line in lines] == ["created", "requested", "finished", "destroyed"]
    asked = lines[1]
    assert asked["sha256"] == hashlib.sha256(b"echo\0very secret").hexdigest()
    assert (asked["program"], asked["env"], asked["limits"]["memory"]) == ("echo", ["TOKEN"], 512 * 2**20)
    assert asked["caller"]
    assert lines[2]["status"] in ("success", "error")
    assert len({line["run"] for line in lines}) == 1
    assert "secret" not in path.read_text()


async def test_a_refusal_is_recorded_with_who_asked(tmp_path: Path) -> None:
    path = tmp_path / "log"
    token = audit.caller.set("key:ci")
    try:
        with pytest.raises(errors.PolicyDenied):
            await belljar.arun("print(1)", engine=engine(path), backend="fake", memory="9000G")
    finally:
        audit.caller.reset(token)
    [line] = Audit(path).lines()
    assert (line["kind"], line["caller"], line["language"]) == ("refused", "key:ci", "python")
    assert "over the cap" in line["message"]


async def test_without_a_record_nothing_is_run(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    fake = Fake(scripts())
    unwritable = Engine(load(audit_log=str(tmp_path / "folder")), extra=(fake,))
    ran: list[str] = []
    with pytest.raises(errors.NotAvailable, match="audit log"):
        await unwritable.run(
            RunRequest(command=("echo", "x"), backend="fake"), listener=lambda event: ran.append(event.kind)
        )
    assert ran == []


@pytest.mark.skipif(os.geteuid() != 0, reason="a full disk is made with a small tmpfs, which only root can mount")
async def test_a_full_disk_stops_the_next_run_and_costs_no_result(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], check=True)
    try:
        log = await filled(tmp_path / "log", 2)
        with (tmp_path / "ballast").open("wb") as file, pytest.raises(OSError, match="No space"):
            while True:
                os.write(file.fileno(), b"x" * 4096)
        with pytest.raises(errors.NotAvailable, match="make room"):
            for _ in range(50):
                await log.record("limit", run="bj-x")
        (tmp_path / "ballast").unlink()
        await log.record("limit", run="bj-after")
        assert log.verify().problems == ()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_the_command_verifies_shows_and_exports(tmp_path: Path) -> None:
    path = tmp_path / "log"
    anyio.run(filled, path)
    base = [sys.executable, "-m", "belljar", "audit"]

    def said(*words: str) -> tuple[int, str]:
        done = subprocess.run([*base, *words], capture_output=True, text=True, check=False, timeout=60)
        return done.returncode, done.stdout + done.stderr

    code, text = said("verify", "--log", str(path))
    assert (code, "5 lines, none changed, none missing" in text) == (0, True)
    assert json.loads(said("show", "--log", str(path), "--json", "--run", "bj-3")[1])[0]["run"] == "bj-3"
    assert said("export", "--log", str(path))[1] == path.read_text()
    moved = json.loads(said("rotate", "--log", str(path), "--json")[1])["moved_to"]
    assert said("verify", "--log", str(path))[0] == 0, "right after it was rotated there is no file of that name"
    Path(moved).rename(path)
    path.write_text(path.read_text().replace("bj-1", "bj-7"))
    assert said("verify", "--log", str(path))[0] == 1
    code, text = said("show", "--log", str(path), "--run", "bj-3")
    assert code == 0
    assert "NOT VERIFIED (it was changed): {" in text, "a changed line is shown whatever run it says it is of"
    assert text.count("bj-3") == 1
    marks = json.loads(subprocess.run([*base, "show", "--log", str(path), "--json"], stdout=-1, check=True).stdout)
    assert [line["verified"] for line in marks] == [True, False, True, True, True]
    assert said("verify", "--log", str(tmp_path / "none"))[0] == 125


async def test_what_was_cut_off_is_found_even_after_more_was_recorded(tmp_path: Path) -> None:
    log = await filled(tmp_path / "log")
    lines = (tmp_path / "log").read_text().splitlines(keepends=True)
    (tmp_path / "log").write_text("".join(lines[:3]))
    await log.record("limit", run="bj-9")
    assert log.verify().problems
    (tmp_path / "log").unlink()
    await log.record("limit", run="bj-10")
    assert log.verify().problems


async def test_a_log_that_was_rotated_is_one_chain_and_a_part_that_is_missing_is_found(tmp_path: Path) -> None:
    log = await filled(tmp_path / "log")
    old = log.rotate()
    assert old is not None
    await log.record("limit", run="bj-5")
    assert log.rotate() is not None
    assert log.rotate() is None
    await log.record("limit", run="bj-6")
    verdict = log.verify()
    assert (verdict.problems, verdict.head.number) == ((), 7)
    assert [line["run"] for line in log.lines()] == [f"bj-{number}" for number in range(7)]
    old.unlink()
    assert log.verify().problems


async def test_a_log_is_rotated_while_it_is_written_and_no_line_is_lost(tmp_path: Path) -> None:
    log = Audit(tmp_path / "log")
    async with anyio.create_task_group() as tasks:
        for number in range(40):
            tasks.start_soon(lambda number=number: log.record("limit", run=f"bj-{number}"))
            if number % 10 == 5:
                tasks.start_soon(anyio.to_thread.run_sync, log.rotate)
    verdict = log.verify()
    assert (verdict.problems, verdict.head.number) == ((), 40)
