"""Turns as they are written in notebooks: display, await, `!ls`, `%pip`; what they show and how they fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import belljar


@pytest.fixture(scope="module")
def native() -> Iterator[belljar.Session]:
    with belljar.Session(backend="native") as session:
        yield session


@pytest.fixture(scope="module")
def wasm() -> Iterator[belljar.Session]:
    with belljar.Session(backend="wasm", timeout=60) as session:
        yield session


@pytest.fixture(params=["native", "wasm"])
def session(request: pytest.FixtureRequest) -> belljar.Session:
    found: belljar.Session = request.getfixturevalue(request.param)
    return found


def plain(result: belljar.Result) -> list[str]:
    assert result.ok, result.stderr
    return [bundle.get("text/plain", "") for bundle in result.results]


def test_a_turn_may_await_and_its_tasks_go_on_in_later_turns(session: belljar.Session) -> None:
    started = (
        "import asyncio\nlater = asyncio.ensure_future(asyncio.sleep(0.01, 'later'))\nawait asyncio.sleep(0, 'now')"
    )
    assert plain(session.run(started)) == ["'now'"]
    assert plain(session.run("await later")) == ["'later'"]
    assert plain(session.run("async with asyncio.timeout(5):\n    x = await asyncio.sleep(0, 3)\nx")) == ["3"]


def test_what_is_displayed_comes_back_in_order_and_in_all_its_forms(session: belljar.Session) -> None:
    code = """class Rich:
    def __repr__(self): return "rich"
    def _repr_markdown_(self): return "**rich**"
    def _repr_latex_(self): return "$r$"
    def _repr_svg_(self): return "<svg/>"
    def _repr_png_(self): return b"png", {"width": 1}
    def _repr_json_(self): return {"r": [1]}
class Bundle:
    def _repr_mimebundle_(self, include=None, exclude=None): return {"text/plain": "b", "x/y": 1, "z/z": object()}
def show():
    display(Rich(), Bundle())
    display({"text/html": "<b>raw</b>", "image/png": b"raw"}, raw=True)
