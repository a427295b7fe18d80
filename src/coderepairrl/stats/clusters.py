"""Clusters of dependent tasks, and slices for separate results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from statistics import median

from coderepairrl.types import Episode

_MUTANTS = "mutants/"
_SEVERAL_OF_ONE = (_MUTANTS, "primevul/", "sven/")
_SLICES = 12
"""Values above which a field makes no slices: too small for an estimate."""


def clusters_of(episodes: Iterable[Episode]) -> dict[str, str]:
    """Cluster of each episode's task, by task id.

    Tasks of one repository share a cluster, unless it is the only one. Without a repository, a mutant is clustered by
    function, a vulnerable function with its pair.

    >>> from coderepairrl.types import Ending
    >>> def of(*repositories: str) -> list[Episode]:
    ...     return [Episode("", f"t{at}", "eval", 0, "", 0, Ending.DONE, repository=own)
    ...             for at, own in enumerate(repositories)]
    >>> clusters_of(of("flask", "flask", "sympy")), clusters_of(of("flask", "flask"))
    ({'t0': 'flask', 't1': 'flask', 't2': 'sympy'}, {'t0': 't0', 't1': 't1'})
    """
    repositories: dict[str, str] = {}
    for episode in episodes:  # runs of older versions do not have it
        repositories[episode.task_id] = episode.repository or repositories.get(episode.task_id, "")
    return clusters_by(repositories)


def clusters_by(repositories: Mapping[str, str]) -> dict[str, str]:
    """`clusters_of` from repositories by task.

    >>> clusters_by({"a": "flask", "b": "sympy", "c": ""})
    {'a': 'flask', 'b': 'sympy', 'c': 'c'}
    """
    several = len(set(repositories.values())) > 1
    return {task: (several and repository) or _alone(task) for task, repository in repositories.items()}


def _alone(task_id: str) -> str:
    """Cluster of a task without a repository.

    >>> _alone("mutants/stats.median/compare-1f3a-q"), _alone("handmade/till")
    ('mutants/stats.median', 'handmade/till')
    """
    return task_id.rpartition("/")[0] if task_id.count("/") >= 2 and task_id.startswith(_SEVERAL_OF_ONE) else task_id


def slice_of(task_id: str) -> str:
    """Whether a mutant's issue quotes the broken line.

    >>> slice_of("mutants/stats.median/compare-1f3a-q"), slice_of("handmade/till")
    ('quoted issues', '')
    """
    ends = {"-q": "quoted issues", "-u": "unquoted issues"}
    return ends.get(task_id[-2:], "") if task_id.startswith(_MUTANTS) else ""


def slices(episodes: Iterable[Episode], further: Iterable[Callable[[Episode], str]] = ()) -> dict[str, frozenset[str]]:
    """Task ids by slice: kind, language, repository, difficulty half, quotes in mutants' issues, `further` fields.

    >>> from coderepairrl.types import Ending
    >>> slices(Episode("", f"t{at}", "eval", 0, "", 0, Ending.DONE, language=own) for at, own in enumerate(("c", "go")))
    {'language c': frozenset({'t0'}), 'language go': frozenset({'t1'})}
    """
    tasks = {episode.task_id: episode for episode in episodes}
    difficulties = [task.difficulty for task in tasks.values() if task.difficulty is not None]
    middle = median(difficulties) if difficulties else 0.0

    def difficulty(task: Episode) -> str:
        if task.difficulty is None:
            return ""
        return f"difficulty up to {middle:g}" if task.difficulty <= middle else f"difficulty above {middle:g}"

    fields: tuple[Callable[[Episode], str], ...] = (
        lambda task: slice_of(task.task_id),
        lambda task: task.kind and f"kind {task.kind}",
        lambda task: task.language and f"language {task.language}",
        lambda task: task.repository and f"repository {task.repository}",
        difficulty,
        *further,
    )
    by_slice: dict[str, frozenset[str]] = {}
    for field in fields:
        by_slice |= split({name: field(task) for name, task in tasks.items()})
    return by_slice


def split(values: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """Keys of `values` by value; none if all are equal, or values too many.

    >>> split({"a": "go", "b": "c", "c": ""}), split({"a": "go", "b": "go"})
    ({'c': frozenset({'b'}), 'go': frozenset({'a'})}, {})
    """
    distinct = set(values.values())
    if not 1 < len(distinct) <= _SLICES:
        return {}
    return {part: frozenset(key for key, value in values.items() if value == part) for part in sorted(distinct - {""})}
