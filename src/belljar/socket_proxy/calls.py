"""The calls that Belljar makes to a container engine: a request line that is none of them is refused. Pure.

Unknown means no, for a path and a parameter alike. What was understood of a request is put together anew before it is
sent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import parse_qsl, urlencode

from belljar.core.labels import LABEL, RUN_LABEL
from belljar.socket_proxy.rules import CallRefused, ProxyRules, parse

LEAST_API = 41  # of 1.x; earlier ones take other bodies at other calls
NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}"
_IMAGE = r"[A-Za-z0-9][A-Za-z0-9_.:/@-]{0,511}"
_TARGET = re.compile(r"(/[A-Za-z0-9_.:/@-]*)(?:\?([A-Za-z0-9_.~:/@%+=&,!*()'-]*))?")


class Route(NamedTuple):
    """One call that Belljar makes, and the parameters that it may have."""

    verb: str
    method: str
    path: re.Pattern[str]
    query: frozenset[str] = frozenset()
    images: bool = False


def _route(verb: str, method: str, path: str, query: str = "", *, images: bool = False) -> Route:
    pattern = path.replace("{name}", f"(?P<name>{NAME})").replace("{image}", f"(?P<name>{_IMAGE})")
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
    _route("container", "POST", "containers/{name}/pause"),
    _route("container", "POST", "containers/{name}/unpause"),
    _route("exec", "POST", "containers/{name}/exec"),
    _route("remove", "DELETE", "containers/{name}", "force v"),
    _route("exec_start", "POST", "exec/{name}/start"),
    _route("exec_look", "GET", "exec/{name}/json"),
    _route("exec_look", "POST", "exec/{name}/resize", "h w"),
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


class EngineCall(NamedTuple):
    """One request that is on the list. Its target is put together anew, from what was understood of it."""

    verb: str
    method: str
    version: str
    path: str
    name: str
    query: tuple[tuple[str, str], ...]

    def target(self, name: str = "") -> str:
        """Returns the request's target; `name`: instead of the one that the client used."""
        path = self.path.replace(f"/{self.name}", f"/{name}", 1) if name and self.name else self.path
        asked = f"?{urlencode(self.query)}" if self.query else ""
        return f"{self.version}/{path}{asked}"


def judge(method: str, target: str, rules: ProxyRules) -> EngineCall:
    """Returns the call that a request line means, or raises `CallRefused`."""
    match = _TARGET.fullmatch(target)
    if not match or re.search(r"//|/\.{1,2}(/|$)", match[1]):
        raise CallRefused("only plain paths are let through: no other host, no escapes, no dots")
    version, path = _version(match[1])
    for route in ROUTES:
        found = route.path.fullmatch(path)
        if not found or route.method != method:
            continue
        if route.images and not rules.images:
            raise CallRefused("images are not touched through this proxy: it was started without --images")
        query = _query(match[2] or "", route)
        name = found.groupdict().get("name", "")
        if route.verb == "list":
            _check_filters(dict(query), rules)
        if route.verb == "build":
            _check_build(dict(query))
        return EngineCall(route.verb, method, version, path, name, query)
    raise CallRefused(f"{method} /{path} is not one of the calls that Belljar makes")


def _version(path: str) -> tuple[str, str]:
    if path == "/version":
        return "", "version"
    match = re.fullmatch(r"(/v1\.(\d{1,3}))/(.+)", path)
    if not match or int(match[2]) < LEAST_API:
        raise CallRefused(f"only /version and paths below /v1.{LEAST_API} or later are let through")
    return match[1], match[3]


def _query(text: str, route: Route) -> tuple[tuple[str, str], ...]:
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text), errors="strict", max_num_fields=20)
    except ValueError:
        raise CallRefused("the query cannot be read") from None
    names = [name for name, _ in pairs]
    if unknown := sorted(set(names) - route.query):
        raise CallRefused(f"the parameter {unknown[0][:40]!r} is not one that Belljar uses here")
    if len(set(names)) != len(names):
        raise CallRefused("a parameter is given twice")
    return tuple(pairs)


def _check_filters(query: Mapping[str, str], rules: ProxyRules) -> None:
    """What is not ours is nobody's business; only who clears up images needs to know which are in use."""
    if "filters" not in query and rules.images:
        return
    wanted = parse(query.get("filters", "{}").encode())
    labels = wanted.get("label")
    ours = isinstance(labels, list) and any(
        isinstance(label, str) and re.fullmatch(rf"{LABEL}=1|{re.escape(RUN_LABEL)}=.+", label) for label in labels
    )
    if set(wanted) != {"label"} or not ours:
        raise CallRefused(f"only what has the label {LABEL}=1 may be listed")


def _check_build(query: Mapping[str, str]) -> None:
    own = parse(b'{"own": %s}' % query.get("nsoptions", "null").encode())["own"]
    if own not in (None, [{"Name": "network", "Host": False, "Path": ""}]):
        raise CallRefused("a build has a network namespace of its own")
    if query.get("networkmode") not in ("none", "default", "NetworkDefault", "NetworkDisabled"):
        raise CallRefused("a build's network is none or the default one, and has to be named")
