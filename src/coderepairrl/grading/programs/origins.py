"""Tell code of the workspace from code of the checks."""


def make_origin_finders(root, own, here, exact, guess, compiled=()):
    """Make three functions that return a workspace file outside the checks, or "".

    `root` is the workspace, `own` the sources of the checks' files in it. `exact`: a code's file name does not prove
    its origin. `guess`: the checks name no files, so files named like tests are theirs. `compiled` pairs files with
    their code, if compiling them gives another.
    """
    import os

    join, plain, prefix, base, codes_of = os.path.join, os.path.normpath, root + os.sep, os.path.basename, {}
    compiled = dict(compiled)

    def codes(name):
        if name not in codes_of:
            codes_of[name] = found = set()
            left = [compiled[name]] if name in compiled else []
            if not left and name.endswith(".py"):
                left = [compile(own[name], name, "exec", dont_inherit=True)]
            while left:
                code = left.pop()
                found.add(code)
                left += [each for each in code.co_consts if hasattr(each, "co_consts")]
        return codes_of[name]

    def foreign(code):
        """Workspace file of `code`, unless of the checks."""
        name = plain(join(here, code.co_filename))
        if not name.startswith(prefix) or base(name) == "conftest.py" or base(name).startswith("<frozen "):
            return ""
        if name in own and (not exact or code in codes(name)):
            return ""
        part = name[len(prefix) :]
        if guess and any(each.startswith("test") or each.endswith("_test.py") for each in part.split("/")):
            return ""
        return part

    def blamed(trace):
        """File under test that raised, or that the exception passed through."""
        while trace:
            name = foreign(trace.tb_frame.f_code)
            if name:
                return name
            trace = trace.tb_next
        return ""

    def beneath(frame, last):
        """File under test that runs in `frame` or called it, up to frame `last`."""
        while frame and frame is not last:
            name = foreign(frame.f_code)
            if name:
                return name
            frame = frame.f_back
        return ""

    return foreign, blamed, beneath
