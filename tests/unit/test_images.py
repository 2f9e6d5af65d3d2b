"""Names, locks, pulls and garbage of images, as decisions: no engine is asked here."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as trials
from hypothesis import strategies as st

from belljar import settings
from belljar.core import errors
from belljar.core.image_name import Reference, parse
from belljar.core.settings import LANGUAGE_IMAGES, ImageSettings
from belljar.host.docker_api import EngineRefusal, translate
from belljar.images import dockerfile
from belljar.images import rules as images_rules
from belljar.images.build import recipes
from belljar.images.lock import MAX_LOCK_BYTES, Lock, Pin, write_lock
from belljar.images.progress import Progress, PullText
from belljar.images.records import ImageRecords, new_pin
from belljar.images.references import ImageFacts, digests_of
from image_decisions import D1, D2, D3, facts, refused

patient = trials(deadline=None, max_examples=200)


# --- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "tag", "digest"),
    [
        ("python", "python", "latest", ""),
        ("python:3.12-slim", "python", "3.12-slim", ""),
        ("team/app_one/x--y:V1", "team/app_one/x--y", "V1", ""),
        ("localhost/app", "localhost/app", "latest", ""),
        ("127.0.0.1:5000/app:1", "127.0.0.1:5000/app", "1", ""),
        ("[::1]:5000/app", "[::1]:5000/app", "latest", ""),
        (f"r.example/app@{D1}", "r.example/app", "", D1),
        (f"app:1@{D1}", "app", "1", D1),
    ],
)
def test_a_name_is_taken_apart_into_name_tag_and_digest(text: str, name: str, tag: str, digest: str) -> None:
    assert parse(text) == Reference(name, tag, digest)


@pytest.mark.parametrize(
    "text",
    [
        "", "-rm", "--key=x", "App", "a b", "a//b", "/a", "a/", "a:", "a:b:c", "a@", "a@sha256:12", f"a@{D1.upper()}",
        "a:" + "t" * 129, "a" * 300, "a\nb", "a:1\n", "../a", "a/../b",
        "x.example:port/a", "a;id", "$(id)", "ä", "a:tag\0",
        f"a@md5:{'1' * 32}", ".hidden/a", "a__-b",
    ],
)  # fmt: skip
def test_what_is_not_a_name_is_refused_by_field(text: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="not an image's name"):
        parse(text)


def test_a_short_name_gets_the_administrators_registry_and_a_full_one_keeps_its_own() -> None:
    assert str(parse("app:1", "registry.example/team/")) == "registry.example/team/app:1"
    assert str(parse("other.example/app:1", "registry.example")) == "other.example/app:1"
    with pytest.raises(errors.InvalidRequest):
        parse("app:1", "--not a registry")


@patient
@given(st.text(max_size=60))
@example("a/" * 130 + "a")
def test_whatever_is_accepted_can_be_no_option_and_reads_the_same_again(text: str) -> None:
    try:
        found = parse(text)
    except errors.InvalidRequest:
        return
    assert parse(str(found)) == found
    assert not str(found).startswith("-")
    assert not set(str(found)) & set(" \t\n\0;$`'\"\\")


def test_the_digest_is_the_one_of_the_images_own_repository() -> None:
    entries = [f"other.example/app@{D3}", f"app@{D1}", "garbage", f"app@sha256:{'x' * 64}"]
    assert digests_of(parse("app:1"), entries) == (D1,)
    assert digests_of(parse("unknown:1"), entries) == ()
    assert digests_of(parse("library/app:1"), [f"hub.example/library/app@{D2}"]) == (D2,)


def test_an_image_that_its_repository_knows_by_two_digests_holds_against_a_pin_of_either() -> None:
    twice = facts(digests=(D2, D3))
    for digest in (D2, D3):
        images_rules.check_pin(parse("app:1"), Pin(digest=digest), twice, ImageSettings())
        assert twice.by(digest).pin == digest
    assert images_rules.pull_step(parse("app:1"), "if-not-present", twice, Pin(digest=D3)).pull == ""
    assert twice.by(D1).pin == D2


# --- the lock ----------------------------------------------------------------------------------


def test_a_lock_file_keeps_digest_time_and_person_and_is_the_same_when_written_again(tmp_path: Path) -> None:
    store = ImageRecords(tmp_path / "cache", tmp_path / "belljar.images.lock")
    assert store.lock() == Lock()
    store.save_lock(
        Lock().moved(parse("b:1"), new_pin(D1, in_registry=True, by="ada")).moved(parse("a:1"), Pin(digest=D2))
    )
    text = store.lock_file.read_text()
    found = store.lock()
    assert found.images["b:1"].by == "ada"
    assert (
        abs(time.mktime(time.strptime(found.images["b:1"].at, "%Y-%m-%dT%H:%M:%SZ")) - time.mktime(time.gmtime())) < 60
    )
    assert list(json.loads(text)["images"]) == ["a:1", "b:1"]
    assert write_lock(found) == text
    assert [path.name for path in tmp_path.iterdir()] == ["belljar.images.lock"]


def locked(key: str, digest: str = D1) -> str:
    return json.dumps({"version": 1, "images": {key: {"digest": digest}}})


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", '{"version": 2, "images": {}}',
        locked("a:1", "latest"),
        locked("a"), '{"version": 1, "images": {}, "more": 1}',
        locked("--x"), "[" * 100_000,
        locked("a:1", D1 + chr(10)),
    ],
)  # fmt: skip
def test_a_damaged_lock_refuses_everything_instead_of_nothing(text: str, tmp_path: Path) -> None:
    store = ImageRecords(tmp_path, tmp_path / "lock")
    store.lock_file.write_text(text)
    refused("lock", store.lock)


def test_a_lock_file_too_large_or_unreadable_is_a_refusal_too(tmp_path: Path) -> None:
    store = ImageRecords(tmp_path, tmp_path / "lock")
    store.lock_file.write_bytes(b" " * (MAX_LOCK_BYTES + 1) + b'{"version": 1}')
    refused("lock", store.lock)
    refused("lock", ImageRecords(tmp_path, tmp_path).lock)


# --- pulling -----------------------------------------------------------------------------------

ABSENT, HERE, OTHER = None, facts(), facts(digest=D3, id=D3)
PIN = Pin(digest=D2)


@pytest.mark.parametrize(
    ("policy", "present", "pin", "pull"),
    [
        ("always", ABSENT, None, "app:1"),
        ("always", HERE, None, "app:1"),
        ("always", HERE, PIN, f"app@{D2}"),
        ("if-not-present", ABSENT, None, "app:1"),
        ("if-not-present", HERE, None, ""),
        ("if-not-present", HERE, PIN, ""),
        ("if-not-present", OTHER, PIN, f"app@{D2}"),
        ("if-not-present", ABSENT, PIN, f"app@{D2}"),
        ("never", HERE, None, ""),
        ("never", HERE, PIN, ""),
        ("always", facts(digest=""), Pin(digest=D1, of="engine"), ""),
    ],
)
def test_what_is_pulled_depends_on_policy_presence_and_pin(policy: Any, present: Any, pin: Any, pull: str) -> None:
    assert images_rules.pull_step(parse("app:1"), policy, present, pin).pull == pull


def test_never_pulling_makes_an_absent_image_not_found_and_a_changed_one_refused() -> None:
    with pytest.raises(errors.ImageNotFound, match="policy pulls nothing"):
        images_rules.pull_step(parse("app:1"), "never", ABSENT, None)
    refused("digest", images_rules.pull_step, parse("app:1"), "never", OTHER, PIN)


def test_an_image_pinned_by_its_id_is_never_looked_for_in_a_registry() -> None:
    pin = Pin(digest=D1, of="engine")
    with pytest.raises(errors.ImageNotFound):
        images_rules.pull_step(parse("app:1"), "always", ABSENT, pin)
    refused("digest", images_rules.pull_step, parse("app:1"), "always", OTHER, pin)


def test_a_name_that_means_something_else_in_the_registry_than_in_the_lock_is_refused() -> None:
    error = refused("digest", images_rules.check_remote, parse("app:1"), PIN, D3)
    assert error.context["pinned"] == D2 and error.context["found"] == D3
    images_rules.check_remote(parse("app:1"), PIN, D2)
    images_rules.check_remote(parse("app:1"), PIN, "")  # nobody knows: what is pulled is the pinned digest anyway
    images_rules.check_remote(parse("app:1"), None, D3)


def test_what_arrived_is_held_against_the_pin_and_against_the_digest_that_was_asked_for() -> None:
    rules = ImageSettings()
    images_rules.check_pin(parse("app:1"), PIN, facts(), rules)
    refused("digest", images_rules.check_pin, parse("app:1"), PIN, facts(digest=D3), rules)
    refused("digest", images_rules.check_pin, parse(f"app@{D3}"), None, facts(), rules)
    refused("digest", images_rules.check_pin, parse(f"app:1@{D3}"), PIN, facts(digest=D3), rules)
    refused("lock", images_rules.check_pin, parse("app:1"), None, facts(), ImageSettings(require_lock=True))


# --- garbage -----------------------------------------------------------------------------------


def test_only_what_is_ours_unused_unpinned_and_old_is_garbage() -> None:
    def image(digit: str, tags: tuple[str, ...], **changes: Any) -> ImageFacts:
        labels = {"belljar": "1", "belljar.tag": "belljar/python:1"}
        own = {"id": f"sha256:{digit * 64}", "digest": "", "tags": tags, "labels": labels, "created": 10}
        return facts(reference=digit, **(own | changes))

    images = [
        image("1", ("belljar/python:1",)),
        image("2", ("mine:1",)),  # FROM one of ours, so it has our labels
        image("3", ()), image("4", ()),
        image("5", ("belljar/python:1",), created=99),
        image("6", ("belljar/python:1",)), image("7", ("belljar/python:1",)),
        image("8", ("other:1",), labels={}), image("9", ("belljar/python:1", "mine:2")),
    ]  # fmt: skip
    lock = Lock(images={"belljar/python:1": Pin(digest=images[6].id, of="engine")})
    found = images_rules.collect(images, used={images[5].id}, built={images[2].id}, lock=lock, older_than=50)
    assert [image.reference for image in found.remove] == ["1", "3"]
    assert {image.reference: why for image, why in found.kept} == {
        "2": "it was made from one of ours, by somebody else", "4": "it was made from one of ours, by somebody else",
        "5": "it is not old enough", "6": "a container uses it", "7": "it is pinned",
        "9": "it was made from one of ours, by somebody else",
    }  # fmt: skip


# --- what engines say --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (900, "Cannot connect", errors.NotAvailable),
        (404, "No such image: x", errors.ImageNotFound),
        (404, "manifest for x:1 not found: manifest unknown", errors.ImageNotFound),
        (0, "pull access denied for x, repository does not exist", errors.ImageNotFound),
        (0, "filesystem layer verification failed for digest sha256:1", errors.PullFailed),
        (500, "Get https://x/v2/: net/http: TLS handshake timeout", errors.BackendTimeout),
        (409, "conflict: image is being used by container", errors.CleanupFailed),
        (500, "no space left on device", errors.ExecutionFailed),
    ],
)
def test_an_engines_words_become_the_right_one_of_our_errors(status: int, message: str, kind: type) -> None:
    assert type(translate(EngineRefusal(status, message), "docker said", registry=True)) is kind


def test_only_where_the_engine_speaks_for_a_registry_its_words_are_read_as_a_registrys() -> None:
    slow, in_use = EngineRefusal(500, "context deadline exceeded"), EngineRefusal(409, "is already in progress")
    for refusal in (slow, in_use):
        told = translate(refusal, "the container could not be started", errors.StartFailed)
        assert type(told) is errors.StartFailed
        assert told.message == f"the container could not be started: {refusal.message}"


def test_a_project_file_may_not_say_which_images_are_trusted(tmp_path: Path) -> None:
    (tmp_path / ".belljar.toml").write_text("[images]\nrequire_signature = false\n")
    with pytest.raises(errors.InvalidRequest, match="images cannot be set by a project"):
        settings.load({"HOME": str(tmp_path)}, tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        'image_pull_policy = "sometimes"',
        'cosign_sha256 = "abc"',
        "scan_max_age = 0",
        "unknown = 1",
        'scan_threshold = ""',
    ],
)
def test_a_wrong_image_setting_is_named(line: str) -> None:
    import tomllib

    with pytest.raises(errors.InvalidRequest, match=r"images\."):
        settings.load({"HOME": "/nowhere"}, Path("/"), images=tomllib.loads(line))


# --- progress ----------------------------------------------------------------------------------


def test_a_pull_is_told_in_megabytes_at_most_once_a_second() -> None:
    now, told = [0.0], list[str]()
    text = PullText("app:1", told.append, clock=lambda: now[0])

    def step(step: str, layer: str, current: int = 0, total: int = 0, after: float = 1.0) -> None:
        now[0] += after
        text(Progress(image="app:1", step=step, layer=layer, current=current, total=total))

    step("Pulling from app", "1", after=0)
    step("Downloading", "a", 1_000_000, 40_000_000)
    step("Downloading", "b", 2_500_000, 10_000_000, after=0.1)
    step("Downloading", "a", 20_000_000, 40_000_000)
    step("Download complete", "b", after=0)
    step("Extracting", "a", 100, 40_000_000)
    step("Pull complete", "a", after=0)
    text.finish()
    assert told == [
        "pulling app:1", "pulling app:1: 1.0 of 40.0 MB", "pulling app:1: 22.5 of 50.0 MB",
        "pulling app:1: 50.0 of 50.0 MB", "pulled app:1: 50.0 of 50.0 MB",
    ]  # fmt: skip


def test_an_engine_that_tells_no_bytes_is_told_in_layers_and_an_image_that_is_here_not_at_all() -> None:
    told: list[str] = []
    text = PullText("app:1", told.append, clock=lambda: 0.0)
    text(Progress(image="app:1", step="Pulling fs layer", layer="a"))
    text(Progress(image="app:1", step="Pulling fs layer", layer="b"))
    text(Progress(image="app:1", step="Download complete", layer="a"))
    text.finish()
    assert told == ["pulling app:1", "pulled app:1: 1 of 2 layers"]
    PullText("app:1", told.append, begun=False).finish()
    assert len(told) == 2


def test_the_usual_images_of_compilers_are_the_bases_of_ours() -> None:
    for language, image in LANGUAGE_IMAGES.items():
        assert dockerfile.bases((recipes() / language / "Dockerfile").read_text()) == (image,)
