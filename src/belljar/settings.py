"""Configuration: defaults < administrator's file < user's file < project file < environment < flags.

The only reader of `os.environ`. A project file comes with code nobody has read, so it may set the
defaults of a run and nothing else: caps, directories and uids are the administrator's.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, ValidationError, model_validator

from belljar import errors
from belljar.models import Limits, Model
from belljar.seccomp import ProfilePath
from belljar.values import GIB, KIB, MIB, Size, parse_size

UNPRIVILEGED_UIDS = 1_900_000_000  # above every range that distributions, systemd and rootless containers hand out
Sha256 = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]


class Caps(Model):
    """The most a request may ask for."""

    cpus: float = Field(64, gt=0, allow_inf_nan=False)
    memory: Size = Field(8 * GIB, gt=0)
    disk: Size = Field(16 * GIB, gt=0)
    pids: int = Field(4096, gt=0)
    timeout: float = Field(300, gt=0, allow_inf_nan=False)
    output: Size = Field(256 * MIB, ge=0)


class ContainerType(Model):
    """What one kind of work gets. What is not set here is as for any other run."""

    image: str = Field("", max_length=512, description="empty: the project's own, so somebody has to name it")
    memory: Size | None = Field(None, ge=8 * MIB, le=2**46)
    timeout: float | None = Field(None, gt=0, le=7 * 86400, allow_inf_nan=False)


CONTAINER_ENGINES = ("docker", "podman", "apple")
EXECUTION = "execution"
_NODE_EXECUTION = "node-execution"
TYPES = {
    EXECUTION: ContainerType(image="python:3.12-slim"),
    _NODE_EXECUTION: ContainerType(image="node:20-slim"),
    "test-runner": ContainerType(memory=2 * GIB, timeout=300),
    "preview": ContainerType(memory=GIB, timeout=1800),
}
_TYPE_OF = {"python": EXECUTION, "bash": EXECUTION, "javascript": _NODE_EXECUTION}
# Docker's own default set: what an ordinary container has, and all that may be given back here.
GRANTABLE = (
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "NET_RAW",
    "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
)  # fmt: skip


def _with_builtin(given: object) -> object:
    """The administrator's types over ours, field by field."""
    if not isinstance(given, Mapping):
        return given
    ours = {name: kind.model_dump(exclude_defaults=True) for name, kind in TYPES.items()}
    theirs = {name: kind.model_dump() if isinstance(kind, ContainerType) else kind for name, kind in given.items()}
    return _merge(ours, theirs)


def _capability(name: str) -> str:
    plain = name.upper().removeprefix("CAP_")
    if plain not in GRANTABLE:
        raise ValueError(f"{name[:40]!r} cannot be given: choose from {', '.join(GRANTABLE)}, or leave it out")
    return plain


def _network(name: str) -> str:
    if name == "host" or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", name):
        raise ValueError(
            "write none, or the name of one of the engine's networks such as bridge; never host or container:…"
        )
    return name


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise ValueError(f"{text[:60]!r} is no address: a name server is given as one, such as 192.0.2.53") from None


def _confined(name: str) -> str:
    if re.search(r"unconfined|\bdisable\b|\bspc_t\b", name) or not re.fullmatch(r"([\w./-][\w.:,/-]{0,255})?", name):
        raise ValueError("write the name of a profile or label, or leave it out: a wall cannot be switched off here")
    return name


class Container(Model):
    """What container engines are told. `memory_limit`, `disk_quota`, `image_registry` and `image_pull_policy` may be
    written here too: they are other names of `defaults.memory`, `defaults.disk` and of two in `images`."""

    engine: Literal["", "docker", "podman", "apple"] = Field("", description="the one to prefer over the others")
    runtime: str = Field("", description="the engine's own default, runsc for gVisor, or another it has registered")
    images: Mapping[str, str] = Field(default_factory=dict, description="container type or language -> image")
    types: Annotated[Mapping[str, ContainerType], BeforeValidator(_with_builtin)] = Field(
        default_factory=lambda: dict(TYPES), description="kinds of work, ours and more"
    )
    pool: int = Field(0, ge=0, le=100, description="containers of each kind that wait, up and running, for their run")
    pool_idle: float = Field(300, gt=0, allow_inf_nan=False, description="seconds after which an unused kind is let go")
    reap_interval: float = Field(300, gt=0, allow_inf_nan=False, description="seconds between two looks for orphans")
    cpu_shares: int | None = Field(None, ge=2, le=262_144, description="weight against others when the CPUs are busy")
    io_weight: int | None = Field(None, ge=10, le=1000, description="the same for disks, where the kernel has it")
    network_mode: Annotated[str, AfterValidator(_network)] = Field(
        "none", description='the network of guests that ask for egress.mode="open"; the others have none'
    )
    dns: tuple[Annotated[str, AfterValidator(_address)], ...] = Field((), max_length=8)
    read_only_root: StrictBool = True
    capabilities: tuple[Annotated[str, AfterValidator(_capability)], ...] = ()
    seccomp_profile: ProfilePath = Field("", description="path of a JSON profile, instead of ours")
    apparmor_profile: Annotated[str, AfterValidator(_confined)] = ""
    selinux_label: Annotated[str, AfterValidator(_confined)] = Field("", description='such as "type:container_t"')

    def type_of(self, language: str | None) -> str:
        """The type of work that names none. A command's is that of snippets; a language without one has no image."""
        return _TYPE_OF.get(language, "") if language else EXECUTION

    def image_of(self, kind: str) -> str:
        """A type's image. The short form `images` speaks first: a project's own image comes that way."""
        return self.images.get(kind, "") or (self.types[kind].image if kind in self.types else "")


