"""Static pages of a run: an episode token by token, and the index of all episodes. Self-contained HTML, no scripts."""

from coderepairrl.report.view.page import Row, render_episode, render_index
from coderepairrl.report.view.run import render

__all__ = ["Row", "render", "render_episode", "render_index"]
