"""What a process needs that serves others on this machine: an address that is its alone, and a bound on its restarts.

It holds a lock beside the address, which the kernel releases however it ends: who would join can tell a process that
is being started, for the first time or again, from one that nobody will start.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from coderepairrl.errors import UsageError

LASTING = 600.0
"""Seconds after which a process that dies counts as one that had worked."""
_PROBED = 1.0
"""Seconds for which others may hold the lock to see whether it is held."""
Say = Callable[[str], None]


def claim(address: Path, what: str, fix: str) -> int:
    """Lock `address` for `what` this process has there; the descriptor that holds the lock.

    Raises `UsageError` where another process has one there, with this `fix`, and where there can be no lock.
    """
    try:
        address.parent.mkdir(parents=True, exist_ok=True)
        # in a folder that others write to, the name might be a link to a file of ours
        descriptor = os.open(_lock(address), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _unlocked(address, error) from error
    try:
        deadline = time.monotonic() + _PROBED
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UsageError(f"another process has a {what} at {address}", fix=fix) from None
                time.sleep(0.05)
            except OSError as error:  # some file systems of networks have no locks
                raise _unlocked(address, error) from error
    except BaseException:
        os.close(descriptor)
        raise


def claimed(address: Path) -> bool:
    """Whether a process that lives has claimed `address`."""
    try:
        descriptor = os.open(_lock(address), os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:  # where there are no locks, nobody has one
        return False
    finally:
        os.close(descriptor)


def lead(address: Path, to: Path) -> None:
    """Have `address` name the socket `to`, whatever it named before. Raises `UsageError` where it cannot."""
    fresh = address.with_name(f"{address.name}.new")
    try:
        with suppress(FileNotFoundError):
            fresh.unlink()
        fresh.symlink_to(to)
        fresh.replace(address)
    except OSError as error:
        raise UsageError(
            f"cannot make {address}: {error.strerror or error}", fix=f"make room there, or move {address} away"
        ) from error


class Restarts:
    """How often a process may be started anew: so many times in a row, but for one that had lasted."""

    def __init__(self, most: int | None) -> None:
        """None: as often as it dies."""
        self._most = most
        self._began: float | None = None
        self.deaths = 0
        """In a row."""

    def started(self) -> None:
        """It works."""
        self._began = time.monotonic()

    def may_go_on(self) -> bool:
        """Count a death, or a start that failed; whether another start is left."""
        lasted = self._began is not None and time.monotonic() - self._began > LASTING
        self._began = None
        self.deaths = 1 if lasted else self.deaths + 1
        return self._most is None or self.deaths <= self._most


def _unlocked(address: Path, error: OSError) -> UsageError:
    return UsageError(
        f"cannot lock {_lock(address)}: {error.strerror or error}", fix="a folder of yours on this machine's own disk"
    )


def _lock(address: Path) -> Path:
    return address.with_name(f"{address.name}.lock")