class Images(Model):
    """Which images may be used, and who vouches for them."""

    image_registry: str = Field("", max_length=255, description="put before names that have no registry of their own")
    image_pull_policy: Literal["always", "if-not-present", "never"] = "if-not-present"
    pull_timeout: float = Field(900, gt=0, allow_inf_nan=False)
    stall_timeout: float = Field(60, gt=0, allow_inf_nan=False, description="seconds without any progress")
    lock_file: str = Field("belljar.images.lock", min_length=1)
    require_lock: bool = False
    require_signature: bool = False
    cosign: str = Field("", description="absolute path of the program")
    cosign_sha256: Sha256 = ""
    cosign_arguments: tuple[str, ...] = Field((), description='such as ["--key", "/etc/belljar/cosign.pub"]')
    signature_max_age: float = Field(3600, ge=0, allow_inf_nan=False, description="seconds that a consent counts")
    require_scan: bool = False
    scanner: tuple[str, ...] = Field((), description="{reference}, {id} and {socket} are filled in")
    scanner_sha256: Sha256 = ""
    scan_threshold: Literal["low", "medium", "high", "critical"] = Field("high", description="from here on: refused")
    scan_unknown_as: Literal["low", "medium", "high", "critical"] = "medium"
    scan_max_age: float = Field(7 * 86400, gt=0, allow_inf_nan=False, description="seconds; older is stale")
    scan_when_stale: Literal["repeat", "refuse"] = "repeat"
    tool_timeout: float = Field(300, gt=0, allow_inf_nan=False)
    update_policy: Literal["never", "check", "pull"] = "pull"
    prepull: tuple[str, ...] = ()
    gc_age: float = Field(30 * 86400, ge=0, allow_inf_nan=False)
    build_timeout: float = Field(1800, gt=0, allow_inf_nan=False)
    build_context: Size = Field(512 * MIB, gt=0, description="the most bytes a build may be sent")
    build_network: Literal["never", "on-request"] = "on-request"


class Jwt(Model):
    """Tokens of somebody else's making. One of `secret_file` and `public_key_file` switches them on."""

    secret_file: str = Field("", description="a file with the shared secret, for HS256")
    public_key_file: str = Field("", description="a PEM file, for RS256 or ES256")
    algorithms: tuple[Literal["HS256", "RS256", "ES256"], ...] = ()
    issuer: str = ""
    audience: str = ""


class Service(Model):
    """What `belljar serve` does."""

    host: str = Field("127.0.0.1", min_length=1)
    port: int = Field(8080, ge=0, le=65535)
    hosts: tuple[str, ...] = Field((), description="names under which it may be asked, besides those of loopback")
    origins: tuple[str, ...] = Field((), description="origins of other web pages that may ask it")
    jwt: Jwt = Jwt()
    projects: tuple[str, ...] = Field((), description="folders below which `project_path` may lie; none: no project")
    store: str = Field("", description="sqlite:///PATH or postgresql://…; empty: SQLite in the data folder")
    shared_store: str = Field("", description="where records are pushed to as well: postgresql://…")
    redis: str = Field("", description="redis://…: lines of output for other processes")
    nats: str = Field("", description="nats://…: events for other systems")
    request_size: Size = Field(64 * MIB, ge=KIB)
    queue: int = Field(100, ge=0, description="runs that may wait")
    rate: str = Field("600/minute", pattern=r"^\d+ ?(/|per) ?(second|minute|hour|day)$", description="of one caller")
    concurrency: int = Field(0, ge=0, description="runs of one caller at once; 0: as many as there may be at all")
    sessions: int = Field(0, ge=0, description="open at once; 0: half of max_containers")
    cpu_overcommit: float = Field(8, gt=0, description="CPUs that running guests may have for each of ours")
    memory_headroom: Size = Field(128 * MIB, ge=0, description="bytes of the host that guests leave alone")
    drain: float = Field(30, ge=0, allow_inf_nan=False, description="seconds that runs have to end after SIGTERM")
    keep: float = Field(30 * 86400, gt=0, description="seconds that records are kept by `belljar records prune`")
    log_memory: Size = Field(MIB, ge=4096, description="bytes of each run's latest lines that are kept in memory")


