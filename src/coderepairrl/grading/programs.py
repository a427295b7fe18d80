"""What runs in a sandbox beside code under test and says how its checks ended: source text, for Python 3.6 and later.

Each program keeps its word, what it found, and what its runner is made of in a function that only the interpreter's
list of audit hooks knows: no frame that code under test can walk to, no module and, since the collector's objects are
frozen then, no list of objects leads there. It is asked by ``sys.audit``, and answers only the frames that it was made
for. Python 3.6 and 3.7 have no such list; there frames lead to it.
"""

from __future__ import annotations

_CLOCK = """
class Clock:
    # Ends what takes longer than `each` seconds, or than half of what is left of `whole` where that is 0, by raising in
    # the main thread, again and again: no `except Exception` of the code under test catches it.

    class Late(BaseException):
        pass

    def __init__(self, each, whole):
        import signal, threading, time

        self.each, self.now, self.timer = each, time.monotonic, signal.setitimer
        self.signal, self.alarm, self.real = signal.signal, signal.SIGALRM, signal.ITIMER_REAL
        self.default, self.late = signal.SIG_DFL, False
        self.end = time.monotonic() + 0.9 * whole  # the rest is for the runner itself
        self.works = threading.current_thread() is threading.main_thread()

    def start(self):
        self.late = False
        seconds = self.each or max((self.end - self.now()) / 2, 0.05)

        def ring(*_):
            self.late = True
            raise self.Late(f"no end within {seconds:.3g} s")

        if self.works:
            self.before = self.signal(self.alarm, ring)
            self.timer(self.real, seconds, max(seconds, 1.0))

    def stop(self):
        if self.works:
            self.timer(self.real, 0)
            self.signal(self.alarm, self.default if self.before is None else self.before)
        return self.late
"""

_ORIGIN = """
def origins(root, own, here, exact, guess):
    # Functions that tell whose code it is: `root` is the workspace, `own` the sources of the files in it that belong to
    # the checks. `exact`: code that only carries the name of such a file is not from it. `guess`: nobody said which
    # files those are, so whatever is called a test is one.
    import os

    join, plain, prefix, base, known = os.path.join, os.path.normpath, root + os.sep, os.path.basename, {}

    def codes(name):
        if name not in known:
            known[name] = found = set()
            left = [compile(own[name], name, "exec", dont_inherit=True)] if name.endswith(".py") else []
            while left:
                code = left.pop()
                found.add(code)
                left += [each for each in code.co_consts if hasattr(each, "co_consts")]
        return known[name]

    def foreign(code):
        # The file of the workspace that the code is from, unless it belongs to the checks.
        name = plain(join(here, code.co_filename))
        if not name.startswith(prefix) or base(name) == "conftest.py" or base(name).startswith("<frozen "):
            return ""
        if name in own and (not exact or code in codes(name)):
            return ""
        part = name[len(prefix):]
        if guess and any(each.startswith("test") or each.endswith("_test.py") for each in part.split("/")):
            return ""
        return part

    def blamed(trace):
        # The file of the code under test that raised, or through which it was raised.
        while trace:
            name = foreign(trace.tb_frame.f_code)
            if name:
                return name
            trace = trace.tb_next
        return ""

    def beneath(frame, last):
        # Likewise of what runs in the frame, and was called after `last`.
        while frame and frame is not last:
            name = foreign(frame.f_code)
            if name:
                return name
            frame = frame.f_back
        return ""

    return foreign, blamed, beneath
"""

_SKIPS = """
def watch(unittest, tell):
    # Tells where a test is about to be skipped, while it can be seen by whom, and where one has come to its end.
    def made(self, *reason):
        tell("crrl", "skipping")
        Exception.__init__(self, *reason)

    unittest.SkipTest.__init__, made.__module__ = made, "unittest.case"

    def calling(kind):
        inherited = kind._callTestMethod

        def call(self, method):
            inherited(self, method)
            tell("crrl", "returned", self)

        kind._callTestMethod, call.__module__ = call, "unittest.case"
        return call

    kinds = (unittest.TestCase, getattr(unittest, "IsolatedAsyncioTestCase", None))
    calls = [calling(kind) for kind in kinds if "_callTestMethod" in getattr(kind, "__dict__", ())]
    return lambda test: getattr(type(test), "_callTestMethod", None) in calls
"""

