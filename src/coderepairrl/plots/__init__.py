"""Figures as SVG text: no dependency, light and dark, the same in a page and in a file of its own."""

from coderepairrl.plots.figure import figure
from coderepairrl.plots.forest import forest
from coderepairrl.plots.panels import STYLE, Baseline, Panel, Series
from coderepairrl.plots.scale import compact
from coderepairrl.plots.smooth import ema, strength

__all__ = ["STYLE", "Baseline", "Panel", "Series", "compact", "ema", "figure", "forest", "strength"]
