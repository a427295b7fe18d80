"""Command line: our end of the socket, and optionally a system call filter by path or descriptor.

Starts a guest, one inside sandlock (`LandlockGuest`), or a process that forks guests (`ForkServer`).
"""

from __future__ import annotations

import os
import struct
import sys

from coderepairrl.sandbox.guest.files import unpack
from coderepairrl.sandbox.guest.frames import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    Control,
    check_call,
    connect,
    decode,
    install_call_filter,
    signal,
    socket,
)
from coderepairrl.sandbox.guest.service import DEFAULT_SIGNALS, Guest

NEW_MOUNTS, NEW_CGROUP, NEW_NAMES, NEW_IPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEW_USER, NEW_PIDS, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
READ_ONLY, NO_SUID, NO_DEVICES, NO_PROGRAMS, REMOUNT, BIND = 1, 2, 4, 8, 32, 4096
SET_FLAGS, UP, RUNNING = 0x8914, 0x1, 0x40  # ioctl request and flags of a network interface
CAPABILITIES, PR_CAPBSET_DROP = 0x20080522, 24
MOST_WATCHERS = "8"  # out of the 128 that all sandboxes of a user share
MOST_RIGHTS = 16  # descriptors in one message


class ForkServer:
    """A process with everything preloaded that forks guests. It runs no task's code.

    bubblewrap starts it without workspace or system call filter and with a bare ``/proc``. A fork enters nested
    namespaces, mounts what sandboxes must not share, and drops the rights it needed (`Forked.drop_rights`). It cannot
    unmount or make writable what bubblewrap mounted, as another user namespace owns those mounts. When the server ends,
    all guests end.
    """

    def __init__(self, requests: socket.socket, filter_descriptor: int) -> None:
        import ctypes
        import fcntl
        import gc

        self.requests, self.ioctl, self.libc = requests, fcntl.ioctl, ctypes.CDLL(None, use_errno=True)
        with open(filter_descriptor, "rb") as file:
            self.filter = file.read()
        signal.signal(signal.SIGCHLD, self._reap)
        gc.freeze()

    def serve(self) -> None:
        """Fork a guest for each message until the host hangs up.

        A message is JSON (``sizes``: bytes of each in-memory file system, by mount point) with descriptors: the guest's
        socket, the archive of its workspace, its error log, and the entrances of its control group.
        """
        while True:
            message, rights, flags, _ = self.requests.recvmsg(
                1 << 16, socket.CMSG_SPACE(4 * MOST_RIGHTS), socket.MSG_CMSG_CLOEXEC
            )
            if not message:
                os._exit(0)
            data = rights[0][2] if rights else b""  # of (level, type, data)
            descriptors = struct.unpack(f"{len(data) // 4}i", data)
            if len(descriptors) >= 3 and not flags & socket.MSG_CTRUNC:
                self._fork(message, descriptors)
            else:  # the host notices by the guest's socket, which is closed below
                os.write(2, b"malformed: %d descriptors, flags %d\n" % (len(descriptors), flags))
            for descriptor in descriptors:
                os.close(descriptor)

    def _fork(self, message: bytes, descriptors: tuple[int, ...]) -> None:
        try:
            forked = os.fork()
        except OSError as error:  # no more processes: only this guest fails
            forked = -1
            try:  # noqa: SIM105  # contextlib takes long to import
                os.write(descriptors[2], f"cannot fork a guest: {error}\n".encode())
            except OSError:  # the disk is full, too
                pass
        if forked == 0:
            try:
                os.dup2(descriptors[2], 2)
                self._become_guest(decode(message)["sizes"], *descriptors)
            except BaseException as error:
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(1)

    def _reap(self, *_: object) -> None:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass

    def _become_guest(self, sizes: dict[str, int], control: int, archive: int, errors: int, *entrances: int) -> None:
        self.requests.close()
        os.close(errors)
        os.setsid()
        user, group = os.getuid(), os.getgid()
        check_call(self.libc.unshare(NEW_USER | NEW_MOUNTS | NEW_PIDS | NEW_NETWORK | NEW_IPC | NEW_NAMES), "unshare")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        if os.fork() != 0:  # only children are in the new pid namespace
            os._exit(0)
        for entrance in entrances:
            os.write(entrance, b"0")
            os.close(entrance)
        self._mount(b"proc", b"/proc", NO_SUID | NO_DEVICES | NO_PROGRAMS)
        with open("/proc/sys/user/max_inotify_instances", "w") as file:  # for this namespace alone
            file.write(MOST_WATCHERS)
        self._mount(b"/proc/sys", b"/proc/sys", BIND)
        self._mount(b"/proc/sys", b"/proc/sys", BIND | REMOUNT | READ_ONLY | NO_SUID | NO_DEVICES | NO_PROGRAMS)
        self._mount(b"devpts", b"/dev/pts", NO_SUID | NO_PROGRAMS, b"newinstance,ptmxmode=0666,mode=620")
        for folder, size in sizes.items():
            self._mount(b"tmpfs", folder.encode(), NO_SUID | NO_DEVICES, b"mode=0755,size=%d" % size)
        loopback = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.ioctl(loopback.fileno(), SET_FLAGS, struct.pack("16sh14x", b"lo", UP | RUNNING))
        loopback.close()
        Forked(self, Control(socket.socket(fileno=control)), archive).serve()

    def _mount(self, source: bytes, target: bytes, flags: int, options: bytes | None = None) -> None:
        kind = None if flags & BIND else source  # a file system that has no device is named like its type
        check_call(self.libc.mount(source, target, kind, flags, options), f"mount {target.decode()}")


