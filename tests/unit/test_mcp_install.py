"""`belljar mcp install`: what it does to the files of clients, and what it leaves alone."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.cli import mcp_install
from belljar.cli.mcp_install import CLIENTS, Change, plan
from belljar.core import errors

WORDS = ["mcp", "--net", "example.org"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder and a project of their own."""
    (tmp_path / "project").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path


def entry_of(path: Path, section: str) -> dict[str, object]:
    text = path.read_text()
    document = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    found: dict[str, object] = document[section]["belljar"]
    return found


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("scope", ["user", "project"])
def test_a_client_without_a_file_gets_one_with_our_entry(home: Path, client: str, scope: str) -> None:
    known = CLIENTS[client]
    if known.file(scope) is None:
        with pytest.raises(errors.InvalidRequest, match="has no such file"):
            plan(client, scope, WORDS)
        return
    change = plan(client, scope, WORDS)
    assert change.before is None and mcp_install.apply(change) is None
    assert change.path.is_relative_to(home / "project" if scope == "project" else home)
    entry = entry_of(change.path, known.section)
    assert entry["args"] == WORDS
    command = str(entry["command"])
    assert command == "belljar" if scope == "project" else os.access(command, os.X_OK)
    assert plan(client, scope, WORDS).diff() == []  # once more changes nothing


def test_other_servers_and_keys_we_do_not_know_stay_and_the_old_file_is_kept(home: Path) -> None:
    path = home / ".cursor/mcp.json"
    path.parent.mkdir()
    old = '{\n    "x": [1, {"ü": null}],\n    "mcpServers": {"other": {"command": "o", "odd": true}},\n    "y": 2\n}\n'
    path.write_text(old)
    path.chmod(0o640)
    change = plan("cursor", None, WORDS)
    kept = mcp_install.apply(change)
    document = json.loads(path.read_text())
    assert list(document) == ["x", "mcpServers", "y"] and document["mcpServers"].pop("belljar")
    assert document == json.loads(old)
    assert '\n    "x"' in path.read_text() and "ü" in path.read_text()  # indented as it was
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert kept is not None and kept.read_text() == old
    assert sorted(kept.parent.iterdir()) == sorted([path, kept])  # no temporary file


def test_comments_and_order_of_toml_stay_and_our_own_table_is_replaced(home: Path) -> None:
    path = home / ".codex/config.toml"
    path.parent.mkdir()
    path.write_text(
        '# mine\nmodel = "m"\n\n[mcp_servers.belljar]\ncommand = "old"\n\n[mcp_servers.b]\ncommand = "b" # b\n'
    )
    mcp_install.apply(plan("codex", None, WORDS))
    text = path.read_text()
    assert text.startswith('# mine\nmodel = "m"\n') and 'command = "b" # b' in text and "old" not in text
    assert tomllib.loads(text)["mcp_servers"]["belljar"]["args"] == WORDS


@pytest.mark.parametrize(
    ("client", "name", "text"),
    [
        ("cursor", ".cursor/mcp.json", '{"mcpServers": {} // a comment\n}'),
        ("cursor", ".cursor/mcp.json", '{"a": 1, "a": 2}'),
        ("cursor", ".cursor/mcp.json", "[]"),
        ("cursor", ".cursor/mcp.json", '{"mcpServers": []}'),
        ("cursor", ".cursor/mcp.json", "[" * 100_000),
        ("codex", ".codex/config.toml", "a = = 1"),
        ("codex", ".codex/config.toml", 'mcp_servers = {b = {command = "b"}}\n'),
        ("codex", ".codex/config.toml", "mcp_servers = 3\n"),
        ("codex", ".codex/config.toml", "[mcp_servers.belljar]\ncommand = 'x'\n[mcp_servers.belljar.env]\nA = 'b'\n"),
    ],
)
def test_a_file_that_cannot_be_changed_safely_is_left_alone(home: Path, client: str, name: str, text: str) -> None:
    path = home / name
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(errors.InvalidRequest, match="left alone") as refused:
        plan(client, None, WORDS)
    assert "by hand" in refused.value.fix and "belljar" in refused.value.fix
    assert path.read_text() == text and list(path.parent.iterdir()) == [path]


def test_a_file_that_is_no_text_and_one_that_changed_meanwhile_are_left_alone(home: Path) -> None:
    path = home / ".cursor/mcp.json"
    path.parent.mkdir()
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(errors.InvalidRequest, match="no UTF-8"):
        plan("cursor", None, WORDS)
    path.write_text("{}")
    change = plan("cursor", None, WORDS)
    path.write_text('{"new": 1}')
    with pytest.raises(errors.InvalidRequest, match="changed meanwhile"):
        mcp_install.apply(change)
    assert path.read_text() == '{"new": 1}'


def test_a_link_to_the_file_stays_a_link(home: Path) -> None:
    (home / ".cursor").mkdir()
    (home / "dotfiles.json").write_text("{}")
    (home / ".cursor/mcp.json").symlink_to(home / "dotfiles.json")
    mcp_install.apply(plan("cursor", None, WORDS))
    assert (home / ".cursor/mcp.json").is_symlink()
    assert entry_of(home / "dotfiles.json", "mcpServers")["args"] == WORDS


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.dictionaries(st.text(), inner) | st.lists(inner),
)


@given(st.dictionaries(st.text(), _JSON), st.dictionaries(st.text(), _JSON))
def test_any_document_keeps_all_that_is_not_ours(document: dict[str, object], servers: dict[str, object]) -> None:
    before = json.dumps(document | {"mcpServers": servers})
    after = mcp_install._with_json(Path("f.json"), before, "mcpServers", {"command": "belljar"})
    wanted = json.loads(before)
    wanted["mcpServers"]["belljar"] = {"command": "belljar"}
    assert json.loads(after) == wanted
    assert isinstance(Change(Path("f.json"), before, after).diff(), list)


def belljar(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "belljar", "mcp", "install", *words], env={**os.environ, "HOME": str(home)},
        cwd=home / "project", stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_the_command_shows_the_change_and_does_nothing_that_nobody_agreed_to(home: Path) -> None:
    refused = belljar(home, "claude-code")
    assert refused.returncode == 125 and "add --yes" in refused.stderr
    assert '+    "belljar": {' in refused.stdout
    assert list((home / "project").iterdir()) == []
    done = belljar(home, "claude-code", "--workspace", ".", "--rw", "--yes")
    assert done.returncode == 0 and "Restart Claude Code" in done.stderr
    entry = entry_of(home / "project/.mcp.json", "mcpServers")
    assert entry == {"command": "belljar", "args": ["mcp", "--workspace", str(home / "project"), "--rw"]}
    unknown = belljar(home, "emacs", "--yes")
    assert unknown.returncode == 125 and "claude-desktop" in unknown.stderr
