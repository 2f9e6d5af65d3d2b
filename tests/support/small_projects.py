"""Small projects with tests of their own, as test runs of every surface use them."""

from __future__ import annotations

from pathlib import Path

SUMS = """import unittest
class Sums(unittest.TestCase):
    def test_good(self): pass
    def test_bad(self):
        print("===== 100 passed =====")
        self.assertEqual(1, 2, "one is not two")
    @unittest.skip("not today")
    def test_left(self): pass
"""
LEAVES = """import os, unittest
class Leaves(unittest.TestCase):
    def test_a(self): os._exit(0)
"""
HANGS = """import time, unittest
class Hangs(unittest.TestCase):
    def test_a(self): time.sleep(600)
"""


def project(folder: Path, code: str = SUMS) -> Path:
    """Makes a project of one file with tests of unittest."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "test_it.py").write_text(code)
    return folder
