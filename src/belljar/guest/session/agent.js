// The guest's side of a JavaScript session: one interpreter of Node.js, one turn for each line of JSON on descriptor 3.
//
//     in   {"turn": 1, "code": "x + 1", "timeout": 30}
//     in   {"interrupt": 1}                    while that turn runs
//     out  MARK {"display": {"text/plain": "2"}}, MARK {"done": 1, "ok": true, "exit_code": 0, …}: lines in stdout, between
//          what the turn prints; and one in stderr, when all of the turn's stderr has come
//
// Turns are evaluated as in the console of a browser: declarations stay and may be repeated, and `await` works anywhere.
"use strict";
const { Worker, isMainThread, parentPort, workerData } = require("node:worker_threads");
const inspector = require("node:inspector");

if (isMainThread) main();
else listen();

// Hears the host in a thread of its own, so that a turn can be interrupted while it computes.
function listen() {
  const fs = require("node:fs");
  const busy = new Int32Array(workerData.busy);
  const main = new inspector.Session();
  main.connectToMainThread();
  let rest = "";
  const decoder = new TextDecoder();
  const buffer = Buffer.alloc(65536);
  const read = () => fs.read(3, buffer, 0, buffer.length, null, (error, size) => {
    if (error || !size) process.kill(process.pid, "SIGKILL");
    rest += decoder.decode(buffer.subarray(0, size), { stream: true });
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) take(line);
    read();
  });
  const take = (line) => {
    const request = JSON.parse(line);
    if (request.interrupt === undefined) parentPort.postMessage(request);
    else if (Atomics.load(busy, 0) === request.interrupt) interrupt(request.interrupt);
  };
  // A child that the turn waits for ends by the signal, and what awaits is given up; what computes is terminated.
  const interrupt = (turn) => {
    process.kill(0, "SIGINT");
    setTimeout(() => {
      if (Atomics.load(busy, 0) === turn) main.post("Runtime.terminateExecution", () => {});
    }, 100);
  };
  read();
}

