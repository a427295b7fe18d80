"""Files of a patch outside the repair."""

from __future__ import annotations

import ast
import re
import threading
import warnings
from collections.abc import Collection, Sequence

from coderepairrl.rewards.parse import FilePatch

MOST = 3
"""Free files outside a repair; 783 of 785 resolved SWE-bench patches have no more."""
_LARGEST_SOURCE = 1 << 16
"""Bytes of the longest parsed file (1 s at worst in Python); longer ones are accepted."""

_TEST = re.compile(
    r"""(^|/)([^/]*[._-])?(tests?|testing|__tests__|specs?)/     # a folder of tests
    |   (^|/)(tests?|conftest)([._-][^/]*)?$                     # tests.py, test_x.py, test-x.sh
    |   [^/](_tests?|-tests?|\.tests?|_spec|\.spec)\.[^/.]+$     # x_test.go, x.spec.ts
    |   (^|/)[A-Z]\w*(Tests?|TestCase|IT|Spec)\.[^/.]+$          # XTest.java, XSpec.scala
    """,
    re.VERBOSE,
)
_warnings = threading.Lock()


def is_test(path: str) -> bool:
    """Whether a path is that of a test.

    >>> [is_test(path) for path in ("tests/x.py", "test_x.py", "x_test.go", "a/XTest.java", "latest.py", "Latest.kt")]
    [True, True, True, True, False, False]
    """
    return _TEST.search(path) is not None


def beside(patch: Sequence[FilePatch], touched: Collection[str]) -> set[str]:
    """Up to `MOST` paths outside `touched`: tests, and new files that parse."""
    loose = {file.path: file for file in patch if file.path not in touched and (not file.old or is_test(file.path))}
    return {path for path in sorted(loose)[:MOST] if readable(loose[path])}


def readable(file: FilePatch) -> bool:
    """Whether a new Python file parses; else True."""
    if file.old or not file.new.endswith((".py", ".pyi")):
        return True
    source = b"".join(line for block in file.blocks for line in block.added)
    if len(source) > _LARGEST_SOURCE:
        return True
    with _warnings, warnings.catch_warnings():  # of invalid escapes; the filters are the process's
        warnings.simplefilter("ignore")
        try:
            ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True
