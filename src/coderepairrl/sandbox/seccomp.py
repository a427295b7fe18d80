"""A hand-assembled seccomp filter that closes what namespaces, or their absence, leave open.

Classic BPF over ``struct seccomp_data {int nr; u32 arch; u64 ip; u64 args[6]}``; x86_64 and aarch64, little endian. An
allow-list would break compilers and interpreters, so this denies what no repair needs: namespaces and mounts, other
processes' memory, kernel interfaces with a record of escapes, socket families outside network namespaces, and memory
that limits do not count or that sandboxes of a user share.
"""

from __future__ import annotations

import errno
import platform
import stat
import struct
from typing import NamedTuple

from coderepairrl.errors import PrerequisiteError

# operation codes of classic BPF, return values of a filter, and offsets in `seccomp_data`
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NR, _ARCH, _ARG0, _ARG1, _ARG2 = 0, 4, 16, 24, 32
_X32 = 0x40000000  # x86_64 numbers from here on are the x32 interface, which would bypass every comparison

_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}
_ALLOWED_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: the network namespace confines them. AF_VSOCK is 40
_NETLINK = 16  # only NETLINK_ROUTE (protocol 0): name resolution asks it for addresses
_GUEST_PID = 1
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C  # put characters into a terminal's input

# Always denied: first calls with equal numbers on both machines.
_SAME_NUMBERS = {
    "pidfd_getfd": 438, "process_madvise": 440, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431,
    "fsmount": 432, "fspick": 433, "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447,
    "open_tree_attr": 467,
}  # fmt: skip
_DENIED_X86_64 = {
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "mount": 165, "umount2": 166,
    "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308, "keyctl": 250, "add_key": 248, "request_key": 249,
    "bpf": 321, "perf_event_open": 298, "kexec_load": 246, "kexec_file_load": 320, "init_module": 175,
    "finit_module": 313, "delete_module": 176, "userfaultfd": 323, "open_by_handle_at": 304, "name_to_handle_at": 303,
    "quotactl": 179, "swapon": 167, "swapoff": 168, "reboot": 169, "acct": 163, "settimeofday": 164,
    "clock_settime": 227, "clock_adjtime": 305, "adjtimex": 159, "syslog": 103, "vhangup": 153, "iopl": 172,
    "ioperm": 173, "lookup_dcookie": 212, "fanotify_init": 300, "memfd_create": 319, "shmget": 29,
    "msgget": 68, "semget": 64, "mq_open": 240, "mq_unlink": 241,
}  # fmt: skip
_DENIED_AARCH64 = {
    "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "mount": 40, "umount2": 39,
    "pivot_root": 41, "chroot": 51, "unshare": 97, "setns": 268, "keyctl": 219, "add_key": 217, "request_key": 218,
    "bpf": 280, "perf_event_open": 241, "kexec_load": 104, "kexec_file_load": 294, "init_module": 105,
    "finit_module": 273, "delete_module": 106, "userfaultfd": 282, "open_by_handle_at": 265, "name_to_handle_at": 264,
    "quotactl": 60, "swapon": 224, "swapoff": 225, "reboot": 142, "acct": 89, "settimeofday": 170,
    "clock_settime": 112, "clock_adjtime": 266, "adjtimex": 171, "syslog": 116, "vhangup": 58, "lookup_dcookie": 18,
    "fanotify_init": 262, "memfd_create": 279, "shmget": 194, "msgget": 186, "semget": 190,
    "mq_open": 180, "mq_unlink": 181,
}  # fmt: skip
# "Not there" rather than "not allowed": programs then fall back (glibc from clone3 to clone, libuv from io_uring).
_ABSENT = {"clone3": 435, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427}

# Denied where host and sandbox share namespaces, since Landlock does not govern them: servers, watching files, owners
# and attributes.
_SHARED_SAME = {"setxattrat": 463, "removexattrat": 466, "file_setattr": 469, "process_mrelease": 448}
_SHARED_X86_64 = {
    "listen": 50, "inotify_init": 253, "inotify_init1": 294, "chown": 92,
    "lchown": 94, "fchownat": 260, "setxattr": 188, "lsetxattr": 189, "removexattr": 197, "lremovexattr": 198,
    "utime": 132, "utimes": 235, "futimesat": 261, "migrate_pages": 256, "move_pages": 279,
}  # fmt: skip
_SHARED_AARCH64 = {
    "listen": 201, "inotify_init1": 26, "fchownat": 54, "setxattr": 5,
    "lsetxattr": 6, "removexattr": 14, "lremovexattr": 15, "migrate_pages": 238, "move_pages": 239,
}  # fmt: skip
# Calls on another process of the same user, with the argument that holds its id. With `shared`, a process may name only
# itself (0), otherwise any but the guest (1), which lower limits would kill. `_BY_USER`, on all of a user, are denied.
_SELF_X86_64 = {
    "prlimit64": (302, _ARG0), "sched_setaffinity": (203, _ARG0), "sched_setscheduler": (144, _ARG0),
    "sched_setparam": (142, _ARG0), "sched_setattr": (314, _ARG0), "setpriority": (141, _ARG1),
    "ioprio_set": (251, _ARG1),
}  # fmt: skip
_SELF_AARCH64 = {
    "prlimit64": (261, _ARG0), "sched_setaffinity": (122, _ARG0), "sched_setscheduler": (119, _ARG0),
    "sched_setparam": (118, _ARG0), "sched_setattr": (274, _ARG0), "setpriority": (140, _ARG1),
    "ioprio_set": (30, _ARG1),
}  # fmt: skip
# Calls of package installers that need several file owners or a real root.
_ROOT_SAME = {"setxattrat": 463}
_ROOT_X86_64 = {
    "chown": 92, "fchown": 93, "lchown": 94, "fchownat": 260, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190,
    "setuid": 105, "setgid": 106, "setreuid": 113, "setregid": 114, "setgroups": 116, "setresuid": 117,
    "setresgid": 119, "setfsuid": 122, "setfsgid": 123, "capset": 126,
}  # fmt: skip
_ROOT_AARCH64 = {
    "fchown": 55, "fchownat": 54, "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "setuid": 146, "setgid": 144,
    "setreuid": 145, "setregid": 143, "setgroups": 159, "setresuid": 147, "setresgid": 149, "setfsuid": 151,
    "setfsgid": 152, "capset": 91,
}  # fmt: skip
_NODES_X86_64 = {"mknod": (133, _ARG1), "mknodat": (259, _ARG2)}  # with the argument that holds the kind of node
_NODES_AARCH64 = {"mknodat": (33, _ARG2)}
_BY_USER = {"setpriority": 2, "ioprio_set": 3}  # first arguments: PRIO_USER, IOPRIO_WHO_USER


