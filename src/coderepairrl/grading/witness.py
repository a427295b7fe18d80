"""Witnesses: programs that report results of tests in Python, Node or Java, marked with a random word.

An exit code proves nothing: repaired code may call ``sys.exit(0)`` or ``os._exit(0)``, or change the code at exit.
Printed lines can be forged. So

- scripts (``python3 [flags] check.py``) run under a program that prints the word only after the last line;
- ``python3 [flags] -m unittest ...`` under one that prints each test's outcome with the word;
- JUnit 4 without a build tool (`make_junit_checks`) under one that does the same;
- pytest, however started, with a plugin that writes outcomes and word to a file outside the workspace.

Unittest and pytest also stop slow tests (`Clock`). Modules of Python and the runners are imported before workspace
folders are on the path, and the word is gone from input and disk before code under test loads (`programs`). The process
is shared: this stops cheap tricks, not a determined attack (reading memory).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from coderepairrl.grading import programs
from coderepairrl.grading.reports import Outcome, Outcomes
from coderepairrl.protocols import Sandbox
from coderepairrl.types import Checks, Command, ExecResult

JUNIT_FILE = "CrrlWitness.java"
"""File of our JUnit 4 program (`programs.JUNIT`), which checks compile with the tests."""
ENDED_EARLY = 86
"""Exit code of a guarded Node command whose process ended abnormally: none of its outcomes count."""


def format_limits(command: Command) -> str:
    """Seconds for each test (0: half of the remaining time), and for all."""
    return f"{command.test_timeout:.6f} {command.timeout:.6f}"


class Report(NamedTuple):
    """Outcomes by test, and whether the runner counts the run as passed."""

    ok: bool
    outcomes: Outcomes


def make_word() -> str:
    """Make 128 random bits."""
    return secrets.token_hex(16)


def make_witness_input(sandbox: Sandbox, checks: Checks, word: str) -> bytes:
    """Input of a witness: `word`, workspace, the checks' files."""
    return "\n".join((word, sandbox.workdir, *checks.restore)).encode("utf-8", "surrogateescape")


def guard_node_command(argv: Sequence[str], workdir: str, checks: Checks) -> tuple[list[str], bytes]:
    """Command and input for Node's test runner, guarded against early exits."""
    check_files = [*checks.restore]
    facts = {"root": workdir, "checkFiles": check_files, "guess": not check_files}
    guard = programs.NODE.replace("ABOUT", json.dumps(facts))
    at = _count_words_before_program(argv)
    return [*argv[:at], "sh", "-c", programs.WITH_GUARD, "sh", *argv[at:]], guard.encode()


def watch_script(argv: Sequence[str]) -> list[str]:
    """Command for a Python script under the witness; empty for other commands."""
    begin = _count_words_before_program(argv)
    at = _find_script(argv[begin:])
    if not at or not argv[begin + at].endswith(".py"):
        return []
    return [*argv[: begin + at], "-c", programs.SCRIPT, *argv[begin + at :]]


def watch_unittest(argv: Sequence[str]) -> list[str]:
    """Command for ``python -m unittest`` under the witness; empty for other commands."""
    at = _find_module_call(argv, "unittest")
    return [*argv[:at], "-c", programs.UNITTEST, *argv[at + 2 :]] if at else []


def watch_junit(argv: Sequence[str]) -> list[str]:
    """Command for our JUnit 4 program, unchanged; empty for other commands."""
    return [*argv] if JUNIT_FILE in argv else []


