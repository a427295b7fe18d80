"""Run folders: the append-only log, its exports, and the codec between types and JSON."""

from coderepairrl.runs.folder import RunFolder, logged_episodes, open_run
from coderepairrl.runs.log import Log, Tail

__all__ = ["Log", "RunFolder", "Tail", "logged_episodes", "open_run"]
