"""Shipped task sources; listing and export of tasks."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from coderepairrl import tasks
from coderepairrl.environments.verify import read_fingerprint
from coderepairrl.errors import UsageError
from coderepairrl.protocols import TaskSource
from coderepairrl.tasks import rows
from coderepairrl.tasks.mutants.corpus_tasks import load_mutants, make_exercise
from coderepairrl.tasks.prepare import find_missing_needs
from coderepairrl.types import Task

BENCHMARKS = {
    "swe_bench": "issues of public repositories: name=verified (500), lite (300), multilingual (300), full (2,294)",
    "swe_gym": "issues of 11 Python repositories to train on: name=full (2,438), lite (230)",
    "swe_smith": "bugs injected into public Python repositories, to train on",
    "swe_rebench": "issues mined by machine, to train on: name=v2 (32,079), v1 (21,302), leaderboard",
    "swe_bench_pro": "longer issues of public repositories",
    "multi_swe_bench": "issues in seven languages: name=bench (1,632), rl to train on",
    "r2e_gym": "commits of 13 Python repositories, to train on: name=subset, lite, full",
    "quixbugs": "40 algorithms with a bug each: path=CHECKOUT language=python, java",
    "humaneval": "164 Python functions with a bug made by mutation: path=HumanEval.jsonl.gz",
    "humaneval_java": "161 Java classes with an injected bug: path=CHECKOUT",
    "aider_polyglot": "225 exercises: path=CHECKOUT language=python, javascript, java, go, rust, cpp",
    "defects4j": "864 bugs of 17 Java projects: path=CHECKOUT",
    "gitbug_java": "199 recent bugs of Java repositories: path=CHECKOUT",
    "bugsinpy": "501 bugs of 17 Python projects: path=CHECKOUT",
    "primevul": "pairs of a vulnerable function and its repair: ask=weakness (nine), vulnerable, repair",
    "sven": "803 pairs of a vulnerable function and its repair: path=FILE ask=weakness, vulnerable, repair",
    "harbor": "tasks in Harbor's format (terminal-bench 2 and others): path=FOLDER",
    "thesis": "the thesis' curriculum: 750 of swe_gym, 250 of swe_bench's multilingual, its other 43 held out",
}
"""Published benchmarks, with rows on the hub or in a checkout that ``path`` names."""


class Listing(NamedTuple):
    """A shipped source, its number of tasks by split (empty unless its tasks ship, too), and its description."""

    source: str
    splits: dict[str, int]
    about: str


def list_sources() -> list[Listing]:
    """List the shipped sources without writing files."""
    handmade = count_splits(tasks.make_source("handmade"))
    return [
        Listing("handmade", handmade, "small repositories with a bug each, in several languages"),
        Listing(
            "mutants",
            _count_corpus_splits(),
            "bugs injected into shipped functions; into your package: path=FOLDER n=64",
        ),
        Listing("jsonl", {}, "your own, one JSON object per line: path=FILE"),
        Listing("git_history", {}, "commits of your repository that repaired something with tests: path=FOLDER n=50"),
        Listing("functions", {}, "functions of Python code to write again by their docstrings: path=PACKAGE, or rows"),
        Listing("repair", {}, "repairs of one file in one turn: source=NAME, or code before and after: path=ROWS"),
        *(Listing(name, {}, description) for name, description in BENCHMARKS.items()),
    ]


def _count_corpus_splits() -> dict[str, int]:
    counts = Counter[str]()
    for mutant in load_mutants():
        for quoted in (True, False):  # as `MutantSource` with its default options
            counts[mutant.split] += make_exercise(mutant, Random(f"{mutant.key}/0"), quoted) is not None
    return dict(sorted(counts.items()))


def load_source(source: str, options: Mapping[str, Any]) -> TaskSource:
    """Prepare the named source. Raises `ConfigError`, and `TaskError` for unusable tasks."""
    task_source = tasks.make_source(source, **options)
    task_source.prepare()
    return task_source


def resolve_source(dataset: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Resolve `dataset` to source and options: a source name, or a Harbor folder or file of rows or tasks by path.

    Raises `UsageError` for another path, `ConfigError` for an unknown name.
    """
    path = Path(dataset).expanduser()
    is_path = path.exists() or "/" in dataset or path.suffix
    if dataset in tasks.SHIPPED or ":" in dataset or not is_path:  # a name, or module:Class
        return dataset, dict(options)
    if "path" in options:
        raise UsageError(f"{dataset} is a path, and options.path another", fix="name the source, or leave out path=")
    path_options = {**options, "path": str(path)}
    if path.is_dir():
        if not (path / "task.toml").is_file() and not any(path.glob("*/task.toml")):
            raise UsageError(f"{path} has no folder with a task.toml", fix=f"name its source: SOURCE path={path}")
        return "harbor", path_options
    if not path.exists():
        raise UsageError(f"{path} does not exist", fix="name a task source, a file, or a folder of Harbor tasks")
    first = next(iter(rows.read_rows("rows", path)), None)
    if first is None:
        raise UsageError(f"{path} has no tasks", fix="write one JSON object a line")
    return ("swe_bench" if "instance_id" in first else "jsonl"), path_options


def suggest_task_ids(task_id: str, ids: Sequence[str]) -> str:
    """Fix for an unknown task: the number of tasks, and the nearest ids.

    >>> suggest_task_ids("mine/and", ["mine/add", "mine/sub"])
    'of 2, such as mine/add, mine/sub'
    """
    near = difflib.get_close_matches(task_id, ids, n=3, cutoff=0.3) or ids[:3]
    return f"of {len(ids):,}, such as {', '.join(near)}"


def count_splits(source: Iterable[Task]) -> dict[str, int]:
    """Number of tasks by split, largest first."""
    return dict(Counter(task.split for task in source).most_common())


def list_tasks(source: Iterable[Task]) -> list[dict[str, Any]]:
    """A dict per task: ``id``, ``split``, ``workspace``, ``environment``, ``digest`` and missing needs (``lacks``)."""
    task_list = list(source)
    lacks = find_missing_needs(task_list)
    columns = ("id", "split", "workspace", "environment")
    return [
        {
            **{name: getattr(task, name) for name in columns},
            "digest": read_fingerprint(task).digest,
            "lacks": list(lacks[task.id]),
        }
        for task in task_list
    ]


def export_tasks_jsonl(source: Iterable[Task], target: Path) -> int:
    """Write tasks to a new file of JSON lines; return their number. Raises `UsageError`."""
    if target.exists():
        raise UsageError(f"{target} already exists", fix="remove it, or name another file")
    task_list = list(source)
    try:
        tasks.write_jsonl(task_list, target)
    except OSError as error:
        raise UsageError(f"{target}: {error.strerror}", fix="name a file in a folder that you may write to") from error
    return len(task_list)
