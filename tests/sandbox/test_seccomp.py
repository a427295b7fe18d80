"""The filter, run by an interpreter of classic BPF: for both machines, whichever this one is."""

from __future__ import annotations

import errno
import struct

import pytest

from coderepairrl.errors import PrerequisiteError
from coderepairrl.sandbox import seccomp

ALLOW, KILL = 0x7FFF0000, 0x80000000
X86, ARM = 0xC000003E, 0xC00000B7


def verdict(program: bytes, arch: int, number: int, *args: int) -> int:
    data = struct.pack("<iIQ6Q", number, arch, 0, *(*args, *[0] * (6 - len(args))))
    code = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    at, accumulator = 0, 0
    while True:
        op, yes, no, k = code[at]
        at += 1
        if op == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif op == 0x54:
            accumulator &= k
        elif op == 0x06:
            return k
        else:
            holds = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[op]
            at += yes if holds else no


def refused(code: int) -> int:
    return 0x00050000 | code


both_machines = pytest.mark.parametrize(("machine", "arch"), [("x86_64", X86), ("aarch64", ARM)])


@both_machines
def test_dangerous_calls_are_refused_and_others_are_allowed(machine: str, arch: int) -> None:
    program = seccomp.assemble_filter(machine)
    here = seccomp._MACHINES[machine]
    assert len(program) % 8 == 0 and len(program) <= 4096
    for number in (here.denied | seccomp._SAME_NUMBERS).values():
        assert verdict(program, arch, number) == refused(errno.EPERM)
    for number in seccomp._ABSENT.values():
        assert verdict(program, arch, number) == refused(errno.ENOSYS)
    for family, answer in ((1, ALLOW), (2, ALLOW), (10, ALLOW), (16, ALLOW), (40, refused(97)), (17, refused(97))):
        assert verdict(program, arch, here.socket, family, 1, 0) == answer
    assert verdict(program, arch, here.socket, 16, 3, 12) == refused(97)  # netfilter's netlink
    assert verdict(program, arch, here.clone, 0x01200011) == ALLOW  # fork
    assert verdict(program, arch, here.clone, 0x003D0F00) == ALLOW  # a thread
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(program, arch, here.clone, flag | 17) == refused(errno.EPERM)
    assert verdict(program, arch, here.ioctl, 0, 0x5412) == refused(errno.EPERM)
    assert verdict(program, arch, here.ioctl, 0, 0xFFFFFFFF00005412) == refused(errno.EPERM)
    assert verdict(program, arch, here.ioctl, 0, 0x5401) == ALLOW
    assert verdict(program, arch ^ 0x40000000, 0) == KILL  # another architecture's numbers
    used = set((here.denied | seccomp._SAME_NUMBERS | seccomp._ABSENT).values())
    for number, which in here.on_self.values():
        position = (which - 16) // 8
        for pid, answer in ((0, ALLOW), (1234, ALLOW), (1, refused(errno.EPERM))):
            assert verdict(program, arch, number, *[0] * position, pid) == answer
    special = {here.clone, here.socket, here.ioctl, *(number for number, _ in here.on_self.values())}
    assert all(verdict(program, arch, n) == ALLOW for n in range(470) if n not in used | special)


@both_machines
def test_more_calls_are_refused_without_namespaces(machine: str, arch: int) -> None:
    program, plain = seccomp.assemble_filter(machine, shared=True), seccomp.assemble_filter(machine)
    here = seccomp._MACHINES[machine]
    further = set((here.shared | seccomp._SHARED_SAME).values())
    for number in further:
        assert verdict(program, arch, number) == refused(errno.EPERM)
        assert verdict(plain, arch, number) == ALLOW  # control
    for number, which in here.on_self.values():
        position = (which - 16) // 8
        for pid, answer in ((0, ALLOW), (1234, refused(errno.EPERM)), ((1 << 32) - 1, refused(errno.EPERM))):
            assert verdict(program, arch, number, *[7] * position, pid) == answer
    for name, whom in seccomp._BY_USER.items():
        assert verdict(program, arch, here.on_self[name][0], whom, 0) == refused(errno.EPERM)
        assert verdict(plain, arch, here.on_self[name][0], whom, 0) == refused(errno.EPERM)
    special = further | {number for number, _ in here.on_self.values()}
    assert all(verdict(program, arch, n) == verdict(plain, arch, n) for n in range(470) if n not in special)


def test_unknown_machines_and_the_x32_interface_are_refused() -> None:
    with pytest.raises(PrerequisiteError):
        seccomp.assemble_filter("riscv64")
    assert verdict(seccomp.assemble_filter("x86_64"), X86, 0x40000000 | 101) == refused(errno.ENOSYS)


@both_machines
def test_calls_of_root_succeed_without_effect_for_image_builders(machine: str, arch: int) -> None:
    program, plain = seccomp.assemble_filter(machine, root=True), seccomp.assemble_filter(machine)
    here = seccomp._MACHINES[machine]
    done = set((here.root | seccomp._ROOT_SAME).values())
    assert all(verdict(program, arch, number) == refused(0) for number in done)
    for number, which in here.nodes.values():
        before = [0] * ((which - 16) // 8)
        for kind, answer in ((0o020666, refused(0)), (0o060600, refused(0)), (0o010644, ALLOW), (0o644, ALLOW)):
            assert verdict(program, arch, number, *before, kind) == answer
    nodes = {number for number, _ in here.nodes.values()}
    assert all(verdict(program, arch, n) == verdict(plain, arch, n) for n in range(470) if n not in done | nodes)
    assert len(program) <= 4096
