"""Compiles the OCI seccomp profile to the BPF that bubblewrap takes, one file for each architecture.

Needs libseccomp and pyseccomp (`make setup` brings both). Run it after a change of guest.json; a test
compares the shipped files with a fresh compilation. `--check` only compares.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyseccomp

PROFILES = Path(__file__).parent.parent / "src" / "belljar" / "host" / "seccomp"
MACHINES = {
    "SCMP_ARCH_X86_64": ("x86_64", pyseccomp.Arch.X86_64),
    "SCMP_ARCH_AARCH64": ("aarch64", pyseccomp.Arch.AARCH64),
}
OPERATORS = {
    "SCMP_CMP_EQ": pyseccomp.EQ,
    "SCMP_CMP_MASKED_EQ": pyseccomp.MASKED_EQ,
}


def compile_profile(profile: dict[str, Any], arch: Any) -> bytes:
    default = action(profile["defaultAction"], profile["defaultErrnoRet"])
    target = pyseccomp.SyscallFilter(default)
    native = pyseccomp.system_arch()
    if arch != native:
        target.add_arch(arch)
        target.remove_arch(native)
    for rule in profile["syscalls"]:
        verdict = action(rule["action"], rule.get("errnoRet", 1))
        args = [argument(arg) for arg in rule.get("args", [])]
        for name in rule["names"]:
            number = pyseccomp.resolve_syscall(arch, name)
            if number < 0 or verdict == default:  # the architecture lacks it, or the default says so already
                continue
            target.add_rule(verdict, name, *args)
    with tempfile.TemporaryFile() as file:
        target.export_bpf(file)
        file.seek(0)
        return file.read()


def action(name: str, errno: int) -> Any:
    return pyseccomp.ALLOW if name == "SCMP_ACT_ALLOW" else pyseccomp.ERRNO(errno)


def argument(arg: dict[str, Any]) -> Any:
    operator = OPERATORS[arg["op"]]
    if operator == pyseccomp.MASKED_EQ:
        return pyseccomp.Arg(arg["index"], operator, arg["value"], arg["valueTwo"])
    return pyseccomp.Arg(arg["index"], operator, arg["value"])


def main() -> int:
    check = "--check" in sys.argv
    profile = json.loads((PROFILES / "guest.json").read_text())
    stale = []
    for name in profile["architectures"]:
        machine, arch = MACHINES[name]
        path, fresh = PROFILES / f"guest.{machine}.bpf", compile_profile(profile, arch)
        if check:
            stale += [path.name] if not path.exists() or path.read_bytes() != fresh else []
        else:
            path.write_bytes(fresh)
            print(f"{path.name}: {len(fresh) // 8} instructions")
    if stale:
        print(f"stale: {', '.join(stale)}; run `make profiles`")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
