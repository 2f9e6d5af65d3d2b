"""A plugin of pytest that writes what each test came to, one JSON object a line. Found by PYTEST_PLUGINS.

What it is to do stands in `settings.json` beside it. Only the first pytest of a run takes part: one that a test starts
finds nothing of it in its environment.
"""

import json
import os

import pytest

try:
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "settings.json")) as _file:
        _SETTINGS = json.load(_file)
except (OSError, ValueError):
    _SETTINGS = {}
_OUT = os.environ.pop("BELLJAR_PYTEST_OUT", "")  # xdist's workers, and what a test starts, have none
_MINE = "belljar_pytest"
_LIMIT = 30000
_coverage = None


def _forget():
    rest = [name for name in os.environ.get("PYTEST_PLUGINS", "").split(",") if name and name != _MINE]
    if rest:
        os.environ["PYTEST_PLUGINS"] = ",".join(rest)
    else:
        os.environ.pop("PYTEST_PLUGINS", None)


_forget()


def _begin_coverage():
    global _coverage
    if not (_OUT and _SETTINGS.get("coverage")):
        return ""
    try:
        import coverage
    except ImportError:
        return "coverage was not measured: there is no coverage.py here (--packages coverage)"
    _coverage = coverage.Coverage(data_file=None, source=["."], config_file=True)
    _coverage.start()
    return ""


def pytest_load_initial_conftests(
    early_config: "pytest.Config",
) -> None:  # after which plugins and conftests import the project
    arguments = early_config.known_args_namespace
    early_config._belljar_cov = bool(getattr(arguments, "cov_source", None))


_NOTE = _begin_coverage()


def _cut(text):
    return text if len(text) <= _LIMIT else text[: _LIMIT // 2] + "\n[...]\n" + text[-_LIMIT // 2 :]


class _Reporter:
    def __init__(self, config):
        self.config = config
        self.tests = {}
        self.file = os.open(
            os.path.join(_OUT, f"pytest-{os.getpid()}.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )
        self.say(event="start", framework="pytest")
        if _NOTE:
            self.say(event="note", text=_NOTE)

    def say(self, **event):
        os.write(self.file, (json.dumps(event) + "\n").encode("utf-8", "replace"))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, session, config, items):
        _choose(config, items)

    def pytest_collection_finish(self, session):
        if session.items:
            self.say(event="collected", count=len(session.items))

    def pytest_collectreport(self, report):
        if report.failed:
            place = _place(report.longrepr)
            self.say(
                event="test", id=report.nodeid or "collection", name=report.nodeid or "collection", outcome="error",
                file=place[0] or report.nodeid.partition("::")[0], fail_line=place[1],
                message=_message(report.longrepr),
                traceback=_cut(str(report.longrepr)), output=_cut(_printed(report)),
            )  # fmt: skip
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.say(
                event="test", id=report.nodeid, name=report.nodeid, outcome="skipped",
                file=report.nodeid.partition("::")[0], message=reason,
            )  # fmt: skip

    def pytest_runtest_logreport(self, report):
        if report.outcome == "rerun":
            self.tests.pop(report.nodeid, None)
            return
        if type(report).__name__ == "SubtestReport" or hasattr(report, "context"):
            if report.failed:
                about = "{} [{}]".format(report.nodeid, getattr(report, "context", ""))
                self.one(about, [report])
            return
        seen = self.tests.setdefault(report.nodeid, [])
        seen.append(report)
        if report.when == "teardown":
            self.one(report.nodeid, self.tests.pop(report.nodeid))

    def one(self, id, reports):
        worst = next((one for one in reports if one.failed), None) or next(
            (one for one in reports if one.skipped), None
        )
        last = worst or reports[-1]
        outcome = "passed"
        if worst is not None and worst.failed:
            outcome = "failed" if worst.when == "call" else "error"
        elif worst is not None:
            outcome = "skipped"
        file, line = (last.location[0], last.location[1]) if last.location else ("", None)
        event = {
            "event": "test", "id": id, "name": id.partition("::")[2] or id, "outcome": outcome,
            "file": file, "line": None if line is None else line + 1,
            "seconds": round(sum(getattr(one, "duration", 0) for one in reports), 6),
        }  # fmt: skip
        if outcome == "skipped":
            reason = last.longrepr[2] if isinstance(last.longrepr, tuple) else str(last.longrepr or "")
            event["message"] = str(getattr(last, "wasxfail", "") or reason)[:2000]
        elif outcome != "passed":
            place = _place(last.longrepr)
            if place[0] and place[0] != file:  # it failed in another file, such as a helper of the tests
                event["message"] = f"{_message(last.longrepr)} (at {place[0]}:{place[1]})"
            else:
                event["message"] = _message(last.longrepr)
                event["fail_line"] = place[1]
            event["traceback"] = _cut(str(last.longrepr))
            event["output"] = _cut(_printed(last))
        self.say(**event)

    def pytest_sessionfinish(self, session, exitstatus):
        for id, reports in list(self.tests.items()):  # of a worker that died
            self.one(id, reports)
        _end_coverage(self)
        self.say(event="end", exit=int(exitstatus))


def _printed(report):
    return "".join(f"[{name}]\n{text}\n" for name, text in report.sections if text.strip())


def _message(longrepr):
    crash = getattr(longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(longrepr)
    lines = [line for line in text.splitlines() if line.strip()]
    if crash is None and lines:
        return lines[-1].lstrip("E ")[:2000]
    return "\n".join(lines)[:2000]


def _place(longrepr):
    """The file and line of the failure: relative to the folder in which pytest runs, if it is below that."""
    crash = getattr(longrepr, "reprcrash", None)
    entries = getattr(getattr(longrepr, "reprtraceback", None), "reprentries", None) or []
    here = os.getcwd() + os.sep
    for entry in reversed(entries):  # the deepest that is the project's
        where = getattr(entry, "reprfileloc", None)
        if where is not None:
            path = os.path.abspath(where.path)
            if path.startswith(here) and "site-packages" not in path:
                return path[len(here) :], where.lineno
    if crash is not None and os.path.abspath(crash.path).startswith(here):
        return os.path.abspath(crash.path)[len(here) :], crash.lineno
    return "", None


def _choose(config, items):
    """Leaves the tests that were asked for: those that are named, or one part of all."""
    keep = items[:]
    only, shard = _SETTINGS.get("only"), _SETTINGS.get("shard")
    if only:
        names = set(only)
        keep = [item for item in keep if item.nodeid in names]
    if shard:
        part, parts = shard
        ranks = {id: rank for rank, id in enumerate(sorted(item.nodeid for item in keep))}
        keep = [item for item in keep if ranks[item.nodeid] % parts == part - 1]
    if len(keep) != len(items):
        kept = set(map(id, keep))
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
        items[:] = keep


def _end_coverage(reporter):
    if _coverage is None:
        return
    if getattr(reporter.config, "_belljar_cov", False):
        _coverage.stop()
        reporter.say(event="note", text="coverage was not measured: pytest-cov does already")
        return
    try:
        _coverage.stop()
        _coverage.json_report(outfile=os.path.join(_OUT, f"coverage-{os.getpid()}.json"))
    except Exception as error:  # such as: nothing was measured
        reporter.say(event="note", text=f"coverage was not measured: {error}")


def pytest_configure(config: "pytest.Config") -> None:
    if _OUT and not hasattr(config, "workerinput"):  # a worker of xdist tells the process that started it
        config.pluginmanager.register(_Reporter(config), "belljar-reporter")