_READ = """
def sources(root, files):
    # What stands in the files that belong to the checks, before any code under test runs.
    import os

    found = {}
    for file in files:
        name = os.path.normpath(os.path.join(root, file))
        try:
            with open(name, "rb") as source:
                found[name] = source.read()
        except OSError:
            found[name] = b""
    return found

def rewritten(own, sources=sources):
    # Those of the tests that are no longer what they were, although none has run yet.
    now = sources("", own)
    return [name for name in own if name.endswith(".py") and now[name] != own[name]]
"""

_PARTS = """
def parts(tops):
    # What the modules below `tops` are made of; tells the name of one that is no longer what it was.
    import builtins, sys, types

    kinds = (type, types.FunctionType, staticmethod, classmethod, property)
    absent = ("__getattribute__", "__getattr__", "__setattr__", "__init_subclass__", "__new__", "__call__")
    free = ("open", "print", "input", "__import__", "breakpoint", "compile", "exec", "eval")  # programs replace them
    found, seen, modules = [], set(), sys.modules

    def add(space, name, value, label):
        inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        found.append((space, name, value, inner, getattr(inner, "__code__", None), label))

    def look(space, label):
        for name, value in list(space.items()):
            of_class = isinstance(value, kinds[2:])
            if of_class or isinstance(value, kinds[:2]) and str(value.__module__).partition(".")[0] in tops:
                add(space, name, value, label + "." + name)
            if isinstance(value, type) and id(value) not in seen and str(value.__module__).partition(".")[0] in tops:
                seen.add(id(value))
                look(vars(value), value.__module__ + "." + value.__name__)
                for name in absent:
                    if name not in vars(value):
                        add(vars(value), name, None, value.__module__ + "." + value.__name__ + "." + name)

    for name, module in list(modules.items()):
        if name.partition(".")[0] in tops and isinstance(module, types.ModuleType):
            found.append((modules, name, module, module, None, name))
            look(vars(module), name)
    for name, value in vars(builtins).items():
        if isinstance(value, (type, types.BuiltinFunctionType)) and name not in free:
            add(vars(builtins), name, value, "builtins." + name)

    def changed():
        for space, name, value, inner, code, label in found:
            if space.get(name) is not value or (code is not None and inner.__code__ is not code):
                return label
        return ""

    def accept(foreign):
        # What plugins and settings changed is as they want it; what code under test changed is not.
        for at, (space, name, value, inner, code, label) in enumerate(found):
            now = space.get(name)
            if now is not value:
                inner = getattr(now, "__func__", None) or getattr(now, "fget", None) or now
                code = getattr(inner, "__code__", None)
                if code is not None and not foreign(code):
                    found[at] = (space, name, now, inner, code, label)

    return changed, accept
"""


def _named(program: str) -> str:
    """`program` for ``python -c``, with a file's name that is not that of all text that is ever compiled."""
    return f"exec(compile({program!r}, '/dev/crrl', 'exec'))"


