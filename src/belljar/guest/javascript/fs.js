// `path` and `fs`. Every operation is one call to the host, which hands it to WASI: there are only /workspace and /tmp.
(function (host, core) {
  "use strict";

  function flatten(path, absolute) {
    const kept = [];
    for (const part of path.split("/")) {
      if (part === "" || part === ".") continue;
      if (part !== "..") kept.push(part);
      else if (kept.length && kept.at(-1) !== "..") kept.pop();
      else if (!absolute) kept.push("..");
    }
    return kept.join("/");
  }

  const path = {
    sep: "/",
    delimiter: ":",
    isAbsolute: (name) => name.startsWith("/"),
    normalize(name) {
      const absolute = name.startsWith("/");
      const flat = flatten(name, absolute);
      const end = flat && name.endsWith("/") ? "/" : "";
      return (absolute ? "/" : "") + flat + end || ".";
    },
    join: (...parts) => path.normalize(parts.filter(Boolean).join("/") || "."),
    resolve(...parts) {
      let whole = "";
      for (const part of [...parts].reverse()) {
        if (part) whole = whole ? `${part}/${whole}` : part;
        if (whole.startsWith("/")) break;
      }
      return "/" + flatten(whole.startsWith("/") ? whole : `${core.cwd}/${whole}`, true);
    },
    dirname(name) {
      const at = name.replace(/\/+$/, "").lastIndexOf("/");
      return at < 0 ? "." : at === 0 ? "/" : name.slice(0, at);
    },
    basename(name, ending = "") {
      const last = name.replace(/\/+$/, "").split("/").at(-1);
      return ending && last !== ending && last.endsWith(ending) ? last.slice(0, -ending.length) : last;
    },
    extname(name) {
      const last = path.basename(name);
      const at = last.lastIndexOf(".");
      return at <= 0 ? "" : last.slice(at);
    },
    relative(from, to) {
      const [a, b] = [path.resolve(from), path.resolve(to)].map((name) => name.split("/").filter(Boolean));
      let same = 0;
      while (same < a.length && same < b.length && a[same] === b[same]) same++;
      return [...a.slice(same).map(() => ".."), ...b.slice(same)].join("/");
    },
    parse(name) {
      const base = path.basename(name),
        ext = path.extname(name),
        root = name.startsWith("/") ? "/" : "";
      const dir = name.includes("/") ? path.dirname(name) : "";
      return { root, dir, base, ext, name: ext ? base.slice(0, -ext.length) : base };
    },
    format({ dir, root = "", base, name = "", ext = "" }) {
      const last = base ?? name + ext;
      return dir ? (dir === root ? dir + last : `${dir}/${last}`) : root + last;
    },
  };
  path.posix = path;
  core.path = { ...path, normalizeUrl: (name) => (name.startsWith("/") ? path.normalize(name) : name) };

  // WASI's numbers, Node's names and Linux's numbers.
  const FAULTS = {
    2: ["EACCES", 13, "permission denied"],
    8: ["EBADF", 9, "bad file descriptor"],
    10: ["EBUSY", 16, "resource busy or locked"],
    19: ["EDQUOT", 122, "disk quota exceeded"],
    20: ["EEXIST", 17, "file already exists"],
    22: ["EFBIG", 27, "file too large"],
    28: ["EINVAL", 22, "invalid argument"],
    29: ["EIO", 5, "i/o error"],
    31: ["EISDIR", 21, "illegal operation on a directory"],
    32: ["ELOOP", 40, "too many symbolic links encountered"],
    37: ["ENAMETOOLONG", 36, "name too long"],
    44: ["ENOENT", 2, "no such file or directory"],
    48: ["ENOMEM", 12, "not enough memory"],
    51: ["ENOSPC", 28, "no space left on device"],
    54: ["ENOTDIR", 20, "not a directory"],
    55: ["ENOTEMPTY", 39, "directory not empty"],
    63: ["EPERM", 1, "operation not permitted"],
    69: ["EROFS", 30, "read-only file system"],
    75: ["EXDEV", 18, "cross-device link not permitted"],
    76: ["EACCES", 13, "permission denied"],
  };

  function fault(number, call, name, second) {
    const [code, errno, words] = FAULTS[number] ?? ["EIO", 5, `error ${number}`];
    const where = name === undefined ? "" : ` '${name}'${second === undefined ? "" : ` -> '${second}'`}`;
    const error = new Error(`${code}: ${words}, ${call}${where}`);
    Object.assign(error, { errno: -errno, code, syscall: call });
    if (name !== undefined) error.path = name;
    if (second !== undefined) error.dest = second;
    Error.captureStackTrace?.(error, fault);
    return error;
  }

  function named(name) {
    if (name instanceof core.web.URL) name = decodeURIComponent(name.pathname);
    if (name instanceof Uint8Array) name = core.decodeAs(name);
    if (typeof name !== "string") {
      throw core.error(
        TypeError,
        "ERR_INVALID_ARG_TYPE",
        `The "path" argument must be of type string or an instance of Buffer or URL. Received ${core.inspect(name)}`,
      );
    }
    return name;
  }

  function attempt(call, operation, name, ...rest) {
    const answer = host[operation](path.resolve(named(name)), ...rest);
    if (typeof answer === "number" && answer < 0) throw fault(-answer, call, name);
    return answer;
  }

  const encodingOf = (options) => (typeof options === "string" ? options : options?.encoding) ?? null;
  const isText = (encoding) => /^utf-?8$/i.test(encoding ?? "");

  function readFileSync(name, options) {
    const encoding = encodingOf(options);
    if (name === "/dev/stdin") name = 0;
    const text = isText(encoding) ? 1 : 0;
    const data = typeof name === "number" ? host.readInput(name, text) : attempt("open", "readFile", name, text);
    if (typeof data === "number") throw fault(-data, "read");
    if (text) return data;
    const buffer = new core.Buffer(data.buffer);
    return encoding && encoding !== "buffer" ? buffer.toString(encoding) : buffer;
  }

  const CREATE = 1,
    EXCLUSIVE = 4,
    TRUNCATE = 8;
  const MODES = {
    w: CREATE | TRUNCATE,
    "w+": CREATE | TRUNCATE,
    a: CREATE,
    "a+": CREATE,
    "r+": 0,
    wx: CREATE | EXCLUSIVE,
    ax: CREATE | EXCLUSIVE,
  };

  function content(data, encoding) {
    if (typeof data === "string") return encoding && !isText(encoding) ? core.encodeAs(data, encoding) : data;
    if (ArrayBuffer.isView(data) || data instanceof ArrayBuffer) return core.bytesOf(data);
    throw core.error(
      TypeError,
      "ERR_INVALID_ARG_TYPE",
      'The "data" argument must be of type string or an instance of Buffer, TypedArray, or DataView. Received ' +
        core.inspect(data),
    );
  }

  function writeFileSync(name, data, options) {
    const flag = options?.flag ?? "w";
    const body = content(data, encodingOf(options));
    if (name === 1 || name === 2 || name === "/dev/stdout" || name === "/dev/stderr") {
      return core.print(
        name === 1 || name === "/dev/stdout" ? 1 : 2,
        typeof body === "string" ? body : core.decodeAs(body),
      );
    }
    attempt("open", "writeFile", name, body, MODES[flag] ?? MODES.w, flag.startsWith("a") ? 1 : 0);
  }

  class Stats {
    constructor(facts) {
      Object.assign(this, facts);
    }
    isFile() {
      return host.kindOf(this.mode) === 4;
    }
    isDirectory() {
      return host.kindOf(this.mode) === 3;
    }
    isSymbolicLink() {
      return host.kindOf(this.mode) === 7;
    }
    isFIFO() {
      return false;
    }
    isSocket() {
      return false;
    }
    isBlockDevice() {
      return false;
    }
    isCharacterDevice() {
      return false;
    }
  }
  const MODE = { 3: 0o040755, 4: 0o100644, 7: 0o120777 };
  host.kindOf = (mode) => Number(Object.keys(MODE).find((kind) => MODE[kind] === mode) ?? 0);

  function statOf(call, name, follow, options) {
    const answer = host.stat(path.resolve(named(name)), follow);
    if (typeof answer === "number") {
      if (options?.throwIfNoEntry === false && answer === -44) return undefined;
      throw fault(-answer, call, name);
    }
    const [kind, size, links, inode, ...times] = JSON.parse(answer);
    const [atimeMs, mtimeMs, ctimeMs] = times;
    const [atime, mtime, ctime] = times.map((ms) => new Date(ms));
    return new Stats({
      dev: 0,
      ino: inode,
      mode: MODE[kind] ?? 0,
      nlink: links,
      uid: 0,
      gid: 0,
      size,
      blksize: 4096,
      blocks: Math.ceil(size / 512),
      atimeMs,
      mtimeMs,
      ctimeMs,
      birthtimeMs: ctimeMs,
      atime,
      mtime,
      ctime,
      birthtime: ctime,
    });
  }
  const statSync = (name, options) => statOf("stat", name, 1, options);
  const lstatSync = (name, options) => statOf("lstat", name, 0, options);

  function existsSync(name) {
    try {
      return statSync(name, { throwIfNoEntry: false }) !== undefined;
    } catch {
      return false;
    }
  }

  class Dirent {
    #kind;
    constructor(name, kind, parentPath) {
      this.name = name;
      this.parentPath = this.path = parentPath;
      this.#kind = kind;
    }
    isFile() {
      return this.#kind === 4;
    }
    isDirectory() {
      return this.#kind === 3;
    }
    isSymbolicLink() {
      return this.#kind === 7;
    }
  }

  function readdirSync(name, options) {
    const found = JSON.parse(attempt("scandir", "readFolder", name)).sort(([a], [b]) => (a < b ? -1 : 1));
    const all = [];
    for (const [entry, kind] of found) {
      all.push(options?.withFileTypes ? new Dirent(entry, kind, name) : entry);
      if (options?.recursive && kind === 3) {
        const below = readdirSync(path.join(name, entry), options);
        all.push(...below.map((item) => (typeof item === "string" ? `${entry}/${item}` : item)));
      }
    }
    return all;
  }

  function mkdirSync(name, options) {
    if (!options?.recursive) return void attempt("mkdir", "makeFolder", name);
    const missing = [];
    let at = path.resolve(named(name));
    for (; !existsSync(at) && at !== "/"; at = path.dirname(at)) missing.unshift(at);
    if (missing.length === 0 && !statSync(at).isDirectory()) throw fault(20, "mkdir", name);
    for (const folder of missing) attempt("mkdir", "makeFolder", folder);
    return missing[0];
  }

  const unlinkSync = (name) => void attempt("unlink", "removeFile", name);

  function rmdirSync(name, options) {
    return options?.recursive ? rmSync(name, options) : void attempt("rmdir", "removeFolder", name);
  }

  function rmSync(name, options) {
    const facts = lstatSync(name, { throwIfNoEntry: !options?.force });
    if (!facts) return;
    if (!facts.isDirectory()) return unlinkSync(name);
    if (!options?.recursive) {
      throw core.error(Error, "ERR_FS_EISDIR", `Path is a directory: rm returned EISDIR (is a directory) ${name}`);
    }
    for (const entry of readdirSync(name)) rmSync(path.join(name, entry), options);
    rmdirSync(name);
  }

  function renameSync(from, to) {
    const answer = host.rename(path.resolve(named(from)), path.resolve(named(to)));
    if (answer < 0) throw fault(-answer, "rename", from, to);
  }

  function copyFileSync(from, to, mode) {
    writeFileSync(to, readFileSync(from), { flag: mode & 1 ? "wx" : "w" });
  }

  let made = 0;
  function mkdtempSync(start) {
    for (;;) {
      const name = start + (Math.random().toString(36) + "aaaaaa").slice(2, 7) + (made++ % 10);
      if (existsSync(name)) continue;
      mkdirSync(name);
      return name;
    }
  }

  const sync = {
    readFileSync,
    writeFileSync,
    existsSync,
    readdirSync,
    mkdirSync,
    rmSync,
    rmdirSync,
    unlinkSync,
    statSync,
    lstatSync,
    renameSync,
    copyFileSync,
    mkdtempSync,
    appendFileSync: (name, data, options) =>
      writeFileSync(name, data, { ...(typeof options === "string" ? { encoding: options } : options), flag: "a" }),
    accessSync: (name) => void attempt("access", "stat", name, 1),
    realpathSync: (name) => (attempt("realpath", "stat", name, 1), path.resolve(named(name))),
    writeSync: (fd, data) => (writeFileSync(fd, data), data.length),
  };

  const later =
    (work) =>
    async (...args) =>
      work(...args);
  const promises = {};
  for (const [name, work] of Object.entries(sync)) promises[name.replace(/Sync$/, "")] = later(work);
  delete promises.exists;
  const fs = { ...sync, promises, constants: { F_OK: 0, R_OK: 4, W_OK: 2, X_OK: 1, COPYFILE_EXCL: 1 }, Stats, Dirent };
  for (const [name, work] of Object.entries(promises)) {
    fs[name] = (...args) => {
      const done = args.pop();
      if (typeof done !== "function") {
        throw core.error(TypeError, "ERR_INVALID_ARG_TYPE", 'The "cb" argument must be of type function.');
      }
      work(...args).then(
        (value) => core.later(() => done(null, value)),
        (error) => core.later(() => done(error)),
      );
    };
  }
  fs.exists = (name, done) => core.later(() => done(existsSync(name)));

  core.fs = fs;
  core.print = (fd, text) => (fd === 1 ? host.printOut(text) : host.printError(text));
  core.builtins = { path, fs, "fs/promises": promises, "path/posix": path };
});
