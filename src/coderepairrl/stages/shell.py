"""``crrl tasks shell``: a shell or a command in the sandbox of a task (docs/guides/tasks.md)."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from coderepairrl import grading
from coderepairrl.errors import SandboxFault, TaskError, UsageError
from coderepairrl.processes.scratch import scratch
from coderepairrl.protocols import Sandbox, SandboxBackend
from coderepairrl.stages.trace import print_bytes
from coderepairrl.tasks.catalog import suggest_task_ids
from coderepairrl.tasks.prepare import find_missing_needs
from coderepairrl.types import Task

_TIMEOUT_SECONDS = 86_400.0  # A day.
_MAX_BYTES = 64 << 20  # Of the output of a command without a terminal, which is held in memory.
_SHELL = ("sh", "-c", "exec $(command -v bash || command -v sh)")
# Runs its arguments with the Python of the sandbox; without one, the error names python3.
_PYTHON = 'exec "$(command -v python3 || command -v python || echo python3)" -c "$@"'
_PSEUDOTERMINAL = """
import fcntl, os, pty, select, socket, struct, sys, termios
port, rows, columns = map(int, sys.argv[1:4])
link = socket.create_connection(("127.0.0.1", port))
child, terminal = pty.fork()
if not child:
    fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))
    os.execvp(sys.argv[4], sys.argv[4:])
while True:
    ready = select.select([link, terminal], [], [])[0]
    if terminal in ready:
        try:
            link.sendall(os.read(terminal, 1 << 16))
        except OSError:
            break
    elif not (typed := link.recv(1 << 16)):
        break
    else:
        os.write(terminal, typed)
os.close(terminal)
status = os.waitpid(child, 0)[1]
sys.exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))
"""
"""Program in the sandbox: runs a command on a new pseudoterminal, connected to a port of the loopback."""


def find_task(tasks: Iterable[Task], source: str, task_id: str, *, checks: bool = False) -> Task:
    """Find the task `task_id` of `source`; with `checks`, in the workspace of its checks if they have one.

    Raises `UsageError` for an unknown task or one without a workspace, `TaskError` for one that is not prepared.
    """
    by_id = {task.id: task for task in tasks}
    if task_id not in by_id:
        raise UsageError(f"{source} has no task {task_id}", fix=suggest_task_ids(task_id, list(by_id)))
    task = by_id[task_id]
    if checks:
        task = replace(task, workspace=task.checks.workspace or task.workspace)
    if not task.workspace:
        raise UsageError(f"{task_id} is a question without a workspace", fix="choose a task with a repository")
    if lacks := find_missing_needs([task])[task_id]:
        raise TaskError(f"{task_id} is not prepared: it lacks {', '.join(lacks)}", fix=f"crrl tasks prepare {source}")
    return task


async def open_shell(
    task: Task,
    backend: SandboxBackend,
    command: Sequence[str] = (),
    *,
    checks: bool = False,
    say: Callable[[str], None],
) -> int:
    """Run `command` (default: a shell) in a fresh sandbox of `task`; return its exit code.

    With `checks`, their files are restored first. On a terminal it runs interactively; else stdin is the script of the
    shell, and output is printed at the end. Raises `TaskError` and `SandboxFault`.
    """
    async with backend.open(task) as box:
        if checks and (problem := await grading.restore_files(box, task.checks)):
            raise TaskError(problem, fix="crrl tasks verify examines the source")
        say(f"{task.id}: {box.workdir} in {backend.name}; changes are discarded")
        if sys.stdin.isatty() and sys.stdout.isatty():
            return await _interact(box, command or _SHELL)
        script = b"" if command or sys.stdin.isatty() else await asyncio.to_thread(sys.stdin.buffer.read)
        result = await box.exec(command or _SHELL, stdin=script, timeout=_TIMEOUT_SECONDS, max_bytes=_MAX_BYTES)
        print_bytes(result.output, sys.stdout)
        if result.truncated:
            say(f"the output is cut after {_MAX_BYTES >> 20} MiB")
        return result.exit_code


async def _interact(box: Sandbox, command: Sequence[str]) -> int:
    """Connect this terminal to one in the sandbox; return the exit code of `command`."""
    loop, connected, ended = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    async def serve_terminal(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def send_typed() -> None:
            if data := os.read(0, 1 << 16):
                writer.write(data)
            else:  # the terminal is gone
                loop.remove_reader(0)
                writer.write_eof()

        if connected.is_set():  # another program of the sandbox must not read what is typed
            writer.close()
            return
        connected.set()
        before = termios.tcgetattr(0)
        tty.setraw(0)
        loop.add_reader(0, send_typed)
        try:
            while data := await reader.read(1 << 16):
                os.write(1, data)
        finally:
            loop.remove_reader(0)
            termios.tcsetattr(0, termios.TCSADRAIN, before)
            writer.close()
            ended.set()

    with scratch("shell") as home:
        address = home / "terminal.sock"
        async with await asyncio.start_unix_server(serve_terminal, address):
            port = (await box.reach(str(address))).rpartition(":")[2]
            columns, rows = os.get_terminal_size(1)
            argv = ["sh", "-c", _PYTHON, "sh", _PSEUDOTERMINAL, port, str(rows), str(columns), *command]
            result = await box.exec(argv, env={"TERM": os.environ.get("TERM", "dumb")}, timeout=_TIMEOUT_SECONDS)
            if connected.is_set():
                await ended.wait()
    if not connected.is_set():
        output = result.output.decode("utf-8", "replace").strip()
        raise SandboxFault(f"the sandbox gave no terminal: {output}", fix="crrl tasks shell SOURCE ID -- COMMAND")
    return result.exit_code
