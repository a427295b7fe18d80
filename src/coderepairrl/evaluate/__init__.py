"""Evaluation: what a policy does on held-out tasks, with intervals."""

from coderepairrl.evaluate.measures import COUNTS, Pairs, Summary, compare, measures, pair, summarise
from coderepairrl.evaluate.sample import sample

__all__ = ["COUNTS", "Pairs", "Summary", "compare", "measures", "pair", "sample", "summarise"]
