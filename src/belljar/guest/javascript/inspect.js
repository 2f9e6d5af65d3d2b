// How a value is shown: `util.inspect` and `util.format`, with Node's layout, so that output reads as Node's would.
(function (host, core) {
  "use strict";
  const CUSTOM = Symbol.for("nodejs.util.inspect.custom");
  const WIDTH = 80;
  const FLAT_LEVELS = 3; // an object with more levels than this inside is never shown on one line
  const GROUP_FROM = 6;
  const DEFAULTS = { depth: 2, maxArrayLength: 100, maxStringLength: 10000, showHidden: false, sorted: false };
  const IDENTIFIER = /^[a-zA-Z_$][\w$]*$/;
  const TypedArray = Object.getPrototypeOf(Uint8Array);
  const tagOf = (value) => Object.prototype.toString.call(value).slice(8, -1);

  function quote(text) {
    const mark = !text.includes("'") ? "'" : !text.includes('"') ? '"' : !text.includes("`") ? "`" : "'";
    const named = { "\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f", "\v": "\\v", "\\": "\\\\" };
    const body = text.replace(/[\x00-\x1f\x7f-\x9f\\'"`]/g, (c) => {
      if (c === "'" || c === '"' || c === "`") return c === mark && mark === "'" ? "\\'" : c;
      return named[c] ?? "\\x" + c.charCodeAt(0).toString(16).toUpperCase().padStart(2, "0");
    });
    return mark + body + mark;
  }

  function primitive(value, ctx) {
    if (typeof value === "string") {
      const most = ctx.maxStringLength;
      if (value.length <= most) return quote(value);
      return `${quote(value.slice(0, most))}... ${value.length - most} more characters`;
    }
    if (typeof value === "bigint") return `${value}n`;
    return Object.is(value, -0) ? "-0" : String(value);
  }

  function constructorName(value) {
    for (let at = value; at; at = Object.getPrototypeOf(at)) {
      const own = Object.getOwnPropertyDescriptor(at, "constructor");
      if (own && typeof own.value === "function" && own.value.name !== "" && value instanceof own.value) {
        return own.value.name;
      }
    }
    return null;
  }

  function prefix(value, name, fallback, size) {
    const counted = size === undefined ? "" : `(${size})`;
    const shown = name === null ? `[${fallback}${counted}: null prototype] ` : `${name}${counted} `;
    const tag = value[Symbol.toStringTag];
    return typeof tag === "string" && tag !== "" && tag !== name ? `${shown}[${tag}] ` : shown;
  }

  function functionBase(value) {
    const source = Function.prototype.toString.call(value);
    if (source.startsWith("class") && /^class\b/.test(source)) {
      const parent = Object.getPrototypeOf(value).name;
      return `[class ${value.name || "(anonymous)"}${parent ? ` extends ${parent}` : ""}]`;
    }
    const kind = tagOf(value);
    return `[${kind}${value.name ? `: ${value.name}` : " (anonymous)"}]`;
  }

  function errorBase(error, ctx) {
    let stack =
      typeof error.stack === "string" && error.stack ? error.stack : `[${Error.prototype.toString.call(error)}]`;
    const name = error.name === "Error" ? (constructorName(error) ?? "Error") : String(error.name);
    if (/^Error\b/.test(stack) && !stack.split("\n", 1)[0].includes(name)) stack = stack.replace("Error", name);
    const code = error.code;
    if (typeof code === "string" && /^ERR_/.test(code) && !stack.includes(`[${code}]`)) {
      stack = stack.replace(/^([\w$.]+)/, `$1 [${code}]`);
    }
    if (!stack.includes("\n    at")) stack = stack.startsWith("[") ? stack : `[${stack}]`;
    return ctx.indent ? stack.replaceAll("\n", `\n${" ".repeat(ctx.indent)}`) : stack;
  }

  function key(name) {
    if (typeof name === "symbol") return `[${String(name)}]`;
    return IDENTIFIER.test(name) ? name : quote(name);
  }

  function property(value, name, ctx, depth, isArray) {
    const found = Object.getOwnPropertyDescriptor(value, name) ?? { value: value[name], enumerable: true };
    let shown;
    if ("value" in found) {
      shown = inside(ctx, () => formatValue(found.value, ctx, depth));
    } else {
      shown = found.get ? (found.set ? "[Getter/Setter]" : "[Getter]") : "[Setter]";
    }
    if (isArray) return shown;
    return `${found.enumerable ? key(name) : `[${String(name)}]`}: ${shown}`;
  }

  function inside(ctx, produce) {
    ctx.indent += 2;
    const lines = produce();
    ctx.indent -= 2;
    return lines;
  }

  function more(lines, left) {
    if (left > 0) lines.push(`... ${left} more item${left > 1 ? "s" : ""}`);
    return lines;
  }

  function arrayLines(value, ctx, depth) {
    const lines = [];
    const most = Math.min(ctx.maxArrayLength, value.length);
    let index = 0;
    for (; index < value.length && lines.length < most; index++) {
      if (Object.hasOwn(value, index)) {
        lines.push(property(value, index, ctx, depth, true));
        continue;
      }
      const start = index;
      while (index + 1 < value.length && !Object.hasOwn(value, index + 1)) index++;
      const holes = index - start + 1;
      lines.push(`<${holes} empty item${holes > 1 ? "s" : ""}>`);
    }
    return more(lines, value.length - index);
  }

  function someOf(iterable, size, ctx, show) {
    const lines = [];
    for (const item of iterable) {
      if (lines.length >= ctx.maxArrayLength) break;
      lines.push(show(item));
    }
    return more(lines, size - lines.length);
  }

  const ownKeys = (value, ctx) => {
    const names = ctx.showHidden ? Object.getOwnPropertyNames(value) : Object.keys(value);
    const visible = (s) => ctx.showHidden || Object.getOwnPropertyDescriptor(value, s).enumerable;
    return [...names, ...Object.getOwnPropertySymbols(value).filter(visible)];
  };
  const notIndex = (name) => typeof name === "symbol" || !/^(0|[1-9]\d*)$/.test(name);

  // What kind of thing it is: its braces, what stands before them, its own lines and which properties follow.
  function describe(value, ctx, depth) {
    const name = constructorName(value);
    const show = (item) => formatValue(item, ctx, depth);
    if (Array.isArray(value)) {
      const before = name === "Array" ? "" : prefix(value, name, "Array", value.length);
      return {
        braces: [`${before}[`, "]"],
        list: true,
        keys: ownKeys(value, ctx).filter(notIndex),
        lines: () => arrayLines(value, ctx, depth),
      };
    }
    if (core.Buffer && value instanceof core.Buffer) {
      const bytes = [...value.subarray(0, 50)].map((b) => b.toString(16).padStart(2, "0")).join(" ");
      const left = value.length - 50;
      return {
        base: `<Buffer${bytes && " "}${bytes}${left > 0 ? ` ... ${left} more byte${left > 1 ? "s" : ""}` : ""}>`,
        keys: [],
      };
    }
    if (value instanceof TypedArray) {
      return {
        braces: [`${prefix(value, name, tagOf(value), value.length)}[`, "]"],
        list: true,
        keys: ownKeys(value, ctx).filter(notIndex),
        lines: () => someOf(value, value.length, ctx, (item) => primitive(item, ctx)),
      };
    }
    if (value instanceof Set) {
      return {
        braces: [`${prefix(value, name, "Set", value.size)}{`, "}"],
        lines: () => inside(ctx, () => someOf(value, value.size, ctx, show)),
      };
    }
    if (value instanceof Map) {
      return {
        braces: [`${prefix(value, name, "Map", value.size)}{`, "}"],
        lines: () => inside(ctx, () => someOf(value, value.size, ctx, ([k, v]) => `${show(k)} => ${show(v)}`)),
      };
    }
    if (typeof value === "function") return { base: functionBase(value) };
    return describePlain(value, name, ctx, show);
  }

  function describePlain(value, name, ctx, show) {
    if (Error.isError(value)) {
      const hidden = ["stack", "message"];
      const keys = ownKeys(value, ctx).filter(
        (k) => !hidden.includes(k) && !(k === "name" && value.stack.includes(value.name)),
      );
      if (Object.hasOwn(value, "cause") && !keys.includes("cause")) keys.push("cause");
      if (Array.isArray(value.errors) && !keys.includes("errors")) keys.push("errors");
      return { base: errorBase(value, ctx), keys };
    }
    if (value instanceof RegExp) return { base: RegExp.prototype.toString.call(value) };
    if (value instanceof Date) return { base: isNaN(value) ? "Invalid Date" : value.toISOString() };
    if (value instanceof Promise) {
      const state = host.promiseState(value);
      const settled = () => (state === 2 ? "<rejected> " : "") + show(host.promiseResult(value));
      return {
        braces: [`${name ?? "Promise"} {`, "}"],
        lines: () => [state === 0 ? "<pending>" : inside(ctx, settled)],
      };
    }
    if (value instanceof WeakSet || value instanceof WeakMap) {
      return { braces: [`${name} {`, "}"], lines: () => ["<items unknown>"] };
    }
    if (value instanceof ArrayBuffer) {
      const bytes = [...new Uint8Array(value, 0, Math.min(50, value.byteLength))];
      const hex = bytes.map((b) => b.toString(16).padStart(2, "0")).join(" ");
      return {
        braces: [`${name} {`, "}"],
        lines: () => [`[Uint8Contents]: <${hex}>`, `byteLength: ${value.byteLength}`],
      };
    }
    for (const Box of [Number, String, Boolean, BigInt, Symbol]) {
      if (value instanceof Box) {
        const keys = ownKeys(value, ctx).filter((k) => Box !== String || notIndex(k));
        return { base: `[${Box.name}: ${primitive(value.valueOf(), { ...ctx, maxStringLength: 10000 })}]`, keys };
      }
    }
    const tag = tagOf(value);
    if (tag === "Arguments")
      return { braces: ["[Arguments] [", "]"], list: true, keys: [], lines: () => [...value].map(show) };
    const before = name === "Object" && tag === "Object" ? "" : prefix(value, name, "Object");
    return { braces: [`${before}{`, "}"] };
  }

  function formatValue(value, ctx, depth, typed = false) {
    if (value === null || (typeof value !== "object" && typeof value !== "function")) {
      return primitive(value, ctx);
    }
    const custom = value[CUSTOM];
    if (typeof custom === "function" && custom !== inspect && !typed) {
      const left = ctx.depth === null ? null : ctx.depth - depth;
      const shown = custom.call(value, left, { ...ctx.options, depth: left }, inspect);
      if (shown !== value) {
        return typeof shown === "string"
          ? shown.replaceAll("\n", `\n${" ".repeat(ctx.indent)}`)
          : formatValue(shown, ctx, depth, true);
      }
    }
    if (ctx.seen.includes(value)) {
      if (!ctx.circular.has(value)) ctx.circular.set(value, ctx.circular.size + 1);
      return `[Circular *${ctx.circular.get(value)}]`;
    }
    return formatObject(value, ctx, depth);
  }

  function formatObject(value, ctx, depth) {
    const kind = describe(value, ctx, depth + 1);
    const keys = kind.keys ?? ownKeys(value, ctx);
    if (kind.base && keys.length === 0) return kind.base;
    const size = value.length ?? value.size;
    if (keys.length === 0 && (!kind.lines || size === 0)) return marked(value, kind.braces, ctx).join("");
    if (ctx.depth !== null && depth > ctx.depth) {
      const name = constructorName(value);
      return Array.isArray(value) ? "[Array]" : `[${name === null ? "Object: null prototype" : name}]`;
    }
    ctx.seen.push(value);
    ctx.level = depth;
    const braces = kind.braces ?? ["{", "}"];
    const lines = kind.lines ? kind.lines() : [];
    for (const name of keys) lines.push(property(value, name, ctx, depth + 1, false));
    ctx.seen.pop();
    if (ctx.sorted && !kind.list) lines.sort();
    if (kind.base) return layOut(lines, marked(value, [kind.base], ctx)[0], braces, ctx, depth, kind.list, value);
    return layOut(lines, "", marked(value, braces, ctx), ctx, depth, kind.list, value);
  }

  const marked = (value, [first, ...rest], ctx) =>
    ctx.circular.has(value) ? [`<ref *${ctx.circular.get(value)}> ${first}`, ...rest] : [first, ...rest];

  function layOut(lines, base, braces, ctx, depth, isList, value) {
    const before = lines.length;
    if (isList && before > GROUP_FROM) lines = group(lines, ctx, value);
    if (ctx.level - depth < FLAT_LEVELS && lines.length === before) {
      const start = lines.length + ctx.indent + braces[0].length + base.length + 10;
      const total = lines.reduce((sum, line) => sum + line.length, lines.length + start);
      if (total <= WIDTH && !base.includes("\n") && !lines.some((line) => line.includes("\n"))) {
        return `${base ? `${base} ` : ""}${braces[0]} ${lines.join(", ")} ${braces[1]}`;
      }
    }
    const margin = `\n${" ".repeat(ctx.indent)}`;
    return `${base ? `${base} ` : ""}${braces[0]}${margin}  ${lines.join(`,${margin}  `)}${margin}${braces[1]}`;
  }

  // Long lists in columns of equal width, as wide as makes the block roughly two and a half times as wide as high.
  function group(lines, ctx, value) {
    const hasMore = ctx.maxArrayLength < value.length;
    const count = hasMore ? lines.length - 1 : lines.length;
    const widths = lines.slice(0, count).map((line) => line.length + 2);
    const total = widths.reduce((sum, width) => sum + width, 0);
    const widest = Math.max(...widths);
    if (widest * 3 + ctx.indent >= WIDTH || !(total / widest > 5 || widest <= 8)) return lines;
    const bias = Math.sqrt(widest - total / lines.length);
    const biased = Math.max(widest - 3 - bias, 1);
    const columns = Math.min(
      Math.round(Math.sqrt(2.5 * biased * count) / biased),
      Math.floor((WIDTH - ctx.indent) / widest),
      FLAT_LEVELS * 4,
      15,
    );
    if (columns <= 1) return lines;
    const room = [];
    for (let c = 0; c < columns; c++) {
      room.push(Math.max(...widths.filter((_, index) => index % columns === c)));
    }
    const right = [...value].every((item) => typeof item === "number" || typeof item === "bigint");
    const rows = [];
    for (let from = 0; from < count; from += columns) {
      const row = lines.slice(from, Math.min(from + columns, count));
      const last = row.length - 1;
      rows.push(
        row
          .map((cell, c) => {
            const text = c === last ? cell : `${cell}, `;
            if (right) return text.padStart(c === last ? room[c] - 2 : room[c]);
            return c === last ? text : text.padEnd(room[c]);
          })
          .join(""),
      );
    }
    if (hasMore) rows.push(lines[count]);
    return rows;
  }

  function inspect(value, options, ...old) {
    const merged = { ...DEFAULTS };
    if (options !== undefined) {
      const given = typeof options === "object" && options ? options : { showHidden: options, depth: old[0] };
      for (const name of Object.keys(given)) if (given[name] !== undefined) merged[name] = given[name];
    }
    const depth = merged.depth === Infinity ? null : merged.depth;
    const ctx = { ...merged, depth, options: merged, indent: 0, level: 0, seen: [], circular: new Map() };
    return formatValue(value, ctx, 0);
  }
  inspect.custom = CUSTOM;
  inspect.defaultOptions = DEFAULTS;

  function directive(letter, value) {
    switch (letter) {
      case "s":
        if (typeof value === "bigint" || Object.is(value, -0)) return primitive(value, DEFAULTS);
        if (typeof value !== "object" || value === null) return String(value);
        return Object.hasOwn(value, "toString") || Error.isError(value) || value instanceof Date
          ? String(value)
          : inspect(value, { depth: 0 });
      case "d":
        return typeof value === "bigint"
          ? `${value}n`
          : typeof value === "symbol" || typeof value === "object"
            ? "NaN"
            : primitive(Number(value), DEFAULTS);
      case "i":
        return typeof value === "bigint"
          ? `${value}n`
          : typeof value === "object"
            ? "NaN"
            : primitive(parseInt(value), DEFAULTS);
      case "f":
        return typeof value === "symbol" ? "NaN" : primitive(parseFloat(value), DEFAULTS);
      case "j":
        return JSON.stringify(value);
      case "o":
        return inspect(value, { showHidden: true, depth: 4 });
      case "O":
        return inspect(value);
      default:
        return ""; // %c: styles mean nothing here
    }
  }

  function format(...args) {
    if (args.length === 1 && typeof args[0] === "string") return args[0];
    const words = [];
    let next = 0;
    if (typeof args[0] === "string") {
      next = 1;
      words.push(
        args[0].replace(/%[sdifjoOc%]/g, (mark) => {
          if (mark === "%%") return "%";
          return next < args.length ? directive(mark[1], args[next++]) : mark;
        }),
      );
    }
    for (; next < args.length; next++) {
      const value = args[next];
      if (typeof value === "string") words.push(value);
      else
        words.push(
          value && (typeof value === "object" || typeof value === "function")
            ? inspect(value)
            : primitive(value, DEFAULTS),
        );
    }
    return words.join(" ");
  }

  Object.assign(core, { inspect, format });
});
