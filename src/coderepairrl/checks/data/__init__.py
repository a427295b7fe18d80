"""``crrl data``: list, prepare, verify and export tasks (docs/guides/tasks.md)."""

from coderepairrl.checks.data.verify import TaskExam, apart, left_out, table, verify
from coderepairrl.tasks.catalog import Listing, export, listed, load, recognised, shipped, splits
from coderepairrl.tasks.harbor import IMAGE
from coderepairrl.tasks.harbor import export as export_harbor
from coderepairrl.tasks.overlap import Overlap, overlap
from coderepairrl.tasks.overlap import report as shared
from coderepairrl.tasks.prepare import lacking
from coderepairrl.tasks.select import write_quarantine

__all__ = [
    "IMAGE",
    "Listing",
    "Overlap",
    "TaskExam",
    "apart",
    "export",
    "export_harbor",
    "lacking",
    "left_out",
    "listed",
    "load",
    "overlap",
    "recognised",
    "shared",
    "shipped",
    "splits",
    "table",
    "verify",
    "write_quarantine",
]