class Settings(Model):
    backend: str = "auto"
    defaults: Limits = Limits()
    caps: Caps = Caps()
    max_containers: int = Field(10, ge=1, le=100_000)
    state_dir: str = ""
    cache_dir: str = ""
    user_uid: int = Field(UNPRIVILEGED_UIDS, ge=1, le=2**31 - 70_000, description="first uid of the private range")
    language_file: str = ""
    docker_socket: str = Field("/var/run/docker.sock", description="or an address: unix://…, tcp://…, ssh://…")
    podman_socket: str = ""
    audit_log: str = Field("", description="a file; where it is set, what is not recorded there is not run")
    switched_off: str = Field("", description="the project file that says so: then nothing is run at all")
    container: Container = Container()
    images: Images = Images()
    service: Service = Service()
    data_dir: str = Field("", description="where records are kept")
    path: str = "/usr/local/bin:/usr/bin:/bin"
    home: str = "/"

    @model_validator(mode="before")
    @classmethod
    def _one_name_each(cls, values: Any) -> Any:
        return moved(values) if isinstance(values, dict) else values


# Other names of settings, in the block `container`, and where they belong.
_OTHER_NAMES = {
    "memory_limit": ("defaults", "memory"),
    "disk_quota": ("defaults", "disk"),
    "image_registry": ("images", "image_registry"),
    "image_pull_policy": ("images", "image_pull_policy"),
}


def moved(values: dict[str, Any]) -> dict[str, Any]:
    """One layer with each value under one name, or `ValueError` where two names say different things."""
    block = values.get("container")
    if not isinstance(block, Mapping) or not any(name in block for name in _OTHER_NAMES):
        return values
    result = {**values, "container": {name: value for name, value in block.items() if name not in _OTHER_NAMES}}
    for name, (table, field) in _OTHER_NAMES.items():
        if name not in block:
            continue
        there = result.get(table, {})
        said = there.named() if isinstance(there, Limits) else there
        said = said.model_dump(exclude_unset=True) if isinstance(said, Model) else said
        if not isinstance(said, Mapping):
            continue  # which the validation of that table tells
        if field in said and not _same(said[field], block[name]):
            raise ValueError(f"container.{name} and {table}.{field} are one setting and say different things")
        result[table] = {**said, field: block[name]}
    return result


def _same(one: object, other: object) -> bool:
    try:
        return one == other or parse_size(one) == parse_size(other)
    except ValueError:
        return False


def _uid(value: str) -> int:
    return int(value.split(":", maxsplit=1)[0])


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
    "SANDBOX_DEFAULT_USER_UID_GID": (("user_uid",), _uid),
    "DOCKER_HOST": (("docker_socket",), str),
    "DOCKER_SOCKET_PATH": (("docker_socket",), str),
    "CONTAINER_HOST": (("podman_socket",), str),
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
    "BELLJAR_PROJECTS": (("service", "projects"), lambda v: _list(v, ":")),
    **{f"BELLJAR_MAX_{name.upper()}": (("caps", name), str) for name in Caps.model_fields if name != "timeout"},
    **{f"BELLJAR_DEFAULT_{name.upper()}": (("defaults", name), str) for name in Limits.model_fields},
}
_PROJECT_KEYS = {"backend", "defaults"}
_PROJECT_FILES = (".belljar.toml", ".belljar.json", "package.json")  # the first of a folder speaks for it
_JSON_LIMIT = 4 * MIB
_IMAGE_USES = ("execution", "node-execution", "test-runner", "preview")


class SandboxBlock(Model):
    """The block `sandbox` of a project's JSON. It sets what a run gets by default, and may ask that nothing be run."""

    enabled: StrictBool | None = None
    backend: str | None = Field(None, min_length=1, max_length=64)
    image: str | None = Field(None, min_length=1, max_length=512, pattern=r"^[A-Za-z0-9][^\s]*$")
    memory: Size | None = Field(None, alias="memoryLimit", ge=8 * MIB, le=2**46)
    cpus: float | None = Field(None, alias="cpuLimit", gt=0, le=1024, allow_inf_nan=False)


