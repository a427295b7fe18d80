"""``crrl data``: which tasks there are; prepare, verify and export them (docs/tasks.md)."""

from coderepairrl.data.audit import Judged, audit, figure, read, report
from coderepairrl.data.sources import Listing, export, load, shipped, splits
from coderepairrl.data.verify import Verdict, table, verify

__all__ = [
    "Judged",
    "Listing",
    "Verdict",
    "audit",
    "export",
    "figure",
    "load",
    "read",
    "report",
    "shipped",
    "splits",
    "table",
    "verify",
]
