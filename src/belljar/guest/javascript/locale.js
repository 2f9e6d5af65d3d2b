// QuickJS has no Intl. What programs use of it most, for American English only: grouped numbers and sorting of words.
(function (host, core) {
  "use strict";
  const SIGNS = { USD: "$", EUR: "€", GBP: "£", JPY: "¥", INR: "₹" };
  const isMoney = (options) => options.style === "currency";

  function digits(value, options) {
    const plain = isMoney(options) ? (options.currency === "JPY" ? 0 : 2) : 0;
    const least = options.minimumFractionDigits ?? Math.min(plain, options.maximumFractionDigits ?? plain);
    const usual = isMoney(options) ? plain : options.style === "percent" ? 0 : 3;
    const most = options.maximumFractionDigits ?? Math.max(least, usual);
    if (typeof value === "bigint") return [String(value < 0n ? -value : value), "0".repeat(least)];
    const [whole, part = ""] = Math.abs(value).toFixed(most).split(".");
    return [whole, part.replace(/0+$/, "").padEnd(least, "0")];
  }

  function formatNumber(value, options = {}) {
    if (typeof value === "number" && !Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value < 0 ? "-∞" : "∞";
    const [whole, part] = digits(options.style === "percent" ? Number(value) * 100 : value, options);
    const grouped = options.useGrouping === false ? whole : whole.replace(/\B(?=(\d{3})+$)/g, ",");
    const sign = value < 0 || Object.is(value, -0) ? "-" : "";
    const money = isMoney(options) ? (SIGNS[options.currency] ?? `${options.currency}\u00a0`) : "";
    return `${sign}${money}${grouped}${part && `.${part}`}${options.style === "percent" ? "%" : ""}`;
  }

  class NumberFormat {
    #options;
    constructor(_locale, options = {}) {
      this.#options = options;
    }
    format = (value) => formatNumber(value, this.#options);
  }

  const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
  const bare = (text) => text.normalize("NFD").replace(/[\u0300-\u036f]/g, "");
  const padded = (text) => text.replace(/\d+/g, (number) => number.padStart(20, "0"));

  // First the letters, then accents, then small before large.
  function compare(a, b, options = {}) {
    if (a === b) return 0;
    const [x, y] = options.numeric ? [padded(a), padded(b)] : [a, b];
    const base = order(bare(x).toLowerCase(), bare(y).toLowerCase());
    if (base || options.sensitivity === "base") return base;
    const accents = order(x.toLowerCase(), y.toLowerCase());
    return accents || options.sensitivity === "accent" ? accents : order(y, x);
  }

  const define = (where, name, value) =>
    Object.defineProperty(where, name, { value, writable: true, configurable: true, enumerable: false });
  for (const Kind of [Number, BigInt]) {
    define(Kind.prototype, "toLocaleString", function toLocaleString(_locale, options) {
      return formatNumber(this.valueOf(), options);
    });
  }
  define(String.prototype, "localeCompare", function localeCompare(other, _locale, options) {
    return compare(String(this), String(other), options);
  });
  class Collator {
    #options;
    constructor(_locale, options = {}) {
      this.#options = options;
    }
    compare = (a, b) => compare(String(a), String(b), this.#options);
  }
  define(globalThis, "Intl", { NumberFormat, Collator });
});
