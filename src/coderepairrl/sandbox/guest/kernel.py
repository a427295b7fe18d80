"""Python and Linux primitives shared by the guest modules."""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as signal
    import socket as socket
else:  # the C modules that these wrap: a guest starts faster without the wrappers
    import _signal as signal  # noqa: F401
    import _socket as socket  # noqa: F401

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38


def refuse_calls(program: bytes) -> None:
    """Install the seccomp filter `program` (BPF instructions) on this process and its children. Raises OSError."""
    import ctypes

    code = ctypes.create_string_buffer(program, len(program))
    filter_ = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 or prctl(PR_SET_SECCOMP, 2, filter_, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
