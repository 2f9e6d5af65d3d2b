"""Configuration: defaults < administrator's file < user's file < project file < environment < flags.

The only reader of `os.environ`. A project file comes with code nobody has read, so it may set the
defaults of a run and nothing else: caps, directories and uids are the administrator's.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import Field, StrictBool, ValidationError

from belljar.core import errors
from belljar.core.container_block import NO_KERNEL_MEMORY
from belljar.core.model import Model
from belljar.core.request import Limits
from belljar.core.settings import Caps, Settings, merge, moved
from belljar.core.values import MIB, Size
from belljar.host import documents
from belljar.host.seccomp.profiles import read_profile


def _user(value: str) -> dict[str, int]:
    from belljar.host.accounts import guest_user  # few have this variable

    try:
        return guest_user(value)
    except ValueError as error:
        raise errors.InvalidRequest(f"SANDBOX_DEFAULT_USER_UID_GID: {error}") from None


def _list(value: str, separator: str) -> tuple[str, ...]:
    return tuple(value.split(separator)) if value else ()  # Compose hands on what nobody set as an empty text


# The mission's variables: name -> (where it goes, how to read it).
_VARIABLES: dict[str, tuple[tuple[str, ...], Callable[[str], Any]]] = {
    "SANDBOX_GLOBAL_MAX_TIMEOUT_SECONDS": (("caps", "timeout"), float),
    "SANDBOX_DEFAULT_TIMEOUT_SECONDS": (("defaults", "timeout"), float),
    "SANDBOX_DEFAULT_MEMORY_LIMIT_MB": (("defaults", "memory"), lambda v: int(v) * MIB),
    "SANDBOX_DEFAULT_CPU_QUOTA_PERCENT": (("defaults", "cpus"), lambda v: float(v) / 100),
    "SANDBOX_PID_LIMIT": (("defaults", "pids"), int),
    "SANDBOX_LANGUAGE_CONFIG_FILE": (("language_file",), str),
    "SANDBOX_DEFAULT_USER_UID_GID": ((), _user),
    "DOCKER_HOST": (("docker_socket",), str),
    "DOCKER_SOCKET_PATH": (("docker_socket",), str),
    "CONTAINER_HOST": (("podman_socket",), str),
    "SANDBOX_NETWORK": (("container", "network_mode"), str),
    "BELLJAR_RUNTIME": (("container", "runtime"), str),
    "BELLJAR_IMAGE": (("container", "images", "execution"), str),
    "MAX_CONTAINERS": (("max_containers",), int),
    "BELLJAR_BACKEND": (("backend",), str),
    "BELLJAR_STATE_DIR": (("state_dir",), str),
    "BELLJAR_AUDIT_LOG": (("audit_log",), str),
    "BELLJAR_DATA_DIR": (("data_dir",), str),
    "BELLJAR_STORE": (("service", "store"), str),
    "BELLJAR_SHARED_STORE": (("service", "shared_store"), str),
    "BELLJAR_REDIS": (("service", "redis"), str),
    "BELLJAR_NATS": (("service", "nats"), str),
    "BELLJAR_HOST": (("service", "host"), str),
    "BELLJAR_PORT": (("service", "port"), int),
    "BELLJAR_HOSTS": (("service", "hosts"), lambda v: _list(v, ",")),
    "BELLJAR_FIRST_KEY_FILE": (("service", "first_key_file"), str),
    "BELLJAR_PRUNE_EVERY": (("service", "prune_every"), float),
    "BELLJAR_LOG_LEVEL": (("service", "log_level"), str),
    "BELLJAR_LOG_FORMAT": (("service", "log_format"), str),
    "BELLJAR_PROJECTS": (("service", "projects"), lambda v: _list(v, ":")),
    **{f"BELLJAR_MAX_{name.upper()}": (("caps", name), str) for name in Caps.model_fields if name != "timeout"},
    **{f"BELLJAR_DEFAULT_{name.upper()}": (("defaults", name), str) for name in Limits.model_fields},
}
# What pip, uv and npm go by, but for what would have them install elsewhere, or build.
_INSTALLERS = re.compile(
    r"(?!(?i:PIP_(TARGET|PREFIX|ROOT|USER|SRC|REQUIREMENT|NO_BINARY|PYTHON|REQUIRE_VIRTUALENV)|"
    r"npm_config_(prefix|global|ignore_scripts|git|userconfig_dir)|UV_(TARGET|PREFIX|SYSTEM_PYTHON|NO_BINARY\w*))$)"
    r"(HOME|XDG_CONFIG_HOME|XDG_CONFIG_DIRS|XDG_CACHE_HOME|XDG_DATA_HOME|NETRC|SSL_CERT_FILE|SSL_CERT_DIR|"
    r"REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|NODE_EXTRA_CA_CERTS|GOPROXY|GOSUMDB|GOENV|CARGO_HOME|(?i:https?_proxy|all_proxy|no_proxy)|"
    r"(PIP|UV)_[A-Z0-9_]+|(?i:npm_config_)\S+)"
)
_PROJECT_KEYS = {"backend", "defaults"}
# The first of a folder speaks for it. Of the JSON files only the block `sandbox` is read; most of them are others'.
_PROJECT_FILES = (
    ".belljar.toml", ".belljar.yaml", ".belljar.yml", ".belljar.json", ".openagents/project.json", "package.json",
)  # fmt: skip
_MEND = "mend the file or move it away"
_IMAGE_USES = ("execution", "node-execution", "test-runner", "preview")


class SandboxBlock(Model):
    """The block `sandbox` of a project's JSON. It sets what a run gets by default, and may ask that nothing be run."""

    enabled: StrictBool | None = None
    backend: str | None = Field(None, min_length=1, max_length=64)
    image: str | None = Field(None, min_length=1, max_length=512, pattern=r"^[A-Za-z0-9][^\s]*$")
    memory: Size | None = Field(None, alias="memoryLimit", ge=8 * MIB, le=2**46)
    cpus: float | None = Field(None, alias="cpuLimit", gt=0, le=1024, allow_inf_nan=False)
    timeout: float | None = Field(None, alias="timeoutMs", gt=0, le=7 * 86_400_000, allow_inf_nan=False)
    auto_remove: StrictBool | None = Field(None, alias="autoRemove")


