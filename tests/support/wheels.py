"""Wheels that tests make themselves, and the pip that installs them."""

from __future__ import annotations

import io
import subprocess
import zipfile
from functools import cache
from importlib.util import find_spec


def wheel(name: str, version: str, needs: str = "", **files: str) -> tuple[str, bytes]:
    """A wheel with one module and one command of the package's name."""
    info = f"{name}-{version}.dist-info"
    required = f"Requires-Dist: {needs}\n" if needs else ""
    content = {
        f"{name}/__init__.py": f"VERSION = {version!r}\ndef main(): print({name!r}, VERSION)\n",
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n",
    }
    content[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*content, f"{info}/RECORD"])
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        for path, text in content.items():
            archive.writestr(path, text)
    return f"{name}-{version}-py3-none-any.whl", whole.getvalue()


@cache
def pip_is_here() -> bool:
    """Whether Belljar's own Python, or the system's, has a pip."""
    line = ["/usr/bin/env", "python3", "-m", "pip", "--version"]
    return find_spec("pip") is not None or subprocess.run(line, capture_output=True, check=False).returncode == 0
