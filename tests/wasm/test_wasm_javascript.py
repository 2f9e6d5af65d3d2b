"""The JavaScript driver of the wasm backend, without the worker around it: an engine, a folder as the box, a run."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from belljar.core.diagnose import diagnose
from belljar.core.request import Limits
from belljar.core.result import ErrorType, Result, Status

wasmtime = pytest.importorskip("wasmtime", reason="wasmtime is not installed: pip install 'belljar-sandbox[wasm]'")

VENDORED = Path(str(package_files("belljar.backends.wasm"))) / "vendor"
SCRIPTS = (str(package_files("belljar.guest")) + "/javascript", str(VENDORED))
MIB = 1 << 20
SECONDS = 30.0  # of a run that must not end by itself


@dataclass(frozen=True)
class Ended:
    code: int
    stdout: str
    stderr: str

    def failure(self, language: str = "javascript") -> Any:
        status = Status.SUCCESS if self.code == 0 else Status.ERROR
        result = Result(status=status, exit_code=self.code, stdout=self.stdout, stderr=self.stderr)
        return diagnose(result, language=language, limits=Limits(), processes=False)


class Box:
    """A folder with /workspace and /tmp, and the engine that runs what lies there."""

    def __init__(self, driver: Any, engine: Any, root: Path) -> None:
        self.driver, self.engine, self.root = driver, engine, root
        for name in ("workspace", "tmp"):
            (root / name).mkdir()
        self.heard: dict[str, list[bytes]] = {}

    def put(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = self.root / "workspace" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def store(self, memory: int, stdin: str) -> Any:
        store = wasmtime.Store(self.engine)
        store.set_limits(memory_size=memory, tables=64, instances=2, memories=1)
        store.set_epoch_deadline(1)
        wasi = wasmtime.WasiConfig()
        for name in ("workspace", "tmp"):
            wasi.preopen_dir(str(self.root / name), f"/{name}", True)
        (self.root / "stdin").write_text(stdin)
        wasi.stdin_file = str(self.root / "stdin")
        store.set_wasi(wasi)
        return store

    def run(
        self, code: str, *, main: str = "main.js", stdin: str = "", memory: int = 256 * MIB, timeout: float = SECONDS,
        env: dict[str, str] | None = None, **files: str,
    ) -> Ended:  # fmt: skip
        self.put({main: code} | {name.replace("__", "."): text for name, text in files.items()})
        self.heard = {"stdout": [], "stderr": []}
        language = "typescript" if main.endswith("ts") else "javascript"
        request = {
            "main": f"/workspace/{main}", "root": str(self.root), "env": env or {}, "cwd": "/workspace",
            "language": language,
        }  # fmt: skip
        bell = threading.Timer(timeout, self.engine.increment_epoch)
        bell.start()
        store = self.store(memory, stdin)
        try:
            code_ = self.driver.run(store, request, lambda name, data: self.heard[name].append(data))
        finally:
            bell.cancel()
            store.close()
        return Ended(code_, self.said("stdout"), self.said("stderr"))

    def said(self, name: str) -> str:
        return b"".join(self.heard[name]).decode()

    def prints(self, code: str, **more: Any) -> str:
        ended = self.run(code, **more)
        assert (ended.code, ended.stderr) == (0, "")
        return ended.stdout


class Driver(NamedTuple):
    source: Any
    engine: Any
    module: Any
    driver: Any


@cache
def start_driver() -> Driver:
    """Compiled once for all tests of this process."""
    from belljar.backends.wasm.worker.javascript import driver as source

    config = wasmtime.Config()
    config.epoch_interruption = True
    engine = wasmtime.Engine(config)
    module = wasmtime.Module.from_file(engine, str(VENDORED / "quickjs.wasm"))
    return Driver(source, engine, module, source.JavaScript(engine, module, SCRIPTS))


@pytest.fixture(scope="module")
def started() -> Driver:
    return start_driver()


@pytest.fixture
def box(started: Driver, tmp_path: Path) -> Box:
    root = tmp_path / "box"
    root.mkdir()
    return Box(started.driver, started.engine, root)


# --- what is vendored --------------------------------------------------------------------------


def test_each_vendored_file_is_the_one_that_version_json_names() -> None:
    entries = json.loads((VENDORED / "VERSION.json").read_text())
    assert {entry["file"] for entry in entries} == {"quickjs.wasm", "sucrase.js"}
    for entry in entries:
        assert hashlib.sha256((VENDORED / entry["file"]).read_bytes()).hexdigest() == entry["sha256"]
        assert entry["licence"] == "MIT"
        assert "Permission is hereby granted" in (VENDORED / entry["licence_file"]).read_text()


# --- output ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("1, 'two', -0, 3n, null, undefined", "1 two -0 3n null undefined"),
        ("{ a: 1, b: 'x', c: [1, [2, [3, [4]]]] }", "{ a: 1, b: 'x', c: [ 1, [ 2, [Array] ] ] }"),
        ("new Map([['k', { v: 1 }]]), new Set([1, 'x'])", "Map(1) { 'k' => { v: 1 } } Set(2) { 1, 'x' }"),
        ("[1, 2, 3, 4, 5, 6, 7]", "[\n  1, 2, 3, 4,\n  5, 6, 7\n]"),
        ("[, 'a'], [function f() {}, class A {}, () => 1]",
         "[ <1 empty item>, 'a' ] [ [Function: f], [class A], [Function (anonymous)] ]"),
        ("'%s has %d of %i, %j and %o%%', 'Bob', 4.5, 4.5, { a: 1 }, 'x', 'more'",
         "Bob has 4.5 of 4, {\"a\":1} and 'x'% more"),
        ("new (class Point { x = 1 })(), Object.create(null)", "Point { x: 1 } [Object: null prototype] {}"),
        ("Buffer.from('hé'), new Uint8Array(2), new Date(0), /a+/g",
         "<Buffer 68 c3 a9> Uint8Array(2) [ 0, 0 ] 1970-01-01T00:00:00.000Z /a+/g"),
        ("(() => { const o = { n: 1 }; o.self = o; return o; })()", "<ref *1> { n: 1, self: [Circular *1] }"),
        ("Promise.resolve(4), new Promise(() => {})", "Promise { 4 } Promise { <pending> }"),
    ],
)  # fmt: skip
def test_console_log_shows_values_as_node_does(box: Box, expression: str, shown: str) -> None:
    assert box.prints(f"console.log({expression})") == shown + "\n"


def test_errors_and_warnings_of_the_console_go_to_stderr(box: Box) -> None:
    ended = box.run("console.log('a'); console.error('b'); console.warn('c'); console.info('d'); console.debug('e')")
    assert (ended.stdout, ended.stderr) == ("a\nd\ne\n", "b\nc\n")


def test_output_is_streamed_piece_by_piece(box: Box) -> None:
    box.run("process.stdout.write('a'); process.stdout.write('bé')")
    assert box.heard["stdout"] == [b"a", "bé".encode()]


def test_an_error_that_is_logged_shows_its_stack_its_properties_and_its_cause(box: Box) -> None:
    out = box.prints("class Odd extends Error {}\nconsole.log(Object.assign(new Odd('x', { cause: 5 }), { code: 7 }))")
    assert out == "Odd: x\n    at /workspace/main.js:2:31 {\n  code: 7,\n  [cause]: 5\n}\n"


def test_a_long_string_is_written_in_pieces(box: Box) -> None:
    box.run("process.stdout.write('é'.repeat(1e6))")
    assert max(len(piece) for piece in box.heard["stdout"]) <= 1 << 18
    assert box.said("stdout") == "é" * 1_000_000


# --- modules -----------------------------------------------------------------------------------


def test_a_module_imports_files_built_ins_and_json_and_awaits_at_the_top(box: Box) -> None:
    box.put({"lib/a.mjs": "import { b } from '../b.js'; export const a = b + 1", "b.js": "export const b = 1"})
    box.put({"d.json": '{"k": [1]}', "old.js": "exports.x = 5; module.exports.y = 6"})
    code = """import { a } from './lib/a.mjs'
