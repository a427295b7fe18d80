"""Witnesses: a test run in Python, Node or Java reports its own results, beside a random word that was drawn for it.

A check that ends early is not one that passes: repaired code that calls ``sys.exit(0)`` or ``os._exit(0)``, or has the
exit code changed at exit, would make any script end well, and printed lines would make any log. So

- a script (``python3 [flags] check.py``) runs under one that prints the word after its last line, and only then;
- ``python3 [flags] -m unittest ...`` under one that prints the outcome of each test beside the word;
- JUnit 4 without a build tool (`tasks.junit`) under a program that does the same;
- pytest, however it is started, with a plugin that writes the outcomes and the word to a file outside of the workspace.

Those of unittest and pytest also end a test that takes longer than it may (`Clock`): it has failed, and the others
still run.

What they need of Python and its runners is imported before any folder of the workspace is on the path, and the word is
gone from input and disk before any code under test is loaded (`programs`). They notice where that code changes the
runner, skips a test, or expects it to fail. It shares the process, so this stops cheap tricks and not a determined one
(objects equal to everything, memory that is read).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from coderepairrl.errors import SandboxFault
from coderepairrl.grading import programs
from coderepairrl.grading.reports import Outcome, Outcomes
from coderepairrl.protocols import Sandbox
from coderepairrl.types import Checks, Command

JUNIT_FILE = "CrrlWitness.java"
"""The program for JUnit 4, among the files of checks (`programs.JUNIT`) that a command compiles."""
ENDED_EARLY = 86
"""Exit code of a guarded command of Node of which a process did not end well: then no outcome of it counts."""


def limits(command: Command) -> str:
    """How long each test may take (0: half of what is left), and all of them together, in seconds."""
    return f"{command.test_timeout:.6f} {command.timeout:.6f}"


class Report(NamedTuple):
    """What a witness reports: whether the runner itself counts the run as passed, and the outcome of each test."""

    ok: bool
    outcomes: Outcomes


def new_word() -> str:
    """A word that cannot be guessed: 128 random bits."""
    return secrets.token_hex(16)


def facts(sandbox: Sandbox, checks: Checks, word: str) -> bytes:
    """The input of a witness, a line each: `word`, the workspace, and the files in it that belong to the checks."""
    return "\n".join((word, sandbox.workdir, *checks.restore)).encode("utf-8", "surrogateescape")


def node(argv: Sequence[str], workdir: str, checks: Checks) -> tuple[list[str], bytes]:
    """The command and its input with which Node's test runner runs, its tests' processes guarded against early ends."""
    own = [*checks.restore]
    guard = programs.NODE.replace("ABOUT", json.dumps({"root": workdir, "own": own, "guess": not own}))
    at = _program_at(argv)
    return [*argv[:at], "sh", "-c", programs.WITH_GUARD, "sh", *argv[at:]], guard.encode()


def script(argv: Sequence[str]) -> list[str]:
    """The command that runs a Python script under the witness; nothing for another command."""
    begin = _program_at(argv)
    at = _first_word(argv[begin:])
    if not at or not argv[begin + at].endswith(".py"):
        return []
    return [*argv[: begin + at], "-c", programs.SCRIPT, *argv[begin + at :]]


def unittest(argv: Sequence[str]) -> list[str]:
    """The command that runs ``python -m unittest`` under the witness; nothing for another command."""
    at = _module(argv, "unittest")
    return [*argv[:at], "-c", programs.UNITTEST, *argv[at + 2 :]] if at else []


def junit(argv: Sequence[str]) -> list[str]:
    """The command that runs our own program for JUnit 4, as it is; nothing for another command."""
    return [*argv] if JUNIT_FILE in argv else []


def results_of(argv: Sequence[str]) -> str:
    """Which runner with a witness the command starts by itself: ``pytest``, ``unittest``, or nothing.

    Nothing, too, for a pytest that runs no test, and for one whose Python is started by something else and ignores the
    environment that brings the plugin.

    >>> [results_of(line.split()) for line in ("python3 -m pytest -q", "env A=1 pytest", "python3 -I -m unittest")]
    ['pytest', 'pytest', 'unittest']
    >>> [results_of(line.split()) for line in ("make test", "nice python3 -I -m pytest", "pytest --co")]
    ['', '', '']
    """
    if unittest(argv):
        return "unittest"
    at = next((at for at, word in enumerate(argv) if PurePosixPath(word).name in _PYTESTS), -1)
    if at < 0 or _NO_TESTS & set(argv[at:]):
        return ""
    if _module(argv, "pytest"):
        return "pytest"
    before, python = argv[_program_at(argv) : at], False
    for number, word in enumerate(before):
        name = PurePosixPath(word).name
        python = python or name.startswith("python")
        value = number and before[number - 1] in ("-W", "-X")
        if not (word.startswith("-") or value or name in _STARTERS or name.startswith("python")):
            return ""
        if python and _ISOLATED.fullmatch(word):
            return ""
    return "pytest"


def _module(argv: Sequence[str], name: str) -> int:
    """Where ``-m name`` stands in a call of Python; 0 for other commands."""
    begin = _program_at(argv)
    call = argv[begin:]
    if not _is_python(call) or "-m" not in call:
        return 0
    at = call.index("-m")
    if list(call[at : at + 2]) != ["-m", name] or _first_word(call[:at]) or _takes_value(call[:at]):
        return 0
    return begin + at


_PYTESTS = ("pytest", "py.test")
_STARTERS = ("uv", "poetry", "pipenv", "pdm", "hatch", "coverage", "run", "nice", "xvfb-run")
"""Words that may stand before a pytest that they start."""
_NO_TESTS = {"--co", "--collect-only", "--version", "-V", "--help", "-h", "--fixtures", "--markers"}
_ISOLATED = re.compile(r"-[A-Za-z]*[EI][A-Za-z]*")


def _program_at(argv: Sequence[str]) -> int:
    """Count the words before the program: ``env`` and what it sets, or a shell's line that prepares it.

    >>> _program_at(["env", "A=1", "pytest"])
    2
    >>> _program_at(["sh", "-c", 'touch a </dev/null && exec "$@"', "sh", "pytest"])
    4
    """
    if len(argv) > 4 and [*argv[:2], argv[3]] == ["sh", "-c", "sh"] and _PREPARES.fullmatch(argv[2]):
        return 4
    if PurePosixPath(argv[0]).name != "env":
        return 0
    return next((at for at, word in enumerate(argv) if at and not re.fullmatch(r"-i|\w+=.*", word, re.DOTALL)), 0)


_PREPARES = re.compile(r"""(?:[^;&|<>\n]+ </dev/null && )+exec "\$@\"""")
"""Shell lines that do not read the input, which holds the word."""


