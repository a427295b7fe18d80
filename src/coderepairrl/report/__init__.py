"""Reports of runs: pages, JSON, figures, tables and exports."""

from coderepairrl.report.site import Site
from coderepairrl.report.tables import export_figures

__all__ = ["Site", "export_figures"]
