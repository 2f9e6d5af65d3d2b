"""What may be said to a container engine: a list of the calls that Belljar makes, and of what their bodies may hold.

Pure: no connection, no engine. Unknown means no, for a path, a parameter and a field alike. An engine reads the names
of fields without regard to case, and of two fields with one name the last: so names are compared letter by letter,
and what was judged is written anew before it is sent.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

from belljar.backends.containers import spec
from belljar.core.settings import GRANTABLE

LEAST_API = 41  # of 1.x; earlier ones take other bodies at other calls
MOST_BODY = 1 << 20
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}"
_IMAGE = r"[A-Za-z0-9][A-Za-z0-9_.:/@-]{0,511}"
_TARGET = re.compile(r"(/[A-Za-z0-9_.:/@-]*)(?:\?([A-Za-z0-9_.~:/@%+=&,!*()'-]*))?")


class Refused(Exception):
    """The answer is no; the message says why."""


class Rules(NamedTuple):
    """What an administrator lets through, beside what Belljar cannot do without."""

    engine: str = "/var/run/docker.sock"
    roots: tuple[str, ...] = ()  # folders of the host of which a guest may be shown parts
    networks: tuple[str, ...] = ()  # networks of the engine that a guest may have
    profiles: tuple[str, ...] = ()  # seccomp profiles beside ours, by path
    images: bool = False  # may images be pulled, built, tagged and removed?


class Route(NamedTuple):
    verb: str
    method: str
    path: re.Pattern[str]
    query: frozenset[str] = frozenset()
    images: bool = False


def _route(verb: str, method: str, path: str, query: str = "", *, images: bool = False) -> Route:
    pattern = path.replace("{name}", f"(?P<name>{_NAME})").replace("{image}", f"(?P<name>{_IMAGE})")
    return Route(verb, method, re.compile(pattern), frozenset(query.split()), images)


_BUILD = "t dockerfile rm forcerm buildargs labels networkmode nsoptions memory memswap cpuperiod cpuquota"
ROUTES = (
    _route("version", "GET", "version"),
    _route("facts", "GET", "info"),
    _route("list", "GET", "containers/json", "all filters"),
    _route("create", "POST", "containers/create", "name"),
    _route("container", "GET", "containers/{name}/json"),
    _route("container", "GET", "containers/{name}/stats", "stream one-shot"),
    _route("attach", "POST", "containers/{name}/attach", "detachKeys logs stdin stdout stderr stream"),
    _route("container", "POST", "containers/{name}/start"),
    _route("container", "POST", "containers/{name}/kill", "signal"),
    _route("container", "POST", "containers/{name}/wait", "condition"),
    _route("exec", "POST", "containers/{name}/exec"),
    _route("remove", "DELETE", "containers/{name}", "force v"),
    _route("exec_start", "POST", "exec/{name}/start"),
    _route("exec_look", "GET", "exec/{name}/json"),
    _route("list", "GET", "volumes", "filters"),
    _route("volume_create", "POST", "volumes/create"),
    _route("volume", "GET", "volumes/{name}"),
    _route("volume", "DELETE", "volumes/{name}", "force"),
    _route("network", "GET", "networks/{name}"),
    _route("image", "GET", "images/{image}/json"),
    _route("image", "GET", "images/json", "filters all", images=True),
    _route("pull", "POST", "images/create", "fromImage tag", images=True),
    _route("image", "POST", "images/{image}/tag", "repo tag", images=True),
    _route("image", "DELETE", "images/{image}", "force noprune", images=True),
    _route("image", "GET", "distribution/{image}/json", images=True),
    _route("build", "POST", "build", _BUILD, images=True),
)


class Call(NamedTuple):
    """One request that is on the list. Its target is put together anew, from what was understood of it."""

    verb: str
    method: str
    version: str
    path: str
    name: str
    query: tuple[tuple[str, str], ...]

    def target(self, name: str = "") -> str:
        path = self.path.replace(f"/{self.name}", f"/{name}", 1) if name and self.name else self.path
        asked = f"?{urlencode(self.query)}" if self.query else ""
        return f"{self.version}/{path}{asked}"


def judge(method: str, target: str, rules: Rules) -> Call:
    """The call that a request line means, or `Refused`."""
    match = _TARGET.fullmatch(target)
    if not match or re.search(r"//|/\.{1,2}(/|$)", match[1]):
        raise Refused("only plain paths are let through: no other host, no escapes, no dots")
    version, path = _version(match[1])
    for route in ROUTES:
        found = route.path.fullmatch(path)
        if not found or route.method != method:
            continue
        if route.images and not rules.images:
            raise Refused("images are not touched through this proxy: it was started without --images")
        query = _query(match[2] or "", route)
        name = found.groupdict().get("name", "")
        if route.verb == "list":
            _check_filters(dict(query), rules)
        if route.verb == "build":
            _check_build(dict(query))
        return Call(route.verb, method, version, path, name, query)
    raise Refused(f"{method} /{path} is not one of the calls that Belljar makes")


def _version(path: str) -> tuple[str, str]:
    if path == "/version":
        return "", "version"
    match = re.fullmatch(r"(/v1\.(\d{1,3}))/(.+)", path)
    if not match or int(match[2]) < LEAST_API:
        raise Refused(f"only /version and paths below /v1.{LEAST_API} or later are let through")
    return match[1], match[3]


def _query(text: str, route: Route) -> tuple[tuple[str, str], ...]:
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text), errors="strict", max_num_fields=20)
    except ValueError:
        raise Refused("the query cannot be read") from None
    names = [name for name, _ in pairs]
    if unknown := sorted(set(names) - route.query):
        raise Refused(f"the parameter {unknown[0][:40]!r} is not one that Belljar uses here")
    if len(set(names)) != len(names):
        raise Refused("a parameter is given twice")
    return tuple(pairs)


def _check_filters(query: Mapping[str, str], rules: Rules) -> None:
    """What is not ours is nobody's business; only who clears up images needs to know which are in use."""
    if "filters" not in query and rules.images:
        return
    wanted = parse(query.get("filters", "{}").encode())
    labels = wanted.get("label")
    ours = isinstance(labels, list) and any(
        isinstance(label, str) and re.fullmatch(rf"{spec.LABEL}(=1|\.run=.+)", label) for label in labels
    )
    if set(wanted) != {"label"} or not ours:
        raise Refused(f"only what has the label {spec.LABEL}=1 may be listed")


