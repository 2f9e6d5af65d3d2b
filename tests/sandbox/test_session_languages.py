"""Sessions of JavaScript and bash: what stays between turns, what is shown, how a turn fails or is interrupted."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import belljar
from belljar.core import errors


@pytest.fixture(scope="module")
def js() -> Iterator[belljar.Session]:
    with belljar.Session(language="js", backend="native") as session:
        yield session


@pytest.fixture
def bash() -> Iterator[belljar.Session]:
    with belljar.Session(language="bash", backend="native") as session:
        yield session


def plain(result: belljar.Result) -> list[str]:
    assert result.ok, result.stderr
    return [bundle["text/plain"] for bundle in result.results]


def interrupted(session: belljar.Session, code: str) -> belljar.Result:
    """Interrupts a turn once it has printed something."""
    started = threading.Event()
    waiter = threading.Thread(target=lambda: started.wait(20) and session.interrupt())
    waiter.start()
    result = session.run(code, timeout=20, on_stdout=lambda _: started.set())
    waiter.join()
    return result


# --- JavaScript ---


def test_declarations_stay_and_may_be_repeated_and_the_last_value_is_shown(js: belljar.Session) -> None:
    assert js.language == "javascript"
    assert js.run("const x = 20; let y = 1; class A {}; function twice(n) { return 2 * n }").results == ()
    assert plain(js.run("const x = 21; class A {}; twice(x)")) == ["42"]
    assert js.run("({a: [1, 'b']})").results == (
        {"text/plain": "{ a: [ 1, 'b' ] }", "application/json": {"a": [1, "b"]}},
    )
    assert plain(js.run("[x, y, undefined, 3n]")) == ["[ 21, 1, undefined, 3n ]"]
    assert js.run("undefined").results == () and js.complete("Obj") == ()
    js.run("require('fs').writeFileSync('kept.txt', 'kept')")
    assert js.read("kept.txt") == b"kept"


def test_javascript_awaits_and_imports_at_the_top(js: belljar.Session) -> None:
    assert plain(js.run("await new Promise(done => setTimeout(done, 5, 'slept'))")) == ["'slept'"]
    code = (
        "import fs, { readFileSync as read } from 'node:fs';\nimport * as path from 'path'\n"
        "const os = await import('os');\n[typeof fs.readFileSync, typeof read, path.join('a', 'b'), typeof os.cpus, "
        "`import(x)`].join()"
    )
    assert plain(js.run(code)) == ["'function,function,a/b,function,import(x)'"]
    js.write("mine.mjs", "export const name = 'mine'; export default 5")
    assert plain(js.run("import five, { name } from './mine.mjs'; name + five")) == ["'mine5'"]


def test_javascript_displays_and_prints_in_order(js: belljar.Session) -> None:
    result = js.run(
        "console.log('a'); display({'text/html': '<b>'}, {raw: true}); console.error('side');"
        "display({[Symbol.for('Jupyter.display')]() { return {'text/markdown': '*m*'} }});"
        "require('child_process').spawnSync('echo', ['child'], {stdio: 'inherit'}); 1"
    )
    assert (result.stdout, result.stderr) == ("a\nchild\n", "side\n")
    assert [{"text/html", "text/markdown"} & bundle.keys() for bundle in result.results] == [
        {"text/html"}, {"text/markdown"}, set(),
    ]  # fmt: skip


def test_an_error_of_javascript_has_its_name_value_and_place(js: belljar.Session) -> None:
    error = js.run("function f() {\n  throw new TypeError('bad') }\nf()").error
    assert error is not None and error.exception is not None
    assert (error.exception.name, error.exception.value) == ("TypeError", "bad")
    assert "session_agent" not in error.exception.traceback and "node:" not in error.exception.traceback
    assert error.message == "TypeError: bad" and error.context["line"] == 2
    broken = js.run("let z = 1\nlet q = = 5").error
    assert broken is not None and broken.error_type == "SYNTAX_ERROR" and broken.context["line"] == 2
    missing = js.run("require('left-pad')").error
    assert missing is not None and missing.error_type == "MISSING_PACKAGE" and "left-pad" in missing.suggestion
    assert js.run("process.exit(3)").exit_code == 3
    assert js.run("throw 'text'").status == "error" and plain(js.run("'alive'")) == ["'alive'"]


@pytest.mark.parametrize(
    "code",
    [
        "while (true) {}",
        "await new Promise(() => {})",
        "await 1; while (true) {}",
        "require('child_process').execSync('sleep 60')",
    ],
)
def test_a_turn_of_javascript_over_its_time_or_interrupted_keeps_what_there_is(js: belljar.Session, code: str) -> None:
    js.run("let kept = 7")
    late = js.run(f"console.log('partial'); {code}", timeout=0.5)
    assert (late.status, late.exit_code, late.stdout) == ("timeout", 124, "partial\n")
    assert interrupted(js, f"console.log('partial'); {code}").status == "aborted"
    assert plain(js.run("kept")) == ["7"]


def test_a_flood_of_javascript_is_cut_and_the_next_turn_is_whole() -> None:
    with belljar.Session(language="javascript", backend="native", output="10K") as session:
        result = session.run("for (let i = 0; i < 20000; i++) console.log('xxxxxxxxxxxxxxxxxxxx'); 5")
        assert result.truncated and result.status == "output_limit"
        assert session.run("console.log('ok')").stdout == "ok\n"


# --- bash ---


def test_variables_functions_and_the_folder_stay_in_bash(bash: belljar.Session) -> None:
    assert bash.run('x=5; cd /tmp; f() { echo "it\'s $1"; }').ok
    result = bash.run('f é; echo "$x $PWD"; echo side >&2')
    assert (result.stdout, result.stderr) == ("it's é\n5 /tmp\n", "side\n")
    assert bash.run("printf 'no line end'").stdout == "no line end"
    assert bash.run("cat").ok, "it has no input"
    assert bash.run("for i in 1 2; do\n  echo $i\ndone").stdout == "1\n2\n"
    failed = bash.run("echo a; false")
    assert (failed.status, failed.exit_code, failed.stdout) == ("error", 1, "a\n")
    assert bash.run("sleep 60 & echo started").stdout == "started\n"
    assert "sleep 60" in bash.run("jobs; kill %1").stdout


def test_errors_of_bash_are_told_as_such(bash: belljar.Session) -> None:
    missing = bash.run("nonsense").error
    assert missing is not None and missing.error_type == "MISSING_PACKAGE" and "nonsense" in missing.suggestion
    broken = bash.run("if then").error
    assert broken is not None and broken.error_type == "SYNTAX_ERROR"
    assert bash.run("echo 'unfinished").error is not None and bash.run("echo ok").stdout == "ok\n"


@pytest.mark.parametrize(
    "code", ["while :; do :; done", "sleep 60; echo never", "g() { while :; do :; done; }; g", "(sleep 60)"]
)
def test_a_turn_of_bash_over_its_time_or_interrupted_keeps_what_there_is(bash: belljar.Session, code: str) -> None:
    bash.run("kept=7")
    late = bash.run(f"echo partial; {code}", timeout=0.5)
    assert (late.status, late.exit_code, late.stdout) == ("timeout", 124, "partial\n")
    assert interrupted(bash, f"echo partial; {code}").status == "aborted"
    assert bash.run("echo $kept").stdout == "7\n"


def test_what_a_shell_does_for_good_is_done_and_its_exit_ends_the_session() -> None:
    with belljar.Session(language="bash", backend="native") as session:
        assert session.run("exec >/tmp/elsewhere").ok and session.run("echo hidden").stdout == ""
        assert session.run("cat /tmp/elsewhere >&2").stderr == "hidden\n"
        assert (session.run("exit 4").exit_code, session.ended) == (4, "error, exit code 4")
        with pytest.raises(errors.SessionEnded):
            session.run("echo")


def test_a_guest_that_forges_frames_harms_only_itself(bash: belljar.Session) -> None:
    forged = 'builtin printf "$(declare -f __belljar | grep -o \'\\$[^{]*\' | head -1)"\'{"done":99}\\n\'; echo "[1]"'
    bash.run(forged, timeout=5)
    assert bash.run("echo still").stdout == "still\n"


def test_a_language_without_sessions_is_refused_by_name() -> None:
    for language, backend in (("go", "native"), ("bash", "wasm")):
        with pytest.raises(errors.BelljarError, match=f"no sessions of {language}"):
            belljar.Session.open(language=language, backend=backend)
