"""Large folders in a wasm guest: what is listed, and that the time grows with the entries and not with their square."""

from __future__ import annotations

import belljar
from belljar.backends.wasm.backend import Wasm

_LISTED = """
import os, shutil, time

def fill(folder, many, name="{}"):
    os.mkdir(folder)
    for number in range(many):
        os.close(os.open(f"{folder}/{name.format(number)}", os.O_CREAT | os.O_WRONLY))

def seconds(folder):
    started = time.perf_counter()
    os.listdir(folder)
    return time.perf_counter() - started

fill("few", 1000)
fill("many", 8000)
print(sorted(map(int, os.listdir("many"))) == list(range(8000)))
print(min(seconds("many") for _ in range(3)) / min(seconds("few") for _ in range(3)))
"""


async def test_a_folder_of_eight_thousand_files_takes_eight_times_as_long_as_one_of_a_thousand(wasm: Wasm) -> None:
    result = await belljar.arun(_LISTED, backend=wasm, timeout=60)
    assert result.ok, result.stderr
    right, factor = result.stdout.split()
    assert right == "True" and float(factor) < 24, factor  # it was 64


_CHANGED = """
import os, shutil
os.mkdir("long")
names = {f"{number:0200}" for number in range(6000)}  # more than a MiB of entries
for name in names:
    os.close(os.open(f"long/{name}", os.O_CREAT | os.O_WRONLY))
print(set(os.listdir("long")) == names)
os.mkdir("short")
for number in range(3000):
    os.close(os.open(f"short/{number}", os.O_CREAT | os.O_WRONLY))
with os.scandir("short") as entries:  # changed while it is read: those that stay are all there, and once
    seen = []
    for number, entry in enumerate(entries):
        seen.append(entry.name)
        if number < 100:
            os.remove(entry.path)
print(len(seen) == len(set(seen)) == 3000)
print(len(os.listdir("short")))
seen = os.listdir("long")
os.rename("long/" + seen[200], "long/new")
print("new" in os.listdir("long"), os.listdir("long").count(seen[200]))
print(len(os.listdir("/tmp")), len(os.listdir("/workspace")))
shutil.rmtree("long")
print(os.path.exists("long"))
try:
    os.listdir("long")
except FileNotFoundError:
    print("gone")
print(sorted(os.listdir(".")))
"""


async def test_what_a_guest_lists_is_what_is_there_now(wasm: Wasm) -> None:
    for more in ({}, {"deterministic": True}):
        result = await belljar.arun(_CHANGED, backend=wasm, timeout=60, **more)
        assert result.ok, result.stderr
        lines = result.stdout.splitlines()
        assert lines[:4] == ["True", "True", "2900", "True 0"] and lines[5:7] == ["False", "gone"], lines
        assert "main.py" in lines[7]


async def test_inodes_are_the_same_in_every_deterministic_run_that_lists(wasm: Wasm) -> None:
    code = "import os\nfor n in range(300): open(f'{n:030}', 'w').close()\n"
    code += "listed = {entry.name: entry.inode() for entry in os.scandir('.')}\n"
    code += "print(listed == {name: os.stat(name).st_ino for name in os.listdir('.')})"
    result = await belljar.arun(code, backend=wasm, deterministic=True, timeout=60)
    assert result.stdout == "True\n", result.stderr


async def test_javascript_lists_large_folders_too(wasm: Wasm) -> None:
    code = """
    const fs = require("fs");
    for (let n = 0; n < 6000; n++) fs.writeFileSync(`/tmp/${n}`, "");
    const names = fs.readdirSync("/tmp").filter((name) => /^[0-9]+$/.test(name));
    console.log(names.length, new Set(names).size);
    """
    result = await belljar.arun(code, backend=wasm, language="javascript", timeout=60)
    assert result.stdout == "6000 6000\n", result.stderr