def detect_runner(argv: Sequence[str]) -> str:
    """Runner with a witness that the command starts: ``pytest``, ``unittest``, or "".

    A pytest that runs no test counts as none; under ``python -I`` or ``-E`` only a direct ``-m pytest`` counts.

    >>> [detect_runner(line.split()) for line in ("python3 -m pytest -q", "env A=1 pytest", "python3 -I -m unittest")]
    ['pytest', 'pytest', 'unittest']
    >>> [detect_runner(line.split()) for line in ("make test", "nice python3 -I -m pytest", "pytest --co")]
    ['', '', '']
    """
    if watch_unittest(argv):
        return "unittest"
    at = next((at for at, word in enumerate(argv) if PurePosixPath(word).name in _PYTEST_NAMES), -1)
    if at < 0 or _OPTIONS_WITHOUT_TESTS & set(argv[at:]):
        return ""
    if _find_module_call(argv, "pytest"):
        return "pytest"
    has_python, previous = False, ""
    for word in argv[_count_words_before_program(argv) : at]:
        name = PurePosixPath(word).name
        is_python = name.startswith("python")
        has_python = has_python or is_python
        is_value = previous in ("-W", "-X")
        if not (word.startswith("-") or is_value or is_python or name in _MAY_PRECEDE_PYTEST):
            return ""
        if has_python and _IGNORES_ENVIRONMENT.fullmatch(word):
            return ""
        previous = word
    return "pytest"


def _find_module_call(argv: Sequence[str], name: str) -> int:
    """Index of ``-m name`` in a call of Python; 0 for other commands."""
    begin = _count_words_before_program(argv)
    call = argv[begin:]
    if not _is_python(call) or "-m" not in call:
        return 0
    at = call.index("-m")
    options = call[:at]
    if [*call[at + 1 : at + 2]] != [name] or _find_script(options) or _has_value_option(options):
        return 0
    return begin + at


_PYTEST_NAMES = ("pytest", "py.test")
# programs that may start pytest, and their subcommand `run`
_MAY_PRECEDE_PYTEST = ("uv", "poetry", "pipenv", "pdm", "hatch", "coverage", "run", "nice", "xvfb-run")
_OPTIONS_WITHOUT_TESTS = {"--co", "--collect-only", "--version", "-V", "--help", "-h", "--fixtures", "--markers"}
# Python's options -E and -I, perhaps joined with others
_IGNORES_ENVIRONMENT = re.compile(r"-[A-Za-z]*[EI][A-Za-z]*")


def _count_words_before_program(argv: Sequence[str]) -> int:
    """Count the words before the program: ``env`` and its settings, or a shell line that prepares it.

    >>> _count_words_before_program(["env", "A=1", "pytest"])
    2
    >>> _count_words_before_program(["sh", "-c", 'touch a </dev/null && exec "$@"', "sh", "pytest"])
    4
    """
    if len(argv) > 4 and [*argv[:2], argv[3]] == ["sh", "-c", "sh"] and _PREPARING_LINE.fullmatch(argv[2]):
        return 4
    if not argv or PurePosixPath(argv[0]).name != "env":
        return 0
    return next((at for at, word in enumerate(argv) if at and not re.fullmatch(r"-i|\w+=.*", word, re.DOTALL)), 0)


# shell line that prepares a command without reading the input, which holds the word
_PREPARING_LINE = re.compile(r"""(?:[^;&|<>\n]+ </dev/null && )+exec "\$@\"""")


def _is_python(argv: Sequence[str]) -> bool:
    return bool(argv) and PurePosixPath(argv[0]).name.startswith("python")


def _has_value_option(argv: Sequence[str]) -> bool:
    return any(flag in ("-c", "-m", "-X", "-W") for flag in argv[1:])


def _find_script(argv: Sequence[str]) -> int:
    """Index of the script in a call of Python; 0 without one, or if options take values."""
    if not _is_python(argv):
        return 0
    at = next((at for at, word in enumerate(argv) if at and not word.startswith("-")), 0)
    return 0 if _has_value_option(argv[:at]) else at


