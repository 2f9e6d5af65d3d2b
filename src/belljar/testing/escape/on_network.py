"""Attacks by network and by signal. Only loopback is ever connected to; of other addresses the kernel is asked
for a route (a UDP `connect`, which sends nothing)."""

from __future__ import annotations

from belljar.testing.escape.attacks import Attack

_CONNECT = """
import socket
s = socket.socket(socket.{family}, socket.SOCK_STREAM)
s.settimeout(3)
refused("connect", lambda: s.connect({address}))
"""
_ROUTE = """
import socket
def route(family, address):
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        s.connect((address, 53))
        return s.getsockname()[0]
every("route", [(a, lambda a=a: route(socket.{family}, a)) for a in {addresses}])
"""


def _route(name: str, tries: str, addresses: tuple[str, ...], family: str = "AF_INET") -> Attack:
    return Attack(
        name=name, category="network", tries=tries, held="the kernel knows no route",
        payload=_ROUTE.format(family=family, addresses=addresses),
    )  # fmt: skip


NETWORK = (
    Attack(
        name="loopback service", category="network", tries="connects to a service on the host's 127.0.0.1",
        payload=_CONNECT.format(family="AF_INET", address='("127.0.0.1", @port4@)'),
        held="the guest's loopback is not the host's",
    ),
    Attack(
        name="loopback service by IPv6", category="network", tries="connects to a service on the host's ::1",
        payload=_CONNECT.format(family="AF_INET6", address='("::1", @port6@)'),
        held="the guest's loopback is not the host's",
    ),
    Attack(
        name="abstract socket", category="network", tries="connects to an abstract unix socket of the host",
        payload=_CONNECT.format(family="AF_UNIX", address='"\\0@abstract@"'),
        held="the name does not exist inside",
    ),
    Attack(
        name="abstract sockets in sight", category="network",
        tries="connects to each abstract socket that it can see, as containerd's shims once had them",
        payload="""
import socket
def connect(name):
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as plug:
            plug.settimeout(3)
            try:
                plug.connect(name)
                return "connected"
            except OSError as error:
                last = error
    raise last
seen = [line.split()[7] for line in open("/proc/net/unix").read().splitlines()[1:] if len(line.split()) > 7]
every("connect", [(name, lambda name=name: connect("\\0" + name[1:])) for name in seen if name[0] == "\\x40"])
""",
        held="none is in sight",
    ),
    Attack(
        name="engine's API", category="network",
        tries="connects to an engine's API on loopback, and looks for a route to it on the engines' bridges",
        payload="""
import socket
def connect(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as plug:
        plug.settimeout(3)
        plug.connect(address)
        return "connected"
def route(address):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plug:
        plug.connect((address, 2375))
        return plug.getsockname()[0]
ports = (2375, 2376, 2377, 4243, @port4@)
doors = [(f"127.0.0.1:{p}", lambda p=p: connect(socket.AF_INET, ("127.0.0.1", p))) for p in ports]
doors += [(f"[::1]:{p}", lambda p=p: connect(socket.AF_INET6, ("::1", p))) for p in ports]
bridges = ("172.17.0.1", "172.18.0.1", "10.88.0.1", "10.0.2.2", "192.168.65.1", "192.168.127.1")
every("API", doors + [(f"route to {a}", lambda a=a: route(a)) for a in bridges])
""",
        held="nothing listens inside, and no bridge can be reached",
    ),
    Attack(
        name="loopback through the proxy", category="network",
        tries="with a host granted, asks the proxy for the loopback outside: by that name, by addresses in many forms",
        payload="""
import socket
def through(target):
    with socket.create_connection(("127.0.0.1", 3128), timeout=10) as plug:
        plug.sendall(b"CONNECT " + target.encode() + b" HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
        answer = plug.recv(400)
    if answer.split(b" ")[1:2] == [b"200"]:
        return answer
    raise OSError(0, answer.split(b"\\r\\n")[0].decode("ascii", "replace") or "no answer")
hosts = ("localhost", "LOCALHOST.", "127.0.0.1", "127.1", "2130706433", "0x7f000001", "017700000001", "0.0.0.0",
         "[::1]", "[::ffff:127.0.0.1]", "[::ffff:0:127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[::]")
every("proxy", [(f"{host}:{port}", lambda host=host, port=port: through(f"{host}:{port}"))
                for host in hosts for port in (@port4@, 443)])
""",
        held="names that lead to the host are refused, and addresses always", options={"net": ("localhost",)},
        control="none", uncontrolled="a bare process has no proxy; tests/sandbox/test_egress.py shows one that answers",
    ),
    Attack(
        name="private addresses of an open network", category="network",
        tries="with any host granted, asks the proxy for addresses that are not public: by tunnels and in plain HTTP",
        payload="""
import socket
def asked(request):
    with socket.create_connection(("127.0.0.1", 3128), timeout=20) as plug:
        plug.sendall(request.encode("latin-1") + b"\\r\\n\\r\\n")
        answer = plug.recv(400)
    if answer.split(b" ")[1:2] not in ([b"403"], [b"400"]):
        return answer
    raise OSError(0, answer.split(b"\\r\\n")[0].decode("ascii", "replace"))
hosts = ("localhost", "127.0.0.1", "0.0.0.0", "10.0.0.1", "172.17.0.1", "192.168.0.1", "169.254.169.254", "[::1]",
         "[fd00:ec2::254]", "[::ffff:127.0.0.1]", "[64:ff9b::a9fe:a9fe]", "[2002:7f00:1::]", "224.0.0.1")
ports = (@port4@, 80, 443)
doors = [(f"CONNECT {h}:{p}", lambda h=h, p=p: asked(f"CONNECT {h}:{p} HTTP/1.1")) for h in hosts for p in ports]
doors += [(f"GET {h}:{p}", lambda h=h, p=p: asked(f"GET http://{h}:{p}/ HTTP/1.1\\r\\nHost: {h}:{p}"))
          for h in hosts for p in ports]
doors += [(repr(r), lambda r=r: asked(r)) for r in (
    "GET http://example.invalid/ HTTP/1.1\\r\\nHost: localhost:@port4@",
    "GET / HTTP/1.1\\r\\nHost: localhost:@port4@",
    "CONNECT localhost\\0.example.org:443 HTTP/1.1",
    "POST http://localhost:@port4@/ HTTP/1.1\\r\\nHost: localhost:@port4@\\r\\nContent-Length: 1\\r\\n" * 2,
)]
every("proxy", doors)
""",
        held="all are refused", options={"net": ("*",)},
        control="none", uncontrolled="a bare process has no proxy; tests/sandbox/test_egress_proxy.py has one",
    ),
    Attack(
        name="socket by path", category="network", tries="connects to a unix socket of the host by its path",
        payload=_CONNECT.format(family="AF_UNIX", address='"@socket@"'), held="the path does not exist inside",
    ),
    _route("metadata service", "looks for a route to the cloud's metadata", ("169.254.169.254", "169.254.170.2")),
    _route("DNS", "looks for a route to a name server", ("8.8.8.8", "1.1.1.1", "9.9.9.9")),
    _route("private networks", "looks for a route into private networks", ("10.0.0.1", "172.17.0.1", "192.168.0.1")),
    _route("IPv6", "looks for a route by IPv6", ("2001:4860:4860::8888", "fd00:ec2::254", "fd00::1"), "AF_INET6"),
    Attack(
        name="interfaces", category="network", tries="looks for a network interface other than loopback",
        payload="""
import socket
try:
    names = [name for _, name in socket.if_nameindex()]
except OSError as error:
    held(error)
# Kernels with these tunnels built in put an idle one into every network namespace.
idle = {"lo", "tunl0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0", "sit0", "ip6tnl0", "ip6gre0"}
others = sorted(set(names) - idle)
escaped(others) if others else held(names)
""",
        held="there is only loopback",
    ),
    Attack(
        name="raw socket", category="network", tries="opens a raw ICMP socket",
        payload="""
import socket
every("socket", [
    ("AF_INET", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)),
    ("AF_INET6", lambda: socket.socket(socket.AF_INET6, socket.SOCK_RAW, 58)),
])
""",
        held="it is refused", control="root",
    ),
    Attack(
        name="packet socket", category="network", tries="opens a packet socket, to read all traffic",
        payload='import socket; refused("AF_PACKET", lambda: socket.socket(17, socket.SOCK_RAW, 0))',
        held="it is refused", control="root",
    ),
    Attack(
        name="vsock", category="network", tries="opens a socket to the hypervisor",
        payload='import socket; refused("AF_VSOCK", lambda: socket.socket(40, socket.SOCK_STREAM))',
        held="it is refused",
    ),
    Attack(
        name="rare socket families", category="network", tries="opens sockets of families known for kernel bugs",
        payload="""
import socket
families = {"ALG": (38, 5), "KEY": (15, 3), "TIPC": (30, 2), "CAN": (29, 3), "RDS": (21, 5), "X25": (9, 5),
            "KCM": (41, 2),
            "BLUETOOTH": (31, 3), "NFC": (39, 3), "PHONET": (35, 2), "XDP": (44, 3), "SMC": (43, 1), "QIPCRTR": (42, 2)}
every("socket", [(n, lambda f=f, t=t: socket.socket(f, t)) for n, (f, t) in families.items()])
""",
        held="all are refused", control="root",
    ),
    Attack(
        name="netlink", category="network", tries="switches an interface on by netlink (one that is on already)",
        payload="""
import socket
s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
s.settimeout(3)
s.send(struct.pack("=IHHII", 32, 16, 5, 1, 0) + struct.pack("=BxHiII", 0, 0, 1, 1, 1))  # RTM_NEWLINK lo IFF_UP
code = -struct.unpack_from("=i", s.recv(4096), 16)[0]
held(errno.errorcode[code]) if code in WALLS else escaped("the kernel took the order")
""",
        held="the kernel refuses the order", control="root",
    ),
    Attack(
        name="other netlink doors", category="network",
        tries="opens netlink sockets for audit, firewall, IPsec and uevents",
        payload="""
import socket
doors = {"xfrm": 6, "audit": 9, "netfilter": 12, "uevent": 15, "generic": 16, "crypto": 21}
every("netlink", [(n, lambda p=p: socket.socket(16, socket.SOCK_RAW, p)) for n, p in doors.items()])
""",
        held="all are refused",
    ),
)  # fmt: skip

