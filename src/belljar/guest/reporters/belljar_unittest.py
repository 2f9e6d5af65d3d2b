"""Has unittest's text runner write what each test came to, one JSON object a line. See `sitecustomize`."""

import json
import os
import sys
import time
import traceback
import types

_LIMIT = 30000


def _settings():
    try:
        with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "settings.json")) as file:
            return json.load(file)
    except (OSError, ValueError):
        return {}


def _cut(text):
    return text if len(text) <= _LIMIT else text[: _LIMIT // 2] + "\n[...]\n" + text[-_LIMIT // 2 :]


def _begin_coverage(settings):
    if not settings.get("coverage"):
        return None, ""
    try:
        import coverage
    except ImportError:
        return None, "coverage was not measured: there is no coverage.py here (--packages coverage)"
    measured = coverage.Coverage(data_file=None, source=["."], config_file=True)
    measured.start()
    return measured, ""


def mend(runner: types.ModuleType) -> None:
    """Makes the runner's results report. The first process that runs tests takes part, and none that it starts."""
    out = os.environ.pop("BELLJAR_UNITTEST_OUT", "")
    if not out:
        return
    settings = _settings()
    measured, note = _begin_coverage(settings)
    plain_run, state = runner.TextTestRunner.run, {}

    def say(**event):
        if "file" not in state:
            name = f"unittest-{os.getpid()}.jsonl"
            state["file"] = os.open(os.path.join(out, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(state["file"], (json.dumps(event) + "\n").encode("utf-8", "replace"))

    def run(self, test):
        if state.get("running"):  # a test that runs tests
            return plain_run(self, test)
        state["running"] = True
        say(event="start", framework="unittest")
        if note:
            say(event="note", text=note)
        test = _chosen(test, settings)
        say(event="collected", count=test.countTestCases())
        plain_class = self.resultclass
        self.resultclass = lambda *a, **k: _reporting(plain_class(*a, **k), say)
        try:
            result = plain_run(self, test)
        finally:
            self.resultclass = plain_class
        if measured is not None:
            _end_coverage(measured, out, say)
        say(event="end", exit=0 if result.wasSuccessful() else 1)
        return result

    runner.TextTestRunner.run = run


def _end_coverage(measured, out, say):
    try:
        measured.stop()
        measured.json_report(outfile=os.path.join(out, f"coverage-{os.getpid()}.json"))
    except Exception as error:
        say(event="note", text=f"coverage was not measured: {error}")


def _flat(test):
    try:
        inside = list(test)
    except TypeError:
        return [test]
    return [one for part in inside for one in _flat(part)]


def _chosen(test, settings):
    only, shard = settings.get("only"), settings.get("shard")
    if not (only or shard):
        return test
    import unittest

    cases = _flat(test)
    if only:
        cases = [case for case in cases if _id(case) in only]
    if shard:
        part, parts = shard
        ranks = {id: rank for rank, id in enumerate(sorted(_id(case) for case in cases))}
        cases = [case for case in cases if ranks[_id(case)] % parts == part - 1]
    return unittest.TestSuite(cases)


def _id(test):
    found = getattr(test, "id", None)
    return str(found()) if callable(found) else str(test)


def _reporting(result, say):  # noqa: PLR0915 (one closure for each hook of a result)
    """Makes one result tell `say` of each test."""
    began, seen, output = {}, {}, {}
    plain = {name: getattr(result, name) for name in _HOOKS if hasattr(result, name)}

    def note(test, outcome, message="", error=None):
        worse = {"passed": 0, "skipped": 1, "failed": 2, "error": 3}
        event = {"outcome": outcome, "message": message[:2000]}
        if error is not None:
            event.update(_told(result, test, error))
        id = _id(test)
        if id not in seen or worse[outcome] > worse[seen[id]["outcome"]]:
            seen[id] = event
        return id

    def write(test):
        id = _id(test)
        event = seen.pop(id, {"outcome": "passed"})
        place = _where(test)
        spent = time.perf_counter() - began.pop(id) if id in began else None
        base = {"id": id, "name": id, "file": place[0], "line": place[1], "seconds": spent}
        base.update(event)
        if event["outcome"] in ("failed", "error") and output.get(id):
            base["output"] = _cut(output.pop(id))
        say(event="test", **base)

    def start(test):
        began[_id(test)] = time.perf_counter()
        plain["startTest"](test)

    def stop(test):
        if getattr(result, "buffer", False):
            texts = [getattr(result, name, None) for name in ("_stdout_buffer", "_stderr_buffer")]
            output[_id(test)] = "".join(text.getvalue() for text in texts if text is not None)
        write(test)
        plain["stopTest"](test)

    def outside(test):  # setUpClass, setUpModule, a module that cannot be imported: nobody starts those
        if _id(test) not in began:
            write(test)

    def add_error(test, error):
        note(test, "error", error=error)
        plain["addError"](test, error)
        outside(test)

    def add_failure(test, error):
        note(test, "failed", error=error)
        plain["addFailure"](test, error)

    def add_skip(test, reason):
        note(test, "skipped", str(reason))
        plain["addSkip"](test, reason)
        outside(test)

    def add_expected(test, error):
        note(test, "skipped", "expected to fail")
        plain["addExpectedFailure"](test, error)

    def add_unexpected(test):
        note(test, "failed", "was expected to fail, and passed")
        plain["addUnexpectedSuccess"](test)

    def add_sub(test, subtest, error):
        if error is not None:
            kind = "failed" if issubclass(error[0], test.failureException) else "error"
            note(test, kind, error=error)
        plain["addSubTest"](test, subtest, error)

    own = {
        "startTest": start, "stopTest": stop, "addError": add_error, "addFailure": add_failure, "addSkip": add_skip,
        "addExpectedFailure": add_expected, "addUnexpectedSuccess": add_unexpected, "addSubTest": add_sub,
    }  # fmt: skip
    for name in plain:
        setattr(result, name, own[name])
    return result


_HOOKS = (
    "startTest", "stopTest", "addError", "addFailure", "addSkip", "addExpectedFailure", "addUnexpectedSuccess",
    "addSubTest",
)  # fmt: skip


def _told(result, test, error):
    kind, value, trace = error
    try:
        lines = result._exc_info_to_string(error, test)  # as it prints it: without unittest's own frames
    except Exception:
        lines = "".join(traceback.format_exception(kind, value, trace))
    here = os.getcwd() + os.sep
    frames = [
        frame for frame in traceback.extract_tb(trace)
        if os.path.abspath(frame.filename).startswith(here) and "site-packages" not in frame.filename
    ]  # fmt: skip
    message = str(value).strip() or kind.__name__
    told = {"message": f"{kind.__name__}: {message}", "traceback": _cut(lines)}
    if frames:
        own = _where(test)[0]
        same = [frame for frame in frames if os.path.abspath(frame.filename)[len(here) :] == own]
        told["fail_line"] = (same or frames)[-1].lineno
        if not own:
            told["file"] = os.path.abspath(frames[-1].filename)[len(here) :]
    return told


def _where(test):
    """The file and line of a test, relative to the folder in which it runs."""
    try:
        import inspect

        method = getattr(type(test), getattr(test, "_testMethodName", ""), None)
        file = sys.modules[type(test).__module__].__file__ or ""
        here = os.getcwd() + os.sep
        path = os.path.abspath(file)
        if not path.startswith(here):
            return "", None
        code = inspect.unwrap(method).__code__ if method is not None else None
        return path[len(here) :], code.co_firstlineno if code is not None else None
    except Exception:
        return "", None