SCRIPT = _named(
    _READ
    + f"ORIGIN, PARTS = {_ORIGIN!r}, {_SKIPS + _PARTS!r}"
    + """

def _witness():
    import sys
    alone = sys.path[:1] != [""]  # isolated: a script's folder is no place for modules either
    if not alone:
        del sys.path[0]  # or a file of the patch could stand in for os
    import gc, os
    script, here, spaces = sys.argv[1], os.getcwd(), {}
    space = globals()
    origin, made = space.pop("ORIGIN"), space.pop("PARTS")
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec", dont_inherit=True)
    tested = any(name.partition(".")[0] == "unittest" for name in code.co_names)
    if tested:
        import unittest

        exec(made, spaces)
    del space["rewritten"]
    run, read = exec, space.pop("sources")

    def blame(root, own, which, *what):
        if "origins" not in spaces:
            run(origin, spaces)
        return spaces["origins"](root, own, here, True, len(own) == 1)[which](*what)

    def keep():
        word, root, *files = sys.stdin.buffer.read().decode("utf-8", "surrogateescape").split("\\n")
        root = os.path.realpath(root)
        own = read(root, [os.path.join(here, script), *files])
        changed = spaces["parts"](("unittest",))[0] if tested else str
        getframe, write, depth = sys._getframe, os.write, 1
        asking, problems, skips, returned = getframe(1), [], [], set()

        def end():
            label = changed()
            if label:
                problems.append("code under test changes " + label)
            write(*(2, ("\\n" + problems[0]).encode()) if problems else (1, ("\\n" + word).encode()))

        def hook(event, args=()):
            if event.startswith("gc.get_") and not frozen():
                freeze()
            if event in ("sys.settrace", "sys.setprofile"):
                name = blame(root, own, 2, getframe(0), asking)
                problems.extend([name + " traces the check"] if name else [])
            elif event != "crrl":
                return
            elif not args:
                if getframe(depth) is asking:
                    end()
            elif args[0] == "skipping":
                skips[:] = [blame(root, own, 2, getframe(0), asking)]
            elif args[0] == "returned":
                returned.add(id(args[1]))
            elif args[0] == "addSuccess":
                if seen(args[1]) and id(args[1]) not in returned:
                    problems.append(args[1].id() + " did not come to its end")
            elif args[0] == "addExpectedFailure":
                if not any(b"expectedFailure" in text for text in own.values()):
                    problems.append(args[1].id() + " is expected to fail by code under test")
            else:
                problems.extend(name + " skips a test" for name in skips if name)
                skips.clear()

        tell = getattr(sys, "audit", None)
        if tell:
            frozen, freeze = gc.get_freeze_count, gc.freeze
            sys.addaudithook(hook)
            freeze()
        else:
            depth, tell = 2, lambda event, *args: hook(event, args)
        return tell, root, own

    if tested:
        seen = spaces["watch"](unittest, lambda *said: tell(*said))

        def recording(name):
            inherited = getattr(unittest.TestResult, name)

            def method(self, test, *rest):
                tell("crrl", name, test)
                inherited(self, test, *rest)

            method.__module__ = "unittest.result"
            setattr(unittest.TestResult, name, method)

        for name in ("addSkip", "addSuccess", "addExpectedFailure"):
            recording(name)
    tell, root, own = keep()
    del sys.argv[0]
    if not alone:
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    del space["_witness"]
    space["__file__"] = script
    say, quit, write = sys.stdout.flush, os._exit, os.write
    try:
        exec(code, space)
    except SystemExit as end:
        if end.code not in (None, 0, False):
            raise
        name = blame(root, own, 1, end.__traceback__.tb_next)
        if name:
            write(2, ("\\n" + name + " ended the check").encode())
            quit(1)
    say()
    tell("crrl")

_witness()
"""
)
"""Runs a script and says the word after its last line, and only then."""

