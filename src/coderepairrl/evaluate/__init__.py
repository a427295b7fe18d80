"""Evaluation: what a policy does on held-out tasks, with intervals."""

from coderepairrl.evaluate.measures import COUNTS, Pairs, Summary, compare, measures, pair, summarise
from coderepairrl.evaluate.notes import Noted, Notes
from coderepairrl.evaluate.sample import sample

__all__ = ["COUNTS", "Noted", "Notes", "Pairs", "Summary", "compare", "measures", "pair", "sample", "summarise"]
