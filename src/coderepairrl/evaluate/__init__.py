"""Evaluation: what a policy does on held-out tasks, with intervals."""

from coderepairrl.evaluate.measures import Pairs, Summary, compare, measures, pair, summarise

__all__ = ["Pairs", "Summary", "compare", "measures", "pair", "summarise"]
