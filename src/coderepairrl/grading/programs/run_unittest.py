"""Run ``python -m unittest`` and print test outcomes marked with a secret word."""

from coderepairrl.grading.programs.clock import Clock
from coderepairrl.grading.programs.integrity import snapshot, watch
from coderepairrl.grading.programs.origins import make_origin_finders
from coderepairrl.grading.programs.sources import find_rewritten, read_sources
from coderepairrl.grading.programs.written import make_comparison


def _witness(Clock, find_rewritten, make_comparison, make_origin_finders, read_sources, snapshot, watch):
    import sys

    is_isolated = sys.path[:1] != [""]
    if not is_isolated:
        del sys.path[0]  # else a file of the patch could replace unittest
    import gc
    import importlib.machinery
    import json
    import os
    import time
    import unittest

    start_folder, run_code = os.getcwd(), unittest.TestCase.run.__code__
    runs = {unittest.TestCase.run} | {getattr(getattr(unittest, "IsolatedAsyncioTestCase", None), "run", None)}

    def iterate_cases(suite):
        for each in suite:
            if isinstance(each, unittest.TestSuite):
                yield from iterate_cases(each)
            else:
                yield each

    def make_recorder(name, outcome):
        inherited = getattr(unittest.TextTestResult, name)

        def method(self, test, *rest):
            send("crrl", outcome, test)
            inherited(self, test, *rest)

        return method

    def install_hook():
        """Keep word and outcomes out of reach until this frame's caller asks to print them."""
        words, root, *files = sys.stdin.buffer.read().decode("utf-8", "surrogateescape").split("\n")
        word, test_seconds, run_seconds = words.split()
        root = os.path.realpath(root)
        check_sources = read_sources(root, files)
        find_foreign, find_raiser, find_caller = make_origin_finders(root, check_sources, start_folder, True, not files)

        codes_by_file, compile_source = {}, compile

        def compile_file(file, config=None):
            if file not in codes_by_file:
                codes_by_file[file] = compile_source(check_sources[file], file, "exec", dont_inherit=True)
            return codes_by_file[file]

        record_execution, list_codes, list_all_codes, is_changed_test, find_changed_definition = make_comparison(
            root, check_sources, start_folder, compile_file, unittest.skip
        )
        find_changed = snapshot(("unittest",))[0]
        getframe, write, depth, dump = sys._getframe, os.write, 1, json.dumps
        asking_frame, results, cases, expected, problems, skips = getframe(1), {}, {}, set(), [], []
        returned, tick, next_check, codes_by_case = set(), time.monotonic, [0], {}
        recorder_code = make_recorder("addSkip", 1).__code__  # the same for all recorders
        tracing_events = ("sys.settrace", "sys.setprofile", "sys.addaudithook", "sys.monitoring.register_callback")

        def has_passed(test, caller):
            """Whether `caller` reports the success of a test that ran to its end."""
            if id(test) not in cases or (sends_returned(test) and id(test) not in returned):
                return False
            return type(test).run not in runs or (caller.f_code is run_code and caller.f_locals.get("self") is test)

        def record_outcome(name, outcome):
            results[name] = max(outcome, results.get(name, outcome))

        def check_runner(now=False):
            started = tick()
            if not now and started < next_check[0]:
                return
            label = find_changed() or (any(map(find_foreign, list_all_codes(gc.callbacks))) and "gc.callbacks")
            if label:
                problems.append("code under test changes " + label)
            next_check[0] = tick() + 20 * (tick() - started)  # take at most a twentieth of the time

        def print_report(is_passed):
            check_runner(True)
            # a skipped "setUpClass (module.Class)": the tests of the class do not run
            excused = tuple(name.partition("(")[2][:-1] + "." for name, n in results.items() if n == 1 and "(" in name)
            missed = [each for each in cases.values() if each.id() not in results and not each.id().startswith(excused)]
            for name in results if problems else ():
                results[name] = 2
            if problems:
                write(2, ("\n" + problems[0]).encode())
            is_passed = is_passed and not problems and not missed and 2 not in results.values()
            rest = ("\n" + dump({"word": word, "ok": is_passed, "outcomes": results})).encode()
            while rest:
                rest = rest[write(1, rest) :]

        def hook(event, args):
            if event.startswith("gc.get_") and not frozen():
                freeze()
            if event == "exec":
                record_execution(getframe(1), *args)
            if event in tracing_events:
                name = find_caller(getframe(0), asking_frame)
                problems.extend([name + " traces the tests"] if name else [])
            if event != "crrl":
                return
            sender, message = getframe(depth), args[0]
            if sender is asking_frame:
                print_report(message)
            elif message == "suite" and not cases:
                problems.extend("code under test writes " + name for name in find_rewritten(check_sources))
                problems.extend("code under test changes " + name for name in filter(None, [find_changed_definition()]))
                for each in args[1]:
                    cases[id(each)] = each
                    name = getattr(each, "_testMethodName", "")
                    method_of = getattr(each, name, None)
                    codes_by_case[id(each)] = list_codes(method_of)
                    if is_changed_test(type(each), name, method_of):
                        problems.append("code under test changes " + each.id())
                    marks = [
                        getattr(each, "__unittest_expecting_failure__", 0),
                        getattr(method_of, "__unittest_expecting_failure__", 0),
                    ]
                    if any(marks):
                        expected.add(id(each))
            elif message == "skipping":
                skips[:] = [find_caller(getframe(0), asking_frame)]
            elif message == "compile":
                if check_sources.get(args[1]) == args[2]:
                    args[3].append(compile_file(args[1]))
            elif message == "calling":
                if codes_by_case.get(id(args[1]), list_codes(args[2])) != list_codes(args[2]):
                    problems.append("code under test changes " + args[1].id())
            elif message == "returned":
                returned.add(id(args[1]))
            elif message == "stop":
                skips.clear()
                check_runner()
            elif message == "module":
                if find_raiser(args[2]):
                    record_outcome(args[1].id(), 2)
            # outcomes: 0 passed, 1 skipped, 2 failed, 3 failed as expected
            elif message == 0 and sender.f_code is recorder_code:
                if has_passed(args[1], getframe(depth + 1)):
                    record_outcome(args[1].id(), 0)
            elif message == 3:
                record_outcome(args[1].id(), 0 if id(args[1]) in expected else 2)
            elif message == 1:
                test = getattr(args[1], "test_case", args[1])  # unittest reports only its skipped subtest
                record_outcome(test.id(), 2 if any(skips) else 1)
                skips.clear()
            elif message == 2:
                record_outcome(args[1].id(), 2)

        send = getattr(sys, "audit", None)
        if send:
            frozen, freeze = gc.get_freeze_count, gc.freeze
            sys.addaudithook(hook)
            freeze()
        else:
            depth, send = 2, lambda event, *args: hook(event, args)  # one frame more to the sender: the lambda's
        return send, float(test_seconds), float(run_seconds)

    loader, inherited_code = importlib.machinery.SourceFileLoader, importlib.machinery.SourceFileLoader.source_to_code

    def source_to_code(self, data, path, **options):
        """Load checks' files from the code that tests are compared with."""
        results = []
        send("crrl", "compile", path, data, results)
        return results[0] if results else inherited_code(self, data, path, **options)

    loader.source_to_code = source_to_code
    sends_returned = watch(unittest, lambda *event: send(*event))
    send, test_seconds, run_seconds = install_hook()
    clock = Clock(test_seconds, run_seconds)
    ours = "Clock find_rewritten make_comparison make_origin_finders read_sources snapshot watch _witness"
    for name in ours.split():
        del globals()[name]  # else tests could read them

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
        setattr(Result, name, make_recorder(name, outcome))

    class Runner(unittest.TextTestRunner):
        resultclass = Result

        def run(self, suite):
            cases = list(iterate_cases(suite))
            send("crrl", "suite", cases)
            for test in cases:
                if type(test).__name__ == "ModuleSkipped":  # the loader does not keep the cause of the skip
                    try:
                        importlib.import_module(test._testMethodName)
                    except unittest.SkipTest as skipped:
                        send("crrl", "module", test, skipped.__traceback__)
            return super().run(suite)

    if not is_isolated:
        sys.path.insert(0, start_folder)
    sys.argv[0] = "python -m unittest"
    flush = sys.stdout.flush
    ended = unittest.main(module=None, testRunner=Runner, exit=False)
    is_passed = ended.result.wasSuccessful()
    flush()
    send("crrl", is_passed)
    sys.exit(not is_passed)


if __name__ == "__main__":
    _witness(Clock, find_rewritten, make_comparison, make_origin_finders, read_sources, snapshot, watch)
