"""Runs a command and takes down all that came of it when its owner is gone: ``python guard.py FOLDER COMMAND...``.

vLLM is a family of processes, some of which outlive their parent and keep a GPU's memory. This one reads a pipe from
the controller, which closes it when it wants the end, and also when it is killed; SIGTERM means at once. FOLDER, where
the server's socket is, goes with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys

GRACE = 10.0
"""Seconds between SIGTERM and SIGKILL; the controller waits a little longer (`Server.close`)."""
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Exit as the command does, nothing of its process group left."""
    libc = ctypes.CDLL(None)
    server = subprocess.Popen(
        sys.argv[2:],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # if this process is killed
    )

    def at_once(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, at_once)
    ended = os.pidfd_open(server.pid)
    owner = sys.stdin.fileno()
    ready, _, _ = select.select([owner, ended], [], [])
    if ended not in ready:
        server.terminate()
        select.select([ended], [], [], GRACE)
    with contextlib.suppress(ProcessLookupError):  # the group lives as long as one of it does, unreaped ones included
        os.killpg(server.pid, signal.SIGKILL)
    status = server.wait()
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
