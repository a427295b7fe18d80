"""The training loop: `loop` is the page to read."""

from coderepairrl.train.command import needs, plan, run, summary
from coderepairrl.train.signals import Interrupted, until_told

__all__ = ["Interrupted", "needs", "plan", "run", "summary", "until_told"]
