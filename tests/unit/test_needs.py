"""What a snippet needs is read from its text; in doubt something is needed, and nothing in a text can do harm."""

from __future__ import annotations

import ast
import time
import warnings

import pytest
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st

from belljar.core.hints import analyse
from belljar.core.plan import Needs

patient = trials(deadline=None)  # a machine that is busy with other things is not a failure


@pytest.mark.parametrize(
    ("code", "modules"),
    [
        ("import numpy", {"numpy"}),
        ("import os.path, numpy.linalg as la", {"os", "numpy"}),
        ("from a.b.c import d", {"a"}),
        ("from . import sibling\nfrom .near import x", set()),
        ("def f():\n    if x:\n        import deep", {"deep"}),
        ("try:\n    import ujson as json\nexcept ImportError:\n    import json", {"ujson", "json"}),
        ("import importlib\nimportlib.import_module('pandas.io')", {"importlib", "pandas"}),
        ("from importlib import import_module as load\nload('x')", {"importlib", "x"}),
        ("__import__('requests').get('x')", {"requests"}),
        ("print('import torch')  # import tensorflow", set()),
    ],
)  # fmt: skip
def test_every_import_is_found_wherever_it_is(code: str, modules: set[str]) -> None:
    assert analyse(code).modules == modules


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import subprocess\nsubprocess.run(['ls'])", "may start processes (subprocess.run)"),
        ("from subprocess import check_output as sh\nsh('ls')", "may start processes (subprocess.check_output)"),
        ("import os\nos.system('ls')", "may start processes (os.system)"),
        ("import os as o\no.fork()", "may start processes (os.fork)"),
        ("from os import execv\nexecv('x', [])", "may start processes (os.execv)"),
        ("import multiprocessing as mp\nmp.Pool(2)", "may start processes (multiprocessing.Pool)"),
        ("import pty\npty.spawn('sh')", "may start processes (pty.spawn)"),
        ("from concurrent.futures import ProcessPoolExecutor as P\nP()", "may start processes"),
        ("import concurrent.futures as cf\ncf.ThreadPoolExecutor()", "may start threads"),
        ("import threading\nthreading.Thread(target=f).start()", "may start threads (threading.Thread)"),
        ("from threading import *\nThread(target=f).start()", "may start threads (threading)"),
        ("from os import *\nsystem('ls')", "does what its text does not tell (all of os)"),
        ("import _thread\n_thread.start_new_thread(f, ())", "may start threads"),
        ("import asyncio\nasyncio.run(f())", "may use sockets (asyncio.run)"),
        ("import asyncio\nasyncio.create_subprocess_exec('ls')", "may use sockets (asyncio.create_subprocess_exec)"),
        ("import socket\nsocket.socket()", "may use sockets (socket.socket)"),
        ("import urllib.request\nurllib.request.urlopen('http://x')", "may use sockets (urllib.request.urlopen)"),
        ("from http.client import HTTPConnection\nHTTPConnection('x')", "may use sockets"),
        ("import signal\nsignal.alarm(1)", "may use signals (signal.alarm)"),
        ("import ctypes\nctypes.CDLL(None)", "may use memory or C code directly (ctypes.CDLL)"),
        ("import os\nopen(os.devnull)", "may ask the operating system (os.devnull)"),
        ("open('/proc/self/status')", "may ask the operating system (/proc/self/status)"),
        ("open(f'/proc/{pid}/maps')", "may ask the operating system (/proc/)"),
        ("import os\ngetattr(os, 'fo' + 'rk')()", "does what its text does not tell (os)"),
        ("import importlib\nimportlib.import_module(name)", "does what its text does not tell"),
        ("load = __import__\nload('os').fork()", "does what its text does not tell (__import__)"),
        ("__import__('subprocess').run('ls')", "may start processes (subprocess)"),
    ],
)  # fmt: skip
def test_what_wants_an_operating_system_is_named_with_what_gave_it_away(code: str, said: str) -> None:
    system = analyse(code).system
    assert any(need.startswith(said) for need in system), system


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys\nsys.setrecursionlimit(10**6)", "may recurse deeply (sys.setrecursionlimit)"),
        ("from functools import lru_cache\n@lru_cache(None)\ndef f(n): return f(n - 1)", "may recurse deeply"),
        ("import functools\n@functools.cache\ndef f(n): return f(n - 1)", "may recurse deeply (f with a cache)"),
    ],
)  # fmt: skip
def test_what_may_want_a_large_stack_is_told_apart_because_it_is_often_met_anyway(code: str, said: str) -> None:
    needs = analyse(code)
    assert needs.system == ()
    assert len(needs.soft) == 1 and needs.soft[0].startswith(said)


@pytest.mark.parametrize("name", ["active_count()", "enumerate()", "Lock()", "current_thread().name"])
def test_looking_at_threads_starts_none(name: str) -> None:
    assert analyse(f"import threading\nthreading.{name}") == Needs(modules=frozenset({"threading"}))


