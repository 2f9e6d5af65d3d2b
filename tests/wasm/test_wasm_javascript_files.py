"""What a JavaScript guest of the wasm backend has around it: the files of its box and no others, stdin, a library."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from test_wasm_javascript import Box, start_driver

from belljar.core.result import ErrorType


@pytest.fixture
def box(tmp_path: Path) -> Box:
    driver = start_driver()
    root = tmp_path / "box"
    root.mkdir()
    return Box(driver.driver, driver.engine, root)


def test_the_files_of_the_box_are_read_written_listed_renamed_and_removed(box: Box) -> None:
    code = """const fs = require('fs')
fs.mkdirSync('d/e', { recursive: true })
fs.writeFileSync('d/e/f.txt', 'hé'); fs.appendFileSync('d/e/f.txt', Buffer.from('!'))
console.log(fs.readFileSync('/workspace/d/e/f.txt', 'utf8'), fs.readFileSync('d/e/f.txt').length, fs.readdirSync('.'))
console.log(fs.statSync('d').isDirectory(), fs.statSync('d/e/f.txt').size, fs.existsSync('no'), fs.existsSync('d'))
fs.renameSync('d/e/f.txt', '/tmp/g'); fs.rmSync('d', { recursive: true })
fs.writeFileSync('u', ''); fs.unlinkSync('u')
console.log(fs.readdirSync('/workspace'), fs.readdirSync('/tmp', { withFileTypes: true }).map((e) => e.isFile()))
fs.promises.readFile('/tmp/g', 'utf8').then(console.log)
fs.readFile('/tmp/none', (error) => console.log(error.code, error.message))"""
    # fmt: off
    assert box.prints(code).split("\n") == [
        "hé! 4 [ 'd', 'main.js' ]", "true 4 false true", "[ 'main.js' ] [ true ]", "hé!",
        "ENOENT ENOENT: no such file or directory, open '/tmp/none'", "",
    ]
    # fmt: on
    assert (box.root / "tmp" / "g").read_text() == "hé!"


def test_a_missing_file_is_diagnosed_with_the_line_that_wanted_it(box: Box) -> None:
    failure = box.run("const fs = require('fs')\nfs.readFileSync('gone.csv')").failure()
    assert failure.message == "Error: ENOENT: no such file or directory, open 'gone.csv'"
    assert failure.context["line"] == 2
    assert "/workspace" in failure.suggestion


def test_standard_input_is_read_as_a_file_as_a_stream_and_line_by_line(box: Box) -> None:
    whole = "console.log(require('fs').readFileSync(0, 'utf8').split('\\n').length)"
    stream = "let s = ''; process.stdin.on('data', (d) => { s += d }).on('end', () => console.log('end', s))"
    waits = "for await (const part of process.stdin) console.log(String(part))"
    lines = "import readline from 'readline'; for await (const l of readline.createInterface({ input: process.stdin }))"
    assert box.prints(whole, stdin="a\nb") == "2\n"
    assert box.prints(stream, stdin="a\nb") == "end a\nb\n"
    assert box.prints(waits, stdin="a\nb") == "a\nb\n"
    assert box.prints(f"{lines} console.log('>', l)", stdin="a\nb\n") == "> a\n> b\n"


TRY = """const fs = require('fs')
for (const name of JSON.parse(process.env.NAMES)) {
  for (const work of [() => fs.readFileSync(name, 'utf8'), () => fs.readdirSync(name), () => fs.statSync(name),
    () => fs.writeFileSync(name, 'x'), () => fs.mkdirSync(name + '/made'), () => fs.renameSync('mine', name),
    () => fs.renameSync(name, 'taken'), () => fs.rmSync(name, { recursive: true }), () => require(name)]) {
    try { console.log('REACHED', name, String(work), work()) } catch (error) { if (!error.code) console.log(error) }
  }
}"""


def _tried(box: Box, names: list[str]) -> str:
    return box.prints(TRY, env={"NAMES": json.dumps(names)}, mine="")


def test_no_path_leads_out_of_the_box(box: Box) -> None:
    secret = box.root / "secret.js"
    secret.write_text("exports.x = 1")
    outside = ["/", "/proc", "/proc/self/environ", "/etc/passwd", str(secret), str(box.root), "../secret.js"]
    outside += ["/workspace/../secret.js", "/workspace/../../etc/passwd", "/tmp/../secret.js", "//etc/passwd", "\0/etc"]
    assert _tried(box, outside) == ""
    assert secret.read_text() == "exports.x = 1"


def test_no_link_leads_out_of_the_box(box: Box) -> None:
    secret = box.root / "secret.js"
    secret.write_text("exports.x = 1")
    workspace = box.root / "workspace"
    (workspace / "file").symlink_to(secret)
    (workspace / "up").symlink_to("../secret.js")
    (workspace / "folder").symlink_to(box.root)
    (workspace / "proc").symlink_to("/proc/self")
    code = TRY
    for own in ("fs.rmSync(name, { recursive: true })", "fs.renameSync(name, 'taken')", "fs.renameSync('mine', name)"):
        code = code.replace(own, "fs.statSync(name)")  # those act on the link itself, which is the guest's
    names = ["file", "up", "folder", "folder/secret.js", "proc", "proc/environ", "proc/root/etc/passwd"]
    assert box.prints(code, env={"NAMES": json.dumps(names)}) == ""
    assert secret.read_text() == "exports.x = 1"
    assert sorted(os.listdir(box.root)) == ["secret.js", "stdin", "tmp", "workspace"]


def test_paths_stay_inside_even_when_the_guest_rewrites_what_our_javascript_uses(box: Box) -> None:
    (box.root / "secret").write_text("s3cret")
    code = """const fs = require('fs')
