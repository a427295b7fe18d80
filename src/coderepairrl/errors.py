"""Errors, named by the boundary where they arise.

A `Fault` is an infrastructure failure: its episode is void, retried and counted, never a zero reward. Other errors
lie in the user's input or the machine, and end the command with their exit code.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

from coderepairrl.printable import logged, remove_login


class ExitCode(IntEnum):
    """Exit code of a `crrl` command."""

    DONE = 0
    RUN_FAILED = 1
    USAGE = 2
    PREREQUISITE = 3
    HEALTH_GATE = 4
    INTERRUPTED = 130  # 128 + SIGINT, as in shells, for any signal


class CodeRepairError(Exception):
    """Base of all errors raised on purpose.

    `fix` is one sentence on what to do, printed below the message. Logins in URLs are removed: errors are recorded.
    """

    exit_code: ExitCode = ExitCode.RUN_FAILED

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(remove_login(message))
        self.fix = remove_login(fix)

    @property
    def problems(self) -> tuple[CodeRepairError, ...]:
        """Itself, or the errors that it combines."""
        return (self,)


class CombinedError(CodeRepairError):
    """Several errors at once; the exit code is the first's."""

    def __init__(self, problems: Sequence[CodeRepairError]) -> None:
        super().__init__("\n".join(map(str, problems)), fix="\n".join(filter(None, (each.fix for each in problems))))
        self._problems = tuple(problems)
        self.exit_code = problems[0].exit_code

    @property
    def problems(self) -> tuple[CodeRepairError, ...]:
        """The combined errors."""
        return self._problems

    def __reduce__(self) -> tuple[type[CombinedError], tuple[tuple[CodeRepairError, ...]]]:
        return CombinedError, (self.problems,)


def combine_errors(problems: Sequence[CodeRepairError]) -> CodeRepairError:
    """Combine `problems` (at least one) without repetitions, sorted by exit code.

    >>> combine_errors([PrerequisiteError("no sandbox works here"), ConfigError("no such reward")]).exit_code
    <ExitCode.USAGE: 2>
    """
    flat = [part for each in problems for part in each.problems]
    flat = list({(type(each), str(each), each.fix): each for each in flat}.values())
    flat.sort(key=lambda each: each.exit_code)
    return flat[0] if len(flat) == 1 else CombinedError(flat)


_INACCESSIBLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP}


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Turn errors into an exit code and a line on stderr.

    Catches our errors, Ctrl-C, inaccessible paths, ``~`` of unknown users, and JSON or TOML nested too deep for Python.
    Anything else is a bug and keeps its traceback.
    """
    try:
        yield
    except CodeRepairError as error:
        for each in error.problems:
            print(f"error: {logged(str(each))}", file=sys.stderr)
            if each.fix:
                print(f"  fix: {logged(replace_crrl(each.fix))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:  # the user's paths are opened in many places, and caught here
        if error.errno not in _INACCESSIBLE or error.filename is None:
            raise
        print(f"error: {logged(os.fsdecode(error.filename))}: {error.strerror}", file=sys.stderr)
        sys.exit(ExitCode.USAGE)
    except RecursionError as error:
        *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
        if innermost.f_globals["__name__"].partition(".")[0] not in ("json", "tomllib"):
            raise
        print("error: a file that was read is nested too deep", file=sys.stderr)
        print("  fix: look for thousands of brackets in the JSON and TOML that the command names", file=sys.stderr)
        sys.exit(ExitCode.USAGE)
    except RuntimeError as error:
        if str(error) != "Could not determine home directory.":  # from `Path.expanduser`
            raise
        print("error: a path begins with ~ and an unknown user name", file=sys.stderr)
        print("  fix: write the folder out: /home/NAME/...", file=sys.stderr)
        sys.exit(ExitCode.USAGE)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)


def replace_crrl(text: str) -> str:
    """Replace ``crrl`` by the path of this program if it is not on PATH, as under ``make hello``."""
    program = Path(sys.argv[0])
    if program.name != "crrl" or shutil.which("crrl"):
        return text
    path = shlex.quote(str(program))
    # commands alone, as "crrl train"; by a function, since backslashes in `path` would be escapes
    return re.sub(r"\bcrrl (?=[a-z])", lambda _: f"{path} ", text)


class ConfigError(CodeRepairError):
    """Invalid configuration: unknown key, bad value, contradictory fields."""

    exit_code = ExitCode.USAGE


class UsageError(CodeRepairError):
    """Unusable input: a missing file, a malformed diff, a folder that is not a run."""

    exit_code = ExitCode.USAGE


class TaskError(CodeRepairError):
    """Unusable task: no git repository, dirty, unreadable, unknown commit."""

    exit_code = ExitCode.USAGE


class PrerequisiteError(CodeRepairError):
    """Missing prerequisite; `fix` is the command that installs it."""

    exit_code = ExitCode.PREREQUISITE


class RunError(CodeRepairError):
    """The run cannot continue: full disk, corrupt log, learner that does not restart."""


class HealthGateError(CodeRepairError):
    """A health gate stopped the run (say, too many void episodes)."""

    exit_code = ExitCode.HEALTH_GATE


class Fault(CodeRepairError):
    """Infrastructure failure: its episode is VOID, never a zero reward."""

    boundary = "unknown"


class SandboxFault(Fault):
    """The sandbox did not open, died, or broke its protocol."""

    boundary = "sandbox"


class EngineFault(Fault):
    """The engine died, refused a load, or gave an impossible answer."""

    boundary = "engine"


class RemoteFault(Fault):
    """A third-party model server is unreachable, refuses, or answers invalidly."""

    boundary = "remote"


class GatewayFault(Fault):
    """The gateway itself failed to serve a call."""

    boundary = "gateway"


class AgentFault(Fault):
    """The agent program broke (crash, missing executable).

    `how` is ``exit 1``, ``SIGSEGV`` or the like; `printed` is the program's output. Before the model's first reply the
    episode is VOID; afterwards it ends in CRASH, with a score: the policy may be the cause.
    """

    boundary = "agent"

    def __init__(self, message: str, *, fix: str = "", how: str = "error", printed: str = "") -> None:
        super().__init__(message, fix=fix)
        self.how = how
        self.printed = printed


class RewardFault(Fault):
    """A reward could not be computed, which is not a zero."""

    boundary = "reward"


class GraderFault(RewardFault):
    """Checks cannot run with any patch: a needed program or module is missing."""


class UnjudgedPatch(GraderFault):
    """The checks cannot judge this patch, only others. An attempt earns 0 for it."""


class WorkerFault(Fault):
    """A worker that makes episodes, or its machine, was lost."""

    boundary = "worker"


class LearnerFault(Fault):
    """The learner died or refused a batch."""

    boundary = "learner"
