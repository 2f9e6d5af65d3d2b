// `console`, with Node's layout.
(function (host, core) {
  "use strict";
  const { inspect, format } = core;

  let margin = "";
  const counts = new Map(),
    timers = new Map();
  const say =
    (fd) =>
    (...args) => {
      const text = format(...args);
      core.print(fd, `${margin && text ? margin + text.replaceAll("\n", `\n${margin}`) : text}\n`);
    };
  const log = say(1),
    error = say(2);

  function table(rows, only) {
    if (typeof rows !== "object" || rows === null) return log(rows);
    const list = rows instanceof Map ? [...rows] : Object.entries(rows instanceof Set ? [...rows] : rows);
    const columns = new Set(
      only ?? list.flatMap(([, row]) => (typeof row === "object" && row ? Object.keys(row) : [])),
    );
    const plain = list.some(([, row]) => typeof row !== "object" || row === null);
    const head = ["(index)", ...columns, ...(plain ? ["Values"] : [])];
    const cell = (row, name) =>
      typeof row === "object" && row && Object.hasOwn(row, name) ? inspect(row[name], { depth: 0 }) : "";
    const body = list.map(([index, row]) => [
      String(index),
      ...[...columns].map((name) => cell(row, name)),
      ...(plain ? [typeof row === "object" && row ? "" : inspect(row)] : []),
    ]);
    const widths = head.map((_, at) => Math.max(...[head, ...body].map((line) => line[at].length)) + 2);
    const rule = (left, middle, right) => left + widths.map((width) => "─".repeat(width)).join(middle) + right;
    const line = (cells) => `│${cells.map((text, at) => ` ${text}`.padEnd(widths[at])).join("│")}│`;
    log([rule("┌", "┬", "┐"), line(head), rule("├", "┼", "┤"), ...body.map(line), rule("└", "┴", "┘")].join("\n"));
  }

  const elapsed = (label) => {
    const ms = core.web.performance.now() - timers.get(label);
    return ms >= 1000 ? `${(ms / 1000).toFixed(3)}s` : `${ms.toFixed(3)}ms`;
  };
  const console = {
    log,
    info: log,
    debug: log,
    error,
    warn: error,
    table,
    trace: (...args) =>
      error(`Trace${args.length ? `: ${format(...args)}` : ""}${new Error().stack.replace(/^[^\n]*/, "")}`),
    dir: (value, options) => log(inspect(value, options)),
    dirxml: log,
    assert(held, ...args) {
      if (!held) error(args.length ? `Assertion failed: ${format(...args)}` : "Assertion failed");
    },
    group(...args) {
      if (args.length) log(...args);
      margin += "  ";
    },
    groupEnd() {
      margin = margin.slice(2);
    },
    count(label = "default") {
      counts.set(label, (counts.get(label) ?? 0) + 1);
      log(`${label}: ${counts.get(label)}`);
    },
    countReset(label = "default") {
      counts.delete(label);
    },
    time(label = "default") {
      timers.set(label, core.web.performance.now());
    },
    timeLog(label = "default", ...args) {
      if (timers.has(label)) log(`${label}: ${elapsed(label)}`, ...args);
    },
    timeEnd(label = "default") {
      console.timeLog(label);
      timers.delete(label);
    },
  };
  console.groupCollapsed = console.group;

  core.console = console;
});
