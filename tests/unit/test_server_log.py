"""The server's own log: what a line looks like, and that nobody who logs ever waits."""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import Any

import pytest

from belljar.core.settings import ServiceSettings
from belljar.service.telemetry import server_log
from belljar.service.telemetry.server_log import ServerLog, facts, request_id
from witness import eventually


class Pages:
    """Where a log is written to; `wait=True`: nobody reads it until `read` is set."""

    def __init__(self, wait: bool = False) -> None:
        self.text = ""
        self.read = threading.Event()
        if not wait:
            self.read.set()

    def __call__(self, data: bytes) -> None:
        assert self.read.wait(60)
        self.text += data.decode()

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.text.splitlines()]


def opened(pages: Pages, **settings: Any) -> ServerLog:
    return ServerLog(ServiceSettings(**({"log_format": "json"} | settings)), write=pages)


def test_a_line_of_json_has_time_level_event_and_what_it_is_about() -> None:
    pages = Pages()
    with opened(pages).installed() as log:
        log.line("info", "request", method="GET", status=200)
    [line] = pages.lines
    assert list(line) == ["timestamp", "level", "event", "method", "status"]
    assert line["timestamp"].endswith("Z")
    assert (line["level"], line["event"], line["status"]) == ("info", "request", 200)


def test_what_other_parts_log_comes_too_with_its_facts_the_request_and_the_traceback() -> None:
    pages, logger = Pages(), logging.getLogger("belljar")
    with opened(pages).installed():
        token = request_id.set("mine-7")
        try:
            raise ValueError("broken")
        except ValueError:
            logger.exception("run %s", "bj-1", extra=facts(run="bj-1"))
        request_id.reset(token)
        logging.getLogger("uvicorn.error").info("nobody wants to know")
    [line] = pages.lines
    assert (line["level"], line["event"], line["run"], line["request_id"]) == ("error", "run bj-1", "bj-1", "mine-7")
    assert "ValueError: broken" in line["exception"]


def test_lines_below_the_level_are_not_written() -> None:
    pages = Pages()
    with opened(pages, log_level="warning").installed() as log:
        log.line("info", "request")
        log.line("warning", "refused")
        logging.getLogger("belljar").info("nor this")
        assert (log.wants("info"), log.wants("error")) == (False, True)
    assert [line["event"] for line in pages.lines] == ["refused"]


@pytest.mark.parametrize("name", ["path", "event"])
def test_on_a_terminal_no_line_can_forge_another_or_colour_it(name: str) -> None:
    pages = Pages()
    with opened(pages, log_format="console").installed() as log:
        hostile = "/x\x1b[31m\n2026-01-01 [error] forged\r"
        log.line("info", **({"event": hostile} if name == "event" else {"event": "request", name: hostile}))
    assert len(pages.text.splitlines()) == 1
    assert "\x1b" not in pages.text
    assert "\r" not in pages.text


def test_while_nobody_reads_the_log_nobody_waits_and_what_does_not_fit_is_counted_and_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_log, "QUEUE_LINES", 5)
    pages = Pages(wait=True)
    with opened(pages).installed() as log:
        log.line("info", "taken by the writer")
        assert eventually(lambda: not log.lines._lines, 10)
        for number in range(25):  # would wait for ever if one of them waited
            log.line("info", "request", number=number)
        assert log.dropped == 20
        pages.read.set()
        assert eventually(lambda: "dropped" in pages.text, 10)
    events = [line["event"] for line in pages.lines]
    assert events[:6] == ["taken by the writer", *["request"] * 5]
    assert pages.lines[6]["lines"] == 20
    assert len(events) == 7


def test_a_log_that_nobody_reads_holds_up_the_end_for_a_bounded_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_log, "CLOSE_SECONDS", 0.05)
    pages = Pages(wait=True)
    log = opened(pages)
    log.line("info", "request")
    began = time.monotonic()
    assert log.lines.close() is False
    assert time.monotonic() - began < 30
    pages.read.set()


def test_what_was_logged_before_the_end_is_written_by_the_end() -> None:
    pages = Pages()
    log = opened(pages)
    for number in range(1000):
        log.line("info", "request", number=number)
    assert log.lines.close() is True
    assert [line["number"] for line in pages.lines] == list(range(1000))


def test_a_log_that_cannot_be_written_is_counted_and_does_not_end_the_writer() -> None:
    broken = True
    texts = []

    def write(data: bytes) -> None:
        if broken:
            raise BrokenPipeError
        texts.append(data.decode())

    log = ServerLog(ServiceSettings(log_format="json"), write=write)
    log.line("info", "lost")
    assert eventually(lambda: log.dropped == 1, 10)
    broken = False
    log.line("info", "written")
    assert log.lines.close() is True
    assert [json.loads("".join(texts).splitlines()[0])["event"], log.dropped] == ["written", 1]
