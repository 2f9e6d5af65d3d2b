// The small modules: events, util, assert, os, readline, timers and their kin.
(function (host, core) {
  "use strict";

  // Kept outside the objects: old code inherits by `EventEmitter.call(this)`, where no field would be made.
  const kept = new WeakMap();
  function heardBy(emitter) {
    if (!kept.has(emitter)) kept.set(emitter, new Map());
    return kept.get(emitter);
  }

  function add(emitter, name, listener, first = false) {
    const heard = heardBy(emitter);
    if (name !== "newListener" && heard.has("newListener"))
      emitter.emit("newListener", name, listener.listener ?? listener);
    const list = heard.get(name) ?? [];
    heard.set(name, first ? [listener, ...list] : [...list, listener]);
    return emitter;
  }
  function onlyOnce(emitter, name, listener) {
    const wrapped = (...args) => {
      emitter.off(name, wrapped);
      return listener.apply(emitter, args);
    };
    wrapped.listener = listener;
    return wrapped;
  }

  class Emitter {
    on(name, listener) {
      return add(this, name, listener);
    }
    addListener(name, listener) {
      return this.on(name, listener);
    }
    prependListener(name, listener) {
      return add(this, name, listener, true);
    }
    once(name, listener) {
      return add(this, name, onlyOnce(this, name, listener));
    }
    prependOnceListener(name, listener) {
      return add(this, name, onlyOnce(this, name, listener), true);
    }
    off(name, listener) {
      const list = heardBy(this).get(name) ?? [];
      const at = list.findLastIndex((known) => known === listener || known.listener === listener);
      if (at >= 0 && list.length > 1) heardBy(this).set(name, list.toSpliced(at, 1));
      else if (at >= 0) heardBy(this).delete(name);
      return this;
    }
    removeListener(name, listener) {
      return this.off(name, listener);
    }
    removeAllListeners(name) {
      if (name === undefined) heardBy(this).clear();
      else heardBy(this).delete(name);
      return this;
    }
    emit(name, ...args) {
      const list = heardBy(this).get(name);
      if (!list) {
        if (name !== "error") return false;
        if (Error.isError(args[0])) throw args[0];
        throw core.error(Error, "ERR_UNHANDLED_ERROR", `Unhandled error. (${core.inspect(args[0])})`);
      }
      for (const listener of list) listener.apply(this, args);
      return true;
    }
    listeners(name) {
      return (heardBy(this).get(name) ?? []).map((known) => known.listener ?? known);
    }
    listenerCount(name) {
      return heardBy(this).get(name)?.length ?? 0;
    }
    eventNames() {
      return [...heardBy(this).keys()];
    }
    setMaxListeners() {
      return this;
    }
    getMaxListeners() {
      return 10;
    }
    static once(emitter, name) {
      return new Promise((resolve, reject) => {
        const failed = (error) => {
          emitter.off(name, came);
          reject(error);
        };
        const came = (...args) => {
          emitter.off("error", failed);
          resolve(args);
        };
        emitter.once(name, came);
        if (name !== "error") emitter.once("error", failed);
      });
    }
  }
  Object.defineProperty(Emitter, "name", { value: "EventEmitter" });
  const EventEmitter = new Proxy(Emitter, { apply() {} });
  Emitter.prototype.constructor = EventEmitter;
  Emitter.EventEmitter = EventEmitter;
  Emitter.defaultMaxListeners = 10;

  const isObject = (value) => typeof value === "object" && value !== null;

  function equal(a, b, strict, seen = new Map()) {
    if (strict ? Object.is(a, b) : a == b || (a !== a && b !== b)) return true;
    if (!isObject(a) || !isObject(b)) return false;
    if (strict && Object.getPrototypeOf(a) !== Object.getPrototypeOf(b)) return false;
    if (Array.isArray(a) !== Array.isArray(b)) return false;
    if (seen.get(a) === b) return true;
    seen.set(a, b);
    const same = (x, y) => equal(x, y, strict, seen);
    if (a instanceof Date || a instanceof Number || a instanceof String || a instanceof Boolean) {
      if (a.constructor !== b.constructor || !Object.is(a.valueOf(), b.valueOf())) return false;
    }
    if (a instanceof RegExp && String(a) !== String(b)) return false;
    if (Error.isError(a) && !(Error.isError(b) && a.message === b.message && a.name === b.name)) return false;
    if (a instanceof Set) {
      if (!(b instanceof Set) || a.size !== b.size) return false;
      for (const x of a)
        if (!b.has(x) && ![...b].some((y) => isObject(y) && equal(x, y, strict, new Map(seen)))) return false;
    }
    if (a instanceof Map) {
      if (!(b instanceof Map) || a.size !== b.size) return false;
      for (const [k, v] of a)
        if (!(b.has(k) ? same(v, b.get(k)) : [...b].some(([l, w]) => isObject(l) && same(k, l) && same(v, w))))
          return false;
    }
    const keys = Object.keys(a);
    return keys.length === Object.keys(b).length && keys.every((k) => Object.hasOwn(b, k) && same(a[k], b[k]));
  }

  class AssertionError extends Error {
    constructor({ message, actual, expected, operator, stackStartFn }) {
      super(message);
      this.generatedMessage = false;
      this.code = "ERR_ASSERTION";
      Object.assign(this, { actual, expected, operator });
      Error.captureStackTrace(this, stackStartFn);
    }
    get name() {
      return "AssertionError";
    }
  }

  function assert(value, message) {
    check(value, message, value, true, "==", assert, "The expression evaluated to a falsy value");
  }

  function check(held, message, actual, expected, operator, from, said) {
    if (held) return;
    if (Error.isError(message)) throw message;
    throw new AssertionError({ message: message ?? said, actual, expected, operator, stackStartFn: from });
  }

  function comparison(operator, holds, words) {
    return function compare(actual, expected, message) {
      const relation = operator.startsWith("not") ? "equals" : "!==";
      const said = `${words}\n\n${core.inspect(actual)} ${relation} ${core.inspect(expected)}\n`;
      check(holds(actual, expected), message, actual, expected, operator, compare, said);
    };
  }

  function matches(error, expected) {
    if (expected === undefined || typeof expected === "string") return true;
    if (expected instanceof RegExp) return expected.test(String(error));
    if (typeof expected !== "function") {
      return Object.keys(expected).every((k) =>
        expected[k] instanceof RegExp ? expected[k].test(error[k]) : equal(error[k], expected[k], true),
      );
    }
    if (expected.prototype !== undefined && error instanceof expected) return true;
    return !Error.prototype.isPrototypeOf(expected.prototype) && expected !== Error && expected(error) === true;
  }

  function threw(error, expected, from) {
    if (!matches(error, expected)) throw error;
  }
  const missing = (what, message, from) =>
    check(false, message, undefined, undefined, "throws", from, `Missing expected ${what}.`);

  Object.assign(assert, {
    ok: assert,
    AssertionError,
    equal: comparison("==", (a, b) => a == b || (a !== a && b !== b), "Expected values to be loosely equal:"),
    notEqual: comparison("notEqual", (a, b) => a != b, 'Expected "actual" to be loosely unequal to:'),
    strictEqual: comparison("strictEqual", Object.is, "Expected values to be strictly equal:"),
    notStrictEqual: comparison(
      "notStrictEqual",
      (a, b) => !Object.is(a, b),
      'Expected "actual" to be strictly unequal to:',
    ),
    deepEqual: comparison("deepEqual", (a, b) => equal(a, b, false), "Expected values to be loosely deep-equal:"),
    deepStrictEqual: comparison(
      "deepStrictEqual",
      (a, b) => equal(a, b, true),
      "Expected values to be strictly deep-equal:",
    ),
    notDeepEqual: comparison(
      "notDeepEqual",
      (a, b) => !equal(a, b, false),
      'Expected "actual" not to be loosely deep-equal to:',
    ),
    notDeepStrictEqual: comparison(
      "notDeepStrictEqual",
      (a, b) => !equal(a, b, true),
      'Expected "actual" not to be strictly deep-equal to:',
    ),
    match: comparison(
      "match",
      (text, pattern) => pattern.test(text),
      "The input did not match the regular expression:",
    ),
    doesNotMatch: comparison(
      "notMatch",
      (text, pattern) => !pattern.test(text),
      "The input was expected to not match the regular expression:",
    ),
    fail(message = "Failed") {
      check(false, message, undefined, undefined, "fail", assert.fail);
    },
    throws(work, expected, message) {
      try {
        work();
      } catch (error) {
        return threw(error, expected);
      }
      missing("exception", typeof expected === "string" ? expected : message, assert.throws);
    },
    doesNotThrow(work) {
      work();
    },
    async rejects(work, expected, message) {
      try {
        await (typeof work === "function" ? work() : work);
      } catch (error) {
        return threw(error, expected);
      }
      missing("rejection", message, assert.rejects);
    },
    async doesNotReject(work) {
      await (typeof work === "function" ? work() : work);
    },
    ifError(value) {
      if (value !== null && value !== undefined) throw value;
    },
  });
  assert.strict = Object.assign((value, message) => assert(value, message), assert, {
    equal: assert.strictEqual,
    notEqual: assert.notStrictEqual,
    deepEqual: assert.deepStrictEqual,
    notDeepEqual: assert.notDeepStrictEqual,
  });

  const kind = (name) => (value) => Object.prototype.toString.call(value) === `[object ${name}]`;
  const PROMISED = Symbol.for("nodejs.util.promisify.custom");
  const util = {
    inspect: core.inspect,
    format: core.format,
    isDeepStrictEqual: (a, b) => equal(a, b, true),
    promisify: Object.assign(
      (work) =>
        work[PROMISED] ??
        ((...args) =>
          new Promise((resolve, reject) => {
            work(...args, (error, value) => (error ? reject(error) : resolve(value)));
          })),
      { custom: PROMISED },
    ),
    callbackify:
      (work) =>
      (...args) => {
        const done = args.pop();
        work(...args).then(
          (value) => core.later(() => done(null, value)),
          (error) => core.later(() => done(error)),
        );
      },
    inherits(Child, Parent) {
      Child.super_ = Parent;
      Object.setPrototypeOf(Child.prototype, Parent.prototype);
    },
    deprecate: (work) => work,
    stripVTControlCharacters: (text) => text.replace(/\x1b\[[0-9;?]*[@-~]/g, ""),
    isArray: Array.isArray,
    types: {
      isDate: kind("Date"),
      isRegExp: kind("RegExp"),
      isMap: kind("Map"),
      isSet: kind("Set"),
      isPromise: kind("Promise"),
      isAsyncFunction: kind("AsyncFunction"),
      isGeneratorFunction: kind("GeneratorFunction"),
      isNativeError: Error.isError,
      isTypedArray: (value) => ArrayBuffer.isView(value) && !(value instanceof DataView),
      isProxy: () => false,
    },
    TextEncoder: core.web.TextEncoder,
    TextDecoder: core.web.TextDecoder,
  };

  const os = {
    EOL: "\n",
    platform: () => "linux",
    type: () => "Linux",
    arch: () => "wasm32",
    release: () => "0",
    hostname: () => "belljar",
    homedir: () => "/tmp",
    tmpdir: () => "/tmp",
    cpus: () => [{ model: "wasm", speed: 0 }],
    totalmem: () => 0,
    freemem: () => 0,
    uptime: () => core.web.performance.now() / 1000,
    endianness: () => "LE",
    userInfo: () => ({ username: "guest", homedir: "/tmp" }),
  };

  // Standard input is a file that is complete before we start, so its lines are read at once and told one by one.
  class Interface extends EventEmitter {
    #lines;
    #open = true;
    #asked = [];
    constructor({ input, output } = {}) {
      super();
      this.output = output;
      const text = input && input !== core.process.stdin && input.text ? input.text() : host.readInput(0, 1);
      this.#lines = text.split(/\r?\n/);
      if (this.#lines.at(-1) === "") this.#lines.pop();
      core.later(() => this.#tell());
    }
    #tell() {
      if (!this.#open) return;
      const waits = this.#asked.shift();
      if (!waits && this.listenerCount("line") === 0 && this.#lines.length) return;
      if (!this.#lines.length) return this.close();
      const line = this.#lines.shift();
      if (waits) waits(line);
      else this.emit("line", line);
      core.later(() => this.#tell());
    }
    on(name, listener) {
      super.on(name, listener);
      if (name === "line") core.later(() => this.#tell());
      return this;
    }
    question(text, options, done = options) {
      this.output?.write(text);
      const asked = (answer) => {
        this.#asked.push(answer);
        core.later(() => this.#tell());
      };
      return typeof done === "function" ? asked(done) : new Promise(asked);
    }
    setPrompt(text) {
      this.line = text;
    }
    prompt() {
      this.output?.write(this.line ?? "> ");
    }
    pause() {
      return this;
    }
    resume() {
      return this;
    }
    close() {
      if (!this.#open) return;
      this.#open = false;
      this.emit("close");
    }
    async *[Symbol.asyncIterator]() {
      while (this.#lines.length) yield this.#lines.shift();
      this.close();
    }
  }
  const readline = { createInterface: (options) => new Interface(options), Interface, clearLine() {}, cursorTo() {} };

  core.EventEmitter = EventEmitter;
  Object.assign(core.builtins, {
    events: EventEmitter,
    util,
    assert,
    "assert/strict": assert.strict,
    os,
    readline,
    "readline/promises": readline,
    buffer: { Buffer: core.Buffer },
    crypto: { ...core.web.crypto, webcrypto: core.web.crypto },
    url: {
      URL: core.web.URL,
      URLSearchParams: core.web.URLSearchParams,
      fileURLToPath: (url) => decodeURIComponent(new core.web.URL(url).pathname),
      pathToFileURL: (name) => new core.web.URL(`file://${core.path.resolve(name)}`),
    },
    perf_hooks: { performance: core.web.performance },
  });
});
