"""``crrl fix``: a trained model, or any other, on a repository of the user's own (docs/guides/fix.md)."""

from coderepairrl.apps.fix.command import DEFAULTS, USED, Fixed, fix
from coderepairrl.apps.fix.repository import Repository, apply, open_repository, read_issue
from coderepairrl.apps.fix.trace import Trace, show

__all__ = ["DEFAULTS", "USED", "Fixed", "Repository", "Trace", "apply", "fix", "open_repository", "read_issue", "show"]
