"""Attacks on whoever takes something out of a sandbox, puts something in, shows its output or starts it."""

from __future__ import annotations

from collections.abc import Callable

from belljar.core import display
from belljar.core.result import Result
from belljar.core.values import MIB, guest_path
from belljar.testing.escape import scenarios
from belljar.testing.escape.attacks import Attack
from belljar.testing.escape.bait import Bait

_ALL = {"collect": ("*",)}
_MOST = 64 * MIB


def _only(*names: str) -> Callable[[Result, Bait], str]:
    def look(result: Result, bait: Bait) -> str:
        extra = sorted({file.path for file in result.files} - set(names))
        return f"collected {extra}" if extra else ""

    return look


def _plain_names(result: Result, bait: Bait) -> str:
    for file in result.files:
        try:
            guest_path(file.path)
        except ValueError as error:
            return f"collected a file whose name is not plain: {error}"
    return ""


def _only_its_own(result: Result, bait: Bait) -> str:
    for file in result.files:
        if file.content != b"mine":
            return f"collected {file.path!r}, which the guest did not write"
    return _plain_names(result, bait) or bait.dropped()


def _not_too_much(result: Result, bait: Bait) -> str:
    size = sum(len(file.content) for file in result.files)
    return f"{size // MIB} MB were collected" if size > _MOST else ""


def _dropped(result: Result, bait: Bait) -> str:
    return bait.dropped()


