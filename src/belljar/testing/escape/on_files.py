"""Attacks on what the host keeps: files, secrets, environment, /proc, /sys, /dev."""

from __future__ import annotations

from belljar.testing.escape import scenarios
from belljar.testing.escape.attacks import Attack

FILES = (
    Attack(
        name="host file", category="files",
        tries="reads a file of the host that everybody may read",
        payload='refused("open", lambda: print(open("@canary@").read()))',
        held="the path does not exist inside",
    ),
    Attack(
        name="host users", category="files",
        tries="reads the host's list of users",
        payload="""
import hashlib
try:
    text = open("/etc/passwd", "rb").read()
except OSError as error:
    held(error)
if hashlib.sha256(text).hexdigest() == "@passwd@":
    escaped("this is the host's /etc/passwd")
held(f"a passwd of its own, {len(text)} bytes")
""",
        held="there is no /etc/passwd, or not the host's",
    ),
    Attack(
        name="password hashes", category="files",
        tries="reads the password hashes",
        payload='every("hashes", [(p, lambda p=p: len(open(p).read())) for p in ("/etc/shadow", "/etc/gshadow")])',
        held="they are absent or unreadable", control="root",
    ),
    Attack(
        name="home directories", category="files",
        tries="looks for keys and tokens in the home directories of the host",
        payload="""
def look(path):
    found = os.listdir(path)
    if not found:
        raise OSError(0, "empty")
    return found
places = ("@home@", "@home@/.ssh", "@home@/.aws", "@home@/.config", "/root", "/root/.ssh")
every("home", [(p, lambda p=p: look(p)) for p in places])
""",
        held="they are absent, empty or unreadable", control="root",
    ),
    Attack(
        name="host sockets", category="files",
        tries="looks for docker.sock and other sockets of the host, and connects",
        payload="""
import socket, stat
seen = 0
for top in ("@folder@", "/run", "/var/run", "/tmp"):
    for folder, folders, names in os.walk(top):
        if folder.count("/") > 4:
            folders.clear()
        for name in names:
            path = os.path.join(folder, name)
            try:
                if not stat.S_ISSOCK(os.lstat(path).st_mode):
                    continue
                seen += 1
                socket.socket(socket.AF_UNIX).connect(path)
            except OSError:
                continue
            escaped(path)
held(f"{seen} sockets, none answers")
""",
        held="no socket of the host is within reach",
    ),
    Attack(
        name="engine's socket", category="files",
        tries="connects to the sockets of container engines, by their usual paths and by the one in use",
        payload="""
import socket
def connect(path):
    with socket.socket(socket.AF_UNIX) as plug:
        plug.settimeout(3)
        plug.connect(path)
        return "connected"
homes = ("/var/run", "/run", "/run/user/0", "/run/user/1000", "/host/run", "/proc/1/root/run", "/proc/1/root/var/run")
names = ("docker.sock", "podman/podman.sock", "containerd/containerd.sock", "docker/containerd/containerd.sock",
         "crio/crio.sock")
paths = [f"{home}/{name}" for home in homes for name in names] + os.environ["SOCKETS"].split(":")
every("socket", [(path, lambda path=path: connect(path)) for path in paths])
""",
        held="none of them exists inside", scenario=scenarios.sockets_of_engines,
    ),
    Attack(
        name="Belljar's state", category="files",
        tries="looks into the directories where Belljar keeps its own state",
        payload="""
def look(path):
    return os.listdir(path)
every("state", [(p, lambda p=p: look(p)) for p in ("/run/belljar", "@folder@", "/tmp/belljar-0", "/etc/belljar")])
""",
        held="they do not exist inside",
    ),
    Attack(
        name="writable root", category="files",
        tries="makes a file (without a name, so that none is left) in the system's folders",
        payload="""
paths = ("/", "/usr", "/usr/bin", "/usr/lib", "/etc", "/var", "/opt", "/srv", "/boot")
every("create", [(p, lambda p=p: os.open(p, os.O_TMPFILE | os.O_RDWR, 0o600)) for p in paths])
""",
        held="the root is read-only", control="root",
    ),
    Attack(
        name="context files", category="files",
        tries="changes, replaces and removes a read-only input file, for itself and for the next command",
        payload="""
if not os.path.exists("input.txt"):  # in a living sandbox they lie apart
    os.chdir("/inputs")
def overwrite(mode="w"):
    with open("input.txt", mode) as file:
        file.write("changed")
given, last = open("input.txt"), ""
for name, action in (
    ("write", overwrite),
    ("append", lambda: overwrite("a")),
    ("update", lambda: overwrite("r+")),
    ("truncate", lambda: os.truncate("input.txt", 0)),
    ("chmod", lambda: (os.chmod("input.txt", 0o666), overwrite())),
    ("replace", lambda: (open("mine.txt", "w").close(), os.rename("mine.txt", "input.txt"))),
    ("unlink", lambda: os.unlink("input.txt")),
):
    try:
        action()
    except OSError as error:
        last = f"{name}: {error.strerror}"
    else:
        # There the input is a copy for this command, whose name it may have; the next command gets another.
        if sys.platform != "wasi" or name not in ("replace", "unlink"):
            escaped(f"{name} was not refused")
held(last) if given.read() == "as it was" else escaped("it was changed in place")
""",
        held="it cannot be written, and the next command has it as it was",
        options={"files": {"input.txt": "as it was"}}, scenario=scenarios.inputs_of_the_next,
    ),
    Attack(
        name="open descriptors", category="files",
        tries="looks for descriptors that the launcher forgot to close",
        payload="""
found, preopened = [], set()
if sys.platform == "wasi":  # these handles are all of the filesystem that there is
    for path in ("/usr/local/lib", "/usr/local/lib/python315.zip/matplotlib/mpl-data", "/workspace", "/tmp"):
        info = os.stat(path)
        preopened.add((info.st_mode, info.st_dev, info.st_ino))
for fd in range(3, 1024):
    try:
        info = os.fstat(fd)
    except OSError:
        continue
    if (info.st_mode, info.st_dev, info.st_ino) in preopened:
        continue
    try:
        what = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        what = "unknown"
    if not what.endswith(("/main.py", "/main.py (deleted)")):
        found.append(f"{fd} -> {what}")
escaped(found) if found else held("only stdin, stdout and stderr are open")
""",
        held="only the three standard streams are open",
    ),
)  # fmt: skip

