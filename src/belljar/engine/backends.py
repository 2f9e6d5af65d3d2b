"""Which backends there are, and what each is told of the settings. A new one is one folder and one row here.

Backends read no settings: a row hands them finished facts.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypedDict, Unpack

from belljar.backends.base import Backend
from belljar.core.capabilities import Capabilities
from belljar.core.languages import Languages
from belljar.core.settings import LANGUAGE_IMAGES, Settings

if TYPE_CHECKING:
    from belljar.backends.apple.backend import Apple
    from belljar.backends.containers.backend import Containers
    from belljar.backends.native.backend import Native
    from belljar.backends.none import NoSandbox
    from belljar.backends.wasm.backend import Wasm
    from belljar.host.egress.access import Outside
    from belljar.host.egress.judgement import Resolve
    from belljar.host.packages.store import PackageStore
    from belljar.images.images import Images


class ContainerNetwork(TypedDict, total=False):
    """How the names of listed hosts are looked up."""

    resolver: Resolve


def _outside(settings: Settings, resolver: Resolve | None = None) -> Outside:
    """What backends are told of the way to listed hosts."""
    from belljar.core.addresses import endpoint
    from belljar.host.egress.access import Outside
    from belljar.host.egress.judgement import resolve

    return Outside(resolver or resolve, tuple(map(endpoint, settings.egress.private)), settings.egress.tls)


class BackendFacts(NamedTuple):
    """What the rows choose from."""

    settings: Settings
    languages: Languages
    native: Callable[[], Native]  # the engine's own
    probe_native: Callable[[], Awaitable[Capabilities]] | None = None  # what is known of it; None: it is asked
    told: Callable[[str], object] = lambda step: None  # hears what takes long: an image that is pulled


def _native(facts: BackendFacts) -> Native:
    from belljar.backends.native.backend import Native

    settings = facts.settings
    return Native(
        Path(settings.state_dir), first_uid=settings.user_uid, uids=settings.user_uids, gid=settings.user_gid,
        path=settings.path, spoken=tuple(facts.languages), outside=_outside(settings),
        packages=package_store(settings, facts.told), disk_backing=settings.living.disk_backing,
    )  # fmt: skip


def package_store(settings: Settings, told: Callable[[str], object] = lambda step: None) -> PackageStore:
    """Returns the sets of packages that are kept for guests; `told` hears when one is made."""
    from belljar.host.packages.store import PackageStore

    root = hasattr(os, "geteuid") and os.geteuid() == 0  # whose own cache no guest could read
    usual = "/var/cache/belljar" if root else settings.cache_dir
    folder = Path(settings.packages.folder or f"{usual}/packages")
    return PackageStore(folder, settings.packages, settings.installers, settings.path, told)


def _wasm(facts: BackendFacts) -> Wasm:
    from belljar.backends.wasm.backend import Wasm
    from belljar.backends.wasm.store import CompiledStore

    return Wasm(facts.native(), CompiledStore.of(facts.settings.cache_dir), facts.probe_native)


def containers(
    name: str,
    settings: Settings,
    languages: Languages | None = None,
    told: Callable[[str], object] = lambda step: None,
    **network: Unpack[ContainerNetwork],
) -> Containers:
    """Makes the backend of a container engine: Podman is the same one at another socket.

    Args:
        name: `docker` or `podman`.
        settings: Belljar's.
        languages: what it is to run; without any: the built-in ones.
        told: hears how far the pull of an image is.
        network: how the names of listed hosts are looked up, for tests.
    """
    from belljar.backends.containers.backend import Containers
    from belljar.backends.containers.images_for import ImagesFor
    from belljar.host.engine_address import engine_address

    address = engine_address(name, settings)

    def images() -> Images:
        from belljar.images.images import Images

        return Images(settings, address)

    chosen = ImagesFor(settings.container, settings.images, images, languages, told)
    return Containers(
        address, settings.container, chosen, Path(settings.state_dir), first_uid=settings.user_uid,
        uids=settings.user_uids, gid=settings.user_gid, outside=_outside(settings, **network),
    )  # fmt: skip


def _docker(facts: BackendFacts) -> Containers:
    return containers("docker", facts.settings, facts.languages, facts.told)


def _podman(facts: BackendFacts) -> Containers:
    return containers("podman", facts.settings, facts.languages, facts.told)


def _apple(facts: BackendFacts) -> Apple:
    from belljar.backends.apple.backend import Apple

    settings, container = facts.settings, facts.settings.container
    images = LANGUAGE_IMAGES | {name: container.image_of(name) for name in container.types} | dict(container.images)
    return Apple(
        Path(settings.state_dir), path=settings.path, images=images, spoken=tuple(facts.languages),
        first_uid=settings.user_uid, uids=settings.user_uids, gid=settings.user_gid,
    )  # fmt: skip


def _none(facts: BackendFacts) -> NoSandbox:
    from belljar.backends.none import NoSandbox

    return NoSandbox()


# In the order that `auto` prefers them. The fake is passed in by hand, never chosen.
BACKENDS: Mapping[str, Callable[[BackendFacts], Backend]] = {
    "wasm": _wasm,
    "native": _native,
    "docker": _docker,
    "podman": _podman,
    "apple": _apple,
    "none": _none,
}
NEVER_CHOSEN = ("none",)  # asked for by name, it says no
NAMES = tuple(name for name in BACKENDS if name not in NEVER_CHOSEN)


class Backends:
    """The backends of one engine, each imported and made when it is first asked for."""

    def __init__(
        self,
        settings: Settings,
        languages: Languages | None = None,
        probe_native: Callable[[], Awaitable[Capabilities]] | None = None,
        told: Callable[[str], object] = lambda step: None,
    ) -> None:
        """Remembers what the backends will be made of.

        Args:
            settings: Belljar's.
            languages: what they are to run; without any: the built-in ones.
            probe_native: tells what is known of the backend `native`, so that `wasm` need not prove it again.
            told: hears what takes long.
        """
        self._facts = BackendFacts(settings, languages or Languages(), self.native, probe_native, told)
        self._made: dict[str, Backend] = {}

    def __getitem__(self, name: str) -> Backend:
        """The backend of that name, always the same one."""
        if name not in self._made:
            self._made[name] = BACKENDS[name](self._facts)
        return self._made[name]

    def native(self) -> Native:
        """The backend `native`, for those that build on it."""
        from belljar.backends.native.backend import Native

        native = self["native"]
        assert isinstance(native, Native)
        return native
