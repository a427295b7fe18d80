"""Watch a test runner for changed classes and functions, skips with their cause, tests that begin and end."""


def snapshot(packages):
    """Record `builtins` and the modules of `packages`; return two functions.

    `find_changed` names a changed part, or returns ""; `accept` records changed parts as they are, except those
    of code under test.
    """
    import builtins
    import sys

    definitions, wrappers = (type, type(snapshot)), (staticmethod, classmethod, property)
    special = ("__getattribute__", "__getattr__", "__setattr__", "__init_subclass__", "__new__", "__call__")
    # honest code may replace these
    replaceable = ("open", "print", "input", "__import__", "breakpoint", "compile", "exec", "eval")
    parts, seen_classes, modules = [], set(), sys.modules

    def add(space, name, value, label):
        inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        parts.append((space, name, value, inner, getattr(inner, "__code__", None), label))

    def is_of_packages(value):
        return str(value.__module__).partition(".")[0] in packages

    def add_members(space, label):
        for name, value in list(space.items()):
            if isinstance(value, wrappers) or (isinstance(value, definitions) and is_of_packages(value)):
                add(space, name, value, label + "." + name)
            if isinstance(value, type) and id(value) not in seen_classes and is_of_packages(value):
                seen_classes.add(id(value))
                class_label = value.__module__ + "." + value.__name__
                add_members(vars(value), class_label)
                for method in special:
                    if method not in vars(value):
                        add(vars(value), method, None, class_label + "." + method)

    for name, module in list(modules.items()):
        if name.partition(".")[0] in packages and isinstance(module, type(sys)):
            parts.append((modules, name, module, module, None, name))
            add_members(vars(module), name)
    for name, value in vars(builtins).items():
        if isinstance(value, (type, type(len))) and name not in replaceable:
            add(vars(builtins), name, value, "builtins." + name)

    def find_changed():
        for space, name, value, inner, code, label in parts:
            if space.get(name) is not value or (code is not None and inner.__code__ is not code):
                return label
        return ""

    def accept(find_foreign):
        # plugins and settings may change parts, code under test may not
        for at, (space, name, value, inner, code, label) in enumerate(parts):
            now = space.get(name)
            if now is not value:
                inner = getattr(now, "__func__", None) or getattr(now, "fget", None) or now
                code = getattr(inner, "__code__", None)
                if code is not None and not find_foreign(code):
                    parts[at] = (space, name, now, inner, code, label)

    return find_changed, accept


def watch(unittest, send):
    """Send ``skipping`` before a skip (its cause is on the stack), ``calling`` before a test, ``returned`` at its end.

    Returns a function that says whether ``returned`` is sent for a test.
    """

    def init_skip(self, *reason):
        send("crrl", "skipping")
        Exception.__init__(self, *reason)

    # replacements name the module of what they replace, so that `snapshot` watches them, too
    unittest.SkipTest.__init__, init_skip.__module__ = init_skip, "unittest.case"

    def wrap_call(case_class):
        original = case_class._callTestMethod

        def call(self, method):
            send("crrl", "calling", self, method)
            original(self, method)
            send("crrl", "returned", self)

        case_class._callTestMethod, call.__module__ = call, "unittest.case"
        return call

    case_classes = (unittest.TestCase, getattr(unittest, "IsolatedAsyncioTestCase", None))
    calls = [wrap_call(each) for each in case_classes if "_callTestMethod" in getattr(each, "__dict__", ())]
    return lambda test: getattr(type(test), "_callTestMethod", None) in calls
