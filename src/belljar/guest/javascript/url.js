// `URL` and `URLSearchParams`.
(function (host, core) {
  "use strict";

  class URLSearchParams {
    #pairs = [];
    #changed = () => {};
    constructor(from = "", changed) {
      if (changed) this.#changed = changed;
      const decode = (text) => {
        try {
          return decodeURIComponent(text.replace(/\+/g, " "));
        } catch {
          return text;
        }
      };
      if (typeof from === "string") {
        for (const part of from.replace(/^\?/, "").split("&").filter(Boolean)) {
          const at = part.indexOf("=");
          this.#pairs.push(at < 0 ? [decode(part), ""] : [decode(part.slice(0, at)), decode(part.slice(at + 1))]);
        }
      } else {
        for (const [k, v] of from?.[Symbol.iterator] ? from : Object.entries(from))
          this.#pairs.push([String(k), String(v)]);
      }
    }
    get size() {
      return this.#pairs.length;
    }
    get(name) {
      return this.#pairs.find(([k]) => k === name)?.[1] ?? null;
    }
    getAll(name) {
      return this.#pairs.filter(([k]) => k === name).map(([, v]) => v);
    }
    has(name) {
      return this.#pairs.some(([k]) => k === name);
    }
    append(name, value) {
      this.#pairs.push([String(name), String(value)]);
      this.#changed();
    }
    set(name, value) {
      const at = this.#pairs.findIndex(([k]) => k === name);
      if (at < 0) return this.append(name, value);
      this.#pairs = this.#pairs.filter(([k], index) => k !== name || index === at);
      this.#pairs[at][1] = String(value);
      this.#changed();
    }
    delete(name) {
      this.#pairs = this.#pairs.filter(([k]) => k !== name);
      this.#changed();
    }
    sort() {
      this.#pairs.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0));
      this.#changed();
    }
    forEach(visit) {
      for (const [k, v] of this.#pairs) visit(v, k, this);
    }
    keys() {
      return this.#pairs.map(([k]) => k).values();
    }
    values() {
      return this.#pairs.map(([, v]) => v).values();
    }
    entries() {
      return this.#pairs.map((pair) => [...pair]).values();
    }
    [Symbol.iterator]() {
      return this.entries();
    }
    toString() {
      const encode = (text) =>
        encodeURIComponent(text)
          .replace(/%20/g, "+")
          .replace(/[!'()~]/g, (c) => "%" + c.charCodeAt(0).toString(16).toUpperCase());
      return this.#pairs.map(([k, v]) => `${encode(k)}=${encode(v)}`).join("&");
    }
    [core.inspect.custom](_depth, options, inspect) {
      return `URLSearchParams ${inspect(Object.fromEntries(this.#pairs), options)}`;
    }
  }

  // The usual shape of addresses: no punycode, no IPv4 in odd notations.
  const AUTHORITY = /(?:\/\/(?:([^:@/?#]*)(?::([^@/?#]*))?@)?(\[[^\]]*\]|[^:/?#]*)(?::(\d*))?)?/;
  const SHAPE = new RegExp(`^([a-z][a-z0-9+.-]*):${AUTHORITY.source}([^?#]*)(\\?[^#]*)?(#.*)?$`, "i");
  const PORTS = { "http:": "80", "https:": "443", "ftp:": "21", "ws:": "80", "wss:": "443" };
  const escapePath = (text) =>
    text.replace(/[^\x21\x23-\x3b\x3d\x3f-\x5f\x61-\x7a\x7c\x7e%]/gu, (c) => encodeURIComponent(c));

  class URL {
    #query;
    constructor(text, base) {
      let found = SHAPE.exec(String(text).trim());
      if (!found && base !== undefined) found = SHAPE.exec(URL.#against(String(text).trim(), new URL(base)));
      const special = found && PORTS[`${found[1].toLowerCase()}:`];
      if (!found || (special && !found[4]))
        throw Object.assign(core.error(TypeError, "ERR_INVALID_URL", "Invalid URL"), { input: String(text) });
      this.protocol = `${found[1].toLowerCase()}:`;
      this.username = found[2] ?? "";
      this.password = found[3] ?? "";
      this.hostname = special ? found[4].toLowerCase() : (found[4] ?? "");
      this.port = found[5] && found[5] !== special ? String(Number(found[5])) : "";
      const flat = found[4] === undefined ? found[6] : core.path.normalizeUrl(found[6] || (special ? "/" : ""));
      this.pathname = escapePath(flat);
      this.search = found[7] && found[7] !== "?" ? escapePath(found[7]) : "";
      this.hash = found[8] && found[8] !== "#" ? escapePath(found[8]) : "";
    }
    static #against(text, base) {
      const root = `${base.protocol}//${base.host}`;
      if (text.startsWith("//")) return base.protocol + text;
      if (text.startsWith("/")) return root + text;
      if (text.startsWith("?")) return root + base.pathname + text;
      if (text.startsWith("#") || text === "") return root + base.pathname + base.search + text;
      return root + base.pathname.replace(/[^/]*$/, "") + text;
    }
    static canParse(text, base) {
      try {
        return Boolean(new URL(text, base));
      } catch {
        return false;
      }
    }
    get host() {
      return this.hostname + (this.port && `:${this.port}`);
    }
    get origin() {
      return PORTS[this.protocol] ? `${this.protocol}//${this.host}` : "null";
    }
    get searchParams() {
      this.#query ??= new URLSearchParams(this.search, () => {
        const text = this.#query.toString();
        this.search = text && `?${text}`;
      });
      return this.#query;
    }
    get href() {
      const secret = this.password && `:${this.password}`;
      const user = this.username || secret ? `${this.username}${secret}@` : "";
      const slashes = this.host || PORTS[this.protocol] || this.protocol === "file:" ? "//" : "";
      return `${this.protocol}${slashes}${user}${this.host}${this.pathname}${this.search}${this.hash}`;
    }
    toString() {
      return this.href;
    }
    toJSON() {
      return this.href;
    }
    [core.inspect.custom](_depth, options, inspect) {
      const { href, origin, protocol, username, password, host, hostname, port, pathname, search, searchParams, hash } =
        this;
      const facts = { href, origin, protocol, username, password, host, hostname, port, pathname, search, searchParams };
      return `URL ${inspect({ ...facts, hash }, options)}`;
    }
  }

  Object.assign(core.web, { URL, URLSearchParams });
});
