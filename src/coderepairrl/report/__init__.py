"""Reports of runs: HTML, JSON and figures."""

from coderepairrl.report.command import load, numbers, write_figure, write_page
from coderepairrl.report.page import render
from coderepairrl.report.tables import export

__all__ = ["export", "load", "numbers", "render", "write_figure", "write_page"]
