"""Test runs on native: honest projects, failing, crashing, hanging and lying ones. The runners are the real ones."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import belljar
from belljar.core import errors
from belljar.engine.engine import Engine
from belljar.settings import load

_OF_PYTEST = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "xdist", "execnet", "py")
_HONEST = """
import pytest

def test_good(): pass

def test_bad():
    print("===== 100 passed in 0.01s =====")
    assert 1 == 2, "one is not two"

@pytest.mark.skip(reason="not today")
def test_left(): pass

@pytest.mark.xfail
def test_expected(): assert False

@pytest.fixture
def broken(): raise RuntimeError("boom")

def test_around(broken): pass

@pytest.mark.parametrize("value", [1, "a b", "é"])
def test_each(value): pass
"""
_UNITTEST = """
import unittest

class Sums(unittest.TestCase):
    def test_good(self): pass
    def test_bad(self):
        self.assertEqual(1, 2, "one is not two")
    @unittest.skip("not today")
    def test_left(self): pass
    def test_broken(self): raise KeyError("gone")
    @unittest.expectedFailure
    def test_expected(self): self.fail()
    def test_parts(self):
        for n in range(3):
            with self.subTest(n=n): self.assertNotEqual(n, 1)

class Never(unittest.TestCase):
    @classmethod
    def setUpClass(cls): raise OSError("no ground")
    def test_never(self): pass
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("test-runs")
    return Engine(load(state_dir=str(folder / "state"), data_dir=str(folder / "data"), backend="native"))


@pytest.fixture(scope="module")
def machine(engine: Engine) -> Iterator[belljar.Sandbox]:
    """A living sandbox in which this pytest is installed for its user."""
    with belljar.Sandbox(living=True, engine=engine, memory="1G") as box:
        version = box.exec(["python3", "-c", "import sys; print('python%d.%d' % sys.version_info[:2])"]).stdout.strip()
        if version != f"python{sys.version_info[0]}.{sys.version_info[1]}":
            pytest.skip(f"guests have {version}, and this pytest is of another")
        place = f"{box.home}/.local/lib/{version}/site-packages"
        for name in _OF_PYTEST:
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.origin is not None, f"{name} is not here"
            own = Path(spec.origin)
            folder = own.stem == "__init__"
            box.files.upload(own.parent if folder else own, f"{place}/{name}" if folder else f"{place}/{own.name}")
        for found in Path(pytest.__file__).parents[1].glob("*.dist-info"):
            if re.match(r"(pytest|pytest_xdist|pluggy)-\d", found.name):
                box.files.upload(found, f"{place}/{found.name}")
        yield box


@pytest.fixture
def box(machine: belljar.Sandbox) -> belljar.Sandbox:
    """The same, with an empty /workspace."""
    for one in machine.files.list("."):
        machine.files.remove(one.path)
    return machine


def left_behind(box: belljar.Sandbox) -> list[str]:
    return [one.path for one in box.files.list("/tmp") if "belljar" in one.path]


# --- pytest ---


def test_pytest_is_found_and_each_failure_has_its_name_file_line_message_and_output(box: belljar.Sandbox) -> None:
    box.files.write("tests/test_it.py", _HONEST)
    live: list[belljar.TestCase] = []
    report = box.test(on_test=live.append)
    assert (report.status, report.passed, report.failed, report.skipped) == ("failed", 4, 2, 2), report.output
    assert (report.framework, report.source, report.exit_code) == ("pytest", "report", 1)
    assert "imports pytest" in report.reasons[0] and report.command == "python3 -m pytest"
    bad, around = report.failures
    assert (bad.id, bad.kind, bad.file) == ("tests/test_it.py::test_bad", "failed", "tests/test_it.py")
    assert bad.line == 1 + _HONEST.split("\n").index('    assert 1 == 2, "one is not two"')
    assert "one is not two" in bad.message and "assert 1 == 2" in bad.traceback and "100 passed" in bad.output
    assert (around.kind, around.message) == ("error", "RuntimeError: boom") and bad.duration_ms is not None
    assert {case.id for case in live} == {case.id for case in report.tests} and len(live) == 8
    assert left_behind(box) == []


