"""What the bodies of Belljar's calls may hold, and what a container of Belljar's looks like. Pure.

Unknown means no, for each field. An engine reads the names of fields without regard to case, and of two fields with one
name the last: so names are compared letter by letter, and what was judged is written anew before it is sent.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from belljar.core.labels import LABEL, OWNER_LABEL
from belljar.core.settings import GRANTABLE
from belljar.host.seccomp.guest_profile import PROFILE_PATH, profile_text
from belljar.socket_proxy.calls import NAME
from belljar.socket_proxy.rules import CallRefused, ProxyRules, parse

MAX_BODY_BYTES = 1 << 20
_KERNEL_PROCESSES = 1024  # that a kernel in user space may have on the host, beside twice the guest's
_MOST_NPROC = 16_384  # Podman's; the limit on processes is the control group's
Check = Callable[[Any, ProxyRules], str]  # what speaks against a value; empty: nothing


def _only(*allowed: Any) -> Check:
    texts = [json.dumps(value, sort_keys=True) for value in allowed]  # as text: 0 is not False
    return lambda value, _: "" if json.dumps(value, sort_keys=True) in texts else f"may only be {' or '.join(texts)}"


def _kind(kind: type) -> Check:
    return lambda value, _: "" if type(value) is kind else f"is not of the type {kind.__name__}"


def _positive(value: Any, _: ProxyRules) -> str:
    return "" if type(value) is int and value > 0 else "must be a positive number"


def _texts(value: Any, _: ProxyRules) -> str:
    return "" if isinstance(value, list) and all(type(item) is str for item in value) else "is not a list of texts"


def _texts_or_none(value: Any, rules: ProxyRules) -> str:
    return "" if value is None else _texts(value, rules)


def _map(value: Any, _: ProxyRules) -> str:
    fine = isinstance(value, dict) and all(type(item) is str for item in value.values())
    return "" if fine else "is not a map of texts"


def _rows(**fields: Check) -> Check:
    """A list of objects, each with all of these fields and no others."""

    def check(value: Any, rules: ProxyRules) -> str:
        if not isinstance(value, list):
            return "is not a list"
        return next((said for item in value if (said := _objection(item, fields, rules, tuple(fields)))), "")

    return check


def _objection(value: Any, fields: Mapping[str, Check], rules: ProxyRules, needed: Sequence[str] = ()) -> str:
    if not isinstance(value, dict):
        return "is not an object"
    for name in needed:
        if name not in value:
            return f"{name} is missing"
    for name, item in value.items():
        if name not in fields:
            return f"{name[:40]!r} is not a field that Belljar uses"
        if said := fields[name](item, rules):
            return f"{name} {said}"
    return ""


def _user(value: Any, _: ProxyRules) -> str:
    fine = type(value) is str and re.fullmatch(r"[1-9][0-9]{0,9}:[1-9][0-9]{0,9}", value)
    return "" if fine else "must be uid:gid, and neither is root's"


def _labels(value: Any, rules: ProxyRules) -> str:
    if said := _map(value, rules):
        return said
    return "" if value.get(LABEL) == "1" else f"must have {LABEL}=1"


def _network(value: Any, rules: ProxyRules) -> str:
    """Of `container:ID` the proxy looks up whether that one is ours."""
    if type(value) is not str:
        return "is not a text"
    if value == "none" or re.fullmatch(rf"container:{NAME}", value):
        return ""
    allowed = [name for name in rules.networks if name != "host" and not name.startswith("container:")]
    return "" if value in allowed else f"may only be none, or one that was named with --network, not {value[:40]!r}"


def _cpus(value: Any, _: ProxyRules) -> str:
    fine = type(value) is str and re.fullmatch(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?){0,255}", value, re.ASCII)
    return "" if fine else "is no list of CPUs"


def _capabilities(value: Any, rules: ProxyRules) -> str:
    if said := _texts(value, rules):
        return said
    wrong = [name for name in value if name not in GRANTABLE]
    return f"cannot hold {wrong[0][:40]!r}" if wrong else ""


def _security(value: Any, rules: ProxyRules) -> str:
    if said := _texts(value, rules):
        return said
    if "no-new-privileges" not in value:
        return "lacks no-new-privileges"
    if sum(word.startswith("seccomp") for word in value) != 1:
        return "must have one seccomp profile"
    for word in value:
        name, _, rest = word.partition("=")
        if name == "seccomp":
            if not _is_known_profile(rest, rules):
                return "has a seccomp profile that is neither Belljar's nor one named with --seccomp"
        elif name in ("apparmor", "label"):
            if re.search(r"unconfined|disable|spc_t", rest) or not re.fullmatch(r"[\w./-][\w.:,/-]{0,255}", rest):
                return f"switches {name} off"
        elif word != "no-new-privileges":
            return f"cannot hold {word[:40]!r}"
    return ""


def _is_known_profile(given: str, rules: ProxyRules) -> bool:
    paths = (PROFILE_PATH, *map(Path, rules.profiles))
    if not given.startswith("{"):
        return given in map(str, paths)  # Podman wants the path
    known = [profile_text(True), *(path.read_text() for path in paths)]
    return parse(given.encode()) in [json.loads(text) for text in known]


def _volumes(value: Any, rules: ProxyRules) -> str:
    """Volumes by name, never folders of the host; the proxy looks up whether they are ours."""
    if said := _texts(value, rules):
        return said
    wrong = [bind for bind in value if not re.fullmatch(rf"{NAME}:/[^:]*:(ro|rw)(,nocopy)?", bind)]
    return f"may only hold volumes of Belljar's, not {wrong[0][:60]!r}" if wrong else ""


def _source(value: Any, rules: ProxyRules) -> str:
    """Below a folder that was named; looked at without its links, which a mount would follow."""
    if type(value) is not str or not _is_plain(value):
        return "is not a plain absolute path"
    if not os.path.lexists(value):
        return f"{value[:200]!r} cannot be seen by the proxy"
    real = os.path.realpath(value)
    engines = {os.path.realpath(rules.engine), os.path.realpath("/var/run/docker.sock")}
    if any(socket == real or socket.startswith(f"{real.rstrip('/')}/") for socket in engines):
        return "holds the engine's socket"
    if _below(real, rules.roots):
        return ""
    return f"{value[:200]!r} is not below a folder that was named with --root"


def _is_plain(path: str) -> bool:
    return path.startswith("/") and not path.startswith("//") and os.path.normpath(path) == path


def _below(path: str, roots: Sequence[str]) -> bool:
    real = [os.path.realpath(root) for root in roots]
    return any(path == root or path.startswith(f"{root.rstrip('/')}/") for root in real)


def _sysctls(value: Any, rules: ProxyRules) -> str:
    """Those of the guest's own network, for its buffers."""
    return _map(value, rules) or ("" if set(value) <= {"net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"} else "holds another")


