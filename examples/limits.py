"""Every limit, reached. A limit is a verdict in the result, never an exception."""

import belljar

GUESTS = {
    "time": ("while True: pass", {"timeout": 1}),
    "memory": ("x = bytearray(400 * 1024 * 1024)\nprint(len(x))", {"memory": "64M"}),
    "disk": ("open('big', 'wb').write(bytes(8 << 20))", {"disk": "1M"}),
    "output": ("print('x' * 1_000_000)", {"output": "64K"}),
    "processes": ("import os\nwhile True: os.fork()", {"pids": 16, "timeout": 5}),
}

for name, (code, limits) in GUESTS.items():
    result = belljar.run(code, **limits)
    print(f"{name}: {result.status}, {result.error.error_type}")

try:
    belljar.run("print(1)", timeout=3600)
except belljar.PolicyDenied as denied:
    print("over the cap:", denied.message)
