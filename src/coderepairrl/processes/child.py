"""The first thing that a child process does: ``python -m coderepairrl.processes.child PARENT MODULE ARGS...``.

It asks the kernel for its end with that of PARENT, and only then becomes MODULE, whose imports may take seconds. Linux
alone offers this; elsewhere a child notices that its parent hung up once it listens.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """From here on this process is killed when the process `parent`, which started it, ends; or ends now, too late."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    sys.argv[:] = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
