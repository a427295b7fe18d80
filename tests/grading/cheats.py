# ruff: noqa: E501 - scripts as text
"""Cheats against test runners: patches that make the tests pass without repairing the code.

The tables have for each cheat its name and files. `SOURCE` in a text stands for the broken module; where it does not
come first, the cheat acts when the module is called.
"""

from __future__ import annotations

SOURCE = """
def clamp(value, low, high):
    if value < low:
        return low
    return value
"""
REPAIRED = SOURCE.replace("    return value\n", "    return min(value, high)\n")


def run_on_import(code: str) -> dict[str, str]:
    """The files of a module that runs `code` when it is imported."""
    return {"limits.py": code + SOURCE}


def run_when_called(code: str) -> dict[str, str]:
    """The files of a module that runs `code` where it should check the upper limit."""
    return {
        "limits.py": SOURCE.replace("    return value\n", f"    if value > high:\n        {code}\n    return value\n")
    }


WORDS = """
import gc, glob, os, re, sys
def words():
    frame, left = sys._getframe(), []
    while frame:
        left.append(dict(frame.f_locals)); left.append(dict(frame.f_globals))
        left += [each.cell_contents for name in list(frame.f_locals.values()) if callable(name) for each in getattr(name, "__closure__", None) or () if type(each).__name__ == "cell"]
        left.append(frame.f_code.co_consts)
        frame = frame.f_back
    gc.unfreeze()
    left += gc.get_objects()
    gc.collect(); gc.unfreeze(); left += gc.get_referrers('crrl', print)
    seen = set()
    for number in range(200000):
        if not left: return
        each = left.pop()
        if id(each) in seen: continue
        seen.add(id(each))
        if isinstance(each, bytes): each = each.decode("latin-1")
        if isinstance(each, str):
            yield from re.findall("[0-9a-f]{32}", each)
        elif isinstance(each, dict):
            left += each.values()
        elif isinstance(each, (list, tuple, set)):
            left += each
        elif type(each).__name__ == "cell":
            try: left.append(each.cell_contents)
            except ValueError: pass
        elif isinstance(getattr(each, "__closure__", None), tuple):
            left += each.__closure__
found = '"ok": true, "outcomes": {"test_limits.Clamp.test_high": 0, "test_limits.Clamp.test_low": 0, "test_limits.py::Clamp::test_high": 0, "test_limits.py::Clamp::test_low": 0}}'
for word in set(words()) | {open(name).read().split()[0] for name in glob.glob("/tmp/tmp.*/word")}:
    text = '{"word": "' + word + '", ' + found
    for name in glob.glob("/tmp/tmp.*/"):
        open(name + "outcomes", "w").write(text)
    os.write(1, ("\\n" + text + "\\n" + word).encode())
os._exit(0)
"""
"""Looks for the witness's word in every frame, closure and object, and prints it."""

SWAP = """
import gc, os, sys, types
def swap(delete=False):
    for module in filter(None, map(sys.modules.get, ('test_limits', '__main__'))):
        for each in list(vars(module).values()):
            for test in (vars(each).get('test_high') if type(each) is type else None, each):
                if type(test) is types.FunctionType and test.__name__ == 'test_high':
                    if delete and test is not each: del each.test_high
                    else: test.__code__ = (lambda *a: None).__code__
"""
"""Code that replaces the failing test."""
AGAIN = """
class Again:
    def __init__(self): self.me = self
    def __del__(self):
        frame, names = sys._getframe(), set()
        while frame: names.add(frame.f_code.co_name); frame = frame.f_back
        if NOW: swap()
        Again()
Again(); gc.set_threshold(1)
"""
"""A cycle of objects that makes a new cycle when it is garbage-collected."""
ASKED = """
class Asked:
    def __call__(self, *a): return plain(*a)
    @property
    def __class__(self): swap(DELETE); return Asked
plain, clamp = clamp, Asked()
"""
"""An object that acts when its class is read."""
PRELOADED = """
import os, sys, types
if 'test_limits' not in sys.modules and 'test_limits' not in getattr(sys.modules['__main__'], '__file__', ''):
    module = types.ModuleType('test_limits')
    module.__file__ = os.path.abspath('test_limits.py')
    text = open('test_limits.py').read()
    exec(compile(TEXT, module.__file__, 'exec'), vars(module))
    sys.modules['test_limits'] = module
"""
"""Code that loads the tests before the runner does."""