class PytestPlugin(NamedTuple):
    """Pytest plugin in a folder of the sandbox."""

    folder: str
    name: str
    word: str

    @classmethod
    async def prepare(cls, sandbox: Sandbox, command: Command, checks: Checks) -> PytestPlugin | ExecResult:
        """Write the plugin, with the time limits of `command`; if that fails, return the result."""
        name, word = f"crrl_{secrets.token_hex(4)}", make_word()
        witness_input = make_witness_input(sandbox, checks, f"{word} {format_limits(command)}")
        start = programs.START.replace("PLUGIN", name).encode()
        sizes = (str(len(witness_input)), str(len(start)))
        stdin = witness_input + start + programs.PYTEST.encode()
        prepared = await sandbox.exec(["sh", "-c", programs.PREPARE, name, *sizes], stdin=stdin, cwd="/")
        folder = prepared.output.decode("utf-8", "surrogateescape").strip()
        if not prepared.ok or not folder.startswith("/"):
            return prepared
        return cls(folder, name, word)

    def wrap_command(self, argv: Sequence[str], workdir: str) -> list[str]:
        """Add the plugin to `argv`; ``env`` stays first, or it might unset our variables."""
        program_at, module = _count_words_before_program(argv), _find_module_call(argv, "pytest")
        if module and any(_IGNORES_ENVIRONMENT.fullmatch(word) for word in argv[program_at:module]):
            program = programs.PYTEST_ALONE.replace("PLUGIN", self.name)
            argv = [*argv[:module], "-c", program, self.folder, *argv[module + 2 :]]
        before, command = argv[:program_at], argv[program_at:]
        return [*before, "sh", "-c", programs.WITH_PLUGIN, self.folder, self.name, workdir, *command]

    async def read_report(self, sandbox: Sandbox, max_bytes: int) -> Report:
        """Read the report and remove the folder. Unless pytest ended regularly, the run failed without outcomes."""
        read = await sandbox.exec(["cat", f"{self.folder}/outcomes"], max_bytes=max_bytes)
        await sandbox.exec(["rm", "-rf", self.folder])
        return parse_report(read.output, self.word) if read.ok else Report(False, {})


def strip_report(output: bytes, word: str) -> bytes:
    """Cut off `output` at the report marked with `word`."""
    return output.partition(b'\n{"word": ' + json.dumps(word).encode())[0]


def parse_report(output: bytes, word: str) -> Report:
    """Report marked with `word` in `output`; without one, the run failed without outcomes.

    >>> parse_report(b'so long {"word": "w", "ok": true, "outcomes": {"t": 0}} bye', "w")
    Report(ok=True, outcomes={'t': <Outcome.PASSED: 0>})
    >>> parse_report(b'{"word": "guess", "ok": true, "outcomes": {"t": 0}}', "w")
    Report(ok=False, outcomes={})
    """
    text = output.decode("utf-8", "replace")
    at = text.rfind('{"word": ' + json.dumps(word))
    try:
        report: Any = json.JSONDecoder().raw_decode(text, at)[0] if at >= 0 else {}
        return Report(report["ok"] is True, {str(name): Outcome(value) for name, value in report["outcomes"].items()})
    except (KeyError, ValueError, AttributeError, TypeError, RecursionError):
        return Report(False, {})


JARS = "/usr/share/java/junit4.jar:/usr/share/java/hamcrest.jar"
"""Files of Debian's packages junit4 and libhamcrest-java."""
# compiles and runs tests. 1 GiB of heap, since QuixBugs' KNAPSACK allocates about 600 MB.
_JUNIT_SCRIPT = """
class=$1 jars=$2; shift 2
out=$(mktemp -d) || exit 1
javac -nowarn -Xlint:none -proc:none -encoding UTF-8 -cp "$jars" -d "$out" "$@" </dev/null || exit 1
exec java -Xmx1g -Xss4m -cp "$jars:$out" CrrlWitness "$class" "$out"
"""


def make_junit_checks(
    tests: Mapping[str, str],
    sources: Sequence[str],
    test_class: str,
    *,
    fail_to_pass: Sequence[str] = (),
    pass_to_pass: Sequence[str] = (),
    jars: str = JARS,
) -> Checks:
    """Compile `sources` with restored `tests` (contents by path), and run `test_class`.

    Tests are named ``package.Class.method`` (or ``::`` before the method), and fail if the JVM ends early.
    """
    words = ["sh", "-c", _JUNIT_SCRIPT, "sh", test_class, jars, JUNIT_FILE, *sorted({*tests, *sources})]
    return Checks(
        (Command(tuple(words), 120.0, "junit"),),
        {**tests, JUNIT_FILE: programs.JUNIT},
        tuple(name.replace("::", ".") for name in fail_to_pass),
        tuple(name.replace("::", ".") for name in pass_to_pass),
    )
