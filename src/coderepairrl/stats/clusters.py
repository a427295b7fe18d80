"""Which tasks depend on each other, and the slices of tasks that results are also given for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from statistics import median

from coderepairrl.types import Episode

_MUTANTS = "mutants/"
_SEVERAL_OF_ONE = (_MUTANTS, "primevul/", "sven/")
"""Sources with several tasks of one function, whose ids differ in the last part alone."""
_SLICES = 12
"""A field with more values than these parts tasks into pieces too small for an estimate."""


def clusters_of(episodes: Iterable[Episode]) -> dict[str, str]:
    """The cluster of the task of each of `episodes`, by task id.

    Bugs of one repository are no independent observations: a policy that knows the repository knows them all. So a task
    is clustered with the others of its repository; where all are of one, they are observations of that repository, and
    each stands for itself. Without a repository a mutant is clustered with those of its function, a question about a
    vulnerable function with those of its pair, and any other task stands for itself.

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
    """As `clusters_of`, of tasks whose repository is known, or empty.

    >>> clusters_by({"a": "flask", "b": "sympy", "c": ""})
    {'a': 'flask', 'b': 'sympy', 'c': 'c'}
    """
    several = len(set(repositories.values())) > 1
    return {task: (several and repository) or _alone(task) for task, repository in repositories.items()}


def _alone(task_id: str) -> str:
    """The function of a mutant, the pair of a vulnerable function, any other task by itself.

    >>> _alone("mutants/stats.median/compare-1f3a-q"), _alone("handmade/till")
    ('mutants/stats.median', 'handmade/till')
    """
    return task_id.rpartition("/")[0] if task_id.count("/") >= 2 and task_id.startswith(_SEVERAL_OF_ONE) else task_id


def slice_of(task_id: str) -> str:
    """Whether the issue of a mutant quotes the broken line; empty for any other task.

    >>> slice_of("mutants/stats.median/compare-1f3a-q"), slice_of("handmade/till")
    ('quoted issues', '')
    """
    ends = {"-q": "quoted issues", "-u": "unquoted issues"}
    return ends.get(task_id[-2:], "") if task_id.startswith(_MUTANTS) else ""


def slices(episodes: Iterable[Episode], further: Iterable[Callable[[Episode], str]] = ()) -> dict[str, frozenset[str]]:
    """Ids of the tasks that results are also given for, by what they have in common: kind, language, repository, their
    half of the difficulties, what mutants' issues quote, and `further` fields, each a name or nothing. A field that is
    the same for all makes no slice.

    >>> from coderepairrl.types import Ending
    >>> slices(Episode("", f"t{at}", "eval", 0, "", 0, Ending.DONE, language=own) for at, own in enumerate(("c", "go")))
    {'language c': frozenset({'t0'}), 'language go': frozenset({'t1'})}
    """
    tasks = {episode.task_id: episode for episode in episodes}
    known = [task.difficulty for task in tasks.values() if task.difficulty is not None]
    middle = median(known) if known else 0.0

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
    found: dict[str, frozenset[str]] = {}
    for field in fields:
        found |= split({name: field(task) for name, task in tasks.items()})
    return found


def split(values: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """The keys of `values` by value, those without one in no part; none where all are alike, or there are too many.

    >>> split({"a": "go", "b": "c", "c": ""}), split({"a": "go", "b": "go"})
    ({'c': frozenset({'b'}), 'go': frozenset({'a'})}, {})
    """
    known = set(values.values())
    if not 1 < len(known) <= _SLICES:
        return {}
    return {part: frozenset(key for key, own in values.items() if own == part) for part in sorted(known - {""})}
