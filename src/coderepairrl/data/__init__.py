"""``crrl data``: which tasks there are; prepare, verify and export them (docs/tasks.md)."""

from coderepairrl.data.audit import Judged, audit, read, report
from coderepairrl.data.sources import Listing, export, load, shipped, splits
from coderepairrl.data.verify import Verdict, table, verify

__all__ = [
    "Judged",
    "Listing",
    "Verdict",
    "audit",
    "export",
    "load",
    "read",
    "report",
    "shipped",
    "splits",
    "table",
    "verify",
]