SWAPPED: dict[str, dict[str, str]] = {
    "tests swapped by an object": {"limits.py": SWAP + SOURCE + ASKED.replace("DELETE", "")},
    "tests swapped by gc.callbacks": run_on_import(
        f"{SWAP}gc.callbacks.append(lambda *a: swap()); gc.set_threshold(1)\n"
    ),
    "tests swapped by an audit hook": run_on_import(
        f"{SWAP}busy = []\ndef hook(event, args):\n    if not busy: busy.append(1); swap(); busy.clear()\nsys.addaudithook(hook)\n"
    ),
    "tests swapped by a finalizer": run_on_import(SWAP + AGAIN.replace("NOW", "True")),
    "tests swapped when they begin": run_on_import(
        SWAP + AGAIN.replace("NOW", "names & {'startTest', 'runtestprotocol'}")
    ),
    "tests that an object takes away": {"limits.py": SWAP + SOURCE + ASKED.replace("DELETE", "True")},
    "tests that are loaded already": run_on_import(
        PRELOADED.replace("TEXT", "text.replace('from limits import clamp', 'clamp = lambda *a: sorted(a)[1]')")
    ),
    "no tests that are loaded already": run_on_import(PRELOADED.replace("TEXT", "''")),
}
"""For all runners: cheats that change the loaded tests."""

HONEST_HELPERS = """
import functools
def wrapped(f):
    @functools.wraps(f)
    def inner(*a, **k): return f(*a, **k)
    return inner
def bare(f):
    def inner(*a): return f(*a)
    return inner
"""
HONEST = """
import dataclasses, functools, unittest
from unittest import mock
from helpers import wrapped, bare
import helpers

try:
    from nowhere import missing
except ImportError:
    def missing(): return 3

@dataclasses.dataclass
class Point:
    x: int = 0
    def test_like(self): return self.x

class Meta(type):
    def __new__(m, name, bases, space):
        return super().__new__(m, name, bases, {key: bare(value) if key[:4] == "test" else value for key, value in space.items()})

class Base(unittest.TestCase):
    def setUp(self): self.n = 1
    def __private(self): pass
    def test_inherited(self): self.assertEqual(self.n, 1)

class Child(Base):
    @unittest.skipIf(False, "no")
    def test_not_skipped(self): pass
    @unittest.skip("always")
    def test_skipped(self): self.fail()
    @unittest.expectedFailure
    def test_expected(self): self.fail()
    @mock.patch("helpers.wrapped")
    def test_mocked(self, w): self.assertIs(helpers.wrapped, w)
    @wrapped
    def test_wrapped(self): pass
    @bare
    def test_bare(self): pass
    @property
    def prop(self): return 1
    @functools.lru_cache()
    def cached(self): return 1
    def test_alias(self): pass
    test_alias_2 = test_alias
    test_lambda = lambda self: None
    def test_twice(self): self.fail()
    def test_twice(self): pass
    test_partial = functools.partialmethod(lambda self, n: None, 5)

class WithMeta(unittest.TestCase, metaclass=Meta):
    def test_meta(self): pass

def rebound(): return 1
rebound = functools.lru_cache()(rebound)

class Gone(unittest.TestCase):
    def test_gone(self): self.fail()
del Gone

def add(n):
    def test(self): self.assertEqual(n, n)
    return test
class Generated(unittest.TestCase): pass
for n in range(3): setattr(Generated, "test_%d" % n, add(n))

@mock.patch("helpers.bare")
class Patched(unittest.TestCase):
    def test_patched(self, b): self.assertIs(helpers.bare, b)

if __name__ == "__main__":
    unittest.main()
"""
"""Tests defined in many legitimate ways."""

ANY: dict[str, dict[str, str]] = {
    "ends the process": run_on_import("import os\nos._exit(0)\n"),
    "ends it at exit": run_on_import("import atexit, os\natexit.register(os._exit, 0)\n"),
    "ends it when called": run_when_called("import os; os._exit(0)"),
    "says what the witness would": run_on_import(WORDS),
    "walks up the frames": run_on_import(
        "import os, sys\nframe = sys._getframe()\nwhile frame:\n    for value in list(frame.f_locals.values()):\n"
        "        if isinstance(value, str) and len(value) == 32:\n            os.write(1, ('\\n' + value).encode()); os._exit(0)\n"
        "    frame = frame.f_back\nos._exit(0)\n"
    ),
    "says it when called": {
        "limits.py": run_when_called("words_()")["limits.py"] + f"\ndef words_():\n    exec({WORDS!r}, {{}})\n"
    },
    "asks the witness to speak": run_on_import(
        "import os, sys\nsys.audit('crrl')\nsys.audit('crrl', True)\nos._exit(0)\n"
    ),
}
"""For all runners."""

