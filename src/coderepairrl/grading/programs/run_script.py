"""Run a script (``-c PROGRAM script.py ...``); print the random word after its last line or regular exit (`ends`)."""

from coderepairrl.grading.programs.sources import read_sources

ENDS, INTEGRITY, ORIGINS, WRITTEN = "", "", "", ""
"""Replaced by the texts of files of these names; most run only if a script needs them."""


def _witness(read_sources, ends_text, integrity_text, origins_text, written_text):
    import sys

    is_isolated = sys.path[:1] != [""]  # then the script's folder is not on the path either
    if not is_isolated:
        del sys.path[0]  # or a file of the patch could stand in for os
    import gc
    import os

    script, start_folder, helpers = sys.argv[1], os.getcwd(), {}
    script_globals = globals()
    with open(script, "rb") as file:
        source = file.read()
    if any(word in source for word in (b"exit", b"quit", b"abort", b"SystemExit", b"unittest")):
        exec(ends_text, helpers)
        code, first_exit_line, names = helpers["seal_exits"](source, script)
    else:
        code, first_exit_line, names = compile(source, script, "exec", dont_inherit=True), len(source) + 2, {}
    uses_unittest = any(name.partition(".")[0] == "unittest" for name in code.co_names)
    if uses_unittest:
        import unittest
    exec(integrity_text, helpers)
    if uses_unittest or b"def test" in source:
        exec(written_text, helpers)
    run, exit_function, exit_exception = exec, sys.exit, SystemExit
    unittest_exits = []
    if uses_unittest:
        unittest_exits = [unittest.TestProgram.__init__.__code__, unittest.TestProgram.runTests.__code__]
    script_file = os.path.normpath(os.path.join(start_folder, script))

    def find_origin(root, check_sources, index, *arguments):
        """Call a function of `make_origin_finders`, loaded when first needed: 1 `find_raiser`, 2 `find_caller`."""
        if "make_origin_finders" not in helpers:
            run(origins_text, helpers)
        has_no_check_files = len(check_sources) == 1  # only the script
        make = helpers["make_origin_finders"]
        finders = make(root, check_sources, start_folder, True, has_no_check_files, [(script_file, code)])
        return finders[index](*arguments)

    def install_hook():
        """Keep word and verdict out of reach until the caller asks to print them."""
        word, root, *files = sys.stdin.buffer.read().decode("utf-8", "surrogateescape").split("\n")
        root = os.path.realpath(root)
        check_sources = read_sources(root, [os.path.join(start_folder, script), *files])
        find_changed = helpers["snapshot"](("unittest",) if uses_unittest else ())[0]
        is_changed_test, find_changed_definition = None, str  # `str()` is "": nothing has changed
        if "make_comparison" in helpers:
            skip = unittest.skip if uses_unittest else None
            make = helpers["make_comparison"]
            functions = make(root, {script_file: source}, start_folder, lambda *_: code, skip, main=script_file)
            is_changed_test, find_changed_definition = functions[-2:]
        getframe, write, depth = sys._getframe, os.write, 1
        asking_frame, problems, skips, returned = getframe(1), [], [], set()

        def print_verdict():
            label = find_changed() or find_changed_definition() or ("sys.exit" if sys.exit is not exit_function else "")
            replaced = any(script_globals.get(name) is not value for name, value in names.items())
            label = label or ("the script's exit functions" if replaced else "")
            if label:
                problems.append("code under test changes " + label)
            write(*(2, ("\n" + problems[0]).encode()) if problems else (1, ("\n" + word).encode()))

        def hook(event, args=()):
            if event.startswith("gc.get_") and not frozen():
                freeze()
            if event in ("sys.settrace", "sys.setprofile"):
                name = find_origin(root, check_sources, 2, getframe(0), asking_frame)
                problems.extend([name + " traces the check"] if name else [])
            elif event != "crrl":
                return
            elif not args:
                if getframe(depth) is asking_frame:
                    print_verdict()
            elif args[0] == "skipping":
                skips[:] = [find_origin(root, check_sources, 2, getframe(0), asking_frame)]
            elif args[0] == "calling":
                if is_changed_test(type(args[1]), getattr(args[1], "_testMethodName", ""), args[2]):
                    problems.append("code under test changes " + args[1].id())
            elif args[0] == "returned":
                returned.add(id(args[1]))
            elif args[0] == "addSuccess":
                if sends_returned(args[1]) and id(args[1]) not in returned:
                    problems.append(args[1].id() + " did not come to its end")
            elif args[0] == "addExpectedFailure":
                if not any(b"expectedFailure" in text for text in check_sources.values()):
                    problems.append(args[1].id() + " is expected to fail by code under test")
            else:
                problems.extend(name + " skips a test" for name in skips if name)
                skips.clear()

        send = getattr(sys, "audit", None)
        if send:
            frozen, freeze = gc.get_freeze_count, gc.freeze
            sys.addaudithook(hook)
            freeze()
        else:
            depth, send = 2, lambda event, *args: hook(event, args)  # one frame more to the sender: the lambda's
        return send, root, check_sources

    if uses_unittest:
        sends_returned = helpers["watch"](unittest, lambda *event: send(*event))

        def wrap_result_method(name):
            inherited = getattr(unittest.TestResult, name)

            def method(self, test, *rest):
                send("crrl", name, test)
                inherited(self, test, *rest)

            method.__module__ = "unittest.result"
            setattr(unittest.TestResult, name, method)

        for name in ("addSkip", "addSuccess", "addExpectedFailure"):
            wrap_result_method(name)
    send, root, check_sources = install_hook()
    del sys.argv[0]
    if not is_isolated:
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    for each in ("read_sources", "find_rewritten", "ENDS", "INTEGRITY", "ORIGINS", "WRITTEN", "_witness"):
        del script_globals[each]  # hides them from the script
    script_globals.update(names, __file__=script)
    flush, quit, write = sys.stdout.flush, os._exit, os.write
    try:
        exec(code, script_globals)
    except exit_exception as end:
        if end.code is not None and not (type(end.code) in (int, bool) and end.code == 0):
            raise
        trace, last = end.__traceback__.tb_next, None
        culprit = find_origin(root, check_sources, 1, trace)
        while trace:
            last = last if trace.tb_frame.f_code in unittest_exits else trace
            trace = trace.tb_next
        file = last and os.path.normpath(os.path.join(start_folder, last.tb_frame.f_code.co_filename))
        ended_elsewhere = file == script_file and last.tb_lineno < first_exit_line
        if culprit or type(end) is not exit_exception or file not in check_sources or ended_elsewhere:
            write(2, ("\n" + (culprit or "something else than its own last line") + " ended the check").encode())
            quit(1)
    flush()
    send("crrl")


if __name__ == "__main__":
    _witness(read_sources, ENDS, INTEGRITY, ORIGINS, WRITTEN)
