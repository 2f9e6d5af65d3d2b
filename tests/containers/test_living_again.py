"""Living sandboxes in containers go on where their server ends, and the next server finds them again; others do not."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import anyio
import httpx2
import pytest

from belljar.backends.containers.cleanup import Leftovers, remove
from belljar.host.docker_api import connected, list_containers, list_volumes
from boxes import SANDBOXES, OpenBox
from engines import IMAGE, backend_of, engines, left_behind
from serving import Server, served
from witness import eventually

pytestmark = [
    pytest.mark.engine,
    pytest.mark.containers,
    pytest.mark.second_try("an engine that is asked by several servers may miss a deadline on a busy machine"),
]
_LONG = pytest.mark.exhaustive(
    "three servers, each of which proves its engines; one test of those runs before each commit"
)
SECONDS = 60.0


@contextmanager
def serving(flavour: str, more: str = "") -> Iterator[Server]:
    engines().engine(flavour)  # or a loud skip
    known = engines()
    environ = {
        "DOCKER_SOCKET_PATH": known.sockets.get("docker", "/none"), "MAX_CONTAINERS": "8",
        "CONTAINER_HOST": f"unix://{known.sockets['podman']}" if "podman" in known.sockets else "",
    }  # fmt: skip
    config = (
        f'[container.images]\nexecution = "{IMAGE}"\nnode-execution = "{IMAGE}"\n[service]\nrate = "10000/minute"\n'
    )
    with served(config=config + more, **environ) as server:
        try:
            yield server
        finally:  # what a test that fails leaves would go on
            anyio.run(_remove_all, flavour)


@contextmanager
def asking(server: Server) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=SECONDS) as http:
        yield http


def opened(server: Server, http: httpx2.Client, flavour: str, **body: object) -> OpenBox:
    return OpenBox.opened(http, server.url, backend=flavour, **body)


def again(server: Server, http: httpx2.Client, box: OpenBox) -> OpenBox:
    assert eventually(lambda: http.get(SANDBOXES).status_code == 200, seconds=SECONDS), "they were not found again"
    return OpenBox(http, server.url, box.id)


def moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def noted(server: Server, box: OpenBox) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads((server.data_dir / "sandboxes" / f"{box.id}.json").read_text())
    return found


def ours(flavour: str) -> list[str]:
    return anyio.run(left_behind, engines().engine(flavour))


def nothing_left(flavour: str) -> bool:
    return eventually(lambda: not ours(flavour), seconds=SECONDS)


async def _containers(flavour: str) -> list[dict[str, Any]]:
    async with connected(backend_of(engines().engine(flavour)).address) as client:
        return await list_containers(client, label="belljar=1")


async def _reap(flavour: str) -> int:
    return await engines().engine(flavour).backend(flavour).reap()


def marks(server: Server, box: OpenBox) -> list[Mapping[str, Any]]:
    return list(noted(server, box)["again"]["mark"]["processes"])


@pytest.mark.parametrize("flavour", ["docker", pytest.param("podman", marks=_LONG)])
def test_a_server_that_was_stopped_or_killed_goes_on_with_its_sandboxes(flavour: str) -> None:
    with serving(flavour) as server:
        with asking(server) as http:
            box = opened(server, http, flavour, labels={"task": "42"}, expires=900, limits={"memory": "300M"})
            assert box.put("files/content", b"kept", path="~/notes").status_code < 300
            box.start("python3 -m http.server 8000", id="web", labels={"role": "dev"})
            box.start(
                "trap 'exit 7' TERM; i=0; while :; do i=$((i+1)); printf '%01000d\\n' $i; sleep 0.004; done",
                id="floods",
            )
            assert box.get("ports/8000/wait", timeout=20).status_code == 200
            before, pid = box.get().json(), box.process("web")["pid"]
            assert eventually(lambda: len(marks(server, box)) == 2, seconds=SECONDS)

        server.stop()
        assert anyio.run(_reap, flavour) == 0, "another Belljar took what goes on for an orphan"
        server.start()
        with asking(server) as http:
            box = again(server, http, box)
            found = box.get().json()
            same = ("id", "caller", "backend", "state", "labels", "created", "home", "disk", "features", "interpreters")
            assert {name: found[name] for name in same} == {name: before[name] for name in same}
            assert abs(moment(found["expires"]) - moment(before["expires"])) < 2
            assert [one["id"] for one in http.get(SANDBOXES, params={"label": "task:42"}).json()] == [box.id]
            web = box.process("web")
            assert (web["state"], web["pid"], web["labels"], web["found"]) == ("running", pid, {"role": "dev"}, True)
            assert pid in [one["pid"] for one in box.get("ps").json()]
            assert box.get("processes/web/output").json() == {"chunks": [], "last": 0, "over": True}
            told = box.post("run", {"command": "id -un; echo $HOME; cat ~/notes; python -c 'print(6 * 7)'"}).json()
            assert told["stdout"] == "user\n/home/user\nkept42\n", told
            assert box.post("processes/floods/signal", {"signal": "TERM"}).json() == {"sent": True}
            assert box.ended("floods")["exit_code"] == 7  # nothing held it up, though nobody hears it
            short = opened(server, http, flavour, expires=2)
            box.start("sleep 1; exit 5", id="away")
            assert eventually(lambda: len(marks(server, box)) == 2, seconds=SECONDS)
            assert box.post("pause").status_code < 300 if flavour == "docker" else True
            assert eventually(lambda: noted(server, box)["again"]["mark"]["paused"] or flavour != "docker")

        server.kill()
        time.sleep(2.5)  # the time of one is over, and a process ends, while nobody runs
        server.start()
        with asking(server) as http:
            box, short = again(server, http, box), again(server, http, short)
            over = short.get().json()
            assert (over["state"], over["reason"]) == ("ended", "its time was over")
            if flavour == "docker":
                assert box.get().json()["state"] == "paused"
                assert box.post("resume").status_code < 300
            assert box.get("ports/8000/wait", timeout=20).status_code == 200
            assert box.get("files/content", path="~/notes").content == b"kept"
            assert box.ended("away")["exit_code"] == 5
            assert [box.process(one)["state"] for one in ("web", "away")] == ["running", "ended"]
            assert http.delete(box.path).status_code < 300
        assert nothing_left(flavour)


def test_nothing_lives_on_whose_server_does_not_come_back_and_nothing_foreign_is_taken_over() -> None:
    with serving("docker", "living_absence = 2\n") as server:
        with asking(server) as http:
            left, replaced = (opened(server, http, "docker", expires=900) for _ in range(2))
            left.start("sleep 1000", id="s")
        server.kill()
        place = noted(server, replaced)["again"]["mark"]["place"]
        forged = anyio.run(_forge, replaced.id, place)
        try:
            assert eventually(lambda: f"/{left.id}-living" not in running(), seconds=SECONDS)
            server.start()
            with asking(server) as http:
                again(server, http, left)
                for box in (left, replaced):
                    told = again(server, http, box).get().json()
                    assert told["state"] == "lost" and "the service that held it has ended" in told["reason"], told
                assert http.get(SANDBOXES).json() == []
                assert running() == [f"/{replaced.id}-living"], "what is not ours was removed"
        finally:
            anyio.run(_remove, forged)
        assert nothing_left("docker")


@_LONG
def test_of_two_servers_one_goes_on_with_what_a_third_left() -> None:
    with serving("docker") as server:
        with asking(server) as http:
            box = opened(server, http, "docker", expires=900)
        server.kill()
        other = Server(server.folder, server.environ, "")
        starting = threading.Thread(target=other.start)
        starting.start()
        server.start()
        starting.join(SECONDS)
        try:
            found = []
            for one in (server, other):
                with asking(one) as http:
                    again(one, http, box)
                    found += [record["id"] for record in http.get(SANDBOXES).json()]
            assert found == [box.id]
        finally:
            other.stop()
        server.stop()
        assert len(ours("docker")) == 1, "neither of the two left it"
        server.start()
        with asking(server) as http:
            assert http.delete(box.path).status_code < 300
        assert nothing_left("docker")


def running() -> list[str]:
    rows = anyio.run(_containers, "docker")
    names = [str(row["Names"][0]) for row in rows if row["State"] == "running"]
    return [name for name in names if name.endswith("-living")]


async def _forge(id: str, place: Mapping[str, Any]) -> str:
    """Puts a container of somebody else's into the place of a sandbox's, with its name and its labels."""
    async with connected(backend_of(engines().engine("docker")).address) as client:
        original = client.containers.container(place["container"])
        labels = (await original.show())["Config"]["Labels"]
        await original.delete(force=True)
        body = {"Image": IMAGE, "Cmd": ["sleep", "1000"], "Labels": labels, "HostConfig": {"NetworkMode": "none"}}
        made = await client.containers.create(body, name=f"{id}-living")
        await made.start()
        return str(made.id)


async def _remove_all(flavour: str) -> None:
    engine = engines().engine(flavour)
    async with connected(backend_of(engine).address) as client:
        rows = await list_containers(client, label="belljar=1")
        for name in [str(row["Names"][0]).lstrip("/") for row in rows]:
            if name.endswith("-living"):
                volumes = await list_volumes(client, label=f"belljar.run={name.removesuffix('-living')}")
                await remove(client, Leftovers([name], [str(row["Name"]) for row in volumes]))


async def _remove(id: str) -> None:
    async with connected(backend_of(engines().engine("docker")).address) as client:
        await client.containers.container(id).delete(force=True)