def _check_build(query: Mapping[str, str]) -> None:
    own = parse(b'{"own": %s}' % query.get("nsoptions", "null").encode())["own"]
    if own not in (None, [{"Name": "network", "Host": False, "Path": ""}]):
        raise Refused("a build has a network namespace of its own")
    if query.get("networkmode") not in ("none", "default", "NetworkDefault", "NetworkDisabled"):
        raise Refused("a build's network is none or the default one, and has to be named")


# --- bodies ------------------------------------------------------------------------------------


def parse(body: bytes) -> dict[str, Any]:
    """A JSON object in which no name comes twice, or `Refused`."""
    try:
        found = json.loads(body.decode(), object_pairs_hook=_object, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise Refused("the body is not plain JSON") from None
    if not isinstance(found, dict):
        raise Refused("the body is not a JSON object")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name.casefold() for name, _ in pairs}) != len(pairs):
        raise Refused("a field is given twice")
    return dict(pairs)


def _no_constant(word: str) -> None:
    raise Refused(f"{word} is no number")


Check = Callable[[Any, Rules], str]  # what speaks against a value; empty: nothing


def _only(*allowed: Any) -> Check:
    texts = [json.dumps(value, sort_keys=True) for value in allowed]  # as text: 0 is not False
    return lambda value, _: "" if json.dumps(value, sort_keys=True) in texts else f"may only be {' or '.join(texts)}"


def _kind(kind: type) -> Check:
    return lambda value, _: "" if type(value) is kind else f"is not of the type {kind.__name__}"


def _positive(value: Any, _: Rules) -> str:
    return "" if type(value) is int and value > 0 else "must be a positive number"


def _texts(value: Any, _: Rules) -> str:
    return "" if isinstance(value, list) and all(type(item) is str for item in value) else "is not a list of texts"


def _texts_or_none(value: Any, rules: Rules) -> str:
    return "" if value is None else _texts(value, rules)


def _map(value: Any, _: Rules) -> str:
    fine = isinstance(value, dict) and all(type(item) is str for item in value.values())
    return "" if fine else "is not a map of texts"


