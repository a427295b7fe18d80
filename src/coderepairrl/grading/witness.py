"""Witnesses: what a test run in Python says of itself by a word that was drawn for it.

A check that ends early is not one that passes: repaired code that calls ``sys.exit(0)`` or ``os._exit(0)``, or has the
exit code changed at exit, would make any script end well, and printed lines would make any log. So

- a script (``python3 [flags] check.py``) runs under one that says the word after its last line, and only then;
- ``python3 [flags] -m unittest ...`` under one that gives the outcome of each test beside the word;
- pytest, however it is started, with a plugin that writes the outcomes and the word to a file outside of the workspace.

The last two also end a test that takes longer than it may (`Clock`): it has failed, and the others still run.

The word is gone from input and disk before any code under test is loaded. That code shares the process, so this stops
cheap tricks and not a determined one (objects equal to everything, patched assertions, a walk through the heap).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from coderepairrl.errors import SandboxFault
from coderepairrl.grading.reports import Outcome, Outcomes
from coderepairrl.protocols import Sandbox
from coderepairrl.types import Command

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

_CLOCK = """
class Clock:
    # Ends what takes longer than `each` seconds, or than half of what is left of `whole` where that is 0, by raising in
    # the main thread, again and again: no `except Exception` of the code under test catches it.

    class Late(BaseException):
        pass

    def __init__(self, each, whole):
        import signal, threading, time

        self.each, self.now, self.timer = each, time.monotonic, signal.setitimer
        self.signal, self.alarm, self.real = signal.signal, signal.SIGALRM, signal.ITIMER_REAL
        self.default, self.late = signal.SIG_DFL, False
        self.end = time.monotonic() + 0.9 * whole  # the rest is for the runner itself
        self.works = threading.current_thread() is threading.main_thread()

    def start(self):
        self.late = False
        seconds = self.each or max((self.end - self.now()) / 2, 0.05)

        def ring(*_):
            self.late = True
            raise self.Late(f"no end within {seconds:.3g} s")

        if self.works:
            self.before = self.signal(self.alarm, ring)
            self.timer(self.real, seconds, max(seconds, 1.0))

    def stop(self):
        if self.works:
            self.timer(self.real, 0)
            self.signal(self.alarm, self.default if self.before is None else self.before)
        return self.late
"""

_UNITTEST = (
    _CLOCK
    + """
def _witness():
    import sys
    alone = sys.path[:1] != [""]
    if not alone:
        del sys.path[0]  # or a file of the patch could stand in for unittest
    import json, os, unittest
    said = sys.stdin.buffer.read().decode().split()
    word, say, write, dump = said[0], sys.stdout.flush, os.write, json.dumps
    clock = Clock(float(said[1]), float(said[2]))
    del globals()["Clock"]
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

    def begin(self, test):
        unittest.TextTestResult.startTest(self, test)
        clock.start()

    def end(self, test):
        if clock.stop():
            found[test.id()] = 2
        unittest.TextTestResult.stopTest(self, test)

    kinds = {"addSuccess": 0, "addExpectedFailure": 0, "addSkip": 1}
    kinds.update(dict.fromkeys(("addFailure", "addError", "addUnexpectedSuccess"), 2))
    methods = {name: recording(name, n) for name, n in kinds.items()}
    result = type("Result", (unittest.TextTestResult,), {**methods, "startTest": begin, "stopTest": end})
    runner = type("Runner", (unittest.TextTestRunner,), {"resultclass": result})
    sys.argv[0] = "python -m unittest"
    ended = unittest.main(module=None, testRunner=runner, exit=False)
    well = ended.result.wasSuccessful() and 2 not in found.values()
    say()
    text = "\\n" + dump({"word": word, "ok": well, "outcomes": found})
    rest = text.encode()
    while rest:
        rest = rest[write(1, rest):]
    sys.exit(not well)

_witness()
"""
)

_PYTEST = (
    _CLOCK
    + """

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
            word, each, whole = file.read().split()
        os.unlink(here + "/word")
    except FileNotFoundError:
        return None  # a worker of xdist, which reports to its controller
    import pytest

    dump, opened, found, raised = json.dumps, open, {}, {}
    clock = Clock(float(each), float(whole))

    class Recorder:
        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_runtest_setup(self, item):
            clock.start()
            yield
            if clock.stop():
                found[item.nodeid] = 2

        pytest_runtest_teardown = pytest_runtest_setup

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_runtest_call(self, item):
            clock.start()
            ended = yield
            raised[item.nodeid] = clock.stop() or ended.excinfo is not None

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
                ok = int(exitstatus) == 0 and 2 not in found.values()
                file.write(dump({"word": word, "ok": ok, "outcomes": found}))

    return Recorder()


