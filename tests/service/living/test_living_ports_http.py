"""Ports and interpreters of living sandboxes over HTTP and WebSocket."""

from __future__ import annotations

import pytest

from boxes import OpenBox
from watching import Refused
from witness import eventually

pytestmark = pytest.mark.engine

_ECHO = """
import socket
with socket.create_server(("127.0.0.1", 8000)) as server:
    while True:
        connection, _ = server.accept()
        with connection:
            heard = b""
            while piece := connection.recv(65536):
                heard += piece
            connection.sendall(b"heard %d: " % len(heard) + heard[:5])
"""
_WAITING = """
import socket
connection, _ = socket.create_server(("127.0.0.1", 8000)).accept()
print(connection.recv(1))
print(connection.recv(1))
"""


def test_a_server_inside_is_waited_for_and_spoken_to_without_a_network(box: OpenBox) -> None:
    assert box.get("ports/8000/wait", timeout=0).json() == {"listening": False}
    with pytest.raises(Refused) as caught:
        box.attach("ports/8000/dial")
    assert (caught.value.status, b"ECONNREFUSED" in caught.value.body) == (422, True)
    box.put("files/content", _ECHO.encode(), path="echo.py")
    box.start(["python3", "echo.py"])
    assert box.get("ports/8000/wait", timeout=30).json() == {"listening": True}
    with box.attach("ports/8000/dial") as port:
        for _ in range(40):
            port.send(b"\xff" * 65536)
        port.send({"eof": True})
        assert port.bytes_until(b": ") == b"heard %d: " % (40 * 65536) + b"\xff" * 5
        assert port.until(lambda told: isinstance(told, dict)) == {"eof": True}
        assert list(port.messages()) == [] and port.end and port.end[0] == 1000
    assert box.get("ports/0/wait").status_code == 422 == box.get("ports/65536/wait").status_code


def test_who_cuts_a_connection_to_a_port_closes_it_inside_too(box: OpenBox) -> None:
    id = box.start(["python3", "-u", "-c", _WAITING])
    assert box.get("ports/8000/wait", timeout=30).json()["listening"]
    with box.attach("ports/8000/dial") as port:
        port.send(b"x")
        box.said(id, "b'x'")
        port.cut()
    assert box.ended(id)["state"] == "ended"


def test_interpreters_keep_their_own_state_and_share_files(box: OpenBox) -> None:
    first, second = (box.post("interpreters", {"environment": {"WHO": who}}).json()["id"] for who in "ab")

    def run(id: str, code: str) -> dict[str, str]:
        told: dict[str, str] = box.post(f"interpreters/{id}/run", {"code": code}).json()
        assert told["status"] == "success", told
        return told

    run(first, "x = 1; open('shared', 'w').write('from a')")
    assert run(second, "import os; print('x' in globals(), os.environ['WHO'], open('shared').read())")["stdout"] == (
        "False b from a\n"
    )
    told = run(first, "print(x)")
    record = box.http.get(f"/api/sandbox/runs/{told['id']}").json()
    assert (told["stdout"], record["session"], record["state"]) == ("1\n", box.id, "finished")
    assert [(one["id"], one["turns"]) for one in box.get("interpreters").json()] == [(first, 2), (second, 1)]
    assert "path" in box.post(f"interpreters/{second}/complete", {"text": "os.pat"}).json()["names"]
    assert box.delete(f"interpreters/{first}").status_code == 204 == box.delete(f"interpreters/{second}").status_code
    assert box.post(f"interpreters/{first}/run", {"code": "1"}).status_code == 404
    assert box.get("interpreters").json() == []


def test_a_turn_is_interrupted_and_its_interpreter_lives_on(box: OpenBox) -> None:
    id = box.post("interpreters", {}).json()["id"]
    path = f"interpreters/{id}"
    assert box.post(f"{path}/run", {"code": "kept = 7"}).json()["status"] == "success"
    code = "import time\nwhile True: time.sleep(0.01)"
    run = box.post(f"{path}/run", {"code": code, "wait": False}).json()["id"]
    assert eventually(lambda: box.get("interpreters").json()[0]["busy"], 30)
    assert eventually(lambda: box.post(f"{path}/interrupt").json()["interrupted"], 30)
    assert eventually(lambda: box.http.get(f"/api/sandbox/runs/{run}").json()["state"] == "finished", 30)
    assert box.post(f"{path}/run", {"code": "kept"}).json()["results"][0]["text/plain"] == "7"
    assert box.post(f"{path}/interrupt").json() == {"interrupted": False}


def test_the_same_key_is_one_turn_of_an_interpreter(box: OpenBox) -> None:
    id = box.post("interpreters", {}).json()["id"]
    told = [
        box.post(f"interpreters/{id}/run", {"code": "import time; time.time_ns()"}, **{"Idempotency-Key": "a turn"})
        for _ in range(2)
    ]
    assert told[0].json() == told[1].json()
    assert box.post("interpreters", {"language": "cobol"}).status_code in (422, 503)
