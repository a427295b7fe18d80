"""Run folders: the log, its exports, and JSON of its types."""

from coderepairrl.runs.folder import RunFolder, logged_episodes, open_run
from coderepairrl.runs.log import Log, Tail

__all__ = ["Log", "RunFolder", "Tail", "logged_episodes", "open_run"]
