/** Belljar as a program: started, heard line by line, and ended. Nothing here knows the editor. */

import { ChildProcess, spawn } from "node:child_process";
import { createInterface } from "node:readline";

const KILL_AFTER_MS = 10_000;
const MOST_ERROR_CHARACTERS = 4000;

export interface Finished {
  code: number | null;
  stdout: string;
  stderr: string;
}

/** Runs a command to its end. */
export function run(program: string, words: string[], input = "", folder?: string): Promise<Finished> {
  return new Promise((resolve, reject) => {
    const child = spawn(program, words, { cwd: folder, stdio: ["pipe", "pipe", "pipe"] });
    let stdout = "";
    let stderr = "";
    child.stdout.setEncoding("utf8").on("data", (text: string) => (stdout += text));
    child.stderr.setEncoding("utf8").on("data", (text: string) => (stderr += text));
    child.on("error", reject);
    child.on("close", (code) => resolve({ code, stdout, stderr }));
    child.stdin.on("error", () => undefined); // it may end before it has read
    child.stdin.end(input);
  });
}

export interface Told {
  url?: string;
  status?: "starting" | "running" | "error";
  reason?: string;
  suggestion?: string;
  logs?: string[];
  finding?: { kind: string; message: string; suggestion: string };
  error?: { message: string; fix?: string };
}

/** A command that goes on, and tells what happens as a JSON document on each line. */
export class Following {
  private readonly child: ChildProcess;
  private stderr = "";
  readonly ended: Promise<string>;

  constructor(program: string, words: string[], folder: string, told: (what: Told) => void) {
    const child = spawn(program, words, { cwd: folder, stdio: ["ignore", "pipe", "pipe"] });
    this.child = child;
    child.stderr.setEncoding("utf8").on("data", (text: string) => {
      this.stderr = (this.stderr + text).slice(-MOST_ERROR_CHARACTERS);
    });
    const lines = createInterface({ input: child.stdout });
    lines.on("line", (line) => {
      try {
        told(JSON.parse(line) as Told);
      } catch {
        // no JSON: nothing that was meant for us
      }
    });
    this.ended = new Promise((resolve) => {
      child.on("error", (error) => resolve(error.message));
      child.on("close", () => resolve(this.stderr.trim()));
    });
  }

  /** Ends it: it has some seconds to end its sandbox. */
  end(): void {
    if (this.child.exitCode === null && this.child.signalCode === null) {
      this.child.kill("SIGTERM");
      setTimeout(() => this.child.kill("SIGKILL"), KILL_AFTER_MS).unref();
    }
  }
}

/** Whether an address is one that `belljar preview` prints: a page of the guest's must not choose another. */
export function isPreviewAddress(url: string): boolean {
  return /^http:\/\/preview-[0-9a-f]{20}\.localhost:\d{1,5}\/$/.test(url);
}

/** The page around a preview: it loads that frame, and nothing else. */
export function framePage(url: string): string {
  const origin = url.slice(0, -1);
  const policy = `default-src 'none'; frame-src ${origin}; style-src 'unsafe-inline'`;
  return `<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="${policy}">
<style>html,body,iframe{margin:0;border:0;width:100%;height:100%;background:#fff}</style></head>
<body><iframe src="${url}" sandbox="allow-scripts allow-same-origin allow-forms allow-modals allow-popups allow-downloads"></iframe></body></html>`;
}

export interface TestFailure {
  name: string;
  file?: string | null;
  line?: number | null;
  message?: string | null;
}

export interface TestReport {
  passed: number;
  failed: number;
  skipped: number;
  failures: TestFailure[];
  error?: { message: string } | null;
}

/** Reads what `belljar test --json` printed; raises what it says where it is no report. */
export function readReport(finished: Finished): TestReport {
  let told: Partial<TestReport> & { error?: { message: string } | null };
  try {
    told = JSON.parse(finished.stdout) as typeof told;
  } catch {
    throw new Error(finished.stderr.trim() || "belljar test printed no report");
  }
  if (typeof told.passed !== "number" || typeof told.failed !== "number") {
    throw new Error(told.error?.message ?? "belljar test printed no report");
  }
  return { skipped: 0, failures: [], ...told, passed: told.passed, failed: told.failed };
}
