"""The training loop: `loop` is the page to read."""

from coderepairrl.train.command import folder_of, missing, named, needs, plan, run, summary
from coderepairrl.train.signals import Interrupted, until_told

__all__ = ["Interrupted", "folder_of", "missing", "named", "needs", "plan", "run", "summary", "until_told"]
