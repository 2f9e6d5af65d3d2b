"""A folder of the host, granted to a command: read-only unless `write` is said."""

import tempfile
from pathlib import Path

import belljar

with tempfile.TemporaryDirectory() as name:
    project = Path(name)
    (project / "greeting.txt").write_text("hello\n")

    looked = belljar.run(command=["cat", "greeting.txt"], workspace=name)
    print("read-only, reading:", looked.stdout.strip())

    refused = belljar.run(command=["sh", "-c", "echo changed > greeting.txt"], workspace=name)
    print(
        "read-only, writing:", refused.status, "- the file still says", (project / "greeting.txt").read_text().strip()
    )

    belljar.run(command=["sh", "-c", "echo changed > greeting.txt"], workspace=name, write=True)
    print("granted, writing: the file says", (project / "greeting.txt").read_text().strip())

try:
    belljar.run("print(1)", workspace="/etc")
except belljar.PolicyDenied as denied:
    print("refused:", denied.message)
