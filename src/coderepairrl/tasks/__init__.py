"""Tasks: repositories with a bug (docs/guides/tasks.md).

>>> len(list(make("handmade"))) >= 6
True
"""

from coderepairrl.tasks.handmade import HandmadeSource
from coderepairrl.tasks.jsonl import JsonlSource, write_jsonl
from coderepairrl.tasks.sources import SHIPPED, ScriptedSource, check_trainable, make

__all__ = [
    "SHIPPED",
    "HandmadeSource",
    "JsonlSource",
    "ScriptedSource",
    "check_trainable",
    "make",
    "write_jsonl",
]
