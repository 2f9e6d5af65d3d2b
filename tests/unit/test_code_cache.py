"""What libraries compile from text at each start is kept, believed only if it is ours, and the same as compiled."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from belljar.cli.code_cache import CodeCache, usual

COUNTED = """
import atexit, sys
compiled = []
sys.addaudithook(lambda event, args: compiled.append(args[0]) if event == "compile" and args[0] is not None else None)
atexit.register(lambda: sys.stderr.write(str(len(compiled))))
sys.argv[1:] = ["version", "--json"]
from belljar.cli.main import main
main()
"""
PATTERNS = """
import re, sys
from pathlib import Path
from belljar.cli.code_cache import CodeCache
cache = CodeCache(Path(sys.argv[1]))
cache.serve()
sys.path.insert(0, sys.argv[2])
import patterns
typed = re.compile("typed by somebody")
cache.keep()
print(patterns.NAMED.fullmatch("AB-12").groupdict(), int(patterns.NAMED.flags), patterns.BYTES.findall(b"a1b22"))
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "belljar").mkdir()
    return tmp_path / "belljar" / "code" / "python.code"


def kept(place: Path, text: str = "40 + 2") -> CodeCache:
    cache = CodeCache(place)
    assert eval(cache.code(text, "eval")) == eval(text)
    cache.keep()
    return cache


def test_a_text_is_compiled_once_and_found_by_the_next_process(place: Path) -> None:
    kept(place)
    first = os.stat(place)
    kept(place)
    assert os.stat(place).st_ino == first.st_ino  # nothing was new
    kept(place, "40 + 3")
    assert os.stat(place).st_ino != first.st_ino
    assert first.st_mode & 0o777 == 0o600 and place.parent.stat().st_mode & 0o777 == 0o700


def test_the_same_text_in_another_mode_is_another_entry(place: Path) -> None:
    kept(place)
    assert CodeCache(place).code("40 + 2", "exec").co_consts != CodeCache(place).code("40 + 2", "eval").co_consts


@pytest.mark.parametrize("unlike", ["writable", "link", "garbage", "list", "cut"])
def test_a_file_that_is_not_ours_alone_or_unreadable_is_as_good_as_none(place: Path, unlike: str) -> None:
    kept(place)
    whole = place.read_bytes()
    match unlike:
        case "writable":
            place.chmod(0o622)
        case "link":
            place.rename(place.with_suffix(".away"))
            place.symlink_to(place.with_suffix(".away"))
        case _:
            place.write_bytes({"garbage": b"\xff" * 99, "list": b"[\0\0\0\0", "cut": whole[: len(whole) // 2]}[unlike])
    before = os.lstat(place)
    kept(place)  # compiles it anew, and writes a file of its own in that one's place
    assert os.lstat(place).st_ino != before.st_ino and place.read_bytes() == whole
    assert place.lstat().st_mode & 0o777 == 0o600


def test_the_entry_of_another_text_is_not_taken(place: Path) -> None:
    kept(place)
    place.write_bytes(place.read_bytes().replace(b"40 + 2", b"40 + 9"))
    assert eval(CodeCache(place).code("40 + 2", "eval")) == 42


def test_a_text_that_is_no_python_is_refused_as_ever(place: Path) -> None:
    with pytest.raises(SyntaxError):
        CodeCache(place).code("4 +", "eval")


def test_a_machine_on_which_belljar_kept_nothing_is_left_alone(tmp_path: Path) -> None:
    kept(tmp_path / "belljar" / "code" / "python.code")
    assert list(tmp_path.iterdir()) == []


def test_the_second_start_of_a_command_compiles_a_fifth_of_what_the_first_did(tmp_path: Path) -> None:
    (tmp_path / "belljar").mkdir()
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    argv = [sys.executable, "-c", COUNTED]
    ends = [subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=True) for _ in range(2)]
    first, second = (int(end.stderr) for end in ends)
    assert ends[0].stdout == ends[1].stdout
    assert second * 5 < first


def test_each_command_has_a_file_of_its_own_since_others_import_other_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "belljar").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for words in (["run", "-c", "1"], ["--server", "http://x", "doctor"], ["no/such command"], []):
        monkeypatch.setattr(sys, "argv", ["belljar", *words])
        cache = usual()
        cache.code("40 + 2", "eval")
        cache.keep()
    names = [path.stem.rpartition("-")[2] for path in (tmp_path / "belljar" / "code").iterdir()]
    assert sorted(names) == ["any", "doctor", "run"]


def test_patterns_of_modules_are_kept_with_flags_and_names_and_those_of_others_are_not(place: Path) -> None:
    folder = place.parent.parent
    text = r'import re; NAMED = re.compile(r"(?P<word>[a-z]+)-(\d+)", re.I); BYTES = re.compile(rb"\d+")'
    (folder / "patterns.py").write_text(text)
    argv = [sys.executable, "-c", PATTERNS, str(place), str(folder)]
    first, second = (subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True) for _ in range(2))
    assert first.stdout == second.stdout == f"{{'word': 'AB'}} {int(re.I | re.UNICODE)} [b'1', b'22']\n"
    assert b"(?P<word>" in place.read_bytes()
    assert b"typed by somebody" not in place.read_bytes()
