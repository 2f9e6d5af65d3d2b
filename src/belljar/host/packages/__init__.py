"""Packages that guests find installed: resolved and installed on the host, once, without running any of their code."""