def load(environ: Mapping[str, str] | None = None, project: Path | None = None, **flags: Any) -> Settings:
    """The settings in force, or `InvalidRequest` naming the file or variable that is wrong."""
    env = os.environ if environ is None else environ
    home = env.get("HOME", "/")
    layers: list[tuple[str, dict[str, Any]]] = []
    for folder, owners in ((Path("/etc/belljar"), None), (_user_folder(env, home), _trusted_owners())):
        if found := _settings_file(folder, owners):
            layers.append((str(found[0]), found[1]))
    if found := _project_file(_here() if project is None else project, Path(home)):
        layers.append((str(found[0]), found[1]))
    layers.append(("the environment", _environment_layer(env)))
    layers.append(("the flags", flags))
    cache = env.get("XDG_CACHE_HOME") or f"{home}/.cache"
    merged: dict[str, Any] = {
        "home": home,
        "cache_dir": f"{cache}/belljar",
        "data_dir": f"{env.get('XDG_DATA_HOME') or f'{home}/.local/share'}/belljar",
        "path": env.get("PATH", "/usr/local/bin:/usr/bin:/bin"),
        "installers": {name: value for name, value in env.items() if _INSTALLERS.fullmatch(name)},
    }
    for source, layer in layers:
        merged = merge(merged, _one_name_each(layer, source))
        _validate(merged, source)
    settings = _validate(merged, "the settings")
    if settings.container.kernel_memory is not None:
        _warn(NO_KERNEL_MEMORY)
    return settings if settings.state_dir else settings.model_copy(update={"state_dir": _state_dir(env)})


def _one_name_each(layer: dict[str, Any], source: str) -> dict[str, Any]:
    try:
        return moved(layer)
    except ValueError as error:
        raise errors.InvalidRequest(f"{source}: {error}", fix="correct it, or leave it out") from None