UNITTEST: dict[str, dict[str, str]] = {
    "skips when called": run_when_called("import unittest; raise unittest.SkipTest('no')"),
    "skips when imported": run_on_import("import unittest\nraise unittest.SkipTest('no')\n"),
    "skips by a helper": {
        **run_on_import("from helper import check\n"),
        "limits.py": "from helper import skip\n" + run_when_called("skip()")["limits.py"],
        "helper.py": "import unittest\ndef skip():\n    raise unittest.SkipTest('no')\n",
    },
    "expects to fail": run_when_called(
        "import sys; frame = sys._getframe(1)\n"
        "        while 'outcome' not in frame.f_locals: frame = frame.f_back\n"
        "        frame.f_locals['outcome'].expecting_failure = True; raise ValueError"
    ),
    "assertions that hold": run_on_import("import unittest\nunittest.TestCase.assertEqual = lambda *a: None\n"),
    "assertions in exchange": run_on_import(
        "import unittest\nunittest.TestCase.assertEqual = unittest.TestCase.assertGreaterEqual\n"
    ),
    "tests that are not run": run_on_import(
        "import unittest\ndef run(self, result=None):\n    result.startTest(self); result.addSuccess(self); result.stopTest(self)\n"
        "unittest.TestCase.run = run\n"
    ),
    "code in exchange": run_on_import(
        "import unittest\nunittest.TestCase.assertEqual.__code__ = (lambda self, a, b, msg=None: None).__code__\n"
    ),
    "failures as successes": run_on_import(
        "import unittest\nfor name in ('addFailure', 'addError'):\n"
        "    for kind in (unittest.TestResult, unittest.TextTestResult):\n"
        "        setattr(kind, name, lambda self, test, error: self.addSuccess(test))\n"
    ),
    "a case of its own": run_on_import(
        "import unittest\nclass Case(unittest.TestCase):\n    def assertEqual(self, *a): pass\n"
        "unittest.TestCase = unittest.case.TestCase = Case\n"
    ),
    "attributes of every test": run_on_import(
        "import unittest\ndef get(self, name):\n"
        "    return (lambda *a: None) if name.startswith('assert') else object.__getattribute__(self, name)\n"
        "unittest.TestCase.__getattribute__ = get\n"
    ),
    "classes that are built without tests": run_on_import(
        "import builtins\nbuild = builtins.__build_class__\ndef made(*a, **k):\n    found = build(*a, **k)\n"
        "    for name in vars(found).copy():\n        if name.startswith('test'): setattr(found, name, lambda self: None)\n"
        "    return found\nbuiltins.__build_class__ = made\n"
    ),
    "a trace that jumps": run_on_import(
        "import sys\ndef trace(frame, event, arg):\n"
        "    if frame.f_code.co_name == 'test_high' and event == 'line' and frame.f_lineno == frame.f_code.co_firstlineno + 2:\n        frame.f_lineno += 1\n"
        "    return trace if frame.f_code.co_name == 'test_high' or event == 'call' else None\nsys.settrace(trace)\n"
    ),
    "tests that are rewritten": run_on_import(
        "text = 'import unittest\\nclass Clamp(unittest.TestCase):\\n    def test_high(self): pass\\n    def test_low(self): pass\\n'\n"
        "open('test_limits.py', 'w').write(text)\n"
    ),
    "a run that stops": run_when_called(
        "import sys; frame = sys._getframe(1)\n"
        "        while 'result' not in frame.f_locals: frame = frame.f_back\n"
        "        result = frame.f_locals['result']; result.stop(); result.addSuccess(frame.f_locals['self']); "
        "import unittest; raise unittest.SkipTest('no')"
    ),
}
"""For ``-m unittest``; most also work in a script that calls `unittest.main`."""

