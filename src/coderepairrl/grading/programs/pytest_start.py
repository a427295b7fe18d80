"""Start-up code (``sitecustomize``) of every Python of a pytest command; ``PLUGIN`` is replaced by its name."""


def start():
    """Import the plugin, and with it pytest, from outside the workspace, which could replace their modules."""
    import os
    import sys

    plugin_folder = os.path.dirname(os.path.abspath(__file__))
    words = getattr(sys, "orig_argv", None)
    if words is None:  # before Python 3.10
        try:
            with open("/proc/self/cmdline") as file:
                words = file.read().split("\0")
        except OSError:
            words = []
    words, program = words[1:], ""
    while words and not program:  # skip the interpreter's options
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
        except ImportError:  # this Python has no pytest: a different one runs the tests
            sys.modules.pop("PLUGIN", None)
    # run the start-up code that this file hides
    sys.path[:] = [each for each in path if each != plugin_folder]
    sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ImportError:
        pass
    sys.path[:] = path


if __name__ == "sitecustomize":
    start()
