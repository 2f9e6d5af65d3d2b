"""Files: inputs go in read-only and exact, outputs come back exact, and nothing is followed on the way."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from belljar.backends.fake import FakeProcess
from belljar.core.errors import InvalidRequest
from belljar.core.result import Result
from belljar.testing.conformance.bench import Bench, check, equal, expect, guest, printed, refused, says, succeeded

_EVERY_BYTE = bytes(range(256)) * 16
_ODD_NAMES = (
    "with space.txt", "ünï-🔔.txt", "quote'\".txt", "-leading-dash", "$(id).txt", "a;b&c.txt", "*.star", "#hash",
)  # fmt: skip


def _digests(p: FakeProcess) -> Any:
    names = [name for name in p.files if name != "main.py"]
    return p.out(json.dumps({name: hashlib.sha256(p.files[name]).hexdigest() for name in names}))


_DIGESTS = guest(
    "import hashlib, json, os\n"
    "seen = {}\n"
    "for folder, _, names in os.walk('.'):\n"
    "    for name in names:\n"
    "        path = os.path.relpath(os.path.join(folder, name))\n"
    "        if path != 'main.py':\n"
    "            seen[path] = hashlib.sha256(open(path, 'rb').read()).hexdigest()\n"
    "print(json.dumps(seen))",
    _digests,
)


async def _arrive(bench: Bench, files: dict[str, bytes]) -> None:
    """The guest sees these files, with this content, and no others."""
    result = succeeded(await bench.run(_DIGESTS, files=files))
    wanted = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    equal(json.loads(result.stdout), wanted, "the guest's files")


@check("files in", "text and binary files arrive byte for byte")
async def _exact(bench: Bench) -> None:
    await _arrive(bench, {"text.txt": "grüße\r\n".encode(), "binary.bin": _EVERY_BYTE, "empty": b""})


@check("files in", "a nested name makes its folders")
async def _nested(bench: Bench) -> None:
    await _arrive(bench, {"a/b/c/deep.txt": b"deep", "a/other.txt": b"other"})


@check("files in", "two hundred files arrive")
async def _many(bench: Bench) -> None:
    await _arrive(bench, {f"many/{i:03}.txt": str(i).encode() for i in range(200)})


@check("files in", "a file of four megabytes arrives whole")
async def _large(bench: Bench) -> None:
    await _arrive(bench, {"large.bin": _EVERY_BYTE * 1024})


@check("files in", "names with spaces, quotes, unicode, dashes and shell signs are only names")
async def _names(bench: Bench) -> None:
    await _arrive(bench, {name: name.encode() for name in _ODD_NAMES})


def _attempts(p: FakeProcess) -> Any:
    try:
        p.write("given.txt", b"changed")
    except OSError:
        return p.out(f"refused\n{p.read('given.txt').decode()}\n")
    return p.out("written\n")


_OVERWRITE = guest(
    "try:\n    open('given.txt', 'w').write('changed')\n    print('written')\n"
    "except OSError:\n    print('refused')\nprint(open('given.txt').read())",
    _attempts,
)


@check("files in", "a file of the request is read-only")
async def _read_only(bench: Bench) -> None:
    printed(await bench.run(_OVERWRITE, files={"given.txt": "as given"}), "refused\nas given\n")


_IMPORT = guest(
    "from pkg.greeting import greet\nprint(greet())",
    lambda p: p.out("from the module\n" if "pkg/greeting.py" in p.files else "no module\n"),
)


@check("files in", "a snippet can import a module that was given beside it")
async def _module(bench: Bench) -> None:
    module = "def greet():\n    return 'from the module'\n"
    printed(await bench.run(_IMPORT, files={"pkg/__init__.py": "", "pkg/greeting.py": module}), "from the module\n")


# --- out ---


async def _play_make(p: FakeProcess) -> None:
    p.write("plain.txt", b"plain\n")
    p.write("data.bin", _EVERY_BYTE)
    p.write("out/deep/nested.csv", b"a,b\n")
    p.write("out/top.csv", b"c,d\n")
    p.write("tool.sh", b"#!/bin/sh\n", executable=True)


_MAKE = guest(
    "import os\n"
    "open('plain.txt', 'w').write('plain\\n')\n"
    "open('data.bin', 'wb').write(bytes(range(256)) * 16)\n"
    "os.makedirs('out/deep')\n"
    "open('out/deep/nested.csv', 'w').write('a,b\\n')\n"
    "open('out/top.csv', 'w').write('c,d\\n')\n"
    "open('tool.sh', 'w').write('#!/bin/sh\\n')\n"
    "os.chmod('tool.sh', 0o755)",
    _play_make,
)


async def _collect(bench: Bench, *patterns: str) -> Result:
    return succeeded(await bench.run(_MAKE, collect=patterns))


def _contents(result: Result) -> dict[str, bytes]:
    return {file.path: file.content for file in result.files}


@check("files out", "a file is collected by its name")
async def _by_name(bench: Bench) -> None:
    equal(_contents(await _collect(bench, "plain.txt")), {"plain.txt": b"plain\n"}, "files")


@check("files out", "a pattern without a folder collects at any depth")
async def _glob(bench: Bench) -> None:
    wanted = {"out/deep/nested.csv": b"a,b\n", "out/top.csv": b"c,d\n"}
    equal(_contents(await _collect(bench, "*.csv")), wanted, "files")


@check("files out", "a pattern with a folder stays in that folder")
async def _in_folder(bench: Bench) -> None:
    equal(_contents(await _collect(bench, "out/*.csv")), {"out/top.csv": b"c,d\n"}, "files")
    equal(sorted(_contents(await _collect(bench, "out/**"))), ["out/deep/nested.csv", "out/top.csv"], "files")


@check("files out", "binary content comes back byte for byte")
async def _binary(bench: Bench) -> None:
    equal(_contents(await _collect(bench, "data.bin")).get("data.bin"), _EVERY_BYTE, "data.bin")


@check("files out", "the executable flag is kept", "posix")
async def _executable(bench: Bench) -> None:
    seen = {file.path: file.executable for file in (await _collect(bench, "tool.sh", "plain.txt")).files}
    equal(seen, {"tool.sh": True, "plain.txt": False}, "executable")


async def _play_links(p: FakeProcess) -> None:
    p.write("plain.txt", b"plain\n")
    p.link("shadow.txt", "/etc/passwd")
    p.link("climbing.txt", "../../../../etc/passwd")
    p.link("inside.txt", "plain.txt")


# A WASI guest may make links, but none to an absolute path: there the one that climbs must do.
_LINKS = guest(
    "import os\n"
    "open('plain.txt', 'w').write('plain\\n')\n"
    "try:\n"
    "    os.symlink('/etc/passwd', 'shadow.txt')\n"
    "except PermissionError:\n"
    "    os.symlink('../../../../../etc/passwd', 'shadow.txt')\n"
    "os.symlink('../../../../etc/passwd', 'climbing.txt')\n"
    "os.symlink('plain.txt', 'inside.txt')",
    _play_links,
)


@check("files out", "a symbolic link is not followed, and that is told")
async def _links(bench: Bench) -> None:
    links = ("shadow.txt", "climbing.txt", "inside.txt")
    result = succeeded(await bench.run(_LINKS, collect=[*links, "plain.txt"]))
    equal(sorted(_contents(result)), ["plain.txt"], "files")
    told = " ".join(result.left_out)
    expect(all(name in told for name in links), "left_out does not name the links")


@check("files out", "a pattern that matches nothing gives no file and no failure")
async def _none(bench: Bench) -> None:
    equal(_contents(await _collect(bench, "missing.txt", "out/*.txt", "plain.txt")), {"plain.txt": b"plain\n"}, "files")


@check("files out", "what was not asked for does not come back")
async def _not_asked(bench: Bench) -> None:
    equal(_contents(succeeded(await bench.run(_MAKE))), {}, "files without collect")


_PRODUCE = guest("open('made.txt', 'w').write('made')", lambda p: p.write("made.txt", b"made"))


@check("files out", "inputs and the code itself are not returned as outputs")
async def _no_echo(bench: Bench) -> None:
    result = await bench.run(_PRODUCE, files={"given.txt": "given", "folder/given.txt": "x"}, collect=["**"])
    equal(_contents(succeeded(result)), {"made.txt": b"made"}, "files")


def _play_then_fail(p: FakeProcess) -> int:
    p.write("half.txt", b"half done")
    return 3


_THEN_FAIL = guest("open('half.txt', 'w').write('half done')\nraise SystemExit(3)", _play_then_fail)


@check("files out", "a guest that failed still returns its files")
async def _after_failure(bench: Bench) -> None:
    result = await bench.run(_THEN_FAIL, collect=["half.txt"])
    equal((result.exit_code, _contents(result)), (3, {"half.txt": b"half done"}), "(exit code, files)")


async def _play_then_hang(p: FakeProcess) -> None:
    p.write("early.txt", b"early")
    await p.sleep(60)


_THEN_HANG = guest(
    "import time\nwith open('early.txt', 'w') as file:\n    file.write('early')\ntime.sleep(60)", _play_then_hang
)


@check("files out", "a guest that was timed out still returns its files")
async def _after_timeout(bench: Bench) -> None:
    result = await bench.run(_THEN_HANG, collect=["early.txt"], timeout=6)
    equal((result.status, _contents(result)), ("timeout", {"early.txt": b"early"}), "(status, files)")


def _play_odd_names(p: FakeProcess) -> None:
    for name in _ODD_NAMES:
        p.write(name, name.encode())


_ODD_OUT = guest(
    f"for name in {_ODD_NAMES!r}:\n    open(name, 'w').write(name)",
    _play_odd_names,
)


@check("files out", "odd names come back as they are")
async def _odd_out(bench: Bench) -> None:
    result = succeeded(await bench.run(_ODD_OUT, collect=["*"]))
    equal(_contents(result), {name: name.encode() for name in _ODD_NAMES}, "files")


_STATELESS = guest("print('main.py ran')", says("main.py ran\n"))


@check("files out", "a name that climbs out of the sandbox is refused before anything runs")
async def _climbing(bench: Bench) -> None:
    for options in ({"files": {"../up": "x"}}, {"files": {"/etc/passwd": "x"}}, {"collect": ["../*"]}):
        await refused(InvalidRequest, bench.run(_STATELESS, **options))
