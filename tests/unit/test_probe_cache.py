"""What a probe proved is kept for the next process, and trusted only while it can be."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from belljar.backends.fake import Fake
from belljar.core import errors
from belljar.core.capabilities import Capabilities
from belljar.core.plan import Plan
from belljar.core.request import RunRequest
from belljar.core.result import Status
from belljar.engine import probe_cache
from belljar.engine.engine import Engine
from belljar.engine.probe_cache import LIFETIME_SECONDS, ProbeCache
from belljar.settings import load

REQUEST = RunRequest(code="print(1)", backend="proved")


class Proved(Fake):
    """A fake whose probe costs something: it counts them."""

    name = "proved"

    def __init__(self, *, broken_starts: int = 0) -> None:
        super().__init__({"print(1)": lambda process: process.out("1\n")})
        self.probes = 0
        self.tool = "/usr/bin/tool"
        self.recalled: Mapping[str, str] | None = None
        self.broken_starts = broken_starts
        self.gone = False

    async def probe(self) -> Capabilities:
        self.probes += 1
        return (await super().probe()).model_copy(update={"backend": self.name, "modules": frozenset({"json"})})

    def depends_on(self) -> Mapping[str, Any]:
        return {"tool": self.tool}

    def found(self) -> Mapping[str, str]:
        return {"tool": self.tool}

    def recall(self, found: Mapping[str, str]) -> None:
        if self.gone:
            raise errors.NotAvailable("the tool is gone")
        self.recalled = found

    @asynccontextmanager
    async def open(self, plan: Plan) -> AsyncIterator[Any]:
        if self.broken_starts:
            self.broken_starts -= 1
            raise errors.StartFailed("it did not start")
        async with super().open(plan) as box:
            yield box


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


def engine(backend: Proved, folder: Path, **options: Any) -> Engine:
    settings = load(environ={}, state_dir=str(folder))
    return Engine(settings, extra=(backend,), probes=ProbeCache(folder, **options))


async def proved(backend: Proved, folder: Path, **options: Any) -> Capabilities:
    return await engine(backend, folder, **options).capabilities("proved")


def entry(folder: Path) -> Path:
    (found,) = folder.glob("*.probe")
    return found


async def test_what_one_process_proved_the_next_one_goes_by(folder: Path) -> None:
    first, second = Proved(), Proved()
    said = await proved(first, folder)
    assert await proved(second, folder) == said
    assert (first.probes, second.probes, second.recalled) == (1, 0, {"tool": "/usr/bin/tool"})


async def test_an_engine_without_a_cache_proves_everything_itself(folder: Path) -> None:
    await proved(Proved(), folder)
    backend = Proved()
    await Engine(load(environ={}, state_dir=str(folder)), extra=(backend,)).capabilities("proved")
    assert backend.probes == 1


async def test_a_cache_that_only_keeps_proves_anew_and_refreshes_the_entry(folder: Path) -> None:
    await proved(Proved(), folder)
    os.utime(entry(folder), (0, 0))
    doctor = Proved()
    await proved(doctor, folder, recalls=False)
    assert doctor.probes == 1
    assert entry(folder).stat().st_mtime > 0


async def test_a_backend_that_does_not_work_is_asked_every_time(folder: Path) -> None:
    class Missing(Proved):
        async def probe(self) -> Capabilities:
            await super().probe()
            return Capabilities(backend=self.name, available=False, why_not="not installed")

    await proved(Missing(), folder)
    assert list(folder.glob("*.probe")) == []


def other_tool(backend: Proved, monkeypatch: pytest.MonkeyPatch) -> None:
    backend.tool = "/usr/local/bin/tool"


def other_boot(backend: Proved, monkeypatch: pytest.MonkeyPatch) -> None:
    read = probe_cache._text
    monkeypatch.setattr(probe_cache, "_text", lambda path: "another" if path.endswith("boot_id") else read(path))


def other_version(backend: Proved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_cache, "__version__", "99.0")


def other_label(backend: Proved, monkeypatch: pytest.MonkeyPatch) -> None:
    read = probe_cache._text
    monkeypatch.setattr(probe_cache, "_text", lambda path: "confined" if path.endswith("current") else read(path))


def no_longer_there(backend: Proved, monkeypatch: pytest.MonkeyPatch) -> None:
    backend.gone = True


def a_day_later(backend: Proved, monkeypatch: pytest.MonkeyPatch) -> None:
    later = time.time() + LIFETIME_SECONDS
    monkeypatch.setattr("time.time", lambda: later)


def a_clock_put_back(backend: Proved, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = time.time() - 60
    monkeypatch.setattr("time.time", lambda: earlier)


CHANGES = [other_tool, other_boot, other_version, other_label, no_longer_there, a_day_later, a_clock_put_back]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
async def test_after_a_change_everything_is_proved_again(
    change: Callable[[Proved, pytest.MonkeyPatch], None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await proved(Proved(), folder)
    backend = Proved()
    change(backend, monkeypatch)
    await proved(backend, folder)
    assert backend.probes == 1


def readable_by_others(path: Path) -> None:
    path.chmod(0o644)


def a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def a_second_name(path: Path) -> None:
    os.link(path, path.with_name("second"))


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def cut_short(path: Path) -> None:
    os.truncate(path, 30)


def no_entry(path: Path) -> None:
    path.write_text("[]")


def another_type(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"at": "today"}))


def another_backend(path: Path) -> None:
    said = json.loads(path.read_text())
    said["capabilities"]["backend"] = "native"
    path.write_text(json.dumps(said))


def endless(path: Path) -> None:
    os.truncate(path, 2 << 20)


DAMAGES = [
    readable_by_others, a_link, a_second_name, a_pipe, cut_short, no_entry, another_type, another_backend, endless,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
async def test_an_entry_that_is_not_ours_or_not_whole_is_as_good_as_none(
    damage: Callable[[Path], None], folder: Path
) -> None:
    await proved(Proved(), folder)
    damage(entry(folder))
    backend = Proved()
    await proved(backend, folder)
    assert backend.probes == 1


async def test_a_folder_that_others_can_write_to_is_neither_read_nor_written(folder: Path) -> None:
    await proved(Proved(), folder)
    folder.chmod(0o777)
    backend = Proved()
    assert (await proved(backend, folder)).available
    assert backend.probes == 1


async def test_old_entries_are_removed(folder: Path) -> None:
    await proved(Proved(), folder)
    old = entry(folder)
    os.utime(old, (0, 0))
    other = Proved()
    other.tool = "another"
    await proved(other, folder)
    assert entry(folder) != old


async def test_a_start_that_fails_after_an_earlier_proof_is_tried_again_after_a_new_one_and_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await proved(Proved(), folder)
    backend = Proved(broken_starts=1)
    result = await engine(backend, folder).run(REQUEST)
    assert (result.status, result.stdout, backend.probes) == (Status.SUCCESS, "1\n", 1)
    assert "probing again" in caplog.text


async def test_a_start_that_fails_after_our_own_proof_is_an_error_at_once(folder: Path) -> None:
    backend = Proved(broken_starts=1)
    with pytest.raises(errors.StartFailed):
        await engine(backend, folder).run(REQUEST)
    assert backend.probes == 1


async def test_a_start_that_fails_twice_is_an_error_and_leaves_no_stale_entry(folder: Path) -> None:
    await proved(Proved(), folder)
    backend = Proved(broken_starts=2)
    with pytest.raises(errors.StartFailed):
        await engine(backend, folder).run(REQUEST)
    assert backend.probes == 1
