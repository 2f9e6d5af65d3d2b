// `require` and `import`: which file a name means, and how its text becomes a module. Both share one cache of CommonJS.
(function (host, core) {
  "use strict";
  const { path, fs, builtins } = core;
  const HEAD = "(function (exports, require, module, __filename, __dirname) {";
  const sources = new Map(); // what the author wrote, for reports
  const shifts = new Map(); // how far our own text moved the first line to the right
  const cache = Object.create(null);

  const builtinOf = (name) => {
    const bare = name.replace(/^node:/, "");
    return Object.hasOwn(builtins, bare) ? bare : undefined;
  };
  const isFile = (name) => {
    const facts = host.stat(name, 1);
    return typeof facts === "string" && JSON.parse(facts)[0] === 4;
  };
  const isLocal = (name) => /^(\.{1,2}(\/|$)|\/|file:)/.test(name);

  function textOf(name) {
    const text = fs
      .readFileSync(name, "utf8")
      .replace(/^\uFEFF/, "")
      .replace(/^#!/, "//");
    sources.set(name, text);
    if (!/\.[mc]?tsx?$/.test(name)) return text;
    if (!core.stripTypes)
      throw core.error(SyntaxError, "ERR_UNKNOWN_FILE_EXTENSION", `TypeScript is not available here: ${name}`);
    return core.stripTypes(text, name);
  }

  function located(wanted, endings) {
    const twin = wanted.replace(/\.([mc]?)js$/, ".$1ts"); // TypeScript names the file that will be, not the one that is
    return ["", ...endings]
      .map((ending) => wanted + ending)
      .concat(twin)
      .find(isFile);
  }

  const ENDINGS = [".js", ".json", ".cjs", ".mjs", ".ts", "/index.js", "/index.ts", "/index.json"];

  function packageFile(folder) {
    let main = "index.js";
    try {
      main = JSON.parse(fs.readFileSync(`${folder}/package.json`, "utf8")).main ?? main;
    } catch {
      /* none */
    }
    return located(path.join(folder, main), ENDINGS);
  }

  function inNodeModules(name, from) {
    for (let folder = from; ; folder = path.dirname(folder)) {
      const whole = path.join(folder, "node_modules", name);
      const found = fs.existsSync(whole) && (located(whole, ENDINGS.slice(0, 5)) ?? packageFile(whole));
      if (found) return found;
      if (folder === "/") return undefined;
    }
  }

  function find(name, folder) {
    if (!isLocal(name)) return inNodeModules(name, folder);
    const wanted = path.resolve(folder, name.replace(/^file:\/\//, ""));
    return located(wanted, ENDINGS) ?? (fs.existsSync(wanted) ? packageFile(wanted) : undefined);
  }

  function compile(text, name) {
    shifts.set(name, HEAD.length);
    return host.compile(`${HEAD}${text}\n})`, name);
  }

  function makeRequire(parent) {
    const folder = path.dirname(parent.filename);
    const resolve = (name) => {
      const found = find(String(name), folder);
      if (found) return found;
      const stack = [];
      for (let at = parent; at; at = at.parent) stack.push(at.filename);
      const list = stack.map((file) => `\n- ${file}`).join("");
      const error = core.error(Error, "MODULE_NOT_FOUND", `Cannot find module '${name}'\nRequire stack:${list}`);
      error.requireStack = stack;
      throw error;
    };
    function require(name) {
      if (typeof name !== "string" || name === "") {
        throw core.error(
          TypeError,
          "ERR_INVALID_ARG_TYPE",
          `The "id" argument must be of type string. Received ${core.inspect(name)}`,
        );
      }
      const builtin = builtinOf(name);
      return builtin ? builtins[builtin] : load(resolve(name), parent).exports;
    }
    return Object.assign(require, {
      resolve: (name) => builtinOf(name) ?? resolve(name),
      cache,
      main: core.mainModule,
    });
  }

  function load(name, parent, body) {
    if (cache[name]) return cache[name];
    const module = {
      id: parent ? name : ".",
      filename: name,
      path: path.dirname(name),
      exports: {},
      loaded: false,
      children: [],
    };
    Object.defineProperty(module, "parent", { value: parent, enumerable: false });
    if (!parent) core.mainModule = module;
    parent?.children.push(module);
    cache[name] = module;
    try {
      run(module, body);
    } catch (error) {
      delete cache[name];
      throw error;
    }
    module.loaded = true;
    return module;
  }

  function run(module, compiled) {
    const name = module.filename;
    if (name.endsWith(".json")) return void (module.exports = parseJson(name));
    const body = compiled ?? compileRequired(name);
    module.require = makeRequire(module);
    body.call(module.exports, module.exports, module.require, module, name, module.path);
  }

  function parseJson(name) {
    try {
      return JSON.parse(textOf(name));
    } catch (error) {
      error.message = `${name}: ${error.message}`;
      throw error;
    }
  }

  function compileRequired(name) {
    const text = textOf(name);
    try {
      return compile(text, name);
    } catch (error) {
      if (!(error instanceof SyntaxError) || !/^\s*(import|export)\b/m.test(text)) throw error;
      throw core.error(Error, "ERR_REQUIRE_ESM", `require() of ES Module ${name} not supported. Use import instead.`);
    }
  }

  // --- import ----------------------------------------------------------------------------------

  function normalize(base, name) {
    const builtin = builtinOf(name);
    if (builtin) return `node:${builtin}`;
    const folder = path.dirname(base.replace(/^file:\/\//, ""));
    const found = find(name, folder);
    if (found) return found;
    const missing = isLocal(name) ? `module '${path.resolve(folder, name)}'` : `package '${name}'`;
    const error = core.error(Error, "ERR_MODULE_NOT_FOUND", `Cannot find ${missing} imported from ${base}`);
    error.stack = `Error: ${error.message}\n    at ${base}:${lineOf(base, name)}:1`; // QuickJS knows no place for it
    throw error;
  }

  function lineOf(file, name) {
    const lines = (sources.get(file) ?? "").split("\n");
    return (
      1 +
      Math.max(
        0,
        lines.findIndex((text) => text.includes(`"${name}"`) || text.includes(`'${name}'`)),
      )
    );
  }

  const exportsOf = (names) =>
    names.map((name, at) => `const _${at} = m[${JSON.stringify(name)}]; export { _${at} as ${name} };`).join("");
  const nameable = (name) => /^[A-Za-z_$][\w$]*$/.test(name) && name !== "default";

  function wrapRequired(name, text) {
    const names = new Set();
    for (const [, found] of text.matchAll(/\bexports\.([A-Za-z_$][\w$]*)\s*=/g)) names.add(found);
    const literal = /\bmodule\.exports\s*=\s*\{([^{}]*)\}/.exec(text)?.[1] ?? "";
    for (const part of literal.split(",")) names.add(part.trim().split(/[\s:(]/)[0]);
    const bridge = `const m = globalThis[Symbol.for("belljar.require")](${JSON.stringify(name)}); export default m;`;
    return bridge + exportsOf([...names].filter(nameable));
  }

  function asModule(name, text) {
    if (!text.includes("import.meta")) return text;
    const facts = { url: `file://${name}`, filename: name, dirname: path.dirname(name) };
    const head = `Object.assign(import.meta, ${JSON.stringify(facts)});`;
    shifts.set(name, head.length);
    return head + text;
  }

  function looksRequired(name, text) {
    if (/\.mjs$|\.mts$/.test(name)) return false;
    if (/\.cjs$/.test(name)) return true;
    return (
      /\b(module\.exports|exports\.[\w$]+\s*=|require\s*\()/.test(text) &&
      !/^\s*(import\s*[\w{*"']|export\s)/m.test(text)
    );
  }

  function source(name) {
    if (name.startsWith("node:")) {
      const bare = name.slice(5);
      const names = Object.keys(builtins[bare]).filter(nameable);
      return (
        `const m = globalThis[Symbol.for("belljar.require")](${JSON.stringify(name)}); export default m;` +
        exportsOf(names)
      );
    }
    const text = textOf(name);
    if (name.endsWith(".json"))
      return `export default ${JSON.stringify(JSON.parse(text)).replace(/"__proto__":/g, '["__proto__"]:')};`;
    return looksRequired(name, text) ? wrapRequired(name, text) : asModule(name, text);
  }

  const bridge = (name) =>
    name.startsWith("node:") ? builtins[name.slice(5)] : load(name, core.mainModule ?? null).exports;
  Object.defineProperty(globalThis, Symbol.for("belljar.require"), { value: bridge });

  // As Node does: CommonJS if it parses as such, else a module. Returns the module's promise, if there is one.
  function start(name) {
    const text = textOf(name);
    if (/\.mjs$|\.mts$/.test(name)) return host.evaluate(asModule(name, text), name);
    let body;
    try {
      body = compile(text, name);
    } catch (error) {
      if (!(error instanceof SyntaxError) || name.endsWith(".cjs")) throw error;
      return startModule(name, text, error);
    }
    load(name, null, body);
  }

  function startModule(name, text, first) {
    shifts.delete(name);
    try {
      return host.evaluate(asModule(name, text), name);
    } catch (error) {
      const meant = /^\s*(import|export)\b|\bawait\b/m.test(text) || !(error instanceof SyntaxError);
      if (!meant) shifts.set(name, HEAD.length);
      throw meant ? error : first;
    }
  }

  builtins.module = {
    createRequire: (from) => makeRequire({ filename: String(from).replace(/^file:\/\//, "") }),
    builtinModules: Object.keys(builtins),
    isBuiltin: (name) => builtinOf(name) !== undefined,
  };
  core.modules = { start, normalize, source, sources, shifts };
});
