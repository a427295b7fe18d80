"""What runs do: training, evaluation, dry runs. The page to read is `train`."""

from coderepairrl.processes.signals import Interrupted, until_interrupted
from coderepairrl.stages.command import dry_run, folder_of, named, needs, plan, run, summary

__all__ = ["Interrupted", "dry_run", "folder_of", "named", "needs", "plan", "run", "summary", "until_interrupted"]
