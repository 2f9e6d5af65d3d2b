"""Signatures and scans of images, as decisions: no engine is asked here."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st

from belljar.core import errors
from belljar.core.image_name import parse
from belljar.core.settings import ImageSettings
from belljar.images import reports
from belljar.images import rules as images_rules
from belljar.images.pinned import Distrusted, run_pinned
from belljar.images.records import ImageRecords
from belljar.images.rules import ScanRecord
from image_decisions import D1, D2, D3, facts, refused

patient = trials(deadline=None, max_examples=200)


# --- signatures --------------------------------------------------------------------------------

SIGNED = ImageSettings(cosign="/opt/cosign", cosign_sha256="0" * 64, cosign_arguments=("--key", "/etc/key.pub"))


def test_cosign_is_asked_about_the_digest_and_never_about_a_tag() -> None:
    argv = images_rules.signature_command(parse("r.example/app:1"), D2, SIGNED)
    assert argv == ["/opt/cosign", "verify", "--key", "/etc/key.pub", f"r.example/app@{D2}"]


@pytest.mark.parametrize(
    ("changes", "digest", "said"),
    [
        ({"cosign": ""}, D2, "not configured"),
        ({"cosign_arguments": ()}, D2, "name no signer"),
        ({"cosign_arguments": ("--insecure-ignore-tlog",)}, D2, "name no signer"),
        ({}, "", "never in a registry"),
    ],
)
def test_without_a_program_a_signer_or_a_digest_no_signature_can_hold(changes: Any, digest: str, said: str) -> None:
    rules = SIGNED.model_copy(update=changes)
    assert said in refused("signature", images_rules.signature_command, parse("app:1"), digest, rules).message


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program"
    path.write_text("#!/bin/sh\necho out; echo err >&2; exit 3\n")
    path.chmod(0o755)
    return path


async def test_a_pinned_program_runs_and_a_changed_absent_unpinned_or_relative_one_does_not(program: Path) -> None:
    sha256 = hashlib.sha256(program.read_bytes()).hexdigest()
    said = await run_pinned([str(program)], sha256, deadline=10, limit=100)
    assert said == (3, "out\n", "err\n")
    for argv, pin, problem in (
        ([str(program)], "", "not pinned"),
        (["program"], sha256, "absolute"),
        ([str(program) + "x"], sha256, "No such file"),
        ([str(program)], "0" * 64, f"has changed: its sha256 is {sha256}"),
    ):
        with pytest.raises(Distrusted, match=problem):
            await run_pinned(argv, pin, deadline=10, limit=100)
    program.chmod(0o644)
    with pytest.raises(Distrusted, match="cannot be started"):
        await run_pinned([str(program)], sha256, deadline=10, limit=100)


async def test_a_program_that_never_ends_is_a_timeout_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "slow"
    path.write_text("#!/bin/sh\nexec sleep 60\n")
    path.chmod(0o755)
    with pytest.raises(errors.BackendTimeout, match="took longer than"):
        await run_pinned([str(path)], hashlib.sha256(path.read_bytes()).hexdigest(), deadline=0.2, limit=100)


# --- scans -------------------------------------------------------------------------------------


def sarif(*results: dict[str, Any], rules: tuple[dict[str, Any], ...] = ()) -> str:
    return json.dumps({"version": "2.1.0", "runs": [{"tool": {"driver": {"rules": rules}}, "results": results}]})


def grype(*severities: str, **more: Any) -> str:
    found = [{"vulnerability": {"id": f"CVE-{n}", "severity": s}, "artifact": {"name": "libx", "version": "1"}}
             for n, s in enumerate(severities)]  # fmt: skip
    return json.dumps({"matches": found, **more})


def test_sarif_is_read_by_score_then_level_of_result_or_rule() -> None:
    rules = ({"id": "A", "properties": {"security-severity": "9.8"}}, {"id": "B"},
             {"id": "C", "defaultConfiguration": {"level": "error"}})  # fmt: skip
    place = {"physicalLocation": {"artifactLocation": {"uri": "usr/lib/libx.so"}}}
    report = reports.read(
        sarif(
            {"ruleId": "A", "level": "note", "locations": [place]}, {"ruleIndex": 1, "level": "note"}, {"ruleId": "C"},
            {"ruleId": "new"}, {"ruleId": "odd", "properties": {"security-severity": "nan"}}, rules=rules,
        )
    )  # fmt: skip
    assert report.counts == {"critical": 1, "low": 1, "high": 1, "medium": 1, "unknown": 1}
    assert report.findings[0] == "A (critical) in usr/lib/libx.so"


def test_the_json_of_grype_and_of_trivy_is_read_with_the_image_it_speaks_of() -> None:
    target = {"imageID": D1, "manifestDigest": D2, "repoDigests": [f"app@{D3}"]}
    report = reports.read(grype("High", "Negligible", "Unknown", "Weird", source={"target": target}))
    assert report.counts == {"high": 1, "negligible": 1, "unknown": 2}
    assert report.subjects == {D1, D2, D3}
    assert report.findings[0] == "CVE-0 (high) in libx 1"
    flaw = {"VulnerabilityID": "CVE-9", "PkgName": "bash", "InstalledVersion": "5", "Severity": "CRITICAL"}
    trivy = {"SchemaVersion": 2, "ArtifactName": "app", "Metadata": {"ImageID": D1},
             "Results": [{"Vulnerabilities": [flaw]}, {"Vulnerabilities": None}]}  # fmt: skip
    report = reports.read(json.dumps(trivy))
    assert (report.counts, report.subjects) == ({"critical": 1}, {D1})


@pytest.mark.parametrize(
    "text",
    [
        "", "no vulnerabilities found", "[]", "{}", "null", '{"matches": null}', '{"matches": [1]}', '{"runs": []}',
        '{"runs": [{"tool": {"driver": {}}}]}', '{"runs": [{"results": []}]}', '{"SchemaVersion": 2}',
        '{"SchemaVersion": 2, "Results": {}, "ArtifactName": "x"}'[:-1], '{"matches": [{}]}', "[" * 100_000,
        '{"runs": [{"tool": {"driver": {"rules": [{}]}}, "results": []}]}', grype("High")[:-5],
    ],
)  # fmt: skip
def test_a_report_that_is_none_never_looks_like_a_clean_one(text: str) -> None:
    with pytest.raises(reports.UnreadableReport):
        reports.read(text)


@patient
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["runs", "matches", "Results", "SchemaVersion", "tool", "results"]), inner
            )
        ),
        max_leaves=12,
    )
)
def test_a_scanner_can_print_anything_and_get_no_worse_than_unreadable(data: Any) -> None:
    try:
        report = reports.read(json.dumps(data))
    except reports.UnreadableReport:
        return
    assert all(count > 0 for count in report.counts.values())


def record(age: float = 0, **changes: Any) -> ScanRecord:
    given = {"id": D1, "reference": "app:1", "at": time.time() - age, "scanner": "/s", "scanner_sha256": "a" * 64}
    return ScanRecord(**{**given, **changes})


def test_the_threshold_is_the_first_severity_that_is_refused() -> None:
    high = record(counts={"high": 1, "low": 9}, findings=("CVE-1 (high) in libx",))
    assert "CVE-1" in refused("scan", images_rules.check_scan, high, ImageSettings(scan_threshold="high")).message
    images_rules.check_scan(high, ImageSettings(scan_threshold="critical"))
    images_rules.check_scan(record(), ImageSettings(scan_threshold="low"))
    images_rules.check_scan(record(counts={"critical": 0}), ImageSettings(scan_threshold="low"))


def test_what_nobody_has_rated_counts_as_the_administrator_says() -> None:
    unknown = record(counts={"unknown": 1})
    images_rules.check_scan(unknown, ImageSettings(scan_threshold="high", scan_unknown_as="medium"))
    refused("scan", images_rules.check_scan, unknown, ImageSettings(scan_threshold="high", scan_unknown_as="high"))


def test_a_scan_is_stale_when_old_or_from_the_future_or_by_another_scanner() -> None:
    rules = ImageSettings(scan_max_age=100, scanner_sha256="a" * 64)
    now = time.time()
    assert not images_rules.is_stale(record(50), rules, now)
    assert images_rules.is_stale(record(200), rules, now)
    assert images_rules.is_stale(record(-50), rules, now)
    assert images_rules.is_stale(record(50, scanner_sha256="b" * 64), rules, now)


def test_a_scan_record_is_kept_by_id_and_a_damaged_or_exchanged_one_is_none(tmp_path: Path) -> None:
    store = ImageRecords(tmp_path, tmp_path / "lock")
    assert store.scan(D1) is None
    store.save_scan(record(counts={"low": 1}))
    kept = store.scan(D1)
    assert kept is not None and kept.counts == {"low": 1}
    path = tmp_path / "scans" / D1[7:]
    assert path.stat().st_mode & 0o077 == 0
    (tmp_path / "scans" / D2[7:]).write_bytes(path.read_bytes())  # of another image
    assert store.scan(D2) is None
    path.write_text("{")
    assert store.scan(D1) is None
    with pytest.raises(errors.ExecutionFailed, match="not an id"):
        store.scan("sha256:../../etc/passwd")


def test_the_scanners_words_are_filled_in_once_and_only_by_us() -> None:
    rules = ImageSettings(scanner=("/s", "-o", "json", "docker:{reference}", "{id}", "{socket}"))
    argv = images_rules.scan_command(facts(), rules, "/run/{id}.sock")
    assert argv == ["/s", "-o", "json", f"docker:app@{D2}", D1, "/run/{id}.sock"]
    refused("scan", images_rules.scan_command, facts(), ImageSettings(), "")
    refused("scan", images_rules.scan_command, facts(), ImageSettings(scanner=("/s", "app")), "")
