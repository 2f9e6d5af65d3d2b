"""Attacks on an interpreter that serves one guest after another (WebAssembly in a worker), and on who listens to it.

All of them are harmless elsewhere, and have to hold there as well.
"""

from __future__ import annotations

from belljar.core.result import Result, Status
from belljar.testing.escape import scenarios
from belljar.testing.escape.attacks import Attack
from belljar.testing.escape.on_resources import LATE, OOM, in_time

_ONE_WORKER = "the wall is between a worker and its next guest; a backend without workers has nothing to show"
# Its own sizes, so that a worker is met again by the same attack and by no other.
_STATE = {"memory": "97M"}
_STATE_FILES = {"memory": "101M"}
_CUT = {"memory": "98M"}
_CRASHES = {"memory": "99M", "timeout": 6}

_FILL = """
most = 0
for _ in range(12):
    kept = []
    try:
        while len(kept) < 64:
            kept.append(b"%d" % (10 + len(kept)) * (2 << 20))
    except MemoryError:
        pass
    most = max(most, len(kept) * 4)
escaped(f"{most} MB") if most >= 128 else held(f"never more than {most} MB")
"""

_HUGE = """
for name, action in (
    ("bytes", lambda: b"x" * (1 << 31)), ("list", lambda: [1] * (1 << 29)), ("text", lambda: "\\U0001f600" * (1 << 29)),
    ("format", lambda: "%2000000000d" % 1), ("range", lambda: list(range(1 << 29))),
    ("shift", lambda: len(str((1 << (1 << 33)).bit_length()))),
):
    try:
        action()
    except (MemoryError, OverflowError, ValueError) as error:
        continue
    escaped(f"{name}: it got more than its memory")
held("none is granted")
"""

_FLOOD = """
import time
end = time.time() + 6
while time.time() < end:
    for _ in range(1000):
        {call}
escaped("ran past its time")
"""

_PATHS = """
many = "../" * 40
doors = ["", "/", "//", "/..", "/../..", "..", "../..", many, "/workspace/..", "/workspace/../..", "/tmp/../../..",
         "/tmp/./.././..", "/usr/local/lib/..", "/usr/local/lib/../../../..", "./" * 500 + many, "/workspace/" + many,
         "nowhere/" + many, "/workspace/main.py/" + many, "..\\\\..", "/workspace//..//..", "\\u2025/\\u2025",
         ".. /..", "x" * 5000 + "/" + many, many * 200]
if sys.platform == "wasi":
    own = {(i.st_dev, i.st_ino) for i in map(os.stat, ("/workspace", "/tmp", "/usr/local/lib"))}
    for door in doors[1:] + ["/belljar", "/proc", "/proc/self/fd", "/dev", "/etc", "C:\\\\"]:
        try:
            info = os.stat(door)
        except (OSError, ValueError):
            continue
        if (info.st_dev, info.st_ino) not in own:
            escaped(f"{door[:40]} is outside: {os.listdir(door)[:5]}")
def read(path):
    try:
        print(open(path).read())
    except ValueError:  # a NUL in it
        raise OSError(0, "not a name")
    return "the host's file"
names = [door + "@canary@" for door in doors] + ["@canary@\\0", "main.py\\0/../..@canary@", "file://@canary@"]
every("paths", [(n[:40], lambda n=n: read(n)) for n in names])
"""

_LINKS = """
up = "/".join([".."] * 12)
os.makedirs("a/b/c")
link("..", "one")
for n in range(8):
    link(f"{'one' if n == 0 else f'chain{n - 1}'}/..", f"chain{n}")
link("../../..", "a/b/c/top")      # inside, as long as it stays there
link("../..", "a/b/out")
link(up, "far")
link("loop", "loop")
moves = (("a/b/c", "c"), ("a/b", "/tmp/b"), ("c", "/tmp/c"), ("/tmp/b", "b"), ("a", "../a"), ("/tmp", "/tmp2"),
         ("/workspace", "/tmp/w"), ("/tmp/c", "/usr/local/lib/c"), ("main.py", "/tmp/../main.py"))
ends = ["one", "far", "loop", "a/b/c/top", "a/b/out", "a/b/out/..", *[f"chain{n}" for n in range(8)]]
handle = os.open("a/b/c", os.O_RDONLY)
own = set()
def inside():
    for folder in (".", "/tmp", *(["/usr/local/lib"] if sys.platform == "wasi" else [])):
        for at, _, _ in os.walk(folder):
            info = os.stat(at)
            own.add((info.st_dev, info.st_ino))
def look():
    inside()
    for end in (*ends, "c/top", "/tmp/c/top", "/tmp/b/out", "b/out", "b/out/..", "/tmp/b/../.."):
        try:
            print(open(end + "@canary@").read())
        except OSError:
            pass
        else:
            escaped(f"through {end}")
        try:
            info = os.stat(end)
        except OSError:
            continue
        if sys.platform == "wasi" and (info.st_dev, info.st_ino) not in own:
            escaped(f"{end} leads outside: {os.listdir(end)[:5]}")
look()
done = 0
for old, new in moves:
    try:
        os.rename(old, new)
        done += 1
    except OSError:
        pass
    look()
    try:
        print(open(up + "@canary@", opener=lambda path, flags: os.open(path, flags, dir_fd=handle)).read())
    except OSError:
        continue
    escaped("by a handle that was moved")
held(f"no link leads out, after {done} moves")
"""