import fs, { existsSync } from 'node:fs'
import * as path from 'path'
import d from './d.json' with { type: 'json' }
import old, { x } from './old.js'
console.log(a, fs.existsSync === existsSync, path.join('a', '..', 'b'), d, old.y, x, import.meta.url)
console.log(await Promise.resolve(3), (await import('./lib/a.mjs')).a)"""
    assert box.prints(code) == "2 true b { k: [ 1 ] } 6 5 file:///workspace/main.js\n3 2\n"


def test_commonjs_requires_files_folders_and_json_once(box: Box) -> None:
    box.put({"m.js": "console.log('once'); exports.x = require('./n').y", "n/index.js": "module.exports = { y: 7 }"})
    box.put({"d.json": '{"k": [1]}'})
    code = """const m = require('./m.js'); sloppy = m.x
console.log(sloppy, require('./m') === m, require('./d.json').k, __filename, __dirname, require.main === module)"""
    assert box.prints(code) == "once\n7 true [ 1 ] /workspace/main.js /workspace true\n"


@pytest.mark.parametrize(
    ("code", "line", "package"),
    [("\nconst _ = require('lodash')", 2, "lodash"), ("let a\nimport _ from 'left-pad'", 2, "left-pad")],
)
def test_a_package_that_is_not_there_is_diagnosed_as_missing(box: Box, code: str, line: int, package: str) -> None:
    ended = box.run(code)
    failure = ended.failure()
    assert ended.code == 1
    assert failure.error_type is ErrorType.MISSING_PACKAGE
    assert (failure.context["package"], failure.context["line"]) == (package, line)


def test_a_file_that_is_not_there_cannot_be_imported(box: Box) -> None:
    ended = box.run("import './gone.js'")
    assert "Cannot find module '/workspace/gone.js' imported from /workspace/main.js" in ended.stderr


# --- how a run ends ----------------------------------------------------------------------------


def test_an_uncaught_error_is_reported_with_its_line_and_its_stack(box: Box) -> None:
    ended = box.run("function f() {\n  throw new TypeError('bad')\n}\nf()")
    assert ended.code == 1
    assert ended.stderr.startswith(
        "/workspace/main.js:2\n  throw new TypeError('bad')\n            ^\n\n"
        "TypeError: bad\n    at f (/workspace/main.js:2:13)\n    at /workspace/main.js:4:1\n\nNode.js v"
    )
    failure = ended.failure()
    assert (failure.error_type, failure.context["line"]) == (ErrorType.RUNTIME_ERROR, 2)
    assert failure.message == "TypeError: bad"


def test_an_error_of_an_own_class_is_placed_where_it_was_made(box: Box) -> None:
    failure = box.run(
        "class OddError extends Error {\n  constructor(m) { super(m) }\n}\nthrow new OddError('x')"
    ).failure()
    assert (failure.context["line"], failure.message) == (4, "OddError: x")


@pytest.mark.parametrize("code", ["let a = 1\nlet b = ;", "import 'fs'\nlet b = ;", "await 1\nlet b = ;"])
def test_a_syntax_error_is_diagnosed_with_its_line(box: Box, code: str) -> None:
    failure = box.run(code).failure()
    assert (failure.error_type, failure.context["line"]) == (ErrorType.SYNTAX_ERROR, 2)


def test_a_thrown_string_is_reported(box: Box) -> None:
    ended = box.run("throw 'boom'")
    assert ended.code == 1
    assert ended.failure().message == "uncaught: boom"


def test_an_unhandled_rejection_ends_the_run_with_its_line(box: Box) -> None:
    ended = box.run("setTimeout(() => console.log('never'), 50)\nPromise.reject(new RangeError('late'))")
    assert (ended.code, ended.stdout) == (1, "")
    assert (ended.failure().message, ended.failure().context["line"]) == ("RangeError: late", 2)


def test_a_rejection_with_something_else_than_an_error_is_named_as_node_names_it(box: Box) -> None:
    ended = box.run("Promise.reject('why')")
    assert ended.code == 1
    assert ended.failure().message.startswith("UnhandledPromiseRejection: This error originated")


def test_a_rejection_that_is_handled_in_time_is_none(box: Box) -> None:
    assert box.prints("const p = Promise.reject(new Error('x')); p.catch((e) => console.log(e.message))") == "x\n"


def test_an_error_in_a_timer_ends_the_run(box: Box) -> None:
    ended = box.run("setTimeout(() => {\n  null.x\n}, 1); setTimeout(() => console.log('never'), 20)")
    assert (ended.code, ended.stdout, ended.failure().context["line"]) == (1, "", 2)


def test_process_exit_ends_at_once_and_tells_listeners(box: Box) -> None:
    ended = box.run(
        "process.on('exit', (c) => console.log('bye', c)); try { process.exit(3) } finally { console.log(1) }"
    )
    assert (ended.code, ended.stdout) == (3, "bye 3\n")


def test_exit_code_is_used_when_the_loop_is_empty(box: Box) -> None:
    assert box.run("process.exitCode = 4; setTimeout(() => console.log('still'), 1)").code == 4


def test_endless_recursion_is_a_range_error_that_can_be_caught(box: Box) -> None:
    code = "function f() { f() }\ntry { f() } catch (e) { console.log(e instanceof RangeError, e.message) }\nf()"
    ended = box.run(code)
    assert (ended.code, ended.stdout) == (1, "true Maximum call stack size exceeded\n")
    assert "too deep" in ended.failure().suggestion


def test_recursion_inside_the_engine_is_reported_like_any_other(box: Box) -> None:
    ended = box.run("let c = []; for (let i = 0; i < 1e5; i++) c = [c]; JSON.stringify(c)")
    assert ended.code == 1
    assert ended.failure().message == "RangeError: Maximum call stack size exceeded"


def test_recursion_through_the_host_is_reported_like_any_other(box: Box) -> None:
    again = (
        "}); globalThis[Symbol.for('belljar.require')](`/workspace/${globalThis.n = (globalThis.n ?? 1) + 1}.js`); ({"
    )
    box.put({f"{n}.js": again for n in range(1, 600)})
    ended = box.run("require('./1.js')")
    assert ended.code == 1
    assert "RangeError: Maximum call stack size exceeded" in ended.stderr


# --- the event loop ----------------------------------------------------------------------------


def test_ticks_promises_timers_and_immediates_come_in_nodes_order(box: Box) -> None:
    code = """setTimeout(() => console.log('timer 20'), 20)
