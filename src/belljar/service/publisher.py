"""What the service publishes for other processes: lines of output on one bus, events on another."""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from belljar.core.result import Event
from belljar.core.settings import Settings
from belljar.protocol.records import Alert, LogLine, RunRecord
from belljar.service.bus.bus import Bus, open_bus


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

    def line(self, line: LogLine) -> None:
        """Publishes one line of a run's output."""
        self.lines.publish(subject_of_lines(line.container_id), line.model_dump())

    def event(self, event: Event) -> None:
        """Publishes an event of the engine."""
        self.events.publish(f"belljar.events.{event.kind}.{event.run}", event.model_dump(mode="json"))

    def alert(self, alert: Alert) -> None:
        """Publishes an alert, or its end."""
        self.events.publish(f"belljar.events.alert.{alert.container_id}", alert.model_dump(mode="json"))

    def run(self, change: str, record: RunRecord) -> None:
        """Publishes that a run is `running`, or has `ended`. The output is not told here."""
        body = record.model_dump(mode="json", exclude={"result", "position"})
        body["status"] = record.result.status if record.result else None
        self.events.publish(f"belljar.events.{change}.{record.id}", body)


def subject_of_lines(id: str) -> str:
    """Returns the subject on which the lines of a run are published."""
    return f"belljar.logs.{id}"