_recorder = _recorder()


def pytest_configure(config):
    if _recorder is not None:
        config.pluginmanager.register(_recorder)
"""
)
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


def limits(command: Command) -> str:
    """How long each test may take (0: half of what is left), and all of them together, in seconds."""
    return f"{command.test_timeout:.6f} {command.timeout:.6f}"


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
    begin = _after_env(argv)
    setting, argv = argv[:begin], argv[begin:]
    if not _is_python(argv) or "-m" not in argv:
        return []
    at = argv.index("-m")
    if list(argv[at : at + 2]) != ["-m", "unittest"] or _first_word(argv[:at]) or _takes_value(argv[:at]):
        return []
    return [*setting, *argv[:at], "-c", _UNITTEST, *argv[at + 2 :]]


def results_of(argv: Sequence[str]) -> str:
    """Which witness can ask the command: ``pytest`` or ``unittest``, which it starts by itself; nothing for others.

    None for a pytest that runs no test, or whose Python ignores the environment that brings the plugin.

    >>> [results_of(line.split()) for line in ("python3 -m pytest -q", "env A=1 pytest", "python3 -m unittest")]
    ['pytest', 'pytest', 'unittest']
    >>> [results_of(line.split()) for line in ("make test", "python3 -I -m pytest", "pytest --co")]
    ['', '', '']
    """
    if unittest(argv):
        return "unittest"
    at = next((at for at, word in enumerate(argv) if PurePosixPath(word).name in _PYTESTS), -1)
    if at < 0 or _NO_TESTS & set(argv[at:]):
        return ""
    before, python = argv[_after_env(argv) : at], False
    for number, word in enumerate(before):
        name = PurePosixPath(word).name
        python = python or name.startswith("python")
        value = number and before[number - 1] in ("-W", "-X")
        if not (word.startswith("-") or value or name in _STARTERS or name.startswith("python")):
            return ""
        if python and _ISOLATED.fullmatch(word):
            return ""
    return "pytest"


_PYTESTS = ("pytest", "py.test")
_STARTERS = ("uv", "poetry", "pipenv", "pdm", "hatch", "coverage", "run", "nice", "xvfb-run")
"""Words that may stand before a pytest that they start."""
_NO_TESTS = {"--co", "--collect-only", "--version", "-V", "--help", "-h", "--fixtures", "--markers"}
_ISOLATED = re.compile(r"-[A-Za-z]*[EI][A-Za-z]*")


def _after_env(argv: Sequence[str]) -> int:
    """How many words of the command are ``env`` and what it sets."""
    if PurePosixPath(argv[0]).name != "env":
        return 0
    return next((at for at, word in enumerate(argv) if at and not re.fullmatch(r"-i|\w+=.*", word, re.DOTALL)), 0)


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
    async def prepare(cls, sandbox: Sandbox, command: Command) -> Plugin:
        """Put it there, with the time limits of `command`. Raises `SandboxFault`."""
        name, word = f"crrl_{secrets.token_hex(4)}", new_word()
        first = f"{word} {limits(command)}\n{_PYTEST}"
        made = await sandbox.exec(["sh", "-c", _PREPARE, name], stdin=first.encode())
        folder = made.output.decode("utf-8", "surrogateescape").strip()
        if not made.ok or not folder.startswith("/"):
            raise SandboxFault(f"no temporary folder in the sandbox: {folder[:200]}", fix="it needs sh and mktemp")
        return cls(folder, name, word)

    def command(self, argv: Sequence[str]) -> list[str]:
        """`argv` with the plugin in whichever pytest it starts first; ``env`` goes before, or it might unset ours."""
        at = _after_env(argv)
        return [*argv[:at], "sh", "-c", _PLUGGED, self.folder, self.name, *argv[at:]]

    async def outcomes(self, sandbox: Sandbox, max_bytes: int) -> Said:
        """What it wrote; not content, and nothing, where pytest did not end by itself. The folder is removed."""
        read = await sandbox.exec(["cat", f"{self.folder}/outcomes"], max_bytes=max_bytes)
        await sandbox.exec(["rm", "-rf", self.folder])
        return said(read.output, self.word) if read.ok else Said(False, {})


def before(output: bytes, word: str) -> bytes:
    """`output` up to where the witness that knows the word speaks."""
    return output.partition(b'\n{"word": ' + json.dumps(word).encode())[0]


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
