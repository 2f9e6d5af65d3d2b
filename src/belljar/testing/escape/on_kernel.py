"""Attacks on the kernel: mounts, namespaces, privileges, and the system calls no guest has a use for.

Arguments are wrong on purpose wherever the call would do harm: a refusal and a complaint about arguments differ.
"""

from __future__ import annotations

from belljar.testing.escape import scenarios
from belljar.testing.escape.attacks import PRELUDE, Attack

_REFUSED = "the call is refused"

MOUNTS = (
    Attack(
        name="mount tmpfs", category="mounts", tries="mounts a filesystem of its own",
        payload='ask("mount", b"none", b".", b"tmpfs", 0, None)', held=_REFUSED, control="root",
    ),
    Attack(
        name="mount proc", category="mounts", tries="mounts a fresh /proc without the masks",
        payload='ask("mount", b"proc", b".", b"proc", 0, None)', held=_REFUSED, control="root",
    ),
    Attack(
        name="remount writable", category="mounts", tries="makes the root writable again",
        payload='ask("mount", None, b"/", None, 32 | 4096, None)  # MS_REMOUNT | MS_BIND',
        held=_REFUSED, control="root",
    ),
    Attack(
        name="overmount", category="mounts", tries="binds a folder of its own over /usr",
        payload='ask("mount", b".", b"/usr", None, 4096, None)  # MS_BIND', held=_REFUSED, control="root",
    ),
    Attack(
        name="unmount", category="mounts", tries="takes a mask off by unmounting it",
        payload='ask("umount2", b"/proc", 2)  # MNT_DETACH', held=_REFUSED, control="root",
    ),
    Attack(
        name="mount by descriptor", category="mounts", tries="uses the newer calls that mount without `mount`",
        payload="""
tries = (("fsopen", (b"tmpfs", 0)), ("open_tree", (-100, b"/", 1)), ("mount_setattr", (-100, b"/", 0, None, 0)))
for name, args in tries:
    value, error = call(name, *args)
    if value != -1 or error not in WALLS:
        escaped(f"{name}: {value} {errno.errorcode.get(error, '')}")
held("fsopen, open_tree and mount_setattr are refused")
""",
        held="all three are refused", control="root",
    ),
    Attack(
        name="pivot_root", category="mounts", tries="changes the root of its mount namespace",
        payload='ask("pivot_root", b".", b".")', held=_REFUSED, control="root",
    ),
    Attack(
        name="chroot", category="mounts", tries="enters a chroot, from where it would climb out by `..`",
        payload='ask("chroot", b".")', held=_REFUSED, control="root",
    ),
    Attack(
        name="open by handle", category="mounts", tries="opens the root of the disk by its inode number (shocker)",
        payload="""
handle = struct.pack("Ii8s", 8, 1, struct.pack("II", 2, 0))
fd = os.open("/usr", os.O_RDONLY)
ask("open_by_handle_at", fd, handle, os.O_RDONLY)
""",
        held=_REFUSED, control="root",
    ),
)  # fmt: skip

