"""The hosts behind named sets such as `python-packages`: those that this machine's own clients are configured for.

They are read from pip, uv, npm, go, cargo and git as they are configured for the user who runs Belljar and for the
whole machine, never for a project: a `.npmrc` beside hostile code grants nothing. An administrator's file says more;
nothing is built in.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from belljar.core import errors
from belljar.core.net_entries import NAMED_SETS, net_entry
from belljar.core.settings import Settings
from belljar.host import documents

USUAL_FILE = "/etc/belljar/hosts.toml"
_ASK_SECONDS = 20.0
_KEEP_SECONDS = 300.0
_MOST_ADDRESSES = 64
_URL = re.compile(r"https?://[^\s'\"<>,|\\]+")
_PIP_DEFAULTS = "from pip._internal.models.index import PyPI as i; print(i.url, f'https://{i.file_storage_domain}/')"
_PIP_INDEX = re.compile(r"^[^=]*\.(index-url|extra-index-url|find-links)=(.*)$", re.MULTILINE)
_known: dict[tuple[str, str, str], tuple[float, frozenset[str]]] = {}


def hosts_of(name: str, settings: Settings) -> frozenset[str]:
    """Returns the entries of a named set. It may ask programs, which takes a second: call it in a thread.

    Args:
        name: one of `NAMED_SETS`.
        settings: where programs are looked for, and the administrator's file.

    Raises:
        InvalidRequest: nobody here knows any, or the file is not the administrator's.
    """
    key = (name, settings.egress.sets_file, settings.home)
    if key in _known and time.monotonic() - _known[key][0] < _KEEP_SECONDS:
        return _known[key][1]
    found = frozenset(_entries(_FROM_CLIENTS[name](settings))) | _from_file(name, settings.egress.sets_file)
    if not found:
        where = settings.egress.sets_file or USUAL_FILE
        raise errors.InvalidRequest(
            f"net: no host of {name} is known here: no client of theirs is configured",
            fix=f'list the hosts by name, or have the administrator write {name} = ["…"] into {where}',
        )
    _known[key] = (time.monotonic(), found)
    return found


def _entries(addresses: Iterable[str]) -> Iterator[str]:
    """The entries that addresses of the web stand for; what is no such address is left out."""
    for address in list(addresses)[:_MOST_ADDRESSES]:
        with suppress(ValueError):
            parts = urlsplit(address)
            if parts.scheme in ("https", "http") and parts.hostname:
                host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
                port = parts.port or (80 if parts.scheme == "http" else 443)
                yield net_entry(f"{parts.scheme}://{host}:{port}").text


# --- what clients say ---


def _ask(settings: Settings, *argv: str) -> str:
    """What a program prints about its configuration; empty if it is not there, or fails."""
    program = shutil.which(argv[0], path=settings.path)
    if program is None:
        return ""
    env = {"PATH": settings.path, "HOME": settings.home, **settings.installers}
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [program, *argv[1:]], cwd="/", env=env, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=_ASK_SECONDS, check=False,
        )  # fmt: skip
        return done.stdout[: documents.MAX_BYTES].decode("utf-8", "replace") if done.returncode == 0 else ""
    return ""


def _python(settings: Settings) -> list[str]:
    said = _ask(settings, "python3", "-m", "pip", "config", "list")
    named = _PIP_INDEX.findall(said)
    found = [url for _, value in named for url in _URL.findall(value)]
    if not any(name == "index-url" for name, _ in named):
        found += _ask(settings, "python3", "-c", _PIP_DEFAULTS).split()
    ours = {name: value for name, value in settings.installers.items() if re.match(r"UV_.*(INDEX|LINKS)", name)}
    return found + [url for value in ours.values() for url in _URL.findall(value)] + _in_toml(settings, "uv/uv.toml")


def _in_toml(settings: Settings, *names: str) -> list[str]:
    """All addresses of indexes in a client's own TOML files, wherever in them they stand."""
    folders = [settings.installers.get("XDG_CONFIG_HOME") or f"{settings.home}/.config", "/etc"]
    found: list[str] = []
    for path in [Path(name) if name.startswith("/") else Path(folder, name) for folder in folders for name in names]:
        with suppress(OSError, ValueError):
            found += _addresses(documents.parse(_own_text(path), ".toml", foreign=True))
    return found


def _addresses(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if isinstance(inner, str) and name in ("index", "url", "index-url", "default-index", "registry"):
                yield inner.removeprefix("sparse+").removeprefix("registry+")
            else:
                yield from _addresses(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _addresses(inner)


def _own_text(path: Path) -> bytes:
    """A file of root's or of our own user's; ValueError where somebody else could have written it."""
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError(f"{path} can be written by others")
        return file.read(documents.MAX_BYTES + 1)


def _javascript(settings: Settings) -> list[str]:
    try:
        said = json.loads(_ask(settings, "npm", "config", "list", "--json") or "{}")
    except ValueError:
        return []
    named = (value for name, value in said.items() if name == "registry" or name.endswith(":registry"))
    return [value for value in named if isinstance(value, str)]


def _go(settings: Settings) -> list[str]:
    proxies, sums = ([*_ask(settings, "go", "env", "GOPROXY", "GOSUMDB").split("\n"), "", ""])[:2]
    words = sums.split()
    named = [] if not words or words[0] == "off" else [words[1] if len(words) > 1 else f"https://{words[0]}"]
    return _URL.findall(proxies) + named


def _rust(settings: Settings) -> list[str]:
    home = settings.installers.get("CARGO_HOME") or f"{settings.home}/.cargo"
    return _in_toml(settings, f"{home}/config.toml", f"{home}/config")


def _git(settings: Settings) -> list[str]:
    """The hosts that git has credentials or other names for."""
    found: list[str] = []
    for scope in ("--system", "--global"):
        said = _ask(
            settings, "git", "config", scope, "--name-only", "--get-regexp", r"^(url|credential|http)\.https?://"
        )
        found += _URL.findall(re.sub(r"\.[a-z]+$", "", said, flags=re.IGNORECASE | re.MULTILINE))
    return found


_FROM_CLIENTS: dict[str, Callable[[Settings], list[str]]] = dict(
    zip(NAMED_SETS, (_python, _javascript, _go, _rust, _git), strict=True)
)


# --- what the administrator says ---


def _from_file(name: str, path: str) -> frozenset[str]:
    """The entries of a set in the administrator's file: TOML, `python-packages = ["index.example.org"]`."""
    file = Path(path or USUAL_FILE)
    try:
        said = documents.parse(_own_text(file), ".toml")
        entries = said.get(name, [])
        if not isinstance(entries, list) or not all(isinstance(one, str) for one in entries):
            raise ValueError(f"{name} is no list of hosts")
        return frozenset(net_entry(one).text for one in entries)
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError) as error:
        raise errors.InvalidRequest(
            f"net: {file} cannot be used: {error}", fix="have the administrator own it and mend it"
        ) from None