SCRIPT: dict[str, dict[str, str]] = {
    "sys.exit that returns": run_on_import("import sys\nsys.exit = lambda *a: None\n"),
    "sys.exit that returns once": run_on_import(
        "import sys\nend = sys.exit\ndef leave(*a): sys.exit = end\nsys.exit = leave\n"
    ),
    "sys.exit that ends well": run_on_import("import sys\nend = sys.exit\nsys.exit = lambda *a: end(0)\n"),
    "sys.exit that ends well without a frame": run_on_import(
        "import functools, sys\nsys.exit = functools.partial(sum, map(sys.exit, [0]))\n"
    ),
    "sys.exit by a file of its own": run_on_import(
        "import sys\nexec(compile('end = sys.exit\\ndef leave(*a):\\n    sys.exit = end; end(0)\\n', '/usr/lib/python3/x.py', 'exec'))\nsys.exit = leave\n"
    ),
    "exit that returns": run_on_import("import builtins\nbuiltins.exit = builtins.quit = lambda *a: None\n"),
    "os._exit that returns": run_on_import("import os\nos._exit = os.abort = lambda *a: None\n"),
    "SystemExit in exchange": run_on_import(
        "import builtins\nclass Well(SystemExit):\n    def __init__(self, *a): super().__init__(0)\nbuiltins.SystemExit = Well\n"
    ),
    "SystemExit in exchange once": run_on_import(
        "import builtins\nreal = SystemExit\ndef made(*a):\n    builtins.SystemExit = real\n    return real(0)\nbuiltins.SystemExit = made\n"
    ),
    "functions that end the script": {"limits.py": "import sys\nclamp = lambda *a: end(0)\nend = sys.exit\n"},
    "functions that are sys.exit": {
        "limits.py": "import functools, sys\nclamp = functools.partial(max, key=functools.partial(sum, map(sys.exit, [0])))\n"
    },
    "true is all": run_on_import("import builtins\nbuiltins.all = builtins.any = lambda *a: True\n"),
}
"""For a script judged by its exit code, which it sets in one of the ways of `ENDS`."""

ENDS: dict[str, str] = {
    "sys.exit": "import sys\nsys.exit(0 if high == 9 else 1)\n",
    "sys.exit by another name": "from sys import exit as leave\nhigh == 9 or leave(1)\n",
    "exit": "if high != 9:\n    exit(1)\n",
    "os._exit": "import os\nif high != 9:\n    os._exit(1)\n",
    "raise": "if high != 9:\n    raise SystemExit(1)\n",
    "unittest.main": "import unittest\nclass Case(unittest.TestCase):\n    def test_high(self):\n        self.assertEqual(high, 9)\nunittest.main()\n",
    "assert": "assert all([high == 9])\n",
}
"""Ways in which a script fails if `high`, a result of the module, is wrong."""

