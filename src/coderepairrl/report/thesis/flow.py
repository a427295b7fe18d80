"""Figures of tool calls: which command follows which, and all calls of one episode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise

from coderepairrl.agents.tools import MONITORED
from coderepairrl.printable import format_count
from coderepairrl.report.plots.panels import COLOURS, Panel, Series
from coderepairrl.report.plots.sankey import Flow, draw_sankey
from coderepairrl.report.thesis.attempts import Attempt, Call, ThesisRun, split_ends
from coderepairrl.report.thesis.marks import Figure, draw_panels, make_per_run

_OTHER, _MORE, _END = "other", "more calls", "end"
_GREY = (_OTHER, _MORE, _END)
"""Nodes that are not commands."""
CALLS = 8
"""Default number of calls of an attempt that the flow shows."""
_MAX_LEGIBLE = 12
"""Most calls of an episode that its figure shows legibly."""
NO_CALLS = "no attempt called a tool"


def make_flow_figures(
    runs: Sequence[ThesisRun], commands: Collection[str] = (), calls: int = CALLS
) -> Iterator[Figure]:
    """Make the flow over the first `calls` calls of early and late attempts, and the calls of one episode.

    `commands` are the commands and tools that get their own nodes (default: those that reports count).
    """
    yield from make_per_run(runs, partial(_draw_flow, commands=commands, calls=calls), _draw_episode)


def _draw_flow(run: ThesisRun, commands: Collection[str], calls: int) -> Figure:
    ends = split_ends(run)
    charts: dict[str, list[Flow]] = {}
    rows = []
    uses: Counter[str] = Counter()
    for end, attempts in ends.sides.items():
        flows = _count_flows(attempts, commands or {*MONITORED, *run.report.tools}, calls)
        columns: Counter[int] = Counter()
        for column, source, _, size in flows:
            columns[column] += size
            uses[source] += size
        rows += [(end, *flow, flow.size / columns[flow.column]) for flow in flows]
        if flows:
            charts[f"{end}, {columns[1]} attempts with calls"] = flows
    # the most used commands are on top and have a colour each, the rest is grey
    ranked = [name for name, _ in uses.most_common() if name not in _GREY]
    colours = {name: min(number, COLOURS - 1) for number, name in enumerate(ranked)} | dict.fromkeys(_GREY, COLOURS - 1)
    caption = (
        "Transitions from the first command of a call to the first of the next; a ribbon's width is their number. "
        f"n = {len(ends.early)} attempts early and {len(ends.late)} late ({ends.steps} steps each). All are counted: "
        f"no intervals. Calls after the first {calls} are one node, {_MORE}. In the CSV, shares are of all transitions "
        "from the same position."
    )
    if unused := [name for name in commands if name not in uses]:
        caption += f" Not among these calls: {', '.join(unused)}."
    heads = ("end", "position", "from", "to", "transitions", "share")
    missing = ends.missing or ("" if charts else NO_CALLS)
    title = "Flow of commands, early and late"
    drawing = partial(draw_sankey, charts, colours)
    return Figure("command-flow", title, caption, heads, rows, drawing, missing)


def _count_flows(attempts: Iterable[Attempt], names: Collection[str], most: int) -> list[Flow]:
    """Count the transitions between the first `most` calls; commands that are not in `names` count as ``other``."""
    counts: Counter[tuple[int, str, str]] = Counter()
    for attempt in attempts:
        path = [call.command if call.command in names else _OTHER for call in attempt.calls[:most]]
        path.append(_MORE if len(attempt.calls) > most else _END)
        counts.update((column, *pair) for column, pair in enumerate(pairwise(path), 1))
    return [Flow(*flow, size) for flow, size in sorted(counts.items())]


def _draw_episode(run: ThesisRun) -> Figure:
    name, title = "episode", "Calls of one episode"
    attempts = [attempt for attempt in run.attempts if attempt.calls]
    if not attempts:
        return Figure(name, title, missing=NO_CALLS)
    resolved = [attempt for attempt in attempts if attempt.resolved and len(attempt.calls) <= _MAX_LEGIBLE]
    example = resolved[-1] if resolved else max(attempts, key=lambda attempt: attempt.reward)
    lanes = list(dict.fromkeys(call.command for call in example.calls))
    series = []
    for label, ok, colour in (("succeeded", True, 2), ("failed", False, 1)):
        positions = [at for at, call in enumerate(example.calls, 1) if call.ok is ok]
        rows = [lanes.index(example.calls[at - 1].command) for at in positions]
        floor, values = [at - 0.4 for at in positions], [at + 0.4 for at in positions]
        series.append(Series(label, rows, values, colour, floor=floor))
    panel = Panel(example.id, series, "call", include=(0.0, len(example.calls) + 1), kind="rows", labels=lanes)
    why = f"last resolved one with at most {_MAX_LEGIBLE} calls" if resolved else "one with the highest reward"
    caption = (
        f"Episode {example.id} of {example.task}, step {example.step}: the {why}, of n = {len(attempts)} attempts with "
        f"calls. Reward {example.reward:.3f}, {format_count(len(example.calls), 'call')}. An example, so no interval. "
        "The CSV has the command lines."
    )
    table = [(example.id, at, *call) for at, call in enumerate(example.calls, 1)]
    return Figure(name, title, caption, ("id", "position", *Call._fields), table, draw_panels(panel))
