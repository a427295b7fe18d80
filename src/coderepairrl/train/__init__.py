"""The training loop: `loop` is the page to read."""

from coderepairrl.train.command import missing, needs, plan, run, summary
from coderepairrl.train.signals import Interrupted, until_told

__all__ = ["Interrupted", "missing", "needs", "plan", "run", "summary", "until_told"]