function main() {
  const util = require("node:util");
  const { createRequire } = require("node:module");
  const { pathToFileURL } = require("node:url");
  const mark = process.env.BELLJAR_MARK;
  delete process.env.BELLJAR_MARK;
  const busy = new Int32Array(new SharedArrayBuffer(4)); // the turn under way
  const out = process.stdout.write.bind(process.stdout);
  const err = process.stderr.write.bind(process.stderr);
  const exit = process.exit.bind(process);
  const send = (frame) => out(mark + JSON.stringify(frame) + "\n");
  const TEXT_LIMIT = 1_000_000, VALUE_LIMIT = 10_000, STACK_LIMIT = 100_000, JSON_LIMIT = 1_000_000;

  // --- what a value looks like ---

  const shown = (value) => {
    try {
      return util.inspect(value, { depth: 4, maxArrayLength: 1000, maxStringLength: 100_000 }).slice(0, TEXT_LIMIT);
    } catch (error) {
      return "<it cannot be shown>";
    }
  };
  const DISPLAY = Symbol.for("Jupyter.display");
  const bundle = (value) => {
    const forms = { "text/plain": shown(value) };
    if (value === null || typeof value !== "object") return forms;
    try {
      if (typeof value[DISPLAY] === "function") return sendable({ ...forms, ...value[DISPLAY]() });
      const plain = Array.isArray(value) || [Object.prototype, null].includes(Object.getPrototypeOf(value));
      const text = plain ? JSON.stringify(value) : undefined;
      if (text && text.length < JSON_LIMIT) forms["application/json"] = JSON.parse(text);
    } catch (error) {
      return forms;
    }
    return forms;
  };
  const sendable = (forms) => Object.fromEntries(
    Object.entries(forms).map(([mime, form]) =>
      [mime, form instanceof Uint8Array ? Buffer.from(form).toString("base64") : form]));
  const define = (name, value) =>
    Object.defineProperty(globalThis, name, { value, writable: true, configurable: true, enumerable: false });
  define("display", (value, { raw = false } = {}) => send({ display: raw ? sendable(value) : bundle(value) }));

  // --- what a program finds ---

  class Exit { constructor(code) { this.code = code; } }
  process.exit = (code) => { throw new Exit(code ?? process.exitCode ?? 0); };
  const here = () => createRequire(process.cwd() + "/");
  const require_ = (name) => here()(name);
  require_.resolve = (name) => here().resolve(name);
  define("require", require_);
  define("module", { exports: {} });
  define("exports", globalThis.module.exports);
  // The console of V8 knows no `import()`; imports are turned into calls of this.
  define("__import", async (name) => {
    const builtin = require("node:module").isBuiltin(name);
    if (builtin || /^[a-z]+:/.test(name)) return import(name);
    return import(pathToFileURL(here().resolve(name)).href);
  });

  // --- turns ---

  const session = new inspector.Session();
  session.connect();
  const post = (method, params) => new Promise((resolve, reject) =>
    session.post(method, params, (error, answer) => error ? reject(error) : resolve(answer)));
  let context = 0;
  session.on("Runtime.executionContextCreated", ({ params }) => { context ||= params.context.id; });
  const HANDED = Symbol.for("belljar.handed");
  // Returns the value that the inspector speaks of, in a list, as it may be a promise.
  const handed = async (remote) => {
    const { objectId, unserializableValue } = remote;
    if (!objectId && !unserializableValue) return [remote.value];
    let value;
    define(HANDED, (given) => { value = given; });
    await post("Runtime.callFunctionOn", {
      functionDeclaration: 'function (value) { globalThis[Symbol.for("belljar.handed")](value); }',
      arguments: [objectId ? { objectId } : { unserializableValue }], executionContextId: context,
    });
    delete globalThis[HANDED];
    return [value];
  };

  let giveUp = () => {};
  process.on("SIGINT", () => giveUp());
  const report = (error) => { err(`Uncaught ${trimmed(error)}\n`); };
  process.on("uncaughtException", report);
  process.on("unhandledRejection", report);

  // The stack without our own frames.
  const trimmed = (error) => {
    if (!(error instanceof Error)) return shown(error);
    const own = / \(?(?:node:|.*session_agent\.js:)/;
    const lines = shown(error).split("\n");
    const frames = lines.filter((line) => /^ +at /.test(line));
    const first = frames.findIndex((line) => own.test(line));
    const dropped = new Set(first < 0 ? [] : frames.slice(first));
    const kept = lines.filter((line) => !dropped.has(line));
    return kept.filter((line, number) => line !== "}" || number < kept.length - 1 || !dropped.size).join("\n");
  };
  // What stands before a syntax error, as Node.js writes it: the place and the line.
  const place = ({ lineNumber, columnNumber }, code, number) =>
    `turn-${number}.js:${lineNumber + 1}\n${code.split("\n")[lineNumber] ?? ""}\n${" ".repeat(columnNumber)}^\n\n`;
  const exceptionOf = (error) => {
    const known = error instanceof Error;
    const name = known ? String(error.name || "Error") : "Uncaught";
    const value = known ? String(error.message) : shown(error);
    return { name: name.slice(0, 200), value: value.slice(0, VALUE_LIMIT), traceback: trimmed(error).slice(0, STACK_LIMIT) };
  };

  const INTERRUPTED = { ok: false, exit_code: 130, timeout: false, exception: null };
  const evaluate = async (code, number) => {
    const answer = await post("Runtime.evaluate", {
      expression: `${withoutImports(code)}\n//# sourceURL=turn-${number}.js`, replMode: true, awaitPromise: true,
      contextId: context,
    });
    if (answer.exceptionDetails) {
      const [error] = await handed(answer.exceptionDetails.exception);
      if (error instanceof Exit) {
        const left = Number(error.code) & 0xff;
        return { ok: left === 0, exit_code: left, timeout: false, exception: null };
      }
      const broken = error instanceof SyntaxError && !error.stack.includes(`turn-${number}.js`);
      err(`${broken ? place(answer.exceptionDetails, code, number) : ""}Uncaught ${trimmed(error)}\n`);
      return { ok: false, exit_code: 1, timeout: false, exception: exceptionOf(error) };
    }
    const [value] = await handed(answer.result);
    if (value !== undefined) {
      define("_", value);
      send({ display: bundle(value) });
    }
    return { ok: true, exit_code: 0, timeout: false, exception: null };
  };

  const turn = async ({ turn: number, code }) => {
    Atomics.store(busy, 0, number);
    const given = new Promise((resolve) => { giveUp = () => resolve(INTERRUPTED); });
    let verdict;
    try {
      verdict = await Promise.race([evaluate(code, number), given]);
    } catch (error) { // of the inspector: the execution was terminated
      verdict = INTERRUPTED;
    }
    Atomics.store(busy, 0, 0);
    giveUp = () => {};
    if (verdict === INTERRUPTED) err("interrupted\n");
    send({ done: number, ...verdict });
    err(mark + JSON.stringify({ settled: number }) + "\n");
  };

  // --- imports, which the console does not know ---

  // Turns `import a, {b as c} from "x"` and `import("x")` into what it knows; texts, templates and comments stay as they are.
  const withoutImports = (code) => {
    if (!/\bimport\b|\bexport\b/.test(code)) return code;
    let made = "";
    for (const [text, isCode] of pieces(code)) {
      made += isCode ? text.replace(/(?<![.\w$])import(?=\s*\()/g, "__import") : text;
    }
    const statement =
      /^([ \t]*)import\s+(?:(?:([\w$]+)\s*,?\s*)?(?:\*\s*as\s+([\w$]+)|\{([^}]*)\})?\s*from\s*)?(["'])([^"'\n]+)\5[ \t]*;?/gm;
    made = made.replace(statement, (all, indent, name, space, names, quote, from) => {
      const source = `await __import(${JSON.stringify(from)})`;
      if (space) return `${indent}const ${space} = ${source};${name ? ` const ${name} = ${space}.default;` : ""}`;
      if (!name && names === undefined) return `${indent}${source};`;
      const parts = (names ?? "").split(",").map((part) => part.trim()).filter(Boolean)
        .map((part) => part.replace(/\s+as\s+/, ": "));
      if (name) parts.unshift(`default: ${name}`);
      return `${indent}const { ${parts.join(", ")} } = ${source};`;
    });
    return made.replace(/^export\s+(?:default\s+)?(?=(?:async|const|let|var|function|class)\b)/gm, "");
  };

  // Cuts code into what is code and what is not.
  const pieces = function* (code) {
    const other = /\/\/[^\n]*|\/\*[^]*?\*\/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\[^]|[^`\\])*`/g;
    let last = 0;
    for (const found of code.matchAll(other)) {
      yield [code.slice(last, found.index), true];
      yield [found[0], false];
      last = found.index + found[0].length;
    }
    yield [code.slice(last), true];
  };

  const waiting = [];
  let working = false;
  const work = async () => {
    working = true;
    while (waiting.length) await turn(waiting.shift());
    working = false;
  };
  const worker = new Worker(__filename, { workerData: { busy: busy.buffer }, stdout: false, stderr: false });
  worker.on("message", (request) => { waiting.push(request); if (!working) work(); });
  worker.on("error", () => exit(70));
  post("Runtime.enable").then(() => { send({ ready: true }); });
}