UNITTEST = _named(
    _CLOCK
    + _READ
    + _SKIPS
    + _ORIGIN
    + _PARTS
    + """
def _witness():
    import sys
    alone = sys.path[:1] != [""]
    if not alone:
        del sys.path[0]  # or a file of the patch could stand in for unittest
    import gc, importlib, json, os, time, unittest
    space, here, run_code = globals(), os.getcwd(), unittest.TestCase.run.__code__
    runs = {unittest.TestCase.run} | {getattr(getattr(unittest, "IsolatedAsyncioTestCase", None), "run", None)}
    read, rewritten = space.pop("sources"), space.pop("rewritten")
    origins, parts = space.pop("origins"), space.pop("parts")

    def flat(suite):
        for each in suite:
            if isinstance(each, unittest.TestSuite):
                yield from flat(each)
            else:
                yield each

    def recording(name, outcome):
        inherited = getattr(unittest.TextTestResult, name)

        def method(self, test, *rest):
            tell("crrl", outcome, test)
            inherited(self, test, *rest)

        return method

    def keep():
        # Keeps the word and what was found, and says it once this frame's caller asks for it.
        words, root, *files = sys.stdin.buffer.read().decode("utf-8", "surrogateescape").split("\\n")
        word, each, whole = words.split()
        root = os.path.realpath(root)
        own = read(root, files)
        foreign, blamed, beneath = origins(root, own, here, True, not files)
        changed = parts(("unittest",))[0]
        getframe, write, depth, dump = sys._getframe, os.write, 1, json.dumps
        asking, found, tests, expected, problems, skips = getframe(1), {}, {}, set(), [], []
        returned, tick, due = set(), time.monotonic, [0]
        method = recording("addSkip", 1).__code__

        def passes(test, caller):
            if id(test) not in tests or (seen(test) and id(test) not in returned):
                return False
            return type(test).run not in runs or (
                caller.f_code is run_code and caller.f_locals.get("self") is test
            )

        def note(name, outcome):
            found[name] = max(outcome, found.get(name, outcome))

        def check(now=False):
            begun = tick()
            if not now and begun < due[0]:
                return
            label = changed()
            if label:
                problems.append("code under test changes " + label)
            due[0] = tick() + 20 * (tick() - begun)  # a twentieth of the time is enough for it

        def end(well):
            check(True)
            excused = tuple(name.partition("(")[2][:-1] + "." for name, n in found.items() if n == 1 and "(" in name)
            missed = [each for each in tests.values() if each.id() not in found and not each.id().startswith(excused)]
            for name in found if problems else ():
                found[name] = 2
            if problems:
                write(2, ("\\n" + problems[0]).encode())
            well = well and not problems and not missed and 2 not in found.values()
            rest = ("\\n" + dump({"word": word, "ok": well, "outcomes": found})).encode()
            while rest:
                rest = rest[write(1, rest):]
            return well

        def hook(event, args):
            if event.startswith("gc.get_") and not frozen():
                freeze()
            if event in ("sys.settrace", "sys.setprofile"):
                name = beneath(getframe(0), asking)
                problems.extend([name + " traces the tests"] if name else [])
            if event != "crrl":
                return
            who, what = getframe(depth), args[0]
            if who is asking:
                end(what)
            elif what == "suite" and not tests:
                problems.extend("code under test writes " + name for name in rewritten(own))
                for each in args[1]:
                    tests[id(each)] = each
                    method_of = getattr(each, getattr(each, "_testMethodName", ""), None)
                    marks = [getattr(each, "__unittest_expecting_failure__", 0), getattr(
                        method_of, "__unittest_expecting_failure__", 0)]
                    if any(marks):
                        expected.add(id(each))
            elif what == "skipping":
                skips[:] = [beneath(getframe(0), asking)]
            elif what == "returned":
                returned.add(id(args[1]))
            elif what == "stop":
                skips.clear()
                check()
            elif what == "module":
                if blamed(args[2]):
                    note(args[1].id(), 2)
            elif what == 0 and who.f_code is method:
                if passes(args[1], getframe(depth + 1)):
                    note(args[1].id(), 0)
            elif what == 3:
                note(args[1].id(), 0 if id(args[1]) in expected else 2)
            elif what == 1:
                note(args[1].id(), 2 if any(skips) else 1)
                skips.clear()
            elif what == 2:
                note(args[1].id(), 2)

        tell = getattr(sys, "audit", None)
        if tell:
            frozen, freeze = gc.get_freeze_count, gc.freeze
            sys.addaudithook(hook)
            freeze()
        else:
            depth, tell = 2, lambda event, *args: hook(event, args)
        return tell, float(each), float(whole)

    seen = space.pop("watch")(unittest, lambda *said: tell(*said))
    tell, each, whole = keep()
    clock = Clock(each, whole)
    del space["Clock"], space["_witness"]

    class Result(unittest.TextTestResult):
        def startTest(self, test):
            super().startTest(test)
            clock.start()

        def stopTest(self, test):
            if clock.stop():
                tell("crrl", 2, test)
            tell("crrl", "stop")
            super().stopTest(test)

    outcomes = {"addSuccess": 0, "addSkip": 1, "addFailure": 2, "addError": 2, "addUnexpectedSuccess": 2}
    for name, outcome in {**outcomes, "addExpectedFailure": 3}.items():
        setattr(Result, name, recording(name, outcome))

    class Runner(unittest.TextTestRunner):
        resultclass = Result

        def run(self, suite):
            tests = list(flat(suite))
            tell("crrl", "suite", tests)
            for test in tests:
                if type(test).__name__ == "ModuleSkipped":  # by whom? The loader does not say
                    try:
                        importlib.import_module(test._testMethodName)
                    except unittest.SkipTest as skipped:
                        tell("crrl", "module", test, skipped.__traceback__)
            return super().run(suite)

    if not alone:
        sys.path.insert(0, here)
    sys.argv[0] = "python -m unittest"
    say = sys.stdout.flush
    ended = unittest.main(module=None, testRunner=Runner, exit=False)
    well = ended.result.wasSuccessful()
    say()
    tell("crrl", well)
    sys.exit(not well)

_witness()
"""
)
"""Runs ``python -m unittest`` and says beside the word how each test ended."""

