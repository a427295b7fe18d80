"""Start pytest in a Python that ignores the environment; the first argument is the folder of `PLUGIN`."""

import sys

folder = sys.argv.pop(1)
path = list(sys.path)
sys.path[:] = [folder, *filter(None, path)]
__import__("PLUGIN")
import os  # noqa: E402 - not before the workspace is off the path
import runpy  # noqa: E402

sys.path[:] = [folder, *(each or os.getcwd() for each in path)]
runpy.run_module("pytest", run_name="__main__", alter_sys=True)
