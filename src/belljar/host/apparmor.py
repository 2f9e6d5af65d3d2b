"""The AppArmor profile of guests in containers: its text, whether the kernel has it, and how it is loaded."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from belljar.core import errors
from belljar.host import process

PROFILE = "belljar-guest"
PROFILE_PATH = Path(__file__).with_name(f"{PROFILE}.apparmor")
FOLDER = Path("/etc/apparmor.d")  # from here, distributions load profiles when they boot
_ENABLED = Path("/sys/module/apparmor/parameters/enabled")
_POLICY = Path("/sys/kernel/security/apparmor")
_PARSER_PATH = "/usr/sbin:/sbin:/usr/local/sbin:/usr/bin:/bin"
_PARSER_SECONDS = 60.0


def missing(enabled: Path = _ENABLED) -> str:
    """Returns why this kernel cannot hold guests by AppArmor; empty if it can."""
    try:
        said = enabled.read_text().strip()
    except OSError:
        return "this kernel has no AppArmor"
    return "" if said == "Y" else "AppArmor is switched off in this kernel"


def is_loaded(name: str = PROFILE, policy: Path = _POLICY) -> bool:
    """Says whether the kernel of this machine has a profile; what cannot be seen counts as no."""
    with suppress(OSError):
        if any(re.fullmatch(rf"{re.escape(name)}\.\d+", entry) for entry in os.listdir(policy / "policy" / "profiles")):
            return True
    with suppress(OSError):
        return any(line.partition(" (")[0] == name for line in (policy / "profiles").read_text().splitlines())
    return False


def parser(path: str = _PARSER_PATH) -> str:
    """Returns the program that compiles and loads profiles.

    Raises:
        NotAvailable: It is not installed.
    """
    if found := shutil.which("apparmor_parser", path=path):
        return found
    raise errors.NotAvailable("apparmor_parser is not installed", fix="apt install apparmor")


async def install(folder: Path = FOLDER) -> Path:
    """Writes our profile where distributions load profiles from, has it loaded now, and returns its path.

    Raises:
        NotAvailable: The kernel has no AppArmor, the parser is not installed, or we are not root.
        ExecutionFailed: The parser refused it.
    """
    if why := missing():
        fix = "boot with AppArmor (lsm=…,apparmor), or set container.selinux_label; seccomp holds as before"
        raise errors.NotAvailable(f"{why}: nothing was installed", fix=fix)
    program = parser()
    if os.geteuid() != 0:
        raise errors.NotAvailable("only root can load a profile", fix="sudo belljar profiles install")
    path = folder / PROFILE
    draft = folder / f".{PROFILE}.{os.getpid()}"
    draft.write_text(PROFILE_PATH.read_text())
    draft.replace(path)
    said = await process.output([program, "--replace", "--write-cache", str(path)], deadline=_PARSER_SECONDS)
    if said.code != 0:
        raise errors.ExecutionFailed(f"apparmor_parser: {said.stderr.strip()[-300:]}", fix=f"look at {path}")
    return path
