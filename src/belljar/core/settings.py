"""The settings as data, with their defaults. `belljar.settings` reads them from files and the environment."""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, model_validator

from belljar.core.container_block import CpuList, check_protocols, settled
from belljar.core.model import Apart, Model, ours
from belljar.core.net_entries import SET_NAME, NetEntryText, NetGrant
from belljar.core.package_names import ANY_NPM, ANY_PYTHON, PackagePattern
from belljar.core.request import Limits
from belljar.core.values import GIB, KIB, MIB, ProfilePath, Size, parse_size

_PREVIEW_ADDRESS = r"^((https?://)?[a-z0-9]([a-z0-9.-]{0,200}[a-z0-9])?(:\d{1,5})?)?$"
UNPRIVILEGED_UIDS = 1_900_000_000  # above every range that distributions, systemd and rootless containers hand out
PRIVATE_UIDS = 65_536  # of them: one for each sandbox
DiskBacking = Literal["memory", "file", "auto"]
TlsRule = Literal["strict", "relaxed", "off"]
Sha256 = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]


class Caps(Model):
    """The most a request may ask for."""

    cpus: float = Field(64, gt=0, allow_inf_nan=False)
    memory: Size = Field(8 * GIB, gt=0)
    disk: Size = Field(16 * GIB, gt=0)
    pids: int = Field(4096, gt=0)
    timeout: float = Field(300, gt=0, allow_inf_nan=False)
    grace: float = Field(10, ge=0, allow_inf_nan=False)
    output: Size = Field(256 * MIB, ge=0)


class ContainerType(Model):
    """What one kind of work gets. What is not set here is as for any other run."""

    image: str = Field("", max_length=512, description="empty: the project's own, so somebody has to name it")
    memory: Size | None = Field(None, ge=8 * MIB, le=2**46)
    timeout: float | None = Field(None, gt=0, le=7 * 86400, allow_inf_nan=False)


CONTAINER_ENGINES = ("docker", "podman", "apple")
EXECUTION = "execution"
_NODE_EXECUTION = "node-execution"
TYPES: dict[str, dict[str, Any]] = {  # the fields of a ContainerType
    EXECUTION: {"image": "python:3.12-slim"},
    _NODE_EXECUTION: {"image": "node:20-slim"},
    "test-runner": {"memory": 2 * GIB, "timeout": 300},
    "preview": {"memory": GIB, "timeout": 1800},
}
_TYPE_OF = {
    "python": EXECUTION, "bash": EXECUTION, "javascript": _NODE_EXECUTION, "typescript": _NODE_EXECUTION,
}  # fmt: skip
# Of languages without a type: the same as the bases of our own images.
LANGUAGE_IMAGES = {"go": "golang:1.24-bookworm", "rust": "rust:1.90-slim-bookworm"}
# Type of work or language -> our own images that are as good, the best first: used where they were built, and nobody
# named another.
HARDENED_IMAGES: dict[str, tuple[str, ...]] = {
    EXECUTION: ("python",), _NODE_EXECUTION: ("node",), "bash": ("bash", "python"), "go": ("go",), "rust": ("rust",),
}  # fmt: skip
# Docker's own default set: what an ordinary container has, and all that may be given back here.
GRANTABLE = (
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "NET_RAW",
    "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
)  # fmt: skip


def _builtin_types() -> dict[str, ContainerType]:
    return {name: ours(ContainerType)(**fields) for name, fields in TYPES.items()}


def _with_builtin(given: object) -> object:
    """Lays the administrator's types over the built-in ones, field by field."""
    if not isinstance(given, Mapping):
        return given
    theirs = {name: kind.model_dump() if isinstance(kind, ContainerType) else kind for name, kind in given.items()}
    return merge(TYPES, theirs)


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
    import ipaddress

    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise ValueError(f"{text[:60]!r} is no address: a name server is given as one, such as 192.0.2.53") from None


def _confined(name: str) -> str:
    if re.search(r"unconfined|\bdisable\b|\bspc_t\b", name) or not re.fullmatch(r"([\w./-][\w.:,/-]{0,255})?", name):
        raise ValueError("write the name of a profile or label, or leave it out: a wall cannot be switched off here")
    return name


