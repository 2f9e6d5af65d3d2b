"""Who vouches for an image: the pinned cosign and the pinned scanner, asked when what they said is too old."""

from __future__ import annotations

import hashlib
import os
import time

import anyio.to_thread

from belljar.core import errors
from belljar.core.settings import ImageSettings
from belljar.host import process
from belljar.images import reports
from belljar.images import rules as images_rules
from belljar.images.rules import ImageFacts, Reference, ScanRecord, SignatureRecord
from belljar.images.store import Distrusted, Store, run_pinned

_LONGEST_KEY = 1 << 20


class Trust:
    """Signatures and scans under one set of rules."""

    def __init__(self, rules: ImageSettings, store: Store, socket: str) -> None:
        self.rules, self.store, self.socket = rules, store, socket

    async def check(self, reference: Reference, facts: ImageFacts, *, signed: bool = False) -> None:
        """Whatever policy asks for; `signed`: its signature was looked at already."""
        if self.rules.require_signature and not signed:
            await self.check_signature(reference, facts.digest)
        if self.rules.require_scan:
            await self._check_scan(facts)

    # --- signatures ---

    async def check_signature(self, reference: Reference, digest: str, *, again: bool = False) -> None:
        """What cosign accepted counts for a while; what it refused is asked anew each time."""
        argv = images_rules.signature_command(reference, digest, self.rules)
        policy = await anyio.to_thread.run_sync(self._policy)
        kept, max_age = None if again else self.store.signature(digest), self.rules.signature_max_age
        if kept and images_rules.still_signed(kept, reference, policy, time.time(), max_age):
            return
        try:
            said = await run_pinned(argv, self.rules.cosign_sha256, deadline=self.rules.tool_timeout, limit=1 << 20)
        except Distrusted as error:
            fix = "install the pinned cosign, or have the administrator set images.cosign_sha256 anew"
            raise images_rules.refused_signature(str(reference), str(error), fix) from None
        if said.code != 0:
            self.store.forget(digest)
            told = (said.stderr.strip() or said.stdout.strip() or f"exit code {said.code}")[-300:]
            raise images_rules.refused_signature(str(reference), f"cosign refuses it: {told}", "use a signed image")
        self.store.save_signature(SignatureRecord(digest=digest, name=reference.name, at=time.time(), policy=policy))

    def _policy(self) -> str:
        """What a verdict depends on: the program, its words, and what is in the files that they name, such as keys."""
        digest = hashlib.sha256(self.rules.cosign_sha256.encode())
        for word in (self.rules.cosign, *self.rules.cosign_arguments):
            digest.update(b"\0word\0" + word.encode())
            path = word.partition("=")[2] if word.startswith("-") else word
            if os.path.isabs(path) and path != self.rules.cosign:
                digest.update(b"\0file\0" + _start_of(path))
        return digest.hexdigest()

    # --- scans ---

    async def _check_scan(self, facts: ImageFacts) -> None:
        record = self.store.scan(facts.id)
        if record is not None and images_rules.is_stale(record, self.rules, time.time()):
            if self.rules.scan_when_stale == "refuse":
                raise images_rules.refused_scan(
                    facts.reference, "its scan is stale", f"belljar images scan {facts.reference}"
                )
            record = None
        if record is None:
            try:
                record = await self.scan(facts)
            except errors.BackendError as error:  # the policy wants a scan, and there is none: that is a no
                raise images_rules.refused_scan(facts.reference, error.message, error.fix) from error
        images_rules.check_scan(record, self.rules)

    async def scan(self, facts: ImageFacts) -> ScanRecord:
        """Asks the scanner, and keeps what it said."""
        argv = images_rules.scan_command(facts, self.rules, self.socket)
        try:
            said = await run_pinned(
                argv, self.rules.scanner_sha256, deadline=self.rules.tool_timeout, limit=reports.MAX_REPORT
            )
        except Distrusted as error:
            fix = "install the pinned scanner, or have the administrator set images.scanner_sha256 anew"
            raise images_rules.refused_scan(facts.reference, str(error), fix) from None
        record = self._recorded(facts, argv[0], said)
        self.store.save_scan(record)
        return record

    def _recorded(self, facts: ImageFacts, scanner: str, said: process.Output) -> ScanRecord:
        told = said.stderr.strip()[-300:]
        try:
            report = reports.read(said.stdout)
        except reports.Unreadable as error:
            raise errors.ExecutionFailed(f"the scanner's report cannot be used: {error}", fix=told) from None
        if report.subjects and not report.subjects & {facts.id, facts.digest}:
            raise errors.ExecutionFailed("the scanner's report is about another image", fix="correct images.scanner")
        record = ScanRecord(
            id=facts.id, digest=facts.digest, reference=facts.reference, at=time.time(), scanner=scanner,
            scanner_sha256=self.rules.scanner_sha256, counts=report.counts, findings=report.findings,
        )  # fmt: skip
        if said.code != 0:
            # Scanners can be told to fail when they find something. One that fails and finds nothing bad is broken.
            try:
                images_rules.check_scan(record, self.rules)
            except errors.ImageRefused:
                return record
            raise errors.ExecutionFailed(f"the scanner ended with {said.code}", fix=told or "run it by hand")
        return record


def _start_of(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_LONGEST_KEY)
    except OSError as error:
        return f"unreadable: {error.errno}".encode()