START = """
def start():
    # Before any folder of the workspace is on the path: where this process is pytest, all that it needs is imported.
    import os, sys

    here = os.path.dirname(os.path.abspath(__file__))
    words = getattr(sys, "orig_argv", None)
    if words is None:
        try:
            with open("/proc/self/cmdline") as file:
                words = file.read().split("\\0")
        except OSError:
            words = []
    words, program = words[1:], ""
    while words and not program:
        word = words.pop(0)
        if word == "-m" or not word.startswith("-"):
            program = (words.pop(0) if word == "-m" and words else word)
        elif word in ("-W", "-X") and words:
            words.pop(0)
        elif word == "-c":
            program = word
    path = list(sys.path)
    if os.path.basename(program) in ("pytest", "py.test", "coverage") and os.path.exists(here + "/word"):
        root = os.environ.get("CRRL_WORKSPACE", os.getcwd())
        sys.path[:] = [each for each in path if not (os.path.abspath(each) + os.sep).startswith(root + os.sep)]
        try:
            __import__("PLUGIN")
        except ImportError:  # an interpreter without pytest: some other will run the tests
            sys.modules.pop("PLUGIN", None)
    sys.path[:] = [each for each in path if each != here]
    sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # the one that the interpreter would have found
    except ImportError:
        pass
    sys.path[:] = path

start()
"""
"""Start-up code of every Python that a command with pytest starts; `PLUGIN` is replaced."""

