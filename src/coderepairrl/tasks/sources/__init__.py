"""Task sources by name; each benchmark is one module here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coderepairrl import registry
from coderepairrl.errors import ConfigError
from coderepairrl.protocols import TaskSource
from coderepairrl.tasks.select import SelectedSource, Selection
from coderepairrl.types import Task

SHIPPED = {
    "jsonl": "coderepairrl.tasks.jsonl:JsonlSource",
    "handmade": "coderepairrl.tasks.handmade:HandmadeSource",
    "mutants": "coderepairrl.tasks.mutants.source:MutantSource",
    "git_history": "coderepairrl.tasks.sources.git_history:GitHistory",
    "repair": "coderepairrl.tasks.sources.repair:Repair",
    "functions": "coderepairrl.tasks.sources.functions:Functions",
    "swe_bench": "coderepairrl.tasks.sources.swe_bench:SweBench",
    "swe_gym": "coderepairrl.tasks.sources.swe_gym:SweGym",
    "swe_smith": "coderepairrl.tasks.sources.swe_smith:SweSmith",
    "swe_rebench": "coderepairrl.tasks.sources.swe_rebench:SweRebench",
    "swe_bench_pro": "coderepairrl.tasks.sources.swe_bench_pro:SweBenchPro",
    "multi_swe_bench": "coderepairrl.tasks.sources.multi_swe_bench:MultiSweBench",
    "r2e_gym": "coderepairrl.tasks.sources.r2e_gym:R2EGym",
    "quixbugs": "coderepairrl.tasks.sources.quixbugs:QuixBugs",
    "humaneval": "coderepairrl.tasks.sources.humaneval:HumanEval",
    "humaneval_java": "coderepairrl.tasks.sources.humaneval_java:HumanEvalJava",
    "aider_polyglot": "coderepairrl.tasks.sources.aider_polyglot:AiderPolyglot",
    "defects4j": "coderepairrl.tasks.sources.defects4j:Defects4J",
    "gitbug_java": "coderepairrl.tasks.sources.gitbug_java:GitBugJava",
    "bugsinpy": "coderepairrl.tasks.sources.bugsinpy:BugsInPy",
    "primevul": "coderepairrl.tasks.sources.primevul:PrimeVul",
    "sven": "coderepairrl.tasks.sources.sven:Sven",
    "harbor": "coderepairrl.tasks.sources.harbor:Harbor",
    "thesis": "coderepairrl.tasks.sources.thesis:Thesis",
}
_KIND = "task source"


def make_source(source: str, /, select: Mapping[str, Any] | None = None, **options: Any) -> TaskSource:
    """Make the named source, or ``module:Class``, with `options`, limited by `select` (fields of `Selection`).

    Raises `ConfigError` for unknown names and options, and for missing options.
    """
    if Path(source).suffix in (".jsonl", ".json") and ":" not in source:
        raise ConfigError(
            f"{source} is not a task source: a file of tasks is read by `jsonl`",
            fix=f"write jsonl path={source}; in a configuration tasks.source=jsonl tasks.options.path={source}",
        )
    source_class = registry.resolve_class(_KIND, source, SHIPPED)
    registry.check_options(_KIND, source, source_class, options, also=["select"])
    task_source: TaskSource = registry.make_instance(_KIND, source, source_class, TaskSource, options)
    if not select:
        return task_source
    if not isinstance(select, Mapping):
        raise ConfigError(f"{_KIND} {source!r}: select must be a table", fix="write for example select.n=100")
    registry.check_options(_KIND, f"{source}.select", Selection, select)
    registry.check_types(_KIND, f"{source}.select", Selection, select)
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in select.items()}
    return SelectedSource(task_source, Selection(**fields))


def check_trainable(evaluation_set: str) -> None:
    """Raise `ConfigError` for an evaluation-only source."""
    if evaluation_set:
        raise ConfigError(
            f"{evaluation_set} is an evaluation set: a policy trained on it cannot be measured with it",
            fix="train on another source, or set this one's option for_training=true",
        )


class ScriptedSource(TaskSource):
    """Source with `tasks`, whose `prepare` raises `error`, if any; for tests."""

    name = "scripted"

    def __init__(self, tasks: Sequence[Task] = (), error: Exception | None = None) -> None:
        self.tasks = tuple(tasks)
        self.error = error
        self.prepared = 0

    def prepare(self) -> None:
        """Count the call, and raise `error`."""
        self.prepared += 1
        if self.error is not None:
            raise self.error

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)
