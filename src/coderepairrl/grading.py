"""A patch and the task's checks in a fresh sandbox: apply, restore, run. What a task's exam and the rewards share.

Each function says what is wrong with the patch, or nothing; faults of the sandbox are raised as `SandboxFault`.

A check that ends early is not one that passes: repaired code that calls ``sys.exit(0)`` or ``os._exit(0)``, or has the
exit code changed at exit, would make any script end well. So a Python script (``python3 [flags] check.py``) runs under
a witness, which says a word that was drawn for this run after the script's last line, and only then. Code under test
shares the script's process, so this stops cheap tricks and not a determined one (objects equal to everything, say).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import PurePosixPath

from coderepairrl.errors import SandboxFault
from coderepairrl.protocols import Sandbox
from coderepairrl.types import Checks, ExecResult

_APPLY = ("git", "-c", "safe.directory=*", "-c", "core.autocrlf=false", "apply", "--whitespace=nowarn", "-")
_APPLY_SECONDS = 60.0
_REFUSED = (1, 128)
"""Exit codes of a git that read the patch and does not take it."""
_SHOWN = 200

_WITNESS = """
def _witness():
    import sys
    alone = sys.path[:1] != [""]  # isolated: a script's folder is no place for modules either
    if not alone:
        del sys.path[0]  # or a file of the patch could stand in for os
    import os
    word, *own = sys.stdin.buffer.read().decode().split("\\n")
    script, here = sys.argv[1], os.getcwd() + os.sep
    del sys.argv[0]
    if not alone:
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    own = {os.path.abspath(path) for path in (script, *own)}
    space = globals()
    del space["_witness"]
    space["__file__"] = script
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec", dont_inherit=True)
    say, quit, path, write = sys.stdout.flush, os._exit, os.path.abspath, os.write
    try:
        exec(code, space)
    except SystemExit as end:
        if end.code not in (None, 0, False):
            raise
        frame, last = end.__traceback__, ""
        while frame:
            name = path(frame.tb_frame.f_code.co_filename)
            last = name if name.startswith(here) else last
            frame = frame.tb_next
        if last and last not in own:
            write(2, ("\\n" + last[len(here):] + " ended the check").encode())
            quit(1)
    say()
    write(1, ("\\n" + word).encode())

_witness()
"""


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
        word, argv = secrets.token_hex(16), _witnessed(command.argv)
        stdin = "\n".join((word, *checks.restore)).encode("utf-8", "surrogateescape") if argv else b""
        result = await sandbox.exec(argv or command.argv, stdin=stdin, timeout=command.timeout)
        said = _said(result)
        if not result.ok:
            how = f"no end within {command.timeout:g} s" if result.timed_out else f"exit code {result.exit_code}"
        elif argv and not said.endswith(word):
            how = "it printed too much" if result.truncated else "it ended before its last line"
        else:
            continue
        last = said.replace(word, "").strip().rpartition("\n")[2][:_SHOWN]
        return f"check failed ({how}): {' '.join(command.argv)}" + (f": {last}" if last else "")
    return ""


def _witnessed(argv: Sequence[str]) -> list[str]:
    """The command that runs a Python script under the witness; nothing for another command."""
    if not PurePosixPath(argv[0]).name.startswith("python"):
        return []
    at = next((at for at, word in enumerate(argv) if at and not word.startswith("-")), 0)
    if not at or not argv[at].endswith(".py") or any(flag in ("-c", "-m", "-X", "-W") for flag in argv[1:at]):
        return []
    return [*argv[:at], "-c", _WITNESS, *argv[at:]]


async def judge(sandbox: Sandbox, checks: Checks) -> str:
    """`restore`, then `run`."""
    return await restore(sandbox, checks) or await run(sandbox, checks)


def _said(result: ExecResult) -> str:
    return result.output.decode("utf-8", "replace").strip()
