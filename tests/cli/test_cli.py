"""The command line as a stranger uses it: real processes, real exit codes, real terminals."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from belljar.core.errors import InvalidRequest
from belljar.host.source import read_source

RESULT_FIELDS = (
    "status exit_code stdout stderr truncated duration_ms startup_ms memory_used_mb cpu_ms fuel_consumed files results "
    "error backend container_id guarantees reasons denied left_out warnings"
).split()


def belljar(*args: str, stdin: bytes = b"", cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "belljar", *args], input=stdin, capture_output=True, timeout=120, cwd=cwd,
        env={**os.environ, "COLUMNS": "200", **env}, check=False,
    )  # fmt: skip


def test_run_prints_stdout_and_stderr_apart_and_exits_with_the_guests_code() -> None:
    done = belljar("run", "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)")
    assert done.stdout == b"out\n"
    assert done.stderr.startswith(b"err\n")
    assert done.returncode == 7


def test_run_json_prints_one_document_with_the_missions_field_names() -> None:
    done = belljar("run", "--json", "-c", "print('hi')")
    result = json.loads(done.stdout)
    assert list(result) == RESULT_FIELDS
    assert result["stdout"] == "hi\n"
    assert result["guarantees"]["isolation"] == "namespace"


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["run", "-c", "while True: pass", "--timeout", "0.5"], 124),
        (["run", "-b", "native", "-c", "x = bytearray(10**9)", "--memory", "64M"], 137),
        (["run", "-c", "print(1)", "--memory", "100G"], 126),
        (["run", "-c", "print(1)", "--net", "10.0.0.1"], 125),
        (["run", "-c", "print(1)", "--backend", "nonsense"], 125),
        (["run", "-c", "print(1)", "--isolation", "kernel"], 126),
        (["run", "--no-such-flag"], 125),
        (["run", "/no/such/file.py"], 125),
        (["exec", "--workspace", "/etc", "--", "ls"], 126),
        (["exec", "--rw", "--", "ls"], 125),
        (["exec", "--workspace", ".", "--rw-git", "--", "ls"], 125),
        (["exec", "--", "no-such-program"], 127),
        (["exec", "--", "sh", "-c", "exit 42"], 42),
    ],
)
def test_exit_codes_tell_the_three_voices_of_failure_apart(args: list[str], code: int) -> None:
    done = belljar(*args)
    assert done.returncode == code, done.stderr.decode()
    assert b"Traceback" not in done.stderr
    assert done.stderr.strip() or code == 42


def test_a_failure_names_its_type_and_suggests_what_to_do() -> None:
    done = belljar("run", "-c", "import surely_not_installed")
    assert b"MISSING_PACKAGE" in done.stderr
    assert "→".encode() in done.stderr


def test_errors_of_ours_are_json_too_when_asked() -> None:
    done = belljar("run", "--json", "-c", "print(1)", "--memory", "100G")
    assert json.loads(done.stdout)["error"]["kind"] == "policy_denied"


def test_a_file_is_run_in_the_language_of_its_extension(tmp_path: Path) -> None:
    script = tmp_path / "hello.sh"
    script.write_text("echo hello from $BASH_VERSION\n")
    assert belljar("run", str(script)).stdout.startswith(b"hello from 5")


def test_code_comes_from_stdin_with_a_dash_and_input_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("the input")
    done = belljar("run", "-", "--stdin", str(tmp_path / "in.txt"), stdin=b"print(input().upper())")
    assert done.stdout == b"THE INPUT\n"


def test_a_file_of_code_is_read_as_the_library_reads_it_and_a_pipe_to_its_end(tmp_path: Path) -> None:
    assert belljar("run", "-l", "python", "/dev/stdin", stdin=b"print(7)").stdout == b"7\n"
    script = tmp_path / "latin.py"
    script.write_bytes(b"print('\xe9')")
    with pytest.raises(InvalidRequest) as refused:
        read_source(script)
    done = belljar("run", "--json", str(script))
    assert json.loads(done.stdout)["error"]["message"] == refused.value.message


def test_files_go_in_and_collected_ones_come_out(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("1,2,3")
    code = (
        "import os; os.mkdir('d'); open('d/sum.txt','w').write(str(sum(map(int, open('data.csv').read().split(',')))))"
    )
    out = tmp_path / "out"
    done = belljar(
        "run", "-c", code, "--file", str(tmp_path / "data.csv"), "--collect", "*.txt", "--out", str(out), "-e", "A=b"
    )
    assert done.returncode == 0, done.stderr
    assert [p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()] == ["d/sum.txt"]
    assert (out / "d/sum.txt").read_text() == "6"


def test_a_workspace_is_read_only_unless_granted_read_write(open_folder: Path) -> None:
    (open_folder / "a.txt").write_text("hi")
    command = ["--", "sh", "-c", "cat a.txt; echo new > b.txt"]
    denied = belljar("exec", "--workspace", str(open_folder), *command)
    assert denied.stdout == b"hi"
    assert denied.returncode != 0 or not (open_folder / "b.txt").exists()
    assert not (open_folder / "b.txt").exists()
    granted = belljar("exec", "--workspace", str(open_folder), "--rw", *command)
    assert granted.returncode == 0, granted.stderr
    assert (open_folder / "b.txt").read_text() == "new\n"
    assert sorted(os.listdir(open_folder)) == ["a.txt", "b.txt"], "no litter in the user's folder"


def test_gits_configuration_is_read_only_unless_granted_by_name(open_folder: Path) -> None:
    (open_folder / ".git").mkdir()
    (open_folder / ".git" / "config").write_text("of the host")
    grant, command = ["exec", "--workspace", str(open_folder), "--rw"], ["--", "sh", "-c", "echo x > .git/config"]
    denied = belljar(*grant, *command)
    assert b"Read-only file system" in denied.stderr
    assert (open_folder / ".git" / "config").read_text() == "of the host"
    assert belljar(*grant, "--rw-git", *command).returncode == 0
    assert (open_folder / ".git" / "config").read_text() == "x\n"


def test_output_streams_while_the_guest_still_runs() -> None:
    code = "import time; print('first', flush=True); time.sleep(30)"
    process = subprocess.Popen(
        [sys.executable, "-m", "belljar", "run", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"first\n"
        assert process.poll() is None, "the line came only with the end of the guest"
    finally:
        process.terminate()
        process.communicate(timeout=20)


def on_a_terminal(*args: str, typed: bytes = b"", seconds: float = 30) -> bytes:
    """Runs belljar with a real pseudo-terminal and returns what would be on the screen."""
    pid, fd = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execv(sys.executable, [sys.executable, "-m", "belljar", *args])
    seen, deadline = b"", time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not select.select([fd], [], [], 0.2)[0]:
            continue
        try:
            data = os.read(fd, 65536)
        except OSError:
            break
        seen += data
        if typed and b">>>" in seen:
            os.write(fd, typed)
            typed = b""
    os.close(fd)
    os.waitpid(pid, 0)
    return seen


def test_escape_sequences_of_the_guest_are_harmless_on_a_terminal() -> None:
    seen = on_a_terminal("run", "-c", r"print('\x1b]0;owned\x07 \x1b[2J hello \x9b31m')")
    assert b"hello" in seen
    assert b"\x1b]0" not in seen
    assert b"\x1b[2J" not in seen


def test_escape_sequences_pass_untouched_where_no_terminal_is() -> None:
    assert belljar("run", "-c", r"print('\x1b[31mred')").stdout == b"\x1b[31mred\n"


def test_the_session_prompt_keeps_variables_and_echoes_expressions() -> None:
    seen = on_a_terminal("session", typed=b"x = 20\rx + 1\r:quit\r")
    assert b"21" in seen


def test_a_session_reads_from_a_pipe_as_json() -> None:
    done = belljar("session", "--json", stdin=b"x = 2\nfor i in range(2):\n    print(i)\n\nx * 4\n1/0\n")
    turns = [json.loads(line) for line in done.stdout.splitlines()]
    assert [turn["status"] for turn in turns] == ["success", "success", "success", "error"]
    assert turns[1]["stdout"] == "0\n1\n"
    assert turns[2]["results"] == [{"text/plain": "8"}]
    assert turns[3]["error"]["error_type"] == "RUNTIME_ERROR"


def test_a_session_can_be_marked_forked_rolled_back_and_saved_at_the_prompt(tmp_path: Path) -> None:
    saved = tmp_path / "session.belljar"
    typed = ["x = [1]", ":checkpoint start", ":fork", "x.append(2)", "x", ":quit", "x", "x = 0", ":rollback", "x"]
    typed += [f":save {saved}", ":rollback nowhere", ":dance"]
    done = belljar("session", "--backend", "wasm", stdin="\n".join(typed).encode())
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().split("\n") == ["[1, 2]", "[1]", "[1]", ""]
    for words in (b"checkpoint: start", b"no checkpoint nowhere", b"no command :dance"):
        assert words in done.stderr
    again = belljar("session", "--load", str(saved), "--json", stdin=b"x + [9]\n")
    assert json.loads(again.stdout)["results"][0]["text/plain"] == "[1, 9]"


def test_doctor_says_what_works_and_what_it_guarantees() -> None:
    report = json.loads(belljar("doctor", "--json").stdout)["backends"]
    native = next(entry for entry in report if entry["backend"] == "native")
    assert native["available"]
    assert "seccomp filter" in native["guarantees"]["walls"]
    assert b"native" in belljar("doctor").stdout


def test_languages_lists_each_with_a_version_or_a_way_to_get_it() -> None:
    rows = {row["name"]: row for row in json.loads(belljar("languages", "--json").stdout)["languages"]}
    assert set(rows) == {"python", "bash", "javascript", "typescript", "go", "rust"}
    assert rows["python"]["available"]
    assert rows["bash"]["available"]
    assert all(row["version"] if row["available"] else row["fix"] for row in rows.values())


def test_version_is_the_packages() -> None:
    assert belljar("--version").stdout == belljar("version").stdout
    import belljar as package

    assert json.loads(belljar("version", "--json").stdout) == {"version": package.__version__}


def test_shell_completion_can_be_shown() -> None:
    line = f"{sys.executable} -m belljar --show-completion; exit $?"  # it looks at the shell that started it
    done = subprocess.run(["bash", "-c", line], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert b"belljar" in done.stdout.lower()


def test_a_project_file_sets_defaults_and_cannot_raise_the_caps(tmp_path: Path) -> None:
    (tmp_path / ".belljar.toml").write_text("[defaults]\ntimeout = 0.5\n")
    assert belljar("run", "-c", "while True: pass", cwd=tmp_path).returncode == 124
    (tmp_path / ".belljar.toml").write_text("[caps]\nmemory = 99999999999\n")
    refused = belljar("run", "-c", "print(1)", cwd=tmp_path)
    assert refused.returncode == 125
    assert b"caps" in refused.stderr


def test_importing_belljar_loads_neither_pydantic_nor_anyio() -> None:
    code = "import sys, belljar; print([m for m in ('pydantic', 'anyio', 'typer', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Of others' modules, those that take long to import and some command needs; of ours, what most runs need not.
FOREIGN_TO_A_RUN = {
    "rich", "prompt_toolkit", "email", "importlib.metadata", "zipfile", "tarfile", "http", "xml", "multiprocessing",
    "typer._adapters", "pydantic.type_adapter", "belljar.client", "belljar.service", "belljar.session",
    "belljar.living",
    "belljar.core.diagnose", "belljar.backends.native.living", "belljar.host.box_tree", "belljar.backends.containers",
}  # fmt: skip


@pytest.mark.parametrize("backend", ["native", "wasm"])
def test_a_run_imports_nothing_large_that_only_other_commands_need(backend: str) -> None:
    code = (
        "import atexit, sys; atexit.register(lambda: sys.stderr.write(' '.join(sys.modules)));"
        f"sys.argv[1:] = ['run', '-b', '{backend}', '-c', 'print(1)']; from belljar.cli.main import main; main()"
    )
    belljar("run", "-b", backend, "-c", "print(1)")  # which probes, if none did
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "1\n"
    assert FOREIGN_TO_A_RUN & set(done.stderr.split()) == set()


def test_a_file_gets_its_arguments_after_two_dashes(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text('printf "<%s>" "$@"')
    done = belljar("run", str(tmp_path / "a.sh"), "--", "--json", "two words", "")
    assert done.stdout == b"<--json><two words><>"


def test_code_on_the_command_line_gets_arguments_too() -> None:
    done = belljar("run", "-b", "native", "-c", "import sys; print(sys.argv[1:])", "--", "one", "-x")
    assert done.stdout == b"['one', '-x']\n"


def test_run_grants_a_folder_read_only_unless_told_otherwise(open_folder: Path) -> None:
    (open_folder / "a.txt").write_text("seen")
    code = "print(open('a.txt').read()); open('b.txt', 'w').write('new')"
    refused = belljar("run", "-b", "native", "--workspace", str(open_folder), "-c", code)
    assert refused.stdout == b"seen\n" and refused.returncode == 1 and not (open_folder / "b.txt").exists()
    assert belljar("run", "-b", "native", "--workspace", str(open_folder), "--rw", "-c", code).returncode == 0
    assert (open_folder / "b.txt").read_text() == "new"
    assert belljar("run", "--rw", "-c", "print(1)").returncode == 125