class ContainerSettings(Model):
    """What container engines are told. `memory_limit`, `disk_quota`, `image_registry` and `image_pull_policy` may be
    written here too: they are other names of `defaults.memory`, `defaults.disk` and of two in `images`. So may gvisor,
    kata and firecracker as engines, which stand for Docker with that runtime."""

    engine: Literal["", "docker", "podman", "apple"] = Field("", description="the one to prefer over the others")
    runtime: str = Field("", description="the engine's own default, runsc for gVisor, or another it has registered")
    images: Mapping[str, str] = Field(default_factory=dict, description="container type or language -> image")
    types: Annotated[Mapping[str, ContainerType], BeforeValidator(_with_builtin)] = Field(
        default_factory=_builtin_types, description="kinds of work, ours and more"
    )
    pool: int = Field(0, ge=0, le=100, description="containers of each kind that wait, up and running, for their run")
    pool_idle: float = Field(300, gt=0, allow_inf_nan=False, description="seconds after which an unused kind is let go")
    reap_interval: float = Field(300, gt=0, allow_inf_nan=False, description="seconds between two looks for orphans")
    cpu_shares: int | None = Field(None, ge=2, le=262_144, description="weight against others when the CPUs are busy")
    cpu_affinity: CpuList = Field("", description="the CPUs that guests may use, such as 0-3,5; empty: all")
    io_weight: int | None = Field(None, ge=10, le=1000, description="the same for disks, where the kernel has it")
    kernel_memory: Size | None = Field(None, gt=0, description="counted as memory by every kernel of today")
    network_mode: Annotated[str, AfterValidator(_network)] = Field(
        "none", description='the network of guests that ask for egress.mode="open"; the others have none'
    )
    dns: tuple[Annotated[str, AfterValidator(_address)], ...] = Field((), max_length=8)
    protocols: tuple[Literal["tcp", "udp", "icmp", "http", "https"], ...] = Field(
        (), description="that guests may speak; refused where they could speak others"
    )
    read_only_root: StrictBool = True
    capabilities: tuple[Annotated[str, AfterValidator(_capability)], ...] = ()
    seccomp_profile: ProfilePath = Field("", description="path of a JSON profile, instead of ours")
    apparmor_profile: Annotated[str, AfterValidator(_confined)] = ""
    selinux_label: Annotated[str, AfterValidator(_confined)] = Field("", description='such as "type:container_t"')

    @model_validator(mode="after")
    def _known_protocols(self) -> Self:
        check_protocols(self.protocols, self.network_mode)
        return self

    def type_of(self, language: str | None) -> str:
        """The type of work that names none. A command's is that of snippets; a language without one has no image."""
        return _TYPE_OF.get(language, "") if language else EXECUTION

    def usual_image(self, use: str) -> bool:
        """Says whether nobody named an image for a type of work or a language, so that it has the usual one."""
        own = self.types[use].image if use in self.types else ""
        return use not in self.images and own == TYPES.get(use, {}).get("image", "")

    def image_of(self, kind: str) -> str:
        """A type's image. The short form `images` speaks first: a project's own image comes that way."""
        return self.images.get(kind, "") or (self.types[kind].image if kind in self.types else "")


class ImageSettings(Model):
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


def _endpoint(text: str) -> str:
    from belljar.core.addresses import endpoint

    endpoint(text)
    return text


class EgressSettings(Model):
    """How guests are let out, and the most that a request may ask for."""

    private: tuple[Annotated[str, AfterValidator(_endpoint)], ...] = Field(
        (), max_length=256, description="addresses of private registries and mirrors, each with its port"
    )
    hosts: tuple[NetEntryText, ...] | None = Field(
        None, max_length=1024, description="the most that requests may list; without it: anything, () is nothing"
    )
    open: StrictBool = Field(True, description="may a request ask for any host at all?")
    tls: TlsRule = Field("strict", description="what a connection to a listed host must begin with")
    sets_file: str = Field("", description="more hosts of named sets; empty: /etc/belljar/hosts.toml, if it is there")


class LivingSettings(Model):
    """What living sandboxes get that ask for nothing else, and how much is kept of them."""

    memory: Size = Field(GIB, ge=8 * MIB, le=2**46, description="of the sandbox, unless it is named")
    pids: int = Field(512, ge=1, le=2**22, description="processes and threads of the sandbox at once")
    disk_backing: DiskBacking = Field("memory", description="where native keeps its files; auto: on disk where it can")
    snapshots: int = Field(100, ge=0, description="the most that are kept")
    snapshot_size: Size = Field(2 * GIB, gt=0, description="bytes of files that one snapshot may hold")
    snapshots_size: Size = Field(20 * GIB, gt=0, description="bytes that all of them may take together")