def _rows(**fields: Check) -> Check:
    """A list of objects, each with all of these fields and no others."""

    def check(value: Any, rules: Rules) -> str:
        if not isinstance(value, list):
            return "is not a list"
        return next((said for item in value if (said := _objection(item, fields, rules, tuple(fields)))), "")

    return check


def _objection(value: Any, fields: Mapping[str, Check], rules: Rules, needed: Sequence[str] = ()) -> str:
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


def _user(value: Any, _: Rules) -> str:
    fine = type(value) is str and re.fullmatch(r"[1-9][0-9]{0,9}:[1-9][0-9]{0,9}", value)
    return "" if fine else "must be uid:gid, and neither is root's"


def _labels(value: Any, rules: Rules) -> str:
    if said := _map(value, rules):
        return said
    return "" if value.get(spec.LABEL) == "1" else f"must have {spec.LABEL}=1"


def _network(value: Any, rules: Rules) -> str:
    """Of `container:ID` the proxy looks up whether that one is ours."""
    if type(value) is not str:
        return "is not a text"
    if value == "none" or re.fullmatch(rf"container:{_NAME}", value):
        return ""
    allowed = [name for name in rules.networks if name != "host" and not name.startswith("container:")]
    return "" if value in allowed else f"may only be none, or one that was named with --network, not {value[:40]!r}"


def _capabilities(value: Any, rules: Rules) -> str:
    if said := _texts(value, rules):
        return said
    wrong = [name for name in value if name not in GRANTABLE]
    return f"cannot hold {wrong[0][:40]!r}" if wrong else ""


def _security(value: Any, rules: Rules) -> str:
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


def _is_known_profile(given: str, rules: Rules) -> bool:
    paths = (spec._PROFILE, *map(Path, rules.profiles))
    if not given.startswith("{"):
        return given in map(str, paths)  # Podman wants the path
    known = [spec._profile(True), *(path.read_text() for path in paths)]
    return parse(given.encode()) in [json.loads(text) for text in known]


def _volumes(value: Any, rules: Rules) -> str:
    """Volumes by name, never folders of the host; the proxy looks up whether they are ours."""
    if said := _texts(value, rules):
        return said
    wrong = [bind for bind in value if not re.fullmatch(rf"{_NAME}:/[^:]*:(ro|rw)", bind)]
    return f"may only hold volumes of Belljar's, not {wrong[0][:60]!r}" if wrong else ""


def _source(value: Any, rules: Rules) -> str:
    """Below a folder that was named; looked at without its links, which a mount would follow."""
    if type(value) is not str or not value.startswith("/") or os.path.normpath(value) != value:
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


def _below(path: str, roots: Sequence[str]) -> bool:
    real = [os.path.realpath(root) for root in roots]
    return any(path == root or path.startswith(f"{root.rstrip('/')}/") for root in real)


def _sysctls(value: Any, rules: Rules) -> str:
    """Those of the guest's own network, for its buffers."""
    return _map(value, rules) or ("" if set(value) <= {"net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"} else "holds another")