_WORKER = """
names = ["/belljar/worker.py", "/belljar/python.cwasm", "/belljar/lib/python315.zip", "/belljar",
         "../../../belljar/worker.py", "/oldroot", "../stdin", "/tmp/../stdin"]
if sys.platform == "wasi":
    names += ["/proc/self/mem", "/proc/self/maps", "/proc/self/environ", "/proc/1/root", "/dev/fd/0", "/etc/passwd"]
every("worker", [(n, lambda n=n: os.open(n, os.O_RDONLY)) for n in names])
"""

_LIBRARY = """
import sysconfig
place = "/usr/local/lib" if sys.platform == "wasi" else sysconfig.get_path("stdlib")
file = os.path.join(place, "python315.zip" if sys.platform == "wasi" else "os.py")
new = os.path.join(place, "belljar-@marker@")
def make():
    os.mkdir(new)
    os.rmdir(new)
def create():
    open(new, "x").close()
    os.unlink(new)
def move():
    os.rename(file, file + ".moved")
    os.rename(file + ".moved", file)
every("library", [
    ("open", lambda: os.open(file, os.O_RDWR)), ("append", lambda: open(file, "ab")), ("mkdir", make),
    ("create", create), ("rename", move), ("link", lambda: os.link(file, new)),
    ("link here", lambda: (os.link(file, "mine.zip"), open("mine.zip", "ab"))), ("utime", lambda: os.utime(file)),
    ("symlink", lambda: os.symlink("python315.zip", new)),
])
"""

_LEAVE_FILES = """
for folder in ("/tmp", "/workspace", "/var/tmp"):
    for name in ("@marker@-left", "sitecustomize.py", "json.py"):
        try:
            with open(f"{folder}/{name}", "w") as file:
                file.write("raise SystemExit('@marker@ was here')")
        except OSError:
            pass
held("left what it could")
"""

_LEAVE = """
import builtins, time
builtins.print = lambda *a, **k: os.write(1, b"@marker@ patched\\\\n")
builtins.belljar_mark = "@marker@"
sys.modules["@marker@"] = sys
sys.path.insert(0, "/tmp")
os.environ["BELLJAR_MARK"] = "@marker@"
os.putenv("BELLJAR_MARK_TOO", "@marker@")
for fd in range(64):
    try:
        os.close(fd) if fd not in (1, 2) else None
    except OSError:
        pass
time.time = lambda: 0.0
held("left what it could")
"""

_LOOK = """
import builtins, json, time
found = [name for name in ("belljar_mark",) if hasattr(builtins, name)]
found += [name for name in sys.modules if "@marker@" in name]
found += [f"{key}={value}" for key, value in os.environ.items() if "@marker@" in value]
for folder in ("/tmp", "/workspace", "/var/tmp", "."):
    try:
        names = os.listdir(folder)
    except OSError:
        continue
    found += [f"{folder}/{n}" for n in names if "@marker@" in n or n in ("json.py", "sitecustomize.py")]
if time.time() < 1e9 or "/tmp" in sys.path:
    found.append("the interpreter is the one before")
os.stat("/workspace")
sys.stdin.read()
escaped(found) if found else held("nothing of the one before is left")
"""

_SPEAK = """
import time
print("READY", flush=True)
for _ in range(40):
    print("@marker@ of the first", flush=True)
    time.sleep(0.05)
"""

_FORGE = """
import json
lies = [{"done": n, "exit_code": 0, "trap": "", "memory": 1} for n in range(1, 60)]
lies += [{"stream": "stderr", "data": "Zm9yZ2Vk"}, {}, [], None, {"ready": True}, {"done": [1]}, {"stream": []}]
text = "\\n" + "\\n".join(map(json.dumps, lies)) + "\\n"
for fd in (1, 2):
    os.write(fd, text.encode())
    for byte in text.encode()[:300]:
        os.write(fd, bytes([byte]))
    os.write(fd, b"\\xff\\xfe\\0" + b"{" * 5000 + b"\\n")
os.write(1, b"\\nto the end\\n")
os._exit(43)
"""


def _flood(what: str, call: str) -> Attack:
    return Attack(
        name=f"flood of {what}", category="wasm", tries=f"asks for {what} without end, and outstays its time",
        payload=_FLOOD.format(call=call), held="it is ended when its time is up", options={"timeout": 1.5},
        ends=LATE | {Status.OUTPUT_LIMIT}, after=in_time,
    )  # fmt: skip