def _tmpfs_options(text: str) -> dict[str, str] | None:
    """The options of a tmpfs, each once and each one that Belljar uses; None if there are others."""
    words = text.split(",")
    options = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    return options if len(options) == len(words) and all(map(_TMPFS_WORD.fullmatch, words)) else None


def _tmpfs(text: str) -> str:
    """A folder in memory has a size, and brings neither devices nor setuid programs to life."""
    options = _tmpfs_options(text)
    if options is None:
        return f"has options that Belljar does not use: {text[:80]!r}"
    sizes = [int(options[name].rstrip("k")) for name in ("size", "nr_blocks", "nr_inodes") if name in options]
    if not {"size", "nr_blocks"} & set(options) or 0 in sizes:  # 0 means any
        return "has no size"
    if {"rw", "ro"} <= set(options) or not ("ro" in options or {"nosuid", "nodev"} <= set(options)):
        return "lacks nosuid or nodev"
    return ""


def _folders(value: Any, rules: ProxyRules) -> str:
    if said := _map(value, rules):
        return said
    for path, options in value.items():
        if not _is_plain(path) or path == "/":
            return f"has {path[:80]!r}, which is not a plain absolute path"
        if said := _tmpfs(options):
            return f"{path[:80]!r} {said}"
    return ""


def _root(value: Any, rules: ProxyRules) -> str:
    if type(value) is not bool:
        return "is not of the type bool"
    return "" if value or rules.writable_root else "must be true: the proxy was started without --writable-root"