class Forked(Guest):
    """A guest forked from a `ForkServer`. Until configured it has every capability over its own namespaces."""

    def __init__(self, server: ForkServer, control: Control, archive: int) -> None:
        super().__init__(control)
        self.server, self.archive = server, archive
        pidfd = os.pidfd_open(self.pid)
        control.send({"forked": True}, descriptor=pidfd)  # the host uses it to end this guest
        os.close(pidfd)

    def drop_rights(self) -> None:
        """Drop every capability, the right to gain any, and the system calls that `seccomp` denies."""
        libc = self.server.libc
        if os.access("/proc/self/ns/cgroup", os.F_OK):  # if the kernel has such namespaces
            check_call(libc.unshare(NEW_CGROUP), "unshare cgroup")
        for capability in range(64):
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails beyond the kernel's last one
        check_call(libc.capset(struct.pack("Ii", CAPABILITIES, 0), bytes(24)), "capset")
        install_call_filter(self.server.filter)

    def _unpack(self, archive: str) -> None:
        unpack(self.archive, self.workdir)


LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
PATH_BENEATH, FS_REFER, SCOPES = 1, 1 << 13, 3  # Landlock: the scopes are abstract Unix sockets and signals


class LandlockGuest(Guest):
    """A guest that shares the host's process ids; ``kill(-1)`` reaches our Landlock domain, which is the sandbox."""

    def __init__(self, control: Control, filter_path: str) -> None:
        super().__init__(control)
        self.is_alone = True
        # Any domain denies links and renames between folders unless it allows them; this one allows them everywhere.
        attributes = struct.pack("QQQ", FS_REFER, 0, SCOPES)
        ruleset = self.libc.syscall(LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
        self.ruleset = check_call(ruleset, "landlock_create_ruleset")
        os.set_inheritable(self.ruleset, False)
        root = os.open("/", os.O_PATH)
        beneath = struct.pack("=Qi", FS_REFER, root)
        check_call(self.libc.syscall(LANDLOCK_ADD_RULE, self.ruleset, PATH_BENEATH, beneath, 0), "landlock_add_rule")
        os.close(root)
        with open(filter_path, "rb") as file:
            install_call_filter(file.read())

    def _prepare(self) -> None:
        import ctypes

        self.libc = ctypes.CDLL(None, use_errno=True)
        signal.signal(signal.SIGTERM, self.end)
        check_call(self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")
        check_call(self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0), "prctl")

    def end(self, *_: object) -> None:
        """Kill everything and exit; works even without the supervisor."""
        try:
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(1)

    def _start(self, program: str, argv: list[str], env: dict[str, str], stdin: int, stdout: int) -> int:
        report, failure = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                check_call(self.libc.syscall(LANDLOCK_RESTRICT_SELF, self.ruleset, 0), "landlock_restrict_self")
                for number in DEFAULT_SIGNALS:
                    signal.signal(number, signal.SIG_DFL)
                for target, source in enumerate((stdin, stdout, stdout)):
                    os.dup2(source, target)
                os.execve(program, argv, env)
            except (OSError, ValueError) as error:
                os.write(failure, struct.pack("I", getattr(error, "errno", None) or 22))  # EINVAL
            finally:
                os._exit(127)
        os.close(failure)
        with open(report, "rb") as file:
            failed = file.read(4)
        if failed:
            os.waitpid(pid, 0)
            code = struct.unpack("I", failed)[0]
            raise OSError(code, os.strerror(code))
        return pid


if __name__ == "__main__":
    if len(sys.argv) == 2:  # in bubblewrap, which has installed the filter, or in no sandbox
        Guest(Control(connect(sys.argv[1]))).serve()
    if sys.argv[2].isdigit():  # in bubblewrap, with a filter for its guests
        ForkServer(connect(sys.argv[1]), int(sys.argv[2])).serve()
    control_end = Control(connect(sys.argv[1]))
    if not sys.argv[1].isdigit():  # in a container
        with open(sys.argv[2], "rb") as filter_file:
            install_call_filter(filter_file.read())
        Guest(control_end).serve()
    confined = LandlockGuest(control_end, sys.argv[2])
    try:
        confined.serve()
    finally:
        confined.end()
