"""Checks signatures with the pinned cosign, and scans with the pinned scanner; what they said counts for a while."""

from __future__ import annotations

import hashlib
import os
import time

import anyio.to_thread

from belljar.core import errors
from belljar.core.image_name import Reference
from belljar.core.settings import ImageSettings
from belljar.host import process
from belljar.images import reports, rules
from belljar.images.pinned import Distrusted, run_pinned
from belljar.images.records import ImageRecords
from belljar.images.references import ImageFacts
from belljar.images.rules import ScanRecord, SignatureRecord

_MAX_KEY_BYTES = 1 << 20


class Trust:
    """Checks signatures and scans under one set of rules."""

    def __init__(self, settings: ImageSettings, records: ImageRecords, socket: str) -> None:
        self.settings: ImageSettings = settings
        self.records: ImageRecords = records
        self.socket: str = socket

    async def check(self, reference: Reference, facts: ImageFacts, *, signed: bool = False) -> None:
        """Checks whatever policy asks for, or raises `ImageRefused`.

        Args:
            reference: The image's name.
            facts: What the engine says of it.
            signed: Its signature was checked already.
        """
        if self.settings.require_signature and not signed:
            await self.check_signature(reference, facts.digest)
        if self.settings.require_scan:
            await self._check_scan(facts)

    # --- signatures ---

    async def check_signature(self, reference: Reference, digest: str, *, again: bool = False) -> None:
        """Asks cosign, or raises `ImageRefused`. What cosign accepted counts for a while; a refusal is never kept."""
        argv = rules.signature_command(reference, digest, self.settings)
        policy = await anyio.to_thread.run_sync(self._policy)
        kept, max_age = None if again else self.records.signature(digest), self.settings.signature_max_age
        if kept and rules.still_signed(kept, reference, policy, time.time(), max_age):
            return
        try:
            said = await run_pinned(
                argv, self.settings.cosign_sha256, deadline=self.settings.tool_timeout, limit=1 << 20
            )
        except Distrusted as error:
            fix = "install the pinned cosign, or have the administrator set images.cosign_sha256 anew"
            raise rules.refused_signature(str(reference), str(error), fix) from None
        if said.code != 0:
            self.records.forget(digest)
            told = (said.stderr.strip() or said.stdout.strip() or f"exit code {said.code}")[-300:]
            raise rules.refused_signature(str(reference), f"cosign refuses it: {told}", "use a signed image")
        self.records.save_signature(SignatureRecord(digest=digest, name=reference.name, at=time.time(), policy=policy))

    def _policy(self) -> str:
        """What a verdict depends on: the program, its words, and what is in the files that they name, such as keys."""
        digest = hashlib.sha256(self.settings.cosign_sha256.encode())
        for word in (self.settings.cosign, *self.settings.cosign_arguments):
            digest.update(b"\0word\0" + word.encode())
            path = word.partition("=")[2] if word.startswith("-") else word
            if os.path.isabs(path) and path != self.settings.cosign:
                digest.update(b"\0file\0" + _start_of(path))
        return digest.hexdigest()

    # --- scans ---

    async def _check_scan(self, facts: ImageFacts) -> None:
        record = self.records.scan(facts.id)
        if record is not None and rules.is_stale(record, self.settings, time.time()):
            if self.settings.scan_when_stale == "refuse":
                raise rules.refused_scan(facts.reference, "its scan is stale", f"belljar images scan {facts.reference}")
            record = None
        if record is None:
            try:
                record = await self.scan(facts)
            except errors.BackendError as error:  # the policy wants a scan, and there is none: that is a no
                raise rules.refused_scan(facts.reference, error.message, error.fix) from error
        rules.check_scan(record, self.settings)

    async def scan(self, facts: ImageFacts) -> ScanRecord:
        """Asks the scanner, and keeps what it said."""
        argv = rules.scan_command(facts, self.settings, self.socket)
        try:
            said = await run_pinned(
                argv, self.settings.scanner_sha256, deadline=self.settings.tool_timeout, limit=reports.MAX_REPORT_BYTES
            )
        except Distrusted as error:
            fix = "install the pinned scanner, or have the administrator set images.scanner_sha256 anew"
            raise rules.refused_scan(facts.reference, str(error), fix) from None
        record = self._recorded(facts, argv[0], said)
        self.records.save_scan(record)
        return record

    def _recorded(self, facts: ImageFacts, scanner: str, said: process.Output) -> ScanRecord:
        told = said.stderr.strip()[-300:]
        try:
            report = reports.read(said.stdout)
        except reports.UnreadableReport as error:
            raise errors.ExecutionFailed(f"the scanner's report cannot be used: {error}", fix=told) from None
        if report.subjects and not report.subjects & {facts.id, facts.digest}:
            raise errors.ExecutionFailed("the scanner's report is about another image", fix="correct images.scanner")
        record = ScanRecord(
            id=facts.id, digest=facts.digest, reference=facts.reference, at=time.time(), scanner=scanner,
            scanner_sha256=self.settings.scanner_sha256, counts=report.counts, findings=report.findings,
        )  # fmt: skip
        if said.code != 0:
            # Scanners can be told to fail when they find something. One that fails and finds nothing bad is broken.
            try:
                rules.check_scan(record, self.settings)
            except errors.ImageRefused:
                return record
            raise errors.ExecutionFailed(f"the scanner ended with {said.code}", fix=told or "run it by hand")
        return record


def _start_of(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_KEY_BYTES)
    except OSError as error:
        return f"unreadable: {error.errno}".encode()
