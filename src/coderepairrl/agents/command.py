"""`command`: any unmodified program as an agent in the sandbox, described by a `Recipe`.

It reaches only the gateway's socket, bridged to the sandbox's loopback.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from coderepairrl.agents.recipe import Recipe, install_folder, installed_versions
from coderepairrl.agents.texts import build_options, fill_template
from coderepairrl.errors import AgentFault, PrerequisiteError
from coderepairrl.protocols import Agent, Sandbox
from coderepairrl.types import AgentReport, Endpoint, ExecResult, Task

_CANNOT_RUN = (126, 127)  # a shell's exit codes: not executable, not found
_SETUP_SECONDS = 30.0
_MESSAGE_CHARS = 2_000  # the end of the output, in an error message
_MISSING_MODULE = re.compile(r"^ModuleNotFoundError: No module named '([\w.]+)'\s*\Z", re.MULTILINE)  # last line
_INSTALL_FIX = (
    'in its recipe argv = ["{install}/venv/bin/python", ...] and [install] pip = ["PACKAGE==VERSION"], '
    "then crrl agents install RECIPE"
)
_REMOVE_SCRIPT = 'rm -rf -- "$@" 2>/dev/null || { chmod -R u+rwx -- "$@"; rm -rf -- "$@"; }'
"""Also removes unwritable folders: an agent that makes some must not count as crashed."""
_WRITE_SCRIPT = 'mkdir -p "$(dirname "$1")" && cat > "$1"'


class Program(Agent):
    """The program of `recipe` as an agent, installed by ``crrl agents install SOURCE``.

    Raises `PrerequisiteError` if not installed.
    """

    placement: Literal["host", "sandbox"] = "sandbox"

    def __init__(self, name: str, recipe: Recipe, source: str = "") -> None:
        self.name = name
        self.recipe = recipe
        self.not_in = recipe.not_in
        self.side_calls = recipe.side_calls
        self.dialect = recipe.dialect
        if recipe.install:
            if installed_versions(name, recipe) is None:
                fix = f"crrl agents install {source}" if source else "put the recipe into a file, and install that"
                raise PrerequisiteError(f"agent {name!r} is not installed", fix=fix)
            self.binds = (str(install_folder(name, recipe)),)

    async def run(self, task: Task, sandbox: Sandbox, endpoint: Endpoint) -> AgentReport:
        """Run the program until it exits or time is up.

        The report's `exit` is ``submitted`` or ``time``, its `log` the output. Raises `SandboxFault`, and `AgentFault`
        for a program that cannot run or has another exit code than the recipe's.
        """
        recipe, deadline = self.recipe, time.monotonic() + endpoint.limits.seconds
        base = endpoint.base_url.rstrip("/")
        if endpoint.socket:
            base = await sandbox.reach(endpoint.socket) + urlsplit(base).path
        home = (await _exec_or_fail(sandbox, ["mktemp", "-d"])).output.decode().strip()
        values = {
            "base_url": base,
            "root_url": base.removesuffix("/v1"),
            "api_key": endpoint.api_key,
            "model": endpoint.model,
            "prompt": task.prompt,
            "prompt_file": f"{home}/prompt.txt",
            "home": home,
            "workdir": sandbox.workdir,
            "install": self.binds[0] if self.binds else "",
            "calls": endpoint.limits.calls,
            "tokens": endpoint.limits.tokens,
            "turn_tokens": endpoint.limits.turn_tokens,
            "seconds": f"{endpoint.limits.seconds:g}",
        }
        files = {
            "prompt.txt": task.prompt,
            **{path: fill_template(text, **values) for path, text in recipe.files.items()},
        }
        for path, text in files.items():
            await _exec_or_fail(sandbox, ["sh", "-c", _WRITE_SCRIPT, "sh", f"{home}/{path}"], text.encode())
        done = await sandbox.exec(
            [fill_template(part, **values) for part in recipe.argv],
            env={"HOME": home, **{name: fill_template(value, **values) for name, value in recipe.env.items()}},
            stdin=fill_template(recipe.stdin, **values).encode(),
            timeout=max(0.0, deadline - time.monotonic()),
            max_bytes=recipe.output_bytes,
        )
        log = done.output.decode("utf-8", "replace")
        await _exec_or_fail(sandbox, ["sh", "-c", _REMOVE_SCRIPT, "sh", home, *recipe.discard])
        if done.timed_out:
            return AgentReport("time", None, log)
        if done.exit_code not in recipe.exit_codes:
            failure = "cannot be run" if done.exit_code in _CANNOT_RUN else f"ended with exit code {done.exit_code}"
            if missing := _MISSING_MODULE.search(log):
                failure += f", as the Python module {missing[1]} is not installed ({_INSTALL_FIX})"
            message = f"{self.name} {failure}: {log[-_MESSAGE_CHARS:].strip()}"
            raise AgentFault(message, how=_name_exit_code(done.exit_code), printed=log)
        return AgentReport("submitted", None, log)


class Command(Program):
    """The agent `command`. Takes the fields of `Recipe` by name."""

    def __init__(self, **options: Any) -> None:
        super().__init__("command", build_options(Recipe, "command", options))


def _name_exit_code(exit_code: int) -> str:
    """Name a shell's exit code.

    >>> _name_exit_code(1), _name_exit_code(139), _name_exit_code(255)
    ('exit 1', 'SIGSEGV', 'exit 255')
    """
    try:
        return signal.Signals(exit_code - 128).name
    except ValueError:
        return f"exit {exit_code}"


async def _exec_or_fail(sandbox: Sandbox, argv: Sequence[str], stdin: bytes = b"") -> ExecResult:
    done = await sandbox.exec(argv, stdin=stdin, timeout=_SETUP_SECONDS)
    if not done.ok:
        raise AgentFault(f"{argv[0]} failed in the sandbox ({done.exit_code}): {done.output.decode(errors='replace')}")
    return done