setTimeout(() => console.log('timer 0'), 0)
setImmediate(() => console.log('immediate'))
Promise.resolve().then(() => console.log('promise')).then(() => process.nextTick(() => console.log('late tick')))
process.nextTick(() => console.log('tick'))
queueMicrotask(() => console.log('microtask'))
let n = 0
const every = setInterval(() => { if (++n === 3) { clearInterval(every); console.log('three') } }, 1)
clearTimeout(setTimeout(() => console.log('never'), 0))
for (const due = Date.now() + 3; Date.now() < due;);  // as in Node, timers go before immediates once they are due
console.log('first')"""
    order = "first,tick,promise,microtask,late tick,timer 0,immediate,three,timer 20"
    assert box.prints(code).strip().split("\n") == order.split(",")


def test_an_await_that_can_never_end_is_told(box: Box) -> None:
    ended = box.run("await new Promise(() => {})")
    assert (ended.code, ended.stderr) == (13, "Warning: Detected unsettled top-level await\n")


# --- limits ------------------------------------------------------------------------------------


def test_an_endless_loop_is_interrupted_after_what_it_printed(box: Box) -> None:
    with pytest.raises(wasmtime.Trap, match="interrupt"):
        box.run("console.log('before'); for (;;);", timeout=0.2)
    assert box.said("stdout") == "before\n"


def test_a_guest_that_only_waits_is_interrupted_too(box: Box) -> None:
    with pytest.raises(wasmtime.Trap, match="interrupt"):
        box.run("setTimeout(() => {}, 1e6)", timeout=0.2)


@pytest.mark.parametrize("code", ["const a = []; for (;;) a.push(new Array(1000).fill(1))", "new Uint8Array(1e9)"])
def test_a_guest_over_its_memory_limit_ends_with_out_of_memory(box: Box, started: Driver, code: str) -> None:
    with pytest.raises(started.source.OutOfMemory):
        box.run(code, memory=32 * MIB)
    assert "JavaScript heap out of memory" in box.said("stderr")
    assert Ended(1, "", box.said("stderr")).failure().error_type is ErrorType.OOM_KILLED


def test_a_file_larger_than_the_memory_limit_is_not_read_into_the_worker(box: Box, started: Driver) -> None:
    with (box.root / "workspace" / "large").open("wb") as file:
        file.truncate(64 * MIB)
    with pytest.raises(started.source.OutOfMemory):
        box.run("require('fs').readFileSync('large')", memory=32 * MIB)


# --- one run and the next ----------------------------------------------------------------------


def test_two_runs_share_nothing(box: Box) -> None:
    spoil = """process.chdir('/tmp'); globalThis.left = 1; Array.prototype.map = null; console.log = null
