"""Tell code of the workspace from code of the checks.

Its text runs in the process of the tests, so it imports nothing of this package.
"""


def make_origin_finders(root, check_sources, start_folder, exact, guess, compiled=()):
    """Make three functions that return a workspace file outside the checks, or "".

    `root` is the workspace, `check_sources` the content of the checks' files by path. `exact` compares code
    objects, since a file name can be forged; pytest rewrites code, so it cannot. `guess`: the checks name no files, so
    files named like tests are theirs. `compiled` pairs files with code objects that differ from what compiling gives.
    """
    import os

    # taken now, since code under test may replace them in os.path
    join, normpath, basename = os.path.join, os.path.normpath, os.path.basename
    prefix, codes_by_file, compiled = root + os.sep, {}, dict(compiled)

    def list_codes(name):
        """Code objects of all definitions in a checks' file."""
        if name not in codes_by_file:
            codes = codes_by_file[name] = set()
            remaining = [compiled[name]] if name in compiled else []
            if not remaining and name.endswith(".py"):
                remaining = [compile(check_sources[name], name, "exec", dont_inherit=True)]
            while remaining:
                code = remaining.pop()
                codes.add(code)
                remaining += [each for each in code.co_consts if hasattr(each, "co_consts")]
        return codes_by_file[name]

    def find_foreign(code):
        """Workspace file under test that defines `code`, or "" if it is of the checks."""
        name = normpath(join(start_folder, code.co_filename))
        if not name.startswith(prefix) or basename(name) == "conftest.py" or basename(name).startswith("<frozen "):
            return ""
        if name in check_sources and (not exact or code in list_codes(name)):
            return ""
        path = name[len(prefix) :]
        if guess and any(part.startswith("test") or part.endswith("_test.py") for part in path.split("/")):
            return ""
        return path

    def find_raiser(trace):
        """File under test that raised, or that the exception passed through."""
        while trace:
            name = find_foreign(trace.tb_frame.f_code)
            if name:
                return name
            trace = trace.tb_next
        return ""

    def find_caller(frame, last):
        """File under test that runs in `frame` or called it, up to frame `last`."""
        while frame and frame is not last:
            name = find_foreign(frame.f_code)
            if name:
                return name
            frame = frame.f_back
        return ""

    return find_foreign, find_raiser, find_caller
