"""The training loop: `loop` is the page to read."""

from coderepairrl.processes.signals import Interrupted, until_told
from coderepairrl.stages.command import folder_of, missing, named, needs, plan, run, summary

__all__ = ["Interrupted", "folder_of", "missing", "named", "needs", "plan", "run", "summary", "until_told"]
