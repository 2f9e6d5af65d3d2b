"""What works here, in which order and why not; the backend that is none; containers without further questions."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import belljar
from belljar.backends.base import Box
from belljar.backends.fake import Fake
from belljar.backends.none import NoSandbox
from belljar.containers import CONTAINERS, Detection, _container_backend, adetect, ais_container_available
from belljar.core import errors
from belljar.core.capabilities import Capabilities, Guarantees, Isolation, LanguageSupport
from belljar.core.plan import Plan
from belljar.engine.backends import NAMES, Backends
from belljar.engine.engine import Engine
from belljar.settings import load

pytestmark = pytest.mark.anyio


class Told:
    """A backend that only says what it was made to say."""

    def __init__(self, name: str, why_not: str = "", error: Exception | None = None) -> None:
        self.name = name
        self._why_not = why_not
        self._error = error

    async def probe(self) -> Capabilities:
        if self._error:
            raise self._error
        held = None if self._why_not else Guarantees(isolation=Isolation.KERNEL)
        return Capabilities(
            backend=self.name, available=not self._why_not, why_not=self._why_not, version="told 1", guarantees=held,
            fix="mend it" if self._why_not else "",
        )  # fmt: skip

    async def languages(self) -> tuple[LanguageSupport, ...]:
        return ()

    @asynccontextmanager
    async def open(self, plan: Plan) -> AsyncIterator[Box]:
        raise errors.StartFailed("told only to talk")
        yield

    async def reap(self) -> int:
        return 0


def engine(*told: Told, state: Path) -> Engine:
    """All real backends are played, so that the answer is the same on every machine."""
    played = {one.name: one for one in told}
    rest = [played.get(name, Told(name, f"{name} is not here")) for name in NAMES]
    return Engine(load({"HOME": "/"}, state, state_dir=str(state)), extra=tuple(rest))


# --- the order ---


def test_apple_comes_after_the_other_container_engines_and_none_is_never_in_the_order() -> None:
    assert NAMES == ("wasm", "native", "docker", "podman", "apple")
    assert "none" not in NAMES


async def test_detection_tells_all_backends_in_order_with_their_reasons(tmp_path: Path) -> None:
    found = await adetect(engine=engine(Told("docker"), state=tmp_path))
    assert [one.backend for one in found.order] == list(NAMES)
    assert found.backend == "docker"
    by_name = {one.backend: one for one in found.order}
    assert by_name["native"] == ("native", False, "native is not here", "mend it", None)
    assert by_name["docker"] == ("docker", True, "told 1", "", Isolation.KERNEL)


async def test_where_nothing_works_the_answer_is_none_and_no_exception(tmp_path: Path) -> None:
    assert (await adetect(engine=engine(state=tmp_path))).backend == "none"


async def test_a_probe_that_breaks_its_promise_is_a_reason_like_any_other(tmp_path: Path) -> None:
    found = await adetect(engine=engine(Told("wasm", error=RuntimeError("oh")), Told("apple"), state=tmp_path))
    assert found.backend == "apple"
    assert found.order[0].reason == "its probe failed: RuntimeError('oh')"


def test_detection_on_this_machine_agrees_with_the_doctor() -> None:
    found = belljar.detect()
    assert isinstance(found, Detection)
    assert [(one.backend, one.available) for one in found.order] == [
        (o.backend, o.available) for o in belljar.list_backends()
    ]
    assert all(one.reason for one in found.order)
    assert all(one.fix for one in found.order if not one.available)


@pytest.mark.skipif(sys.platform == "darwin", reason="SKIPPED: this is a Mac, where apple may well work")
def test_on_this_system_apple_says_what_it_needs() -> None:
    found = {one.backend: one for one in belljar.detect().order}
    assert found["apple"].reason == "apple needs macOS 26 on Apple silicon"


# --- none ---


async def test_the_backend_none_is_known_by_name_and_every_call_is_refused() -> None:
    none = Backends(load())["none"]
    offer = await none.probe()
    assert (offer.available, offer.why_not) == (False, "none: no sandbox was asked for")
    for call in (none.languages(), none.reap()):
        with pytest.raises(errors.PolicyDenied, match="no sandbox was asked for"):
            await call
    with pytest.raises(errors.PolicyDenied, match="no execution without a sandbox"):
        async with none.open(Plan()):
            pytest.fail("it was opened")


def test_asking_for_none_runs_nothing_and_says_why(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    with pytest.raises(errors.PolicyDenied) as caught:
        belljar.run(f"open({str(mark)!r}, 'w')", backend="none")
    assert "no sandbox was asked for" in caught.value.message
    assert "belljar doctor" in caught.value.fix
    assert not mark.exists()


async def test_auto_never_ends_at_none(tmp_path: Path) -> None:
    with pytest.raises(errors.NotAvailable, match="no sandbox here can run this") as caught:
        await belljar.arun("print(1)", engine=engine(state=tmp_path))
    assert "none passed over" not in str(caught.value)


def test_none_is_a_backend_of_its_own_name() -> None:
    assert NoSandbox().name == "none"


# --- containers ---


async def test_the_first_container_engine_that_works_is_taken(tmp_path: Path) -> None:
    assert await _container_backend(engine(Told("podman"), Told("apple"), state=tmp_path), "auto") == "podman"
    assert await _container_backend(engine(Told("podman"), Told("apple"), state=tmp_path), "apple") == "apple"


async def test_where_only_other_backends_work_there_is_no_container(tmp_path: Path) -> None:
    here = engine(Told("wasm"), Told("native"), state=tmp_path)
    assert not await ais_container_available(engine=here)
    with pytest.raises(errors.NotAvailable) as caught:
        await belljar.arun_in_container(["true"], engine=here)
    for name in CONTAINERS:
        assert f"{name}: {name} is not here" in caught.value.message
        assert f"{name}: mend it" in caught.value.fix


@pytest.mark.parametrize("name", ["native", "wasm", "none", "unheard"])
async def test_a_backend_without_containers_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidRequest, match="has no containers"):
        await belljar.arun_in_container(["true"], backend=name, engine=engine(Told("native"), state=tmp_path))


class Docker(Fake):
    """Plays Docker, which is asked for by its name."""

    name = "docker"

    async def probe(self) -> Capabilities:
        return (await super().probe()).model_copy(update={"backend": "docker", "images": True})


async def _greet(process: Any) -> None:
    await process.out(f"{process.limits.memory >> 20} {process.env['WHO']}\n")


def with_docker(state: Path) -> Engine:
    return Engine(load({"HOME": "/"}, state, state_dir=str(state)), extra=(Docker({"greet me": _greet}),))


async def test_the_command_and_its_options_reach_the_engine(tmp_path: Path) -> None:
    options: dict[str, Any] = {"image": "any:1", "memory": "64M", "env": {"WHO": "you"}}
    result = await belljar.arun_in_container(["greet", "me"], engine=with_docker(tmp_path), **options)
    assert (result.backend, result.stdout) == ("docker", "64 you\n")


def test_blocking_code_has_the_same(tmp_path: Path) -> None:
    here = with_docker(tmp_path)
    assert belljar.is_container_available(engine=here)
    assert not belljar.is_container_available(backend="apple", engine=engine(state=tmp_path))
    assert belljar.run_in_container(["greet", "me"], memory="64M", env={"WHO": "me"}, engine=here).stdout == "64 me\n"
    with pytest.raises(errors.InvalidRequest, match="has no containers"):
        belljar.build_image(tmp_path, "app", backend="native", engine=here)


def test_a_backend_that_is_passed_in_takes_the_place_of_ours_of_that_name(tmp_path: Path) -> None:
    assert with_docker(tmp_path).known == ("docker", "wasm", "native", "podman", "apple")


async def test_a_size_that_makes_no_sense_builds_nothing(tmp_path: Path) -> None:
    class Builder(Told):
        async def build(self, *words: Any, **options: Any) -> None:
            pytest.fail("it was built")

    with pytest.raises(errors.InvalidRequest, match="memory: 'many' is not a size"):
        await belljar.abuild_image(tmp_path, "app", memory="many", engine=engine(Builder("docker"), state=tmp_path))