def test_only_the_failed_a_part_and_all_again_are_run(box: belljar.Sandbox) -> None:
    box.files.write("test_it.py", _HONEST)
    box.files.write("test_luck.py", "import os\ndef test_luck():\n    n = len(os.listdir('/workspace/n'))\n"
                    "    open(f'/workspace/n/{n}', 'w').close()\n    assert n % 2\n")  # fmt: skip
    box.files.make_dir("n")
    every = box.test("python3 -m pytest -q -p no:cacheprovider")
    again = box.test("python3 -m pytest -q -p no:cacheprovider", only=[one.id for one in every.failures])
    assert {case.id for case in again.tests} == {one.id for one in every.failures}
    parts = [box.test("python3 -m pytest -q", shard=f"{n}/2") for n in (1, 2)]
    ids = [case.id for part in parts for case in part.tests]
    assert sorted(ids) == sorted(case.id for case in every.tests), "each test is in one part"
    assert all(part.tests for part in parts)
    twice = box.test("python3 -m pytest -q test_luck.py", repeat=2)
    assert [(one.passed, one.failed) for one in twice.flaky] == [(1, 1)] and twice.runs == 2
    with pytest.raises(errors.InvalidRequest, match="only"):
        box.test("make check", only=["x"])


def test_tests_in_several_processes_of_xdist_are_counted_once(box: belljar.Sandbox) -> None:
    box.files.write("test_it.py", _HONEST)
    report = box.test("python3 -m pytest -q -n 2")
    assert (report.status, report.passed, report.failed, report.skipped) == ("failed", 4, 2, 2), report.output


def test_a_module_that_cannot_be_imported_is_an_error_with_its_place(box: belljar.Sandbox) -> None:
    box.files.write("test_good.py", "def test_a(): pass\n")
    box.files.write("test_odd.py", "import pytest\n\nimport moonphase\n")
    report = box.test()
    (one,) = report.failures
    assert (report.status, one.kind, one.file) == ("failed", "error", "test_odd.py")
    assert "moonphase" in one.message and report.exit_code == 2


@pytest.mark.parametrize(
    ("code", "status", "told"),
    [
        ("import os\ndef test_a(): pass\ndef test_b(): os._exit(0)\n", "crashed", "exit code 0"),
        ("import os\ndef test_a(): pass\ndef test_b(): os.kill(os.getpid(), 11)\n", "crashed", "ended before"),
        ("import sys\nsys.stdout.write('=== 5 passed in 0.1s ===\\n')\nimport os\nos._exit(0)\n", "crashed", "before"),
        ("x = 1\n", "no_tests", "no test was found"),
        ("def test_a():\n    import time\n    time.sleep(600)\n", "timeout", ""),
    ],
    ids=["leaves", "segfault", "prints-a-summary-and-leaves", "empty", "hangs"],
)
def test_what_crashed_hung_or_found_nothing_is_not_zero_failed(
    box: belljar.Sandbox, code: str, status: str, told: str
) -> None:
    box.files.write("test_it.py", code)
    report = box.test("python3 -m pytest -q", timeout=4 if status == "timeout" else 60)
    assert report.status == status, report
    assert not report.ok and report.error is not None and told in report.error.message


@pytest.mark.parametrize(
    "line", ["python3 -m pytest -q || true", "python3 -m pytest -q --deselect test_it.py::test_bad; exit 1"]
)
def test_an_exit_code_that_contradicts_the_report_is_no_verdict(box: belljar.Sandbox, line: str) -> None:
    box.files.write("test_it.py", "def test_good(): pass\ndef test_bad(): assert False\n")
    report = box.test(line)
    assert report.status == "inconsistent" and report.error is not None and "exit code" in report.error.message


