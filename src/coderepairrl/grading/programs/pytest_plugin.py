"""Pytest plugin that writes test outcomes marked with a random word. PYTEST_DONT_REWRITE"""

from coderepairrl.grading.programs.clock import Clock
from coderepairrl.grading.programs.integrity import snapshot, watch
from coderepairrl.grading.programs.origins import make_origin_finders
from coderepairrl.grading.programs.sources import find_rewritten, read_sources
from coderepairrl.grading.programs.written import make_comparison


def _make_recorder():
    import ast
    import gc
    import json
    import os
    import sys
    import time

    folder, start_folder = os.path.dirname(os.path.abspath(__file__)), os.getcwd()
    if not os.path.exists(folder + "/word"):
        return None  # a worker of xdist, which reports to its controller
    import pytest
    from _pytest import config as pytest_config
    from _pytest import main
    from _pytest.assertion import rewrite

    for name in getattr(pytest_config, "default_plugins", ()):
        try:
            __import__("_pytest." + name)
        except ImportError:
            pass
    import unittest

    skips = (pytest.skip.Exception, pytest.xfail.Exception, unittest.SkipTest)
    watch(unittest, lambda *event: send(*event))
    rewrite_test = getattr(rewrite, "_rewrite_test", None)

    def give_compared_code(fn, config):
        """Return the code of a checks' file, which tests are compared with."""
        results = []
        if sys.dont_write_bytecode:  # else pytest stores the code with the file's status, which is None below
            send("crrl", "rewrite", fn, config, results)
        return (None, results[0]) if results else rewrite_test(fn, config)

    if rewrite_test and rewrite_test.__code__.co_varnames[:2] == ("fn", "config"):
        give_compared_code.__module__ = rewrite_test.__module__
        rewrite._rewrite_test = give_compared_code

    def install_hook():
        """Keep word and outcomes out of reach until the recorder's last hook writes them."""
        with open(folder + "/word", encoding="utf-8", errors="surrogateescape") as file:
            words, root, *files = file.read().split("\n")
        root = os.path.realpath(root)
        os.unlink(folder + "/word")
        word, test_seconds, run_seconds = words.split()
        check_sources = read_sources(root, files)
        find_foreign, find_raiser, find_caller = make_origin_finders(root, check_sources, os.getcwd(), False, not files)
        codes_by_file, parse, compile_source = {}, ast.parse, compile
        rewrite_asserts = getattr(rewrite, "rewrite_asserts", None)
        expected = ("mod", "source", "module_path", "config")  # older versions of pytest have other arguments
        can_rewrite = rewrite_asserts and rewrite_asserts.__code__.co_varnames[:4] == expected

        def compile_file(file, config=None):
            if (file, id(config)) not in codes_by_file:
                tree = parse(check_sources[file], file)
                if config:
                    rewrite_asserts(tree, check_sources[file], file, config)
                codes_by_file[file, id(config)] = compile_source(tree, file, "exec", dont_inherit=True)
            return codes_by_file[file, id(config)] if can_rewrite or not config else None

        loader = getattr(getattr(rewrite, "AssertionRewritingHook", None), "exec_module", None)
        record_execution, list_codes, list_all_codes, is_changed_test, find_changed_definition = make_comparison(
            root, check_sources, os.getcwd(), compile_file, unittest.skip, loader
        )
        packages = ("_pytest", "pytest", "pluggy", "unittest")
        find_changed, accept = snapshot(packages)
        getframe, depth, dump, open_file = sys._getframe, 1, json.dumps, open
        tick, next_check, running, path_changes = time.monotonic, [0], [], []
        tracing_events = ("sys.settrace", "sys.setprofile", "sys.addaudithook", "sys.monitoring.register_callback")
        results, passed_calls, items, plugins = {}, {}, {}, {}
        xfail_marked, recorder_codes, problems, skip_cause = set(), set(), [], []
        session_code, session, plugin_files, distributed = main.wrap_session.__code__, [None], set(), []

        def list_item_codes(item):
            return list_codes(getattr(item, "_obj", None) or getattr(item, "obj", None))

        def is_altered(item):
            """Whether an item's function differs from its file's."""
            name = getattr(item, "originalname", None) or item.name.partition("[")[0]
            file, cls = os.path.realpath(str(item.fspath)), getattr(item, "cls", None)
            return isinstance(item, pytest.Function) and is_changed_test(cls, name, item.obj, file)

        def record_outcome(name, outcome):
            results[name] = max(outcome, results.get(name, outcome))

        def find_plugin_file(plugin):
            """File under test that defines `plugin`, or ""."""
            if isinstance(plugin, type(sys)):
                file = getattr(plugin, "__file__", None) or ""
            else:
                file = getattr(sys.modules.get(type(plugin).__module__), "__file__", None) or ""
            return find_foreign(compile_source("", file, "exec")) if file else ""

        def find_hook_caller(frame):
            """File under test, or "a thread", that calls the recorder's hook; "" if the session does."""
            while frame and frame is not session[0]:
                name = find_foreign(frame.f_code)
                if name and name not in plugin_files:
                    return name
                frame = frame.f_back
            return "" if frame is session[0] else "a thread"

        def check_runner(manager, now=False):
            started = tick()
            if not now and started < next_check[0]:
                return
            label = find_changed() or (any(map(find_foreign, list_all_codes(gc.callbacks))) and "gc.callbacks")
            for plugin in manager.get_plugins():
                if id(plugin) not in plugins:
                    plugins[id(plugin)] = plugin
                    label = label or (find_plugin_file(plugin) and "the plugins of pytest")
            if label:
                problems.append("code under test changes " + label)
            next_check[0] = tick() + 20 * (tick() - started)  # takes at most a twentieth of the time

        def write_report(exitstatus, manager):
            check_runner(manager, True)
            if problems:
                sys.stderr.write("\n" + problems[0] + "\n")
                for name in [*results, *(item.nodeid for item, _ in items.values())]:
                    results[name] = 2
            missed = [item for item, _ in items.values() if item.nodeid not in results]
            is_passed = int(exitstatus) == 0 and not missed and not problems and 2 not in results.values()
            outcomes = {make_printed_name(name): outcome for name, outcome in results.items()}
            with open_file(folder + "/outcomes", "w") as file:
                file.write(dump({"word": word, "ok": is_passed, "outcomes": outcomes}))

        def make_printed_name(name):
            """Name as pytest prints it: relative to its starting folder, not to its root."""
            down, up = path_changes
            return name[len(up) :] if up and name.startswith(up) else down + name

        def hook(event, args):
            if event.startswith("gc.get_") and not frozen():
                freeze()
            if event == "exec":
                record_execution(getframe(1), *args)
            if event in tracing_events:
                name = find_caller(getframe(0), None)
                problems.extend([name + " traces the tests"] if name else [])
            if event != "crrl":
                return
            message, rest = args[0], args[1:]
            if message == "skipping":
                skip_cause[:] = [find_caller(getframe(0), None)]
                return
            if message == "rewrite":
                file = os.path.realpath(str(rest[0]))
                if can_rewrite and file in check_sources and getframe(depth).f_code is give_compared_code.__code__:
                    rest[2].append(compile_file(file, rest[1]))
                return
            if message == "calling":  # by a `unittest.TestCase`, after its setUp
                for item in running:
                    own_call = type(rest[0]) is getattr(item, "cls", None) and rest[0]._testMethodName == item.name
                    if own_call and list_codes(rest[1]) != items[id(item)][1]:
                        problems.append("code under test changes " + item.nodeid)
                return
            if not recorder_codes and message == "methods":
                recorder_codes.update(rest[0])
            elif getframe(depth).f_code not in recorder_codes:
                return
            elif message == "begin" and not path_changes:
                accept(find_foreign)
                plugins.update((id(each), each) for each in rest[0].get_plugins())
                runners = [sys.modules[name] for name in list(sys.modules) if name.partition(".")[0] in packages]
                plugin_files.update(map(find_plugin_file, [*plugins.values(), *runners]))
                frame = getframe(0)
                while frame and frame.f_code is not session_code:
                    frame = frame.f_back
                session[0] = frame
                path_changes.extend(rest[2:])
                distributed.append(rest[1])
            elif message == "items":
                problems.extend("code under test writes " + name for name in find_rewritten(check_sources))
                names = [find_changed_definition(), *(item.nodeid for item in rest[0] if is_altered(item))]
                problems.extend("code under test changes " + name for name in names if name)
                items.update((id(item), (item, list_item_codes(item))) for item in rest[0])
                xfail_marked.update(item.nodeid for item in rest[0] if item.get_closest_marker("xfail"))
            elif message == "check":
                skip_cause.clear()
                check_runner(rest[0])
            elif message == "begins":
                running[:] = [rest[0]] if id(rest[0]) in items else []
                if running and list_item_codes(rest[0]) != items[id(rest[0])][1]:
                    problems.append("code under test changes " + rest[0].nodeid)
            elif message == "called":
                item, late, raised = rest
                registered = items.get(id(item), (None, None))
                is_same = registered[0] is item and list_item_codes(item)[:1] == registered[1][:1]
                passed_calls[item.nodeid] = is_same and not late and not raised and not find_hook_caller(getframe(0))
                if late:
                    record_outcome(item.nodeid, 2)
            elif message == "blame":  # a skip, whose traceback may lead to code under test
                if find_raiser(rest[1]):
                    record_outcome(rest[0], 2)
            elif message == "subtest":  # decides its test's outcome if it fails, or code under test skips it
                name, outcome = rest
                if outcome == 2 or any(skip_cause):
                    record_outcome(name, 2)
                elif outcome and any(distributed):  # in another process, so the cause is unknown
                    record_outcome(name, 1)
            elif message == "report":
                name, outcome, xfailed = rest
                if xfailed and outcome == 1 and (any(distributed) or name in xfail_marked):
                    record_outcome(name, 0)
                elif outcome or any(distributed) or passed_calls.get(name):
                    record_outcome(name, 2 if outcome == 1 and any(skip_cause) else outcome)
                else:
                    record_outcome(name, 2)  # no call of this test was seen, or it raised
            elif message == "end":
                write_report(*rest)

        send = getattr(sys, "audit", None)
        if send:
            frozen, freeze = gc.get_freeze_count, gc.freeze
            sys.addaudithook(hook)
            freeze()
        else:
            depth, send = 2, lambda event, *args: hook(event, args)  # one frame more to the sender: the lambda's
        return send, float(test_seconds), float(run_seconds)

    send, test_seconds, run_seconds = install_hook()
    clock = Clock(test_seconds, run_seconds)

    def blame(nodeid, info):
        if info is not None and issubclass(info[0], skips):
            send("crrl", "blame", nodeid, info[2])

    class Recorder:
        def clean_environment(self):
            for name in ("PYTHONPATH", "PYTEST_ADDOPTS"):  # tests get the original values
                before = os.environ.pop("CRRL_" + name, None)
                os.environ.pop(name, None)
                if before:
                    os.environ[name] = before
            os.environ.pop("CRRL_WORKSPACE", None)
            sys.path[:] = [path for path in sys.path if path != folder]

        @pytest.hookimpl(tryfirst=True)
        def pytest_sessionstart(self, session):
            option = session.config.option
            distributed = [getattr(option, name, None) for name in ("numprocesses", "tx", "forked")]
            root = str(getattr(session.config, "rootpath", None) or session.config.rootdir)
            path_changes = ("", "")
            if root != start_folder:
                pairs = ((root, start_folder), (start_folder, root))
                path_changes = [os.path.join(os.path.relpath(*pair), "") for pair in pairs]
            send("crrl", "begin", session.config.pluginmanager, any(distributed), *path_changes)

        @pytest.hookimpl(trylast=True)
        def pytest_collection_finish(self, session):
            send("crrl", "items", list(session.items))

        @pytest.hookimpl(hookwrapper=True)
        def pytest_make_collect_report(self, collector):
            report = (yield).get_result()
            call = getattr(report, "call", None)
            if report.failed:
                send("crrl", "report", report.nodeid, 2, False)
            elif report.skipped and call is not None and call.excinfo is not None:
                send("crrl", "blame", report.nodeid, call.excinfo.tb)

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_runtest_setup(self, item):
            send("crrl", "check", item.config.pluginmanager)
            clock.start()
            ended = yield
            if clock.stop():
                send("crrl", "report", item.nodeid, 2, False)
            blame(item.nodeid, ended.excinfo)

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_runtest_teardown(self, item):
            clock.start()
            yield
            if clock.stop():
                send("crrl", "report", item.nodeid, 2, False)
            send("crrl", "check", item.config.pluginmanager)

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_runtest_call(self, item):
            clock.start()
            send("crrl", "begins", item)
            ended = yield
            send("crrl", "called", item, clock.stop(), ended.excinfo is not None)
            blame(item.nodeid, ended.excinfo)

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_runtest_makereport(self, item, call):
            if call.excinfo is not None:  # a subtest's exception is seen only here
                blame(item.nodeid, (call.excinfo.type, call.excinfo.value, call.excinfo.tb))
            yield

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
            if hasattr(report, "context"):
                send("crrl", "subtest", report.nodeid, outcome)
                return
            send("crrl", "report", report.nodeid, outcome, xfailed)

        def pytest_sessionfinish(self, session, exitstatus):
            send("crrl", "end", exitstatus, session.config.pluginmanager)

    send("crrl", "methods", [each.__code__ for each in (*vars(Recorder).values(), blame) if hasattr(each, "__code__")])
    return Recorder()


_recorder = _make_recorder()
del _make_recorder  # code under test finds only the recorder in use


def pytest_addoption(parser):
    """Clean the environment, as early as pytest calls a plugin."""
    if _recorder is not None:
        _recorder.clean_environment()


def pytest_configure(config):
    """Register the recorder."""
    if _recorder is not None:
        config.pluginmanager.register(_recorder)
