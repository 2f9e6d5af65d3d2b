"""`belljar top`: what it shows of a server that is a small one of our own."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from belljar.cli import remote
from belljar.cli import top as cli_top
from belljar.core import errors
from belljar.protocol.records import Alert, RunRecord, Sample, SandboxMetrics

ODD = "[red]x\x1b[2J\x1b]0;x\x07"
RUNS = [
    RunRecord(id="bj-2", caller="anna", backend="native", state="running", created=90, started=95),
    RunRecord(id="bj-3", caller="bob", language="go", state="queued", created=99, position=1),
    RunRecord(id="bj-1", caller=ODD, language="python", backend="wasm", state="running", created=30, started=40),
]
LATEST = Sample(
    container_id="bj-1", timestamp=99, uptime_seconds=59,
    cpu_percent=98.6, memory_mb=1536, network_rx_bytes=2048, network_tx_bytes=0,
)  # fmt: skip
ALERTS = tuple(
    Alert.model_validate({"container_id": "bj-1", "kind": kind, "timestamp": at, "over": over, "message": ""})
    for kind, at, over in (("memory", 2, True), ("memory", 1, False), ("cpu", 3, False))
)
FIGURES = {"bj-1": SandboxMetrics(container_id="bj-1", latest=LATEST, samples=(), alerts=ALERTS)}


def shown(*tables: Any, width: int = 140) -> str:
    console = Console(file=io.StringIO(), record=True, width=width, color_system=None)
    for table in tables:
        console.print(table)
    return console.export_text()


def test_the_table_shows_the_longest_first_and_those_that_wait_last() -> None:
    text = shown(cli_top.rows(RUNS, FIGURES, now=100.0))
    title, head, *lines = [line.split() for line in text.splitlines()]
    assert title == ["2", "running,", "1", "waiting"]
    assert head == "id caller language backend state seconds cpu % memory network alerts".split()
    assert lines[0][0] == "bj-1"
    assert lines[0][2:] == "python wasm running 60.0 99 1.5G 2K/0B cpu".split()
    assert lines[1] == "bj-2 anna command native running 5.0 - - -".split()
    assert lines[2] == "bj-3 bob go - queued 1 1.0 - - -".split()


def test_on_a_narrow_terminal_ids_and_figures_stay_whole() -> None:
    run = RUNS[0].model_copy(update={"id": "bj-0123456789abcdef", "caller": "a caller with a long name"})
    text = shown(cli_top.rows([run], {run.id: FIGURES["bj-1"]}, now=100.0), width=80)
    assert {"bj-0123456789abcdef", "running", "5.0", "99", "1.5G", "2K/0B"} <= set(text.split())


def test_what_a_server_says_is_shown_and_never_obeyed() -> None:
    text = shown(cli_top.rows(RUNS, {}, now=100.0))
    assert "[red]x" in text
    assert "\x1b" not in text
    assert "\x07" not in text


class _Server(BaseHTTPRequestHandler):
    """Answers as the service does, and knows one key."""

    def do_GET(self) -> None:
        where, _, query = self.path.partition("?")
        if self.headers["Authorization"] != "Bearer bj_key":
            self._answer(401, {"kind": "unauthorized", "detail": "nobody knows who asks", "fix": "give a key"})
        elif where == "/api/sandbox/runs":
            self._answer(200, [run.model_dump(mode="json") for run in RUNS if f"state={run.state}" in query])
        elif where == "/api/sandbox/bj-1/metrics":
            self._answer(200, FIGURES["bj-1"].model_dump(mode="json"))
        else:
            self._answer(404, {"kind": "not_found", "detail": "it ended meanwhile"})

    def _answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *words: object) -> None:
        return None


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_place", remote.ChosenServer())


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def test_once_as_json_is_one_document_with_the_figures_of_each_run(
    server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cli_top.top(server, "bj_key", once=True, as_json=True)
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["id"] for run in runs] == ["bj-1", "bj-2", "bj-3"]
    assert (runs[0]["latest"], runs[0]["alerts"]) == (LATEST.model_dump(mode="json"), ["cpu"])
    assert (runs[1]["latest"], runs[1]["alerts"]) == (None, [])


def test_into_a_pipe_goes_one_table(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli_top.top(server, "bj_key")
    assert capsys.readouterr().out.startswith("2 running, 1 waiting")


def test_a_server_that_says_no_or_nothing_is_told_in_a_sentence(server: str) -> None:
    with pytest.raises(errors.Unauthorized, match="nobody knows who asks — give a key"):
        cli_top.top(server, "", once=True)
    with pytest.raises(errors.NotAvailable, match=r"no connection to .* — is it running"):
        cli_top.top("http://127.0.0.1:1", "", once=True)
    with pytest.raises(errors.PolicyDenied, match="in the clear"):
        cli_top.top("http://far.example", "bj_key", once=True)
    with pytest.raises(errors.InvalidRequest, match="not the address of a server"):
        cli_top.top("no url at all", "", once=True)


def test_a_table_of_a_thousand_runs_says_how_many_are_not_shown() -> None:
    many = [RUNS[0].model_copy(update={"id": f"bj-{number}"}) for number in range(1000)]
    text = shown(cli_top.rows(many, {}, now=100.0))
    assert text.count("anna") == 100
    assert "and 900 more" in text
