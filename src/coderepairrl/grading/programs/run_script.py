"""Run a script (``-c PROGRAM script.py ...``); print the word only after its last line or regular exit (`ends`)."""

from coderepairrl.grading.programs.sources import read_sources

ENDS, INTEGRITY, ORIGINS, WRITTEN = "", "", "", ""
"""Replaced by the texts of these files, most of them run only if a script needs it."""


def _witness(read_sources, ends_text, integrity_text, origins_text, written_text):
    import sys

    alone = sys.path[:1] != [""]  # isolated, so the script's folder is not on the path either
    if not alone:
        del sys.path[0]  # or a file of the patch could stand in for os
    import gc
    import os

    script, here, spaces = sys.argv[1], os.getcwd(), {}
    space = globals()
    with open(script, "rb") as file:
        source = file.read()
    if any(word in source for word in (b"exit", b"quit", b"abort", b"SystemExit", b"unittest")):
        exec(ends_text, spaces)
        code, beyond, names = spaces["seal_exits"](source, script)
    else:
        code, beyond, names = compile(source, script, "exec", dont_inherit=True), len(source) + 2, {}
    tested = any(name.partition(".")[0] == "unittest" for name in code.co_names)
    if tested:
        import unittest
    exec(integrity_text, spaces)
    if tested or b"def test" in source:
        exec(written_text, spaces)
    run, leave, leaving = exec, sys.exit, SystemExit
    leaving_by = [getattr(unittest.TestProgram, name).__code__ for name in ("__init__", "runTests")] if tested else []

    itself = os.path.normpath(os.path.join(here, script))

    def blame(root, own, which, *what):
        if "make_origin_finders" not in spaces:
            run(origins_text, spaces)
        return spaces["make_origin_finders"](root, own, here, True, len(own) == 1, [(itself, code)])[which](*what)

    def keep():
        word, root, *files = sys.stdin.buffer.read().decode("utf-8", "surrogateescape").split("\n")
        root = os.path.realpath(root)
        own = read_sources(root, [os.path.join(here, script), *files])
        changed = spaces["snapshot"](("unittest",) if tested else ())[0]
        differs, incomplete = None, str
        if "make_comparison" in spaces:
            skip = unittest.skip if tested else None
            compare = spaces["make_comparison"](root, {itself: source}, here, lambda *_: code, skip, main=itself)
            differs, incomplete = compare[-2:]
        getframe, write, depth = sys._getframe, os.write, 1
        asking, problems, skips, returned = getframe(1), [], [], set()

        def end():
            label = changed() or incomplete() or ("sys.exit" if sys.exit is not leave else "")
            replaced = any(space.get(name) is not value for name, value in names.items())
            label = label or ("the ends of the script" if replaced else "")
            if label:
                problems.append("code under test changes " + label)
            write(*(2, ("\n" + problems[0]).encode()) if problems else (1, ("\n" + word).encode()))

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
            elif args[0] == "calling":
                if differs(type(args[1]), getattr(args[1], "_testMethodName", ""), args[2]):
                    problems.append("code under test changes " + args[1].id())
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

        send = getattr(sys, "audit", None)
        if send:
            frozen, freeze = gc.get_freeze_count, gc.freeze
            sys.addaudithook(hook)
            freeze()
        else:
            depth, send = 2, lambda event, *args: hook(event, args)
        return send, root, own

    if tested:
        seen = spaces["watch"](unittest, lambda *event: send(*event))

        def recording(name):
            inherited = getattr(unittest.TestResult, name)

            def method(self, test, *rest):
                send("crrl", name, test)
                inherited(self, test, *rest)

            method.__module__ = "unittest.result"
            setattr(unittest.TestResult, name, method)

        for name in ("addSkip", "addSuccess", "addExpectedFailure"):
            recording(name)
    send, root, own = keep()
    del sys.argv[0]
    if not alone:
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    for each in ("read_sources", "find_rewritten", "ENDS", "INTEGRITY", "ORIGINS", "WRITTEN", "_witness"):
        del space[each]  # the script shall find none of them
    space.update(names, __file__=script)
    flush, quit, write = sys.stdout.flush, os._exit, os.write
    try:
        exec(code, space)
    except leaving as end:
        if end.code is not None and not (type(end.code) in (int, bool) and end.code == 0):
            raise
        trace, last = end.__traceback__.tb_next, None
        culprit = blame(root, own, 1, trace)
        while trace:
            last = last if trace.tb_frame.f_code in leaving_by else trace
            trace = trace.tb_next
        file = last and os.path.normpath(os.path.join(here, last.tb_frame.f_code.co_filename))
        if culprit or type(end) is not leaving or file not in own or (file == itself and last.tb_lineno < beyond):
            write(2, ("\n" + (culprit or "something else than its own last line") + " ended the check").encode())
            quit(1)
    flush()
    send("crrl")


if __name__ == "__main__":
    _witness(read_sources, ENDS, INTEGRITY, ORIGINS, WRITTEN)
