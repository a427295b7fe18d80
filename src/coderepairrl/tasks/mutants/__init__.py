"""Tasks made by breaking healthy code: one verified one-line bug per repository."""

from coderepairrl.tasks.mutants.source import MutantSource

__all__ = ["MutantSource"]