show()
'last'"""
    result = session.run(code)
    assert result.ok, result.stderr
    rich, bundle, raw, last = result.results
    assert rich == {
        "text/plain": "rich", "text/markdown": "**rich**", "text/latex": "$r$", "image/svg+xml": "<svg/>",
        "image/png": "cG5n", "application/json": {"r": [1]},
    }  # fmt: skip
    assert bundle == {"text/plain": "b", "x/y": 1}
    assert raw == {"text/html": "<b>raw</b>", "image/png": "cmF3"}
    assert last == {"text/plain": "'last'"}


def test_an_exception_is_told_by_its_name_value_and_traceback(session: belljar.Session) -> None:
    session.run("class Own(ValueError): pass\ndef f(x):\n    raise Own(f'no {x}')")
    error = session.run("f(1)").error
    assert error is not None and error.exception is not None
    assert (error.exception.name, error.exception.value) == ("Own", "no 1")
    assert "raise Own(f'no {x}')" in error.exception.traceback
    assert "agent" not in error.exception.traceback
    awaited = session.run("import asyncio\nasync def g():\n    f(2)\nawait g()").error
    assert awaited is not None and awaited.exception is not None
    assert awaited.exception.value == "no 2" and "awaiting" not in awaited.exception.traceback
    assert session.run("1").error is None
    left = session.run("raise SystemExit(3)")
    assert left.error is not None and left.error.exception is None and left.exit_code == 3
    hostile = session.run("class H(Exception):\n    def __str__(self): raise KeyError\nraise H")
    assert hostile.error is not None and hostile.error.exception is not None and hostile.error.exception.name == "H"


def test_lines_for_the_shell_run_in_it_and_take_values_of_the_session(native: belljar.Session) -> None:
    native.run("name, words = 'x y', ['a']")
    result = native.run(
        "!echo {len(words)} $HOME '{no such}' \"$name\"; echo side >&2\nif words:\n    !exit 3\n_exit_code"
    )
    assert (result.stdout, result.stderr, plain(result)) == ("1 /tmp {no such} x y\n", "side\n", ["3"])
    assert plain(native.run("lines = !printf 'a\\nb\\n'\nlines")) == ["['a', 'b']"]
    assert native.run("!echo one \\\n  two").stdout == "one two\n"
    assert native.run("%%bash\nfor i in 1 2; do\n  echo $i\ndone").stdout == "1\n2\n"
    failed = native.run("%%bash\nexit 4").error
    assert failed is not None and failed.exception is not None and failed.exception.name == "CalledProcessError"
    text = native.run("text = '''\n!not a command\n%nor this\n'''\nprint(text)\n5 \\\n% 3")
    assert text.stdout == "\n!not a command\n%nor this\n\n" and plain(text) == ["2"]


def test_a_shell_line_over_its_time_is_killed_and_the_session_goes_on(native: belljar.Session) -> None:
    native.run("kept = 5")
    assert native.run("!sleep 60", timeout=0.5).status == "timeout"
    assert plain(native.run("import subprocess\n(kept, subprocess.run(['pgrep', 'sleep']).returncode)")) == ["(5, 1)"]


def test_the_few_magics_do_what_they_do_in_notebooks(session: belljar.Session) -> None:
    assert plain(session.run("%cd /tmp")) == ["'/tmp'"]
    assert plain(session.run("%pwd")) == ["'/tmp'"]
    assert plain(session.run("%env A=b\n%env A")) == ["'b'"]
    assert "wall time" in session.run("%time x = 7").stdout and plain(session.run("x")) == ["7"]
    assert session.run("%%writefile a.txt\nhello\n").ok and plain(session.run("open('a.txt').read()")) == ["'hello\\n'"]
    wrong = session.run("%nothing").error
    assert wrong is not None and "there is no %nothing here" in wrong.message
    session.run("%cd /workspace")


def test_a_package_that_cannot_be_fetched_says_so(native: belljar.Session) -> None:
    error = native.run("%pip install some-package-that-is-not-here").error
    assert error is not None and error.error_type in ("NETWORK_ERROR", "MISSING_PACKAGE"), error


@pytest.mark.parametrize("code", ["!ls", "x = !ls", "%pip install x", "%%bash\nls"])
def test_on_wasm_what_needs_processes_is_refused_by_name(wasm: belljar.Session, code: str) -> None:
    error = wasm.run(code).error
    assert error is not None and error.error_type == "PROCESS_LIMIT"
    assert "there are no processes in the wasm runtime: ask for backend=native" in error.suggestion


def test_a_table_comes_back_as_data(wasm: belljar.Session) -> None:
    code = "import pandas as pd\npd.DataFrame({'n': [1, 2], 's': ['a', None], 'f': [0.5, float('nan')]})"
    table = wasm.run(code).results[0]
    assert "<table" in table["text/html"]
    assert table["application/vnd.dataresource+json"] == {
        "schema": {"fields": [
            {"name": "index", "type": "integer"}, {"name": "n", "type": "integer"}, {"name": "s", "type": "string"},
            {"name": "f", "type": "number"},
        ]},
        "data": [{"index": 0, "n": 1, "s": "a", "f": 0.5}, {"index": 1, "n": 2, "s": None, "f": None}],
        "total_rows": 2,
    }  # fmt: skip
    large = wasm.run("pd.DataFrame({'n': range(5000)})").results[0]["application/vnd.dataresource+json"]
    assert (len(large["data"]), large["total_rows"]) == (1000, 5000)
    row = wasm.run("pd.Series([1, 2], name='v')").results[0]["application/vnd.dataresource+json"]
    assert row["data"] == [{"index": 0, "v": 1}, {"index": 1, "v": 2}]


def test_a_figure_that_is_displayed_is_a_picture(wasm: belljar.Session) -> None:
    code = "import matplotlib.pyplot as plt\nfigure, axes = plt.subplots()\ndisplay(figure)\nplt.close(figure)"
    assert wasm.run(code).results[0]["image/png"].startswith("iVBOR")
