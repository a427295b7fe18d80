"""Run ``python -m unittest`` and print test outcomes marked with the word."""

from coderepairrl.grading.programs.clock import Clock
from coderepairrl.grading.programs.integrity import snapshot, watch
from coderepairrl.grading.programs.origins import make_origin_finders
from coderepairrl.grading.programs.sources import find_rewritten, read_sources
from coderepairrl.grading.programs.written import make_comparison


def _witness(Clock, find_rewritten, make_comparison, make_origin_finders, read_sources, snapshot, watch):
    import sys

    alone = sys.path[:1] != [""]
    if not alone:
        del sys.path[0]  # or a file of the patch could stand in for unittest
    import gc
    import importlib.machinery
    import json
    import os
    import time
    import unittest

    here, run_code = os.getcwd(), unittest.TestCase.run.__code__
    runs = {unittest.TestCase.run} | {getattr(getattr(unittest, "IsolatedAsyncioTestCase", None), "run", None)}

    def flat(suite):
        for each in suite:
            if isinstance(each, unittest.TestSuite):
                yield from flat(each)
            else:
                yield each

    def recording(name, outcome):
        inherited = getattr(unittest.TextTestResult, name)

        def method(self, test, *rest):
            send("crrl", outcome, test)
            inherited(self, test, *rest)

        return method

    def keep():
        """Keep word and outcomes out of reach until this frame's caller asks to print them."""
        words, root, *files = sys.stdin.buffer.read().decode("utf-8", "surrogateescape").split("\n")
        word, each, total = words.split()
        root = os.path.realpath(root)
        own = read_sources(root, files)
        foreign, blamed, beneath = make_origin_finders(root, own, here, True, not files)

        modules, compiled = {}, compile

        def compiles(file, how=None):
            if file not in modules:
                modules[file] = compiled(own[file], file, "exec", dont_inherit=True)
            return modules[file]

        executed, chain, codes_of, differs, incomplete = make_comparison(root, own, here, compiles, unittest.skip)
        changed = snapshot(("unittest",))[0]
        getframe, write, depth, dump = sys._getframe, os.write, 1, json.dumps
        asking, results, tests, expected, problems, skips = getframe(1), {}, {}, set(), [], []
        returned, tick, due, codes = set(), time.monotonic, [0], {}
        method = recording("addSkip", 1).__code__

        watched = ("sys.settrace", "sys.setprofile", "sys.addaudithook", "sys.monitoring.register_callback")

        def passes(test, caller):
            if id(test) not in tests or (seen(test) and id(test) not in returned):
                return False
            return type(test).run not in runs or (caller.f_code is run_code and caller.f_locals.get("self") is test)

        def note(name, outcome):
            results[name] = max(outcome, results.get(name, outcome))

        def check(now=False):
            begun = tick()
            if not now and begun < due[0]:
                return
            label = changed() or (any(map(foreign, codes_of(gc.callbacks))) and "gc.callbacks")
            if label:
                problems.append("code under test changes " + label)
            due[0] = tick() + 20 * (tick() - begun)  # a twentieth of the time is enough for it

        def end(well):
            check(True)
            excused = tuple(name.partition("(")[2][:-1] + "." for name, n in results.items() if n == 1 and "(" in name)
            missed = [each for each in tests.values() if each.id() not in results and not each.id().startswith(excused)]
            for name in results if problems else ():
                results[name] = 2
            if problems:
                write(2, ("\n" + problems[0]).encode())
            well = well and not problems and not missed and 2 not in results.values()
            rest = ("\n" + dump({"word": word, "ok": well, "outcomes": results})).encode()
            while rest:
                rest = rest[write(1, rest) :]
            return well

        def hook(event, args):
            if event.startswith("gc.get_") and not frozen():
                freeze()
            if event == "exec":
                executed(getframe(1), *args)
            if event in watched:
                name = beneath(getframe(0), asking)
                problems.extend([name + " traces the tests"] if name else [])
            if event != "crrl":
                return
            who, message = getframe(depth), args[0]
            if who is asking:
                end(message)
            elif message == "suite" and not tests:
                problems.extend("code under test writes " + name for name in find_rewritten(own))
                problems.extend("code under test changes " + name for name in filter(None, [incomplete()]))
                for each in args[1]:
                    tests[id(each)] = each
                    name = getattr(each, "_testMethodName", "")
                    method_of = getattr(each, name, None)
                    codes[id(each)] = chain(method_of)
                    if differs(type(each), name, method_of):
                        problems.append("code under test changes " + each.id())
                    marks = [
                        getattr(each, "__unittest_expecting_failure__", 0),
                        getattr(method_of, "__unittest_expecting_failure__", 0),
                    ]
                    if any(marks):
                        expected.add(id(each))
            elif message == "skipping":
                skips[:] = [beneath(getframe(0), asking)]
            elif message == "compile":
                if own.get(args[1]) == args[2]:
                    args[3].append(compiles(args[1]))
            elif message == "calling":
                if codes.get(id(args[1]), chain(args[2])) != chain(args[2]):
                    problems.append("code under test changes " + args[1].id())
            elif message == "returned":
                returned.add(id(args[1]))
            elif message == "stop":
                skips.clear()
                check()
            elif message == "module":
                if blamed(args[2]):
                    note(args[1].id(), 2)
            elif message == 0 and who.f_code is method:
                if passes(args[1], getframe(depth + 1)):
                    note(args[1].id(), 0)
            elif message == 3:
                note(args[1].id(), 0 if id(args[1]) in expected else 2)
            elif message == 1:
                test = getattr(args[1], "test_case", args[1])  # unittest reports only its skipped subtest
                note(test.id(), 2 if any(skips) else 1)
                skips.clear()
            elif message == 2:
                note(args[1].id(), 2)

        send = getattr(sys, "audit", None)
        if send:
            frozen, freeze = gc.get_freeze_count, gc.freeze
            sys.addaudithook(hook)
            freeze()
        else:
            depth, send = 2, lambda event, *args: hook(event, args)
        return send, float(each), float(total)

    loader, inherited_code = importlib.machinery.SourceFileLoader, importlib.machinery.SourceFileLoader.source_to_code

    def source_to_code(self, data, path, **options):
        """Use the code of a checks' file that tests are compared with."""
        results = []
        send("crrl", "compile", path, data, results)
        return results[0] if results else inherited_code(self, data, path, **options)

    loader.source_to_code = source_to_code
    seen = watch(unittest, lambda *event: send(*event))
    send, each, total = keep()
    clock = Clock(each, total)
    ours = "Clock find_rewritten make_comparison make_origin_finders read_sources snapshot watch _witness"
    for name in ours.split():
        del globals()[name]  # which the tests may look at

    class Result(unittest.TextTestResult):
        def startTest(self, test):
            super().startTest(test)
            clock.start()

        def addSubTest(self, test, subtest, error):
            if error is not None:
                send("crrl", 2, test)
            super().addSubTest(test, subtest, error)

        def stopTest(self, test):
            if clock.stop():
                send("crrl", 2, test)
            send("crrl", "stop")
            super().stopTest(test)

    outcomes = {"addSuccess": 0, "addSkip": 1, "addFailure": 2, "addError": 2, "addUnexpectedSuccess": 2}
    for name, outcome in {**outcomes, "addExpectedFailure": 3}.items():
        setattr(Result, name, recording(name, outcome))

    class Runner(unittest.TextTestRunner):
        resultclass = Result

        def run(self, suite):
            tests = list(flat(suite))
            send("crrl", "suite", tests)
            for test in tests:
                if type(test).__name__ == "ModuleSkipped":  # the loader does not keep its cause
                    try:
                        importlib.import_module(test._testMethodName)
                    except unittest.SkipTest as skipped:
                        send("crrl", "module", test, skipped.__traceback__)
            return super().run(suite)

    if not alone:
        sys.path.insert(0, here)
    sys.argv[0] = "python -m unittest"
    flush = sys.stdout.flush
    ended = unittest.main(module=None, testRunner=Runner, exit=False)
    well = ended.result.wasSuccessful()
    flush()
    send("crrl", well)
    sys.exit(not well)


if __name__ == "__main__":
    _witness(Clock, find_rewritten, make_comparison, make_origin_finders, read_sources, snapshot, watch)