def load(environ: Mapping[str, str] | None = None, project: Path | None = None, **flags: Any) -> Settings:
    """The settings in force, or `InvalidRequest` naming the file or variable that is wrong."""
    env = os.environ if environ is None else environ
    home = env.get("HOME", "/")
    layers: list[tuple[str, dict[str, Any]]] = []
    for path in (Path("/etc/belljar/config.toml"), _user_file(env, home)):
        if path.is_file():
            layers.append((str(path), _read(path)))
    if found := _project_file(_here() if project is None else project):
        layers.append((str(found[0]), found[1]))
    layers.append(("the environment", _environment_layer(env)))
    layers.append(("the flags", flags))
    cache = env.get("XDG_CACHE_HOME") or f"{home}/.cache"
    merged: dict[str, Any] = {
        "home": home,
        "cache_dir": f"{cache}/belljar",
        "data_dir": f"{env.get('XDG_DATA_HOME') or f'{home}/.local/share'}/belljar",
        "path": env.get("PATH", "/usr/local/bin:/usr/bin:/bin"),
    }
    for source, layer in layers:
        merged = _merge(merged, _one_name_each(layer, source))
        _validate(merged, source)
    settings = _validate(merged, "the settings")
    return settings if settings.state_dir else settings.model_copy(update={"state_dir": _state_dir(env)})


def _one_name_each(layer: dict[str, Any], source: str) -> dict[str, Any]:
    try:
        return moved(layer)
    except ValueError as error:
        raise errors.InvalidRequest(f"{source}: {error}", fix="leave one of them out") from None


def _validate(values: dict[str, Any], source: str) -> Settings:
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        problem = errors.from_validation(error, "settings")
        raise errors.InvalidRequest(f"{source}: {problem.message}", context=problem.context) from None


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key, {}), Mapping):
            merged[key] = _merge(merged.get(key, {}), value)
        else:
            merged[key] = value
    return merged


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise errors.InvalidRequest(f"{path}: {error}", fix="mend the file or move it away") from None


def _here() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:  # we stand in a folder that was removed
        return Path("/")


def _project_file(start: Path) -> tuple[Path, dict[str, Any]] | None:
    """The nearest folder's word, and no further up than the repository's root."""
    for folder in (start, *start.parents):
        for name in _PROJECT_FILES:
            if (file := folder / name).is_file() and (layer := _project_layer(file)) is not None:
                return file, layer
        if (folder / ".git").exists():
            return None
    return None


def _project_layer(path: Path) -> dict[str, Any] | None:
    if path.suffix == ".json":
        return _json_layer(path)
    layer = _read(path)
    if foreign := sorted(set(layer) - _PROJECT_KEYS):
        raise errors.InvalidRequest(
            f"{path}: {', '.join(foreign)} cannot be set by a project",
            fix=f"a project file may set {' and '.join(sorted(_PROJECT_KEYS))}; the rest is the administrator's",
        )
    return layer


def _json_layer(path: Path) -> dict[str, Any] | None:
    """What the block `sandbox` sets; None where there is none."""
    document = _read_json(path)
    if not isinstance(document, dict) or "sandbox" not in document:
        return None
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
    layer: dict[str, Any] = {"backend": block.backend} if block.backend else {}
    layer |= {"defaults": defaults} if defaults else {}
    layer |= {"container": {"images": dict.fromkeys(_IMAGE_USES, block.image)}} if block.image else {}
    return layer | ({"switched_off": str(path)} if block.enabled is False else {})


def _read_json(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            text = file.read(_JSON_LIMIT + 1)
        if len(text) > _JSON_LIMIT:
            raise ValueError("it is larger than any project file")
        return json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise errors.InvalidRequest(f"{path}: {why}", fix="mend the file or move it away") from None


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
        layer = _merge(layer, value)
    return layer


def _user_file(env: Mapping[str, str], home: str) -> Path:
    return Path(env.get("XDG_CONFIG_HOME") or Path(home) / ".config") / "belljar" / "config.toml"


def _state_dir(env: Mapping[str, str]) -> str:
    uid = os.geteuid() if hasattr(os, "geteuid") else "user"
    if uid == 0:
        return "/run/belljar"
    runtime = env.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return f"{runtime}/belljar"
    return f"{tempfile.gettempdir()}/belljar-{uid}"
