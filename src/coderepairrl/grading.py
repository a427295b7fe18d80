"""A patch and the task's checks in a fresh sandbox: apply, restore, run. What a task's exam and the rewards share.

Each function says what is wrong with the patch, or nothing; faults of the sandbox are raised as `SandboxFault`.
"""

from __future__ import annotations

from coderepairrl.errors import SandboxFault
from coderepairrl.protocols import Sandbox
from coderepairrl.types import Checks, ExecResult

_APPLY = ("git", "-c", "safe.directory=*", "-c", "core.autocrlf=false", "apply", "--whitespace=nowarn", "-")
_APPLY_SECONDS = 60.0
_REFUSED = (1, 128)
"""Exit codes of a git that read the patch and does not take it."""
_SHOWN = 200


async def apply(sandbox: Sandbox, patch: bytes) -> str:
    """Apply `patch`; why it does not apply, or nothing. Raises `SandboxFault` for a sandbox without a working git."""
    result = await sandbox.exec(_APPLY, stdin=patch, timeout=_APPLY_SECONDS)
    if result.ok:
        return ""
    said = _said(result).partition("\n")[0][:_SHOWN]
    if result.timed_out or result.exit_code not in _REFUSED:
        how = "ran out of time" if result.timed_out else f"exited with {result.exit_code}"
        raise SandboxFault(f"`git apply` {how} in the sandbox: {said}", fix="the sandbox needs git")
    return f"the patch does not apply: {said}"


async def restore(sandbox: Sandbox, checks: Checks) -> str:
    """Put the checks' own files back; why that is impossible, or nothing."""
    for path, content in checks.restore.items():
        try:
            await sandbox.write(path, content.encode("utf-8", "surrogateescape"))
        except OSError as error:  # the patch made a folder, a link out of the workspace, ... of it
            return f"the patch leaves no way to restore {path}: {error}"
    return ""


async def run(sandbox: Sandbox, checks: Checks) -> str:
    """Run the checks in order up to the first that fails: which one, how, and what it said last; or nothing."""
    for command in checks.commands:
        result = await sandbox.exec(command.argv, timeout=command.timeout)
        if not result.ok:
            how = f"no end within {command.timeout:g} s" if result.timed_out else f"exit code {result.exit_code}"
            last = _said(result).rpartition("\n")[2][:_SHOWN]
            return f"check failed ({how}): {' '.join(command.argv)}" + (f": {last}" if last else "")
    return ""


async def judge(sandbox: Sandbox, checks: Checks) -> str:
    """`restore`, then `run`."""
    return await restore(sandbox, checks) or await run(sandbox, checks)


def _said(result: ExecResult) -> str:
    return result.output.decode("utf-8", "replace").strip()
