// Lets Node.js before 24.5 find the proxy that the environment names: `fetch`, `http` and `https` do not look for it.
"use strict";

const http = require("node:http");
const https = require("node:https");
const net = require("node:net");
const tls = require("node:tls");

const [major, minor] = process.versions.node.split(".").map(Number);
const named = process.env.HTTPS_PROXY;
if (named && (major < 24 || (major === 24 && minor < 5))) {
  const proxy = new URL(named);
  const here = new Set(["localhost", "127.0.0.1", "::1"]);
  const bare = (host) => String(host || "localhost").replace(/^\[|\]$/g, "");

  // A socket to a host, through the proxy; what it refuses is an error in its own words.
  const tunnel = (host, port, done) => {
    const path = `${net.isIPv6(host) ? `[${host}]` : host}:${port}`;
    const asked = http.request({
      host: proxy.hostname, port: proxy.port, method: "CONNECT", path, headers: { host: path }, agent: false,
    });
    asked.once("connect", (answer, socket) => {
      if (answer.statusCode === 200) return done(null, socket);
      socket.destroy();
      return done(new Error(answer.statusMessage || `the proxy answered ${answer.statusCode}`));
    });
    asked.once("error", done);
    asked.end();
  };

  const secured = (socket, options, done) => {
    const given = { ...options, socket, servername: options.servername || (net.isIP(options.host) ? "" : options.host) };
    const stream = tls.connect(given, () => done(null, stream));
    stream.once("error", done);
  };

  const take = (agent, port, connect) => {
    const direct = agent.createConnection;
    agent.createConnection = function createConnection(options, done) {
      const host = bare(options.host || options.hostname);
      if (options.socketPath || options.path || here.has(host)) return direct.call(this, options, done);
      tunnel(host, options.port || port, (error, socket) => (error ? done(error) : connect(socket, options, done)));
      return undefined;
    };
  };
  take(http.globalAgent, 80, (socket, options, done) => done(null, socket));
  take(https.globalAgent, 443, (socket, options, done) => done(null, tls.connect({
    ...options, socket, servername: options.servername || (net.isIP(options.host) ? "" : options.host),
  })));

  // `fetch` is loaded when it is first called, and so is what it goes by.
  const original = globalThis.fetch;
  const symbol = Symbol.for("undici.globalDispatcher.1");
  let ours = false;
  const install = () => {
    if (ours) return;
    ours = true;
    void globalThis.Request; // which loads it
    const dispatcher = globalThis[symbol];
    if (!dispatcher || dispatcher.constructor.name !== "Agent") return; // the program has one of its own
    globalThis[symbol] = new dispatcher.constructor({
      connect: ({ hostname, host, protocol, port, servername }, done) => {
        const target = bare(hostname);
        const number = Number(port) || (protocol === "https:" ? 443 : 80);
        const options = { host: target, servername: servername || undefined, ALPNProtocols: ["http/1.1"] };
        const finish = (error, socket) => {
          if (error) return done(error, null);
          return protocol === "https:" ? secured(socket, options, (problem, stream) => done(problem || null, stream)) : done(null, socket);
        };
        if (!here.has(target)) return tunnel(target, number, finish);
        const socket = net.connect(number, target, () => finish(null, socket));
        return socket.once("error", (error) => done(error, null));
      },
    });
  };
  if (typeof original === "function") {
    globalThis.fetch = function fetch(...given) {
      install();
      return original.apply(this, given);
    };
  }
}
