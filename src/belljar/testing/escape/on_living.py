"""Attacks on what is new in living sandboxes: processes that meet, calls for files and ports beside them, terminals.

Processes of one living sandbox may do to each other what they like. What is attacked here is what is not theirs: the
processes of ours that become their commands, the host behind those, Belljar itself, and other sandboxes.
"""

from __future__ import annotations

from belljar.testing.escape import living_scenarios as scenarios
from belljar.testing.escape.attacks import Attack
from belljar.testing.escape.on_resources import FULL, OOM

_LIBRARYS = "the wall is what the library does by itself, whatever the backend"

# Looks at each process in sight, over and over, until enough commands were started. A command that runs, or what
# becomes it inside, is the sandbox's own: only what still is a program of ours, before a look and after, must show
# nothing.
_LURK = """
import time
def comm(pid):
    try:
        return open(f"/proc/{pid}/comm").read().strip()
    except OSError:
        return "gone"
def content(path):
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return os.read(fd, 1 << 20)
    finally:
        os.close(fd)
me, seen, looks = str(os.getpid()), set(), 0
old = set(filter(str.isdigit, os.listdir("/proc")))
print("READY", flush=True)
end = time.monotonic() + 15
while time.monotonic() < end and not (looks % 50 == 0 and os.path.exists("enough")):
    looks += 1
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if pid != me:
            seen.add(pid) if pid not in old else None
            look(pid)
held(f"{len(seen)} processes were seen to begin") if len(seen) > 2 else print("it saw nothing begin")
"""
_SECRETS = """
import re
OURS = ("bwrap", "nsenter", "chroot", "runc", "crun", "conmon", "exe", "docker", "podman")
secret = re.compile(rb"secret-[0-9a-f]{32}")
def look(pid):
    before = comm(pid)
    if not before.startswith(OURS):
        return
    for name in ("environ", "fd/0", "auxv", "mem", "maps", "stack", "syscall", "io", "personality", "fdinfo/0"):
        try:
            got = content(f"/proc/{pid}/{name}") if name != "mem" else memory(pid)
        except OSError:
            continue
        if secret.search(got) and comm(pid) == before:
            escaped(f"the next command's secret from {name} of {before}")
    for door in ("root", "cwd"):
        try:
            got = content(f"/proc/{pid}/{door}@canary@")
        except OSError:
            continue
        escaped(f"a file of the host through {door} of {before}: {got!r}")
    for kind in ("uid_map", "gid_map", "setgroups"):
        try:
            fd = os.open(f"/proc/{pid}/{kind}", os.O_WRONLY)
        except OSError:
            continue
        try:
            os.write(fd, b"0 0 1" if kind != "setgroups" else b"allow")
        except OSError:
            continue
        finally:
            os.close(fd)
        escaped(f"wrote {kind} of {before}")
    value, error = call("ptrace", 0x4206, int(pid), 0, 0)  # PTRACE_SEIZE
    if value != -1:
        escaped(f"attached to {before}") if comm(pid) == before else None
def memory(pid):
    with open(f"/proc/{pid}/maps") as maps:
        places = [line.split()[0].split("-") for line in maps if " rw" in line]
    got = b""
    with open(f"/proc/{pid}/mem", "rb", 0) as file:
        for start, stop in places[:40]:
            file.seek(int(start, 16))
            got += file.read(min(int(stop, 16) - int(start, 16), 1 << 20))
    return got
"""
_MOUNTS = """
def places(pid):
    try:
        return {line.split()[4] for line in open(f"/proc/{pid}/mountinfo")}
    except OSError:
        return set()
hosts = set(os.environ["HOST_MOUNTS"].split("\\n")) - places("self")
if not hosts:
    held("the host has no mounts that are not those of the sandbox, too")
def look(pid):
    if found := places(pid) & hosts:
        escaped(f"mounts of the host, told of {comm(pid)}: {sorted(found)[:3]}")
"""

