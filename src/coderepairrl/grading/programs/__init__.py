"""Programs that run with code under test and report how its checks ended: Python 3.6+, Node, Java, `sh`.

Python and Node programs get a random word; only output marked with it counts. Word, outcomes and a snapshot of the
runner live in an audit hook (PEP 578), which code under test cannot reach by frames, modules or the garbage collector,
which is frozen. A program talks to its hook by ``sys.audit``; the hook answers known frames only. Python 3.6 and 3.7
have no audit hooks.

Programs reach the sandbox as one text, with imports from this folder inlined. This module imports none of them.
"""

from __future__ import annotations

import re
from pathlib import Path

_FOLDER = Path(__file__).parent
_IMPORT = re.compile(rf"^from {re.escape(__name__)}\.(\w+) import .*\n", re.MULTILINE)
_DOCSTRING = re.compile(r'\A""".*?"""\n+', re.DOTALL)


def _program_text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _inline_program(name: str) -> str:
    """Program with its imports inlined, without docstrings, which scripts would find in theirs."""
    return _IMPORT.sub(lambda match: _inline_program(match[1]), _DOCSTRING.sub("", _program_text(f"{name}.py")))


def _under_file_name(program: str) -> str:
    """`program` for ``python -c`` under a unique file name: other compiled text is ``<string>``."""
    return f"exec(compile({program!r}, '/dev/crrl', 'exec'))"


JUNIT = _program_text("CrrlWitness.java")
"""Runs a JUnit 4 class and prints test outcomes with the word."""
NODE = _program_text("node_guard.cjs")
"""Loaded first by Node; `ABOUT` is replaced."""
START = _inline_program("pytest_start")
"""Start-up code of every Python started by a pytest command; `PLUGIN` is replaced."""
PYTEST = '"""PYTEST_DONT_REWRITE"""\n' + _inline_program("pytest_plugin")
"""Pytest plugin that writes test outcomes with the word."""
PYTEST_ALONE = _inline_program("pytest_alone")
"""Starts pytest in a Python that ignores the environment; `PLUGIN` is replaced."""
_TEXTS = ("ends", "integrity", "origins", "written")
SCRIPT = _under_file_name(
    _inline_program("run_script").replace(
        'ENDS, INTEGRITY, ORIGINS, WRITTEN = "", "", "", ""',
        f"ENDS, INTEGRITY, ORIGINS, WRITTEN = {tuple(map(_inline_program, _TEXTS))!r}",
    )
)
"""Runs a script; prints the word after its last line or its regular exit."""
UNITTEST = _under_file_name(_inline_program("run_unittest"))
"""Runs ``python -m unittest`` and prints test outcomes with the word."""
NEW_FILES = _program_text("new_files.sh")
"""Prints which of its arguments do not exist and would lie in no existing package, NUL-terminated."""
PREPARE = _program_text("prepare.sh")
"""Puts word, start-up code and plugin (lengths of the first two: ``$1``, ``$2``; name: ``$0``) into a new folder."""
WITH_PLUGIN = _program_text("with_plugin.sh")
"""Runs a command with the plugin ``$1`` of the folder ``$0`` in the workspace ``$2``."""
WITH_GUARD = _program_text("with_guard.sh")
"""Runs a command with standard input as Node's first module."""
SWEBENCH_REPORT = _inline_program("swebench_report")
"""Verdict of SWE-bench's harness on logs; like the next two run outside the sandbox, by the harness's Python."""
MULTI_SWE_BENCH_REPORT = _inline_program("multi_swe_bench_report")
"""Verdict of Multi-SWE-bench on logs."""
SWE_SMITH_REPORT = _inline_program("swe_smith_report")
"""Verdict of SWE-smith on logs, and how its tests are run."""
