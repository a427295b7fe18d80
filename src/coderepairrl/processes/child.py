"""Starts a child process: ``python -m coderepairrl.processes.child PARENT MODULE ARGS...``.

It asks the kernel to be killed when PARENT ends, and only then runs MODULE, whose imports may take seconds; with ``--``
as MODULE it becomes the program that follows, which keeps that. This exists on Linux only; elsewhere a child notices
the end of its parent when it next reads from it.

The imports of torch and transformers make a million objects, none of them garbage. To look through them again and again
while they are made, and once more at the end, would take 2 of the 5.5 CPU-seconds of a learner that starts and ends:
garbage is collected from `Parent.connect` or `cli.main` on, and not at exit.
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


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent process ends; exit if it has ended already."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    if sys.argv[2] == "--":
        try:
            os.execvp(sys.argv[3], sys.argv[3:])
        except OSError as error:
            sys.exit(f"error: {sys.argv[3]}: {error.strerror}")
    sys.argv[:] = sys.argv[2:]
    gc.disable()
    atexit.register(gc.freeze)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