class PackageSettings(Model):
    """Which packages may be installed for guests, and how much is kept of them."""

    names: tuple[PackagePattern, ...] = Field(
        (ANY_PYTHON, ANY_NPM), max_length=4096, description="that may be asked for; * and npm:* are all, () is none"
    )
    folder: str = Field("", description="where they are kept; empty: below the cache folder")
    size: Size = Field(2 * GIB, gt=0, description="bytes that one set may take, with all that it needs")
    quota: Size = Field(10 * GIB, gt=0, description="bytes that all sets may take; the longest unused ones go first")
    timeout: float = Field(600, gt=0, allow_inf_nan=False, description="seconds that fetching and installing may take")


class ServiceEgress(Model):
    """The hosts that callers of the service may ask for. A caller with the scope `admin` may ask for any."""

    hosts: tuple[NetGrant, ...] = Field((), max_length=1024, description="entries, and sets as @NAME")
    sets: Mapping[Annotated[str, Field(pattern=rf"^{SET_NAME}$")], tuple[NetEntryText, ...]] = Field(
        default_factory=dict, max_length=256, description="name -> hosts that are granted together"
    )

    @model_validator(mode="after")
    def _known_sets(self) -> Self:
        if unknown := sorted({host for host in self.hosts if host.startswith("@") and host[1:] not in self.sets}):
            raise ValueError(f"hosts: there is no set {unknown[0]!r}: define it in service.egress.sets")
        return self

    def patterns(self, granted: Iterable[str] | None) -> frozenset[str]:
        """Returns the hosts behind a list of hosts and sets.

        Args:
            granted: a caller's own list; None: the one for everybody.
        """
        chosen = self.hosts if granted is None else granted
        return frozenset(
            host for one in chosen for host in (self.sets.get(one[1:], ()) if one.startswith("@") else (one,))
        )


class JwtSettings(Model):
    """Tokens of somebody else's making. One of `secret_file` and `public_key_file` switches them on."""

    secret_file: str = Field("", description="a file with the shared secret, for HS256")
    public_key_file: str = Field("", description="a PEM file, for RS256 or ES256")
    algorithms: tuple[Literal["HS256", "RS256", "ES256"], ...] = ()
    issuer: str = ""
    audience: str = ""


class PreviewSettings(Model):
    """What previews of callers get, and where they are seen."""

    address: Annotated[str, Field(pattern=_PREVIEW_ADDRESS)] = Field(
        "", description="the wildcard domain below which they are, such as https://previews.example.org"
    )
    path: StrictBool = Field(True, description="whether they are also seen below /preview/ of the service's own host")
    frames: tuple[str, ...] = Field((), description="origins of pages that may show them in a frame")
    backends: tuple[str, ...] = Field((), description="addresses to which /api of a preview may lead; none: nowhere")
    lifetime: float = Field(
        8 * 3600.0, gt=0, le=7 * 86400, allow_inf_nan=False,
        description="seconds that one may have in all, extensions included",
    )  # fmt: skip
    start: float = Field(120, gt=0, le=3600, allow_inf_nan=False, description="seconds that it may take to listen")