def _shown_safely(result: Result, bait: Bait) -> str:
    shown = display.neutralise(result.stdout)
    raw = sorted({hex(ord(c)) for c in shown if (ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160})
    if "printed" not in result.stdout:
        return "nothing was printed, which proves nothing"
    return f"control characters would reach the terminal: {', '.join(raw)}" if raw else ""


OUTPUTS = (
    Attack(
        name="symlink", category="outputs", tries="leaves symbolic links to host files to be collected",
        payload="""
pairs = (("@canary@", "link.txt"), ("@folder@", "folder"), ("../../../../../../../..@canary@", "climbing.txt"))
held(f"left {sum([link(*pair) for pair in pairs])} of 3 links")
""",
        held="no link is followed", options=_ALL, after=_only(),
    ),
    Attack(
        name="link to a process's root", category="outputs",
        tries="leaves a link by way of /proc/self/root and /proc/self/cwd",
        payload="""
targets = ("/proc/self/root@canary@", "/proc/self/environ", "../../../../../../proc/self/root@canary@")
held(f"left {sum([link(target, f'{n}.txt') for n, target in enumerate(targets)])} of 3 links")
""",
        held="no link is followed", options=_ALL, after=_only(),
    ),
    Attack(
        name="hard link", category="outputs", tries="leaves a hard link to a host file to be collected",
        payload="""
def take(path):
    os.link(path, os.path.basename(path))
    return "linked"
every("link", [(p, lambda p=p: take(p)) for p in ("@canary@", "/etc/passwd", "/usr/bin/env")])
""",
        held="it cannot be made", options=_ALL,
    ),
    Attack(
        name="pipe", category="outputs", tries="leaves a FIFO, on which a careless reader waits for ever",
        payload='need("mkfifo"); os.mkfifo("pipe.txt"); held("left a pipe")',
        held="it is left out", options=_ALL, after=_only(),
    ),
    Attack(
        name="socket", category="outputs", tries="leaves a socket to be collected",
        payload="""
import socket
try:
    socket.socket(socket.AF_UNIX).bind("socket.txt")
except OSError as error:
    held(error)
held("left a socket")
""",
        held="it is left out", options=_ALL, after=_only(),
    ),
    Attack(
        name="device", category="outputs", tries="leaves the device of endless zeros to be collected",
        payload="""
import stat
need("mknod")
refused("mknod", lambda: os.mknod("zero.txt", stat.S_IFCHR | 0o666, os.makedev(1, 5)))
""",
        held="it cannot be made", options=_ALL, after=_only(), control="root",
    ),
    Attack(
        name="hostile names", category="outputs", tries="leaves files named to confuse paths, logs and terminals",
        payload="""
for name in (b"new\\nline", b"esc\\x1b[2J", b"back\\\\slash", b"..\\\\..\\\\up", b"bad\\xff\\xfe", b"-rf", b"x" * 255):
    try:
        open(name, "w").close()
    except (OSError, UnicodeError):
        pass
held("left what it could")
""",
        held="only plain names leave", options=_ALL, after=_plain_names,
    ),
    Attack(
        name="archive traversal", category="outputs",
        tries="leaves files whose names, in a list or on the command line of an archiver, are other files or options",
        payload="""
names = (b"n\\n/etc/passwd", b"n\\n./../etc/passwd", b"n\\n@drop@/by-name", b"--checkpoint=1", b"-T", b"-C",
         b"--checkpoint-action=exec=sh x", b"--to-command=sh x", b"--files-from=x", b"-P", b"x", b"a -> b")
for name in names:
    try:
        os.makedirs(os.path.dirname(name) or b".", exist_ok=True)
        with open(name, "wb") as file:
            file.write(b"mine")
    except (OSError, UnicodeError):
        pass
held("left what it could")
""",
        held="only what it wrote leaves, under plain names", options=_ALL | {"collect": ("**",)}, after=_only_its_own,
    ),
    Attack(
        name="sparse file", category="outputs", tries="leaves a file of 80 MB that takes no space inside",
        payload='open("huge.bin", "wb").truncate(80 << 20); held("left it")',
        held="what may be collected is capped", options=_ALL, after=_not_too_much,
    ),
    Attack(
        name="deep tree", category="outputs", tries="leaves 3,000 folders one in another",
        payload="""
for _ in range(3000):
    try:
        os.mkdir("d")
        os.chdir("d")
    except OSError:
        break
try:
    open("bottom.txt", "w").close()
except OSError:  # deeper than a name may be long
    pass
held("left a deep tree")
""",
        held="the collector stops in time and does not fail", options=_ALL,
    ),
    Attack(
        name="swap while collected", category="outputs",
        tries="leaves a process that swaps a file for a link to a host file, over and over",
        payload="""
need("fork")
import time
if os.fork() == 0:
    os.setsid()
    end = time.monotonic() + 5
    while time.monotonic() < end:
        for make in (lambda: open("s", "w").close(), lambda: os.symlink("@canary@", "s")):
            make()
            os.rename("s", "swapped.txt")
    os._exit(0)
time.sleep(0.1)
held("left a racer")
""",
        held="no process is left to race, and no link is followed", options=_ALL,
    ),
)  # fmt: skip

NAMES = (
    Attack(
        name="twisted workspace", category="outputs",
        tries="leaves a sparse file of 8 GB in a granted folder, then turns files into folders and folders into files",
        payload="""
open("file", "w").close()
os.mkdir("folder")
open("folder/inside", "w").close()
open("huge", "wb").truncate(8 << 30)
held("made")
""",
        held="there is a result all the same", scenario=scenarios.twisted_workspace, needs_workspace=True,
        control="none", uncontrolled="the wall is the copying back, which a backend without walls does not do",
    ),
    Attack(
        name="names that climb", category="names", tries="has Belljar write, read and collect by names with `..`",
        payload="held('ran')", held="each such name is refused", scenario=scenarios.climbing_names,
        control="none", uncontrolled="the wall is the request's own validation, before any backend",
    ),
    Attack(
        name="write through a link", category="names",
        tries="turns a folder of the sandbox into a link to the host before Belljar writes into it",
        payload='link("@drop@", "inbox") or link("../../../../../..@drop@", "inbox"); held("linked")',
        held="nothing appears on the host", scenario=scenarios.write_through_link, after=_dropped,
    ),
    Attack(
        name="read through a link", category="names", tries="has Belljar read a link to a host file by name",
        payload='link("@canary@", "report.txt") or link("../../../../../..@canary@", "report.txt"); held("linked")',
        held="the link is not followed", scenario=scenarios.read_through_link,
    ),
    Attack(
        name="next command's files", category="names",
        tries="leaves links where the next command's input files will be put",
        payload="""
link("/oldroot@drop@/by-oldroot", "first.txt")
link("@drop@/by-path", "second.txt") or link("../../../../../..@drop@/by-path", "second.txt")
link("../oldroot@drop@", "third")
link("../../../..@drop@", "fourth")
held("linked")
""",
        held="nothing appears on the host", scenario=scenarios.files_over_links, after=_dropped,
    ),
    Attack(
        name="granted folder becomes a link", category="names",
        tries="turns a folder of a granted workspace into a link to /etc before that folder is granted itself",
        payload="""
try:
    os.symlink("/etc", "src")
except PermissionError:
    held("no such link can be made here")
else:
    held("linked")
""",
        held="the grant is refused, or the link never reaches the host", scenario=scenarios.granted_link,
        needs_workspace=True,
        control="none", uncontrolled="the wall is the engine's look at the grant; the test takes it down by itself",
    ),
    Attack(
        name="shell in file names", category="names", tries="names its files so that a shell would run them",
        payload="held('ran')", held="no name is ever given to a shell",
        options={"files": {
            "a;touch @drop@/semicolon;b": "x", "$(touch @drop@/dollar)": "x", "`touch @drop@/tick`": "x",
        }},
        after=_dropped, control="none", uncontrolled="every launcher here takes lists; there is no shell to show it on",
    ),
    Attack(
        name="shell in arguments", category="names", tries="puts shell code into arguments and variables",
        payload="", held="no argument is ever given to a shell",
        options={
            "command": ("echo", "HELD", "$(touch @drop@/dollar)", "; touch @drop@/semicolon"),
            "env": {"X": "$(touch @drop@/variable)", "IFS": ";", "PS4": "$(touch @drop@/ps4)"},
        },
        after=_dropped, control="none", uncontrolled="every launcher here takes lists; there is no shell to show it on",
    ),
    Attack(
        name="launcher's environment", category="names",
        tries="passes variables that would make the host's launcher run code of the guest",
        payload="echo HELD ran", language="bash", held="they reach only the guest",
        options={"env": {
            "BASH_ENV": "@code@/environment.sh", "ENV": "@code@/environment.sh",
            "PYTHONPATH": "@code@", "LD_LIBRARY_PATH": "@code@", "GCONV_PATH": "@code@",
        }},
        after=_dropped,
    ),
    Attack(
        name="settings file", category="names",
        tries="writes a settings file that raises its own caps, for the next run",
        payload="""
with open(".belljar.toml", "w") as file:
    file.write('[caps]\\nmemory = "1T"\\n')
held("written")
""",
        held="a project's file may not raise caps", scenario=scenarios.settings_file, needs_workspace=True,
        control="none", uncontrolled="the wall is the reader of the settings; the test takes it down by itself",
    ),
)  # fmt: skip

TERMINAL = (
    Attack(
        name="controlling terminal", category="terminal", tries="opens the terminal that Belljar was started from",
        payload='refused("/dev/tty", lambda: os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))',
        held="it has none", control="terminal",
    ),
    Attack(
        name="typing into the terminal", category="terminal", tries="pushes keystrokes into a terminal (TIOCSTI)",
        payload="""
import fcntl
every("TIOCSTI", [(str(fd), lambda fd=fd: fcntl.ioctl(fd, 0x5412, b" ")) for fd in (0, 1, 2)])
""",
        held="none of its streams is a terminal", control="terminal",
    ),
    Attack(
        name="escape sequences", category="terminal",
        tries="prints sequences that retitle, recolour and answer for a terminal",
        payload="""
os.write(1, b"\\x1b]0;pwned\\x07\\x1b[2J\\x1b]52;c;cHduZWQ=\\x07\\x1b[6n\\xc2\\x9b31m\\x08\\x08\\x7f\\rprinted\\n")
held("printed")
""",
        held="the command line shows them as symbols", after=_shown_safely,
        control="none", uncontrolled="the wall is `display.neutralise`; the test takes it down by itself",
    ),
)  # fmt: skip
