"""The dashboard and the alerts that are shipped can be loaded, and ask for nothing that `/metrics` does not have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from belljar.core.result import Result, Status
from belljar.protocol.records import RunRecord
from belljar.service.telemetry.metrics import Metrics
from pages import ROOT

DASHBOARD = json.loads((ROOT / "deploy/grafana/belljar.json").read_text())
ALERTS = ROOT / "deploy/prometheus/belljar-alerts.yml"
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
_NAME = re.compile(r"\b(?:sandbox|process)_[a-z_]+")
_LABELS = re.compile(r"\bby \(([^)]*)\)|[{,]\s*(\w+)\s*(?==~|!=|=)")
_OF_PROMETHEUS = {"job", "instance", "le"}  # labels that no series of ours has to have


def told() -> dict[str, set[str]]:
    """Every series that `/metrics` can have, with its labels."""
    metrics = Metrics()
    for status in (Status.SUCCESS, Status.TIMEOUT):
        result = Result(status=status, duration_ms=7, startup_ms=3, cpu_ms=2, memory_used_mb=9, container_id="bj-1")
        metrics.hear(RunRecord(id="bj-1", caller="a", created=0, state="finished", language="python", result=result))
    metrics.refused("busy")
    metrics.alerted("cpu")
    metrics.answered("GET", "/healthz", 200, 0.1)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for each in family.samples:
            found.setdefault(each.name, set()).update(each.labels)
    return found


SERIES = told()


def asked() -> Iterator[tuple[str, str]]:
    """Every expression, and where it stands."""
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for rule in RULES:
        yield rule["alert"], rule["expr"]


@pytest.mark.parametrize("where, expression", list(asked()), ids=[where for where, _ in asked()])
def test_every_series_and_label_that_is_asked_for_exists(where: str, expression: str) -> None:
    names = set(_NAME.findall(expression))
    assert names or expression.startswith("up{")
    assert names <= SERIES.keys(), sorted(names - SERIES.keys())
    known = set[str]().union(*(SERIES[name] for name in names)) | _OF_PROMETHEUS
    for group, single in _LABELS.findall(expression):
        assert {word.strip() for word in (group or single).split(",")} <= known, (where, expression)
    assert expression.count("(") == expression.count(")")


def test_every_figure_of_ours_is_on_the_dashboard_or_in_an_alert() -> None:
    shown = " ".join(expression for _, expression in asked())
    ours = {name for name in SERIES if name.startswith("sandbox_") and not name.endswith(("_sum", "_count"))}
    # The mission's names in milliseconds are there in seconds; fuel and sessions are for whoever looks for them.
    left_out = {"sandbox_execution_duration_ms_bucket", "sandbox_startup_ms_bucket", "sandbox_fuel_consumed_bucket"}
    assert {name for name in ours if name not in shown} - left_out <= {"sandbox_sessions"}


def test_the_dashboard_can_be_imported_anywhere() -> None:
    assert {"title", "uid", "schemaVersion", "panels", "templating"} <= DASHBOARD.keys()
    variables = {each["name"] for each in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "job", "instance"}
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    places: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        where = panel["gridPos"]
        assert where["x"] + where["w"] <= 24
        cells = {(where["x"] + x, where["y"] + y) for x in range(where["w"]) for y in range(where["h"])}
        assert not cells & places, f"{panel['title']} lies over another panel"
        places |= cells


def test_every_alert_says_what_happened_and_what_to_do() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) >= 8
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert "$labels.instance" in rule["annotations"]["summary"]
        assert rule["annotations"]["description"]


def test_the_scrape_names_the_job_that_the_alerts_look_for() -> None:
    scrape: dict[str, Any] = yaml.safe_load((ROOT / "deploy/prometheus/scrape.yml").read_text())
    assert [job["job_name"] for job in scrape["scrape_configs"]] == ["belljar"]
    assert scrape["rule_files"] == [ALERTS.name]


def test_promtool_itself_takes_the_alerts_where_it_is_installed() -> None:
    promtool = shutil.which("promtool")
    if not promtool:
        pytest.skip("NOTHING was checked by promtool itself: it is not here (Debian: apt install prometheus)")
    done = subprocess.run([promtool, "check", "rules", str(ALERTS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
