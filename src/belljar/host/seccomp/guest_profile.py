"""Our own seccomp profile, as container engines want it."""

from __future__ import annotations

import json
from functools import cache

from belljar.host.seccomp import PROFILES

PROFILE_PATH = PROFILES / "guest.json"


@cache
def profile_text(own_kernel: bool) -> str:
    """Returns the profile's text; for a runtime with a kernel of its own with clone3 let through.

    gVisor answers every refused call with EPERM, whatever the profile says, and a C library that hears that of clone3
    starts no thread. What clone3 can make there are namespaces of gVisor's own kernel.
    """
    if not own_kernel:
        return PROFILE_PATH.read_text()
    profile = json.loads(PROFILE_PATH.read_text())
    for rule in profile["syscalls"]:
        rule["names"] = [name for name in rule["names"] if name != "clone3"]
    profile["syscalls"] = [rule for rule in profile["syscalls"] if rule["names"]]
    profile["syscalls"].append({"names": ["clone3"], "action": "SCMP_ACT_ALLOW"})
    return json.dumps(profile)