PRIVILEGES = (
    Attack(
        name="become root", category="privileges", tries="sets its uid to 0",
        payload='need("setuid"); refused("setuid", lambda: (os.setuid(0), "root"))', held=_REFUSED, control="root",
    ),
    Attack(
        name="capabilities", category="privileges", tries="raises CAP_SYS_ADMIN",
        payload="""
header, data = struct.pack("Ii", 0x20080522, 0), struct.pack("6I", 1 << 21, 1 << 21, 0, 0, 0, 0)
ask("capset", header, data)
""",
        held=_REFUSED, control="root",
    ),
    Attack(
        name="setuid programs", category="privileges", tries="looks for a setuid program that would make it root",
        payload="""
import ctypes, stat
if ctypes.CDLL(None).prctl(39, 0, 0, 0, 0) == 1:  # PR_GET_NO_NEW_PRIVS
    held("no_new_privs is set: setuid bits mean nothing")
for folder in ("/usr/bin", "/usr/sbin", "/bin", "/usr/lib/dbus-1.0", "/usr/lib/openssh"):
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        path = os.path.join(folder, name)
        if os.path.exists(path) and os.stat(path).st_mode & stat.S_ISUID and not os.statvfs(path).f_flag & os.ST_NOSUID:
            escaped(path)
held("none that works")
""",
        held="no_new_privs is set, or there are none",
    ),
    Attack(
        name="make a setuid file", category="privileges",
        tries="gives a file of its own the setuid or setgid bit, afterwards or by creating it so",
        payload="""
import stat
open("mine", "w").close()
def open_with(bits, flags=os.O_CREAT | os.O_RDWR, name="opened"):
    os.close(os.open(name, flags, bits | 0o755))
def unnamed(bits):
    fd = os.open(".", os.O_TMPFILE | os.O_RDWR, bits | 0o755)
    os.link(f"/proc/self/fd/{fd}", "unnamed", follow_symlinks=True)
def creat(bits):
    if call("creat", b"creat", bits | 0o755)[0] == -1:
        raise OSError(0, "refused")
ways = {
    "mine": lambda bits: os.chmod("mine", bits | 0o755),
    "opened": open_with,
    "creat": creat,
    "node": lambda bits: os.mknod("node", stat.S_IFREG | bits | 0o755),
    "unnamed": unnamed,
}
if not hasattr(os, "mknod"):  # WebAssembly
    ways = {name: ways[name] for name in ("mine", "opened") if name == "opened" or hasattr(os, "chmod")}
def mark(name, bits):
    ways[name](bits)
    mode = os.stat(name).st_mode
    os.unlink(name) if name != "mine" else None
    if not mode & (stat.S_ISUID | stat.S_ISGID):
        raise OSError(0, "the mode has no such bit")
    return oct(mode)
every("made", [(f"{name} {bits:o}", lambda name=name, bits=bits: mark(name, bits))
               for name in ways for bits in (stat.S_ISUID, stat.S_ISGID)])
""",
        held=_REFUSED,
    ),
    Attack(
        name="raise rlimits", category="privileges", tries="raises its hard resource limits",
        payload="""
import resource
raised = []
for name in ("NOFILE", "MEMLOCK", "NPROC", "SIGPENDING", "MSGQUEUE", "NICE", "RTPRIO", "CORE"):
    which = getattr(resource, f"RLIMIT_{name}")
    soft, hard = resource.getrlimit(which)
    if hard == resource.RLIM_INFINITY:
        continue
    try:
        resource.setrlimit(which, (soft, hard + 1))
        raised.append(name)
    except (OSError, ValueError):
        pass
escaped(raised) if raised else held("no hard limit can be raised")
""",
        held=_REFUSED, control="root",
    ),
    Attack(
        name="priority", category="privileges", tries="gives itself a priority above all others",
        payload="""
need("setpriority")
try:
    os.setpriority(os.PRIO_PROCESS, 0, int(os.environ["MARK"]))
except OSError as error:
    held(f"setpriority: {error.strerror}")
stay(f"nice {os.getpriority(os.PRIO_PROCESS, 0)}")
""",
        held="the call is refused, or it is a number in a kernel of the guest's own",
        scenario=scenarios.number_inside(scenarios.niceness, range(-19, -10)), control="root",
    ),
    Attack(
        name="host name", category="privileges", tries="reads and changes the host's name",
        payload="""
import socket
if socket.gethostname() == "@hostname@":
    escaped("it has the host's name")
ask("sethostname", b"pwned", 5)
""",
        held="it has a name of its own, and may not change it",
    ),
    Attack(
        name="core dumps", category="privileges", tries="has itself dumped, to the host's disk or crash handler",
        payload="""
import resource
hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
held("the limit is 0") if hard == 0 else escaped(f"a core of {hard} bytes may be written")
""",
        held="the hard limit for core files is 0",
    ),
)  # fmt: skip

NAMESPACES = (
    Attack(
        name="user namespace", category="namespaces", tries="makes a user namespace to be root in",
        payload='ask("unshare", 0x10000000)', held=_REFUSED,
    ),
    Attack(
        name="other namespaces", category="namespaces", tries="makes mount, network and pid namespaces",
        payload="""
for flag, name in ((0x20000, "mnt"), (0x40000000, "net"), (0x20000000, "pid"), (0x2000000, "cgroup"), (0x80, "time")):
    value, error = call("unshare", flag)
    if value != -1 or error not in WALLS:
        escaped(name)
held("unshare is refused")
""",
        held=_REFUSED, control="root",
    ),
    Attack(
        name="clone with namespace", category="namespaces", tries="makes a user namespace by clone",
        payload="""
value, error = call("clone", 0x10000000 | 17, 0, 0, 0, 0)
if value == 0:
    os._exit(0)
held(f"clone: {errno.errorcode[error]}") if value == -1 and error in WALLS else escaped(f"clone: {value}")
""",
        held=_REFUSED,
    ),
    Attack(
        name="clone3 with namespace", category="namespaces",
        tries="makes a user namespace by clone3, whose flags a filter cannot read",
        payload="""
arguments = struct.pack("11Q", 0x10000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0)
value, error = call("clone3", arguments, len(arguments))
if value == 0:
    os._exit(0)
held(f"clone3: {errno.errorcode[error]}") if value == -1 and error in WALLS else escaped(f"clone3: {value}")
""",
        held=_REFUSED,
    ),
    Attack(
        name="setns", category="namespaces", tries="joins the namespaces of process 1, or asks to join its own",
        payload="""
last = "no namespace to open"
names = ("mnt", "net", "pid", "ipc", "uts", "user", "cgroup")
for name in [f"1/ns/{name}" for name in names] + ["self/ns/uts", "self/ns/net"]:
    try:
        fd = os.open(f"/proc/{name}", os.O_RDONLY)
    except OSError as error:
        last = f"{name}: {error.strerror}"
        continue
    value, error = call("setns", fd, 0)
    if value == 0:
        escaped(name)
    last = f"{name}: {errno.errorcode[error]}"
held(last)
""",
        held=_REFUSED, control="root",
    ),
)  # fmt: skip

