"""Attacks of one sandbox on another that runs at the same time: one leaves a mark, the other looks for it."""

from __future__ import annotations

from belljar.testing.escape.attacks import Attack

# Says READY and waits, so that the mark is there while the other one looks.
_STAY = """
import time
print("READY", flush=True)
time.sleep(15)
"""


def _neighbour(name: str, tries: str, leaves: str, looks: str) -> Attack:
    return Attack(
        name=name, category="neighbours", tries=tries, held="it finds nothing",
        neighbour=leaves + _STAY, payload=looks,
    )  # fmt: skip


_FIND_FILE = """
def look(folder):
    found = [name for name in os.listdir(folder) if name.startswith("@marker@-mark")]
    if not found:
        raise OSError(0, "not there")
    return found
every("look", [(f, lambda f=f: look(f)) for f in {folders}])
"""

NEIGHBOURS = (
    _neighbour(
        "neighbour's files", "looks for a file that the other left in /tmp and /var/tmp",
        """
for folder in ("/tmp", "/var/tmp"):
    try:
        open(folder + "/@marker@-mark-files", "w").close()
    except OSError:
        pass
""",
        _FIND_FILE.format(folders='("/tmp", "/var/tmp", "/workspace")'),
    ),
    _neighbour(
        "neighbour's shared memory", "looks for a file that the other left in /dev/shm",
        """
try:
    open("/dev/shm/@marker@-mark-shm", "w").close()
except OSError as error:
    held(error)
""",
        _FIND_FILE.format(folders='("/dev/shm", "/run/shm")'),
    ),
    _neighbour(
        "neighbour's System V IPC", "looks for the other's System V segment by its key",
        """
value, error = call("shmget", @shm_key@ ^ 0x2AAAAAAA, 4096, 0o1666)
if value == -1:
    held(errno.errorcode[error])
""",
        """
value, error = call("shmget", @shm_key@ ^ 0x2AAAAAAA, 0, 0)
if value == -1:
    held(errno.errorcode[error])
import ctypes
ctypes.CDLL(None).shmctl(value, 0, None)
escaped(f"segment {value}")
""",
    ),
    _neighbour(
        "neighbour's message queue", "looks for the other's POSIX message queue",
        """
try:
    import ctypes
    queue = ctypes.CDLL(None).mq_open(b"/@marker@", os.O_CREAT | os.O_RDWR, 0o666, None)
except (ImportError, OSError, AttributeError) as error:
    held(error)
if queue < 0:
    held("no queue can be made")
""",
        """
try:
    import ctypes
    libc = ctypes.CDLL(None)
    queue = libc.mq_open(b"/@marker@", os.O_RDONLY)
except (ImportError, OSError, AttributeError) as error:
    held(error)
if queue < 0:
    held("there is no such queue")
libc.mq_unlink(b"/@marker@")
escaped("opened the queue")
""",
    ),
    _neighbour(
        "neighbour's abstract socket", "connects to the other's abstract socket",
        """
import socket
s = socket.socket(socket.AF_UNIX)
s.bind("\\0@marker@-neighbour")
s.listen(1)
""",
        """
import socket
s = socket.socket(socket.AF_UNIX)
refused("connect", lambda: s.connect("\\0@marker@-neighbour"))
""",
    ),
    _neighbour(
        "neighbour's port", "connects to a port that the other listens on",
        """
import socket
s = socket.socket(socket.AF_INET)
s.bind(("127.0.0.1", @free_port@))
s.listen(1)
""",
        """
import socket
s = socket.socket(socket.AF_INET)
s.settimeout(3)
refused("connect", lambda: s.connect(("127.0.0.1", @free_port@)))
""",
    ),
    _neighbour(
        "neighbour's processes", "looks for the other among the processes it can see",
        """
need("fork")
if os.fork() == 0:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(15)", "@marker@-neighbour"])
""",
        """
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if "@marker@-neighbour" in open(f"/proc/{pid}/cmdline").read():
            os.kill(int(pid), 0)
            escaped(f"process {pid}")
    except OSError:
        pass
held("not to be seen")
""",
    ),
)  # fmt: skip
