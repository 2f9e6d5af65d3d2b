// A stand-in for the editor's module: it records what the extension shows. The editor itself is not there in tests.
"use strict";
const said = { messages: [], output: "", panels: [], problems: new Map(), commands: new Map(), settings: {} };
class Range { constructor(...at) { this.at = at; } }
class Diagnostic { constructor(range, message, severity) { Object.assign(this, { range, message, severity }); } }
const say = (kind) => (text) => { said.messages.push([kind, text]); return Promise.resolve(undefined); };
module.exports = {
  said, Range, Diagnostic,
  DiagnosticSeverity: { Error: 0 },
  ViewColumn: { Beside: -2 },
  Uri: { file: (path) => ({ fsPath: path }) },
  commands: { registerCommand: (name, work) => { said.commands.set(name, work); return { dispose() {} }; } },
  languages: {
    createDiagnosticCollection: () => ({
      clear: () => said.problems.clear(), set: (uri, list) => said.problems.set(uri.fsPath, list), dispose() {},
    }),
  },
  workspace: {
    workspaceFolders: [],
    getConfiguration: () => ({ get: (name) => said.settings[name] }),
  },
  window: {
    activeTextEditor: undefined,
    createOutputChannel: () => ({
      append: (text) => { said.output += text; }, appendLine: (text) => { said.output += `${text}\n`; }, show() {}, dispose() {},
    }),
    showErrorMessage: say("error"),
    showInformationMessage: say("information"),
    createWebviewPanel: () => {
      const heard = [];
      const panel = {
        webview: { html: "" }, disposed: false, onDidDispose: (work) => heard.push(work),
        dispose() { if (!panel.disposed) { panel.disposed = true; heard.forEach((work) => work()); } },
      };
      said.panels.push(panel);
      return panel;
    },
  },
};
