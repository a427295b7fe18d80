"""System primitives, and frames between guest and host: two lengths (4 bytes each, big endian), JSON, a body."""

from __future__ import annotations

import _json
import os
import struct

TYPE_CHECKING = False  # instead of `typing`, which loads slowly
if TYPE_CHECKING:
    import signal as signal
    import socket as socket
    from collections.abc import Callable
    from typing import Any
else:  # the C modules that `signal` and `socket` wrap: a guest starts faster without the wrappers
    import _signal as signal  # noqa: F401
    import _socket as socket

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38


def install_call_filter(program: bytes) -> None:
    """Install the seccomp filter `program` (BPF instructions) on this process and its children. Raises OSError."""
    import ctypes

    code = ctypes.create_string_buffer(program, len(program))
    filter_ = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    check_call(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    check_call(prctl(PR_SET_SECCOMP, 2, filter_, 0, 0), "prctl")  # 2: SECCOMP_MODE_FILTER


def check_call(result: int, what: str) -> int:
    """Return `result` of a C call. Raises OSError if it failed."""
    if result < 0:
        import ctypes

        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


FRAME = struct.Struct(">II")


class _Decoding:
    """Defaults of ``json.loads``."""

    strict, object_hook, object_pairs_hook, parse_float, parse_int, parse_constant = True, None, None, float, int, float


def decode(data: bytes) -> Any:
    """Parse output of the host's ``json.dumps``."""
    return _json.make_scanner(_Decoding)(data.decode(), 0)[0]  # type: ignore[arg-type]


def encode(value: object) -> str:
    """Encode text, numbers, booleans, lists and dictionaries as JSON."""
    if isinstance(value, str):
        return str(_json.encode_basestring_ascii(value))
    if isinstance(value, dict):
        return "{" + ",".join(f"{encode(name)}:{encode(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(encode, value)) + "]"
    return repr(value).lower()  # numbers, and True as true


class Control:
    """The guest's end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.hung_up: Callable[[], None] = lambda: None
        os.set_inheritable(connection.fileno(), False)

    def receive(self) -> tuple[dict[str, Any], bytes | None]:
        """Receive a frame; its body is None if memory ran out. Exits when the host hangs up."""
        header, body = FRAME.unpack(self._receive_exactly(FRAME.size))
        request = decode(self._receive_exactly(header))
        try:
            return request, self._receive_exactly(body)
        except MemoryError:  # the guest has the memory limit of its commands
            return request, None

    def send(self, header: dict[str, Any], body: bytes = b"", descriptor: int | None = None) -> None:
        """Send a frame, optionally with an open descriptor."""
        text = encode(header).encode()
        message = FRAME.pack(len(text), len(body)) + text
        if descriptor is not None:  # before any byte of the frame is out, so that it arrives with the first
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor))]
            sent = self.socket.sendmsg([message], rights)
            message = message[sent:]
        self.socket.sendall(message + body if len(body) < 1 << 16 else message)
        if len(body) >= 1 << 16:  # without copying it
            self.socket.sendall(body)

    def _receive_exactly(self, size: int) -> bytes:
        parts: list[bytes] = []
        try:
            while size:
                parts.append(self._receive_some(size))
                size -= len(parts[-1])
            return b"".join(parts)
        except MemoryError:
            parts.clear()
            while size:  # read the rest, so that the next frame is found
                size -= len(self._receive_some(min(size, 1 << 16)))
            raise

    def _receive_some(self, size: int) -> bytes:
        data = self.socket.recv(min(size, 1 << 20))
        if not data:
            self.hung_up()
            os._exit(0)
        return data


def connect(where: str) -> socket.socket:
    """The guest's end of the socket: `where` is an inherited descriptor or a path."""
    if where.isdigit():
        return socket.socket(fileno=int(where))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(where)
    return connection


def describe_failure(error: Exception) -> dict[str, Any]:
    """Build the reply to a failed request."""
    if isinstance(error, OSError) and error.errno:
        return {"errno": error.errno, "error": error.strerror or str(error)}
    if isinstance(error, ValueError):  # a path with a NUL, or text that is no name; 22: EINVAL
        return {"errno": 22, "error": str(error)}
    if isinstance(error, MemoryError):  # 12: ENOMEM
        return {"errno": 12, "error": "Cannot allocate memory"}
    return {"errno": 5, "error": f"{type(error).__name__}: {error}"}  # 5: EIO