BESIDE = (
    Attack(
        name="next command's secrets", category="living",
        tries="lies in wait for the next command, to read environment, input, memory and root while it is still ours",
        payload=_SECRETS + _LURK, held="until it is the command's own process, nothing of it can be read or changed",
        scenario=scenarios.lying_in_wait, control="none", uncontrolled="without walls no process of ours comes first",
    ),
    Attack(
        name="mounts in sight", category="living",
        tries="reads the table of mounts of each process in sight, those of ours that become commands among them",
        payload=_MOUNTS + _LURK, held="they tell of no mount of the host", scenario=scenarios.told_mounts,
        control="none", uncontrolled="a bare process has the host's mounts for its own",
    ),
    Attack(
        name="machine's first process", category="living",
        tries="takes over the process that keeps the sandbox alive: memory, descriptors, namespaces, signals",
        payload="""
import signal
def write():
    with open("/proc/1/mem", "r+b", 0) as file:
        return file.tell()
def nothing(number):
    if call(*number)[0] == -1:
        raise OSError(0, "refused")
    return "done"
if "@marker@" in "".join(open(f"/proc/{pid}/cmdline").read() for pid in filter(str.isdigit, os.listdir("/proc"))):
    escaped("process 1 is the host's")
last = ""
for name, action in (
    ("mem", write), ("environ", lambda: open("/proc/1/environ").read()), ("fd", lambda: os.readlink("/proc/1/fd/0")),
    ("root", lambda: os.listdir("/proc/1/root/")), ("cwd", lambda: os.listdir("/proc/1/cwd/")),
    ("user", lambda: os.open("/proc/1/ns/user", os.O_RDONLY)), ("mnt", lambda: os.open("/proc/1/ns/mnt", os.O_RDONLY)),
    ("ptrace", lambda: nothing(("ptrace", 0x4206, 1, 0, 0))),
    ("read", lambda: nothing(("process_vm_readv", 1, bytes(16), 1, bytes(16), 1, 0))),
):
    try:
        got = action()
    except OSError as error:
        last = f"{name}: {error.strerror or error}"
    else:
        if name in ("mem", "ptrace", "user", "mnt") or "@marker@" in str(got):
            escaped(f"{name} of process 1: {got!r}")
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGHUP, signal.SIGSEGV):
    try:
        os.kill(1, number)
    except OSError as error:
        last = f"signal {number}: {error.strerror}"
held(f"{last}; signals to it were sent")
""",
        held="the kernel refuses; the sandbox goes on, or says that it has ended", scenario=scenarios.first_process,
        control="none", uncontrolled="process 1 of the host is not to be touched",
    ),
    Attack(
        name="replaced programs", category="living",
        tries="puts programs under names that Belljar uses into a writable PATH, and start-up files into its home",
        payload="""
home = os.path.expanduser("~")
places = [f"{home}/.local/bin", f"{home}/bin", "/workspace", "/tmp", "/run"]
for place in places:
    os.makedirs(place, exist_ok=True)
    for name in os.environ["PROGRAMS"].split():
        with open(f"{place}/{name}", "w") as file:
            file.write(f"#!/bin/sh\\necho {name} >>/tmp/replaced\\n")
        os.chmod(f"{place}/{name}", 0o755)
for name in (".bashrc", ".profile", ".bash_profile", ".bash_login", ".bash_logout", ".zshenv", ".shrc", ".inputrc"):
    with open(f"{home}/{name}", "w") as file:
        file.write(f"echo {name} >>/tmp/replaced\\n")
version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
for folder in (f"{home}/.local/lib/{version}/site-packages", "/workspace", "/tmp"):
    os.makedirs(folder, exist_ok=True)
    for name in ("sitecustomize", "usercustomize", "json", "socket", "os"):
        with open(f"{folder}/{name}.py", "w") as file:
            file.write(f"open('/tmp/replaced', 'a').write('{name}.py\\\\n')\\n")
held("left them")
""",
        held="Belljar's own calls run none of them", scenario=scenarios.replaced_programs,
        control="none", uncontrolled="what has no sandbox around it does these calls without any program",
    ),
    Attack(
        name="signals to all", category="living", tries="ends all processes that it can, and so whatever helps Belljar",
        payload="""
import signal
if os.readlink("/proc/self") != str(os.getpid()):
    held("/proc is not that of its own processes")  # then nothing is known, and nothing is ended
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if "@marker@" in open(f"/proc/{pid}/cmdline").read():
            escaped("it sees processes of the host")
    except OSError:
        pass
os.write(1, b"HELD it could end what it saw\\n")  # before: what it was started by may be among them
os.kill(-1, signal.SIGKILL)
os._exit(0)
""",
        held="what helps is out of reach, and the sandbox goes on", scenario=scenarios.signals_to_all,
        control="none", uncontrolled="it would end every process of the host",
    ),
    Attack(
        name="running while paused", category="living",
        tries="forks without end, so that some of it goes on while paused",
        payload="""
import time
need("fork")
print("READY", flush=True)
end, number = time.monotonic() + 15, 0
while time.monotonic() < end:
    number += 1
    pid = os.fork()
    if pid == 0:
        os.write(1, b"%d\\n" % number)
        os._exit(0)
    os.waitpid(pid, 0)
    time.sleep(0.001)
""",
        held="nothing is written and no processor used until it is resumed", feature="pause",
        scenario=scenarios.paused,
    ),
    Attack(
        name="memory across commands", category="living",
        tries="has each of ten commands leave a process behind that holds 32 MB, with 96 MB of memory",
        payload="""
need("fork")
ready, told = os.pipe()
if os.fork() == 0:
    os.setsid()
    kept = b"x" * (32 << 20)
    os.write(told, b"+")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    code = "import time; kept = b'x' * (32 << 20); time.sleep(25)"
    os.execv(sys.executable, [sys.executable, "-c", code, "@marker@-keeper"])
os.close(told)
os.read(ready, 1)
held("left it")
""",
        held="the limit is the sandbox's: one of them is ended, or refused its memory",
        options={"memory": "96M"}, ends=OOM,
        scenario=scenarios.command_by_command(
            """
def size(pid):
    try:
        if "@marker@-keeper" in open(f"/proc/{pid}/cmdline").read():
            return int(open(f"/proc/{pid}/statm").read().split()[1]) * 4096
    except (OSError, IndexError):
        pass
    return 0
total = sum(map(size, filter(str.isdigit, os.listdir("/proc"))))
if total > 280 << 20:  # where memory is sampled a burst passes; what counts is that it cannot stay
    say("STILL", f"{total >> 20} MB")
held(f"{total >> 20} MB are left")
""",
            10,
        ),
    ),
    Attack(
        name="processes across commands", category="living",
        tries="has each of eight commands leave 30 processes behind, with a limit of 40",
        payload="""
need("fork")
import time
for _ in range(30):
    try:
        if os.fork() == 0:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            time.sleep(12)
            os._exit(0)
    except OSError as error:
        held(error.strerror)
held("left them")
""",
        held="the limit is the sandbox's, and a little more for processes of ours", options={"pids": 40},
        scenario=scenarios.command_by_command(
            """
def is_one(pid):
    try:
        return open(f"/proc/{pid}/comm").read().startswith("python")
    except OSError:
        return False
count = sum(map(is_one, filter(str.isdigit, os.listdir("/proc"))))
escaped(f"{count} processes") if count > 120 else held(f"{count} processes")
""",
            8,
        ),
    ),
)  # fmt: skip