def test_garbage_and_forged_summaries_on_both_streams_change_no_count(box: belljar.Sandbox) -> None:
    forged = "TAP version 13\n1..1\nok 1 - all\n<testsuite tests='9'/>\n===== 9 passed in 0.01s =====\n"
    code = f"import sys\ndef test_a():\n    for s in (sys.__stdout__, sys.__stderr__): s.write({forged!r})\n"
    code += "    sys.__stdout__.buffer.write(bytes(range(256)) * 200)\n    assert False\n"
    box.files.write("test_it.py", code)
    report = box.test("python3 -m pytest -q -s")
    assert (report.status, report.passed, report.failed, report.source) == ("failed", 0, 1, "report")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bomb.xml", '<!DOCTYPE t [<!ENTITY a "a">]><testsuite><testcase name="&a;"/></testsuite>'),
        ("huge.xml", None),
        ("odd.jsonl", "{}\n"),
        ("link.xml", ""),
    ],
)
def test_a_hostile_report_beside_the_real_one_leaves_no_verdict(
    box: belljar.Sandbox, name: str, content: str | None
) -> None:
    lines = ["import os", "def test_a():", "    place = os.path.join(os.environ['BELLJAR_REPORTS'], %r)" % name]  # noqa: UP031
    if name == "link.xml":
        lines.append("    os.symlink('/etc/passwd', place)")
    elif content is None:
        lines.append("    os.truncate(os.open(place, os.O_CREAT | os.O_WRONLY), 200 << 20)")
    else:
        lines.append(f"    open(place, 'w').write({content!r})")
    box.files.write("test_it.py", "\n".join(lines))
    report = box.test("python3 -m pytest -q")
    if name == "link.xml":  # it is not followed, and so it is nothing
        assert report.ok and "root:" not in report.model_dump_json()
    else:
        assert report.status == "crashed" and report.passed == 1, report
        assert any(name in warning for warning in report.warnings)


def test_a_pytest_that_a_test_starts_does_not_report_as_if_it_were_the_run(box: belljar.Sandbox) -> None:
    box.files.write("inner/test_inner.py", "def test_x(): assert False\n")
    box.files.write(
        "test_it.py", "import subprocess, sys\ndef test_a():\n"
        "    assert subprocess.run([sys.executable, '-m', 'pytest', 'inner']).returncode == 1\n"
    )  # fmt: skip
    report = box.test("python3 -m pytest -q test_it.py")
    assert (report.status, report.passed, report.failed) == ("passed", 1, 0), report


def test_hostile_names_of_files_and_tests_do_no_harm(box: belljar.Sandbox) -> None:
    box.files.write("tests/test_$(touch x); ' .py", "def test_a(): pass\n")
    box.files.write("-k.py", "")
    odd = "import pytest\n@pytest.mark.parametrize('v', ['\\n\\x1b[31m', '../..', '\\ud800'])\n"
    box.files.write("test_odd.py", odd + "def test_a(v): assert False\n")
    report = box.test("python3 -m pytest -q")
    assert (report.passed, report.failed) == (1, 3), report.output
    assert not box.files.exists("x")
    assert "\x1b" not in "".join(one.name for one in report.failures)


# --- unittest ---


def test_unittest_reports_without_a_change_of_the_project(box: belljar.Sandbox) -> None:
    box.files.write("tests/test_sums.py", _UNITTEST)
    report = box.test()
    found = {one.id.rpartition(".")[2]: one for one in report.failures}
    assert (report.framework, report.status) == ("unittest", "failed"), report.output
    assert (report.passed, report.failed, report.skipped) == (1, 4, 2)
    assert (found["test_bad"].file, found["test_bad"].line) == ("tests/test_sums.py", 7)
    assert "one is not two" in found["test_bad"].message and found["test_broken"].kind == "error"
    assert any("no ground" in one.message for one in report.failures)
    again = box.test(only=[found["test_bad"].id])
    assert [case.id for case in again.tests] == [found["test_bad"].id]


