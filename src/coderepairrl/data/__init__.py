"""``crrl data``: which tasks there are; prepare, verify and export them (docs/tasks.md)."""

from coderepairrl.data.sources import Listing, export, load, shipped, splits
from coderepairrl.data.verify import Verdict, table, verify

__all__ = ["Listing", "Verdict", "export", "load", "shipped", "splits", "table", "verify"]
