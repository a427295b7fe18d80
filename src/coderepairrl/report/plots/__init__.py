"""Figures as SVG text, for light and dark, without dependencies."""

from coderepairrl.report.plots.figure import figure, forest, pdf
from coderepairrl.report.plots.panels import STYLE, Baseline, Panel, Series, choose_alpha, ema, format_number

__all__ = ["STYLE", "Baseline", "Panel", "Series", "choose_alpha", "ema", "figure", "forest", "format_number", "pdf"]
