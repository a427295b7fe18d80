"""Functions that several of the programs have in common, as source text."""

from __future__ import annotations

CLOCK = """
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
"""A class `Clock` that ends a test which takes longer than it may."""

ORIGIN = """
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
"""A function `origins` that tells code of the workspace from code of the checks."""

SKIPS = """
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
"""A function `watch` that tells unittest's skips, and which tests came to their end."""

READ = """
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
"""Functions `sources` and `rewritten` that notice when the files of the checks are written anew."""

PARTS = """
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
"""A function `parts` that notices when classes and functions of a runner are changed."""


def named(program: str) -> str:
    """`program` for ``python -c``, under a file name of its own: all other text that is compiled is ``<string>``."""
    return f"exec(compile({program!r}, '/dev/crrl', 'exec'))"