@pytest.mark.parametrize(
    "code",
    [
        "print(1)",
        "import os\nos.makedirs(os.path.join('a', 'b'))\nprint(os.environ, os.getpid())",
        "import threading\nwith threading.Lock(): pass",
        "import subprocess  # and never used",
        "import urllib.parse\nurllib.parse.quote('x y')",
        "from http import HTTPStatus\nprint(HTTPStatus.OK)",
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_DFL)",
        "import functools\n@functools.cache\ndef f(n): return n + 1\nprint(f(1))",
        "import multiprocessing\nprint(multiprocessing.cpu_count())",
        "subprocess.run('a name that nobody imported')",
        "import sys, time, json, re, math\nprint(time.time(), sys.argv)",
    ],
)
def test_what_fits_an_interpreter_alone_needs_no_system(code: str) -> None:
    assert analyse(code).system == ()


def test_many_examples_of_one_need_are_cut_short() -> None:
    code = "import os\n" + "\n".join(f"os.{name}()" for name in ("fork", "system", "popen", "wait"))
    assert analyse(code).system == ("may start processes (os.fork, os.popen, os.system, …)",)


def test_files_given_with_the_code_satisfy_imports_and_are_read_themselves() -> None:
    files = {"tools.py": b"import socket\nsocket.socket()", "pkg/deep/mod.py": b"import yaml", "data.csv": b"import no"}
    needs = analyse("import tools, pkg.deep.mod, mod, data", files=files)
    assert needs.modules == {"data", "yaml", "socket"}
    assert needs.system == ("may use sockets (socket.socket)",)


@pytest.mark.parametrize(
    ("code", "used"),
    [
        ("const {execSync} = require('child_process'); require('fs')", "child_process"),
        ("import http from 'node:http'; import { x } from \"net\";", "http, net"),
        ("const z = await import('zlib'); import { pipeline } from 'stream/promises';", "stream, zlib"),
    ],
)
def test_javascript_that_takes_a_system_is_told_by_the_modules_it_loads(code: str, used: str) -> None:
    for language in ("javascript", "typescript"):
        assert analyse(code, language).system == (f"may need all of Node.js ({used})",)


def test_javascript_that_takes_an_engine_only_needs_nothing() -> None:
    code = "const fs = require('fs'); import path from 'node:path'; console.log('net', [1].map(x => x))"
    assert analyse(code, "javascript") == Needs()


@pytest.mark.parametrize("language", ["bash", "go", "rust", ""])
def test_other_languages_are_not_analysed(language: str) -> None:
    assert analyse("import os\nos.fork()", language) == Needs()


@pytest.mark.parametrize("language", ["python", "python3", "python3.12"])
def test_every_python_is_analysed(language: str) -> None:
    assert analyse("import os\nos.fork()", language).system


@pytest.mark.parametrize(
    "code", ["import os\nos.fork(", "import os\n\0", "import é\n\ud800", "lazy import json from the future"]
)
def test_what_does_not_parse_needs_nothing_because_every_backend_reports_it(code: str) -> None:
    assert analyse(code) == Needs()


@pytest.mark.parametrize(
    "text",
    [
        "import a" + ".a" * 16_000,
        "import a" + " \\\n . a" * 5_000,
        "import a\n" + "-" * 32_000 + "1",
        "import a\n" + "1" + "+1" * 16_000,
        "import a\na" + ".b" * 16_000,
        "import a\n" + "(" * 32_000,
        "import a\n" + "lambda:" * 4_000 + "1",
        "import a\n" + "x=1\n" * 8_000,
        "import a\n" + "x=1\n" * 4_000_000,
    ],
    ids=["dots", "dots on lines", "signs", "sums", "chain", "brackets", "lambdas", "32 kB", "16 MB"],
)
def test_a_hostile_text_takes_less_than_a_second(text: str) -> None:
    began = time.thread_time()  # of CPU: the machine may be busy
    analyse(text)
    assert time.thread_time() - began < 1


def test_a_text_too_long_to_be_looked_at_counts_as_needing_a_system() -> None:
    assert analyse("import json\n" + "x = 1\n" * 10_000).system == ("is too long to be looked at",)
    assert analyse("x = 1\n" * 10_000) == Needs(), "without an import there is nothing to look for"


def test_the_guest_s_doubtful_escapes_are_no_warning_of_ours() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert analyse("import re\nre.compile('\\d')").modules == {"re"}


_WORDS = st.sampled_from(
    "import from os . * as subprocess ( ) 'x' , \n : def lambda @ functools.cache f __import__ [ ] = \t \\ async".split(
        " "
    )
)


@patient
@given(st.text() | st.lists(_WORDS).map(" ".join), st.sampled_from(["python", "javascript", "bash", ""]))
def test_no_text_makes_it_raise(text: str, language: str) -> None:
    assert isinstance(analyse(text, language, {"a.py": text.encode(errors="surrogatepass")}), Needs)


@patient
@given(st.sets(st.from_regex(r"[a-z_]{1,8}", fullmatch=True)))
def test_whatever_is_imported_is_found(names: set[str]) -> None:
    names = {name for name in names if name.isidentifier() and _parses(f"import {name}")}
    assert analyse("\n".join(f"import {name}" for name in names)).modules == names


def _parses(code: str) -> bool:
    try:
        return bool(ast.parse(code))
    except SyntaxError:
        return False
