"""The task source `mutants`: believable bugs, honest issues, a split that never moves."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coderepairrl.errors import ConfigError, TaskError
from coderepairrl.tasks.mutants.corpus_tasks import VERIFIED, corpus_functions, mutants, pairs, verify
from coderepairrl.tasks.mutants.mutations import mutations
from coderepairrl.tasks.mutants.source import MutantSource
from coderepairrl.types import Task


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutants-cache")


def tasks(cache: Path, **options: object) -> list[Task]:
    return list(MutantSource(cache=str(cache), **options))  # type: ignore[arg-type]


def function(task: Task) -> str:
    return task.id.rsplit("/", 1)[0]


def workspace(task: Task) -> Path:
    return Path(task.workspace.removeprefix("dir:"))


def run(argv: Sequence[str], folder: Path) -> int:
    return subprocess.run([sys.executable, *argv[1:]], cwd=folder, capture_output=True, check=False).returncode


def test_held_out_pairs_are_many_over_many_functions_and_never_trained_on(cache: Path) -> None:
    train, test, unseen = (tasks(cache, split=split, quoted=1.0) for split in ("train", "test", "unseen"))
    assert len(test) >= 256 and len({function(task) for task in test}) >= 15
    assert len(unseen) >= 128 and len({function(task) for task in unseen}) >= 15
    pairs = [{task.id[:-2] for task in split} for split in (train, test, unseen)]
    assert sum(map(len, pairs)) == len(set.union(*pairs))
    assert not {function(task) for task in unseen} & {function(task) for task in (*train, *test)}
    broken = [{(workspace(task) / f"{module(task)}.py").read_text() for task in split} for split in (train, test)]
    assert not broken[0] & broken[1]


def module(task: Task) -> str:
    return function(task).removeprefix("mutants/").split(".")[0]


def test_shipped_verdicts_are_true() -> None:
    """One in four, of all functions, judged anew: what fails, and how. What hangs may depend on the machine, and is
    not shipped."""
    known = pairs()
    keys = list(known)[::4]
    assert {known[key][0].key for key in keys} == {f.key for f in corpus_functions()}
    shipped = json.loads(VERIFIED.read_text())
    judged = verify(keys)
    expected = {key: shipped[key] for key in ("corpus", *keys) if key in shipped}
    assert expected == {key: judged.get(key) for key in expected}
    assert len(judged.keys() - shipped.keys()) < 5


def test_the_split_never_moves() -> None:
    """Published numbers compare only on the same tasks: another digest is another benchmark."""
    held_out = sorted(mutant.key for mutant in mutants() if mutant.split != "train")
    digest = hashlib.sha256("\n".join(held_out).encode()).hexdigest()
    assert digest[:16] == "72aac636f6afabc7"


def test_broken_fails_oracle_passes_on_a_sample(cache: Path, tmp_path: Path) -> None:
    for number, task in enumerate(tasks(cache, split="test", n=24)):
        folder = tmp_path / str(number)
        folder.mkdir()
        for path in workspace(task).iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        command = task.checks.commands[0].argv
        assert run(command, folder) != 0, task.id
        subprocess.run(["git", "apply", "-"], cwd=folder, input=task.reference, check=True)
        assert run(command, folder) == 0, task.id
        assert {path.name for path in folder.iterdir()} == {path.name for path in workspace(task).iterdir()}


def test_issues_quote_the_broken_line_or_none_and_never_the_fixed_one(cache: Path) -> None:
    for task in tasks(cache, split="test"):
        diff = task.reference.decode().splitlines()
        removed = next(line[1:].strip() for line in diff if line.startswith("-") and not line.startswith("---"))
        added = next(line[1:].strip() for line in diff if line.startswith("+") and not line.startswith("+++"))
        quoted = [line.strip() for line in task.prompt.splitlines()]
        assert (removed in quoted) == task.id.endswith("-q")
        assert added not in quoted
        assert (workspace(task) / f"{module(task)}.py").read_text().count(removed) == 1


def test_the_same_seed_gives_the_same_tasks_and_another_seed_others(cache: Path, tmp_path: Path) -> None:
    def prompts(where: Path, seed: int) -> list[tuple[str, str, bytes]]:
        return [(t.id, t.prompt, t.reference) for t in tasks(where, seed=seed, n=40)]

    first = prompts(cache, 3)
    assert prompts(tmp_path, 3) == first
    assert prompts(cache, 4) != first


def test_quoted_is_a_share(cache: Path) -> None:
    ids = [task.id for task in tasks(cache, split="train", quoted=0.7)]
    assert 0.6 < sum(name.endswith("-q") for name in ids) / len(ids) < 0.8


def test_mutations_compile_and_change_one_line() -> None:
    for f in corpus_functions():
        for mutation in mutations(f.source):
            broken = mutation.apply(f.source)
            compile(broken, f.key, "exec")
            differing = [a != b for a, b in zip(f.source.splitlines(), broken.splitlines(), strict=True)]
            assert sum(differing) == 1


def test_columns_are_characters_where_the_source_is_not_ascii() -> None:
    source = 'def f(a, b):\n    "né"\n    return "é", a + b\n'
    assert 'def f(a, b):\n    "né"\n    return "é", a - b\n' in [m.apply(source) for m in mutations(source)]


PACKAGE = {
    "shop/__init__.py": "",
    "shop/cart.py": '"""Carts."""\n\n\ndef total(prices):\n    """Sum."""\n    result = 0\n    for price in prices:\n'
    "        result += price\n    return result\n\n\ndef cheap(price, limit):\n    return price < limit\n",
    "tests/test_cart.py": "from shop.cart import cheap, total\n\nassert total([1, 2]) == 3\nassert total([]) == 0\n"
    "assert cheap(1, 2)\nassert not cheap(2, 2)\n",
}
COMMAND = "env PYTHONPATH=. python3 tests/test_cart.py"


def package(folder: Path, files: dict[str, str] | None = None) -> Path:
    for name, content in (files or PACKAGE).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def test_bad_packages_are_refused_with_a_reason(tmp_path: Path, isolating: None) -> None:
    def refused(files: dict[str, str], **options: object) -> str:
        root = package(tmp_path / str(len(list(tmp_path.iterdir()))), files)
        with pytest.raises(TaskError) as caught:
            tasks(tmp_path / "cache", path=str(root), **{"command": COMMAND, "n": 4, "timeout": 5.0, **options})
        return str(caught.value)

    assert "no mutable function" in refused({**PACKAGE, "shop/cart.py": "cheap = total = 1\n"}, command="true")
    assert "notice none" in refused({**PACKAGE, "tests/test_cart.py": ""})
    assert "did not end in 0.5 s" in refused(PACKAGE, command="sleep 1000", timeout=0.5)
    assert "no-such-program cannot be run" in refused(PACKAGE, command="no-such-program")
    with pytest.raises(TaskError, match="not a folder"):
        tasks(tmp_path / "cache", path=str(tmp_path / "nowhere"), n=1)


@pytest.mark.parametrize("options", [
    {"split": "dev"}, {"quoted": 2.0}, {"quoted": "some"}, {"n": -1}, {"path": "x", "split": "unseen"},
    {"timeout": 0.0}, {"timeout": 1e300}, {"command": " "}, {"command": "sh -c 'x"},
])  # fmt: skip
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        MutantSource(**options)
