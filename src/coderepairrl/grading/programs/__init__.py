"""What runs in a sandbox beside code under test and says how its checks ended: source text, for Python 3.6 and later.

Each program is given a random word, and only what it says beside that word counts. The word, what was found so far, and
what the runner is made of are kept in an audit hook (PEP 578): only the interpreter's list of hooks refers to it, so no
frame, module or (since the collector's objects are frozen then) list of objects leads code under test there. A program
speaks to its hook by ``sys.audit``, and the hook answers only the frames that it was made for. Python 3.6 and 3.7 have
no audit hooks: there a walk through the frames finds it.
"""

from __future__ import annotations

from coderepairrl.grading.programs.for_node import NODE
from coderepairrl.grading.programs.for_pytest import PYTEST, START
from coderepairrl.grading.programs.for_scripts import SCRIPT
from coderepairrl.grading.programs.for_unittest import UNITTEST

__all__ = ["NODE", "PYTEST", "SCRIPT", "START", "UNITTEST"]
