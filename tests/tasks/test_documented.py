"""Documented functions of a package as tasks: each by itself, checked by its docstring's examples."""

from __future__ import annotations

from pathlib import Path

import pytest

from coderepairrl import sandbox
from coderepairrl.errors import ConfigError, TaskError
from coderepairrl.grading import grade_apart
from coderepairrl.tasks import make_source
from coderepairrl.tasks.base import code_folder
from coderepairrl.tasks.mutants import documented

PACKAGE = '''\
"""A package."""
import functools
import math
from os.path import basename as last, join

LIMIT = 3


def half(n: int) -> float:
    """Halve.

    >>> half(4)  # doctest: +SKIP
    2.0
    >>> half("x")  # not by a value
    Traceback (most recent call last):
    TypeError
    >>> print(half(2))
    1.0
    """
    size: int
    print("halving", n)
    return math.floor(n) / 2


def name(path):
    """The last part, in capitals.

    >>> name("a/b")
    'B'
    >>> name("a/b") == "B", 1
    (True, 1)
    >>> name("a/c")
    'wrong: the example lies'
    """
    return last(path).upper()


def limited(n):
    """Needs the module.

    >>> limited(9)
    3
    """
    return min(n, LIMIT)


@functools.cache
def cached(n):
    """
    >>> cached(1)
    2
    """
    return n + 1


def reads(n):
    """Its bug reads the jobs that follow, and its value is long.

    >>> reads(1)
    1
    """
    return n if n == 1 else open(0).read() + "x" * 100_000
'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (folder := tmp_path / "pack").mkdir()
    (folder / "__init__.py").write_text(PACKAGE)
    (folder / "test_pack.py").write_text('def test_it():\n    """\n    >>> test_it()\n    1\n    """\n')
    return folder


async def test_functions_stand_alone_and_tests_tell_their_bugs(package: Path, tmp_path: Path, isolating: None) -> None:
    cache = str(tmp_path / "cache")
    tasks = list(make_source("mutants", path=str(package), documented=True, quoted=0, cache=cache))
    assert {task.id.rpartition("/")[0] for task in tasks} == {
        "mutants/pack.half",
        "mutants/pack.name",
        "mutants/pack.reads",
    }
    assert list(make_source("mutants", path=str(package), documented=True, quoted=0, cache=cache)) == tasks
    half = next(task for task in tasks if task.id.startswith("mutants/pack.half/operator"))
    assert "half(4)" in half.prompt and "2.0" in half.prompt and " / 2" not in half.prompt, "the line is not quoted"
    backend = sandbox.make_backend(sandbox.choose("auto").name)
    for patch, passes in ((half.reference, True), (b"", False)):
        assert ((await grade_apart(backend, half, patch)).problem == "") is passes


def test_which_functions_are_taken(package: Path) -> None:
    found = {each.name: each for each in documented.documented_functions(package)}
    assert found.keys() == {"half", "name", "limited", "reads"}
    assert found["half"].source.startswith("import math\ndef half(n):\n    pass\n    print(")
    assert [check.call for check in found["half"].checks] == ["half(4)", "print(half(2))"], "not run yet"
    assert found["name"].source.startswith("from os.path import basename as last\ndef name")
    with pytest.raises(TaskError, match="neither a folder nor an installed package"):
        code_folder("no_such_package")
    assert code_folder("sortedcontainers").name == "sortedcontainers"
    with pytest.raises(ConfigError, match="documented needs code"):
        make_source("mutants", documented=True)
