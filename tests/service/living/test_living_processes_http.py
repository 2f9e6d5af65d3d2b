"""Processes of living sandboxes over HTTP and WebSocket: started, fed, heard, signalled, and left running."""

from __future__ import annotations

import base64
from itertools import islice

import pytest

from boxes import OpenBox
from watching import Refused
from witness import eventually

pytestmark = pytest.mark.engine


def test_a_process_is_started_fed_heard_and_waited_for(box: OpenBox) -> None:
    id = box.start("while read line; do echo got $line; done; echo end >&2; exit 3", labels={"role": "server"})
    assert box.post(f"processes/{id}/stdin").json() == {"written": 0}
    assert box.http.post(f"{box.path}/processes/{id}/stdin", content=b"one\ntwo\n").json() == {"written": 8}
    box.said(id, "got two")
    assert box.get(f"processes/{id}/wait", timeout=0).json()["state"] == "running"
    assert box.delete(f"processes/{id}/stdin").status_code == 204
    told = box.ended(id)
    assert (told["state"], told["exit_code"], told["result"]["stderr"]) == ("ended", 3, "end\n")
    broken = box.http.post(f"{box.path}/processes/{id}/stdin", content=b"more")
    assert (broken.status_code, broken.json()["context"]["errno"]) == (422, "EPIPE")
    assert [one["id"] for one in box.get("processes", label="role:server").json()] == [id]
    assert box.get("processes", label="role:client").json() == []


def test_output_comes_page_by_page_in_order_and_bytes_stay_what_they_are(box: OpenBox) -> None:
    id = box.start(["sh", "-c", r"printf '\377\000x'; read x; echo err >&2; read x; echo out"])
    for count in (1, 2):
        assert eventually(lambda count=count: box.process(id)["last"] == count, 30)
        box.http.post(f"{box.path}/processes/{id}/stdin", content=b"\n")
    assert box.ended(id)["state"] == "ended"
    heard, since = [], 0
    while True:
        page = box.get(f"processes/{id}/output", since=since, limit=1).json()
        heard += page["chunks"]
        if page["over"]:
            break
        assert len(page["chunks"]) == 1, page
        since = page["chunks"][-1]["seq"]
    assert base64.b64decode(heard[0]["data"]["base64"]) == b"\xff\x00x"
    assert [(chunk["stream"], chunk["data"]) for chunk in heard[1:]] == [("stderr", "err\n"), ("stdout", "out\n")]
    assert [chunk["seq"] for chunk in heard] == [1, 2, 3] and page["last"] == 3


def test_signals_and_kill_end_it_and_its_children(box: OpenBox) -> None:
    id = box.start("trap 'echo asked; exit 7' TERM; echo ready; while true; do sleep 0.05; done")
    box.said(id, "ready")
    assert box.post(f"processes/{id}/signal", {"signal": "TERM"}).json() == {"sent": True}
    assert box.ended(id)["exit_code"] == 7
    assert box.post(f"processes/{id}/signal", {"signal": 9}).json() == {"sent": False}
    stubborn = box.start("trap '' TERM; sleep 1000 & echo ready; wait; sleep 1000")
    box.said(stubborn, "ready")
    assert any("sleep 1000" in one["command"] for one in box.get("ps").json())
    assert box.post(f"processes/{stubborn}/kill").json()["state"] == "ended"
    assert eventually(lambda: not any("sleep 1000" in one["command"] for one in box.get("ps").json()), 10)


def test_what_makes_no_sense_is_refused_by_name(box: OpenBox) -> None:
    for body, field in (
        ({"command": ""}, "command"), ({"command": "x", "id": "bj-1"}, "id"),
        ({"command": "x", "pty": {"rows": 0}}, "rows"),
        ({"command": "x", "cwd": "/none"}, "cwd"), ({"command": "x", "timeout_seconds": 0}, "timeout_seconds"),
    ):  # fmt: skip
        refused = box.post("processes", body)
        assert refused.status_code == 422 and field in refused.json()["detail"], refused.text
    over_cap = box.post("processes", {"command": "x", "timeout_seconds": 61})
    assert (over_cap.status_code, over_cap.json()["kind"]) == (403, "policy_denied")
    id = box.start("sleep 100", id="mine")
    assert box.post("processes", {"command": "x", "id": "mine"}).status_code == 422
    assert box.post(f"processes/{id}/signal", {"signal": "NONE"}).status_code == 422
    assert box.post(f"processes/{id}/resize", {"columns": 80, "rows": 24}).status_code == 422, "it has no terminal"
    assert box.get("processes/other").status_code == 404


