// As much of Jest's interface as Exercism's JavaScript tests use, on Node's own test runner: no package is installed.
// Modules may be imported without their ending, and be written with `import` in a package that does not say so.
import { AssertionError, deepStrictEqual, fail } from "node:assert";
import { register } from "node:module";
import { after, afterEach, before, beforeEach, describe, it, test } from "node:test";

const hooks = `
import { existsSync } from "node:fs";
import { fileURLToPath } from "node:url";

export async function resolve(name, context, next) {
  if (/^\\.\\.?\\//.test(name)) {
    for (const ending of [".js", ".json", "/index.js"]) {
      const url = new URL(name + ending, context.parentURL);
      if (existsSync(fileURLToPath(url))) return next(url.href, context);
    }
  }
  return next(name, context);
}

export async function load(url, context, next) {
  if (!url.startsWith("file:") || !url.endsWith(".js") || url.includes("/node_modules/")) return next(url, context);
  const { source } = await next(url, { ...context, format: "module" });
  const text = source.toString();
  if (!/^\\s*(import|export)\\b/m.test(text)) return next(url, { ...context, format: "commonjs" });
  const required = /\\brequire\\(/.test(text) && !/createRequire/.test(text);
  const head = 'import { createRequire as crrlRequire } from "node:module"; const require = crrlRequire(import.meta.url); ';
  return { format: "module", shortCircuit: true, source: required ? head + text : text };
}
`;
register("data:text/javascript," + encodeURIComponent(hooks));

// `toEqual` takes no notice of undefined properties, holes and types of objects.
function plain(value, seen = new Map()) {
  if (value === null || typeof value !== "object") return value;
  if (seen.has(value)) return seen.get(value);
  if (Array.isArray(value)) {
    const copy = [];
    seen.set(value, copy);
    for (let at = 0; at < value.length; at++) copy.push(plain(value[at], seen));
    return copy;
  }
  if (value instanceof Error) return { message: value.message };
  if (value instanceof Set) return new Set([...value].map((each) => plain(each, seen)));
  if (value instanceof Map) return new Map([...value].map(([key, each]) => [plain(key, seen), plain(each, seen)]));
  if (ArrayBuffer.isView(value) || value instanceof Date || value instanceof RegExp) return value;
  const copy = {};
  seen.set(value, copy);
  for (const key of Object.keys(value)) if (value[key] !== undefined) copy[key] = plain(value[key], seen);
  return copy;
}

function equal(got, wanted) {
  try {
    deepStrictEqual(plain(got), plain(wanted));
    return true;
  } catch (error) {
    if (error instanceof AssertionError) return false;
    throw error;
  }
}

function thrown(call, wanted) {
  try {
    if (call instanceof Error) throw call; // of a promise that was rejected
    call();
  } catch (error) {
    const message = String(error?.message ?? error);
    if (wanted === undefined) return true;
    if (typeof wanted === "string") return message.includes(wanted);
    if (wanted instanceof RegExp) return wanted.test(message);
    if (typeof wanted === "function") return error instanceof wanted;
    return message === wanted.message;
  }
  return false;
}

const same = Object.is;
const matchers = {
  toBe: (got, wanted) => same(got, wanted),
  toEqual: equal,
  toStrictEqual: (got, wanted) => equal(got, wanted) && got?.constructor === wanted?.constructor,
  toThrow: thrown,
  toThrowError: thrown,
  toBeCloseTo: (got, wanted, digits = 2) => got === wanted || Math.abs(got - wanted) < 10 ** -digits / 2,
  toBeDefined: (got) => got !== undefined,
  toBeUndefined: (got) => got === undefined,
  toBeNull: (got) => got === null,
  toBeTruthy: (got) => Boolean(got),
  toBeFalsy: (got) => !got,
  toBeNaN: (got) => Number.isNaN(got),
  toBeInstanceOf: (got, wanted) => got instanceof wanted,
  toMatch: (got, wanted) => (wanted instanceof RegExp ? wanted.test(got) : got.includes(wanted)),
  toContain: (got, wanted) => (typeof got === "string" ? got.includes(wanted) : [...got].includes(wanted)),
  toContainEqual: (got, wanted) => [...got].some((each) => equal(each, wanted)),
  toHaveLength: (got, wanted) => got.length === wanted,
  toBeGreaterThan: (got, wanted) => got > wanted,
  toBeGreaterThanOrEqual: (got, wanted) => got >= wanted,
  toBeLessThan: (got, wanted) => got < wanted,
  toBeLessThanOrEqual: (got, wanted) => got <= wanted,
};

function shown(value) {
  try {
    return JSON.stringify(value) ?? String(value);
  } catch {
    return String(value);
  }
}

function check(name, positive, got, wanted) {
  if (matchers[name](got, ...wanted) !== positive) {
    fail(`expected ${shown(got)} ${positive ? "" : "not "}${name} ${wanted.map(shown).join(", ")}`);
  }
}

// `got` is what is compared, or a function that waits for it.
function sides(got) {
  const side = (positive) => {
    const named = (name) => [name, (...wanted) => got((value) => check(name, positive, value, wanted))];
    return Object.fromEntries(Object.keys(matchers).map(named));
  };
  return { ...side(true), not: side(false) };
}

const settled = async (promise) => {
  try {
    return { value: await promise };
  } catch (error) {
    return { error };
  }
};

function expect(got) {
  return {
    ...sides((compare) => compare(got)),
    resolves: sides(async (compare) => {
      const found = await settled(got);
      if ("error" in found) throw found.error;
      compare(found.value);
    }),
    rejects: sides(async (compare) => {
      const found = await settled(got);
      if (!("error" in found)) fail("expected a rejection");
      compare(found.error);
    }),
  };
}

function each(run) {
  run.each = (table) => (name, call) => {
    for (const row of table) run(`${name} ${shown(row)}`, () => call(...(Array.isArray(row) ? row : [row])));
  };
  return run;
}

// Jest's tests take a callback or nothing, and Node's hand over a context.
const bare = (run) => {
  const wrapped = (name, call) => run(name, call && (call.length ? (context, done) => call(done) : () => call()));
  wrapped.skip = (name, call) => run.skip(name, call);
  wrapped.only = wrapped;
  return each(wrapped);
};
const tests = { it: bare(it), test: bare(test), describe: each(describe) };
const skipped = { xit: it.skip, xtest: test.skip, xdescribe: describe.skip };
const given = { ...tests, ...skipped, expect, beforeEach, afterEach, beforeAll: before, afterAll: after };
// What is tested is loaded before its tests are: it shall not put its own in their place.
for (const [name, value] of Object.entries(given)) Object.defineProperty(globalThis, name, { value: Object.freeze(value) });
