"""Sources of the checks' files, read before code under test runs, and those that it rewrote."""


def read_sources(root, files):
    """Read `files`; return contents by absolute path, empty for an unreadable file."""
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


def find_rewritten(own, read_sources=read_sources):
    """Checks' modules that changed before any test ran."""
    now = read_sources("", own)
    return [name for name in own if name.endswith(".py") and now[name] != own[name]]
