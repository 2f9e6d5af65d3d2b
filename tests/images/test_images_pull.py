"""Images on a real dockerd with a real registry on loopback: fetched, pinned, vouched for, thrown away.

No cosign and no scanner can be had where these tests run: the ones here are stand-ins, small scripts that print and
exit as the real ones do. What is proved is that they are asked, with what words, and that their answer counts.
"""

from __future__ import annotations

import json
import os
import pty
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import SocketAttribute

from belljar.core import errors
from belljar.core.settings import ImageSettings
from belljar.images.images import Images
from belljar.images.progress import Progress
from belljar.images.pull import Pulled
from image_engine import ImageEngine, Registry, belljar, half_a_registry, podman_service, serving, socket_of
from ports import free_port

pytestmark = [pytest.mark.engine, pytest.mark.containers]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with serving(tmp_path_factory.mktemp("registry")) as found:
        yield found


@pytest.fixture(scope="module", params=["docker", "podman"])
def address(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Name and socket of the engine."""
    if request.param == "docker":
        yield "docker", socket_of("docker")
        return
    with podman_service() as found:
        yield "podman", found


@pytest.fixture
def host(tmp_path: Path, address: tuple[str, str]) -> ImageEngine:
    name, socket = address
    return ImageEngine(socket, tmp_path, name)


@pytest.fixture
def name(registry: Registry, host: ImageEngine) -> Iterator[str]:
    """A name in the registry that no other test uses."""
    name = registry.name(f"app{time.monotonic_ns()}:1")
    yield name
    for image in host.docker("images", "-q", "--no-trunc", name.rpartition(":")[0]).split():
        host.docker("rmi", "-f", image, check=False)


# --- pulling -----------------------------------------------------------------------------------


async def test_each_pull_policy_does_what_its_name_says(host: ImageEngine, name: str) -> None:
    first = await host.publish(name, b"one")
    images = host.images()
    with pytest.raises(errors.ImageNotFound, match="policy pulls nothing"):
        await images.pull(name, policy="never")
    done = await images.pull(name, policy="if-not-present")
    assert (done.pulled, done.image.digest) == (True, first)
    assert host.docker("inspect", "-f", "{{.Id}}", name) == done.image.id
    again = await images.pull(name, policy="never")
    assert (again.pulled, again.image.id) == (False, done.image.id)
    old = done.image.id

    host.docker("tag", name, "kept:1")
    second = await host.publish(name, b"two")
    host.docker("tag", "kept:1", name)
    assert (await images.pull(name, policy="if-not-present")).image.id == old
    newer = await images.pull(name, policy="always")
    assert (newer.pulled, newer.image.digest) == (True, second)
    assert host.docker("inspect", "-f", "{{.Id}}", name) == newer.image.id != old
    host.docker("rmi", "-f", "kept:1")


async def test_a_pull_tells_its_progress_layer_by_layer_and_docker_in_bytes(host: ImageEngine, name: str) -> None:
    await host.publish(name, os.urandom(8 << 20))
    seen: list[Progress] = []
    await host.images().pull(name, listener=seen.append)
    if host.is_podman:
        begun, done = ({p.layer for p in seen if p.step == step} for step in ("Pulling fs layer", "Download complete"))
        assert begun == done and all(begun), seen
        return
    moving = [p for p in seen if p.step == "Downloading" and p.layer and 0 < p.current <= p.total]
    assert moving, [p.step for p in seen]
    assert moving[0].total > 8 << 20
    assert any(p.step == "Pull complete" for p in seen)


async def test_an_image_that_no_registry_has_is_not_found_and_a_dead_registry_is_a_failed_pull(
    host: ImageEngine, registry: Registry
) -> None:
    with pytest.raises(errors.ImageNotFound):
        await host.images().pull(registry.name("nobody/has/this:1"))
    with pytest.raises(errors.BackendError) as caught:
        await host.images().pull(f"127.0.0.1:{free_port()}/app:1")
    assert "refused" in caught.value.message
    assert not isinstance(caught.value, errors.ImageNotFound)


async def test_a_damaged_layer_is_a_failed_pull_and_nothing_is_left_of_it(
    host: ImageEngine, registry: Registry, name: str
) -> None:
    digest = await host.publish(name, os.urandom(1 << 20))
    manifest = json.loads(registry.blob(digest).read_text())
    layer = registry.blob(manifest["layers"][0]["digest"])
    whole = layer.read_bytes()
    before = set(host.docker("images", "-aq", "--no-trunc").split())
    layer.write_bytes(whole[:5000] + bytes(byte ^ 0xFF for byte in whole[5000:6000]) + whole[6000:])
    with pytest.raises(errors.PullFailed) as caught:
        await host.images().pull(name)
    assert (caught.value.kind, caught.value.exit_code) == ("start_failed", 125)
    assert set(host.docker("images", "-aq", "--no-trunc").split()) <= before
    layer.write_bytes(whole)
    assert (await host.images().pull(name)).image.digest == digest


async def test_a_registry_that_never_answers_ends_in_a_timeout_and_the_engine_goes_on(
    host: ImageEngine, name: str
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as mute:  # connections are made, and nothing is ever said
        began = time.monotonic()
        with pytest.raises(errors.BackendTimeout, match="no end after 1 s"):
            await host.images(stall_timeout=1).pull(f"127.0.0.1:{mute.getsockname()[1]}/app:1")
        assert time.monotonic() - began < 30
    await host.publish(name, b"x")
    assert (await host.images().pull(name)).pulled


async def test_a_registry_that_falls_silent_in_the_middle_of_a_layer_ends_in_a_timeout(host: ImageEngine) -> None:
    seen: list[Progress] = []
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, half_a_registry)
        name = f"127.0.0.1:{listener.extra(SocketAttribute.local_port)}/app:1"
        with pytest.raises(errors.BackendTimeout, match="without any progress"):
            await host.images(stall_timeout=3).pull(name, listener=seen.append)
        tasks.cancel_scope.cancel()
    assert any(progress.layer for progress in seen), seen
    assert not host.has(name)


async def test_a_short_base_comes_from_the_administrators_registry_and_from_nowhere_else(
    host: ImageEngine, registry: Registry, name: str
) -> None:
    await host.publish(name, b"the base")
    short = name.partition("/")[2]
    images = host.images(image_registry=registry.name("").rstrip("/"))
    report = await images.build(host.project(f"FROM {short}\nCOPY more /\n", more=b"x"), "mine/short:1")
    assert report.ok, report
    base = json.loads(host.docker("inspect", name))[0]["RootFS"]["Layers"]
    assert json.loads(host.docker("inspect", "mine/short:1"))[0]["RootFS"]["Layers"][:-1] == base
    host.docker("rmi", "-f", report.id, short)


async def test_prepulling_goes_on_past_one_that_fails(host: ImageEngine, registry: Registry, name: str) -> None:
    digest = await host.publish(name, b"x")
    absent = registry.name("absent:1")
    found = await host.images(prepull=[absent, name]).prepull()
    assert [(outcome.ok, outcome.digest) for outcome in found] == [(False, ""), (True, digest)]
    assert found[0].error and found[0].error["kind"] == "image_not_found"


async def test_an_engine_that_is_not_there_or_answers_garbage_is_our_failure(tmp_path: Path) -> None:
    host = ImageEngine(str(tmp_path / "none.sock"), tmp_path)
    with pytest.raises(errors.NotAvailable):
        await host.images().pull("app:1")

    async def babble(stream: Any) -> None:
        async with stream:
            await stream.receive()
            await stream.send(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n[garbage!"
            )

    async with await anyio.create_unix_listener(tmp_path / "none.sock") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, babble)
        with pytest.raises(errors.ExecutionFailed, match="makes no sense"):
            await host.images().pull("app:1")
        tasks.cancel_scope.cancel()


# --- pins --------------------------------------------------------------------------------------


async def test_a_pinned_name_that_changed_in_the_registry_is_refused_until_the_pin_is_moved(
    host: ImageEngine, name: str
) -> None:
    first = await host.publish(name, b"one")
    images = host.images()
    old = (await images.pull(name)).image.id
    lock = await images.lock([name], by="ada")
    assert (lock.images[name].digest, lock.images[name].by, lock.images[name].of) == (first, "ada", "registry")
    host.docker("rmi", "-f", old)
    second = await host.publish(name, b"two")

    if host.is_podman:  # it cannot ask what the name means now, and fetches what is pinned
        assert (await images.pull(name)).image.digest == first
        (told,) = await images.update(check=True)
        assert (told.ok, told.text) == (False, f"no registry says what {name} is now")
    else:
        with pytest.raises(errors.ImageRefused) as caught:
            await images.pull(name)
        assert caught.value.context["rule"] == "digest"
        assert (caught.value.context["pinned"], caught.value.context["found"]) == (first, second)
        assert not host.has(name)
        (told,) = await images.update(check=True)
        assert (told.ok, told.digest) == (True, second)
    assert images.records.lock().images[name].digest == first
    (moved,) = await images.update()
    assert (moved.ok, moved.text, moved.digest) == (True, "updated", second)
    assert (await images.pull(name, policy="always")).image.digest == second
    assert (await images.update())[0].text == "up to date"


async def test_a_name_that_was_changed_on_the_engine_is_refused_or_mended(host: ImageEngine, name: str) -> None:
    digest = await host.publish(name, b"one")
    images = host.images()
    right = (await images.pull(name)).image.id
    await images.lock([name])
    await host.local("other:1")
    host.docker("tag", "other:1", name)
    with pytest.raises(errors.ImageRefused):
        await images.pull(name, policy="never")
    with pytest.raises(errors.ImageRefused):
        await images.verify(name)
    mended = await images.pull(name, policy="if-not-present")
    assert (mended.image.id, mended.image.digest) == (right, digest)
    assert (await images.verify(name)).id == right


async def test_what_is_not_in_the_lock_is_refused_where_a_lock_is_required_and_leaves_no_name(
    host: ImageEngine, name: str
) -> None:
    await host.publish(name, b"one")
    with pytest.raises(errors.ImageRefused, match="not in the lock file"):
        await host.images(require_lock=True).pull(name)
    assert not host.has(name)
    await host.images().pull(name)
    await host.images().lock([name])
    assert (await host.images(require_lock=True).pull(name)).image.id


async def test_an_update_policy_of_never_moves_no_pin(host: ImageEngine) -> None:
    with pytest.raises(errors.PolicyDenied, match="update_policy"):
        await host.images(update_policy="never").update(["app:1"])


# --- signatures: cosign is a stand-in here ------------------------------------------------------


def signed(host: ImageEngine, script: str, **more: Any) -> Images:
    path, sha256 = host.program("cosign", script)
    rules = {
        "cosign": path,
        "cosign_sha256": sha256,
        "cosign_arguments": ["--key", "/k.pub"],
        "require_signature": True,
    }
    return host.images(**{**rules, **more})


async def refused(work: Any, rule: str, said: str) -> None:
    with pytest.raises(errors.ImageRefused) as caught:
        await work
    assert caught.value.context["rule"] == rule
    assert said in caught.value.message


async def test_an_image_that_cosign_accepts_is_pulled_and_cosign_was_asked_about_its_digest(
    host: ImageEngine, name: str
) -> None:
    digest = await host.publish(name, b"one")
    asked = host.folder / "asked"
    done: Pulled = await signed(host, f'echo "$@" >>{asked}').pull(name)
    assert done.image.digest == digest
    assert asked.read_text() == f"verify --key /k.pub {name.rpartition(':')[0]}@{digest}\n"


async def test_without_cosigns_consent_an_image_is_refused_before_it_is_pulled(host: ImageEngine, name: str) -> None:
    await host.publish(name, b"one")
    await refused(signed(host, "echo no matching signatures >&2; exit 1").pull(name), "signature", "no matching")
    await refused(signed(host, "exit 0", cosign_sha256="0" * 64).pull(name), "signature", "has changed")
    await refused(signed(host, "exit 0", cosign="/no/such/cosign").pull(name), "signature", "No such file")
    await refused(signed(host, "exit 0", cosign="").pull(name), "signature", "not configured")
    assert not host.has(name)
    with pytest.raises(errors.BackendTimeout):
        await signed(host, "exec sleep 60", tool_timeout=0.5).pull(name)
    assert not host.has(name)


async def test_cosigns_consent_counts_for_a_while_and_only_for_that_digest_key_and_program(
    host: ImageEngine, name: str
) -> None:
    digest = await host.publish(name, b"one")
    key = host.folder / "key.pub"
    key.write_text("a key")
    asked = host.folder / "asked"
    script = f"echo asked >>{asked}; exit $(cat {host.folder}/code)"
    (host.folder / "code").write_text("0")
    images = signed(host, script, cosign_arguments=["--key", str(key)])

    async def times(more: Images = images) -> int:
        before = asked.read_text().count("asked") if asked.exists() else 0
        await more.pull(name)
        return asked.read_text().count("asked") - before

    assert [await times(), await times()] == [1, 0]
    assert await times(signed(host, script, cosign_arguments=["--key", str(key)])) == 0  # another process
    await images.verify(name)
    assert asked.read_text().count("asked") == 2  # who wants to know it is told anew
    assert await times(signed(host, f"{script} # newer", cosign_arguments=["--key", str(key)])) == 1
    images = signed(host, script, cosign_arguments=["--key", str(key)])
    assert [await times(images), await times(images)] == [1, 0]
    key.write_text("another key")
    assert [await times(images), await times(images)] == [1, 0]
    kept = images.records.signature(digest)
    assert kept is not None
    for moment in (time.time() - ImageSettings().signature_max_age - 1, time.time() + 60):
        images.records.save_signature(kept.model_copy(update={"at": moment}))
        assert await times(images) == 1
    (host.folder / "code").write_text("1")
    await refused(images.verify(name), "signature", "cosign refuses it")
    await refused(images.pull(name), "signature", "cosign refuses it")  # a refusal takes back the consent


async def test_an_image_that_is_here_needs_its_signature_just_the_same(host: ImageEngine, name: str) -> None:
    await host.publish(name, b"one")
    await host.images().pull(name)
    await refused(signed(host, "exit 1").pull(name), "signature", "cosign refuses it")
    await refused(signed(host, "exit 1").verify(name), "signature", "cosign refuses it")
    await host.local("unsigned:1")
    await refused(signed(host, "exit 0").pull("unsigned:1"), "signature", "never in a registry")
    host.docker("rmi", "-f", "unsigned:1")


# --- scans: the scanner is a stand-in here ------------------------------------------------------


def scanned(host: ImageEngine, script: str, **more: Any) -> Images:
    path, sha256 = host.program("scanner", script)
    rules = {"scanner": [path, "{reference}", "{id}"], "scanner_sha256": sha256, "require_scan": True}
    return host.images(**{**rules, **more})


def printing(host: ImageEngine, *severities: str, then: str = "", **more: Any) -> str:
    """A script that prints what grype would, and notes that it was asked."""
    found = [{"vulnerability": {"id": f"CVE-{n}", "severity": s}, "artifact": {}} for n, s in enumerate(severities)]
    report = host.folder / f"report-{time.monotonic_ns()}"
    report.write_text(json.dumps({"matches": found, **more}))
    return f'echo "$@" >>{host.folder}/scans; cat {report}; {then}'


def scans(host: ImageEngine) -> list[str]:
    path = host.folder / "scans"
    return path.read_text().splitlines() if path.exists() else []


async def test_a_clean_scan_lets_an_image_in_once_and_is_kept_with_its_digest(host: ImageEngine, name: str) -> None:
    digest = await host.publish(name, b"one")
    images = scanned(host, printing(host, "Low", "Medium"))
    facts = (await images.pull(name)).image
    assert scans(host) == [f"{name.rpartition(':')[0]}@{digest} {facts.id}"]
    record = images.records.scan(facts.id)
    assert record is not None
    assert (record.digest, record.counts) == (digest, {"low": 1, "medium": 1})
    assert abs(time.time() - record.at) < 60
    await images.pull(name)
    assert len(scans(host)) == 1
    await refused(scanned(host, printing(host, "Low"), scan_threshold="low").pull(name), "scan", "low")


async def test_a_scan_over_the_threshold_refuses_the_image_and_takes_it_away_again(
    host: ImageEngine, name: str
) -> None:
    await host.publish(name, b"one")
    await refused(scanned(host, printing(host, "Critical")).pull(name), "scan", "CVE-0 (critical)")
    assert not host.has(name.rpartition(":")[0])
    await refused(scanned(host, printing(host, "High", then="exit 1")).pull(name), "scan", "CVE-0 (high)")


async def test_a_scanner_that_breaks_lies_or_is_not_the_pinned_one_refuses_the_image(
    host: ImageEngine, name: str
) -> None:
    await host.publish(name, b"one")
    other = {"source": {"target": {"imageID": f"sha256:{'9' * 64}"}}}
    for script, said in (
        ("echo nothing found", "cannot be used"),
        (printing(host, then="exit 2"), "ended with 2"),
        (printing(host, **other), "about another image"),
    ):
        await refused(scanned(host, script).pull(name), "scan", said)
    await refused(scanned(host, "exit 0", scanner_sha256="0" * 64).pull(name), "scan", "has changed")
    await refused(scanned(host, "exit 0", scanner=[]).pull(name), "scan", "no scanner")
    await refused(scanned(host, "exec sleep 60", tool_timeout=0.5).pull(name), "scan", "took longer")
    assert not host.has(name)


async def test_a_stale_scan_is_repeated_or_refused_as_policy_says(host: ImageEngine, name: str) -> None:
    await host.publish(name, b"one")
    script = printing(host, "Low")
    images = scanned(host, script)
    facts = (await images.pull(name)).image
    fresh = images.records.scan(facts.id)
    assert fresh is not None
    images.records.save_scan(fresh.model_copy(update={"at": time.time() - 8 * 86400}))
    await refused(scanned(host, script, scan_when_stale="refuse").pull(name), "scan", "stale")
    await images.pull(name)
    assert len(scans(host)) == 2
    assert (await scanned(host, script, scan_when_stale="refuse").pull(name)).image.id == facts.id


# --- the command line --------------------------------------------------------------------------


async def test_the_commands_pull_lock_verify_list_and_remove_with_exit_codes_that_mean_something(
    host: ImageEngine, name: str
) -> None:
    digest = await host.publish(name, b"one")
    assert belljar(host, "pull", "--policy", "never", name).returncode == 125
    pulled = json.loads(belljar(host, "pull", "--json", name).stdout)
    assert (pulled["pulled"], pulled["image"]["digest"]) == (True, digest)
    assert json.loads(belljar(host, "lock", "--json", name).stdout)["images"][name]["digest"] == digest
    assert host.lock_file.exists()
    assert belljar(host, "verify", name).returncode == 0
    rows = json.loads(belljar(host, "list", "--json").stdout)["images"]
    assert [row["pinned"] for row in rows if name in row["tags"]] == [True]
    check = [] if host.is_podman else ["--check"]  # Podman cannot look without pulling
    assert json.loads(belljar(host, "update", *check, "--json").stdout)["images"][0]["text"] == "up to date"
    await host.local("other:1")
    host.docker("tag", "other:1", name)
    denied = belljar(host, "verify", "--json", name)
    assert denied.returncode == 126
    assert json.loads(denied.stdout)["error"]["context"]["rule"] == "digest"
    assert belljar(host, "remove", name).stdout == f"removed {name}\n"
    assert not host.has(name)
    assert belljar(host, "remove", name).returncode == 125
    assert belljar(host, "pull", "Not A Name").returncode == 125
    assert belljar(host, "prepull", name).returncode == 0
    assert belljar(host, "scan", name).returncode == 126  # no scanner is configured, and so nobody vouches


async def test_a_terminal_is_shown_bars_while_an_image_comes(host: ImageEngine, name: str) -> None:
    await host.publish(name, os.urandom(4 << 20))
    ours, theirs = pty.openpty()
    done = belljar(host, "pull", name, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 1 << 16):
            shown += data
    except OSError:  # the other end is closed, and all was read
        pass
    os.close(ours)
    assert done.returncode == 0
    assert "━".encode() in shown
    assert done.stdout.startswith(f"✓ {name}")