class _Machine(NamedTuple):
    # its AUDIT_ARCH, and numbers of system calls
    audit: int
    denied: dict[str, int]
    clone: int
    socket: int
    ioctl: int
    x32: bool
    shared: dict[str, int]
    on_self: dict[str, tuple[int, int]]
    root: dict[str, int]
    nodes: dict[str, tuple[int, int]]


_MACHINES = {
    "x86_64": _Machine(
        0xC000003E, _DENIED_X86_64, 56, 41, 16, True, _SHARED_X86_64, _SELF_X86_64, _ROOT_X86_64, _NODES_X86_64
    ),
    "aarch64": _Machine(
        0xC00000B7, _DENIED_AARCH64, 220, 198, 29, False, _SHARED_AARCH64, _SELF_AARCH64, _ROOT_AARCH64, _NODES_AARCH64
    ),
}


def _instruction(code: int, k: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
    # a jump is the number of instructions to skip
    return struct.pack("<HBBI", code, jump_true, jump_false, k)


def _when_equal(number: int, body: bytes) -> bytes:
    # every path through `body` must return
    return _instruction(_EQUAL, number, 0, len(body) // 8) + body


def assemble_filter(machine: str = "", *, shared: bool = False, root: bool = False) -> bytes:
    """Assemble the filter as ``struct sock_filter[]`` for `machine` (default: this one). Raises `PrerequisiteError`.

    `shared`: also refuse what namespaces would confine. `root`: let calls that need a real root (owners, devices, other
    users, extended attributes) succeed without effect. Source: charliecloud's ``--force=seccomp``.
    """
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        raise PrerequisiteError(
            f"no seccomp filter for {machine}", fix="use x86_64 or aarch64, or name another sandbox in the config"
        )
    target = _MACHINES[machine]
    allow, refuse = _instruction(_RETURN, _ALLOW), _instruction(_RETURN, _ERRNO | errno.EPERM)
    absent, no_family = _instruction(_RETURN, _ERRNO | errno.ENOSYS), _instruction(_RETURN, _ERRNO | errno.EAFNOSUPPORT)
    parts = [
        _instruction(_LOAD, _ARCH),
        _instruction(_EQUAL, target.audit, 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NR),
    ]
    if target.x32:
        parts += [_instruction(_AT_LEAST, _X32, 0, 1), absent]
    parts += [_when_equal(number, refuse) for number in (target.denied | _SAME_NUMBERS).values()]
    if shared:
        parts += [_when_equal(number, refuse) for number in (target.shared | _SHARED_SAME).values()]
    if root:
        fake_success = _instruction(_RETURN, _ERRNO)  # error 0: the call returns 0 without being made
        parts += [_when_equal(number, fake_success) for number in (target.root | _ROOT_SAME).values()]
        devices = _when_equal(stat.S_IFCHR, fake_success) + _when_equal(stat.S_IFBLK, fake_success)
        for number, argument in target.nodes.values():
            kind = _instruction(_LOAD, argument) + _instruction(_AND, 0o170000)  # S_IFMT
            parts.append(_when_equal(number, kind + devices + allow))
    for name, (number, argument) in target.on_self.items():
        by_process = _when_equal(0, allow) + refuse if shared else _when_equal(_GUEST_PID, refuse) + allow
        decision = _instruction(_LOAD, argument) + by_process
        if name in _BY_USER:
            decision = _instruction(_LOAD, _ARG0) + _when_equal(_BY_USER[name], refuse) + decision
        parts.append(_when_equal(number, decision))
    parts += [_when_equal(number, absent) for number in _ABSENT.values()]
    no_namespace = _instruction(_ANY_BIT, _NEW_NAMESPACES, 0, 1) + refuse + allow
    parts.append(_when_equal(target.clone, _instruction(_LOAD, _ARG0) + no_namespace))
    no_typing = _when_equal(_TIOCSTI, refuse) + _when_equal(_TIOCLINUX, refuse) + allow
    parts.append(_when_equal(target.ioctl, _instruction(_LOAD, _ARG1) + no_typing))
    families = b"".join(_when_equal(family, allow) for family in _ALLOWED_FAMILIES)
    route = _when_equal(_NETLINK, _instruction(_LOAD, _ARG2) + _when_equal(0, allow) + no_family)
    parts.append(_when_equal(target.socket, _instruction(_LOAD, _ARG0) + families + route + no_family))
    return b"".join([*parts, allow])