def _is_python(argv: Sequence[str]) -> bool:
    return bool(argv) and PurePosixPath(argv[0]).name.startswith("python")


def _takes_value(argv: Sequence[str]) -> bool:
    return any(flag in ("-c", "-m", "-X", "-W") for flag in argv[1:])


def _first_word(argv: Sequence[str]) -> int:
    """Where the script's name stands in a call of Python; 0 where there is none, or where options take values."""
    if not _is_python(argv):
        return 0
    at = next((at for at, word in enumerate(argv) if at and not word.startswith("-")), 0)
    return 0 if _takes_value(argv[:at]) else at


class Plugin(NamedTuple):
    """The plugin for pytest, ready in a folder of the sandbox."""

    folder: str
    name: str
    word: str

    @classmethod
    async def prepare(cls, sandbox: Sandbox, command: Command, checks: Checks) -> Plugin:
        """Put it there, with the time limits of `command`. Raises `SandboxFault`."""
        name, word = f"crrl_{secrets.token_hex(4)}", new_word()
        first = facts(sandbox, checks, f"{word} {limits(command)}")
        start = programs.START.replace("PLUGIN", name).encode()
        sizes = (str(len(first)), str(len(start)))
        stdin = first + start + programs.PYTEST.encode()
        made = await sandbox.exec(["sh", "-c", programs.PREPARE, name, *sizes], stdin=stdin, cwd="/")
        folder = made.output.decode("utf-8", "surrogateescape").strip()
        if not made.ok or not folder.startswith("/"):
            raise SandboxFault(f"no temporary folder in the sandbox: {folder[:200]}", fix="it needs sh and mktemp")
        return cls(folder, name, word)

    def command(self, argv: Sequence[str], workdir: str) -> list[str]:
        """`argv` with the plugin in the first pytest that it starts; ``env`` goes before, or it might unset ours."""
        at, alone = _program_at(argv), _module(argv, "pytest")
        if alone and any(_ISOLATED.fullmatch(word) for word in argv[at:alone]):
            argv = [
                *argv[:alone],
                "-c",
                programs.PYTEST_ALONE.replace("PLUGIN", self.name),
                self.folder,
                *argv[alone + 2 :],
            ]
        return [*argv[:at], "sh", "-c", programs.WITH_PLUGIN, self.folder, self.name, workdir, *argv[at:]]

    async def report(self, sandbox: Sandbox, max_bytes: int) -> Report:
        """What it wrote; a failed run without outcomes where pytest did not end by itself. The folder is removed."""
        read = await sandbox.exec(["cat", f"{self.folder}/outcomes"], max_bytes=max_bytes)
        await sandbox.exec(["rm", "-rf", self.folder])
        return parse(read.output, self.word) if read.ok else Report(False, {})


def before(output: bytes, word: str) -> bytes:
    """`output` up to the report beside `word`."""
    return output.partition(b'\n{"word": ' + json.dumps(word).encode())[0]


def parse(output: bytes, word: str) -> Report:
    """The report that stands in `output` beside `word`; a failed run without outcomes where there is none.

    >>> parse(b'so long {"word": "w", "ok": true, "outcomes": {"t": 0}} bye', "w")
    Report(ok=True, outcomes={'t': <Outcome.PASSED: 0>})
    >>> parse(b'{"word": "guess", "ok": true, "outcomes": {"t": 0}}', "w")
    Report(ok=False, outcomes={})
    """
    text = output.decode("utf-8", "replace")
    at = text.rfind('{"word": ' + json.dumps(word))
    try:
        found: Any = json.JSONDecoder().raw_decode(text, at)[0] if at >= 0 else {}
        return Report(found["ok"] is True, {str(name): Outcome(value) for name, value in found["outcomes"].items()})
    except (KeyError, ValueError, AttributeError, TypeError, RecursionError):
        return Report(False, {})
