// What a browser and Node both have and QuickJS has not: text codecs, Buffer, structuredClone, performance, crypto.
(function (host, core) {
  "use strict";

  class TextEncoder {
    get encoding() {
      return "utf-8";
    }
    encode(text = "") {
      return host.encode(String(text).toWellFormed());
    }
    encodeInto(text, target) {
      let read = 0,
        written = 0;
      for (const letter of String(text)) {
        const bytes = this.encode(letter);
        if (written + bytes.length > target.length) break;
        target.set(bytes, written);
        written += bytes.length;
        read += letter.length;
      }
      return { read, written };
    }
  }

  const bytesOf = (data) => {
    if (data instanceof Uint8Array) return data;
    return ArrayBuffer.isView(data)
      ? new Uint8Array(data.buffer, data.byteOffset, data.byteLength)
      : new Uint8Array(data);
  };

  class TextDecoder {
    #fatal;
    #keepMark;
    #label;
    #rest = new Uint8Array(0);
    constructor(label = "utf-8", { fatal = false, ignoreBOM = false } = {}) {
      this.#label = String(label)
        .toLowerCase()
        .replace(/^utf8$/, "utf-8");
      if (!["utf-8", "latin1", "ascii", "iso-8859-1", "windows-1252", "utf-16le"].includes(this.#label)) {
        throw new RangeError(`The "${label}" encoding is not supported`);
      }
      this.#fatal = fatal;
      this.#keepMark = ignoreBOM;
    }
    get encoding() {
      return this.#label;
    }
    get fatal() {
      return this.#fatal;
    }
    decode(data = new Uint8Array(0), { stream = false } = {}) {
      let bytes = bytesOf(data);
      if (this.#label === "utf-16le") return fromUnits(bytes);
      if (this.#label !== "utf-8") return fromLatin1(bytes);
      if (this.#rest.length) bytes = joined([this.#rest, bytes]);
      const whole = stream ? bytes.length - unfinished(bytes) : bytes.length;
      this.#rest = bytes.slice(whole);
      const text = host.decode(bytes.subarray(0, whole), this.#fatal ? 1 : 0);
      if (text === undefined) throw new TypeError("The encoded data was not valid for encoding utf-8");
      return !this.#keepMark && text.charCodeAt(0) === 0xfeff ? text.slice(1) : text;
    }
  }

  // How many bytes at the end begin a letter that has not ended.
  function unfinished(bytes) {
    for (let back = 1; back <= Math.min(3, bytes.length); back++) {
      const byte = bytes[bytes.length - back];
      if (byte >= 0xc0) return back < (byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : 2) ? back : 0;
      if (byte < 0x80) return 0;
    }
    return 0;
  }

  function pieces(bytes, make) {
    let text = "";
    for (let at = 0; at < bytes.length; at += 8192) text += make(bytes.subarray(at, at + 8192));
    return text;
  }
  const fromLatin1 = (bytes) => pieces(bytes, (part) => String.fromCharCode(...part));
  const fromUnits = (bytes) =>
    pieces(bytes, (part) => {
      let text = "";
      for (let at = 0; at + 1 < part.length; at += 2) text += String.fromCharCode(part[at] | (part[at + 1] << 8));
      return text;
    });
  const toLatin1 = (text) => Uint8Array.from(text, (letter) => letter.charCodeAt(0) & 255);

  function joined(parts, total = parts.reduce((sum, part) => sum + part.length, 0)) {
    const whole = new Uint8Array(total);
    let at = 0;
    for (const part of parts) {
      if (at >= total) break;
      whole.set(part.subarray(0, total - at), at);
      at += part.length;
    }
    return whole;
  }

  function encodeAs(text, encoding = "utf8") {
    switch (String(encoding).toLowerCase()) {
      case "utf8":
      case "utf-8":
        return host.encode(text.toWellFormed());
      case "hex":
        return Uint8Array.from(text.match(/^(?:[0-9a-f]{2})*/i)[0].match(/../g) ?? [], (pair) => parseInt(pair, 16));
      case "base64":
      case "base64url":
        return toLatin1(
          atob(
            text
              .replace(/-/g, "+")
              .replace(/_/g, "/")
              .replace(/[^A-Za-z0-9+/]/g, ""),
          ),
        );
      case "latin1":
      case "binary":
      case "ascii":
        return toLatin1(text);
      case "utf16le":
      case "utf-16le":
      case "ucs2":
        return Uint8Array.from(
          { length: text.length * 2 },
          (_, at) => (text.charCodeAt(at >> 1) >> (at & 1 ? 8 : 0)) & 255,
        );
      default:
        throw core.error(TypeError, "ERR_UNKNOWN_ENCODING", `Unknown encoding: ${encoding}`);
    }
  }

  function decodeAs(bytes, encoding = "utf8") {
    switch (String(encoding).toLowerCase()) {
      case "utf8":
      case "utf-8":
        return host.decode(bytes, 0);
      case "hex":
        return pieces(bytes, (part) => Array.from(part, (b) => b.toString(16).padStart(2, "0")).join(""));
      case "base64":
        return btoa(fromLatin1(bytes));
      case "base64url":
        return btoa(fromLatin1(bytes)).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
      case "latin1":
      case "binary":
        return fromLatin1(bytes);
      case "ascii":
        return fromLatin1(bytes.map((b) => b & 127));
      case "utf16le":
      case "utf-16le":
      case "ucs2":
        return fromUnits(bytes);
      default:
        throw core.error(TypeError, "ERR_UNKNOWN_ENCODING", `Unknown encoding: ${encoding}`);
    }
  }

  class Buffer extends Uint8Array {
    static from(data, encoding, length) {
      if (typeof data === "string") return Buffer.#over(encodeAs(data, encoding));
      if (data instanceof ArrayBuffer) return new Buffer(data, encoding, length);
      if (data?.type === "Buffer" && Array.isArray(data.data)) return Buffer.from(data.data);
      return Buffer.#over(Uint8Array.from(data));
    }
    static #over(bytes) {
      return new Buffer(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    }
    static alloc(size, fill, encoding) {
      const made = new Buffer(size);
      return fill === undefined ? made : made.fill(fill, 0, size, encoding);
    }
    static allocUnsafe(size) {
      return new Buffer(size);
    }
    static concat(list, total) {
      return Buffer.#over(joined(list, total));
    }
    static isBuffer(value) {
      return value instanceof Buffer;
    }
    static isEncoding(name) {
      return /^(utf-?8|hex|base64(url)?|latin1|binary|ascii|ucs2|utf-?16le)$/i.test(name);
    }
    static byteLength(data, encoding) {
      return typeof data === "string" ? encodeAs(data, encoding).length : data.byteLength;
    }
    static compare(a, b) {
      return a.compare(b);
    }
    toString(encoding, start = 0, end = this.length) {
      return decodeAs(this.subarray(start, end), encoding);
    }
    toJSON() {
      return { type: "Buffer", data: [...this] };
    }
    slice(start, end) {
      return this.subarray(start, end);
    }
    equals(other) {
      return this.compare(other) === 0;
    }
    compare(other) {
      const shared = Math.min(this.length, other.length);
      for (let at = 0; at < shared; at++) if (this[at] !== other[at]) return this[at] < other[at] ? -1 : 1;
      return Math.sign(this.length - other.length);
    }
    copy(target, at = 0, start = 0, end = this.length) {
      const part = this.subarray(start, Math.min(end, start + target.length - at));
      target.set(part, at);
      return part.length;
    }
    write(text, at = 0, length = this.length - at, encoding = "utf8") {
      const bytes = encodeAs(text, encoding).subarray(0, length);
      this.set(bytes, at);
      return bytes.length;
    }
    fill(value, start, end, encoding) {
      if (typeof value !== "string") return super.fill(value, start, end);
      const bytes = encodeAs(value, encoding);
      for (let at = start ?? 0; at < (end ?? this.length); at++) this[at] = bytes[at % bytes.length];
      return this;
    }
    indexOf(value, from = 0) {
      if (typeof value === "number") return super.indexOf(value, from);
      const wanted = typeof value === "string" ? encodeAs(value) : value;
      for (let at = from; at + wanted.length <= this.length; at++)
        if (wanted.every((b, i) => this[at + i] === b)) return at;
      return -1;
    }
    includes(value, from) {
      return this.indexOf(value, from) !== -1;
    }
  }
  const view = (buffer) => new DataView(buffer.buffer, buffer.byteOffset, buffer.byteLength);
  const KINDS = {
    UInt8: "Uint8",
    Int8: "Int8",
    UInt16: "Uint16",
    Int16: "Int16",
    UInt32: "Uint32",
    Int32: "Int32",
    Float: "Float32",
    Double: "Float64",
    BigInt64: "BigInt64",
    BigUInt64: "BigUint64",
  };
  for (const [name, kind] of Object.entries(KINDS)) {
    for (const order of kind.endsWith("t8") ? [""] : ["LE", "BE"]) {
      const little = order === "LE";
      const size = parseInt(kind.match(/\d+$/)[0]) / 8;
      Buffer.prototype[`read${name}${order}`] = function (at = 0) {
        return view(this)[`get${kind}`](at, little);
      };
      Buffer.prototype[`write${name}${order}`] = function (value, at = 0) {
        view(this)[`set${kind}`](at, value, little);
        return at + size;
      };
    }
  }

  function structuredClone(value) {
    const done = new Map();
    const refuse = (what) => {
      throw new DOMException(`${what} could not be cloned.`, "DataCloneError");
    };
    const fill = (from, to) => {
      for (const name of Object.keys(from)) to[name] = clone(from[name]);
      return to;
    };
    const keep = (from, to) => {
      done.set(from, to);
      return to;
    };
    function clone(from) {
      if (typeof from === "symbol" || typeof from === "function") refuse(String(from));
      if (typeof from !== "object" || from === null) return from;
      if (done.has(from)) return done.get(from);
      if (Array.isArray(from)) return fill(from, keep(from, new Array(from.length)));
      if (from instanceof Date) return keep(from, new Date(from));
      if (from instanceof RegExp) return keep(from, new RegExp(from));
      if (from instanceof ArrayBuffer) return keep(from, from.slice(0));
      if (from instanceof DataView)
        return keep(from, new DataView(clone(from.buffer), from.byteOffset, from.byteLength));
      if (ArrayBuffer.isView(from))
        return keep(from, from.constructor === Buffer ? new Uint8Array(from) : from.slice());
      if (from instanceof Map) {
        const to = keep(from, new Map());
        for (const [k, v] of from) to.set(clone(k), clone(v));
        return to;
      }
      if (from instanceof Set) {
        const to = keep(from, new Set());
        for (const item of from) to.add(clone(item));
        return to;
      }
      if (Error.isError(from)) {
        const Kind = { EvalError, RangeError, ReferenceError, SyntaxError, TypeError, URIError }[from.name] ?? Error;
        const to = keep(from, new Kind(from.message));
        Object.defineProperty(to, "stack", { value: from.stack, configurable: true, writable: true });
        if (Object.hasOwn(from, "cause")) to.cause = clone(from.cause);
        return to;
      }
      for (const Box of [Number, String, Boolean, BigInt])
        if (from instanceof Box) return keep(from, Object(from.valueOf()));
      if (from instanceof Promise || from instanceof WeakMap || from instanceof WeakSet)
        refuse(`#<${from.constructor.name}>`);
      return fill(from, keep(from, {}));
    }
    return clone(value);
  }

  let began = 0;
  core.startClock = () => {
    began = host.clock(1);
  };
  const performance = {
    now: () => host.clock(1) - began,
    get timeOrigin() {
      return Date.now() - this.now();
    },
    mark() {},
    measure() {},
  };

  const crypto = {
    getRandomValues(array) {
      new Uint8Array(array.buffer, array.byteOffset, array.byteLength).set(host.random(array.byteLength));
      return array;
    },
    randomBytes: (size) => Buffer.from(host.random(size)),
    randomInt(low, high) {
      if (high === undefined) [low, high] = [0, low];
      return low + Math.floor(Math.random() * (high - low));
    },
    randomUUID() {
      const bytes = host.random(16);
      bytes[6] = (bytes[6] & 15) | 64;
      bytes[8] = (bytes[8] & 63) | 128;
      return decodeAs(bytes, "hex").replace(/(.{8})(.{4})(.{4})(.{4})/, "$1-$2-$3-$4-");
    },
  };

  core.error = (Kind, code, message) => Object.assign(new Kind(message), { code });
  core.Buffer = Buffer;
  core.bytesOf = bytesOf;
  core.encodeAs = encodeAs;
  core.decodeAs = decodeAs;
  core.web = { TextEncoder, TextDecoder, Buffer, structuredClone, performance, crypto };
});
