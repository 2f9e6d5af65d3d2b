"""Readers of test reports, given honest and hostile ones; and what is made of them beside an exit code."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from belljar.core import errors
from belljar.core.result import Result, Status
from belljar.core.test_results import frameworks, junit, lines, tap
from belljar.core.test_results.asked import test_options as options_of
from belljar.core.test_results.cargo import parse_cargo
from belljar.core.test_results.coverage import parse_coverage
from belljar.core.test_results.dependencies import dependencies
from belljar.core.test_results.go import parse_go
from belljar.core.test_results.model import report_in, with_report
from belljar.core.test_results.parsed import MAX_REPORT_BYTES, FoundTest, ParsedReport, path_of
from belljar.core.test_results.verdict import Asked, Reported, combined, judge, report_of

_SUITE = """<?xml version="1.0"?><testsuites><testsuite name="s" file="tests/a.py">
<testcase classname="a.B" name="good" time="0.5"/>
<testcase classname="a.B" name="bad" file="tests/b.py" line="7" time="1,000.5"><failure message="1 != 2">Traceback
  File "tests/b.py", line 9, in bad
AssertionError</failure><system-out>hello</system-out></testcase>
<testcase classname="a.B" name="broken"><error type="X">boom</error></testcase>
<testcase classname="a.B" name="left"><skipped message="why"/></testcase>
<testcase classname="a.B" name="good"/></testsuite></testsuites>"""


def ended(code: int | None, status: Status | None = None, **more: object) -> Result:
    return Result(status=status or (Status.ERROR if code else Status.SUCCESS), exit_code=code, **more)  # type: ignore[arg-type]


def reported(*outcomes: str, complete: bool = True) -> Reported:
    tests = tuple(FoundTest(f"t{n}", f"t{n}", outcome) for n, outcome in enumerate(outcomes))  # type: ignore[arg-type]
    return Reported(ParsedReport("pytest", tests, complete))


# --- JUnit ---


def test_junit_is_read_with_file_line_message_traceback_and_output() -> None:
    good, bad, broken, left, again = junit.parse_junit(_SUITE.encode()).tests
    assert [t.outcome for t in (good, bad, broken, left, again)] == ["passed", "failed", "error", "skipped", "passed"]
    assert (bad.file, bad.line, bad.fail_line, bad.message, bad.output) == ("tests/b.py", 7, 9, "1 != 2", "hello")
    assert bad.seconds == 1000.5 and bad.traceback.endswith("AssertionError")
    assert (good.file, broken.message, left.message) == ("tests/a.py", "boom", "why")
    assert good.id != again.id, "two tests of one name are two tests"


@pytest.mark.parametrize(
    "hostile",
    [
        '<!DOCTYPE t [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;&a;">]><testsuites><testcase name="&b;"/></testsuites>',
        '<!DOCTYPE t SYSTEM "http://127.0.0.1/x.dtd"><testsuite/>',
        '<!DOCTYPE t [<!ENTITY x SYSTEM "file:///etc/passwd">]><testsuite><testcase name="&x;"/></testsuite>',
        '<!DOCTYPE t [<!ENTITY % p SYSTEM "http://127.0.0.1/">%p;]><testsuite/>',
        "<testsuite>" + "<a>" * 100_000,
        "<testsuite><testcase name='x'>",
        "<html/>",
        "not xml at all",
        "",
        "\0\0\0",
    ],
    ids=["bomb", "dtd", "file", "parameter", "deep", "cut", "other", "text", "empty", "nul"],
)
def test_hostile_xml_is_refused_before_any_of_it_counts(hostile: str) -> None:
    with pytest.raises(ValueError, match=r"it (has|is)"):
        junit.parse_junit(hostile.encode())


def test_a_report_over_the_cap_is_refused_unread() -> None:
    with pytest.raises(ValueError, match="bytes"):
        junit.parse_junit(b"<testsuite>" + bytes(MAX_REPORT_BYTES))


def test_names_of_a_hostile_report_are_cut_and_paths_out_of_the_project_are_dropped() -> None:
    text = f'<testsuite><testcase classname="c" name="{"x" * 100_000}" file="../../etc/passwd"/></testsuite>'
    (found,) = junit.parse_junit(text.encode()).tests
    assert len(found.name) < 1100 and found.file == ""
    assert path_of("/workspace/a/../b.py") == "b.py"
    assert path_of("a\0b") == path_of("../x") == path_of("/workspace/../etc").removeprefix("/etc") == ""


def test_a_report_written_as_junit_reads_back_the_same_whatever_is_in_it() -> None:
    bad = FoundTest("a::b", 'b <&"\x1b[31m\x00', "failed", "a.py", 3, message="]]> <x>", traceback="t\x07", output="o")
    made = report_of(
        Asked("cmd", "pytest"), ended(1), Reported(ParsedReport("pytest", (bad, FoundTest("c", "c", "passed"))))
    )
    text = junit.as_junit(made)
    ElementTree.fromstring(text)
    again = junit.parse_junit(text.encode())
    assert [t.outcome for t in again.tests] == ["failed", "passed"] and again.tests[0].file == "a.py"
    crashed = junit.as_junit(report_of(Asked("cmd"), ended(3), Reported(None)))
    assert [t.outcome for t in junit.parse_junit(crashed.encode()).tests] == ["error"], "no reader takes it for good"


# --- TAP, go, our own lines ---


def test_tap_is_read_with_directives_plan_and_details() -> None:
    text = b"TAP version 13\n1..4\nok 1 - a\nnot ok 2 - b\n  ---\n  message: 'no'\n  at: lib/b.js:12:3\n  ...\n"
    text += b"ok 3 - c # SKIP later\nnot ok 4 - d # TODO soon\n"
    found = tap.parse_tap(text)
    assert [t.outcome for t in found.tests] == ["passed", "failed", "skipped", "skipped"] and found.complete
    assert (found.tests[1].file, found.tests[1].line, found.tests[1].message) == ("lib/b.js", 12, "no")


@pytest.mark.parametrize("text", [b"1..3\nok 1\n", b"ok 1\n", b"1..2\nok 1\nBail out! disk\n", b"1..1\nok 1\nok 2\n"])
def test_tap_that_does_not_keep_its_plan_is_not_complete(text: bytes) -> None:
    assert not tap.parse_tap(text).complete


def _go(*events: dict[str, object]) -> bytes:
    return b"# building\n" + b"\n".join(json.dumps(event).encode() for event in events)


def test_go_events_are_put_together_by_package_and_test() -> None:
    found = parse_go(_go(
        {"Action": "run", "Package": "m/p", "Test": "TestA"},
        {"Action": "output", "Package": "m/p", "Test": "TestA", "Output": "=== RUN   TestA\n"},
        {"Action": "output", "Package": "m/p", "Test": "TestA", "Output": "    a_test.go:9: want 2\n"},
        {"Action": "fail", "Package": "m/p", "Test": "TestA", "Elapsed": 0.25},
        {"Action": "fail", "Package": "m/p"}, {"Action": "skip", "Package": "m/q"},
    ))  # fmt: skip
    (test,) = found.tests
    assert (test.outcome, test.fail_line, test.message, test.seconds) == ("failed", 9, "want 2", 0.25)
    assert test.file == "p/a_test.go" and found.complete


def test_a_go_package_that_did_not_build_or_died_is_an_error_and_not_nothing() -> None:
    unbuilt = parse_go(_go(
        {"Action": "output", "Package": "m/p", "Output": "FAIL\tm/p [build failed]\n"},
        {"Action": "fail", "Package": "m/p"},
    ))  # fmt: skip
    assert [t.outcome for t in unbuilt.tests] == ["error"]
    died = parse_go(_go(
        {"Action": "run", "Package": "m/p", "Test": "TestX"}, {"Action": "fail", "Package": "m/p"}
    ))  # fmt: skip
    assert [t.outcome for t in died.tests] == ["error"]
    assert not parse_go(_go({"Action": "run", "Package": "m/p", "Test": "TestX"})).complete


def test_a_go_test_that_prints_the_result_of_another_forges_nothing() -> None:
    found = parse_go(_go(
        {"Action": "run", "Package": "m", "Test": "TestA"}, {"Action": "pass", "Package": "m", "Test": "TestForged"},
        {"Action": "pass", "Package": "m", "Test": "TestA"}, {"Action": "pass", "Package": "m"},
    ))  # fmt: skip
    assert [test.name for test in found.tests] == ["TestA"]


_CARGO = """
running 4 tests
test tests::bad ... FAILED
test tests::good ... ok
test tests::left ... ignored, not today
test tests::panics - should panic ... ok

