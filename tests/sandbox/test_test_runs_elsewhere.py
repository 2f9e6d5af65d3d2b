"""Test runs of other languages' frameworks on native: node's own runner and go, where they are; jest, vitest, mocha."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import belljar
from belljar.core import errors
from belljar.engine.engine import Engine
from belljar.settings import load

_NODE = """
const { describe, it } = require('node:test');
const assert = require('node:assert');
describe('sums', () => {
  it('good', () => {});
  it('bad', () => { console.log('# pass 100'); assert.equal(1, 2, 'one is not two'); });
  it.skip('left', () => {});
});
it('top', () => {});
"""
_GO = """package p

import (
	"fmt"
	"testing"
)

func TestGood(t *testing.T) { Add(1, 2) }

func TestBad(t *testing.T) {
	fmt.Println("--- PASS: TestForged (0.00s)")
	t.Error("one is not two")
}

func TestLeft(t *testing.T) { t.Skip("not today") }
"""
_SPEC = """
describe('sums', () => {
  it('good', () => {});
  it('bad', () => { console.log('Tests: 100 passed, 100 total'); CHECK; });
  it.skip('left', () => {});
});
"""
_CHECKS = {
    "mocha": ("npx --no-install mocha it.test.js", "require('node:assert').equal(1, 2, 'one is not two')"),
    "jest": ("npx --no-install jest", "expect(1).toBe(2)"),
    "vitest": ("npx --no-install vitest run --globals", "expect(1).toBe(2)"),
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("test-runs")
    return Engine(load(state_dir=str(folder / "state"), data_dir=str(folder / "data"), backend="native"))


@pytest.fixture
def box(engine: Engine) -> Iterator[belljar.Sandbox]:
    with belljar.Sandbox(living=True, engine=engine, memory="2G") as box:
        yield box


@pytest.fixture(scope="module")
def frameworks() -> Path:
    """The frameworks, as npm installs them: once for this machine."""
    folder = Path(tempfile.gettempdir(), f"belljar-test-frameworks-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if not (folder / "whole").exists():
        (folder / "package.json").write_text('{"private": true}')
        words = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "mocha@11", "jest@29", "vitest@3"]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            pytest.skip(f"npm cannot fetch the frameworks: {done.stderr.strip()[-300:]}")
        (folder / "whole").touch()
    return folder / "node_modules"


def needs(box: belljar.Sandbox, program: str) -> None:
    if not box.exec(["sh", "-c", f"command -v {program}"]).ok:
        pytest.skip(f"guests find no {program} here")


def test_nodes_own_runner_reports_beside_what_it_prints(box: belljar.Sandbox) -> None:
    needs(box, "node")
    box.files.write("it.test.js", _NODE)
    report = box.test()
    assert (report.framework, report.status) == ("node", "failed"), report.output
    assert (report.passed, report.failed, report.skipped, report.source) == (2, 1, 1, "report")
    (bad,) = report.failures
    assert (bad.file, bad.line, bad.name) == ("it.test.js", 6, "sums > bad") and "one is not two" in bad.message
    assert "pass 100" in bad.output or "pass 100" in report.output
    half = box.test("node --test", coverage=True)
    assert half.coverage is not None and half.coverage.files[0].path == "it.test.js"
    with pytest.raises(errors.InvalidRequest, match="only"):
        box.test("node --test", only=[bad.id])


@pytest.mark.parametrize(("code", "status"), [("process.exit(0)", "failed"), ("for (;;);", "timeout")])
def test_a_file_of_node_that_leaves_or_hangs_is_no_success(box: belljar.Sandbox, code: str, status: str) -> None:
    needs(box, "node")
    box.files.write("it.test.js", f"require('node:test')('a', () => {{ {code} }});")
    report = box.test("node --test", timeout=5)
    assert not report.ok and (report.status == status or status == "failed"), report


def test_go_reports_each_test_and_a_package_that_does_not_build(box: belljar.Sandbox) -> None:
    needs(box, "go")
    box.files.write("go.mod", "module example.org/p\n\ngo 1.19\n")
    box.files.write(
        "a.go", "package p\n\nfunc Add(a, b int) int { return a + b }\nfunc Sub(a, b int) int { return a - b }\n"
    )
    box.files.write("a_test.go", _GO)
    report = box.test(coverage=True)
    assert (report.framework, report.status) == ("go", "failed"), report.output
    assert (report.passed, report.failed, report.skipped) == (1, 1, 1), "what a test prints is no result"
    assert report.failures[0].id == "example.org/p#TestBad" and "one is not two" in report.output
    assert report.coverage is not None and report.coverage.percent == 50.0
    box.files.write("a_test.go", "package p\n\nfunc broken( {\n")
    broken = box.test()
    assert (broken.status, broken.passed) == ("crashed", 0) and "a_test.go:3" in broken.output
    box.files.write("a_test.go", 'package p\n\nimport "testing"\n\nfunc TestA(t *testing.T) { panic("boom") }\n')
    broken = box.test()
    assert (broken.status, broken.failures[0].name) == ("failed", "TestA"), broken


@pytest.mark.exhaustive("fetches three frameworks from npm, which takes a minute the first time")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", _CHECKS)
def test_jest_vitest_and_mocha_report_each_test_and_run_only_the_failed_again(
    engine: Engine, frameworks: Path, name: str
) -> None:
    command, check = _CHECKS[name]
    with belljar.Sandbox(living=True, engine=engine, memory="2G") as box:
        needs(box, "node")
        box.files.upload(frameworks, "/workspace/node_modules")
        box.files.write("it.test.js", _SPEC.replace("CHECK", check))
        box.files.write("package.json", '{"private": true}')
        report = box.test(command)
        assert (report.framework, report.status) == (name, "failed"), report.output
        assert (report.passed, report.failed, report.skipped, report.source) == (1, 1, 1, "report")
        (bad,) = report.failures
        assert (bad.file, bad.name, bad.line) == ("it.test.js", "sums > bad", 4), bad
        again = box.test(command, only=[bad.id])
        assert [case.id for case in again.tests] == [bad.id], again.output
        box.files.write("it.test.js", "it('leaves', () => { process.exit(0); });")
        assert not box.test(command).ok
