"""``crrl fix``: a trained model, or any other, on a repository of the user's own (docs/fix.md)."""

from coderepairrl.fix.command import Fixed, fix
from coderepairrl.fix.model import Choice, choose
from coderepairrl.fix.repository import Repository, apply, open_repository, read_issue
from coderepairrl.fix.trace import Trace, show

__all__ = ["Choice", "Fixed", "Repository", "Trace", "apply", "choose", "fix", "open_repository", "read_issue", "show"]