class ServiceSettings(Model):
    """What `belljar serve` does."""

    host: str = Field("127.0.0.1", min_length=1)
    port: int = Field(8080, ge=0, le=65535)
    hosts: tuple[str, ...] = Field((), description="names under which it may be asked, besides those of loopback")
    origins: tuple[str, ...] = Field((), description="origins of other web pages that may ask it")
    jwt: Annotated[JwtSettings, Apart()] = Field(default_factory=ours(JwtSettings))
    egress: Annotated[ServiceEgress, Apart()] = Field(default_factory=ours(ServiceEgress))
    preview: Annotated[PreviewSettings, Apart()] = Field(default_factory=ours(PreviewSettings))
    packages: tuple[PackagePattern, ...] = Field(
        (), max_length=4096, description="that callers may have installed, if packages.names allows it; () is none"
    )
    projects: tuple[str, ...] = Field((), description="folders below which `project_path` may lie; none: no project")
    store: str = Field("", description="sqlite:///PATH or postgresql://…; empty: SQLite in the data folder")
    shared_store: str = Field("", description="where records are pushed to as well: postgresql://…")
    redis: str = Field("", description="redis://…: lines of output for other processes")
    nats: str = Field("", description="nats://…: events for other systems")
    request_size: Size = Field(64 * MIB, ge=KIB, description="bytes of a body; twice that of one caller on their way")
    body_patience: float = Field(10, gt=0, allow_inf_nan=False, description="seconds, and one more for each 64 KiB")
    output: Size = Field(16 * MIB, ge=0, description="the most a request may ask for as `output`, under `caps.output`")
    output_memory: Size = Field(64 * MIB, gt=0, description="bytes that outputs of one caller's runs hold at once")
    queue: int = Field(100, ge=0, description="runs that may wait")
    rate: str = Field("600/minute", pattern=r"^\d+ ?(/|per) ?(second|minute|hour|day)$", description="of one caller")
    concurrency: int = Field(0, ge=0, description="runs of one caller at once; 0: as many as there may be at all")
    sessions: int = Field(0, ge=0, description="open at once; 0: half of max_containers")
    living_lifetime: float = Field(
        30 * 86400.0, gt=0, le=30 * 86400.0, allow_inf_nan=False,
        description="seconds that a living sandbox may have in all, extensions included",
    )  # fmt: skip
    living_absence: float = Field(
        600.0, ge=0, le=86400.0, allow_inf_nan=False,
        description="seconds that a living sandbox goes on without its server, where it can; at most twice that",
    )  # fmt: skip
    cpu_overcommit: float = Field(8, gt=0, description="CPUs that running guests may have for each of ours")
    memory_headroom: Size = Field(128 * MIB, ge=0, description="bytes of the host that guests leave alone")
    drain: float = Field(30, ge=0, allow_inf_nan=False, description="seconds that runs have to end after SIGTERM")
    keep: float = Field(30 * 86400, gt=0, description="seconds that pruning keeps records")
    log_memory: Size = Field(MIB, ge=4096, description="bytes of each run's latest lines that are kept in memory")
    prune_every: float = Field(0, ge=0, allow_inf_nan=False, description="seconds between two prunings; 0: never")
    first_key_file: str = Field("", description="a file with a key of `belljar keys generate`, added at the start")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="of the server's own log")
    log_format: Literal["console", "json"] = Field("console", description="of a line of the server's own log")


class Settings(Model):
    """All settings of one process, as they are in force."""

    backend: str = "auto"
    defaults: Annotated[Limits, Apart()] = Field(default_factory=ours(Limits))
    caps: Annotated[Caps, Apart()] = Field(default_factory=ours(Caps))
    max_containers: int = Field(10, ge=1, le=100_000)
    state_dir: str = ""
    cache_dir: str = ""
    user_uid: int = Field(UNPRIVILEGED_UIDS, ge=1, le=2**31 - 70_000, description="first uid of the private range")
    user_gid: int | None = Field(None, ge=1, le=2**31 - 1, description="the group of all guests; none: each one's own")
    user_uids: int = Field(
        PRIVATE_UIDS, ge=1, le=PRIVATE_UIDS, description="how many, each for one sandbox; 1: all guests share that one"
    )
    language_file: str = ""
    docker_socket: str = Field("/var/run/docker.sock", description="or an address: unix://…, tcp://…, ssh://…")
    podman_socket: str = ""
    audit_log: str = Field("", description="a file; where it is set, what is not recorded there is not run")
    project_image: str = Field("", description="the image that a project's file names: used, or the run is refused")
    auto_remove: StrictBool = Field(True, description="false: the container of a run is kept, for inspection")
    switched_off: str = Field("", description="the project file that says so: then nothing is run at all")
    egress: Annotated[EgressSettings, Apart()] = Field(default_factory=ours(EgressSettings))
    container: Annotated[ContainerSettings, Apart()] = Field(default_factory=ours(ContainerSettings))
    images: Annotated[ImageSettings, Apart()] = Field(default_factory=ours(ImageSettings))
    living: Annotated[LivingSettings, Apart()] = Field(default_factory=ours(LivingSettings))
    packages: Annotated[PackageSettings, Apart()] = Field(default_factory=ours(PackageSettings))
    service: Annotated[ServiceSettings, Apart()] = Field(default_factory=ours(ServiceSettings))
    installers: Mapping[str, str] = Field(
        default_factory=dict, repr=False, exclude=True, description="variables that pip, uv and npm go by, over our own"
    )
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
    "bandwidth": ("defaults", "net_bandwidth"),
    "connections": ("defaults", "net_connections"),
    "image_registry": ("images", "image_registry"),
    "image_pull_policy": ("images", "image_pull_policy"),
}


def moved(values: dict[str, Any]) -> dict[str, Any]:
    """One layer with each value under one name, or `ValueError` where two names say different things."""
    block = values.get("container")
    if not isinstance(block, Mapping):
        return values
    block = settled(block)
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


def merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Lays one layer over another, table by table."""
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key, {}), Mapping):
            merged[key] = merge(merged.get(key, {}), value)
        else:
            merged[key] = value
    return merged
