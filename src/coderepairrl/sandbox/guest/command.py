"""One command while it runs."""

from __future__ import annotations

import os
import select
import time

from coderepairrl.sandbox.guest.kernel import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from coderepairrl.sandbox.guest.service import Guest

WATCH_SECONDS = 0.1


class Run:
    """One command while it runs: its output is read as it comes, its time and memory are watched."""

    def __init__(self, guest: Guest, main: int, out: int, feed: int, body: bytes, deadline: float, cap: int) -> None:
        self.guest, self.main, self.out, self.feed = guest, main, out, feed
        self.body, self.deadline, self.cap = memoryview(body), deadline, cap
        self.output, self.truncated = bytearray(), False
        os.set_blocking(out, False)
        if feed >= 0:
            os.set_blocking(feed, False)

    def to_the_end(self) -> dict[str, Any]:
        """Wait until the command has ended, or end it; the reply's header."""
        status, why = self._watch()
        self.guest.kill_all()
        self._drain()  # every writer is dead, so this is all there will ever be
        os.close(self.out)
        if self.feed >= 0:
            os.close(self.feed)
        if why not in ("", "time", "stop"):
            self.output += b"\n[sandbox] killed: the limit on %s was exceeded\n" % why.encode()
        code = {"": None, "time": 124}.get(why, 137)
        if code is None:
            code = os.waitstatus_to_exitcode(status)
            code = code if code >= 0 else 128 - code
        return {"code": code, "timed_out": why == "time", "truncated": self.truncated}

    def _watch(self) -> tuple[int, str]:
        """Wait for the command; returns its status, or why it must be ended."""
        poll = select.poll()
        for source in (self.guest.control.socket.fileno(), self.guest.wake.fileno(), self.out):
            poll.register(source, select.POLLIN)
        if self.feed >= 0:
            poll.register(self.feed, select.POLLOUT)
        checked = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= self.deadline:
                return 0, "time"
            if now - checked >= WATCH_SECONDS:
                checked = now
                if over := self.guest.limits.exceeded():
                    return 0, over
            for source, event in poll.poll(1000 * min(self.deadline - now, WATCH_SECONDS)):
                ended = self._handle(poll, source, event)
                if ended is not None:
                    return ended

    def _handle(self, poll: select.poll, source: int, event: int) -> tuple[int, str] | None:
        """Act on what is ready at a descriptor; as `_watch` returns, or None while the command goes on."""
        if source == self.out:
            if not self._take():
                poll.unregister(self.out)
        elif source == self.feed:
            if event & select.POLLERR or not self._give():
                poll.unregister(self.feed)
                os.close(self.feed)
                self.feed = -1
        elif source == self.guest.wake.fileno():
            self.guest.wake.recv(4096)
            status = self._reap()
            return None if status is None else (status, "")
        else:
            self.guest.control.receive()  # the host only ever interrupts with "stop"
            return 0, "stop"
        return None

    def _reap(self) -> int | None:
        """Reap what has ended; the status of the command itself, if it has."""
        found = None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return found
            if pid == 0:
                return found
            if pid == self.main:
                found = status

    def _take(self) -> bool:
        """Read some of the output; whether there may be more."""
        try:
            data = os.read(self.out, 1 << 16)
        except BlockingIOError:
            return True
        room = self.cap - len(self.output)
        self.truncated |= len(data) > room
        self.output += data[: max(room, 0)]
        return bool(data)

    def _drain(self) -> None:
        """Read the output that is left."""
        while True:
            before = len(self.output), self.truncated
            try:
                if not self._take():
                    return
            except OSError:
                return
            if before == (len(self.output), self.truncated) and not select.select([self.out], [], [], 0)[0]:
                return

    def _give(self) -> bool:
        """Write some of the input; whether there is more."""
        try:
            self.body = self.body[os.write(self.feed, self.body[: 1 << 16]) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        return len(self.body) > 0