_RATES = _rows(Path=_kind(str), Rate=_positive)
_MOUNTS = _rows(
    Type=_only("bind"), Source=_source, Target=_kind(str), ReadOnly=_kind(bool),
    BindOptions=_only({"Propagation": "rprivate", "CreateMountpoint": False}),
)  # fmt: skip
_WALLS: dict[str, Check] = {
    "NetworkMode": _network, "IpcMode": _only("private"), "CgroupnsMode": _only("private"),
    "ReadonlyRootfs": _kind(bool), "Privileged": _only(False), "CapDrop": _only(["ALL"]), "CapAdd": _capabilities,
    "SecurityOpt": _security, "Init": _kind(bool), "Memory": _positive, "MemorySwap": _positive,
    "CpuPeriod": _positive, "CpuQuota": _positive, "PidsLimit": _positive, "ShmSize": _positive,
    "Ulimits": _rows(Name=_kind(str), Soft=_kind(int), Hard=_kind(int)),
    "LogConfig": _only({"Type": "none", "Config": {}}), "RestartPolicy": _only({"Name": "no"}), "Tmpfs": _map,
    "Binds": _volumes, "Mounts": _MOUNTS, "Sysctls": _sysctls, "CpuShares": _positive, "BlkioWeight": _positive,
    "Runtime": lambda value, _: "" if re.fullmatch(r"[\w.-]{1,64}", str(value)) else "is no runtime's name",
    "Dns": _texts, **{f"BlkioDevice{way}{what}": _RATES for way in ("Read", "Write") for what in ("Bps", "IOps")},
}  # fmt: skip
_NEEDED_WALLS = (
    "NetworkMode", "IpcMode", "CgroupnsMode", "Privileged", "CapDrop", "SecurityOpt", "Memory", "MemorySwap",
    "PidsLimit", "LogConfig", "RestartPolicy",
)  # fmt: skip
_CONTAINER: dict[str, Check] = {
    "Image": _kind(str), "Entrypoint": _only([]), "Cmd": _texts, "User": _user, "WorkingDir": _kind(str),
    "Hostname": _kind(str), "Env": _texts, "Labels": _labels, "Tty": _only(False),
    "Healthcheck": _only({"Test": ["NONE"]}), "NetworkDisabled": _kind(bool),
    **{name: _kind(bool) for name in ("OpenStdin", "StdinOnce", "AttachStdin", "AttachStdout", "AttachStderr")},
    "HostConfig": lambda value, rules: _objection(value, _WALLS, rules, _NEEDED_WALLS),
}  # fmt: skip
_EXEC: dict[str, Check] = {
    "Container": _kind(str), "Privileged": _only(False), "Tty": _only(False), "AttachStdin": _kind(bool),
    "AttachStdout": _kind(bool), "AttachStderr": _kind(bool), "Cmd": _texts, "Env": _texts_or_none,
    "WorkingDir": _kind(str), "detachKeys": _only(""), "User": _user,
}  # fmt: skip
_TMPFS = re.compile(r"((nr_blocks|size|uid|gid)=[0-9]+|mode=[0-7]{3,4}|nosuid|nodev|noexec)(,|$)")


def _driver_options(value: Any, rules: Rules) -> str:
    """Of memory and nothing else: the same driver mounts any folder of the host."""
    if _map(value, rules) or set(value) != {"type", "device", "o"}:
        return "must be a type, a device and options"
    if value["type"] != "tmpfs" or value["device"] != "tmpfs":
        return "may only be of a tmpfs"
    return "" if re.fullmatch(rf"(?:{_TMPFS.pattern})+", value["o"]) and "nosuid" in value["o"] else "has other options"


_VOLUME: dict[str, Check] = {
    "Name": lambda value, _: "" if re.fullmatch(_NAME, str(value)) else "is no name",
    "Driver": _only("local"), "DriverOpts": _driver_options, "Labels": _labels,
}  # fmt: skip
_BODIES: dict[str, tuple[dict[str, Check], tuple[str, ...]]] = {
    "create": (_CONTAINER, ("Image", "User", "Labels", "HostConfig")),
    "exec": (_EXEC, ("Cmd", "User")),
    "exec_start": ({"Detach": _only(False), "Tty": _only(False)}, ("Detach",)),
    "volume_create": (_VOLUME, tuple(_VOLUME)),
}


def check_body(verb: str, body: bytes, rules: Rules) -> dict[str, Any] | None:
    """What a call's body says, or `Refused`; None where a call has none."""
    if verb not in _BODIES:
        if body.strip() in (b"", b"{}", b"null"):
            return None
        raise Refused("this call has no body")
    fields, needed = _BODIES[verb]
    found = parse(body)
    if objection := _objection(found, fields, rules, needed):
        raise Refused(f"{verb}: {objection}")
    if verb == "exec":
        found.pop("Container", None)  # the path says which
    return found


def foreign(facts: Mapping[str, Any], rules: Rules) -> str:
    """What speaks against touching a container that is there already; empty if it is one of Belljar's.

    Our images have our label too, and hand it on to whatever anybody starts from them, as root or with the host's disk:
    so it must also be such a one as could have been made here.
    """
    config, walls = facts.get("Config") or {}, facts.get("HostConfig") or {}
    labels = config.get("Labels") or {}
    if labels.get(spec.LABEL) != "1" or not labels.get(f"{spec.LABEL}.owner"):
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