for (const bad of ['../secret', '/workspace/../secret', '/workspace/./../secret', '/workspace//../../etc/passwd']) {
  Array.prototype.join = () => bad.slice(1)
  String.prototype.split = () => [bad]
  try { console.log(fs.readFileSync('x', 'utf8')) } catch (error) { if (!error.code) throw error }
}"""
    assert box.prints(code) == ""


def test_writing_outside_the_box_is_diagnosed_as_not_permitted(box: Box) -> None:
    failure = box.run("require('fs').writeFileSync('/etc/hosts', '')").failure()
    assert failure.error_type is ErrorType.PERMISSION_DENIED


# --- the rest of the library -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("process.argv[1], process.env.WHO, process.cwd(), process.platform", "/workspace/main.js me /workspace linux"),
        ("process.hrtime().length, typeof process.hrtime.bigint(), performance.now() < 1e4", "2 bigint true"),
        ("new TextDecoder().decode(new TextEncoder().encode('hé')), btoa('hi'), atob('aGk=')", "hé aGk= hi"),
        ("structuredClone({ a: new Map([[1, new Date(0)]]) })", "{ a: Map(1) { 1 => 1970-01-01T00:00:00.000Z } }"),
        ("new URL('../x?q=1#h', 'https://Ex.com:443/a/b/c').href", "https://ex.com/a/x?q=1#h"),
        ("new URLSearchParams({ a: 'b c' }).toString(), Buffer.from('hi').toString('hex')", "a=b+c 6869"),
        ("require('path').resolve('a', '../b'), require('path').parse('/x/y.tar.gz').name", "/workspace/b y.tar"),
        ("require('util').format('%s!', 'a'), require('util').inspect({ a: { b: {} } }, { depth: 0 })",
         "a! { a: [Object] }"),
        ("(() => { try { require('assert').deepStrictEqual({ a: [1] }, { a: [2] }) } catch (e) { return e.code } })()",
         "ERR_ASSERTION"),
        ("new (require('events'))().once('x', (v) => console.log('heard', v)).emit('x', 5)", "heard 5\ntrue"),
        ("[3, 1, 2].toSorted(), Object.groupBy([1, 2], (n) => n % 2 ? 'odd' : 'even').odd, [1, 2].at(-1)",
         "[ 1, 2, 3 ] [ 1 ] 2"),
        ("(1234567.891).toLocaleString(), (5).toLocaleString('en-US', { style: 'currency', currency: 'USD' })",
         "1,234,567.891 $5.00"),
        ("['b', 'a', 'C', 'é', 'A'].sort((x, y) => x.localeCompare(y)).join('')", "aAbCé"),
        ("new Date(0).getTimezoneOffset(), Math.abs(Date.now() - new Date()) < 1000", "0 true"),
    ],
)  # fmt: skip
def test_the_small_library_answers_as_node_does(box: Box, code: str, shown: str) -> None:
    assert box.prints(f"console.log({code})", env={"WHO": "me"}) == shown + "\n"


def test_a_failed_assertion_names_its_line(box: Box) -> None:
    failure = box.run("const assert = require('assert')\nassert.strictEqual(1, 2)").failure()
    assert failure.context["line"] == 2
    assert failure.message.startswith("AssertionError [ERR_ASSERTION]: Expected values to be strictly equal")
