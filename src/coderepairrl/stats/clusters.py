"""What the id of a task says of it: what it is clustered with, and which kind of task it is."""

from __future__ import annotations

_MUTANTS = "mutants/"


def cluster_of(task_id: str) -> str:
    """What this task is no independent observation of: the function, for a mutant; else the task by itself.

    Bugs in one function are no independent observations: a policy that knows the function knows them all.

    >>> cluster_of("mutants/stats.median/compare-1f3a-q"), cluster_of("handmade/till")
    ('mutants/stats.median', 'handmade/till')
    """
    return task_id.rpartition("/")[0] if task_id.count("/") >= 2 and task_id.startswith(_MUTANTS) else task_id


def slice_of(task_id: str) -> str:
    """The kind of task that results are also given for: whether a mutant's issue quotes the broken line; else none.

    >>> slice_of("mutants/stats.median/compare-1f3a-q"), slice_of("handmade/till")
    ('quoted issues', '')
    """
    ends = {"-q": "quoted issues", "-u": "unquoted issues"}
    return ends.get(task_id[-2:], "") if task_id.startswith(_MUTANTS) else ""
