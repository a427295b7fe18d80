// Node loads this first (`--require`): in a process of its test runner only tests may end it with exit code 0, and
// assertions stay what they are. The right side of the next line is filled in.
const { root, own, guess } = ABOUT;
if (process.env.NODE_TEST_CONTEXT) {
    const before = process.env.CRRL_NODE_OPTIONS;
    delete process.env.CRRL_NODE_OPTIONS;
    if (before) process.env.NODE_OPTIONS = before;
    else delete process.env.NODE_OPTIONS;
    const folder = require("node:fs").realpathSync(root) + "/";
    const allowed = (frame) => {
        const at = frame.indexOf(folder);
        const name = frame.slice(at + folder.length).replace(/(:\d+)+\)?$/, "");
        if (at < 0) return !/<anonymous>|data:|evalmachine/.test(frame);
        return own.includes(name) || name.includes("node_modules/") || (guess && /(^|[/._-])tests?[/._-]/.test(name));
    };
    const assert = require("node:assert");
    const fixed = [assert, assert.strict, assert.AssertionError.prototype, require("node:test")];
    fixed.forEach(Object.freeze);
    for (const name of ["exit", "reallyExit"]) {
        const real = process[name];
        process[name] = function (code) {
            const { stackTraceLimit, prepareStackTrace } = Error;
            Error.stackTraceLimit = Infinity;
            Error.prepareStackTrace = undefined;
            const frames = String(new Error().stack).split("\n").slice(2);
            Object.assign(Error, { stackTraceLimit, prepareStackTrace });
            const well = frames.length > 0 && frames.every(allowed);
            return real.call(process, well ? code : code || process.exitCode || 1);
        };
    }
}
