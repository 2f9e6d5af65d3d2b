"""What the service publishes for other processes: lines of output on one bus, events on another."""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from belljar.core.result import Event, Result
from belljar.core.settings import Settings
from belljar.core.values import KIB, iso_time
from belljar.protocol.records import Alert, LogLine, RunRecord
from belljar.service.bus.bus import Bus, open_bus
from belljar.service.store.result_text import weigh

EVENTS = "belljar.events"  # all subjects of events begin so
_MOST_CHARACTERS = 128 * KIB  # of outputs in an event: in JSON they may be six times as much, and NATS takes a megabyte


class Publisher:
    """`async with Publisher(settings)`: both buses, open. To publish never waits and never fails."""

    lines: Bus
    events: Bus

    def __init__(self, settings: Settings) -> None:
        self._settings = settings.service
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        buses = open_bus(redis=self._settings.redis, nats=self._settings.nats)
        self.lines, self.events = await self._stack.enter_async_context(buses)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    @property
    def status(self) -> str:
        """What is wrong with one of the buses; empty when both are well."""
        return self.lines.status or self.events.status

    @property
    def dropped(self) -> int:
        """Messages that nobody will get."""
        return self.lines.dropped + self.events.dropped

    def hears_events(self) -> bool:
        """Whether somebody may hear an event."""
        return self.events.heard

    def line(self, line: LogLine) -> None:
        """Publishes one line of a run's output."""
        if self.lines.heard:
            self.lines.publish(subject_of_lines(line.container_id), line.model_dump(mode="json"))

    def event(self, event: Event) -> None:
        """Publishes an event of the engine."""
        self._publish(event.run, event.at, event.kind, event.text, seq=event.seq)

    def alert(self, alert: Alert) -> None:
        """Publishes an alert, or its end."""
        self._publish(
            alert.container_id, alert.timestamp, "alert", alert.message, alert=alert.kind, over=alert.over
        )  # fmt: skip

    def run(self, change: str, record: RunRecord) -> None:
        """Publishes that a run is `running`, or has `ended` and with what result.

        A large result comes without its outputs, as the record has it.
        """
        if not self.events.heard:
            return
        at = (record.ended if change == "ended" else record.started) or record.created
        body = record.model_dump(mode="json", exclude={"position", "result"})
        result = record.result
        if result is not None:
            body |= {"status": result.status, "result": _within_bounds(result)}
        self._publish(record.id, at, change, record.state, **body)

    def _publish(self, id: str, at: float, kind: str, message: str, /, **more: Any) -> None:
        body = {"container_id": id, "timestamp": iso_time(at), "kind": kind, "message": message} | more
        self.events.publish(f"{EVENTS}.{kind}.{id}", body)


def _within_bounds(result: Result) -> dict[str, Any]:
    """A result as JSON; without its outputs where it would not fit into one message of a broker."""
    if weigh(result) > _MOST_CHARACTERS:
        result = result.model_copy(update={"stdout": "", "stderr": "", "files": (), "results": ()})
    return result.model_dump(mode="json", fallback=str)


def subject_of_lines(id: str) -> str:
    """Returns the subject on which the lines of a run are published."""
    return f"belljar.logs.{id}"