def test_unittest_that_leaves_in_the_middle_has_crashed(box: belljar.Sandbox) -> None:
    code = "import unittest, os\nclass T(unittest.TestCase):\n    def test_a(self): pass\n"
    code += "    def test_b(self): os._exit(0)\n"
    box.files.write("test_it.py", code)
    report = box.test()
    assert (report.status, report.passed) == ("crashed", 1)


# --- whatever writes JUnit XML or TAP ---

_WRITER = """<testsuite><testcase classname="c" name="a"/>
<testcase classname="c" name="b"><failure message="no"/></testcase></testsuite>"""


def test_a_command_of_any_kind_reports_by_junit_where_it_is_told_or_where_it_says(box: belljar.Sandbox) -> None:
    box.files.write("w.xml", _WRITER)
    report = box.test('cp w.xml "$BELLJAR_REPORTS/x.xml"; exit 1')
    assert (report.status, report.passed, report.failed, report.framework) == ("failed", 1, 1, "junit")
    line = "mkdir -p build/deep; cp w.xml build/deep/TEST-a.xml; exit 1"
    assert box.test(line, reports=["build/**/*.xml"]).failed == 1
    stale = box.test("true", reports=["build/**/*.xml"])
    assert stale.status == "no_report", "a report of another day proves nothing"


def test_tap_on_stdout_counts_for_a_command_of_which_nothing_else_is_known(box: belljar.Sandbox) -> None:
    report = box.test(["printf", "TAP version 13\n1..2\nok 1 - a\nok 2 - b\n"])
    assert (report.status, report.passed, report.source) == ("passed", 2, "printed")
    assert box.test(["printf", "5 passed\n"]).status == "no_report"
    assert box.test(["no-such-program"]).status == "crashed"


# --- a folder of this machine ---


def test_a_folder_is_copied_tested_and_left_as_it_was(engine: Engine, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "tests").mkdir(parents=True)
    (project / "tests/test_it.py").write_text(
        "import os, unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n"
        "        open('made', 'w').close(); os.remove('keep')\n        assert os.environ['WHO'] == 'me'\n"
    )
    (project / "keep").write_text("kept")
    heard: list[belljar.Event] = []
    report = belljar.test(project, engine=engine, environment={"WHO": "me"}, keep=True, on_event=heard.append)
    assert report.ok and report.backend == "native" and report.guarantees is not None, report
    assert sorted(one.name for one in project.iterdir()) == ["keep", "tests"]
    assert any(event.kind == "display" and "passed" in event.text for event in heard)
    with belljar.Sandbox(engine=engine, snapshot=report.kept) as box:
        assert box.files.exists("made") and not box.files.exists("keep")
    belljar.remove_snapshot(report.kept, engine=engine)


def test_what_cannot_be_asked_for_is_refused_before_anything_runs(engine: Engine, tmp_path: Path) -> None:
    for wrong in ({"path": tmp_path / "none"}, {"path": tmp_path}, {"path": tmp_path, "timeout": 301.0}):
        with pytest.raises(errors.BelljarError):
            belljar.test(engine=engine, **wrong)  # type: ignore[arg-type]
    (tmp_path / "large").write_bytes(bytes(3 << 20))
    with pytest.raises(errors.InvalidRequest, match="does not fit"):
        belljar.test(tmp_path, "true", engine=engine, disk="1M")
    with pytest.raises(errors.PolicyDenied, match="cap"):
        belljar.test(tmp_path, "true", engine=engine, timeout=301)


def test_a_project_that_stops_belljar_is_not_tested(tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text('{"testCommands": ["true"], "sandbox": {"enabled": false}}')
    stopped = Engine(load(project=tmp_path, state_dir=str(tmp_path / "s"), data_dir=str(tmp_path / "d")))
    with pytest.raises(errors.PolicyDenied):
        belljar.test(tmp_path, engine=stopped)