process.env.left = 1; Object.prototype.left = 2; require('fs').readFileSync = null; process.exitCode = 9
setInterval(() => {}, 1e6); process.exit(0)"""
    look = """console.log(typeof left, [1].map(String), process.env.left, ({}).left, process.exitCode, process.cwd(),
typeof require('fs').readFileSync)"""
    assert box.run(spoil).code == 0
    assert box.prints(look) == "undefined [ '1' ] undefined undefined undefined /workspace function\n"


def test_a_run_that_was_stopped_leaves_nothing_behind(box: Box) -> None:
    with pytest.raises(wasmtime.Trap):
        box.run("globalThis.left = 1; for (;;);", timeout=0.1)
    assert box.prints("console.log(typeof left)") == "undefined\n"


def test_randomness_differs_from_run_to_run(box: Box) -> None:
    drawn = {box.prints("console.log(Math.random(), crypto.randomUUID())") for _ in range(5)}
    assert len(drawn) == 5


def test_who_replaces_wasis_clock_and_randomness_decides_what_the_guest_sees(started: Driver, tmp_path: Path) -> None:
    linker = wasmtime.Linker(started.engine)
    linker.define_wasi()
    linker.allow_shadowing = True
    i32, i64 = wasmtime.ValType.i32(), wasmtime.ValType.i64()

    def clock(caller: Any, _which: int, _precision: int, place: int) -> int:
        caller.get("memory").write(caller, (86_400 * 10**9).to_bytes(8, "little"), place)
        return 0

    def randomness(caller: Any, place: int, size: int) -> int:
        caller.get("memory").write(caller, b"\7" * size, place)
        return 0

    wasi = "wasi_snapshot_preview1"
    linker.define_func(wasi, "clock_time_get", wasmtime.FuncType([i32, i64, i32], [i32]), clock, access_caller=True)
    linker.define_func(wasi, "random_get", wasmtime.FuncType([i32, i32], [i32]), randomness, access_caller=True)
    driver = started.source.JavaScript(started.engine, started.module, SCRIPTS, linker)
    box = Box(driver, started.engine, tmp_path)
    code = "setTimeout(() => console.log(new Date(), Math.random(), crypto.randomUUID()), 5)"
    first = box.prints(code)
    assert first.startswith("1970-01-02T00:00:00.000Z 0.")
    assert box.prints(code) == first


# --- TypeScript --------------------------------------------------------------------------------


def test_typescript_runs_with_its_types_taken_out_and_its_lines_kept(box: Box) -> None:
    box.put({"lib.ts": "export type Op = (a: number) => number\nexport const add: Op = (a: number): number => a + 1"})
    code = """interface Shape {
  sides: number
}
enum Color { Red, Green }
import { add, type Op } from './lib'
class Square implements Shape { constructor(readonly sides: number = 4, private tag?: string) {} }
const shape = new Square() satisfies Shape
console.log(add(1), Color.Green, Color[0], shape.sides as number, <T,>(x: T): T => x)
const wait: Promise<number> = Promise.resolve(5)
console.log(await wait)
throw new Error('here')"""
    ended = box.run(code, main="main.ts")
    assert (ended.code, ended.stdout) == (1, "2 1 Red 4 [Function (anonymous)]\n5\n")
    failure = ended.failure("typescript")
    assert (failure.context["file"], failure.context["line"]) == ("/workspace/main.ts", 11)


def test_a_syntax_error_in_typescript_is_diagnosed_with_its_line(box: Box) -> None:
    failure = box.run("const a: number = 1\nconst b: number = ;", main="main.ts").failure("typescript")
    assert (failure.error_type, failure.context["line"]) == (ErrorType.SYNTAX_ERROR, 2)