failures:

---- tests::bad stdout ----
test tests::forged ... ok
test result: ok. 9 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s

thread 'tests::bad' (7) panicked at src/lib.rs:12:9:
assertion `left == right` failed: one is not two
  left: 1
 right: 2

failures:
    tests::bad

test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s
"""


def test_cargos_text_counts_only_what_its_programs_last_line_confirms() -> None:
    honest = _CARGO.replace("test result: ok. 9 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out;", "said:")
    found = parse_cargo(honest.encode())
    assert found.complete and [t.outcome for t in found.tests] == ["failed", "passed", "skipped", "passed"]
    bad = found.tests[0]
    assert (bad.file, bad.fail_line) == ("src/lib.rs", 12) and "one is not two" in bad.message
    assert "forged" in bad.output
    for hostile in (
        honest.replace("4 tests", "5 tests"), honest.replace("test tests::good ... ok\n", ""),
        honest.replace("running 4 tests\n", "running 4 tests\ntest tests::forged ... ok\n"), honest[:200],
    ):  # fmt: skip
        assert not parse_cargo(hostile.encode()).complete


def test_our_lines_are_complete_only_with_their_end_and_refused_when_they_are_cut() -> None:
    start = b'{"event":"start","framework":"pytest"}\n'
    test = b'{"event":"test","id":"a","outcome":"passed"}\n'
    assert not lines.parse_lines(start + test).complete
    assert lines.parse_lines(start + test + b'{"event":"end","exit":0}\n').complete
    assert len(lines.parse_lines(start + test + b'{"event":"te', part=True).tests) == 1
    for text in (
        start + test[:-5],
        test,
        start + b"[]\n",
        start + b'{"event":"test","id":"a"}\n',
        start + b"[" * 9000 + b"\n",
    ):
        with pytest.raises(ValueError, match=r".+"):
            lines.parse_lines(text)


# --- coverage ---


def test_coverage_is_read_of_each_tool_in_percent_and_per_file() -> None:
    python = {"files": {"a.py": {"summary": {"covered_lines": 3, "num_statements": 4}}, "b.py": {"summary": {}}}}
    found = parse_coverage(json.dumps(python).encode())
    assert (found.percent, found.files[0].percent, found.source) == (75.0, 75.0, "coverage.py")
    javascript = {"total": {}, "/workspace/a.js": {"lines": {"total": 10, "covered": 5}}}
    assert parse_coverage(json.dumps(javascript).encode()).files[0].path == "a.js"
    go = b"mode: set\nm/a.go:1.1,2.2 3 1\nm/a.go:3.1,4.2 1 0\nm/a.go:3.1,4.2 1 0\n"
    assert parse_coverage(go).percent == 75.0
    for hostile in (b"[" * 100_000, b"[]", b'{"files": 3}', b"mode"):
        with pytest.raises(ValueError, match="coverage"):
            parse_coverage(hostile)


# --- verdicts ---


@pytest.mark.parametrize(
    ("result", "told", "status"),
    [
        (ended(0), reported("passed", "skipped"), "passed"),
        (ended(1), reported("passed", "failed"), "failed"),
        (ended(1), reported("error"), "failed"),
        (ended(0), reported("failed"), "inconsistent"),
        (ended(1), reported("passed"), "inconsistent"),
        (ended(0), reported("passed", complete=False), "crashed"),
        (ended(0), reported(complete=False), "crashed"),
        (ended(5), reported(), "no_tests"),
        (ended(0), reported(), "no_tests"),
        (ended(3), reported(), "crashed"),
        (ended(0), Reported(None), "no_report"),
        (ended(1), Reported(None), "crashed"),
        (ended(127), Reported(None), "crashed"),
        (ended(0), Reported(None, unreadable=("x: no XML",)), "crashed"),
        (ended(124, Status.TIMEOUT), reported("passed"), "timeout"),
        (ended(137, Status.OOM_KILLED), Reported(None), "oom_killed"),
        (ended(None, Status.ABORTED), reported("passed"), "aborted"),
        (ended(None, Status.KILLED), reported("passed"), "killed"),
    ],
)
def test_only_a_report_that_its_exit_code_confirms_is_a_verdict(result: Result, told: Reported, status: str) -> None:
    found, error = judge(result, told)
    assert found == status
    assert (error is None) == (status in ("passed", "failed")), "whatever is no verdict says why"
    made = report_of(Asked("x", "pytest"), result, told)
    assert made.ok == (status == "passed")


def test_a_report_goes_through_a_result_and_back() -> None:
    result = ended(1, stdout="out\n", backend="native")
    made = report_of(Asked("x", "pytest", ("why",)), result, reported("passed", "failed"))
    assert report_in(with_report(result, made)) == made
    assert report_in(result) is None


def test_repeated_runs_tell_which_tests_are_flaky() -> None:
    one = report_of(Asked("x"), ended(0), reported("passed", "passed"))
    two = report_of(Asked("x"), ended(1), reported("passed", "failed"))
    both = combined([one, two, one])
    assert (both.status, both.runs) == ("failed", 3)
    assert [(f.id, f.passed, f.failed) for f in both.flaky] == [("t1", 2, 1)]


# --- what is asked, and what is found ---


@pytest.mark.parametrize(
    "wrong",
    [
        {"shard": "5/4"}, {"shard": "x"}, {"repeat": 0}, {"reports": ["../x"]}, {"only": "abc"}, {"command": []},
        {"timeout": float("nan")}, {"command": False}, {"only": 3}, {"environment": {"A=B": "x"}},
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(errors.InvalidRequest):
        options_of(**wrong)
    assert options_of(shard="2/4").shard == (2, 4)


@pytest.mark.parametrize(
    ("files", "name", "command"),
    [
        ({"pytest.ini": "", "a.py": ""}, "pytest", "python3 -m pytest"),
        ({"pyproject.toml": "[tool.pytest.ini_options]"}, "pytest", "python3 -m pytest"),
        ({"pyproject.toml": 'dependencies = ["pytest>=8"]'}, "pytest", "python3 -m pytest"),
        ({"tests/conftest.py": ""}, "pytest", "python3 -m pytest"),
        ({"test_a.py": "import pytest\n"}, "pytest", "python3 -m pytest"),
        ({"test_a.py": "def test_a():\n    assert 1\n"}, "pytest", "python3 -m pytest"),
        ({"test_a.py": "import unittest\n"}, "unittest", "python3 -m unittest discover"),
        ({"tests/test_a.py": "", "x.py": ""}, "unittest", "python3 -m unittest discover -s tests"),
        ({"package.json": '{"scripts": {"test": "vitest run"}}'}, "vitest", "npm test"),
        ({"package.json": '{"devDependencies": {"jest": "^29"}}'}, "jest", "npx --no-install jest"),
        ({"package.json": '{"scripts": {"test": "no test specified"}}', "a.test.js": ""}, "node", "node --test"),
        ({"package.json": '{"testCommands": ["bun test"], "sandbox": {}}'}, "bun", "bun test"),
        ({".openagents/project.json": '{"testCommands": ["pytest tests/"]}'}, "pytest", "pytest tests/"),
        ({"go.mod": "module m"}, "go", "go test ./..."),
        ({"Cargo.toml": ""}, "cargo", "cargo test"),
        ({"deno.json": "{}"}, "deno", "deno test -A"),
        ({"package.json": "[" * 9000, "test_a.py": ""}, "unittest", "python3 -m unittest discover"),
    ],
)  # fmt: skip
def test_the_framework_is_found_by_the_files_of_the_project(files: dict[str, str], name: str, command: str) -> None:
    found = frameworks.detect(frameworks.Project(frozenset(files), files))
    assert (found.name, found.command) == (name, command) and found.reason


def test_what_a_project_lists_is_installed_by_plain_names_and_the_rest_is_said() -> None:
    texts = {
        "requirements.txt": "requests>=2  # http\n-r x\ngit+https://example.org/x\nattrs==1.0 --hash=sha256:00\n",
        "pyproject.toml": '[project]\ndependencies = ["idna", "tomli; python_version < \'3.11\'"]\n'
        '[dependency-groups]\ntest = ["hypothesis", "Requests"]\n',
        "package.json": '{"devDependencies": {"mocha": "^11", "local": "file:../x"}}',
    }
    found = dependencies(frameworks.Project(frozenset(texts), texts), "pytest", coverage=True)
    assert found.names == ("requests>=2", "attrs==1.0", "idna", "hypothesis", "npm:mocha@^11", "pytest", "coverage")
    assert len(found.left_out) == 4 and all("not installed" in one for one in found.left_out)


def test_a_project_without_tests_is_told_to_name_a_command() -> None:
    with pytest.raises(errors.InvalidRequest, match="no test framework"):
        frameworks.detect(frameworks.Project(frozenset(["README"]), {}))
