"""Witnesses: what a test run in Python says of itself by a word that was drawn for it.

A check that ends early is not one that passes: repaired code that calls ``sys.exit(0)`` or ``os._exit(0)``, or has the
exit code changed at exit, would make any script end well, and printed lines would make any log. So

- a script (``python3 [flags] check.py``) runs under one that says the word after its last line, and only then;
- ``python3 [flags] -m unittest ...`` under one that gives the outcome of each test beside the word;
- pytest, however it is started, with a plugin that writes the outcomes and the word to a file outside of the workspace.

The word is gone from input and disk before any code under test is loaded. That code shares the process, so this stops
cheap tricks and not a determined one (objects equal to everything, patched assertions, a walk through the heap).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from coderepairrl.errors import SandboxFault
from coderepairrl.grading.reports import Outcome, Outcomes
from coderepairrl.protocols import Sandbox

_SCRIPT = """
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

_UNITTEST = """
def _witness():
    import sys
    alone = sys.path[:1] != [""]
    if not alone:
        del sys.path[0]  # or a file of the patch could stand in for unittest
    import json, os, unittest
    word, say, write, dump = sys.stdin.buffer.read().decode(), sys.stdout.flush, os.write, json.dumps
    if not alone:
        sys.path.insert(0, os.getcwd())
    del globals()["_witness"]
    found = {}

    def recording(name, outcome):
        inherited = getattr(unittest.TextTestResult, name)

        def method(self, test, *rest):
            found[test.id()] = max(outcome, found.get(test.id(), 0))
            inherited(self, test, *rest)

        return method

    kinds = {"addSuccess": 0, "addExpectedFailure": 0, "addSkip": 1}
    kinds.update(dict.fromkeys(("addFailure", "addError", "addUnexpectedSuccess"), 2))
    result = type("Result", (unittest.TextTestResult,), {name: recording(name, n) for name, n in kinds.items()})
    runner = type("Runner", (unittest.TextTestRunner,), {"resultclass": result})
    sys.argv[0] = "python -m unittest"
    ended = unittest.main(module=None, testRunner=runner, exit=False)
    well = ended.result.wasSuccessful()
    say()
    text = "\\n" + dump({"word": word, "ok": well, "outcomes": found})
    rest = text.encode()
    while rest:
        rest = rest[write(1, rest):]
    sys.exit(not well)

_witness()
"""

_PYTEST = """
def _recorder():
    import json, os, sys

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != here]
    for name in ("PYTHONPATH", "PYTEST_ADDOPTS"):  # what runs within the tests is not ours
        before = os.environ.pop("CRRL_" + name, None)
        if before:
            os.environ[name] = before
        else:
            os.environ.pop(name, None)
    try:
        with open(here + "/word") as file:
            word = file.read()
        os.unlink(here + "/word")
    except FileNotFoundError:
        return None  # a worker of xdist, which reports to its controller
    import pytest

    dump, opened, found, raised = json.dumps, open, {}, {}

    class Recorder:
        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_runtest_call(self, item):
            ended = yield
            raised[item.nodeid] = ended.excinfo is not None

        def pytest_runtest_logreport(self, report):
            marked = hasattr(report, "wasxfail") and "xfail" in report.keywords  # not by a call of pytest.xfail()
            if report.failed or (report.passed and report.when == "call" and raised.get(report.nodeid)):
                outcome = 2
            elif report.skipped and not marked:
                outcome = 1
            elif report.when == "call" or report.skipped:
                outcome = 0
            else:
                return
            found[report.nodeid] = max(outcome, found.get(report.nodeid, 0))

        def pytest_collectreport(self, report):
            if report.failed:
                found[report.nodeid] = 2

        def pytest_sessionfinish(self, exitstatus):
            with opened(here + "/outcomes", "w") as file:
                file.write(dump({"word": word, "ok": int(exitstatus) == 0, "outcomes": found}))

    return Recorder()


_recorder = _recorder()


def pytest_configure(config):
    if _recorder is not None:
        config.pluginmanager.register(_recorder)
"""
_PREPARE = """
umask 077
folder=$(mktemp -d) && read -r word && printf %s "$word" >"$folder/word" && cat >"$folder/$0.py" && echo "$folder"
"""
_PLUGGED = """
export CRRL_PYTHONPATH="$PYTHONPATH" CRRL_PYTEST_ADDOPTS="$PYTEST_ADDOPTS" PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH="$0${PYTHONPATH:+:$PYTHONPATH}" PYTEST_ADDOPTS="$PYTEST_ADDOPTS -p $1"
shift
exec "$@"
"""


