// Lets a Node that does not take types out by itself (before 22.18) run TypeScript: `node --require THIS main.ts`.
// Lines stay where they are, columns may not. Imports become calls of `require`; the main file may await at its top.
"use strict";
const { readFileSync } = require("node:fs");
const Module = require("node:module");
const { join } = require("node:path");
const { runInThisContext } = require("node:vm");

function stripped(sucrase, text, name) {
  const transforms = ["typescript", "imports"];
  try {
    return sucrase.transform(text, { transforms, disableESTransforms: true, preserveDynamicImport: true }).code;
  } catch (error) {
    const [, line, column] = /\((\d+):(\d+)\)$/.exec(error.message) ?? [0, 1, 1];
    const wrong = new SyntaxError(error.message.replace(/ \(\d+:\d+\)$/, ""));
    wrong.stack = `SyntaxError: ${wrong.message}\n    at ${name}:${line}:${column}`;
    throw wrong;
  }
}

if (!process.features.typescript) {
  const core = {};
  const place = join(__dirname, "sucrase.js");
  runInThisContext(readFileSync(place, "utf8"), { filename: place })({}, core);
  const load = (module, name) => {
    const code = stripped(core.sucrase, readFileSync(name, "utf8"), name);
    try {
      module._compile(code, name);
    } catch (error) {
      const awaits = error instanceof SyntaxError && /await is only valid/.test(error.message);
      if (!awaits || module !== process.mainModule) throw error;
      module._compile(`(async () => {${code}\n})();`, name);
    }
  };
  for (const ending of [".ts", ".mts", ".cts"]) Module._extensions[ending] = load;
}
