/** The editor's side: three commands, each of which asks `belljar` and shows what it tells. */

import * as path from "node:path";
import * as vscode from "vscode";
import { Following, Told, framePage, isPreviewAddress, readReport, run } from "./program.js";

const LANGUAGES: Record<string, string> = {
  python: "python",
  javascript: "javascript",
  typescript: "typescript",
  shellscript: "bash",
  go: "go",
  rust: "rust",
};

let output: vscode.OutputChannel;
let problems: vscode.DiagnosticCollection;

export function activate(context: vscode.ExtensionContext): void {
  output = vscode.window.createOutputChannel("Belljar");
  problems = vscode.languages.createDiagnosticCollection("belljar");
  context.subscriptions.push(
    output,
    problems,
    vscode.commands.registerCommand("belljar.preview", () => shown(() => preview(context))),
    vscode.commands.registerCommand("belljar.runSelection", () => shown(runSelection)),
    vscode.commands.registerCommand("belljar.runTests", () => shown(runTests)),
  );
}

export function deactivate(): void {}

/** Does something, and says what went wrong. */
async function shown<T>(work: () => Promise<T>): Promise<T | undefined> {
  try {
    return await work();
  } catch (error) {
    void vscode.window.showErrorMessage(`Belljar: ${error instanceof Error ? error.message : String(error)}`);
    return undefined;
  }
}

function program(): string {
  return vscode.workspace.getConfiguration("belljar").get<string>("program") || "belljar";
}

function folder(): string {
  const found = vscode.workspace.workspaceFolders?.[0];
  if (!found) throw new Error("open a folder first");
  return found.uri.fsPath;
}

/** Shows the project in a pane beside the editor; closing the pane ends its sandbox. */
async function preview(context: vscode.ExtensionContext): Promise<void> {
  const settings = vscode.workspace.getConfiguration("belljar");
  const command = settings.get<string>("previewCommand") || "";
  const words = ["preview", folder(), "--json", "--port", String(settings.get<number>("previewPort") ?? 3000)];
  const panel = vscode.window.createWebviewPanel("belljar.preview", "Belljar", vscode.ViewColumn.Beside, {
    enableScripts: false,
    retainContextWhenHidden: true,
  });
  panel.webview.html = "<!doctype html><p>starting …</p>";
  const following = new Following(program(), command ? [...words, "--", command] : words, folder(), (told) =>
    hear(told, panel),
  );
  panel.onDidDispose(() => following.end());
  context.subscriptions.push({ dispose: () => following.end() });
  void following.ended.then((words) => words && output.appendLine(words));
}

function hear(told: Told, panel: vscode.WebviewPanel): void {
  if (told.finding) {
    output.appendLine(`${told.finding.kind}: ${told.finding.message}: ${told.finding.suggestion}`);
  }
  if (told.status === "running" && told.url && isPreviewAddress(told.url)) {
    panel.webview.html = framePage(told.url);
  }
  if (told.status === "error" || told.error) {
    for (const line of told.logs ?? []) output.appendLine(line);
    const why = [told.reason ?? told.error?.message, told.suggestion ?? told.error?.fix].filter(Boolean).join(". ");
    void vscode.window.showErrorMessage(`Belljar: ${why}`);
    panel.dispose();
  }
}

/** Runs what is selected, or else the whole file, in a fresh sandbox. */
async function runSelection(): Promise<void> {
  const editor = vscode.window.activeTextEditor;
  if (!editor) throw new Error("open a file first");
  const language = LANGUAGES[editor.document.languageId];
  if (!language) throw new Error(`${editor.document.languageId} is not run by Belljar`);
  const code = editor.document.getText(editor.selection.isEmpty ? undefined : editor.selection);
  const finished = await run(program(), ["run", "--language", language, "--json", "-"], code);
  const told = JSON.parse(finished.stdout) as {
    status?: string; stdout?: string; stderr?: string; error?: { message: string; suggestion?: string; fix?: string };
  };
  output.show(true);
  output.append(told.stdout ?? "");
  output.append(told.stderr ?? "");
  if (told.error) output.appendLine(`${told.error.message}: ${told.error.suggestion ?? told.error.fix ?? ""}`);
  output.appendLine(`[${told.status ?? "refused"}]`);
}

/** Runs the project's tests in a sandbox; each failure becomes a problem at its line. */
async function runTests(): Promise<void> {
  const root = folder();
  const report = readReport(await run(program(), ["test", root, "--json"], "", root));
  problems.clear();
  const found = new Map<string, vscode.Diagnostic[]>();
  for (const failure of report.failures) {
    output.appendLine(`failed: ${failure.name}: ${failure.message ?? ""}`);
    if (!failure.file) continue;
    const place = path.resolve(root, failure.file.replace(/^\/workspace\//, ""));
    if (!place.startsWith(root + path.sep)) continue;
    const line = Math.max(0, (failure.line ?? 1) - 1);
    const problem = new vscode.Diagnostic(
      new vscode.Range(line, 0, line, 1000), `${failure.name}: ${failure.message ?? ""}`, vscode.DiagnosticSeverity.Error,
    );
    found.set(place, [...(found.get(place) ?? []), problem]);
  }
  for (const [place, list] of found) problems.set(vscode.Uri.file(place), list);
  const told = `${report.passed} passed, ${report.failed} failed, ${report.skipped} skipped`;
  output.appendLine(told);
  void vscode.window.showInformationMessage(`Belljar: ${told}`);
}
