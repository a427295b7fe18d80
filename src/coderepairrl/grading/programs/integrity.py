"""Watch a test runner for changed classes and functions, skips with their cause, tests that begin and end."""


def snapshot(tops):
    """Record `builtins` and the modules below `tops`; return two functions.

    `changed` names a changed part, or returns ""; `accept` takes over the present parts, except those of foreign code.
    """
    import builtins
    import sys

    kinds = (type, type(snapshot), staticmethod, classmethod, property)
    absent = ("__getattribute__", "__getattr__", "__setattr__", "__init_subclass__", "__new__", "__call__")
    free = ("open", "print", "input", "__import__", "breakpoint", "compile", "exec", "eval")  # programs replace them
    parts, seen, modules = [], set(), sys.modules

    def add(space, name, value, label):
        inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        parts.append((space, name, value, inner, getattr(inner, "__code__", None), label))

    def look(space, label):
        for name, value in list(space.items()):
            of_class = isinstance(value, kinds[2:])
            ours = isinstance(value, kinds[:2]) and str(value.__module__).partition(".")[0] in tops
            if of_class or ours:
                add(space, name, value, label + "." + name)
            if isinstance(value, type) and id(value) not in seen and str(value.__module__).partition(".")[0] in tops:
                seen.add(id(value))
                look(vars(value), value.__module__ + "." + value.__name__)
                for name in absent:
                    if name not in vars(value):
                        add(vars(value), name, None, value.__module__ + "." + value.__name__ + "." + name)

    for name, module in list(modules.items()):
        if name.partition(".")[0] in tops and isinstance(module, type(sys)):
            parts.append((modules, name, module, module, None, name))
            look(vars(module), name)
    for name, value in vars(builtins).items():
        if isinstance(value, (type, type(len))) and name not in free:
            add(vars(builtins), name, value, "builtins." + name)

    def changed():
        for space, name, value, inner, code, label in parts:
            if space.get(name) is not value or (code is not None and inner.__code__ is not code):
                return label
        return ""

    def accept(foreign):
        # plugins and settings may change parts, code under test may not
        for at, (space, name, value, inner, code, label) in enumerate(parts):
            now = space.get(name)
            if now is not value:
                inner = getattr(now, "__func__", None) or getattr(now, "fget", None) or now
                code = getattr(inner, "__code__", None)
                if code is not None and not foreign(code):
                    parts[at] = (space, name, now, inner, code, label)

    return changed, accept


def watch(unittest, send):
    """Send ``skipping`` before a skip (its cause on the stack), ``calling`` before a test, ``returned`` at its end.

    Returns a function that says whether ``returned`` is sent for a test.
    """

    def made(self, *reason):
        send("crrl", "skipping")
        Exception.__init__(self, *reason)

    unittest.SkipTest.__init__, made.__module__ = made, "unittest.case"

    def calling(kind):
        inherited = kind._callTestMethod

        def call(self, method):
            send("crrl", "calling", self, method)
            inherited(self, method)
            send("crrl", "returned", self)

        kind._callTestMethod, call.__module__ = call, "unittest.case"
        return call

    kinds = (unittest.TestCase, getattr(unittest, "IsolatedAsyncioTestCase", None))
    calls = [calling(kind) for kind in kinds if "_callTestMethod" in getattr(kind, "__dict__", ())]
    return lambda test: getattr(type(test), "_callTestMethod", None) in calls
