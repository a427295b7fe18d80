"""Tasks: repositories with a bug (F2, docs/tasks.md).

    >>> len(list(make("handmade"))) >= 6
    True

`make` gives a source by name; `write_jsonl` writes tasks in the documented schema.
"""

from coderepairrl.tasks.exam import Study, about_source, examine, study
from coderepairrl.tasks.handmade import HandmadeSource
from coderepairrl.tasks.jsonl import JsonlSource, write_jsonl
from coderepairrl.tasks.sources import SHIPPED, ScriptedSource, make

__all__ = [
    "SHIPPED",
    "HandmadeSource",
    "JsonlSource",
    "ScriptedSource",
    "Study",
    "about_source",
    "examine",
    "make",
    "study",
    "write_jsonl",
]