SURROUNDINGS = (
    Attack(
        name="environment", category="environment",
        tries="reads secrets from its environment variables",
        payload="print(dict(os.environ)); held('the secret is not among them')",
        held="no variable of the host is passed on",
    ),
    Attack(
        name="environment of others", category="environment",
        tries="reads the environment of every process it can see",
        payload="""
count = 0
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        print(open(f"/proc/{pid}/environ").read())
        count += 1
    except OSError:
        pass
held(f"{count} readable, none of the host's")
""",
        held="no process of the host is visible",
    ),
    Attack(
        name="host processes", category="proc",
        tries="looks for a process of the host by its command line",
        payload="""
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if "@marker@" in open(f"/proc/{pid}/cmdline").read():
            escaped(f"saw process {pid}")
    except OSError:
        pass
held("not to be seen")
""",
        held="it sees only its own processes",
    ),
    Attack(
        name="root of others", category="proc",
        tries="reads a host file through /proc/<pid>/root and /proc/<pid>/cwd",
        payload="""
pids = [*filter(str.isdigit, os.listdir("/proc"))]
doors = [f"/proc/{pid}/{door}" for pid in pids for door in ("root", "cwd")]
every("through", [(door, lambda door=door: print(open(door + "@canary@").read())) for door in doors])
""",
        held="every root it can enter is its own", control="root",
    ),
    Attack(
        name="kernel settings", category="proc",
        tries="opens core_pattern, modprobe, sysrq-trigger and others for writing (and writes nothing)",
        payload="""
names = ("sys/kernel/core_pattern", "sys/kernel/modprobe", "sys/kernel/hotplug", "sysrq-trigger",
         "sys/vm/drop_caches", "sys/fs/binfmt_misc/register", "sys/kernel/hostname", "sys/net/ipv4/ip_forward")
every("write", [(n, lambda n=n: os.open(f"/proc/{n}", os.O_WRONLY)) for n in names])
""",
        held="none can be opened for writing", control="root",
    ),
    Attack(
        name="kernel memory", category="proc",
        tries="reads kcore, kmsg, keys and timer_list",
        payload="""
def read(name):
    fd = os.open(f"/proc/{name}", os.O_RDONLY | os.O_NONBLOCK)
    got = os.read(fd, 64)
    if not got:
        raise OSError(0, "empty")
    return len(got)
every("read", [(n, lambda n=n: read(n)) for n in ("kcore", "kmsg", "keys", "timer_list", "sched_debug", "vmallocinfo")])
""",
        held="they are absent, empty or unreadable", control="root",
    ),
    Attack(
        name="kernel addresses", category="proc",
        tries="reads the addresses of the kernel's symbols",
        payload="""
try:
    lines = [line for _, line in zip(range(50), open("/proc/kallsyms"))]
except OSError as error:
    held(error)
found = [line for line in lines if int(line.split()[0], 16)]
escaped(found[0]) if found else held("all addresses read as zero")
""",
        held="kallsyms shows zeros, or nothing", control="root",
    ),
    Attack(
        name="OOM immunity", category="proc",
        tries="exempts itself from the OOM killer",
        payload="""
try:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(os.environ["MARK"])
except OSError as error:
    held(f"oom_score_adj: {error.strerror}")
stay("oom_score_adj is " + open("/proc/self/oom_score_adj").read().strip())
""",
        held="the kernel refuses a lower score, or it is a number in a kernel of the guest's own",
        scenario=scenarios.number_inside(scenarios.scores, range(-899, -600)), control="root",
    ),
    Attack(
        name="sysfs writes", category="sys",
        tries="opens switches of the kernel below /sys for writing (and writes nothing)",
        payload="""
names = ("kernel/uevent_helper", "power/state", "power/disk", "kernel/mm/transparent_hugepage/enabled",
         "kernel/profiling", "module/kernel/parameters/panic", "kernel/kexec_crash_size", "power/pm_async")
every("write", [(n, lambda n=n: os.open(f"/sys/{n}", os.O_WRONLY)) for n in names])
""",
        held="/sys is absent or read-only", control="root",
    ),
    Attack(
        name="cgroup release_agent", category="sys",
        tries="opens release_agent, cgroup.procs or a limit for writing (and writes nothing)",
        payload="""
wanted = {"release_agent", "cgroup.procs", "tasks", "memory.max", "memory.limit_in_bytes", "pids.max"}
found = []
for folder, folders, names in os.walk("/sys/fs/cgroup"):
    if folder.count("/") > 5:
        folders.clear()
    found += [os.path.join(folder, name) for name in names if name in wanted]
every("write", [(p, lambda p=p: os.open(p, os.O_WRONLY)) for p in found[:2000]])
""",
        held="no control group is writable", control="root",
    ),
    Attack(
        name="disks", category="devices",
        tries="opens block devices below /dev",
        payload="""
import stat
found = []
for folder, _, names in os.walk("/dev"):
    for name in names:
        path = os.path.join(folder, name)
        try:
            if stat.S_ISBLK(os.stat(path).st_mode):
                found.append(path)
        except OSError:
            pass
every("open", [(p, lambda p=p: os.open(p, os.O_RDONLY)) for p in found])
""",
        held="there are none", control="root",
    ),
    Attack(
        name="dangerous devices", category="devices",
        tries="opens mem, kmsg, kvm, fuse, tun and loop-control",
        payload="""
names = ("mem", "kmem", "port", "kmsg", "kvm", "fuse", "net/tun", "loop-control", "vhost-net", "vsock", "uinput",
         "userfaultfd", "mapper/control", "cpu/0/msr", "vfio/vfio")
opened, last = {}, ""
for name in names:
    try:
        opened[name] = os.open(f"/dev/{name}", os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        last = f"{name}: {error.strerror}"
if not opened:
    held(f"open: {last}")
stay(" ".join(f"{name}={os.fstat(fd).st_rdev}" for name, fd in opened.items()))
""",
        held="they are absent or refused, or made by a kernel of the guest's own",
        scenario=scenarios.devices_inside, control="root",
    ),
    Attack(
        name="device nodes", category="devices",
        tries="makes nodes of the first disk and of the kernel's memory wherever it may write, and opens them",
        payload="""
import stat
need("mknod")
def make(path, kind, major, minor):
    os.mknod(path, kind | 0o600, os.makedev(major, minor))
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        return f"made, then {error.strerror}"
    finally:
        os.unlink(path)
    return "opened"
nodes = {"disk": (stat.S_IFBLK, 8, 0), "mem": (stat.S_IFCHR, 1, 1)}
every("mknod", [(f"{folder}/{name}", lambda path=f"{folder}/@marker@-{name}", node=node: make(path, *node))
                for folder in (".", "/tmp", "/dev/shm", "/dev") for name, node in nodes.items()])
""",
        held="mknod is refused", control="root",
    ),
    Attack(
        name="host /dev/shm", category="devices",
        tries="reads a file that the host keeps in /dev/shm",
        payload='refused("open", lambda: print(open("@shm_file@").read()))',
        held="it has a /dev/shm of its own, or none",
    ),
)  # fmt: skip
