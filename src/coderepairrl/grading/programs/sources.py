"""The files of the checks, read before any code under test runs, and whether it has written them anew."""


def sources(root, files):
    """The content of `files` by absolute path; empty for one that cannot be read."""
    import os

    found = {}
    for file in files:
        name = os.path.normpath(os.path.join(root, file))
        try:
            with open(name, "rb") as source:
                found[name] = source.read()
        except OSError:
            found[name] = b""
    return found


def rewritten(own, sources=sources):
    """Those of the checks' modules that are no longer what they were, although no test has run yet."""
    now = sources("", own)
    return [name for name in own if name.endswith(".py") and now[name] != own[name]]