SIGNALS = (
    Attack(
        name="signal a host process", category="processes", tries="signals a process of the host by its pid",
        payload='import signal; refused("kill", lambda: (os.kill(@victim@, signal.SIGCONT), "delivered"))',
        held="there is no such process inside",
    ),
    Attack(
        name="signal Belljar", category="processes",
        tries="signals Belljar itself by its pid (signal 0, which only asks)",
        payload='refused("kill", lambda: (os.kill(@belljar@, 0), "within reach"))',
        held="there is no such process inside",
    ),
    Attack(
        name="pidfd of a host process", category="processes", tries="opens a handle on a process of the host",
        payload="""
value, error = call("pidfd_open", @victim@, 0)
held(errno.errorcode[error]) if value == -1 and error in (*WALLS, errno.ESRCH) else escaped(f"{value} {error}")
""",
        held="there is no such process inside",
    ),
    Attack(
        name="System V memory", category="processes", tries="attaches a System V segment of the host",
        payload="""
import ctypes
value, error = call("shmget", @shm_key@, 0, 0)
if value == -1:
    held(errno.errorcode[error])
address, _ = call("shmat", value, None, 0o10000)
print(ctypes.string_at(address, 64)) if address != -1 else None
escaped(f"segment {value}")
""",
        held="the key does not exist inside",
    ),
)  # fmt: skip
