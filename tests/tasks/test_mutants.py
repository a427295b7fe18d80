"""Mutants: bugs in shipped functions, with a fixed split, and in a user's packages."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coderepairrl import sandbox
from coderepairrl.errors import ConfigError, TaskError
from coderepairrl.grading import grade_apart
from coderepairrl.tasks import make_source
from coderepairrl.tasks.base import find_code_folder
from coderepairrl.tasks.mutants.corpus_tasks import (
    VERIFIED,
    index_mutations,
    load_corpus_functions,
    load_mutants,
    verify_corpus,
)
from coderepairrl.tasks.mutants.judge import MAX_CHARACTERS, judge_mutants
from coderepairrl.tasks.mutants.mutations import list_mutations
from coderepairrl.tasks.mutants.source import MutantSource
from coderepairrl.types import Task
from projects import write


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutants-cache")


def make_tasks(cache: Path, **options: object) -> list[Task]:
    return list(MutantSource(cache=str(cache), **options))  # type: ignore[arg-type]


def function_of(task: Task) -> str:
    return task.id.rsplit("/", 1)[0]


def workspace_of(task: Task) -> Path:
    return Path(task.workspace.removeprefix("dir:"))


def test_held_out_mutants_are_many_and_share_nothing_with_training(cache: Path) -> None:
    train, test, unseen = (make_tasks(cache, split=split, quoted=1.0) for split in ("train", "test", "unseen"))
    assert len(test) >= 256 and len({function_of(task) for task in test}) >= 15
    assert len(unseen) >= 128 and len({function_of(task) for task in unseen}) >= 15
    pairs = [{task.id[:-2] for task in split} for split in (train, test, unseen)]
    assert sum(map(len, pairs)) == len(set.union(*pairs))
    assert not {function_of(task) for task in unseen} & {function_of(task) for task in (*train, *test)}
    broken = [{(workspace_of(task) / f"{module_of(task)}.py").read_text() for task in split} for split in (train, test)]
    assert not broken[0] & broken[1]


def module_of(task: Task) -> str:
    return function_of(task).removeprefix("mutants/").split(".")[0]


def test_shipped_verdicts_are_true() -> None:
    """One in four is judged again; mutants that hang depend on the machine, and are not shipped."""
    known = index_mutations()
    keys = list(known)[::4]
    assert {known[key][0].key for key in keys} == {f.key for f in load_corpus_functions()}
    shipped = json.loads(VERIFIED.read_text())
    judged = verify_corpus(keys)
    expected = {key: shipped[key] for key in ("corpus", *keys) if key in shipped}
    assert expected == {key: judged.get(key) for key in expected}
    assert len(judged.keys() - shipped.keys()) < 5


def test_a_long_value_of_any_script_is_a_failure() -> None:
    source = "def f():\n    return '\U0001f600' * 10_000\n"
    [(index, value)] = filter(None, judge_mutants([(source, [("f()", "''")])]))
    assert (index, len(value)) == (0, MAX_CHARACTERS)


def test_the_split_never_moves() -> None:
    """Published numbers compare only on the same tasks: another digest is another benchmark."""
    held_out = sorted(mutant.key for mutant in load_mutants() if mutant.split != "train")
    digest = hashlib.sha256("\n".join(held_out).encode()).hexdigest()
    assert digest[:16] == "72aac636f6afabc7"


def test_issues_quote_the_broken_line_or_none_and_never_the_fixed_one(cache: Path) -> None:
    for task in make_tasks(cache, split="test"):
        diff = task.reference.decode().splitlines()
        removed = next(line[1:].strip() for line in diff if line.startswith("-") and not line.startswith("---"))
        added = next(line[1:].strip() for line in diff if line.startswith("+") and not line.startswith("+++"))
        quoted = [line.strip() for line in task.prompt.splitlines()]
        assert (removed in quoted) == task.id.endswith("-q")
        assert added not in quoted
        assert (workspace_of(task) / f"{module_of(task)}.py").read_text().count(removed) == 1


def test_the_same_seed_gives_the_same_tasks_and_another_seed_others(cache: Path, tmp_path: Path) -> None:
    def list_contents(where: Path, seed: int) -> list[tuple[str, str, bytes]]:
        return [(task.id, task.prompt, task.reference) for task in make_tasks(where, seed=seed, n=40)]

    assert list_contents(cache, 3) == list_contents(tmp_path, 3) != list_contents(cache, 4)


def test_quoted_is_a_share(cache: Path) -> None:
    ids = [task.id for task in make_tasks(cache, split="train", quoted=0.7)]
    assert 0.6 < sum(name.endswith("-q") for name in ids) / len(ids) < 0.8


def test_mutations_compile_and_change_one_line() -> None:
    for f in load_corpus_functions():
        for mutation in list_mutations(f.source):
            broken = mutation.apply(f.source)
            compile(broken, f.key, "exec")
            differing = [a != b for a, b in zip(f.source.splitlines(), broken.splitlines(), strict=True)]
            assert sum(differing) == 1


def test_columns_are_characters_where_the_source_is_not_ascii() -> None:
    source = 'def f(a, b):\n    "né"\n    return "é", a + b\n'
    assert 'def f(a, b):\n    "né"\n    return "é", a - b\n' in [m.apply(source) for m in list_mutations(source)]


@pytest.mark.parametrize("line", ["\x0c", "x = '\u2028'"])
def test_lines_end_where_python_ends_them(line: str) -> None:
    source = "def f(a):\n    return a + 1\n"
    moved = [replace(each, line=each.line + 1) for each in list_mutations(source)]
    assert list_mutations(f"{line}\n{source}") == moved and len(moved) == 4


def test_bad_packages_are_refused_with_a_reason(tmp_path: Path, isolating: None) -> None:
    def refuse(source: str, command: str, timeout: float = 5.0) -> str:
        root = write(tmp_path / str(len(list(tmp_path.iterdir()))), {"cart.py": source, "test_cart.py": CASES})
        with pytest.raises(TaskError) as caught:
            make_tasks(tmp_path / "cache", path=str(root), command=command, n=4, timeout=timeout)
        return str(caught.value)

    assert "no mutable function" in refuse("cheap = total = 1\n", command="true")
    assert "notice none" in refuse(SOURCE, command="true")
    assert "did not end in 0.5 s" in refuse(SOURCE, command="sleep 1000", timeout=0.5)
    assert "no-such-program cannot be run" in refuse(SOURCE, command="no-such-program")
    with pytest.raises(TaskError, match="not a folder"):
        make_tasks(tmp_path / "cache", path=str(tmp_path / "nowhere"), n=1)


@pytest.mark.parametrize("options", [
    {"split": "dev"}, {"quoted": 2.0}, {"quoted": "some"}, {"n": -1}, {"path": "x", "split": "unseen"},
    {"timeout": 0.0}, {"timeout": 1e300}, {"command": " "}, {"command": "sh -c 'x"},
])  # fmt: skip
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        MutantSource(**options)


DOCUMENTED = '''\
"""A package."""
import functools
import math
from os.path import basename as last, join

LIMIT = 3


def half(n: int) -> float:
    """Halve.

    >>> half(4)  # a comment
    2.0
    >>> half(6)  # doctest: +SKIP
    3.0
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


