// Node loads this first (`--require`). In a process of its test runner, only tests may end the process with exit code
// 0, and only once they are loaded; only tests may change assertions, modules and built-ins. The right side of the next
// line is filled in; `guess`: the checks name no files, so files named like tests are theirs.
const { root, checkFiles, guess } = ABOUT;
if (process.env.NODE_TEST_CONTEXT && require("node:worker_threads").isMainThread) {
    const before = process.env.CRRL_NODE_OPTIONS;
    delete process.env.CRRL_NODE_OPTIONS;
    if (before) process.env.NODE_OPTIONS = before;
    else delete process.env.NODE_OPTIONS;
    const { defineProperty, freeze, getOwnPropertyDescriptor } = Object;
    const folder = require("node:fs").realpathSync(root) + "/";
    // A frame of tests and packages is "test", of Node's test runner "runner", of code under test "foreign"; of Node or
    // of the functions below, which therefore have names, "node".
    const kind = (frame) => {
        const at = frame.indexOf(folder);
        if (at < 0) {
            if (/<anonymous>|data:|evalmachine|node:vm/.test(frame)) return "foreign";
            return frame.includes("node:internal/test_runner/") ? "runner" : "node";
        }
        const name = frame.slice(at + folder.length).replace(/(:\d+)+\)?$/, "");
        const test = checkFiles.includes(name) || (guess && /(^|[/._-])tests?[/._-]/.test(name));
        return test || name.includes("node_modules/") ? "test" : "foreign";
    };
    const stack = () => {
        const { stackTraceLimit, prepareStackTrace } = Error;
        Error.stackTraceLimit = Infinity;
        Error.prepareStackTrace = undefined;
        const frames = String(new Error().stack).split("\n").slice(3); // without this one and its caller
        Object.assign(Error, { stackTraceLimit, prepareStackTrace });
        return frames;
    };
    const kinds = () => stack().slice(1).map(kind);
    // Whether our caller's caller is a test or a package whose source has `text` at the call. Code under test may give
    // tests a bound function of ours, but they call it by another name.
    const { readFileSync } = require("node:fs");
    const writes = (text) => {
        const frames = stack().slice(1);
        const at = /:(\d+):(\d+)\)?$/.exec(frames[0]);
        if (!at || kind(frames[0]) !== "test" || frames.map(kind).includes("foreign")) return false;
        const file = folder + frames[0].slice(frames[0].indexOf(folder) + folder.length, at.index);
        const line = readFileSync(file, "utf8").split("\n")[at[1] - 1];
        return line.startsWith(text, at[2] - 1 - text.lastIndexOf(".") - 1);
    };
    const lock = (object, name, value) => defineProperty(object, name, { value, writable: false, configurable: false });
    // A test may assign another value; an object that inherits the property gets one of its own, as usual.
    const values = new Map();
    const { defineProperty: define } = Reflect;
    const fix = (object, name, value) => {
        if (!values.has(object)) values.set(object, Object.create(null));
        const held = values.get(object);
        held[name] = value;
        const set = function (changed) {
            if (this === object) {
                if (writes("=")) held[name] = changed;
            } else define(this, name, { value: changed, writable: true, enumerable: true, configurable: true });
        };
        const get = () => held[name];
        get.originalValue = value; // tells the package `get-intrinsic`, which many use, that this is no real getter
        defineProperty(object, name, { get, set, enumerable: false, configurable: false });
    };
    const tracker = require("node:test").mock.constructor.prototype;
    const { method } = tracker;
    lock(tracker, "method", function mocks(object, name, ...rest) {
        const held = values.get(object);
        return method.call(this, held && name in held && writes("mock.method") ? held : object, name, ...rest);
    });

    const assert = require("node:assert");
    const fixed = [assert, assert.strict, assert.AssertionError.prototype, require("node:test")];
    fixed.forEach(freeze);
    // Guarded iterators would make every loop slow, so they are compared when the process ends.
    const kept = [];
    for (const each of [[], "", new Map(), new Set()]) {
        const part = Object.getPrototypeOf(each[Symbol.iterator]());
        kept.push({ part, key: "next", value: part.next });
    }
    for (const name of ["Object", "Array", "String", "Number", "RegExp", "Map", "Set", "Math", "JSON", "Symbol"]) {
        const builtin = globalThis[name];
        lock(globalThis, name, builtin);
        for (const part of [builtin, name === "Object" ? undefined : builtin.prototype]) {
            for (const key of part ? Reflect.ownKeys(part) : []) {
                const { value, configurable } = getOwnPropertyDescriptor(part, key);
                const replaceable = ["random", "constructor", "toString"].includes(key); // by honest code, too
                if (typeof value !== "function" || !configurable || replaceable) continue;
                if (typeof key === "symbol") kept.push({ part, key, value });
                else fix(part, key, value);
            }
        }
    }

    // Tests and packages may change how modules are found, and code under test may not.
    const Module = require("node:module");
    let [failed, loading] = [false, false];
    const compile = Module.prototype._compile;
    Module.prototype._compile = function (...all) {
        const { require } = Module.prototype;
        if (!Object.hasOwn(this, "require")) lock(this, "require", require); // code under test has it as `module.parent`
        const first = this.id === "."; // the file of tests
        if (first) loading = true;
        const result = compile.apply(this, all);
        if (first) loading = false;
        return result;
    };
    const guarded = (object, name) => {
        let value = object[name];
        const set = (changed) => {
            if (!kinds().includes("foreign")) value = changed;
        };
        if (value !== undefined) defineProperty(object, name, { get: () => value, set, configurable: false });
    };
    for (const name of ["_load", "_resolveFilename", "_findPath", "_cache", "_extensions"]) guarded(Module, name);
    for (const name of ["require", "load", "_compile"]) guarded(Module.prototype, name);
    for (const name of Object.keys(Module._extensions)) guarded(Module._extensions, name);
    for (const name of Module.builtinModules) lock(Module._cache, name, undefined);
    for (const [object, name] of [[Module, "register"], [Module, "registerHooks"], [process, "execve"]]) {
        const real = object[name];
        const may = function (...all) {
            if (kinds().includes("foreign")) throw new Error(`${name} is not for the code under test`);
            return real.apply(this, all);
        };
        if (real) lock(object, name, may);
    }
    Module.syncBuiltinESMExports();

    // A file in this guard's folder says that this process has not ended well: by a signal, by code under test, or with
    // tests left out because a module never came to its end or an error was caught. Then none of its results count.
    const begun = `${__dirname}/${process.pid}.begun`;
    const { rmSync, writeFileSync } = require("node:fs");
    writeFileSync(begun, "");
    const later = setImmediate;
    const exit = process.reallyExit;
    for (const name of ["exit", "reallyExit"]) {
        const real = process[name];
        fix(process, name, function exits(code) {
            const from = kinds();
            if (from[0] === "test" && !writes(name)) failed = true;
            if (from.includes("test")) loading = false;
            else if (!from.includes("runner") && !process._exiting) failed = true;
            if (from.includes("foreign")) failed = true;
            return real.call(process, failed ? code || process.exitCode || 1 : code);
        });
    }
    // Whether Node adds or removes its exit listener, which it has while the module of tests loads.
    const awaits = (event, listener) =>
        event === "exit" && listener?.name === "handleProcessExit" && kinds().slice(1).every((each) => each === "node");
    const { emit } = process;
    fix(process, "emit", function emits(event) {
        if (event === "uncaughtExceptionMonitor" && loading) failed = true;
        const result = emit.apply(process, arguments);
        if (event === "exit" && kept.some((each) => each.part[each.key] !== each.value)) failed = true;
        if (event === "exit" && (failed || loading)) exit.call(process, process.exitCode || 1);
        if (event === "exit") rmSync(begun);
        return result;
    });
    for (const name of ["on", "addListener", "off", "removeListener"]) {
        const real = process[name];
        fix(process, name, function listens(event, listener) {
            if (awaits(event, listener)) {
                if (name === "on" || name === "addListener") loading = true;
                else later(() => (loading = false)); // an error of the module comes first
            }
            return real.call(process, event, listener);
        });
    }
}
