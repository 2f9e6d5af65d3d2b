"""What scanners print: SARIF, and the JSON of grype and trivy. Read as hostile: capped, and unknown means no."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from belljar.images.rules import SEVERITIES

MAX_REPORT_BYTES = 64 << 20
_MAX_FINDINGS = 200_000
_SHOWN = 50
_LEVELS = {"error": "high", "warning": "medium", "note": "low", "none": "negligible"}
_SCORES = ((9.0, "critical"), (7.0, "high"), (4.0, "medium"), (0.1, "low"), (0.0, "negligible"))


class UnreadableReport(ValueError):
    """Not a report, or one of a shape we do not know. A report that says nothing must not look like a clean one."""


class Vulnerability(NamedTuple):
    """One finding of a scanner's."""

    name: str
    severity: str  # one of SEVERITIES, or "unknown"
    where: str

    def __str__(self) -> str:
        return f"{self.name} ({self.severity}) in {self.where}" if self.where else f"{self.name} ({self.severity})"


class ScanReport(NamedTuple):
    """What a scanner found, counted."""

    counts: dict[str, int]
    findings: tuple[str, ...]  # the worst first, a few
    subjects: frozenset[str]  # ids and digests of the image it speaks of, where it says so


def read(text: str) -> ScanReport:
    """Reads a scanner's report, or raises `UnreadableReport`."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise UnreadableReport("it is not JSON, or was cut") from None
    if not isinstance(data, dict):
        raise UnreadableReport("it is not a JSON object")
    if isinstance(data.get("runs"), list):
        found, subjects = _sarif(data), frozenset[str]()
    elif isinstance(data.get("matches"), list):
        found, subjects = _grype(data), _grype_subjects(data)
    elif "SchemaVersion" in data and isinstance(data.get("Results") or [], list):
        found, subjects = _trivy(data), _trivy_subjects(data)
    else:
        raise UnreadableReport("it is neither SARIF nor the JSON of grype or trivy")
    return _summed(found, subjects)


def _summed(found: Iterator[Vulnerability], subjects: frozenset[str]) -> ScanReport:
    counts: Counter[str] = Counter()
    all_found: list[Vulnerability] = []
    try:
        for finding in found:
            counts[finding.severity] += 1
            all_found.append(finding)
            if len(all_found) > _MAX_FINDINGS:
                raise UnreadableReport(f"it has more than {_MAX_FINDINGS} findings")
    except (AttributeError, TypeError, KeyError, IndexError):
        raise UnreadableReport("a finding in it has an unknown shape") from None
    all_found.sort(key=lambda finding: -_rank(finding.severity))
    return ScanReport(dict(counts), tuple(map(str, all_found[:_SHOWN])), subjects)


def _rank(severity: str) -> float:
    return SEVERITIES.index(severity) if severity in SEVERITIES else 2.5


def _severity(value: object) -> str:
    name = value.lower() if isinstance(value, str) else ""
    return name if name in SEVERITIES else "unknown"


def _words(*values: object) -> str:
    return " ".join(value[:100] for value in values if isinstance(value, str) and value)


def _sarif(data: dict[str, Any]) -> Iterator[Vulnerability]:
    if not data["runs"]:
        raise UnreadableReport("it is SARIF without a run")
    for run in data["runs"]:
        if run.get("results") is None:  # by the standard: the run failed before it could tell
            raise UnreadableReport("it is SARIF of a run without results")
        driver = run["tool"]["driver"]
        rules = driver.get("rules") or []
        by_name = {rule["id"]: rule for rule in rules}
        for result in run["results"]:
            index = result.get("ruleIndex", -1)
            rule = by_name.get(result.get("ruleId"))
            if rule is None:
                rule = rules[index] if isinstance(index, int) and 0 <= index < len(rules) else {}
            name = _words(result.get("ruleId")) or _words(rule.get("id")) or "a finding"
            yield Vulnerability(name, _sarif_severity(result, rule), _sarif_place(result))


def _sarif_severity(result: dict[str, Any], rule: dict[str, Any]) -> str:
    for holder in (result, rule):
        score = (holder.get("properties") or {}).get("security-severity")
        if score is not None:
            try:
                number = float(score)
            except (TypeError, ValueError):
                return "unknown"
            return next((name for least, name in _SCORES if number >= least), "unknown")  # NaN is no number either
    level = result.get("level") or (rule.get("defaultConfiguration") or {}).get("level") or "warning"
    return _LEVELS.get(level, "unknown") if isinstance(level, str) else "unknown"


def _sarif_place(result: dict[str, Any]) -> str:
    for location in result.get("locations") or ():
        return _words(((location.get("physicalLocation") or {}).get("artifactLocation") or {}).get("uri"))
    return ""


def _grype(data: dict[str, Any]) -> Iterator[Vulnerability]:
    for match in data["matches"]:
        flaw, artifact = match["vulnerability"], match.get("artifact") or {}
        where = _words(artifact.get("name"), artifact.get("version"))
        yield Vulnerability(_words(flaw.get("id")) or "a finding", _severity(flaw.get("severity")), where)


def _grype_subjects(data: dict[str, Any]) -> frozenset[str]:
    source = data.get("source")
    target = source.get("target") if isinstance(source, dict) else None
    if not isinstance(target, dict):
        return frozenset()
    return _digests(target.get("imageID"), target.get("manifestDigest"), target.get("repoDigests"))


def _trivy(data: dict[str, Any]) -> Iterator[Vulnerability]:
    if not data.get("Results") and not data.get("ArtifactName"):
        raise UnreadableReport("it names neither an image nor a result")
    for result in data.get("Results") or ():
        for flaw in result.get("Vulnerabilities") or ():
            where = _words(flaw.get("PkgName"), flaw.get("InstalledVersion"))
            yield Vulnerability(
                _words(flaw.get("VulnerabilityID")) or "a finding", _severity(flaw.get("Severity")), where
            )


def _trivy_subjects(data: dict[str, Any]) -> frozenset[str]:
    facts = data.get("Metadata")
    return _digests(facts.get("ImageID"), facts.get("RepoDigests")) if isinstance(facts, dict) else frozenset()


def _digests(*values: object) -> frozenset[str]:
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return frozenset(item.rpartition("@")[2] for item in flat if isinstance(item, str) and item)
