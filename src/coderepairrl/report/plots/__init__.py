"""Figures as SVG text, for light and dark, without dependencies."""

from coderepairrl.report.plots.figure import figure, forest, pdf
from coderepairrl.report.plots.panels import STYLE, Baseline, Panel, Series, compact, ema, strength

__all__ = ["STYLE", "Baseline", "Panel", "Series", "compact", "ema", "figure", "forest", "pdf", "strength"]
