// The last of our files to be evaluated: errors, process, timers, the event loop, and the guest's globals.
// All of it runs once for each worker; a run begins with a copy of the memory that this left behind.
(function (host, core) {
  "use strict";
  const { inspect, console, modules, builtins } = core;
  const OURS = "belljar:";
  const VERSION = "v22.0.0";

  // --- errors ----------------------------------------------------------------------------------

  const column = (file, line, at) => Math.max(1, line === 1 ? at - (modules.shifts.get(file) ?? 0) : at);

  function frame(site) {
    const file = site.getFileName();
    if (!file || file.startsWith(OURS)) return "";
    const line = site.getLineNumber();
    const place = `${file}:${line}:${column(file, line, site.getColumnNumber())}`;
    const name = site.getFunctionName();
    return name && name !== "<eval>" && name !== "<anonymous>" ? `\n    at ${name} (${place})` : `\n    at ${place}`;
  }

  function headline(error) {
    try {
      return Error.prototype.toString.call(error);
    } catch {
      return "Error";
    }
  }

  // An error is made where `new` stands, not in the constructors of its own classes.
  function outside(error, sites) {
    const makers = new Set();
    for (let at = Object.getPrototypeOf(error); at && at !== Error.prototype; at = Object.getPrototypeOf(at)) {
      makers.add(at.constructor?.name);
    }
    const first = sites.findIndex((site) => !makers.has(site.getFunctionName()));
    return first < 0 ? sites : sites.slice(first);
  }

  // QuickJS has neither the headline in `stack` nor a way to leave our own frames out.
  Error.prepareStackTrace = (error, sites) => headline(error) + outside(error, sites).map(frame).join("");
  Error.stackTraceLimit = 20;

  function firstPlace(error) {
    const found = /\n    at (?:[^\n(]*\()?(\/[^:\n]*):(\d+):(\d+)/.exec(
      Error.isError(error) ? String(error.stack) : "",
    );
    return found && { file: found[1], line: Number(found[2]), at: Number(found[3]) };
  }

  function excerpt(error) {
    const place = firstPlace(error);
    if (!place) return "";
    const source = (modules.sources.get(place.file) ?? "").split("\n")[place.line - 1] ?? "";
    if (source.length > 500) return `${place.file}:${place.line}\n\n`;
    return `${place.file}:${place.line}\n${source}\n${" ".repeat(Math.min(place.at - 1, source.length))}^\n\n`;
  }

  const END = `\n\nNode.js ${VERSION} (QuickJS)\n`;
  const isMemory = (error) =>
    Error.isError(error) && error.name === "InternalError" && /out of memory/.test(error.message);

  function report(error, fromPromise) {
    if (isMemory(error)) host.outOfMemory();
    if (Error.isError(error)) return `${excerpt(error)}${inspect(error)}${END}`;
    if (!fromPromise) return `${core.main}\n^\n${typeof error === "string" ? error : inspect(error)}${END}`;
    return (
      "[UnhandledPromiseRejection: This error originated either by throwing inside of an async function without a " +
      `catch block, or by rejecting a promise which was not handled with .catch(). The promise rejected with the reason "${
        typeof error === "string" ? error : inspect(error)
      }".] {\n  code: 'ERR_UNHANDLED_REJECTION'\n}${END}`
    );
  }

  function fail(error, fromPromise = false) {
    const name =
      fromPromise && process.listenerCount("unhandledRejection") ? "unhandledRejection" : "uncaughtException";
    if (process.listenerCount(name)) {
      try {
        return void process.emit(name, error, fromPromise ? Promise.resolve() : "uncaughtException");
      } catch (second) {
        error = second;
      }
    }
    host.printError(report(error, fromPromise));
    leave(process.exitCode || 1);
  }

  function guarded(work, ...args) {
    try {
      work(...args);
    } catch (error) {
      fail(error);
    }
  }

  let leaving = false;
  function leave(code) {
    if (!leaving) {
      leaving = true;
      process.exitCode = code;
      try {
        process.emit("exit", Number(code) || 0);
      } catch (error) {
        host.printError(report(error, false));
        process.exitCode = 1;
      }
    }
    host.exit(Number(process.exitCode ?? code) || 0);
  }

  // --- process ---------------------------------------------------------------------------------

  const stream = (fd) =>
    Object.assign(new core.EventEmitter(), {
      fd,
      isTTY: false,
      writable: true,
      columns: 80,
      write(data, encoding, done = encoding) {
        core.print(fd, typeof data === "string" ? data : core.decodeAs(core.bytesOf(data)));
        if (typeof done === "function") core.later(done);
        return true;
      },
      end(data) {
        if (data !== undefined) this.write(data);
      },
    });

  function makeStdin() {
    let encoding = null,
      told = false;
    const all = () => core.fs.readFileSync(0, encoding);
    const stdin = Object.assign(new core.EventEmitter(), {
      fd: 0,
      isTTY: false,
      readable: true,
      setEncoding(name) {
        encoding = name;
        return this;
      },
      text: () => core.fs.readFileSync(0, "utf8"),
      resume() {
        tell();
        return this;
      },
      pause() {
        return this;
      },
      read() {
        const data = told ? null : all();
        told = true;
        return data;
      },
      async *[Symbol.asyncIterator]() {
        const data = all();
        if (data.length) yield data;
      },
      pipe(target) {
        target.write(all());
        return target;
      },
    });
    function tell() {
      if (told) return;
      told = true;
      core.later(() => {
        const data = all();
        if (data.length) stdin.emit("data", data);
        core.later(() => {
          stdin.emit("end");
          stdin.emit("close");
        });
      });
    }
    const on = stdin.on;
    stdin.on = function (name, listener) {
      on.call(this, name, listener);
      if (name === "data" || name === "end") tell();
      if (name === "readable" && !told)
        core.later(() => {
          this.emit("readable");
          told = true;
          core.later(() => this.emit("end"));
        });
      return this;
    };
    return stdin;
  }

  const hrtime = (before) => {
    const now = host.clock(1) / 1000;
    const seconds = Math.floor(now),
      nanos = Math.round((now - seconds) * 1e9);
    if (!before) return [seconds, nanos];
    const back = nanos < before[1];
    return [seconds - before[0] - (back ? 1 : 0), nanos - before[1] + (back ? 1e9 : 0)];
  };
  hrtime.bigint = () => BigInt(Math.round(host.clock(1) * 1e6));

  const process = Object.assign(new core.EventEmitter(), {
    argv: ["node"],
    argv0: "node",
    execArgv: [],
    execPath: "/usr/bin/node",
    env: {},
    pid: 1,
    ppid: 0,
    title: "node",
    platform: "linux",
    arch: "wasm32",
    version: VERSION,
    versions: { node: VERSION.slice(1), quickjs: "ng" },
    release: { name: "node" },
    exitCode: undefined,
    stdout: stream(1),
    stderr: stream(2),
    stdin: makeStdin(),
    hrtime,
    features: {},
    cwd: () => core.cwd,
    chdir(name) {
      const folder = core.path.resolve(name);
      if (!core.fs.statSync(folder).isDirectory()) throw new Error(`ENOTDIR: not a directory, chdir '${name}'`);
      core.cwd = folder;
    },
    exit(code) {
      leave(code ?? process.exitCode ?? 0);
    },
    abort() {
      host.exit(134);
    },
    nextTick(work, ...args) {
      ticks.push(() => work(...args));
    },
    uptime: () => core.web.performance.now() / 1000,
    memoryUsage: () => ({ rss: 0, heapTotal: 0, heapUsed: 0, external: 0, arrayBuffers: 0 }),
    emitWarning(warning) {
      host.printError(`(node:1) ${Error.isError(warning) ? headline(warning) : `Warning: ${warning}`}\n`);
    },
    umask: () => 0o22,
    getuid: () => 1000,
    getgid: () => 1000,
  });
  process[Symbol.toStringTag] = "process";
  core.process = process;

  // --- the event loop --------------------------------------------------------------------------

  const ticks = [];
  let immediates = [],
    ready = [],
    waiting = [],
    rejected = new Map(),
    now = 0,
    order = 0,
    idle = false;

  class Timeout {
    constructor(work, delay, repeat) {
      const ms = Number(delay);
      Object.assign(this, {
        work,
        delay: ms >= 1 && ms <= 2147483647 ? Math.trunc(ms) : 1,
        repeat,
        live: true,
        held: true,
      });
      this.id = ++order;
      this.#queue();
    }
    #queue() {
      this.due = now + this.delay;
      this.order = ++order;
      let at = waiting.length;
      while (at > 0 && waiting[at - 1].due > this.due) at--;
      waiting.splice(at, 0, this);
    }
    fire() {
      if (!this.live) return;
      if (!this.repeat) this.live = false;
      guarded(this.work);
      if (this.live) this.#queue();
    }
    ref() {
      this.held = true;
      return this;
    }
    unref() {
      this.held = false;
      return this;
    }
    hasRef() {
      return this.held;
    }
    refresh() {
      waiting = waiting.filter((other) => other !== this);
      this.live = true;
      this.#queue();
      return this;
    }
    close() {
      clear(this);
      return this;
    }
    [Symbol.toPrimitive]() {
      return this.id;
    }
    [inspect.custom]() {
      return `Timeout { id: ${this.id}, delay: ${this.delay} }`;
    }
  }

  function callable(work) {
    if (typeof work === "function") return work;
    throw core.error(
      TypeError,
      "ERR_INVALID_ARG_TYPE",
      `The "callback" argument must be of type function. Received ${inspect(work)}`,
    );
  }
  function timer(work, delay, args, repeat) {
    callable(work);
    if (idle) now = host.clock(1);
    return new Timeout(() => work(...args), delay, repeat);
  }
  function clear(which) {
    const found =
      typeof which === "object" ? which : [...waiting, ...ready].find((known) => known.id === Number(which));
    if (!found) return;
    found.live = false;
    waiting = waiting.filter((other) => other !== found);
  }
  const setTimeout = (work, delay, ...args) => timer(work, delay, args, false);
  const setInterval = (work, delay, ...args) => timer(work, delay, args, true);
  function setImmediate(work, ...args) {
    callable(work);
    const made = {
      live: true,
      fire() {
        if (this.live) guarded(work, ...args);
      },
      ref() {
        return this;
      },
      unref() {
        return this;
      },
    };
    immediates.push(made);
    return made;
  }
  core.later = (work) => setImmediate(work);
  const pause = (ms, value) => new Promise((resolve) => setTimeout(resolve, ms, value));

  // One step: what to do next, then back to the host, which empties the queue of promises. Says how long to
  // wait until the step after it, or less than nothing at the end. Order as in Node: ticks, timers, immediates.
  function turn() {
    if (ticks.length) return runTicks();
    if (rejected.size) {
      const reasons = [...rejected.values()];
      rejected = new Map();
      for (const reason of reasons) fail(reason, true);
      return 0;
    }
    if (ready.length) {
      ready.shift().fire();
      return 0;
    }
    return nextPhase();
  }

  function runTicks() {
    for (let at = 0; at < ticks.length; at++) guarded(ticks[at]);
    ticks.length = 0;
    return 0;
  }

  let phase = "timers";
  function nextPhase() {
    if (phase === "timers") {
      phase = "immediates";
      now = Math.max(now, host.clock(1));
      const count = waiting.findIndex((one) => one.due > now);
      ready = waiting.splice(0, count < 0 ? waiting.length : count);
      if (ready.length) return 0;
    }
    phase = "timers";
    if (immediates.length) {
      [ready, immediates] = [immediates, []];
      return 0;
    }
    if (!waiting.some((one) => one.held)) return finish();
    const wait = waiting[0].due - now;
    if (wait > 0) now = waiting[0].due; // the host sleeps for that long: no second look at a clock that may stand still
    return Math.max(wait, 0);
  }

  let pending;
  function finish() {
    if (process.listenerCount("beforeExit") && !finish.told) {
      finish.told = true;
      guarded(() => process.emit("beforeExit", process.exitCode ?? 0));
      return 0;
    }
    if (pending && host.promiseState(pending) === 0) {
      host.printError("Warning: Detected unsettled top-level await\n");
      process.exitCode ??= 13;
    }
    leave(process.exitCode ?? 0);
  }

  function start(request) {
    const { main, args, cwd, env } = JSON.parse(request);
    core.cwd = cwd;
    core.main = main;
    Object.assign(process.env, env);
    process.argv.push(main, ...args);
    core.startClock();
    now = host.clock(1);
    guarded(() => {
      pending = modules.start(main);
    });
    idle = true;
    if (!pending) runTicks(); // before promises, after CommonJS
  }

  const queueMicrotask = (work) => void Promise.resolve().then(() => guarded(callable(work)));
  const settled = (promise, reason, handled) =>
    void (handled ? rejected.delete(promise) : rejected.set(promise, reason));

  Object.assign(builtins, {
    process,
    console,
    timers: { setTimeout, setInterval, setImmediate, clearTimeout: clear, clearInterval: clear, clearImmediate: clear },
    "timers/promises": {
      setTimeout: pause,
      setImmediate: (value) => new Promise((resolve) => setImmediate(resolve, value)),
    },
  });
  setTimeout[builtins.util.promisify.custom] = pause;
  const globals = { ...core.web, console, process, ...builtins.timers, queueMicrotask, global: globalThis };
  for (const [name, value] of Object.entries(globals)) {
    Object.defineProperty(globalThis, name, { value, writable: true, configurable: true, enumerable: false });
  }
  Object.assign(core, { start, turn, settled, normalize: modules.normalize, source: modules.source, fail });
});
