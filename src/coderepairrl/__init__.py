"""Train language models to repair code by doing it.

Importing the package loads no torch, transformers, vllm or matplotlib (a test checks this). The functions of
`coderepairrl.library` are loaded when first used.
"""

from typing import TYPE_CHECKING

from coderepairrl.version import __version__

__all__ = ["__version__", "attempt", "compare", "evaluate", "grade", "score"]

if TYPE_CHECKING:
    from coderepairrl.library import attempt, compare, evaluate, grade, score
else:  # mypy would take any name for an attribute

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from coderepairrl import library

        return getattr(library, name)
