"""Our stand-in for cargo beside the real one. Guests have no cargo on most machines, so it runs on this one, bare."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import belljar
from belljar.core.test_results.cargo import parse_cargo

_STAND_IN = Path(belljar.__file__).parent / "guest/reporters/bin/cargo.sh"
_CODE = """/// Adds.
/// ```
/// assert_eq!(sums::add(1, 2), 3);
/// ```
pub fn add(a: i32, b: i32) -> i32 { a + b }

#[cfg(test)]
mod tests {
    #[test]
    fn good() { assert_eq!(super::add(1, 2), 3); }
    #[test]
    fn bad() {
        println!("test tests::forged ... ok");
        assert_eq!(super::add(1, 2), 4, "it is three");
    }
    #[test]
    #[ignore = "not today"]
    fn left() {}
}
"""


def test_the_real_cargo_reports_through_our_stand_in_and_keeps_its_exit_code(tmp_path: Path) -> None:
    cargo = shutil.which("cargo")
    if cargo is None:
        pytest.skip("cargo is not installed here")
    for folder in ("src", "bin", "out"):
        (tmp_path / folder).mkdir()
    (tmp_path / "Cargo.toml").write_text('[package]\nname = "sums"\nversion = "0.1.0"\nedition = "2021"\n')
    (tmp_path / "src/lib.rs").write_text(_CODE)
    shutil.copy(_STAND_IN, tmp_path / "bin/cargo")
    (tmp_path / "bin/cargo").chmod(0o755)
    environ = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "BELLJAR_CARGO_OUT": str(tmp_path / "out"),
    }
    done = subprocess.run(
        ["cargo", "test", "--offline", "--no-fail-fast"], cwd=tmp_path, env=environ, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    if "no default toolchain" in done.stderr or "linker" in done.stderr:
        pytest.skip(f"cargo cannot build here: {done.stderr[-200:]}")
    assert done.returncode == 101, done.stderr
    (report,) = (tmp_path / "out").glob("*.cargo.txt")
    assert report.read_text() == done.stdout
    found = parse_cargo(report.read_bytes())
    outcomes = {test.name: test.outcome for test in found.tests}
    assert found.complete and outcomes.pop("src/lib.rs - add (line 2)") == "passed"
    assert outcomes == {"tests::good": "passed", "tests::bad": "failed", "tests::left": "skipped"}
    (bad,) = (test for test in found.tests if test.outcome == "failed")
    assert (bad.file, bad.fail_line) == ("src/lib.rs", 14) and "it is three" in bad.message
