"""The parent of a sandlock guest: ``python -I supervisor.py SETTINGS``; imports nothing of this project.

Settings are JSON: ``control`` (descriptor of the guest's standard input), ``package`` (folder of sandlock), ``user``
(id that root becomes), and those of `run_confined`. It performs the system calls Landlock does not govern, and after
the guest's end kills everything else in its Landlock domain.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
import struct
import sys
import threading
import time
from typing import Any

AT_FDCWD, AT_SYMLINK_NOFOLLOW, AT_EMPTY_PATH = -100, 0x100, 0x1000
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
PATH_BENEATH, FS_REFER, SCOPE_SIGNAL = 1, 1 << 13, 2
FCHMODAT2 = 452
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 24, 36, 38
WATCH_SECONDS = 0.1

libc = ctypes.CDLL(None, use_errno=True)


def check_call(result: int) -> int:
    """Return `result` of a C call. Raises OSError if it failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def drop_privileges(user: int | None) -> None:
    """Drop root for `user`, and every capability for good."""
    if user is not None:
        for capability in range(64):
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails beyond the kernel's last one
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        check_call(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0))  # inherited by the guest, which sandlock must read
    check_call(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    check_call(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def confine_signals() -> None:
    """Keep our signals from existing processes; exit if that fails."""
    read, write = os.pipe()
    outsider = os.fork()
    if outsider == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    # a domain denies hard links and renames between folders unless it allows them, as this one does everywhere
    attributes = struct.pack("QQQ", FS_REFER, 0, SCOPE_SIGNAL)
    ruleset = check_call(libc.syscall(LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0))
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    check_call(libc.syscall(LANDLOCK_ADD_RULE, ruleset, PATH_BENEATH, struct.pack("=Qi", FS_REFER, root), 0))
    os.close(root)
    check_call(libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)
    try:
        os.kill(outsider, 0)
    except PermissionError:
        os.close(write)
        os.close(read)
        os.waitpid(outsider, 0)
        return
    raise SystemExit("signals leave a Landlock domain here")


def kill_domain() -> None:
    """Kill and reap everything else in our Landlock domain."""
    while True:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(-1, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def find_descendants(pid: int) -> list[int]:
    """Descendants of `pid`."""
    descendants, parents = [], [str(pid)]
    while parents:
        children: list[str] = []
        for parent in parents:
            with contextlib.suppress(OSError):  # it has ended, and its children have another parent
                for thread in os.listdir(f"/proc/{parent}/task"):  # noqa: PTH208
                    children += read_proc_file(f"/proc/{parent}/task/{thread}/children").split()
        descendants += [int(child) for child in children]
        parents = children
    return descendants


def read_proc_file(path: str) -> str:
    """Read a /proc file. Raises OSError if its process has ended."""
    with open(path) as file:  # noqa: PTH123
        return file.read()


def watch_limits(memory: int, threads: int) -> None:
    """Kill all commands, forever, whenever they exceed `memory` bytes or `threads` in total.

    The guest cannot: sandlock hides processes that have opened nothing since their fork.
    """
    page = os.sysconf("SC_PAGESIZE")
    while True:
        time.sleep(WATCH_SECONDS)
        guest = find_descendants(os.getpid())[:1]
        pids = find_descendants(guest[0]) if guest else []  # the commands
        resident = count = 0
        for pid in pids:
            with contextlib.suppress(OSError):
                # threads and resident pages, fields 20 and 24 in proc(5); the list begins at field 3, after the name
                fields = read_proc_file(f"/proc/{pid}/stat").rpartition(")")[2].split()
                count, resident = count + int(fields[17]), resident + page * int(fields[21])
        if resident > memory:  # the sum counts shared pages in each process; Pss divides them
            resident = 0
            for pid in pids:
                with contextlib.suppress(OSError):
                    resident += 1024 * int(
                        read_proc_file(f"/proc/{pid}/smaps_rollup").partition("\nPss:")[2].split()[0]
                    )
        if resident > memory or count > threads:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def change_metadata(ctx: Any, name: str, writable: list[str]) -> int:
    """Perform a ``chmod`` or ``utimensat`` for a sandboxed process, if the file is in a `writable` folder.

    One descriptor pins, checks and changes the file, so no rename or link can intervene. Returns the errno, 0 on
    success.
    """
    folder, path, value, flags = (AT_FDCWD, *ctx.args[:2], 0) if name == "chmod" else ctx.args[:4]
    folder = ctypes.c_int(folder).value
    flags = 0 if name == "fchmodat" else flags
    text = ctx.read_cstr(path, 4096)
    if text is None:
        return errno.EFAULT
    base = f"/proc/{ctx.pid}/" + ("cwd" if folder == AT_FDCWD else f"fd/{folder}")
    target = os.path.join(base, text) if text else base  # noqa: PTH118
    times = None
    if name == "utimensat" and value and (times := ctx.read(value, 32)) is None:
        return errno.EFAULT
    pin = os.open(target, os.O_PATH | os.O_CLOEXEC | (os.O_NOFOLLOW if flags & AT_SYMLINK_NOFOLLOW else 0))
    try:
        real = os.readlink(f"/proc/self/fd/{pin}")  # noqa: PTH115
        if not any(real == root or real.startswith(root + "/") for root in writable):
            return errno.EPERM
        if name == "utimensat":
            check_call(libc.utimensat(pin, b"", times, AT_EMPTY_PATH))
        else:
            check_call(libc.syscall(FCHMODAT2, pin, b"", value & 0o7777, AT_EMPTY_PATH))
    finally:
        os.close(pin)
    return 0


def run_confined(settings: dict[str, Any]) -> Any:
    """Run ``argv`` under sandlock and return the result.

    `memory`: bytes for all commands together. `readable`, `writable`: paths (the last two of `writable` are folders
    whose metadata may change too). `ports`: permitted ones of 127.0.0.1. `processes`: most at a time. `cwd`, `env`.
    """
    from sandlock import Sandbox
    from sandlock.handler import ExceptionPolicy, Handler, NotifAction

    class Metadata(Handler):  # type: ignore[misc]
        on_exception = ExceptionPolicy.DENY_EPERM

        def __init__(self, name: str) -> None:
            self.name = name

        def handle(self, ctx: Any) -> Any:
            if self.name == "utimensat" and ctx.args[1] == 0:  # an open file: Landlock checked its opening
                return NotifAction.continue_()
            try:
                code = change_metadata(ctx, self.name, settings["writable"][-2:])
            except OSError as error:
                code = error.errno or errno.EIO
            return NotifAction.errno(code) if code else NotifAction.returns(0)

    class Command(Handler):  # type: ignore[misc]
        """Marks each command, as it starts a session, as the first target of the OOM killer."""

        def handle(self, ctx: Any) -> Any:
            with open(f"/proc/{ctx.pid}/oom_score_adj", "w") as file:  # noqa: PTH123
                file.write("900")
            return NotifAction.continue_()

    sandbox = Sandbox(
        fs_readable=settings["readable"],
        fs_writable=settings["writable"],
        net_allow=[f"tcp://127.0.0.1:{','.join(map(str, settings['ports']))}"],
        max_processes=settings["processes"],
        cwd=settings["cwd"],
        clean_env=True,
        env=settings["env"],
    )
    limits = (settings["memory"], settings["processes"])
    threading.Thread(target=watch_limits, args=limits, daemon=True).start()
    names = ["fchmodat", "utimensat", *(["chmod"] if os.uname().machine == "x86_64" else [])]
    handlers: list[tuple[str | int, Handler]] = [(name, Metadata(name)) for name in names]
    handlers += [(FCHMODAT2, Metadata("fchmodat2")), ("setsid", Command())]
    return sandbox.run_with_handlers(settings["argv"], handlers)


def main() -> int:
    """Run one sandbox and return the exit code of the guest."""
    settings = json.loads(sys.argv[1])
    sys.path.append(settings["package"])
    import sandlock._handler_ffi  # noqa: F401  (now, while it can be read)

    if settings["control"] != 0:
        os.dup2(settings["control"], 0)
        os.close(settings["control"])
    drop_privileges(settings["user"])
    confine_signals()
    try:
        result = run_confined(settings)
    finally:
        kill_domain()
    sys.stdout.write(result.stdout.decode(errors="replace"))
    sys.stderr.write(result.stderr.decode(errors="replace"))
    if result.error:
        sys.stderr.write(f"{result.error}\n")
    return int(result.exit_code) & 0xFF


if __name__ == "__main__":
    sys.exit(main())
