"""What is found in the output of a preview's server, and what its pages and addresses refuse."""

from __future__ import annotations

import pytest

from belljar.core import errors
from belljar.preview import pages, proxy
from belljar.preview.backend import ApiBackend
from belljar.preview.project import usual_command
from belljar.preview.watch import OutputWatch

_TRACEBACK = """Traceback (most recent call last):
  File "/workspace/app.py", line 3, in <module>
    import fastapi
ModuleNotFoundError: No module named 'fastapi'
"""
_THROWN = """TypeError: Cannot read properties of undefined (reading 'x')
    at handler (/workspace/server.js:4:9)
    at node:internal/main:1:1

"""


@pytest.mark.parametrize(
    ("text", "kind", "advice"),
    [
        ("Error: listen EADDRINUSE: address already in use :::3000\n", "port_in_use", "port"),
        ("OSError: [Errno 98] Address already in use\n", "port_in_use", "port"),
        ("Error: Cannot find module 'express'\n", "missing", "express is not installed"),
        ("sh: 1: vite: not found\n", "missing", "vite is not there"),
        ('npm error Missing script: "dev"\n', "missing", "no script dev"),
        ("src/App.tsx(3,1): error TS2304: Cannot find name 'x'.\n", "compile", "correct"),
        ("\x1b[31m✘ [ERROR] Could not resolve \"./nope\"\x1b[0m\n", "missing", "nope"),
        ("10:02 [vite] Internal server error: Failed to parse source\n", "compile", "correct"),
        ("  > Local: http://localhost:5173/\n", "other_port", "port=5173"),
        (_TRACEBACK, "missing", "fastapi"),
        (_THROWN, "crash", ""),
        ("panic: runtime error\n", "crash", ""),
    ],
)  # fmt: skip
def test_a_sign_of_trouble_is_told_with_what_can_be_done(text: str, kind: str, advice: str) -> None:
    (found,) = OutputWatch(3000).hear("stderr", text)
    assert found.kind == kind
    assert advice in found.suggestion
    assert "\x1b" not in found.message


def test_output_that_comes_in_pieces_is_read_as_lines_and_told_once() -> None:
    watch = OutputWatch(3000)
    assert watch.hear("stderr", "Error: Cannot find mod") == []
    assert watch.hear("stdout", "ready\n") == []
    assert len(watch.hear("stderr", "ule 'a'\nError: Cannot find module 'a'\n")) == 1
    assert list(watch.lines) == ["ready", "Error: Cannot find module 'a'", "Error: Cannot find module 'a'"]


def test_a_trace_that_the_end_cuts_off_is_told_at_the_end() -> None:
    watch = OutputWatch(3000)
    assert watch.hear("stderr", _TRACEBACK.rstrip("\n")) == []
    (found,) = watch.end()
    assert found.kind == "missing"


def test_ordinary_output_and_the_expected_port_are_no_findings() -> None:
    watch = OutputWatch(3000)
    assert watch.hear("stdout", "Local: http://localhost:3000/\nGET / 200\n0 errors\ncompiled successfully\n") == []


def test_endless_lines_and_many_findings_take_no_memory() -> None:
    watch = OutputWatch(3000)
    for number in range(100):
        watch.hear("stdout", "x" * 100_000)
        watch.hear("stderr", f"Error: Cannot find module '{number}'\n")
    assert len(watch.findings) == 10 and len(watch.lines) <= 60
    assert max(map(len, watch.lines)) <= 2000


def test_hostile_lines_are_shown_and_not_obeyed() -> None:
    shown = pages.page("t", "<b>", advice='"&', lines=["<script>alert(1)</script>", "\x1b]0;x\x07"]).decode()
    assert "<script>" not in shown and "&lt;script&gt;" in shown and "&lt;b&gt;" in shown
    assert "\x1b" not in shown
    told = dict(pages.headers(b"", ["http://localhost:1"]))
    policy = told[b"content-security-policy"].decode()
    assert policy.startswith("default-src 'none'") and policy.endswith("frame-ancestors 'self' http://localhost:1")


@pytest.mark.parametrize("text", ["http://127.0.0.1:9000", "https://api.example.org", "http://[::1]:9000/"])
def test_a_backend_is_a_scheme_a_host_and_a_port(text: str) -> None:
    assert ApiBackend.parse(text).url == text.rstrip("/")


@pytest.mark.parametrize(
    "text",
    ["ftp://x", "http://", "http://x/path", "http://x?y", "http://user@x", "http://x:0", "http://x:99999", "x:80",
     "http://a b", "http://x\\@y", "http://x\0", "javascript:1", "http://x#y"],
)  # fmt: skip
def test_what_is_no_address_of_a_backend_is_refused(text: str) -> None:
    with pytest.raises(errors.InvalidRequest):
        ApiBackend.parse(text)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "url", ["http://169.254.169.254", "http://[fe80::1]", "http://0.0.0.0:80", "http://224.0.0.1", "http://[::ffff:169.254.169.254]",
            "http://168.63.129.16", "http://[64:ff9b::a9fe:a9fe]", "http://127.0.0.1:8080", "http://[::1]:8080"],
)  # fmt: skip
async def test_no_backend_is_a_clouds_metadata_or_belljar_itself(url: str) -> None:
    with pytest.raises(errors.PolicyDenied):
        await ApiBackend.parse(url).connect(8080, 0.1)


@pytest.mark.parametrize("text", ["*", "https://x y", "'self'", "http://x; script-src *", "data:", "http://x/path"])
def test_what_is_no_origin_may_frame_nothing(text: str) -> None:
    with pytest.raises(errors.InvalidRequest):
        proxy.origins([text])


def test_a_project_is_served_as_it_says_or_by_its_files(tmp_path: object) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path))
    with pytest.raises(errors.InvalidRequest):
        usual_command(str(folder), 3000)
    (folder / "index.html").write_text("hello")
    assert usual_command(str(folder), 3000) == "python3 -u -m http.server 3000"
    (folder / "package.json").write_text('{"scripts": {"start": "node .", "dev": "vite"}}')
    assert usual_command(str(folder), 3000) == "npm run dev"
    (folder / "package.json").write_text("[" * 100_000)
    assert usual_command(str(folder), 3000) == "python3 -u -m http.server 3000"
