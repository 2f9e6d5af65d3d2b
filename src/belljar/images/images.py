"""Images: fetched by policy, pinned by digest, vouched for, built, and thrown away.

An image gets its name last. It is looked up in the registry, compared with the lock, its signature checked, fetched by
digest, scanned, and only then tagged: what was refused on the way never had a name that somebody could run.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from belljar.core import errors
from belljar.core.model import Model
from belljar.core.settings import Settings
from belljar.core.values import GIB, format_size, parse_size
from belljar.images import context as images_context
from belljar.images import engine as images_engine
from belljar.images import rules as images_rules
from belljar.images.context import BuildReport
from belljar.images.engine import Listener, Progress, connected, silent
from belljar.images.rules import BASES_LABEL, LABEL, TAG_LABEL, ImageFacts, Lock, PullPolicy, Reference, ScanRecord
from belljar.images.store import Store, new_pin
from belljar.images.trust import Trust

if TYPE_CHECKING:
    from aiodocker import Docker

LANGUAGES = ("python", "node", "bash", "go", "rust")
_PREPULLS = 3  # at once
_CPU_PERIOD = 100_000
_BUILD_MEMORY, _BUILD_CPUS = 2 * GIB, 2.0


class Pulled(Model):
    image: ImageFacts
    pulled: bool
    reason: str


class Outcome(Model):
    """What became of one image of several."""

    reference: str
    ok: bool
    text: str
    digest: str = ""
    error: Mapping[str, Any] | None = None


class Collected(Model):
    removed: tuple[ImageFacts, ...]
    kept: Mapping[str, str]
    freed: int
    dry_run: bool


class Images:
    """All that can be done with the images of one engine, under one set of settings."""

    def __init__(self, settings: Settings, *, url: str | None = None, lock_file: Path | None = None) -> None:
        """`url`: where the engine listens; empty: where the current context of Docker's says."""
        self.settings = settings
        self.rules = settings.images
        self.url = settings.docker_socket if url is None else url
        self.store = Store(
            Path(settings.cache_dir or f"{settings.home}/.cache/belljar") / "images",
            lock_file or Path(self.rules.lock_file),
        )
        self.trust = Trust(self.rules, self.store, self.url)

    def _parse(self, name: str) -> Reference:
        return images_rules.parse(name, self.rules.image_registry)

    async def _look(self, docker: Docker, reference: Reference) -> ImageFacts | None:
        return await images_engine.inspect(docker, _local(reference), reference, self.store.built())

    # --- having ---

    async def pull(self, name: str, *, policy: PullPolicy | None = None, listener: Listener = silent) -> Pulled:
        """The image, here and trusted, or a typed error; run it by its `id`, which cannot change under your feet."""
        reference = self._parse(name)
        pin = self.store.lock().pin(reference)
        async with connected(self.url) as docker:
            present = await self._look(docker, reference)
            present = present.by(pin.digest) if present and pin else present
            step = images_rules.pull_step(reference, policy or self.rules.image_pull_policy, present, pin)
            if not step.pull:
                assert present is not None
                images_rules.check_pin(reference, pin, present, self.rules)
                await self.trust.check(reference, present)
                return Pulled(image=present, pulled=False, reason=step.reason)
            facts = await self._fetch(docker, reference, present, listener)
        return Pulled(image=facts, pulled=True, reason=step.reason)

    async def _fetch(
        self,
        docker: Docker,
        reference: Reference,
        present: ImageFacts | None,
        listener: Listener,
        *,
        moving: bool = False,
    ) -> ImageFacts:
        """`moving`: the pin is about to be changed, so it does not count."""
        pin = None if moving else self.store.lock().pin(reference)
        digest = reference.digest
        if not digest:
            digest = await images_engine.remote_digest(docker, reference, self.rules.stall_timeout)
            images_rules.check_remote(reference, pin, digest)
            digest = pin.digest if pin else digest
        if digest and self.rules.require_signature:
            await self.trust.check_signature(reference, digest)
        target = reference.at(digest) if digest else str(reference)
        await images_engine.pull(
            docker, target, seconds=self.rules.pull_timeout, stall=self.rules.stall_timeout, listener=listener
        )
        facts = await images_engine.inspect(docker, target, reference)
        if facts is None:
            raise errors.PullFailed(f"the engine pulled {target}, and does not have it", fix="try again")
        facts = facts.by(digest)
        try:
            images_rules.check_pin(reference, pin, facts, self.rules if not moving else _unlocked(self.rules))
            await self.trust.check(reference, facts, signed=bool(digest))
        except BaseException:
            await _discard(docker, reference, target, present)
            raise
        if digest and reference.tag:
            await docker.images.tag(target, reference.name, tag=reference.tag)
        self.store.note_fetched(facts.id)
        return facts

    async def prepull(self, names: Sequence[str] = (), *, listener: Listener = silent) -> tuple[Outcome, ...]:
        """Several at once; one that fails does not keep out the others."""
        names = tuple(dict.fromkeys(names or self.rules.prepull))
        found: dict[str, Outcome] = {}
        places = anyio.CapacityLimiter(_PREPULLS)

        async def one(name: str) -> None:
            async with places:
                try:
                    done = await self.pull(name, listener=listener)
                except errors.BelljarError as error:
                    found[name] = Outcome(reference=name, ok=False, text=error.message, error=error.as_dict())
                else:
                    text = "pulled" if done.pulled else done.reason
                    found[name] = Outcome(reference=name, ok=True, text=text, digest=done.image.pin)

        async with anyio.create_task_group() as tasks:
            for name in names:
                tasks.start_soon(one, name)
        return tuple(found[name] for name in names)

    async def present(self, name: str) -> ImageFacts:
        reference = self._parse(name)
        async with connected(self.url) as docker:
            facts = await self._look(docker, reference)
        if facts is None:
            raise errors.ImageNotFound(
                f"{reference} is not on this engine", fix=f"belljar images pull {reference}",
                context={"image": str(reference)},
            )  # fmt: skip
        return facts

    async def list(self, *, ours: bool = False) -> tuple[ImageFacts, ...]:
        async with connected(self.url) as docker:
            found = await images_engine.listed(docker, **({"label": [f"{LABEL}=1"]} if ours else {}))
        return tuple(sorted(found, key=lambda image: image.reference))

    # --- trusting ---

    async def lock(self, names: Sequence[str], *, by: str = "") -> Lock:
        """Pins the images as they are on the engine now; without names, those of `images.prepull`."""
        lock = self.store.lock()
        for name in names or self.rules.prepull:
            reference, facts = self._parse(name), await self.present(name)
            lock = lock.moved(reference, new_pin(facts.pin, in_registry=bool(facts.digest), by=by))
        self.store.save_lock(lock)
        return lock

    async def verify(self, name: str) -> ImageFacts:
        """Digest, signature and scan of an image that is here, each if policy asks for it (a configured cosign always
        is)."""
        reference, facts = self._parse(name), await self.present(name)
        pin = self.store.lock().pin(reference)
        facts = facts.by(pin.digest) if pin else facts
        images_rules.check_pin(reference, pin, facts, self.rules)
        if self.rules.cosign or self.rules.require_signature:
            await self.trust.check_signature(reference, facts.digest, again=True)
        await self.trust.check(reference, facts, signed=True)
        return facts

    async def scan(self, name: str, *, again: bool = True) -> ScanRecord:
        """What the scanner says of an image that is here; the record is kept with its id."""
        facts = await self.present(name)
        record = None if again else self.store.scan(facts.id)
        if record is None or images_rules.is_stale(record, self.rules, time.time()):
            record = await self.trust.scan(facts)
        return record

    # --- keeping ---

    async def update(
        self, names: Sequence[str] = (), *, check: bool = False, listener: Listener = silent
    ) -> tuple[Outcome, ...]:
        """Asks the registry what each pinned name means today; if policy pulls, fetches it and moves the pin, but only
        after signature and scan have spoken for it."""
        if self.rules.update_policy == "never":
            raise errors.PolicyDenied(
                "images.update_policy is never: pins are moved by hand", fix="belljar images lock",
                context={"rule": "update_policy"},
            )  # fmt: skip
        look_only = check or self.rules.update_policy == "check"
        outcomes = []
        for name in names or tuple(self.store.lock().images):
            try:
                outcomes.append(await self._update(name, look_only, listener))
            except errors.BelljarError as error:
                outcomes.append(Outcome(reference=name, ok=False, text=error.message, error=error.as_dict()))
        return tuple(outcomes)

    async def _update(self, name: str, look_only: bool, listener: Listener) -> Outcome:
        reference = self._parse(name)
        pin = self.store.lock().pin(reference)
        if pin is not None and pin.of == "engine":
            return Outcome(reference=name, ok=True, text="built here: build it again to update it", digest=pin.digest)
        async with connected(self.url) as docker:
            remote = await images_engine.remote_digest(docker, reference, self.rules.stall_timeout)
            if not remote and look_only:
                raise errors.ImageNotFound(
                    f"no registry says what {reference} is now",
                    fix="check its name and registry; Podman cannot ask without pulling: update without --check",
                )
            if pin is not None and remote == pin.digest:
                return Outcome(reference=name, ok=True, text="up to date", digest=remote)
            if look_only:
                return Outcome(reference=name, ok=True, text=f"an update is there: {remote}", digest=remote)
            present = await self._look(docker, reference)
            facts = await self._fetch(docker, reference, present, listener, moving=True)
        if pin is not None and facts.is_(pin.digest):
            return Outcome(reference=name, ok=True, text="up to date", digest=pin.digest)
        self._pin(reference, facts)
        return Outcome(reference=name, ok=True, text="updated", digest=facts.pin)

    def _pin(self, reference: Reference, facts: ImageFacts) -> None:
        pin = new_pin(facts.pin, in_registry=bool(facts.digest))
        self.store.save_lock(self.store.lock().moved(reference, pin))

    async def remove(self, name: str, *, force: bool = False) -> ImageFacts:
        facts = await self.present(name)
        async with connected(self.url) as docker:
            with images_engine.deadline(images_engine.QUICK, f"removing {name}"):
                await docker.images.delete(_local(self._parse(name)), force=force)
            if await images_engine.inspect(docker, facts.id, self._parse(name)) is None:
                self.store.forget(facts.id, *facts.digests)
        return facts

    async def gc(self, *, older_than: float | None = None, dry_run: bool = False) -> Collected:
        """Removes what we built and nobody uses, `older_than` seconds; everybody else's images stay."""
        age = self.rules.gc_age if older_than is None else older_than
        async with connected(self.url) as docker:
            found = images_rules.collect(
                await images_engine.listed(docker, label=[f"{LABEL}=1"]), used=await images_engine.used(docker),
                built=self.store.built(), lock=self.store.lock(), older_than=time.time() - age,
            )  # fmt: skip
            kept = {image.reference: why for image, why in found.kept}
            removed = []
            for image in found.remove:
                if dry_run or await self._remove_one(docker, image, kept):
                    removed.append(image)
        freed = sum(image.size for image in removed)
        return Collected(removed=tuple(removed), kept=kept, freed=freed, dry_run=dry_run)

    async def _remove_one(self, docker: Docker, image: ImageFacts, kept: dict[str, str]) -> bool:
        import aiodocker

        try:
            with images_engine.deadline(images_engine.QUICK, f"removing {image.reference}"):
                # By name where it has one, and never by force: a container that appeared meanwhile keeps its image.
                await docker.images.delete(image.tags[0] if image.tags else image.id)
        except aiodocker.DockerError as error:
            if error.status != 404:
                kept[image.reference] = error.message
                return False
        self.store.forget(image.id)
        return True

    # --- building ---

    async def build(
        self, context_dir: str | Path, tag: str, file: str = "Dockerfile", memory: str | int | None = None,
        cpus: float | None = None, *, network: bool = False, arguments: Mapping[str, str] | None = None,
        listener: Listener = silent, given: Sequence[ImageFacts] = (),
    ) -> BuildReport:  # fmt: skip
        """Builds a folder. The bases come in by our own door, under the same policy as any other image; the steps run
        without network unless that is asked for and allowed. A step that fails is a report, not an exception.

        `given`: bases that came in already, and that the Dockerfile gets to know by their ids, through `arguments`.
        """
        reference = images_rules.parse(tag)
        if reference.digest:
            raise errors.InvalidRequest("tag: a build cannot be told its digest", fix="give name:tag")
        if network and self.rules.build_network == "never":
            raise errors.PolicyDenied("images.build_network: builds have no network here", fix="build without it")
        params, weaker = await self._walls(memory, cpus, network)
        params |= {
            "t": str(reference), "dockerfile": images_rules.build_file(file), "rm": True, "forcerm": True,
            "buildargs": dict(arguments or {}),
        }  # fmt: skip
        with tempfile.TemporaryFile(prefix="belljar-context-") as context:
            packed = await anyio.to_thread.run_sync(self._pack, str(context_dir), params["dockerfile"], context)
            if not network:
                images_rules.check_sources(packed.dockerfile)
            known = {facts.id: facts for facts in given}
            names = images_rules.bases(packed.dockerfile, arguments)
            used = [known.get(name) or await self._bring(name, listener) for name in names]
            bases = tuple(facts.pinned for facts in used)
            params["labels"] = {LABEL: "1", TAG_LABEL: str(reference), BASES_LABEL: " ".join(bases)}
            context.seek(0)
            report = await self._run_build(reference, params, context, listener)
        return report.model_copy(update={"left_out": packed.left_out, "bases": bases, "weaker": weaker})

    async def _bring(self, base: str, listener: Listener) -> ImageFacts:
        """A base, under the very name that the Dockerfile has for it: the engine must not look for it elsewhere."""
        done, plain = await self.pull(base, listener=listener), images_rules.parse(base)
        if str(plain) == done.image.reference:
            return done.image
        if plain.digest:
            raise errors.InvalidRequest(f"Dockerfile: {base} has no registry", fix=f"write {done.image.reference}")
        async with connected(self.url) as docker:
            await docker.images.tag(done.image.id, plain.name, tag=plain.tag)
        return done.image

    def _pack(self, folder: str, file: str, context: Any) -> images_context.Packed:
        return images_context.pack(folder, file, context, limit=self.rules.build_context)

    async def _walls(
        self, memory: str | int | None, cpus: float | None, network: bool
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Limits and network of the steps, and the limits that this engine cannot hold: those that were asked for are
        then refused, the others told."""
        limits = self._build_limits(memory, cpus)
        async with connected(self.url) as docker:
            engine = await images_engine.traits(docker)
        walls = images_engine.network_of(engine, network)
        if engine.limits:
            return walls | limits, ()
        if memory is not None or cpus is not None:
            raise errors.NotAvailable(
                "this engine cannot limit a build: it has no root, and no control groups of its own",
                fix="leave out memory and cpus, or use control groups version 2, or an engine with root",
            )
        return walls, ("memory is not limited", "cpus is not limited")

    def _build_limits(self, memory: str | int | None, cpus: float | None) -> dict[str, Any]:
        caps = self.settings.caps
        try:
            size = min(_BUILD_MEMORY, caps.memory) if memory is None else int(str(parse_size(memory)))
        except ValueError as error:
            raise errors.InvalidRequest(f"memory: {error}") from None
        share = min(_BUILD_CPUS, caps.cpus) if cpus is None else cpus
        if size < 4 << 20 or not share > 0:
            raise errors.InvalidRequest("memory and cpus: give at least 4M, and more than nothing")
        if size > caps.memory or share > caps.cpus:
            raise errors.PolicyDenied(
                f"build: {format_size(size)}, {share:g} cpus: the caps are {format_size(caps.memory)}, {caps.cpus:g}",
                fix="ask for less, or have the administrator raise the caps",
                context={"field": "memory" if size > caps.memory else "cpus"},
            )
        return {"memory": size, "memswap": size, "cpuperiod": _CPU_PERIOD, "cpuquota": int(share * _CPU_PERIOD)}

    async def _run_build(
        self, reference: Reference, params: Mapping[str, Any], context: Any, listener: Listener
    ) -> BuildReport:
        import aiodocker

        log = images_context.BuildLog()
        began = time.monotonic()
        failed: dict[str, Any] = {}
        async with connected(self.url) as docker:
            try:
                with images_engine.deadline(self.rules.build_timeout, f"building {reference}"):
                    async with images_engine.building(docker, params, context) as messages:
                        async for message in messages:
                            for line in log.feed(message):
                                listener(Progress(image=str(reference), step=line, current=log.number, total=log.total))
            except aiodocker.DockerError as error:
                failed = _build_failure(error)
            facts = None if failed else await images_engine.inspect(docker, str(reference), reference)
            stages = () if failed else [await images_engine.inspect(docker, name, reference) for name in log.stages]
        spent = round((time.monotonic() - began) * 1000, 1)
        if failed:
            return BuildReport(
                ok=False, tag=str(reference), step=log.step, last_lines=log.last_lines, duration_ms=spent, **failed
            )
        if facts is None or not log.id:
            raise errors.ExecutionFailed(f"the engine's word on {reference} ended early", fix="build it again")
        for image in (facts, *(stage for stage in stages if stage)):
            self.store.note_built(image.id)
        return BuildReport(ok=True, tag=str(reference), id=facts.id, step=log.step, duration_ms=spent)

    async def build_language(
        self, language: str, version: str, *, base: str = "", listener: Listener = silent
    ) -> BuildReport:
        """One of the project's own hardened images, from its own base or another one, which is passed by its id.

        A base that is not pinned yet is pinned now: the next build starts from the same one, or is refused.
        """
        file = f"{language}/Dockerfile"
        if language not in LANGUAGES or not (recipes() / file).is_file():
            raise errors.InvalidRequest(f"{language!r} has no image of ours", fix=f"one of {', '.join(LANGUAGES)}")
        (usual,) = images_rules.bases((recipes() / file).read_text())
        reference = self._parse(base or usual)
        found = (await self.pull(base or usual, listener=listener)).image
        if not reference.digest and self.store.lock().pin(reference) is None:
            self._pin(reference, found)
        tag, arguments = f"belljar/{language}:{version}", {"BASE_IMAGE": found.id}
        return await self.build(recipes(), tag, file, arguments=arguments, listener=listener, given=(found,))


def recipes() -> Path:
    """Where the Dockerfiles are: in the package when it is installed, beside the sources when it is not."""
    installed = Path(__file__).parents[1] / "dockerfiles"
    return installed if installed.is_dir() else Path(__file__).parents[3] / "images"


def _local(reference: Reference) -> str:
    return reference.at(reference.digest) if reference.digest else str(reference)


def _unlocked(rules: Any) -> Any:
    return rules.model_copy(update={"require_lock": False})


async def _discard(docker: Docker, reference: Reference, target: str, present: ImageFacts | None) -> None:
    """Takes back what was fetched and then refused: the name means again what it meant before, or nothing."""
    with anyio.move_on_after(images_engine.QUICK, shield=True), suppress(Exception):
        if present is None or target != reference.at(present.digest):
            await docker.images.delete(target)
        if present is not None and target == str(reference):
            await docker.images.tag(present.id, reference.name, tag=reference.tag)


def _build_failure(error: Any) -> dict[str, Any]:
    """What the Dockerfile did wrong; what the engine did wrong is raised."""
    detail = getattr(error, "error_detail", {})
    told = images_engine.translated(error.status, error.message)
    if isinstance(told, errors.NotAvailable | errors.ImageNotFound) or error.status >= 500:
        raise told from None
    code = detail.get("code")
    if not isinstance(code, int):  # Podman says it in words only
        words = re.search(r"exit status (\d{1,3})$", error.message.strip())
        code = int(words[1]) if words else None
    return {"problem": error.message.strip()[:1000], "exit_code": code}
