"""A real browser for tests: the system's Chromium, driven by Playwright, with a profile that is thrown away."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_FLAGS = (
    "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-sync",
    "--disable-component-update", "--disable-domain-reliability", "--no-sandbox", "--disable-dev-shm-usage",
)  # fmt: skip


@contextmanager
def browser() -> Iterator[Any]:
    """`with browser() as chromium: chromium.new_page()`, or a loud skip."""
    program = shutil.which("chromium", path="/usr/bin:/usr/local/bin")
    if program is None:
        pytest.skip("NOTHING was checked in a browser: apt install chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip("NOTHING was checked in a browser: pip install playwright")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, headless=True, args=list(_FLAGS))
        try:
            yield chromium
        finally:
            chromium.close()
