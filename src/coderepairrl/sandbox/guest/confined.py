"""The guest inside sandlock."""

from __future__ import annotations

import os
import struct

from coderepairrl.sandbox.guest.frames import Control
from coderepairrl.sandbox.guest.kernel import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, refuse_calls, signal
from coderepairrl.sandbox.guest.service import RESTORED, Guest

LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
PATH_BENEATH, FS_REFER, SCOPES = 1, 1 << 13, 3  # of abstract Unix sockets and signals


class Confined(Guest):
    """A guest that shares the host's process ids; ``kill(-1)`` reaches our Landlock domain, which is the sandbox."""

    def __init__(self, control: Control, rules: str) -> None:
        super().__init__(control)
        self.alone = True
        # Any domain denies links and renames between folders unless it allows them: this one does, everywhere.
        attributes = struct.pack("QQQ", FS_REFER, 0, SCOPES)
        self.ruleset = self._checked(self.libc.syscall(LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0))
        os.set_inheritable(self.ruleset, False)
        root = os.open("/", os.O_PATH)
        beneath = struct.pack("=Qi", FS_REFER, root)
        self._checked(self.libc.syscall(LANDLOCK_ADD_RULE, self.ruleset, PATH_BENEATH, beneath, 0))
        os.close(root)
        with open(rules, "rb") as file:
            refuse_calls(file.read())

    def _prepare(self) -> None:
        import ctypes

        self.libc = ctypes.CDLL(None, use_errno=True)
        signal.signal(signal.SIGTERM, self.end)
        self._checked(self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
        self._checked(self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0))

    def _checked(self, result: int) -> int:
        if result < 0:
            import ctypes

            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result

    def end(self, *_: object) -> None:
        """Kill everything, which is still permitted once the supervisor is gone."""
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
                self._checked(self.libc.syscall(LANDLOCK_RESTRICT_SELF, self.ruleset, 0))
                for number in RESTORED:
                    signal.signal(number, signal.SIG_DFL)
                for target, source in enumerate((stdin, stdout, stdout)):
                    os.dup2(source, target)
                os.execve(program, argv, env)
            except (OSError, ValueError) as error:
                os.write(failure, struct.pack("I", getattr(error, "errno", None) or 22))
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
