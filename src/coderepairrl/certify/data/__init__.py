"""``crrl data``: which tasks there are; prepare, verify and export them (docs/guides/tasks.md)."""

from coderepairrl.certify.data.audit import Judged, audit, figure, read, report
from coderepairrl.certify.data.verify import TaskExam, table, verify
from coderepairrl.tasks.catalog import Listing, export, listed, load, shipped, splits

__all__ = [
    "Judged",
    "Listing",
    "TaskExam",
    "audit",
    "export",
    "figure",
    "listed",
    "load",
    "read",
    "report",
    "shipped",
    "splits",
    "table",
    "verify",
]
