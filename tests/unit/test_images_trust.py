"""What counts as vouched for, without asking anybody; and what is told to one engine and not to another."""

from __future__ import annotations

from pathlib import Path

import pytest

from belljar.core.image_name import parse
from belljar.core.settings import ImageSettings
from belljar.images.engine import EngineTraits, network_of
from belljar.images.records import ImageRecords
from belljar.images.rules import SignatureRecord, still_signed
from belljar.images.trust import Trust

ONE, TWO = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"
NOW = 2_000_000_000.0
MAX_AGE = 3600.0
RECORD = SignatureRecord(digest=ONE, name="registry.example/app", at=NOW, policy="p")


@pytest.mark.parametrize(
    ("later", "name", "policy", "counts"),
    [
        (0.0, "registry.example/app:1", "p", True),
        (MAX_AGE, "registry.example/app:2", "p", True),
        (MAX_AGE + 1, "registry.example/app:1", "p", False),
        (-1.0, "registry.example/app:1", "p", False),
        (0.0, "registry.example/other:1", "p", False),
        (0.0, "app:1", "p", False),
        (0.0, "registry.example/app:1", "q", False),
    ],
)
def test_a_consent_counts_for_its_repository_and_policy_and_not_for_ever(
    later: float, name: str, policy: str, counts: bool
) -> None:
    assert still_signed(RECORD, parse(name), policy, NOW + later, MAX_AGE) is counts


def test_a_consent_is_kept_by_its_digest_and_forgotten_with_its_image(tmp_path: Path) -> None:
    store = ImageRecords(tmp_path, tmp_path / "lock")
    assert store.signature(ONE) is None
    store.save_signature(RECORD)
    assert store.signature(ONE) == RECORD
    (tmp_path / "signatures" / ("2" * 64)).write_text(RECORD.model_dump_json())  # somebody copied it
    assert store.signature(TWO) is None
    (tmp_path / "signatures" / ("2" * 64)).write_text("{")
    assert store.signature(TWO) is None
    store.forget(ONE)
    assert store.signature(ONE) is None


def test_a_policy_is_another_one_with_another_program_word_or_key(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("one")

    def policy(sha256: str = "a" * 64, words: tuple[str, ...] = ("--key", str(key))) -> str:
        rules = ImageSettings(cosign="/bin/cosign", cosign_sha256=sha256, cosign_arguments=words)
        return Trust(rules, ImageRecords(tmp_path, tmp_path / "lock"), "")._policy()

    first = policy()
    assert policy() == first
    found = {first, policy(sha256="b" * 64), policy(words=("--key", str(key), "--x")), policy(words=(f"--key={key}",))}
    key.write_text("two")
    found |= {policy(), policy(words=(f"--key={key}",))}
    key.unlink()
    found.add(policy())
    assert len(found) == 7


def test_no_network_is_said_in_each_engines_own_words() -> None:
    docker, podman = EngineTraits(podman=False, limits=True), EngineTraits(podman=True, limits=True)
    assert network_of(docker, False) == {"networkmode": "none"}
    assert network_of(docker, True) == {"networkmode": "default"}
    for allowed, word in ((False, "NetworkDisabled"), (True, "NetworkDefault")):
        said = network_of(podman, allowed)
        assert said["networkmode"] == word
        assert said["nsoptions"][0]["Host"] is False  # its own default is the host's network
