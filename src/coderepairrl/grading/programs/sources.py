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


def find_rewritten(check_sources, read_sources=read_sources):
    """Checks' modules that changed before any test ran."""
    # `read_sources` is bound as a default, since programs delete their globals
    current_sources = read_sources("", check_sources)
    return [name for name in check_sources if name.endswith(".py") and current_sources[name] != check_sources[name]]
