"""``crrl fix``: a trained model, or any other, on a repository of the user's own (docs/fix.md)."""

from coderepairrl.fix.command import DEFAULTS, USED, Fixed, fix
from coderepairrl.fix.repository import Repository, apply, open_repository, read_issue
from coderepairrl.fix.trace import Trace, show

__all__ = ["DEFAULTS", "USED", "Fixed", "Repository", "Trace", "apply", "fix", "open_repository", "read_issue", "show"]
