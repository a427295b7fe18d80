"""Tasks: repositories with a bug (docs/guides/tasks.md).

>>> len(list(make_source("handmade"))) >= 6
True
"""

from coderepairrl.tasks.handmade import HandmadeSource
from coderepairrl.tasks.jsonl import JsonlSource, write_jsonl
from coderepairrl.tasks.sources import SHIPPED, ScriptedSource, check_trainable, make_source

__all__ = [
    "SHIPPED",
    "HandmadeSource",
    "JsonlSource",
    "ScriptedSource",
    "check_trainable",
    "make_source",
    "write_jsonl",
]
