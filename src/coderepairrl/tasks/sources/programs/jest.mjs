// The part of Jest's interface that Exercism's JavaScript tests use, on Node's test runner, so that no package is needed.
// Modules may be imported without file ending, and use `import` although package.json does not say "type": "module".
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

// Copies what `toEqual` compares: without undefined properties, holes of arrays and classes of objects.
function toPlain(value, seen = new Map()) {
  if (value === null || typeof value !== "object") return value;
  if (seen.has(value)) return seen.get(value);
  if (Array.isArray(value)) {
    const copy = [];
    seen.set(value, copy);
    for (let at = 0; at < value.length; at++) copy.push(toPlain(value[at], seen));
    return copy;
  }
  if (value instanceof Error) return { message: value.message };
  if (value instanceof Set) return new Set([...value].map((each) => toPlain(each, seen)));
  if (value instanceof Map) return new Map([...value].map(([key, each]) => [toPlain(key, seen), toPlain(each, seen)]));
  if (ArrayBuffer.isView(value) || value instanceof Date || value instanceof RegExp) return value;
  const copy = {};
  seen.set(value, copy);
  for (const key of Object.keys(value)) if (value[key] !== undefined) copy[key] = toPlain(value[key], seen);
  return copy;
}

function isEqual(got, wanted) {
  try {
    deepStrictEqual(toPlain(got), toPlain(wanted));
    return true;
  } catch (error) {
    if (error instanceof AssertionError) return false;
    throw error;
  }
}

function throws(call, wanted) {
  try {
    if (call instanceof Error) throw call; // the reason of a rejected promise
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

const matchers = {
  toBe: Object.is,
  toEqual: isEqual,
  toStrictEqual: (got, wanted) => isEqual(got, wanted) && got?.constructor === wanted?.constructor,
  toThrow: throws,
  toThrowError: throws,
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
  toContainEqual: (got, wanted) => [...got].some((each) => isEqual(each, wanted)),
  toHaveLength: (got, wanted) => got.length === wanted,
  toBeGreaterThan: (got, wanted) => got > wanted,
  toBeGreaterThanOrEqual: (got, wanted) => got >= wanted,
  toBeLessThan: (got, wanted) => got < wanted,
  toBeLessThanOrEqual: (got, wanted) => got <= wanted,
};

function format(value) {
  try {
    return JSON.stringify(value) ?? String(value);
  } catch {
    return String(value);
  }
}

function check(name, positive, got, wanted) {
  if (matchers[name](got, ...wanted) !== positive) {
    fail(`expected ${format(got)} ${positive ? "" : "not "}${name} ${wanted.map(format).join(", ")}`);
  }
}

// The matchers by name, and their opposites in `not`. `withValue(compare)` calls `compare` with the value to check.
function makeMatchers(withValue) {
  const bindMatchers = (positive) => {
    const bind = (name) => [name, (...wanted) => withValue((value) => check(name, positive, value, wanted))];
    return Object.fromEntries(Object.keys(matchers).map(bind));
  };
  return { ...bindMatchers(true), not: bindMatchers(false) };
}

const settle = async (promise) => {
  try {
    return { value: await promise };
  } catch (error) {
    return { error };
  }
};

function expect(got) {
  return {
    ...makeMatchers((compare) => compare(got)),
    resolves: makeMatchers(async (compare) => {
      const result = await settle(got);
      if ("error" in result) throw result.error;
      compare(result.value);
    }),
    rejects: makeMatchers(async (compare) => {
      const result = await settle(got);
      if (!("error" in result)) fail("expected a rejection");
      compare(result.error);
    }),
  };
}

function addEach(run) {
  run.each = (table) => (name, call) => {
    for (const row of table) run(`${name} ${format(row)}`, () => call(...(Array.isArray(row) ? row : [row])));
  };
  return run;
}

// Node passes a context to tests; Jest's take a callback or nothing.
const withoutContext = (run) => {
  const wrapped = (name, call) => run(name, call && (call.length ? (context, done) => call(done) : () => call()));
  wrapped.skip = (name, call) => run.skip(name, call);
  wrapped.only = wrapped;
  return addEach(wrapped);
};
const tests = { it: withoutContext(it), test: withoutContext(test), describe: addEach(describe) };
const skipped = { xit: it.skip, xtest: test.skip, xdescribe: describe.skip };
const globals = { ...tests, ...skipped, expect, beforeEach, afterEach, beforeAll: before, afterAll: after };
// Tested code is loaded before the tests run, and must not replace these.
for (const [name, value] of Object.entries(globals)) Object.defineProperty(globalThis, name, { value: Object.freeze(value) });
