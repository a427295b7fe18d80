"""``crrl fix``: a trained or other model on the user's repository (docs/guides/fix.md)."""

from coderepairrl.apps.fix.command import Fixed, Repair, fix, resolve
from coderepairrl.apps.fix.repository import apply
from coderepairrl.apps.fix.trace import Trace, show

__all__ = ["Fixed", "Repair", "Trace", "apply", "fix", "resolve", "show"]