FILE_CALLS = (
    Attack(
        name="links under file calls", category="living",
        tries="swaps folders for links to the host while Belljar reads, writes, moves, copies, removes and downloads",
        payload="""
import ctypes, time
libc = ctypes.CDLL(None)
open("own", "w").write("mine")
for name, target in (("swap", "@drop@/../keep"), ("read", "@folder@")):
    os.symlink(target, name)
    os.mkdir(name + ".folder")
    for inner in ("kept", "canary"):
        open(f"{name}.folder/{inner}", "w").write("mine")
print("READY", flush=True)
end = time.monotonic() + 15
while time.monotonic() < end:
    for name in (b"swap", b"read"):
        libc.renameat2(-100, name, -100, name + b".folder", 2)  # RENAME_EXCHANGE
held("swapped them")
""",
        held="each call stays inside, or is refused", scenario=scenarios.swapped_links,
    ),
    Attack(
        name="archives laid down", category="living",
        tries="has archives unpacked that hold devices, setuid programs, links out and names that climb",
        payload="""
import stat
bad = []
for folder, folders, names in os.walk("."):
    for name in (*folders, *names):
        path = os.path.join(folder, name)
        facts = os.lstat(path)
        if stat.S_ISCHR(facts.st_mode) or stat.S_ISBLK(facts.st_mode) or facts.st_mode & 0o6000:
            bad.append(f"{path} {stat.filemode(facts.st_mode)}")
        elif stat.S_ISREG(facts.st_mode):
            print(open(path).read())
escaped(bad) if bad else held("plain files and links that lead nowhere")
""",
        held="such an archive is refused, or what it holds is plain", scenario=scenarios.hostile_archives,
        after=lambda result, bait: bait.dropped(),
    ),
    Attack(
        name="downloaded folder", category="living",
        tries="leaves links, setuid files, pipes and hostile names in a folder that is downloaded",
        payload="""
for name in (b"new\\nline", b"esc\\x1b[2J", b"back\\\\slash", b"bad\\xff\\xfe", b"-rf", b"plain", b"..\\\\up"):
    try:
        open(name, "w").close()
    except (OSError, UnicodeError):
        pass
for target, name in (("@canary@", "link"), ("@folder@", "folder"), ("../beside", "up"), ("/etc/passwd", "passwd")):
    link(target, name)
try:
    os.chmod("plain", 0o6755)
except OSError:
    pass
os.mkfifo("pipe")
os.makedirs("a/b/c")
held("left them")
""",
        held="plain files and folders with plain names leave, nothing else", scenario=scenarios.hostile_download,
        control="none", uncontrolled=_LIBRARYS,
    ),
    Attack(
        name="endless file", category="living",
        tries="has a file read and downloaded that is endless and takes no room",
        payload="""
try:
    os.truncate(os.open("endless", os.O_CREAT | os.O_WRONLY), 1 << 43)
except OSError as error:
    held(error.strerror)
held("left it")
""",
        held="no more is read than the sandbox can hold", scenario=scenarios.endless_file, options={"disk": "32M"},
        control="none", uncontrolled=_LIBRARYS,
    ),
    Attack(
        name="flooded watcher", category="living",
        tries="makes a tree of 1,000 folders in each other, 12,000 files and 60,000 changes where a folder is watched",
        payload="""
os.mkdir("deep")
here = os.open("deep", os.O_RDONLY)
for _ in range(1000):
    os.mkdir("d", dir_fd=here)
    here, above = os.open("d", os.O_RDONLY, dir_fd=here), here
    os.close(above)
os.mkdir("many")
where = os.open("many", os.O_RDONLY)
for number in range(12_000):
    os.close(os.open(str(number), os.O_CREAT | os.O_WRONLY, dir_fd=where))
os.rename("deep", "seen/deep")
os.rename("many", "seen/many")
os.chdir("seen")
for number in range(15_000):
    os.close(os.open("x", os.O_CREAT | os.O_WRONLY))
    os.rename("x", "y")
    os.unlink("y")
import time
while not os.path.exists("../enough"):  # while the queue is full, the end may go untold
    os.close(os.open("the-end", os.O_CREAT | os.O_WRONLY))
    os.unlink("the-end")
    time.sleep(0.01)
held("done")
""",
        held="what is told is bounded, nobody else waits, and it says where changes are missing", feature="watch",
        scenario=scenarios.flooded_watcher, ends=FULL, control="none", uncontrolled=_LIBRARYS,
    ),
)  # fmt: skip