def _processes(value: Any, rules: ProxyRules) -> str:
    """Beside a guest's own count those of its container, and of a kernel in user space."""
    most = _most_processes(rules)
    return _positive(value, rules) or ("" if value <= most else f"is over {most}: start the proxy with more --max-pids")


def _most_processes(rules: ProxyRules) -> int:
    return _KERNEL_PROCESSES + 2 * rules.max_pids


def _ulimits(value: Any, rules: ProxyRules) -> str:
    if said := _rows(Name=_kind(str), Soft=_kind(int), Hard=_kind(int))(value, rules):
        return said
    most = {"core": 0, "nofile": 1024, "nproc": max(_MOST_NPROC, _most_processes(rules))}
    for row in value:
        if row["Name"] not in most:
            return f"cannot hold {row['Name'][:40]!r}"
        if not 0 <= row["Soft"] <= row["Hard"] <= most[row["Name"]]:
            return f"{row['Name']} is over {most[row['Name']]}"
    return "" if any(row["Name"] == "core" for row in value) else "must have core, as 0"


def _disk(value: Any, _: ProxyRules) -> str:
    """The engine looks at this path as root: so it is a device's, and tells nothing of the host's files."""
    return "" if type(value) is str and _DEVICE.fullmatch(value) else "is not a disk below /dev"


_TMPFS_WORD = re.compile(
    r"rw|ro|nosuid|nodev|noexec|exec|mode=(1777|755)|size=[0-9]{1,15}k?|(nr_blocks|nr_inodes|uid|gid)=[0-9]{1,15}"
)
_DEVICE = re.compile(r"/dev/(?!fd/|shm/|mqueue/|pts/)[A-Za-z][\w-]{0,63}(/[A-Za-z0-9][\w.-]{0,63})?", re.ASCII)
_KEPT_LOG = {"Type": "json-file", "Config": {"max-size": "10m", "max-file": "1"}}  # of a container that is kept
_RATES = _rows(Path=_disk, Rate=_positive)
_MOUNTS = _rows(
    Type=_only("bind"), Source=_source, Target=_kind(str), ReadOnly=_kind(bool),
    BindOptions=_only({"Propagation": "rprivate", "CreateMountpoint": False}),
)  # fmt: skip
_WALLS: dict[str, Check] = {
    "NetworkMode": _network, "IpcMode": _only("private"), "CgroupnsMode": _only("private"),
    "ReadonlyRootfs": _root, "Privileged": _only(False), "CapDrop": _only(["ALL"]), "CapAdd": _capabilities,
    "SecurityOpt": _security, "Init": _kind(bool), "Memory": _positive, "MemorySwap": _positive,
    "CpuPeriod": _positive, "CpuQuota": _positive, "PidsLimit": _processes, "ShmSize": _positive,
    "Ulimits": _ulimits,
    "LogConfig": _only({"Type": "none", "Config": {}}, _KEPT_LOG),
    "RestartPolicy": _only({"Name": "no"}), "Tmpfs": _folders,
    "Binds": _volumes, "Mounts": _MOUNTS, "Sysctls": _sysctls, "CpuShares": _positive, "CpusetCpus": _cpus,
    "BlkioWeight": _positive,
    "Runtime": lambda value, _: "" if re.fullmatch(r"[\w.-]{1,64}", str(value)) else "is no runtime's name",
    "Dns": _texts, "DnsSearch": _texts,
    **{f"BlkioDevice{way}{what}": _RATES for way in ("Read", "Write") for what in ("Bps", "IOps")},
}  # fmt: skip
_NEEDED_WALLS = (
    "NetworkMode", "IpcMode", "CgroupnsMode", "Privileged", "CapDrop", "SecurityOpt", "Memory", "MemorySwap",
    "PidsLimit", "LogConfig", "RestartPolicy", "ReadonlyRootfs", "Ulimits",
)  # fmt: skip
_CONTAINER: dict[str, Check] = {
    "Image": _kind(str), "Entrypoint": _only([]), "Cmd": _texts, "User": _user, "WorkingDir": _kind(str),
    "Hostname": _kind(str), "Env": _texts, "Labels": _labels, "Tty": _only(False),
    "Healthcheck": _only({"Test": ["NONE"]}), "NetworkDisabled": _kind(bool),
    **{name: _kind(bool) for name in ("OpenStdin", "StdinOnce", "AttachStdin", "AttachStdout", "AttachStderr")},
    "HostConfig": lambda value, rules: _objection(value, _WALLS, rules, _NEEDED_WALLS),
}  # fmt: skip
_EXEC: dict[str, Check] = {
    "Container": _kind(str), "Privileged": _only(False), "Tty": _kind(bool), "AttachStdin": _kind(bool),
    "AttachStdout": _kind(bool), "AttachStderr": _kind(bool), "Cmd": _texts, "Env": _texts_or_none,
    "WorkingDir": _kind(str), "detachKeys": _only(""), "User": _user,
}  # fmt: skip


