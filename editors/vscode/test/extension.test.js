// The extension against a stand-in for the editor, and a real `belljar` (its path in BELLJAR).
"use strict";
const assert = require("node:assert/strict");
const fs = require("node:fs");
const http = require("node:http");
const Module = require("node:module");
const os = require("node:os");
const path = require("node:path");
const { after, before, test } = require("node:test");

const STAND_IN = path.join(__dirname, "stand_in", "vscode.js");
const resolve = Module._resolveFilename;
Module._resolveFilename = (name, ...rest) => (name === "vscode" ? STAND_IN : resolve(name, ...rest));

const vscode = require("vscode");
const extension = require("../out/extension.js");
const { framePage, isPreviewAddress, readReport } = require("../out/program.js");
const { said } = vscode;
const context = { subscriptions: [] };
let folder;

async function until(what, ready, seconds = 90) {
  const end = Date.now() + seconds * 1000;
  while (!ready()) {
    assert.ok(Date.now() < end, `${what} did not come: ${JSON.stringify(said.messages)} ${said.output}`);
    await new Promise((done) => setTimeout(done, 50));
  }
}

before(() => {
  folder = fs.mkdtempSync(path.join(os.tmpdir(), "belljar-vscode-"));
  fs.chmodSync(folder, 0o755);
  fs.writeFileSync(path.join(folder, "index.html"), "<h1>hello</h1>");
  said.settings = { program: process.env.BELLJAR || "belljar", previewPort: 3000 };
  vscode.workspace.workspaceFolders = [{ uri: { fsPath: folder } }];
  extension.activate(context);
});

after(() => {
  context.subscriptions.forEach((one) => one.dispose());
  fs.rmSync(folder, { recursive: true });
});

test("each command of package.json is there, and no other", () => {
  const told = JSON.parse(fs.readFileSync(path.join(__dirname, "../package.json"), "utf8"));
  assert.deepEqual([...said.commands.keys()].sort(), told.contributes.commands.map((one) => one.command).sort());
});

test("a selection is run in a sandbox, and its output shown", async () => {
  vscode.window.activeTextEditor = {
    selection: { isEmpty: false },
    document: { languageId: "python", getText: (range) => (range ? "print(6 * 7)" : "never") },
  };
  await said.commands.get("belljar.runSelection")();
  assert.match(said.output, /^42\n/);
  assert.match(said.output, /\[success\]/);
});

test("a language that is not run is refused by name", async () => {
  vscode.window.activeTextEditor.document.languageId = "cobol";
  await said.commands.get("belljar.runSelection")();
  assert.deepEqual(said.messages.pop(), ["error", "Belljar: cobol is not run by Belljar"]);
});

test("a preview is framed, can be read, and its sandbox ends with its pane", async () => {
  await said.commands.get("belljar.preview")();
  const panel = said.panels.at(-1);
  await until("the preview", () => panel.webview.html.includes("<iframe"));
  const url = new URL(/iframe src="([^"]+)"/.exec(panel.webview.html)[1]);
  const page = await new Promise((done, fail) => {
    http.get({ host: "127.0.0.1", port: url.port, headers: { host: url.host } }, (answer) => {
      let text = "";
      answer.on("data", (data) => (text += data)).on("end", () => done(text));
    }).on("error", fail);
  });
  assert.equal(page, "<h1>hello</h1>");
  panel.dispose();
  let open = true;
  await until("its end", () => {
    http.get({ host: "127.0.0.1", port: url.port, headers: { host: url.host }, timeout: 500 }, (answer) => answer.resume())
      .on("error", () => { open = false; });
    return !open;
  });
});

test("a preview that cannot start says why, and its pane is closed", async () => {
  said.settings.previewCommand = "echo nope; exit 3";
  await said.commands.get("belljar.preview")();
  await until("the reason", () => said.messages.some(([kind, text]) => kind === "error" && text.includes("exit code 3")));
  assert.ok(said.panels.at(-1).disposed);
  assert.match(said.output, /nope/);
});

test("only an address of a preview is framed", () => {
  assert.ok(isPreviewAddress(`http://preview-${"0".repeat(20)}.localhost:3000/`));
  for (const url of ["http://localhost:8080/", 'http://x"/', "javascript:1", "https://example.org/"]) {
    assert.ok(!isPreviewAddress(url));
  }
  assert.match(framePage("http://a:1/"), /default-src 'none'; frame-src http:\/\/a:1;/);
});

test("a report of tests is read, and what is none is told", () => {
  const report = { passed: 1, failed: 1, failures: [{ name: "t", file: "a.py", line: 3, message: "no" }] };
  assert.equal(readReport({ code: 1, stdout: JSON.stringify(report), stderr: "" }).failures[0].line, 3);
  assert.throws(() => readReport({ code: 125, stdout: '{"error": {"message": "no sandbox"}}', stderr: "" }), /no sandbox/);
  assert.throws(() => readReport({ code: 2, stdout: "", stderr: "broken" }), /broken/);
});

test("failures of tests become problems at their lines", async () => {
  const program = path.join(folder, "tests.sh");
  const report = {
    passed: 2, failed: 2, skipped: 1,
    failures: [{ name: "t", file: "/workspace/a.py", line: 3, message: "no" }, { name: "u", file: "../../etc/x", line: 1 }],
  };
  fs.writeFileSync(program, `#!/bin/sh\ntest "$1" = test && test "$3" = --json && echo '${JSON.stringify(report)}'\n`, { mode: 0o755 });
  const real = said.settings.program;
  said.settings.program = program;
  await said.commands.get("belljar.runTests")();
  said.settings.program = real;
  assert.deepEqual([...said.problems.keys()], [path.join(folder, "a.py")]);
  assert.deepEqual(said.problems.get(path.join(folder, "a.py"))[0].range.at.slice(0, 1), [2]);
  assert.deepEqual(said.messages.pop(), ["information", "Belljar: 2 passed, 2 failed, 1 skipped"]);
});
