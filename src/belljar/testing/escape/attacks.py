"""What an attack is: data that any backend can be put before."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from belljar.core.model import Model
from belljar.core.process import Feature
from belljar.core.result import Result, Status

if TYPE_CHECKING:
    from belljar.testing.escape.bait import Bait
    from belljar.testing.escape.scenarios import Range

# How the attack is shown to get through where its wall is missing.
#   bare      the payload, run directly by the current user
#   root      the same as root, in mount, UTS and IPC namespaces of its own, so that the host is not touched
#   terminal  directly, on a terminal of its own
#   none      not shown; `uncontrolled` says why
Control = Literal["bare", "root", "terminal", "none"]

# What became of an attack.
#   held          a wall clearly stopped it
#   through       it got what it was after
#   inconclusive  neither was seen: it gave no answer, or said nothing, or could not be carried out
AttackStatus = Literal["held", "through", "inconclusive"]


@dataclass(frozen=True)
class Attack:
    """One attempt at getting out. The payload prints one line, `ESCAPED <what>` or `HELD <by what>`.

    Without such a line nobody knows (`inconclusive`), unless the run was ended by one of the statuses in `ends`.
    `@words@` in payloads and options are replaced by the bait's (`Bait.words`).
    """

    name: str
    category: str
    tries: str
    payload: str
    held: str
    language: str = "python"
    options: Mapping[str, Any] = field(default_factory=dict)
    ends: frozenset[Status] = frozenset()
    neighbour: str = ""  # the code of a second sandbox that leaves a mark, prints READY, and stays
    after: Callable[[Result, Bait], str] | None = None  # looks at the result and the host; says what got through
    scenario: Callable[[Range], Awaitable[Result]] | None = None  # for what takes more than one command
    needs_workspace: bool = False  # its scenario has a folder of the host granted
    living: bool = False  # in living sandboxes
    feature: Feature | None = None  # of living sandboxes, that it is about
    control: Control = "bare"
    uncontrolled: str = ""


class AttackVerdict(Model):
    """What became of one attack. Only `held` is good: what is not known is no wall."""

    name: str
    category: str
    status: AttackStatus
    detail: str

    @property
    def held(self) -> bool:
        """Whether a wall clearly stopped it."""
        return self.status == "held"

    def as_dict(self) -> dict[str, Any]:
        return self.model_dump()


# Put before every Python payload. It has to work where there is no ctypes and no fork (WebAssembly), too.
PRELUDE = '''
import errno, os, platform, struct, sys

def say(word, detail):
    line = " ".join(str(detail).split())[:200]
    os.write(1, f"{word} {line}\\n".encode("utf-8", "backslashreplace"))
    os._exit(0)

def escaped(detail): say("ESCAPED", detail)
def held(detail): say("HELD", detail)

def refused(what, action):
    """An OSError is the wall; anything that comes back is an escape."""
    try:
        got = action()
    except OSError as error:
        held(f"{what}: {error.strerror or error}")
    escaped(f"{what}: {got!r}")

def every(what, actions):
    """All of (name, action) must be refused."""
    last = "nothing to try"
    for name, action in actions:
        try:
            got = action()
        except OSError as error:
            last = f"{name}: {error.strerror or error}"
        else:
            escaped(f"{what}: {name} gave {got!r}")
    held(f"{what}: {last}")

def stay(detail):
    """It worked; the runner looks at the host meanwhile, whether the kernel there heard of it."""
    import time
    os.write(1, f"STAYING {detail}\\n".encode())
    time.sleep(15)
    escaped(detail)

def need(name):
    if not hasattr(os, name):
        held(f"there is no {name} here")

def link(target, name):
    """Where a link out of the root cannot even be made, that is a wall, and the next one may be tried."""
    try:
        os.symlink(target, name)
    except PermissionError:
        if sys.platform != "wasi":
            raise
        return False
    return True

def absent(kind, error, trace):
    """For a guest without system calls. Elsewhere what is missing is a mistake in the payload, and no verdict."""
    where = str(getattr(error, "filename", ""))
    missing = (
        isinstance(error, ImportError)
        or isinstance(error, AttributeError) and isinstance(error.obj, type(sys))
        or isinstance(error, FileNotFoundError) and where.startswith(("/proc", "/sys", "/usr"))
        or isinstance(error, OSError) and error.errno in (errno.ENOTSUP, errno.ENOSYS)
        or "unavailable on wasm" in str(error)
    )
    if missing:
        held(f"no such call: {error}")
    sys.__excepthook__(kind, error, trace)

if sys.platform == "wasi":
    sys.excepthook = absent

# x86_64, aarch64 (None: that machine has no such call)
NUMBERS = {
    "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171), "bpf": (321, 280), "capset": (126, 91),
    "chroot": (161, 51), "clone": (56, 220), "clone3": (435, 435), "creat": (85, None),
    "fanotify_init": (300, 262), "fsopen": (430, 430), "init_module": (175, 105), "io_setup": (206, 0),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None), "kcmp": (312, 272), "kexec_load": (246, 104), "keyctl": (250, 219),
    "memfd_secret": (447, 447), "mount": (165, 40), "mount_setattr": (442, 442), "msgget": (68, 186),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "open_tree": (428, 428),
    "perf_event_open": (298, 241), "personality": (135, 92), "pidfd_getfd": (438, 438), "pidfd_open": (434, 434),
    "pivot_root": (155, 41), "process_vm_readv": (310, 270), "ptrace": (101, 117), "reboot": (169, 142),
    "sethostname": (170, 161), "setns": (308, 268), "shmat": (30, 196), "shmget": (29, 194), "swapon": (167, 224),
    "syslog": (103, 116), "umount2": (166, 39), "unshare": (272, 97), "userfaultfd": (323, 282),
    "vhangup": (153, 58), "x32_keyctl": (250 | 0x40000000, None),
}
WALLS = (errno.EPERM, errno.EACCES, errno.ENOSYS)

def call(name, *args):
    """(value, errno) of a system call, asked for by its number."""
    number = NUMBERS[name][platform.machine() != "x86_64"]
    try:
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
    except (ImportError, OSError, TypeError):
        return -1, errno.ENOSYS
    if number is None:
        return -1, errno.ENOSYS
    libc.syscall.restype = ctypes.c_long
    given = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    value = libc.syscall(ctypes.c_long(number), *given)
    return value, ctypes.get_errno() if value == -1 else 0

def ask(name, *args):
    """A refusal is the wall. Any other error means that the kernel let us in and minded only our arguments."""
    value, error = call(name, *args)
    if value == -1 and error in WALLS:
        held(f"{name}: {errno.errorcode[error]}")
    escaped(f"{name}: {value if value != -1 else 'allowed, then ' + errno.errorcode.get(error, str(error))}")

def child():
    """A child that waits to be killed, for attacks on a process of our own."""
    need("fork")
    pid = os.fork()
    if pid == 0:
        import time
        time.sleep(10)
        os._exit(0)
    return pid
'''