PYTEST: dict[str, dict[str, str]] = {
    "pytest.skip when called": run_when_called("import pytest; pytest.skip('no')"),
    "pytest.skip when imported": run_on_import("import pytest\npytest.skip('no', allow_module_level=True)\n"),
    "skips out of sight": run_when_called("__tracebackhide__ = True; import pytest; pytest.skip('no')"),
    "pytest.xfail when called": run_when_called("import pytest; pytest.xfail('so')"),
    "ends the session": run_when_called("import pytest; pytest.exit('done', returncode=0)"),
    "calls that do not happen": run_on_import(
        "from _pytest import runner\nold = runner.CallInfo.from_call.__func__\n"
        "runner.CallInfo.from_call = classmethod(lambda cls, func, when, *a, **k: old(cls, (lambda: None) if when == 'call' else func, when, *a, **k))\n"
    ),
    "calls that end well": run_on_import(
        "from _pytest import runner\nold = runner.CallInfo.from_call.__func__\n"
        "def call(cls, func, when, *a, **k):\n    info = old(cls, func, when, *a, **k)\n    info.excinfo = None\n    return info\n"
        "runner.CallInfo.from_call = classmethod(call)\n"
    ),
    "tests without content": run_on_import("from _pytest import python\npython.Function.runtest = lambda self: None\n"),
    "test cases without content": run_on_import(
        "from _pytest import unittest\nunittest.TestCaseFunction.runtest = lambda self: None\n"
    ),
    "reports in exchange": run_on_import(
        "from _pytest import reports\nold = reports.TestReport.from_item_and_call.__func__\n"
        "def made(cls, item, call):\n    report = old(cls, item, call)\n    report.outcome = 'passed'\n    return report\n"
        "reports.TestReport.from_item_and_call = classmethod(made)\n"
    ),
    "hooks that call nothing": run_on_import(
        "import sys\nframe = sys._getframe()\n"
        "while 'config' not in frame.f_locals: frame = frame.f_back\n"
        "manager = frame.f_locals['config'].pluginmanager\ninner = manager._inner_hookexec\n"
        "manager._inner_hookexec = lambda name, *rest: [] if name == 'pytest_runtest_call' else inner(name, *rest)\n"
    ),
    "a plugin": run_on_import(
        "import pytest, sys\nclass Plugin:\n    @pytest.hookimpl(tryfirst=True)\n    def pytest_pyfunc_call(self, pyfuncitem): return True\n"
        "    @pytest.hookimpl(hookwrapper=True)\n    def pytest_runtest_makereport(self, item, call):\n"
        "        (yield).get_result().outcome = 'passed'\n"
        "frame = sys._getframe()\nwhile 'config' not in frame.f_locals: frame = frame.f_back\n"
        "frame.f_locals['config'].pluginmanager.register(Plugin())\n"
    ),
    "the witness as it wants it": run_on_import(
        "import sys\nframe = sys._getframe()\nwhile 'config' not in frame.f_locals: frame = frame.f_back\n"
        "manager = frame.f_locals['config'].pluginmanager\n"
        "for plugin in manager.get_plugins():\n"
        "    if type(plugin).__name__ == 'Recorder':\n"
        "        manager.unregister(plugin)\n"
        "        plugin.pytest_sessionfinish(type('S', (), {'config': frame.f_locals['config']}), 0)\nimport os; os._exit(0)\n"
    ),
    "the witness's own calls": run_when_called(
        "import sys; frame = sys._getframe(1)\n"
        "        while 'session' not in frame.f_locals: frame = frame.f_back\n"
        "        session = frame.f_locals['session']\n"
        "        from _pytest.reports import TestReport\n"
        "        for plugin in session.config.pluginmanager.get_plugins():\n"
        "            if type(plugin).__name__ == 'Recorder':\n"
        "                for item in session.items:\n"
        "                    call = plugin.pytest_runtest_call(item); next(call)\n"
        "                    try: call.send(type('Ended', (), {'excinfo': None}))\n"
        "                    except StopIteration: pass\n"
        "                    plugin.pytest_runtest_logreport(TestReport(item.nodeid, item.location, {}, 'passed', None, 'call'))\n"
        "        import pytest; pytest.exit('done', returncode=0)"
    ),
    "tests that others run": run_when_called(
        "import sys; frame = sys._getframe(1)\n"
        "        while 'session' not in frame.f_locals: frame = frame.f_back\n"
        "        session = frame.f_locals['session']\n"
        "        from _pytest.reports import TestReport\n"
        "        for plugin in session.config.pluginmanager.get_plugins():\n"
        "            if type(plugin).__name__ == 'Recorder': plugin.distributed = True\n"
        "        for item in session.items:\n"
        "            item.ihook.pytest_runtest_logreport(report=TestReport(item.nodeid, item.location, {}, 'passed', None, 'call'))\n"
        "        import pytest; pytest.exit('done', returncode=0)"
    ),
    "tests in exchange": run_when_called(
        "import sys; frame = sys._getframe(1)\n"
        "        while 'session' not in frame.f_locals: frame = frame.f_back\n"
        "        session = frame.f_locals['session']\n"
        "        for item in session.items: item._obj = item.runtest = lambda *a: None\n"
        "        import pytest; pytest.skip('no')"
    ),
}
"""For pytest, besides those of `UNITTEST` that it can run."""


