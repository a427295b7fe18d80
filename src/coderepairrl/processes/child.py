"""Launcher of child processes: ``python -m coderepairrl.processes.child PARENT MODULE ARGS...``.

On Linux it dies with PARENT. Runs MODULE or, after ``--``, a program. Garbage collection is off until `Parent.connect`
or `cli.main`, and at exit: scanning the objects of torch and transformers takes 2 of a learner's 5.5 CPU-seconds.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Die with the parent; exit if it has ended already."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    if sys.argv[2] == "--":
        try:
            os.execvp(sys.argv[3], sys.argv[3:])
        except OSError as error:
            sys.exit(f"error: {sys.argv[3]}: {error.strerror}")
    sys.argv[:] = sys.argv[2:]
    gc.disable()
    atexit.register(gc.freeze)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