def _validate(values: dict[str, Any], source: str) -> Settings:
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        problem = errors.from_validation(error, "settings")
        raise errors.InvalidRequest(f"{source}: {problem.message}", context=problem.context) from None
    _check_profile(settings.container.seccomp_profile, source)
    return settings


def _check_profile(path: str, source: str) -> None:
    try:
        if path:
            read_profile(path)
    except ValueError as error:
        message = f"{source}: container.seccomp_profile: {error}"
        raise errors.InvalidRequest(message, context={"fields": ["container.seccomp_profile"]}) from None


def _trusted_owners() -> frozenset[int] | None:
    """Whose files we read: our own and root's. None: this system has no owners."""
    return frozenset({os.geteuid(), 0}) if hasattr(os, "geteuid") else None


def _text(path: Path, owners: frozenset[int] | None) -> bytes | None:
    """The content of a settings file; None if there is none, or if it, or a link to it, is of another owner."""
    try:
        found = os.stat(path)
        holders = {found.st_uid, os.lstat(path).st_uid}
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    if owners is not None and not holders <= owners:
        _warn(f"{path} is not read: it belongs to another user (uid {min(holders - owners)})")
        return None
    try:
        return _content(path, owners)
    except OSError as error:
        raise errors.InvalidRequest(f"{path}: {error}", fix=_MEND) from None


def _warn(text: str) -> None:
    import logging  # here: it takes 10 ms, and warnings are rare

    logging.getLogger("belljar").warning("%s", text)


def _content(path: Path, owners: frozenset[int] | None) -> bytes | None:
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        now = os.fstat(file.fileno())  # of what was opened: the name may mean another file by now
        if not stat.S_ISREG(now.st_mode) or (owners is not None and now.st_uid not in owners):
            return None
        return file.read(documents.MAX_BYTES + 1)


def _settings_file(folder: Path, owners: frozenset[int] | None) -> tuple[Path, dict[str, Any]] | None:
    """The one settings file of a folder, in whichever format it is."""
    paths = (folder / f"config{suffix}" for suffix in documents.FORMATS)
    texts = [(path, text) for path in paths if (text := _text(path, owners)) is not None]
    if len(texts) > 1:
        names = " and ".join(path.name for path, _ in texts)
        raise errors.InvalidRequest(f"{folder}: there are {names}, and only one can count", fix="keep one of them")
    return next(((path, _table(path, text)) for path, text in texts), None)


def _table(path: Path, text: bytes) -> dict[str, Any]:
    """A document of settings, with the paths in it made absolute."""
    document = _document(path, text)
    if document is None:  # an empty YAML file
        return {}
    if not isinstance(document, dict):
        raise errors.InvalidRequest(f"{path}: settings are a table of names and values", fix=_MEND)
    return _from_here(document, path.parent)


