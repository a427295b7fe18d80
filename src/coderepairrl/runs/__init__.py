"""Run folders: the append-only log, its exports, and the codec between nouns and JSON."""

from coderepairrl.runs.folder import RunFolder, logged_episodes, open_run
from coderepairrl.runs.log import Log

__all__ = ["Log", "RunFolder", "logged_episodes", "open_run"]
