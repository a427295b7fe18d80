"""Start-up code (``sitecustomize``) of every Python started by a pytest command; `PLUGIN` is replaced."""


def start():
    """Import pytest's needs before workspace folders are on the path."""
    import os
    import sys

    plugin_folder = os.path.dirname(os.path.abspath(__file__))
    words = getattr(sys, "orig_argv", None)
    if words is None:
        try:
            with open("/proc/self/cmdline") as file:
                words = file.read().split("\0")
        except OSError:
            words = []
    words, program = words[1:], ""
    while words and not program:
        word = words.pop(0)
        if word == "-m" or not word.startswith("-"):
            program = words.pop(0) if word == "-m" and words else word
        elif word in ("-W", "-X") and words:
            words.pop(0)
        elif word == "-c":
            program = word
    path = list(sys.path)
    if os.path.basename(program) in ("pytest", "py.test", "coverage") and os.path.exists(plugin_folder + "/word"):
        root = os.environ.get("CRRL_WORKSPACE", os.getcwd())
        sys.path[:] = [each for each in path if not (os.path.abspath(each) + os.sep).startswith(root + os.sep)]
        try:
            __import__("PLUGIN")
        except ImportError:  # an interpreter without pytest: some other will run the tests
            sys.modules.pop("PLUGIN", None)
    sys.path[:] = [each for each in path if each != plugin_folder]
    sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401 - the one that the interpreter would have found
    except ImportError:
        pass
    sys.path[:] = path


if __name__ == "sitecustomize":
    start()