def _driver_options(value: Any, rules: ProxyRules) -> str:
    """Of memory and nothing else: the same driver mounts any folder of the host."""
    if _map(value, rules) or set(value) != {"type", "device", "o"}:
        return "must be a type, a device and options"
    if value["type"] != "tmpfs" or value["device"] != "tmpfs":
        return "may only be of a tmpfs"
    return _tmpfs(value["o"])


_VOLUME: dict[str, Check] = {
    "Name": lambda value, _: "" if re.fullmatch(NAME, str(value)) else "is no name",
    "Driver": _only("local"), "DriverOpts": _driver_options, "Labels": _labels,
}  # fmt: skip
_BODIES: dict[str, tuple[dict[str, Check], tuple[str, ...]]] = {
    "create": (_CONTAINER, ("Image", "User", "Labels", "HostConfig")),
    "exec": (_EXEC, ("Cmd", "User")),
    "exec_start": ({"Detach": _only(False), "Tty": _kind(bool)}, ("Detach",)),
    "volume_create": (_VOLUME, tuple(_VOLUME)),
}


def check_body(verb: str, body: bytes, rules: ProxyRules) -> dict[str, Any] | None:
    """Returns what a call's body says, or raises `CallRefused`; None where a call has none."""
    if verb not in _BODIES:
        if body.strip() in (b"", b"{}", b"null"):
            return None
        raise CallRefused("this call has no body")
    fields, needed = _BODIES[verb]
    found = parse(body)
    if objection := _objection(found, fields, rules, needed):
        raise CallRefused(f"{verb}: {objection}")
    if verb == "exec":
        found.pop("Container", None)  # the path says which
    return found


def foreign(facts: Mapping[str, Any], rules: ProxyRules) -> str:
    """Returns what speaks against touching a container that is there already; empty if it is one of Belljar's.

    Our images have our label too, and hand it on to whatever anybody starts from them, as root or with the host's disk:
    so it must also be such a one as could have been made here.
    """
    config, walls = facts.get("Config") or {}, facts.get("HostConfig") or {}
    labels = config.get("Labels") or {}
    if labels.get(LABEL) != "1" or not labels.get(OWNER_LABEL):
        return "is not one of Belljar's"
    if walls.get("Privileged") is not False or _user(config.get("User"), rules):
        return "is not one of Belljar's: it is root or more"
    for mode in ("PidMode", "IpcMode", "UTSMode"):
        if walls.get(mode) not in _OWN:
            return f"is not one of Belljar's: its {mode} is {str(walls[mode])[:40]!r}"
    if _network(walls.get("NetworkMode"), rules):
        return "is not one of Belljar's: it has a network that was not named with --network"
    shown = [str(mount.get("Source")) for mount in facts.get("Mounts") or () if mount.get("Type") == "bind"]
    if walls.get("Devices") or not all(_below(os.path.normpath(path), rules.roots) for path in shown):
        return "is not one of Belljar's: it sees a part of the host"
    return ""


_OWN = (None, "", "private", "shareable")  # the last: of its own, and open to others


def volumes_of(body: Mapping[str, Any]) -> list[str]:
    """The names of the volumes that a container is to have."""
    return [bind.partition(":")[0] for bind in body["HostConfig"].get("Binds") or ()]


def neighbour_of(body: Mapping[str, Any]) -> str:
    """The container whose network it is to share; empty if none."""
    mode = str(body["HostConfig"]["NetworkMode"])
    return mode.removeprefix("container:") if mode.startswith("container:") else ""