class Said(NamedTuple):
    """What a witness says: whether the runner was content, and the outcome of each test."""

    ok: bool
    outcomes: Outcomes


def new_word() -> str:
    """A word that nobody can guess."""
    return secrets.token_hex(16)


def script(argv: Sequence[str]) -> list[str]:
    """The command that runs a Python script under the witness; nothing for another command."""
    at = _first_word(argv)
    if not at or not argv[at].endswith(".py"):
        return []
    return [*argv[:at], "-c", _SCRIPT, *argv[at:]]


def unittest(argv: Sequence[str]) -> list[str]:
    """The command that runs ``python -m unittest`` under the witness; nothing for another command."""
    if not _is_python(argv) or "-m" not in argv:
        return []
    at = argv.index("-m")
    if list(argv[at : at + 2]) != ["-m", "unittest"] or _first_word(argv[:at]) or _takes_value(argv[:at]):
        return []
    return [*argv[:at], "-c", _UNITTEST, *argv[at + 2 :]]


def _is_python(argv: Sequence[str]) -> bool:
    return PurePosixPath(argv[0]).name.startswith("python")


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
    async def prepare(cls, sandbox: Sandbox) -> Plugin:
        """Put it there. Raises `SandboxFault`."""
        name, word = f"crrl_{secrets.token_hex(4)}", new_word()
        made = await sandbox.exec(["sh", "-c", _PREPARE, name], stdin=f"{word}\n{_PYTEST}".encode())
        folder = made.output.decode("utf-8", "surrogateescape").strip()
        if not made.ok or not folder.startswith("/"):
            raise SandboxFault(f"no temporary folder in the sandbox: {folder[:200]}", fix="it needs sh and mktemp")
        return cls(folder, name, word)

    def command(self, argv: Sequence[str]) -> list[str]:
        """`argv` with the plugin in whichever pytest it starts first."""
        return ["sh", "-c", _PLUGGED, self.folder, self.name, *argv]

    async def outcomes(self, sandbox: Sandbox, max_bytes: int) -> Said:
        """What it wrote; not content, and nothing, where pytest did not end by itself. The folder is removed."""
        read = await sandbox.exec(["cat", f"{self.folder}/outcomes"], max_bytes=max_bytes)
        await sandbox.exec(["rm", "-rf", self.folder])
        return said(read.output, self.word) if read.ok else Said(False, {})


def said(output: bytes, word: str) -> Said:
    """What a witness that knows the word wrote into `output`.

    >>> said(b'so long {"word": "w", "ok": true, "outcomes": {"t": 0}} bye', "w")
    Said(ok=True, outcomes={'t': <Outcome.PASSED: 0>})
    >>> said(b'{"word": "guess", "ok": true, "outcomes": {"t": 0}}', "w")
    Said(ok=False, outcomes={})
    """
    text = output.decode("utf-8", "replace")
    at = text.rfind('{"word": ' + json.dumps(word))
    try:
        found: Any = json.JSONDecoder().raw_decode(text, at)[0] if at >= 0 else {}
        return Said(found["ok"] is True, {str(name): Outcome(value) for name, value in found["outcomes"].items()})
    except (KeyError, ValueError, AttributeError, TypeError, RecursionError):
        return Said(False, {})