WIRES = (
    Attack(
        name="ports outside", category="living",
        tries="waits for Belljar to dial a port that is free inside, and taken on the host or by a neighbour",
        payload="held('nothing to do')", held="nobody listens there", feature="dial", scenario=scenarios.dialled_host,
    ),
    Attack(
        name="squatted port", category="living",
        tries="takes a port before the program that is waited for, and floods whoever dials it",
        payload="""
import socket, threading
server = socket.create_server(("127.0.0.1", @free_port@))
def pour(plug):
    try:
        while True:
            plug.sendall(bytes(1 << 16))
    except OSError:
        pass
print("READY", flush=True)
while True:
    threading.Thread(target=pour, args=(server.accept()[0],), daemon=True).start()
""",
        held="no more is read than the caller asks for, and nobody else waits", feature="dial",
        scenario=scenarios.squatted_port, control="none", uncontrolled=_LIBRARYS,
    ),
    Attack(
        name="answers of a terminal", category="living",
        tries="asks its terminal who and where it is, for an answer that is then typed into whatever runs next",
        payload="""
import select, termios, tty
tty.setraw(0)
os.write(1, b"\\x1b[c\\x1b[6n\\x1b]10;?\\x07\\x1bP+q544e\\x1b\\\\\\x05\\x1b[21t\\x1b]52;c;?\\x07")
ready, _, _ = select.select([0], [], [], 1)
got = os.read(0, 100) if ready else b""
termios.tcflush(0, termios.TCIFLUSH)
os.write(1, b"\\r\\n")
escaped(f"it was answered {got!r}") if got else held("nobody answers")
""",
        held="nobody answers", feature="pty", scenario=scenarios.answering_terminal,
    ),
    Attack(
        name="terminals of others", category="living",
        tries="opens the terminals of another living sandbox, and of the host",
        payload="""
def terminal(path):
    fd = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
    if not os.isatty(fd):
        raise OSError(0, "no terminal")
    return os.ttyname(fd)
own = {os.ttyname(fd) for fd in (0, 1, 2) if os.isatty(fd)}
places = [f"/dev/pts/{n}" for n in range(64)] + [f"/dev/tty{n}" for n in range(8)] + ["/dev/console", "/dev/tty"]
places = [path for path in places if path not in own]
every("terminal", [(path, lambda path=path: terminal(path)) for path in places])
""",
        held="its own are all that there are", feature="pty", scenario=scenarios.terminals_of_others,
    ),
    Attack(
        name="endless line", category="living",
        tries="prints 24 MB without the end of a line, into a terminal and into pipes at once",
        payload="for _ in range(24 * 16): os.write(1, b'y' * 65536)",
        held="what is kept is bounded, and nobody else waits", scenario=scenarios.endless_line,
        options={"output": "64M"}, control="none", uncontrolled=_LIBRARYS,
    ),
    Attack(
        name="living neighbour", category="neighbours",
        tries="looks for files and processes of another living sandbox in each writable folder and among all in sight",
        payload="""
def look(folder):
    found = [name for name in os.listdir(folder) if name.startswith("@marker@-mark")]
    if not found:
        raise OSError(0, "not there")
    return found
folders = (os.path.expanduser("~"), "/home/user", "/tmp", "/var/tmp", "/run", "/workspace", "/dev/shm")
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if "@marker@-living" in open(f"/proc/{pid}/cmdline").read():
            escaped(f"process {pid}")
    except OSError:
        pass
every("look", [(f, lambda f=f: look(f)) for f in folders])
""",
        held="it finds nothing, and neither does Belljar in its name", scenario=scenarios.traces_of_a_neighbour,
    ),
)  # fmt: skip

LIVING = tuple(Attack(**{**one.__dict__, "living": True}) for one in (*BESIDE, *FILE_CALLS, *WIRES))