PYTEST = (
    '''"""PYTEST_DONT_REWRITE"""
'''
    + _CLOCK
    + _READ
    + _SKIPS
    + _ORIGIN
    + _PARTS
    + """

def _recorder():
    import gc, json, os, sys, time
    import pytest
    from _pytest import config as runner

    folder = os.path.dirname(os.path.abspath(__file__))
    if not os.path.exists(folder + "/word"):
        return None  # a worker of xdist, which reports to its controller
    for name in getattr(runner, "default_plugins", ()):
        try:
            __import__("_pytest." + name)
        except ImportError:
            pass
    import unittest

    skips = (pytest.skip.Exception, pytest.xfail.Exception, unittest.SkipTest)
    watch(unittest, lambda *said: tell(*said))

    def keep():
        # Keeps the word and what was found, and writes it once the recorder's last hook asks for it.
        with open(folder + "/word", encoding="utf-8", errors="surrogateescape") as file:
            words, root, *files = file.read().split("\\n")
        root = os.path.realpath(root)
        os.unlink(folder + "/word")
        word, each, whole = words.split()
        own = sources(root, files)
        foreign, blamed, beneath = origins(root, own, os.getcwd(), False, not files)
        changed, accept = parts(("_pytest", "pytest", "pluggy", "unittest"))
        getframe, depth, dump, opened = sys._getframe, 1, json.dumps, open
        tick, due = time.monotonic, [0]
        found, called, items, marked, asking, problems, plugins, unseen = {}, {}, {}, set(), set(), [], {}, []

        def code_of(item):
            inner = getattr(item, "_obj", None) or getattr(item, "obj", None)
            return getattr(getattr(inner, "__func__", inner), "__code__", None)

        def note(name, outcome):
            found[name] = max(outcome, found.get(name, outcome))

        def strange(plugin):
            if isinstance(plugin, type(sys)):
                file = getattr(plugin, "__file__", None) or ""
            else:
                file = getattr(sys.modules.get(type(plugin).__module__), "__file__", None) or ""
            run = compile("", file or "builtin", "exec")
            return foreign(run) if file else ""

        def check(manager, now=False):
            begun = tick()
            if not now and begun < due[0]:
                return
            label = changed()
            for plugin in manager.get_plugins():
                if id(plugin) not in plugins:
                    plugins[id(plugin)] = plugin
                    label = label or (strange(plugin) and "the plugins of pytest")
            if label:
                problems.append("code under test changes " + label)
            due[0] = tick() + 20 * (tick() - begun)  # a twentieth of the time is enough for it

        def end(exitstatus, manager):
            check(manager, True)
            if problems:
                sys.stderr.write("\\n" + problems[0] + "\\n")
                for name in [*found, *(item.nodeid for item, _ in items.values())]:
                    found[name] = 2
            missed = [item for item, _ in items.values() if item.nodeid not in found]
            well = int(exitstatus) == 0 and not missed and not problems and 2 not in found.values()
            with opened(folder + "/outcomes", "w") as file:
                file.write(dump({"word": word, "ok": well, "outcomes": found}))

        def hook(event, args):
            if event.startswith("gc.get_") and not frozen():
                freeze()
            if event in ("sys.settrace", "sys.setprofile"):
                name = beneath(getframe(0), None)
                problems.extend([name + " traces the tests"] if name else [])
            if event != "crrl":
                return
            what, rest = args[0], args[1:]
            if what == "skipping":
                unseen[:] = [beneath(getframe(0), None)]
                return
            if not asking and what == "methods":
                asking.update(rest[0])
            elif getframe(depth).f_code not in asking:
                return
            elif what == "begin":
                accept(foreign)
                plugins.update((id(each), each) for each in rest[0].get_plugins())
            elif what == "items":
                problems.extend("code under test writes " + name for name in rewritten(own))
                items.update((id(item), (item, code_of(item))) for item in rest[0])
                marked.update(item.nodeid for item in rest[0] if item.get_closest_marker("xfail"))
            elif what == "check":
                unseen.clear()
                check(rest[0])
            elif what == "called":
                item, late, raised = rest
                known = items.get(id(item), (None, None))
                same = known[0] is item and (known[1] is None or code_of(item) is known[1])
                called[item.nodeid] = same and not late and not raised
                if late:
                    note(item.nodeid, 2)
            elif what == "blame":
                if blamed(rest[1]):
                    note(rest[0], 2)
            elif what == "report":
                name, outcome, distributed, xfailed = rest
                if xfailed and outcome == 1 and (distributed or name in marked):
                    note(name, 0)
                elif outcome or distributed or called.get(name):
                    note(name, 2 if outcome == 1 and any(unseen) else outcome)
                else:
                    note(name, 2)  # a report of a call that nobody saw, or that raised
            elif what == "end":
                end(*rest)

        tell = getattr(sys, "audit", None)
        if tell:
            frozen, freeze = gc.get_freeze_count, gc.freeze
            sys.addaudithook(hook)
            freeze()
        else:
            depth, tell = 2, lambda event, *args: hook(event, args)
        return tell, float(each), float(whole)

    tell, each, whole = keep()
    clock = Clock(each, whole)

    def blame(nodeid, info):
        if info is not None and issubclass(info[0], skips):
            tell("crrl", "blame", nodeid, info[2])

    class Recorder:
        distributed = False

        def settle(self):
            for name in ("PYTHONPATH", "PYTEST_ADDOPTS"):  # what runs within the tests is not ours
                before = os.environ.pop("CRRL_" + name, None)
                os.environ.pop(name, None)
                if before:
                    os.environ[name] = before
            os.environ.pop("CRRL_WORKSPACE", None)
            sys.path[:] = [path for path in sys.path if path != folder]

        @pytest.hookimpl(tryfirst=True)
        def pytest_sessionstart(self, session):
            option = session.config.option
            self.distributed = bool(getattr(option, "numprocesses", None) or getattr(option, "tx", None)
                                    or getattr(option, "forked", False))
            tell("crrl", "begin", session.config.pluginmanager)

        @pytest.hookimpl(trylast=True)
        def pytest_collection_finish(self, session):
            tell("crrl", "items", list(session.items))

        @pytest.hookimpl(hookwrapper=True)
        def pytest_make_collect_report(self, collector):
            report = (yield).get_result()
            call = getattr(report, "call", None)
            if report.failed:
                tell("crrl", "report", report.nodeid, 2, False, False)
            elif report.skipped and call is not None and call.excinfo is not None:
                tell("crrl", "blame", report.nodeid, call.excinfo.tb)

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_runtest_setup(self, item):
            tell("crrl", "check", item.config.pluginmanager)
            clock.start()
            ended = yield
            if clock.stop():
                tell("crrl", "report", item.nodeid, 2, False, False)
            blame(item.nodeid, ended.excinfo)

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_runtest_teardown(self, item):
            clock.start()
            yield
            if clock.stop():
                tell("crrl", "report", item.nodeid, 2, False, False)
            tell("crrl", "check", item.config.pluginmanager)

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_runtest_call(self, item):
            clock.start()
            ended = yield
            tell("crrl", "called", item, clock.stop(), ended.excinfo is not None)
            blame(item.nodeid, ended.excinfo)

        def pytest_runtest_logreport(self, report):
            xfailed = hasattr(report, "wasxfail") and "xfail" in report.keywords
            if report.failed:
                outcome = 2
            elif report.skipped:
                outcome = 1
            elif report.passed and report.when == "call":
                outcome = 0
            else:
                return
            tell("crrl", "report", report.nodeid, outcome, self.distributed, xfailed)

        def pytest_sessionfinish(self, session, exitstatus):
            tell("crrl", "end", exitstatus, session.config.pluginmanager)

    tell("crrl", "methods", [each.__code__ for each in (*vars(Recorder).values(), blame) if hasattr(each, "__code__")])
    return Recorder()


_recorder = _recorder()


def pytest_addoption(parser):
    if _recorder is not None:
        _recorder.settle()


def pytest_configure(config):
    if _recorder is not None:
        config.pluginmanager.register(_recorder)
"""
)
"""A plugin for pytest that writes beside the word how each test ended."""

NODE = """
const { root, own, guess } = ABOUT;
if (process.env.NODE_TEST_CONTEXT) {
    const before = process.env.CRRL_NODE_OPTIONS;
    delete process.env.CRRL_NODE_OPTIONS;
    if (before) process.env.NODE_OPTIONS = before;
    else delete process.env.NODE_OPTIONS;
    const folder = require("node:fs").realpathSync(root) + "/";
    const allowed = (frame) => {
        const at = frame.indexOf(folder);
        const name = frame.slice(at + folder.length).replace(/(:\\d+)+\\)?$/, "");
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
            const frames = String(new Error().stack).split("\\n").slice(2);
            Object.assign(Error, { stackTraceLimit, prepareStackTrace });
            const well = frames.length > 0 && frames.every(allowed);
            return real.call(process, well ? code : code || process.exitCode || 1);
        };
    }
}
"""
"""What Node loads first: in a process of its test runner only tests may end it with exit code 0, and assertions stay
what they are. `ABOUT` is replaced."""
