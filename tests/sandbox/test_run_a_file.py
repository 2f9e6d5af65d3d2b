"""`run(path=…)`: a file of this machine, its language told by its extension."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import belljar
from belljar.core import errors
from belljar.engine.engine import Engine

pytestmark = [pytest.mark.anyio, pytest.mark.engine]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text("import sys\nprint('é', sys.stdin.read())")
    return path


def test_a_file_is_run_and_its_extension_tells_its_language(script: Path, engine: Engine) -> None:
    assert belljar.run(path=script, stdin="in", engine=engine).stdout == "é in\n"
    shell = script.with_suffix(".sh")
    shell.write_text("echo $0")
    assert belljar.run(path=str(shell), engine=engine).stdout.endswith("main.sh\n")
    plain = script.with_name("plain")
    plain.write_text("echo hi")
    assert belljar.run(path=plain, language="bash", engine=engine).stdout == "hi\n"
    with pytest.raises(errors.InvalidRequest, match="does not say its language"):
        belljar.run(path=plain, engine=engine)


async def test_a_file_runs_in_a_sandbox_in_a_session_and_as_a_stream(script: Path, engine: Engine) -> None:
    script.write_text("n = globals().get('n', 0) + 1; print(n)")
    async with belljar.AsyncSandbox(engine=engine) as box:
        assert (await box.run(path=script)).stdout == "1\n"
    async with belljar.AsyncSession(engine=engine, backend="native") as session:
        assert [(await session.run(path=script)).stdout for _ in range(2)] == ["1\n", "2\n"]
    async with belljar.astream(path=script, engine=engine) as run:
        assert "1\n" in [event.text async for event in run]
    with belljar.stream(path=script, engine=engine) as blocking:
        assert "1\n" in [event.text for event in blocking]


def test_a_path_goes_with_neither_code_nor_command(script: Path) -> None:
    with pytest.raises(errors.InvalidRequest, match="path: goes with neither") as refused:
        belljar.run("print(1)", path=script)
    assert refused.value.fix == "give one of the three"
    with pytest.raises(errors.InvalidRequest, match="path: goes with neither"):
        belljar.run(path=script, command=["ls"])


def test_a_file_that_cannot_be_read_is_a_clear_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe")
    with open(tmp_path / "large.py", "wb") as large:
        large.truncate(17 << 20)
    cases = {
        "missing.py": "No such file", "pipe.py": "not a regular file", ".": "not a regular file|Is a directory",
        "binary.py": "not UTF-8", "large.py": "larger than", "a\0b.py": "null byte",
    }  # fmt: skip
    for name, why in cases.items():
        with pytest.raises(errors.InvalidRequest, match=f"path: .*({why})"):
            belljar.run(path=tmp_path / name if "\0" not in name else name, language="python")