def letters(text):
    """In an order that differs between processes.

    >>> letters("ab")
    ['a', 'b']
    """
    return list(set(text))


def place(n):
    """A bug's value differs between processes.

    >>> place(2)
    2
    """
    return n if n < 3 else object()
'''


async def test_functions_stand_alone_and_tests_tell_their_bugs(tmp_path: Path, isolating: None) -> None:
    test = 'def test_it():\n    """\n    >>> test_it()\n    1\n    """\n'
    package = write(tmp_path / "pack", {"__init__.py": DOCUMENTED, "test_pack.py": test})
    options = {"path": str(package), "documented": True, "quoted": 0, "cache": str(tmp_path / "cache")}
    tasks = list(make_source("mutants", **options))
    names = {task.id.removeprefix("mutants/pack.").partition("/")[0] for task in tasks}
    assert names == {"half", "name", "reads", "place"}
    assert not any("<object" in task.prompt for task in tasks)
    assert list(make_source("mutants", **options)) == tasks
    half = next(task for task in tasks if task.id.startswith("mutants/pack.half/operator"))
    assert "half(6)" not in str(half.checks)
    assert "half(4)" in half.prompt and "2.0" in half.prompt and " / 2" not in half.prompt, "the line is not quoted"
    backend = sandbox.make_backend(sandbox.choose_backend("auto").name)
    for patch, passes in ((half.reference, True), (b"", False)):
        assert ((await grade_apart(backend, half, patch)).problem == "") is passes


def test_code_is_a_folder_or_an_installed_package() -> None:
    with pytest.raises(TaskError, match="neither a folder nor an installed package"):
        find_code_folder("no_such_package")
    assert find_code_folder("sortedcontainers").name == "sortedcontainers"
    with pytest.raises(ConfigError, match="documented needs code"):
        make_source("mutants", documented=True)


SOURCE = '''"""Prices."""


def cheap(prices, limit):
    return [price for price in prices if price < limit]


def total(prices, discount):
    return sum(prices) * (100 - discount) // 100
'''
CASES = """import unittest

from cart import cheap, total


class Cart(unittest.TestCase):
    def test_cheap(self):
        self.assertEqual(cheap([1, 5, 7], 5), [1])

    def test_total(self):
        self.assertEqual(total([100, 200], 10), 270)

    def test_nothing(self):
        self.assertEqual(len("a"), 1)
"""
RUNNERS = {
    "unittest": f"{sys.executable} -B -m unittest -q",
    "pytest": f"env PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 {sys.executable} -m pytest -q -p no:cacheprovider",
}


def inject_bugs(tmp_path: Path, kind: str, tests: str = CASES, n: int = 1) -> list[Task]:
    root = write(tmp_path / "package", {"cart.py": SOURCE, "test_cart.py": tests})
    options = {"n": n, "command": RUNNERS[kind], "timeout": 20.0, "sandbox": "unsafe-local"}
    return list(MutantSource(str(root), cache=str(tmp_path / "cache"), **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", RUNNERS)
def test_tasks_say_who_runs_their_tests_and_which_of_them_count(kind: str, tmp_path: Path) -> None:
    """So that they are graded like the tasks of `grading.test_attacks`."""
    [task] = inject_bugs(tmp_path, kind)
    assert [command.results for command in task.checks.commands] == [kind]
    assert task.checks.fail_to_pass and task.checks.pass_to_pass


def test_test_names_that_change_between_runs_do_not_count(tmp_path: Path) -> None:
    tests = f"""import pytest, uuid
{CASES.partition("class")[0]}
@pytest.mark.parametrize("where", [uuid.uuid4().hex, "here"])
def test_total(where):
    assert total([100, 200], 10) == 270 and cheap([1, 5, 7], 5) == [1]
"""
    task = inject_bugs(tmp_path, "pytest", tests)[0]
    assert task.checks.named == ("test_cart.py::test_total[here]",)


def test_a_command_that_runs_no_test_is_refused(tmp_path: Path) -> None:
    skipped = "import pytest\n\n\n@pytest.mark.skip\ndef test():\n    pass\n"
    with pytest.raises(TaskError, match="no test passed"):
        inject_bugs(tmp_path, "pytest", skipped)