def test_a_process_has_no_time_limit_but_the_one_it_is_given(box: OpenBox) -> None:
    limited = box.start("sleep 1000", timeout_seconds=0.3)
    free = box.start("sleep 1000")
    assert box.ended(limited)["status"] == "timeout"
    assert box.process(free)["state"] == "running"


def test_a_reader_joins_late_hears_all_and_leaves_the_process_running(box: OpenBox) -> None:
    id = box.start("echo first; read x; echo second")
    box.said(id, "first")
    with box.attach(f"processes/{id}/output?since=0") as one, box.attach(f"processes/{id}/output?since=1") as two:
        assert one.until(lambda told: "seq" in told) == {"seq": 1, "stream": "stdout", "data": "first\n", "missed": 0}
        one.hang_up()
        box.http.post(f"{box.path}/processes/{id}/stdin", content=b"\n")
        told = list(two.messages())
    assert [one["data"] for one in told[:-1] if isinstance(one, dict)] == ["second\n"]
    assert isinstance(told[-1], dict) and told[-1]["ended"]["exit_code"] == 0
    assert two.end and two.end[0] == 1000


def test_a_terminal_carries_keys_sizes_and_output_over_one_connection(box: OpenBox) -> None:
    id = box.start("exec sh", pty={"columns": 80, "rows": 24}, environment={"PS1": "$ "})
    with box.attach(f"processes/{id}/terminal") as terminal:
        terminal.send({"resize": [120, 40]})
        terminal.send(b"stty size\n")
        terminal.bytes_until(b"40 120")
        terminal.send(b"sh -c 'echo its $((6 * 6)); exec sleep 1000'\n")
        terminal.bytes_until(b"its 36")  # until then Ctrl-C would be the shell's own
        terminal.send(b"\x03")
        terminal.send(b"echo back $((6 * 7))\n")
        terminal.bytes_until(b"back 42")
        terminal.cut()
    assert box.process(id)["state"] == "running", "who goes away ends nothing"
    with box.attach(f"processes/{id}/terminal?since=0") as terminal:
        terminal.bytes_until(b"back 42")
        terminal.send({"eof": True})
        told = terminal.until(lambda told: isinstance(told, dict) and "ended" in told)
    assert isinstance(told, dict) and told["ended"]["state"] == "ended"


def test_each_piece_of_output_is_announced_so_that_a_reader_can_come_back(box: OpenBox) -> None:
    id = box.start([*"sh -c".split(), "echo one; read x; echo two >&2; exec sleep 1000"])
    with box.attach(f"processes/{id}/terminal") as attached:
        heard = list(islice(attached.messages(), 2))
        attached.send(b"\n")
        heard += islice(attached.messages(), 2)
    assert heard == [
        {"seq": 1, "stream": "stdout", "missed": 0}, b"one\n", {"seq": 2, "stream": "stderr", "missed": 0}, b"two\n",
    ]  # fmt: skip
    with box.attach(f"processes/{id}/terminal?since=1") as attached:
        assert next(attached.messages()) == heard[2]


def test_control_that_makes_no_sense_is_told_and_the_connection_goes_on(box: OpenBox) -> None:
    id = box.start("cat")
    with box.attach(f"processes/{id}/terminal") as attached:
        for wrong in ("no json", '{"resize": [0, 1]}', '{"other": 1}', '{"signal": "NONE"}', '{"resize": [80, 24]}'):
            attached.send(wrong)
            told = attached.until(lambda told: isinstance(told, dict))
            assert isinstance(told, dict) and told["problem"]["kind"] == "invalid_request", told
        attached.send(b"still here\n")
        attached.bytes_until(b"still here")
        attached.send({"signal": "KILL"})
        ended = attached.until(lambda told: isinstance(told, dict) and "ended" in told)
        assert isinstance(ended, dict) and ended["ended"]["exit_code"] == 137, ended


def test_input_of_megabytes_waits_for_the_program_and_none_of_it_is_lost(box: OpenBox) -> None:
    id = box.start("sleep 0.5; wc -c")
    with box.attach(f"processes/{id}/terminal") as attached:
        for _ in range(48):
            attached.send(b"x" * 65536)
        attached.send({"eof": True})
        attached.bytes_until(str(48 * 65536).encode())
    assert box.ended(id)["exit_code"] == 0


def test_attaching_to_what_is_not_there_is_a_problem_before_the_upgrade(box: OpenBox) -> None:
    for path, status in (("processes/none/output", 404), ("processes/none/terminal?since=-1", 403)):
        with pytest.raises(Refused) as caught:
            box.attach(path)
        assert caught.value.status == status, path
