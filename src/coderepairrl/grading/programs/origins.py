"""Which code belongs to the workspace and which to the checks."""


def origins(root, own, here, exact, guess, compiled=()):
    """Three functions, each of which returns a file of the workspace outside of the checks, or an empty string.

    `root` is the workspace and `own` the sources of the checks' files in it. `exact`: code that only carries the name
    of such a file is not from it. `guess`: the checks name no files, so every file named like a test counts as theirs.
    `compiled` are pairs of a file and its code, where that is not what the file alone compiles to.
    """
    import os

    join, plain, prefix, base, known = os.path.join, os.path.normpath, root + os.sep, os.path.basename, {}
    compiled = dict(compiled)

    def codes(name):
        if name not in known:
            known[name] = found = set()
            left = [compiled[name]] if name in compiled else []
            if not left and name.endswith(".py"):
                left = [compile(own[name], name, "exec", dont_inherit=True)]
            while left:
                code = left.pop()
                found.add(code)
                left += [each for each in code.co_consts if hasattr(each, "co_consts")]
        return known[name]

    def foreign(code):
        """The file of the workspace that `code` is from, unless it belongs to the checks."""
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
        """The file of the code under test that raised, or through which it was raised."""
        while trace:
            name = foreign(trace.tb_frame.f_code)
            if name:
                return name
            trace = trace.tb_next
        return ""

    def beneath(frame, last):
        """The file of the code under test that runs in `frame` or called it, up to the frame `last`."""
        while frame and frame is not last:
            name = foreign(frame.f_code)
            if name:
                return name
            frame = frame.f_back
        return ""

    return foreign, blamed, beneath