def _not_believed(result: Result, bait: object) -> str:
    """It ended with 43 and said so much; whoever takes its text for the worker's word knows less."""
    if result.exit_code != 43 or result.status is not Status.ERROR:
        return f"the forged end was believed: {result.status.value}, exit code {result.exit_code}"
    return "" if "to the end" in result.stdout else "not all of its output came back"


WASM = (
    Attack(
        name="memory again and again", category="wasm", tries="fills its memory to the limit of 96 MB twelve times",
        payload=_FILL, held="it is refused, or killed", options={"memory": "96M"}, ends=OOM,
    ),
    Attack(
        name="huge allocations", category="wasm", tries="asks for gigabytes at once with a limit of 96 MB",
        payload=_HUGE, held="they are refused, or it is killed", options={"memory": "96M"}, ends=OOM,
        control="none", uncontrolled="it would take gigabytes of the host's own memory",
    ),
    Attack(
        name="exhausted stack", category="wasm",
        tries="recurses without end, in Python and in C, in six ways, and looks whether the next guest still runs",
        payload="held('see the scenario')", held="each ends by itself, and the next one runs", options=_CRASHES,
        scenario=scenarios.exhausted_stack, control="none", uncontrolled=_ONE_WORKER,
    ),
    _flood("the time", "time.time()"),
    _flood("file information", "os.stat('.')"),
    _flood("folders", "os.mkdir('d'); os.rmdir('d')"),
    _flood("empty output", "os.write(1, b'')"),
    Attack(
        name="paths out of the root", category="wasm", tries="reads a host file by climbing, absolute and broken names",
        payload=_PATHS, held="no name leads out",
    ),
    Attack(
        name="links out of the root", category="wasm",
        tries="builds chains of relative links, then moves the folders that hold them, also to another root",
        payload=_LINKS, held="no link leads out",
        control="none", uncontrolled="it moves folders about, which on the host would be those of others",
    ),
    Attack(
        name="worker's files", category="wasm", tries="opens the program, module and memory of the worker around it",
        payload=_WORKER, held="they are out of reach", control="none", uncontrolled=_ONE_WORKER,
    ),
    Attack(
        name="library", category="wasm", tries="changes the standard library that the next guest will import",
        payload=_LIBRARY, held="it is read-only",
        control="none", uncontrolled="it would touch the host's own library",
    ),
    Attack(
        name="other sandboxes' folders", category="wasm",
        tries="looks around and above its folders for those of another sandbox",
        neighbour="""
import time
open("/workspace/@marker@-mark-box", "w").close()
open("/tmp/@marker@-mark-box", "w").close()
print("READY", flush=True)
time.sleep(15)
""",
        payload="""
def look(folder):
    found = [n for n in os.listdir(folder) if n.startswith(("bj-", "@marker@-mark-box"))]
    if not found:
        raise OSError(0, "not there")
    return found
places = ("/", "/tmp", "/tmp/..", "/tmp/../..", "/workspace", "/workspace/..", "..", "../..", "../../tmp",
          "/proc/1/root/tmp")
every("look", [(p, lambda p=p: look(p)) for p in places])
""",
        held="it finds nothing", control="none", uncontrolled="shown by `neighbour's files`",
    ),
    Attack(
        name="state for the next guest", category="wasm",
        tries="leaves patched builtins, modules, variables and closed descriptors for the guest after it",
        payload=_LEAVE, held="the next one finds nothing", options=_STATE,
        scenario=scenarios.state_for_the_next(_LOOK), control="none", uncontrolled=_ONE_WORKER,
    ),
    Attack(
        name="files for the next guest", category="wasm",
        tries="leaves files for the guest after it, some of them named like modules that it imports",
        payload=_LEAVE_FILES, held="the next one finds nothing", options=_STATE_FILES,
        scenario=scenarios.state_for_the_next(_LOOK), control="none", uncontrolled=_ONE_WORKER,
    ),
    Attack(
        name="output of a cancelled guest", category="wasm",
        tries="goes on talking after its caller has gone, so that the next caller hears it",
        payload=_SPEAK, held="the next caller hears its own guest only", options=_CUT,
        scenario=scenarios.cancelled_guest, control="none", uncontrolled=_ONE_WORKER,
    ),
    Attack(
        name="two commands at once", category="wasm", tries="runs two commands in one sandbox at the same time",
        payload="held('see the scenario')", held="each caller gets what its own command said",
        scenario=scenarios.two_at_once, control="none", uncontrolled=_ONE_WORKER,
    ),
    Attack(
        name="forged frames", category="wasm", tries="prints what a worker says to Belljar: that it ended well",
        payload=_FORGE, held="what a guest prints is only output", ends=frozenset({Status.ERROR}), after=_not_believed,
        control="none", uncontrolled="the wall is the worker's framing; a backend without workers has nothing to show",
    ),
)  # fmt: skip