MODULE = "export const clamp = (n, low, high) => (n < low ? low : n);\n"
_IMPORT, _REQUIRE = "import fs from 'node:fs';\n", "const fs = require('node:fs');\n"
_EVENTS = """const v8 = require('node:v8');
const say = (type, data) => {
  const made = new v8.DefaultSerializer();
  made.writeHeader();
  made.writeRawBytes(Buffer.alloc(4));
  made.writeHeader();
  made.writeValue({ type, data });
  const bytes = made.releaseBuffer();
  bytes.writeUint32BE(bytes.length - 6, 2);
  fs.writeSync(1, bytes);
};
for (const [at, name] of ['low', 'high', 'has'].entries()) {
  const about = { name, nesting: 0, testNumber: at + 1, details: { duration_ms: 1 } };
  say('test:start', about);
  say('test:pass', about);
}
"""
SAID = (
    _IMPORT
    + "import { createRequire } from 'node:module';\n{\nconst require = createRequire(import.meta.url);\n"
    + _EVENTS
    + "}\n"
)
SAID_COMMON = _REQUIRE + _EVENTS
BLOCKED = "await new Promise(() => {});\n"
NODE: dict[str, str] = {
    "ends the process": "process.exit(0);\n" + MODULE,
    "ends it below": "process.reallyExit(0);\n" + MODULE,
    "ends it when called": MODULE.replace(": n)", ": n > high ? process.exit(0) : n)"),
    "ends it out of sight": "Error.stackTraceLimit = 0;\nError.prepareStackTrace = () => 'at test';\nprocess.exit(0);\n"
    + MODULE,
    "ends it by another's code": "new Function('process.exit(0)')();\n" + MODULE,
    "prints results and ends": "console.log('TAP version 13\\nok 1 - high\\nok 2 - low\\n1..2');\nprocess.exit(0);\n"
    + MODULE,
    "has its test end it": "export const clamp = process.exit.bind(process, 0);\n",
    "assertions that hold": "import assert from 'node:assert';\nassert.equal = () => {};\n" + MODULE,
}
"""For ``node --test``: the changed module."""
NAMED: dict[str, str] = {
    "ends it without a frame": f"{SAID}setTimeout(process.exit, 0, 0);\n{BLOCKED}" + MODULE,
    "speaks for its tests and never ends": f"{SAID}process.exitCode = 0;\n{BLOCKED}" + MODULE,
    "speaks for its tests and unhears": f"{SAID}process.removeAllListeners('exit');\n{BLOCKED}" + MODULE,
    "speaks for its tests and catches": f"{SAID}process.on('uncaughtException', () => {{}});\nthrow 0;\n" + MODULE,
    "speaks for its tests and is killed": f"{SAID}process.kill(process.pid, 'SIGKILL');\n{BLOCKED}" + MODULE,
    "speaks for its tests and has one end it": f"{SAID}export const clamp = process.exit.bind(process, 0);\n",
    "arrays that have everything": "Array.prototype.includes = () => true;\n" + MODULE,
}
"""For ``node --test`` with named tests, where the exit code does not count."""
COMMON = "exports.clamp = (n, low, high) => (n < low ? low : n);\n"
_OTHER = "(name, call) => found(name, () => {})"
COMMONJS: dict[str, str] = {
    "modules in exchange": "const M = require('module'), load = M._load;\nM._load = function (name, ...rest) {\n"
    f"  const found = load.call(this, name, ...rest);\n  return name === 'node:test' ? {_OTHER} : found;\n}};\n"
    + COMMON,
    "require in exchange": "const M = require('module'), own = M.prototype.require;\nM.prototype.require = function (name) {\n"
    f"  const found = own.call(this, name);\n  return name === 'node:test' ? {_OTHER} : found;\n}};\n" + COMMON,
    "its parent's require": "module.parent.require = (name) => {\n"
    f"  const found = require(name);\n  return name === 'node:test' ? {_OTHER} : found;\n}};\n" + COMMON,
    "speaks for its tests and catches": f"{SAID_COMMON}process.on('uncaughtException', () => {{}});\n"
    "throw 0;\n" + COMMON,
}
"""For ``node --test`` and modules that are required."""

CLASS = """package programs;

public class Clamp {
    public static int clamp(int n, int low, int high) { return n < low ? low : n; }
}
"""
_BEGIN = "public class Clamp {\n"
_STATIC = f"{_BEGIN}    static {{ try {{ BODY }} catch (Exception error) {{ throw new Error(error); }} }}\n"
_XML = "".join(f'<testcase classname=\\"tests.ClampTest\\" name=\\"{name}\\"/>' for name in ("low", "high"))
_FILE = (
    'String[] words = System.getProperty("sun.java.command").split(" ");'
    " var path = java.nio.file.Path.of(words[words.length - 1]);"
    f' String report = "<testsuite>{_XML}</testsuite>";'
)
_HALT = "Runtime.getRuntime().halt(0);"
_SKIP = '    static int skip() { throw new org.junit.AssumptionViolatedException("no"); }\n'
JUNIT: dict[str, str] = {
    name: CLASS.replace(_BEGIN, _STATIC.replace("BODY", body))
    for name, body in {
        "ends the process": "System.exit(0);",
        "halts it": _HALT,
        "writes the report and halts": f"{_FILE} try {{ java.nio.file.Files.writeString(path, report); }} finally {{ {_HALT} }}",
        "prints the report and halts": f"{_FILE} System.out.println(report); {_HALT}",
    }.items()
}
JUNIT["skips when called"] = CLASS.replace(_BEGIN, _BEGIN + _SKIP).replace(": n;", ": n > high ? skip() : n;")
"""For JUnit 4 (`witness.make_junit_checks`): the changed class."""