KERNEL = (
    Attack(
        name="ptrace", category="kernel", tries="attaches to another process",
        payload="""
pid = child()
value, error = call("ptrace", 0x4206, pid, 0, 0)  # PTRACE_SEIZE
os.kill(pid, 9)
held(f"ptrace: {errno.errorcode[error]}") if value == -1 and error in WALLS else escaped("attached")
""",
        held=_REFUSED,
    ),
    Attack(
        name="read memory", category="kernel", tries="reads another process's memory by process_vm_readv",
        payload="""
import ctypes
pid = child()
data = ctypes.create_string_buffer(b"x" * 16, 16)
vector = struct.pack("QQ", ctypes.addressof(data), 16)
value, error = call("process_vm_readv", pid, vector, 1, vector, 1, 0)
os.kill(pid, 9)
held(f"{errno.errorcode[error]}") if value == -1 and error in WALLS else escaped(f"read {value} bytes")
""",
        held=_REFUSED,
    ),
    Attack(
        name="sandbox's init", category="kernel",
        tries="reads the code of bubblewrap's init through /proc: who can write there has it outlive Belljar",
        payload="""
init = open("/proc/1/comm").read().strip()
if init != "bwrap":
    held(f"process 1 is {init}, and it is not what ends the guest with Belljar")
first = int(next(line for line in open("/proc/1/maps") if " r-xp " in line).split("-")[0], 16)
def read(path):
    fd = os.open(path, os.O_RDWR)
    got = os.pread(fd, 16, first)
    if not got:
        raise OSError(0, "empty")
    return got
every("memory", [(path, lambda path=path: read(path)) for path in ("/proc/1/mem", "/proc/1/task/1/mem")])
""",
        held="its memory is masked",
        control="none", uncontrolled="process 1 of a host is its own init; a test leaves out the mask instead",
    ),
    Attack(
        name="steal a descriptor", category="kernel", tries="takes an open file out of another process",
        payload="""
pid = child()
fd, _ = call("pidfd_open", pid, 0)
value, error = call("pidfd_getfd", fd, 1, 0) if fd >= 0 else (-1, errno.ENOSYS)
os.kill(pid, 9)
held(f"pidfd_getfd: {errno.errorcode[error]}") if value == -1 and error in WALLS else escaped(f"descriptor {value}")
""",
        held=_REFUSED,
    ),
    Attack(
        name="kcmp", category="kernel", tries="compares kernel pointers of two processes",
        payload='ask("kcmp", os.getpid(), os.getpid(), 1, 0, 0)  # KCMP_VM', held=_REFUSED,
    ),
    Attack(
        name="session keyring", category="kernel", tries="reads the keyring of the session it was started from",
        payload='ask("keyctl", 0, -3, 0)  # KEYCTL_GET_KEYRING_ID', held=_REFUSED,
    ),
    Attack(
        name="add a key", category="kernel", tries="puts a key into the kernel's store",
        payload='ask("add_key", b"user", b"belljar", b"x", 1, -2)  # its own process keyring', held=_REFUSED,
    ),
    Attack(
        name="bpf", category="kernel", tries="creates a BPF map",
        payload='ask("bpf", 0, struct.pack("4I32x", 2, 4, 4, 1), 48)', held=_REFUSED, control="root",
    ),
    Attack(
        name="perf", category="kernel", tries="opens a performance counter",
        payload="""
attributes = struct.pack("IIQQQQQ", 1, 112, 0, 0, 0, 0, 0b1100000) + bytes(112 - 48)
ask("perf_event_open", attributes, 0, -1, -1, 0)
""",
        held=_REFUSED, control="root",
    ),
    Attack(
        name="io_uring", category="kernel", tries="sets up a ring, through which calls pass unfiltered",
        payload='ask("io_uring_setup", 4, bytes(120))', held=_REFUSED,
    ),
    Attack(
        name="userfaultfd", category="kernel", tries="handles page faults, to win races against the kernel",
        payload='ask("userfaultfd", 1)  # UFFD_USER_MODE_ONLY', held=_REFUSED,
    ),
    Attack(
        name="kernel module", category="kernel", tries="loads a module (an empty one)",
        payload='ask("init_module", b"", 0, b"")', held=_REFUSED, control="root",
    ),
    Attack(
        name="kexec", category="kernel", tries="loads another kernel (with arguments that cannot work)",
        payload='ask("kexec_load", 0, 1000, None, 0xF0000)', held=_REFUSED, control="root",
    ),
    Attack(
        name="reboot", category="kernel", tries="asks for a reboot (with magic numbers that cannot work)",
        payload='ask("reboot", 0xDEAD, 0xBEEF, 0, None)', held=_REFUSED, control="root",
    ),
    Attack(
        name="clock", category="kernel", tries="adjusts the clock (to a tick that cannot work)",
        payload='ask("adjtimex", struct.pack("I", 0x4000) + bytes(252))  # ADJ_TICK', held=_REFUSED, control="root",
    ),
    Attack(
        name="swap", category="kernel", tries="switches swap on, onto a file that does not exist",
        payload='ask("swapon", b"/nonexistent/belljar", 0)', held=_REFUSED, control="root",
    ),
    Attack(
        name="accounting", category="kernel", tries="has process accounting written to a file that does not exist",
        payload='ask("acct", b"/nonexistent/belljar")', held=_REFUSED, control="root",
    ),
    Attack(
        name="kernel log", category="kernel", tries="reads the kernel's messages",
        payload='ask("syslog", 3, bytes(4096), 4096)  # SYSLOG_ACTION_READ_ALL', held=_REFUSED, control="root",
    ),
    Attack(
        name="fanotify", category="kernel", tries="watches a whole filesystem",
        payload='ask("fanotify_init", 0, 0)', held=_REFUSED, control="root",
    ),
    Attack(
        name="port I/O", category="kernel", tries="asks for direct access to a hardware port (and does not use it)",
        payload='ask("ioperm", 0x80, 1, 1)', held=_REFUSED, control="root",
    ),
    Attack(
        name="no randomisation", category="kernel", tries="switches address randomisation off",
        payload='ask("personality", 0x40000)', held=_REFUSED,
    ),
    Attack(
        name="32-bit system calls", category="kernel", tries="asks for a keyring through the 32-bit door (int 0x80)",
        payload="""
import ctypes, mmap
if platform.machine() != "x86_64":
    held("this machine has no int 0x80")
# push rbx; mov eax,288 (keyctl); xor ebx,ebx; mov ecx,-3; xor edx,edx; int 0x80; pop rbx; ret
code = bytes.fromhex("53 b820010000 31db b9fdffffff 31d2 cd80 5b c3")
need("fork")
pid = os.fork()
if pid == 0:
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    os._exit(0 if ctypes.CFUNCTYPE(ctypes.c_int)(address)() > 0 else 1)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
escaped("int 0x80 is not filtered") if status == 0 else held(f"the child ended with {status}")
""",
        held="the call fails, or its process is killed",
    ),
    Attack(
        name="x32 system calls", category="kernel", tries="asks for a keyring through the x32 door",
        payload="""
need("fork")
pid = os.fork()
if pid == 0:
    os._exit(0 if call("x32_keyctl", 0, -3, 0)[0] > 0 else 1)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
escaped("x32 is not filtered") if status == 0 else held(f"the child ended with {status}")
""",
        held="the call fails, or its process is killed",
        control="none", uncontrolled="hardly any kernel is built with x32, so there is nothing to show it on",
    ),
    Attack(
        name="before the filter", category="kernel",
        tries="runs code at interpreter start-up, before a filter set by the interpreter would stand",
        payload="""
if sys.platform == "wasi" and "site" in sys.modules and "sitecustomize" not in sys.modules:
    held("no start-up code of the guest runs: the interpreter had started before there was a guest")
print("the start-up code did not run, which proves nothing")
""",
        options={
            "files": {"sitecustomize.py": PRELUDE + 'ask("keyctl", 0, -3, 0)'},
            "env": {"PYTHONPATH": ".:/workspace:/inputs"},
        },
        held="the filter stands before the first instruction of the guest",
    ),
)  # fmt: skip
