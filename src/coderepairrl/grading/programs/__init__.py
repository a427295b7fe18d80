"""What runs beside code under test and reports how its checks ended: programs for Python 3.6 and later, Node,
Java and `sh`.

Each program of Python or Node is given a random word, and only what it prints beside that word counts. The word, the
outcomes so far, and what the runner is made of are kept in an audit hook (PEP 578): only the interpreter's list of
hooks refers to it, so no frame, module or (since the collector's objects are frozen then) list of objects leads code
under test there. A program speaks to its hook by ``sys.audit``, and the hook answers only the frames that it was made
for. Python 3.6 and 3.7 have no audit hooks: there a walk through the frames finds it.

A program reaches the sandbox as one text: where its file imports another of this folder, that file's text stands. None
of them is ever imported here.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = [
    "JUNIT",
    "MULTI_SWE_BENCH_REPORT",
    "NEW_FILES",
    "NODE",
    "PREPARE",
    "PYTEST",
    "PYTEST_ALONE",
    "SCRIPT",
    "START",
    "SWEBENCH_REPORT",
    "SWE_SMITH_REPORT",
    "UNITTEST",
    "WITH_GUARD",
    "WITH_PLUGIN",
]

_FOLDER = Path(__file__).parent
_IMPORT = re.compile(rf"^from {re.escape(__name__)}\.(\w+) import .*\n", re.MULTILINE)
_DOCSTRING = re.compile(r'\A""".*?"""\n+', re.DOTALL)


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _python(name: str) -> str:
    """A program with the files that it imports, and without their docstrings, which scripts would find in theirs."""
    return _IMPORT.sub(lambda match: _python(match[1]), _DOCSTRING.sub("", _text(f"{name}.py")))


def _named(program: str) -> str:
    """`program` for ``python -c``, under a file name of its own: all other text that is compiled is ``<string>``."""
    return f"exec(compile({program!r}, '/dev/crrl', 'exec'))"


JUNIT = _text("CrrlWitness.java")
"""Runs a class of JUnit 4 and prints beside the word how each test ended."""
NODE = _text("node_guard.cjs")
"""What Node loads first; `ABOUT` is to be replaced."""
START = _python("pytest_start")
"""Start-up code of every Python that a command with pytest starts; `PLUGIN` is to be replaced."""
PYTEST = '"""PYTEST_DONT_REWRITE"""\n' + _python("pytest_plugin")
"""A plugin for pytest that writes beside the word how each test ended."""
PYTEST_ALONE = _python("pytest_alone")
"""Starts pytest in a Python that the environment does not reach; `PLUGIN` is to be replaced."""
_TEXTS = ("ends", "integrity", "origins", "skips", "written")
SCRIPT = _named(
    _python("run_script").replace(
        'ENDS, INTEGRITY, ORIGINS, SKIPS, WRITTEN = "", "", "", "", ""',
        f"ENDS, INTEGRITY, ORIGINS, SKIPS, WRITTEN = {tuple(map(_python, _TEXTS))!r}",
    )
)
"""Runs a script and prints the word only once it has reached its last line or ended itself."""
UNITTEST = _named(_python("run_unittest"))
"""Runs ``python -m unittest`` and prints beside the word how each test ended."""
NEW_FILES = _text("new_files.sh")
"""Prints which of its arguments are not there and would lie in no package that is."""
PREPARE = _text("prepare.sh")
"""Puts word, start-up code and plugin (lengths of the first two: ``$1``, ``$2``; name: ``$0``) into a new folder."""
WITH_PLUGIN = _text("with_plugin.sh")
"""Runs a command with the plugin ``$1`` of the folder ``$0`` in the workspace ``$2``."""
WITH_GUARD = _text("with_guard.sh")
"""Runs a command with standard input as what Node loads first."""
SWEBENCH_REPORT = _python("swebench_report")
"""The verdict of SWE-bench's harness on logs; run, as the next two, outside of the sandbox, by the harness's Python."""
MULTI_SWE_BENCH_REPORT = _python("multi_swe_bench_report")
"""The verdict of Multi-SWE-bench on logs."""
SWE_SMITH_REPORT = _python("swe_smith_report")
"""The verdict of SWE-smith on logs, and how its tests are run."""
