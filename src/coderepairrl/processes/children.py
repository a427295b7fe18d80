"""Child processes that exchange frames, such as engines and learners.

A frame is a JSON object after its length (4 bytes, big endian) on a socket pair; pieces are bytes objects after their
number and lengths. Children die with their parent (`child`), ignore Ctrl-C, and log their output.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any, Self

_LENGTH = struct.Struct(">I")
_SLICE = 1 << 18  # bytes written before other coroutines may run
_FD = "CRRL_FRAMES_FD"
NO_CWD_IMPORTS = {"PYTHONSAFEPATH": "1"}
"""Environment that prevents imports from the current folder, perhaps an untrusted repository (``crrl fix``)."""

Frame = dict[str, Any]


def encode_frame(frame: Mapping[str, Any]) -> bytes:
    """Encode a frame."""
    body = json.dumps(frame, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


def _encode_sizes(pieces: Sequence[bytes | bytearray]) -> bytes:
    return _LENGTH.pack(len(pieces)) + b"".join(_LENGTH.pack(len(piece)) for piece in pieces)


def read_log_end(log: Path, start: int = 0) -> list[str]:
    """Last 12 lines of `log` after byte `start`."""
    try:
        with log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start, end - (1 << 16)))
            return file.read().decode(errors="replace").splitlines()[-12:]
    except OSError:  # the log was removed
        return []


def run_child(
    command: Sequence[str], *, stdout: int | IO[bytes], pass_fds: Collection[int] = ()
) -> subprocess.CompletedProcess[bytes]:
    """Run a third-party program, then kill its process group. `stdout` includes stderr."""
    process = None
    try:
        with _delay_signals():  # a handler that raises before `process` is assigned would orphan it
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=pass_fds,
            )
        output, _ = process.communicate()
    finally:
        if process is not None:
            # `with` waits for the program only; others in its group may hold its pipe open
            with process, contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, output)


@contextmanager
def _delay_signals() -> Iterator[None]:
    """Delay the handlers of SIGINT, SIGTERM and SIGHUP to the end of the block."""
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main thread only
        yield
        return
    delayed: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        delayed.append(number)

    handlers = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        for number in handlers:
            signal.signal(number, note)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in delayed:
            signal.raise_signal(number)


class ChildDied(Exception):
    """Death of the child: exit status and end of its log."""

    fix = ""


class Child:
    """The parent's end of a running child."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        log: Path,
        log_start: int,
    ) -> None:
        self.process = process
        self.log = log
        self._log_start = log_start
        self._reader = reader
        self._writer = writer
        self._expected: int | None = None

    @classmethod
    async def spawn(
        cls,
        module: str,
        args: Sequence[str] = (),
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
    ) -> Self:
        """Start ``python -m module args...`` with one torch thread, appending output to `log`."""
        ours, child_end = socket.socketpair()
        variables = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # MKL follows OMP
        variables |= {**os.environ, **(env or {}), **NO_CWD_IMPORTS, _FD: str(child_end.fileno())}
        log.parent.mkdir(parents=True, exist_ok=True)
        with child_end, log.open("ab") as sink:
            log_start = sink.tell()
            process = subprocess.Popen(
                [sys.executable, "-m", "coderepairrl.processes.child", str(os.getpid()), module, *args],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                pass_fds=[child_end.fileno()],
                env=variables,
                start_new_session=True,
            )
        try:
            reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        except BaseException:  # without a `Child`, nobody else would end the process
            process.kill()
            process.wait()
            raise
        return cls(process, reader, writer, log, log_start)

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    @property
    def name(self) -> str:
        """Name for messages."""
        return str(self.pid)

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()

    @property
    def stopped(self) -> bool:
        """Whether the process is stopped (SIGSTOP, a debugger); False without /proc."""
        try:
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        except OSError:
            return False

    async def send(self, frame: Mapping[str, Any]) -> None:
        """Send a frame. Raises `ChildDied`."""
        async with self._raise_if_disconnected():
            self._writer.write(encode_frame(frame))
            await self._writer.drain()

    async def receive(self) -> Frame:
        """Receive a frame. Raises `ChildDied`. Safe to cancel."""
        async with self._raise_if_disconnected():
            if self._expected is None:
                (self._expected,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            frame: Frame = json.loads(await self._reader.readexactly(self._expected))
            self._expected = None
        return frame

    async def send_pieces(self, pieces: Sequence[bytes | bytearray]) -> None:
        """Send bytes objects. Raises `ChildDied`."""
        async with self._raise_if_disconnected():
            self._writer.write(_encode_sizes(pieces))
            for piece in pieces:
                for start in range(0, len(piece), _SLICE):
                    # a short piece is not copied
                    self._writer.write(piece if len(piece) <= _SLICE else piece[start : start + _SLICE])
                    await self._writer.drain()
                    await asyncio.sleep(0)

    async def receive_pieces(self) -> list[bytes]:
        """Receive bytes objects. Raises `ChildDied`; must not be cancelled."""
        async with self._raise_if_disconnected():
            (count,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            sizes = struct.unpack(f">{count}I", await self._reader.readexactly(_LENGTH.size * count))
            return [await self._reader.readexactly(size) for size in sizes]

    @contextlib.asynccontextmanager
    async def _raise_if_disconnected(self) -> AsyncIterator[None]:
        """Raise `ChildDied` if the connection breaks."""
        try:
            yield
        except (asyncio.IncompleteReadError, OSError) as error:
            raise await self._make_exit_error() from error

    async def close(self, grace: float = 5.0) -> None:
        """Disconnect, which ends the child; kill it after `grace` seconds."""
        with contextlib.suppress(OSError):
            self._writer.close()
            await self._writer.wait_closed()
        if await self._wait_until_exit(grace) is None:
            self.process.kill()
            await self._wait_until_exit(5.0)

    async def _wait_until_exit(self, seconds: float) -> int | None:
        deadline = asyncio.get_running_loop().time() + seconds
        while (status := self.process.poll()) is None and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        return status

    async def _make_exit_error(self) -> ChildDied:
        status = await self._wait_until_exit(2.0)
        lines = read_log_end(self.log, self._log_start)
        how = "closed its socket"
        if status is not None:
            how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"
        end = f"; {self.log} ends with:" if lines else f", and wrote nothing to {self.log}"
        return ChildDied("\n".join([f"process {self.process.pid} {how}{end}", *lines]))


class Parent:
    """The child's blocking end."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()

    @classmethod
    def connect(cls) -> Self:
        """Connect to the parent; resumes garbage collection without imported objects."""
        gc.freeze()
        gc.enable()
        # a grandchild that inherited the socket and outlived this process would keep the parent waiting
        connection = socket.socket(fileno=int(os.environ.pop(_FD)))
        connection.set_inheritable(False)
        return cls(connection)

    def fileno(self) -> int:
        """Descriptor for `select`."""
        return self._socket.fileno()

    def send(self, frame: Mapping[str, Any]) -> None:
        """Send a frame. Raises BrokenPipeError without parent."""
        self._socket.sendall(encode_frame(frame))

    def receive(self, *, block: bool = True) -> Frame | None:
        """Receive a frame; None if not `block` and none has arrived. Raises EOFError without parent."""
        needed = _LENGTH.size
        while True:
            if len(self._buffer) >= _LENGTH.size:
                needed = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) >= needed:
                frame: Frame = json.loads(self._receive_exactly(needed)[_LENGTH.size :])
                return frame
            try:
                self._fill(0 if block else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None

    def send_pieces(self, pieces: Sequence[bytes]) -> None:
        """Send bytes objects. Raises BrokenPipeError without parent."""
        self._socket.sendall(_encode_sizes(pieces))
        for piece in pieces:
            self._socket.sendall(piece)

    def receive_pieces(self) -> list[bytes]:
        """Receive bytes objects. Raises EOFError without parent."""
        (count,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size))
        return [
            self._receive_exactly(size)
            for size in struct.unpack(f">{count}I", self._receive_exactly(_LENGTH.size * count))
        ]

    def _receive_exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._fill(0)
        chunk = bytes(self._buffer[:size])
        del self._buffer[:size]
        return chunk

    def _fill(self, flags: int) -> None:
        data = self._socket.recv(1 << 20, flags)
        if not data:
            raise EOFError("the parent closed the connection")
        self._buffer += data