def _from_here(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What names another file by a relative path means one beside this file."""
    result = dict(document)
    if isinstance(file := result.get("language_file"), str) and file:
        result["language_file"] = str(folder / file)
    block = result.get("container")
    if isinstance(block, dict) and isinstance(profile := block.get("seccomp_profile"), str) and profile:
        result["container"] = {**block, "seccomp_profile": str(folder / profile)}
    return result


def _document(path: Path, text: bytes, *, foreign: bool = False) -> Any:
    try:
        return documents.parse(text, path.suffix, foreign=foreign)
    except ValueError as error:
        raise errors.InvalidRequest(f"{path}: {error}", fix=_MEND) from None


def _here() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:  # we stand in a folder that was removed
        return Path("/")


def _project_file(start: Path, home: Path) -> tuple[Path, dict[str, Any]] | None:
    """The nearest folder's word. Files of other users are not heard: anybody may put one into a shared folder."""
    owners = _trusted_owners()
    for folder in _project_folders(start, home):
        for file in (folder / name for name in _PROJECT_FILES):
            if (text := _text(file, owners)) is not None and (layer := _project_layer(file, text)) is not None:
                return file, layer
    return None


def _project_folders(start: Path, home: Path) -> Iterator[Path]:
    """A folder and those above it: up to the repository's root, the home or the file system's, and never `/`."""
    yield start
    for folder, above in pairwise((start, *start.parents)):
        if above == Path(above.anchor) or _is_top(folder, above, home):
            return
        yield above


def _is_top(folder: Path, above: Path, home: Path) -> bool:
    repository = os.path.exists(folder / ".git")
    try:
        own, outer = folder.stat(), above.stat()
        return repository or own.st_dev != outer.st_dev or os.path.samestat(own, home.stat())
    except OSError:  # there is no home, or a folder is gone
        return repository


def _project_layer(path: Path, text: bytes) -> dict[str, Any] | None:
    if path.suffix == ".json":
        return _json_layer(path, text)
    layer = _table(path, text)
    if foreign := sorted(set(layer) - _PROJECT_KEYS):
        raise errors.InvalidRequest(
            f"{path}: {', '.join(foreign)} cannot be set by a project",
            fix=f"a project file may set {' and '.join(sorted(_PROJECT_KEYS))}; the rest is the administrator's",
        )
    return layer


def _json_layer(path: Path, text: bytes) -> dict[str, Any] | None:
    """What the block `sandbox` sets; None where there is none."""
    document = _document(path, text, foreign=True)
    if not isinstance(document, dict) or "sandbox" not in document:
        return None
    try:
        documents.refuse_twice(document, only=["sandbox"])
        documents.refuse_twice(document["sandbox"])
    except ValueError as error:
        raise errors.InvalidRequest(f"{path}: {error}", fix=_MEND) from None
    given = document["sandbox"]
    keys = [field.alias or name for name, field in SandboxBlock.model_fields.items()]
    fix = f"the block may set {', '.join(keys)}; the rest is the administrator's"
    if not isinstance(given, dict):
        raise errors.InvalidRequest(f"{path}: sandbox: must be an object (got {str(given)[:60]!r})", fix=fix)
    if foreign := sorted(set(given) - set(keys)):
        raise errors.InvalidRequest(f"{path}: sandbox.{foreign[0]} cannot be set by a project", fix=fix)
    try:
        block = SandboxBlock.model_validate(given)
    except ValidationError as error:
        problem = errors.from_validation(error)
        wrong = "; ".join(f"sandbox.{part}" for part in problem.message.split("; "))
        raise errors.InvalidRequest(f"{path}: {wrong}", fix="correct the value", context=problem.context) from None
    defaults = block.model_dump(include={"memory", "cpus"}, exclude_none=True)
    defaults |= {} if block.timeout is None else {"timeout": block.timeout / 1000}
    layer: dict[str, Any] = {"backend": block.backend} if block.backend else {}
    layer |= {"defaults": defaults} if defaults else {}
    layer |= {} if block.auto_remove is None else {"auto_remove": block.auto_remove}
    if block.image:
        layer |= {"project_image": block.image, "container": {"images": dict.fromkeys(_IMAGE_USES, block.image)}}
    return layer | ({"switched_off": str(path)} if block.enabled is False else {})


def _environment_layer(env: Mapping[str, str]) -> dict[str, Any]:
    layer: dict[str, Any] = {}
    for name, (keys, read) in _VARIABLES.items():
        if name not in env:
            continue
        try:
            value = read(env[name])
            for key in reversed(keys):
                value = {key: value}
            _validate(value, name)
        except ValueError as error:
            told = error.message if isinstance(error, errors.InvalidRequest) else f"{name}: cannot be read"
            raise errors.InvalidRequest(f"{told} (got {env[name]!r})", fix=f"correct or unset {name}") from None
        layer = merge(layer, value)
    return layer


def _user_folder(env: Mapping[str, str], home: str) -> Path:
    return Path(env.get("XDG_CONFIG_HOME") or Path(home) / ".config") / "belljar"


def _state_dir(env: Mapping[str, str]) -> str:
    uid = os.geteuid() if hasattr(os, "geteuid") else "user"
    if uid == 0:
        return "/run/belljar"
    runtime = env.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return f"{runtime}/belljar"
    return f"{tempfile.gettempdir()}/belljar-{uid}"
