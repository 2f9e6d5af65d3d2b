"""`belljar mcp install CLIENT`: tells an MCP client of Belljar, by a change of its configuration file.

Each client's file is the one its documentation names. Nothing but our own entry changes: a file that cannot be read in
full (comments in JSON, a key twice) is left alone, and the entry is printed to be put in by hand.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from belljar.core import errors

NAME = "belljar"  # of our entry
Scope = str  # "user" or "project"


class McpClient(NamedTuple):
    """Where a client keeps its servers.

    Attributes:
        title: what people call it.
        section: the key of the table of servers.
        user: its file below the home folder; empty if it has none.
        project: its file below a project's folder; empty if it has none.
        type: what its entries say they are; empty if they do not.
        mac: its file below the home folder on macOS, where that is another one.
    """

    title: str
    section: str
    user: str = ""
    project: str = ""
    type: str = ""
    mac: str = ""

    def file(self, scope: Scope) -> Path | None:
        """Returns the file of a scope; None if there is none."""
        if scope == "project":
            return Path.cwd() / self.project if self.project else None
        name = self.mac if self.mac and sys.platform == "darwin" else self.user
        return Path.home() / name if name else None


CLIENTS = {
    "claude-code": McpClient("Claude Code", "mcpServers", ".claude.json", ".mcp.json"),
    "claude-desktop": McpClient(
        "Claude Desktop", "mcpServers", ".config/Claude/claude_desktop_config.json",
        mac="Library/Application Support/Claude/claude_desktop_config.json",
    ),
    "cursor": McpClient("Cursor", "mcpServers", ".cursor/mcp.json", ".cursor/mcp.json"),
    "vscode": McpClient(
        "VS Code", "servers", ".config/Code/User/mcp.json", ".vscode/mcp.json", type="stdio",
        mac="Library/Application Support/Code/User/mcp.json",
    ),
    "codex": McpClient("Codex CLI", "mcp_servers", ".codex/config.toml", ".codex/config.toml"),
    "gemini": McpClient("Gemini CLI", "mcpServers", ".gemini/settings.json", ".gemini/settings.json"),
    "windsurf": McpClient("Windsurf", "mcpServers", ".codeium/windsurf/mcp_config.json"),
    "zed": McpClient("Zed", "context_servers", ".config/zed/settings.json", ".zed/settings.json"),
}  # fmt: skip


class Change(NamedTuple):
    """What is to become of a file: its text before (None: there is no such file) and after."""

    path: Path
    before: str | None
    after: str

    def diff(self) -> list[str]:
        """Returns the change as the lines of a unified diff; none if nothing changes."""
        old, new = (self.before or "").splitlines(), self.after.splitlines()
        name = str(self.path)
        return list(difflib.unified_diff(old, new, name, name, lineterm="", n=2))


def plan(client: str, scope: Scope | None, words: list[str]) -> Change:
    """Returns the change that tells a client of `belljar mcp WORDS`.

    Args:
        client: one of CLIENTS.
        scope: "user" or "project"; by default the client's own file of the user, and for Claude Code the project's.
        words: the arguments of `belljar`.

    Raises:
        InvalidRequest: there is no such client or scope, or its file cannot be changed safely.
    """
    known = CLIENTS.get(client)
    if known is None:
        raise errors.InvalidRequest(
            f"{client[:80]!r} is no client that we know", fix=f"choose from: {', '.join(CLIENTS)}"
        )
    scope = scope or ("project" if client == "claude-code" else "user")
    path = known.file(scope) if scope in ("user", "project") else None
    if path is None:
        other = "user" if scope == "project" else "user or project"
        raise errors.InvalidRequest(f"--scope {scope[:80]}: {known.title} has no such file", fix=f"--scope {other}")
    entry: dict[str, Any] = {"type": known.type} if known.type else {}
    entry |= {"command": NAME if scope == "project" else program(), "args": words}
    merge = _with_toml if path.suffix == ".toml" else _with_json
    path = Path(os.path.realpath(path))  # who keeps such files elsewhere, with a link here, keeps the link
    before = _read(path)
    return Change(path, before, merge(path, before, known.section, entry))


def program() -> str:
    """Returns the absolute path of `belljar`: desktop programs have a short PATH."""
    beside = Path(sys.executable).with_name(NAME)
    return str(beside) if beside.exists() else shutil.which(NAME) or NAME


def apply(change: Change) -> Path | None:
    """Writes the file at once or not at all; returns where the old one was copied to, if there was one.

    Raises:
        InvalidRequest: it was changed since it was read, or cannot be written.
    """
    path = change.path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if _read(path) != change.before:
            raise errors.InvalidRequest(f"{path}: it was changed meanwhile, and is left alone", fix="try again")
        kept = None if change.before is None else _back_up(path)
        _replace(path, change.after)
    except OSError as error:
        raise errors.InvalidRequest(f"{path}: {error.strerror or error}", fix="check its permissions") from None
    return kept


# --- reading ---


def _read(path: Path) -> str | None:
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise errors.InvalidRequest(f"{path}: {error.strerror}", fix="check the path") from None
    except UnicodeDecodeError:
        raise errors.InvalidRequest(f"{path}: is no UTF-8 text, and is left alone") from None


def _unreadable(path: Path, why: object, entry: str) -> errors.InvalidRequest:
    return errors.InvalidRequest(f"{path}: {str(why)[:200]}; it is left alone", fix=f"put this in by hand:\n{entry}")


def _with_json(path: Path, before: str | None, section: str, entry: Mapping[str, Any]) -> str:
    """Returns the text of a JSON file with our entry in it; all other keys stay as they are, in their order."""
    by_hand = json.dumps({section: {NAME: entry}}, indent=2)
    try:
        document = json.loads(before, object_pairs_hook=_each_once) if before and before.strip() else {}
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, f"is not plain JSON ({error})", by_hand) from None
    if not isinstance(document, dict) or not isinstance(document.setdefault(section, {}), dict):
        raise _unreadable(path, f"has no object where {section!r} belongs", by_hand)
    servers = document[section]
    if servers.get(NAME) == entry:
        return before or ""
    servers[NAME] = entry
    return json.dumps(document, indent=_indent(before or ""), ensure_ascii=False) + "\n"


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _indent(text: str) -> int | str:
    """Returns how a file is indented, by its first indented line."""
    for line in text.splitlines():
        if space := line[: len(line) - len(line.lstrip())]:
            return "\t" if space.startswith("\t") else len(space)
    return 2


def _with_toml(path: Path, before: str | None, section: str, entry: Mapping[str, Any]) -> str:
    """Returns the text of a TOML file with our table in it: replaced where it stands, else added at the end."""
    table = f"[{section}.{NAME}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in entry.items())
    text = before or ""
    try:
        wanted = tomllib.loads(text)
        if wanted.setdefault(section, {}).get(NAME) == entry:
            return text
        wanted[section][NAME] = dict(entry)
    except (ValueError, AttributeError, RecursionError) as error:
        raise _unreadable(path, f"is no TOML that we can change ({error})", table) from None
    after = _without_table(text, f"[{section}.{NAME}]")
    after = f"{after.rstrip()}\n\n{table}" if after.strip() else table
    with suppress(ValueError):
        if tomllib.loads(after) == wanted:  # nothing else has changed
            return after
    raise _unreadable(path, f"writes {section} in a way that we cannot change", table)


def _without_table(text: str, header: str) -> str:
    """Returns TOML without one table; whether it was one is checked by who calls."""
    lines = text.splitlines(keepends=True)
    starts = [number for number, line in enumerate(lines) if line.strip() == header]
    if not starts:
        return text
    ends = (number for number, line in enumerate(lines) if number > starts[0] and line.lstrip().startswith("["))
    return "".join(lines[: starts[0]] + lines[next(ends, len(lines)) :])


# --- writing ---


def _back_up(path: Path) -> Path:
    """Copies a file beside itself, with its permissions, under a name that nobody has."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in range(100):
        kept = path.with_name(f"{path.name}.{stamp}{f'-{number}' if number else ''}.bak")
        with suppress(FileExistsError):
            os.close(os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            shutil.copy2(path, kept)
            return kept
    raise FileExistsError(17, "too many copies of it", str(path))


def _replace(path: Path, text: str) -> None:
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(text.encode("utf-8", "surrogatepass"))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileNotFoundError):
            shutil.copymode(path, name)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
