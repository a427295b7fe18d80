"""Sankey charts: ribbons between the nodes of neighbouring columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from coderepairrl.report.plots import escape_label, shorten_label, wrap_svg
from coderepairrl.report.plots.panels import LETTER, colour_variable

_WIDTH, _HEIGHT = 920, 300
_LEFT, _TOP, _BOTTOM, _LAST_LABEL = 12, 34, 272, 72
_NODE_WIDTH, _GAP = 10, 4
_PITCH = 84
"""Least distance of two columns, so that ``apply_patch`` fits between them."""
_LABELLED_HEIGHT = 9.0
"""Least height of a node with a label."""


class Flow(NamedTuple):
    """Ribbon from `source` in `column` (1, 2, ...) to `target` in the next."""

    column: int
    source: str
    target: str
    size: int


def draw_sankey(charts: Mapping[str, Sequence[Flow]], colours: Mapping[str, int], standalone: bool = False) -> str:
    """Draw charts by title, one below the other; `colours` has all nodes, in order from the top."""
    transitions = max(flow.column for flows in charts.values() for flow in flows)
    width = max(_WIDTH, _LEFT + _PITCH * transitions + _NODE_WIDTH + _LAST_LABEL)
    parts = [
        f'<g transform="translate(0 {number * _HEIGHT})">{_draw_chart(title, flows, colours, width)}</g>'
        for number, (title, flows) in enumerate(charts.items())
    ]
    return wrap_svg("".join(parts), width, len(charts) * _HEIGHT, list(charts), standalone=standalone)


def _draw_chart(title: str, flows: Sequence[Flow], colours: Mapping[str, int], width: int) -> str:
    leaving, arriving = Counter[tuple[int, str]](), Counter[tuple[int, str]]()
    for column, source, target, size in flows:
        leaving[column, source] += size
        arriving[column + 1, target] += size
    sizes = leaving | arriving  # `|` of Counters: the larger of both
    order, last = list(colours), max(column for column, _ in sizes)
    columns = {column: [name for name in order if (column, name) in sizes] for column in range(1, last + 1)}
    scale = min(
        (_BOTTOM - _TOP - _GAP * (len(names) - 1)) / sum(sizes[column, name] for name in names)
        for column, names in columns.items()
    )
    pitch = (width - _LEFT - _LAST_LABEL - _NODE_WIDTH) / (last - 1)
    nodes, tops = [], {}
    for column, names in columns.items():
        x, y = _LEFT + (column - 1) * pitch, float(_TOP)
        nodes.append(f'<text x="{x:.1f}" y="{_HEIGHT - 8}">{column}</text>')
        for name in names:
            tops[column, name] = y
            height, colour = scale * sizes[column, name], colour_variable(colours[name])
            nodes.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{_NODE_WIDTH}" height="{height:.1f}" fill="{colour}">'
                f"<title>{column}: {escape_label(name)}, {sizes[column, name]}</title></rect>"
            )
            if height >= _LABELLED_HEIGHT:
                label = escape_label(shorten_label(name, int((pitch - _NODE_WIDTH - 6) / LETTER)))
                place = f'x="{x + _NODE_WIDTH + 4:.1f}" y="{y + height / 2 + 4:.1f}"'
                nodes.append(f'<text style="fill:var(--plot-ink)" {place}>{label}</text>')
            y += height + _GAP
    ribbons, starts, ends = [], dict(tops), dict(tops)
    stacked = sorted(flows, key=lambda flow: (order.index(flow.source), order.index(flow.target)))
    for column, source, target, size in stacked:
        start, end, height = starts[column, source], ends[column + 1, target], scale * size
        starts[column, source] += height
        ends[column + 1, target] += height
        left, right = _LEFT + (column - 1) * pitch + _NODE_WIDTH, _LEFT + column * pitch
        middle = (left + right) / 2
        ribbons.append(
            f'<path class="flow" fill="{colour_variable(colours[source])}" d="M{left:.1f} {start:.1f}'
            f"C{middle:.1f} {start:.1f} {middle:.1f} {end:.1f} {right:.1f} {end:.1f}V{end + height:.1f}"
            f'C{middle:.1f} {end + height:.1f} {middle:.1f} {start + height:.1f} {left:.1f} {start + height:.1f}Z">'
            f"<title>{column}: {escape_label(source)} to {escape_label(target)}, {size}</title></path>"
        )
    return f'<text class="title" x="12" y="20">{escape_label(title)}</text>{"".join(ribbons)}{"".join(nodes)}'
