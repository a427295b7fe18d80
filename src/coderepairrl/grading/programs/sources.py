"""Sources of the checks' files, read before code under test runs, and whether it rewrote them."""


def sources(root, files):
    """Contents of `files` by absolute path; empty if unreadable."""
    import os

    contents = {}
    for file in files:
        name = os.path.normpath(os.path.join(root, file))
        try:
            with open(name, "rb") as source:
                contents[name] = source.read()
        except OSError:
            contents[name] = b""
    return contents


def rewritten(own, sources=sources):
    """Checks' modules that changed before any test ran."""
    now = sources("", own)
    return [name for name in own if name.endswith(".py") and now[name] != own[name]]
