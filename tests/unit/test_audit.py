"""The audit log: every line bound to the one before, and whatever was changed, moved or taken away is found."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

import belljar
from belljar.backends.fake import Fake
from belljar.core import errors
from belljar.core.request import RunRequest
from belljar.engine import audit
from belljar.engine.audit import Audit, Head
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
    assert (verdict.problems, verdict.torn, verdict.head.number) == ((), 0, 5)
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
    line["hash"] = audit._hash(line)
    return [*lines[:3], json.dumps(line), lines[4]]


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


async def test_a_line_that_a_crash_cut_short_does_not_break_the_chain(tmp_path: Path) -> None:
    log = await filled(tmp_path / "log")
    with log.path.open("a") as file:
        file.write('{"number":6,"at":1,"kind":"requ')
    await log.record("limit", run="bj-after")
    verdict = log.verify()
    assert (verdict.problems, verdict.torn, verdict.head.number) == ((), 1, 6)


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
    path.write_text(path.read_text().replace("bj-1", "bj-7"))
    assert said("verify", "--log", str(path))[0] == 1
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
