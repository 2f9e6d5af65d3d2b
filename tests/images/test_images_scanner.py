"""A real scanner and its real SARIF: ruff, with its rules about security, over the Python that an image holds.

None that knows of vulnerable packages can be had without a network: trivy, grype and osv-scanner are in no archive
of Debian's, and what PyPI and npm have under these names fetches them from elsewhere.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from belljar.core import errors
from belljar.images.images import Images
from engines import PODMAN_AGAIN
from image_engine import ImageEngine, socket_of

pytestmark = [pytest.mark.engine, pytest.mark.containers]
_SCAN = """set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
container=$({docker} create --network none "$1" none)
{docker} export "$container" | tar -C "$folder" -xf -
{docker} rm "$container" >/dev/null
{ruff} check --isolated --no-cache --select S --output-format sarif "$folder\""""


@pytest.fixture(params=["docker", PODMAN_AGAIN])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> ImageEngine:
    return ImageEngine(socket_of(request.param), tmp_path, request.param)


def scanning(host: ImageEngine, **more: Any) -> Images:
    ruff = shutil.which("ruff", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if ruff is None:
        pytest.skip("NO real scanner was asked about an image: pip install ruff")
    docker = f"{shutil.which('docker')} -H unix://{host.socket}"
    path = "PATH=/usr/local/bin:/usr/bin:/bin; export PATH\n"
    program, sha256 = host.program("scanner", path + _SCAN.format(docker=docker, ruff=ruff))
    rules = {"scanner": [program, "{id}"], "scanner_sha256": sha256, "require_scan": True, **more}
    return host.images(**rules)


async def made(host: ImageEngine, tag: str, code: bytes) -> str:
    report = await host.images().build(host.project("FROM scratch\nCOPY app.py /\n", **{"app.py": code}), tag)
    assert report.ok, report
    return report.id


async def test_what_a_real_scanner_finds_in_an_image_is_recorded_and_refuses_it(host: ImageEngine) -> None:
    bad = await made(host, "scanned/bad:1", b"import subprocess\nsubprocess.call('ls ' + input(), shell=True)\n")
    images = scanning(host)
    with pytest.raises(errors.ImageRefused, match="S602") as caught:
        await images.pull("scanned/bad:1", policy="never")
    assert caught.value.context["rule"] == "scan"
    record = images.records.scan(bad)
    assert record is not None
    assert sum(record.counts.values()) >= 1 and any("app.py" in finding for finding in record.findings), record
    host.docker("rmi", "-f", bad)


async def test_an_image_in_which_a_real_scanner_finds_nothing_is_let_in(host: ImageEngine) -> None:
    good = await made(host, "scanned/good:1", b"print(40 + 2)\n")
    images = scanning(host)
    assert (await images.pull("scanned/good:1", policy="never")).image.id == good
    record = images.records.scan(good)
    assert record is not None and record.counts == {}
    host.docker("rmi", "-f", good)
