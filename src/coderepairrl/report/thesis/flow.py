"""Flow of commands from call to call, and the calls of one episode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise

from coderepairrl.agents.tools import MONITORED
from coderepairrl.printable import format_count
from coderepairrl.report.plots import Panel, Series
from coderepairrl.report.plots.panels import COLOURS
from coderepairrl.report.plots.sankey import Flow, draw_sankey
from coderepairrl.report.thesis.attempts import Attempt, Call, ThesisRun, split_ends
from coderepairrl.report.thesis.marks import Figure, draw_panels, make_each

_GREY = _OTHER, _MORE, _END = "other", "more calls", "end"
_SHORT = 12
"""Most calls of an episode that is read at a glance."""
NO_CALLS = "no attempt called a tool"


def make_flow_figures(
    runs: Sequence[ThesisRun], calls: int = 8, commands: Collection[str] = MONITORED
) -> Iterator[Figure]:
    """Flow of `commands` and tools over the first `calls` calls, early and late, and the calls of one episode."""
    yield from make_each(runs, lambda run: _draw_flow(run, calls, commands), _draw_episode)


def _draw_flow(run: ThesisRun, calls: int, commands: Collection[str]) -> Figure:
    early, late, steps, missing = split_ends(run)
    charts: dict[str, list[Flow]] = {}
    rows = []
    uses: Counter[str] = Counter()
    for end, attempts in (("early", early), ("late", late)):
        flows = count_flows(attempts, calls, {*commands, *run.report.tools})
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
        f"First command of each call, and that of the next; a ribbon is as wide as its transitions are many. "
        f"n = {len(early)} and {len(late)} attempts (steps at either end: {steps}), all counted: no intervals. "
        f"After {calls} calls an attempt ends or has more. A share is of a position's transitions."
    )
    heads = ("end", "position", "from", "to", "transitions", "share")
    missing = missing or ("" if charts else NO_CALLS)
    title = "Flow of commands, early and late"
    drawing = partial(draw_sankey, charts, colours)
    return Figure("command-flow", title, caption, heads, rows, drawing, missing)


def count_flows(attempts: Iterable[Attempt], calls: int, names: Collection[str]) -> list[Flow]:
    """Count the transitions between the first `calls` calls; a command that is not in `names` is ``other``."""
    counts: Counter[tuple[int, str, str]] = Counter()
    for attempt in attempts:
        path = [call.command if call.command in names else _OTHER for call in attempt.calls[:calls]]
        path.append(_MORE if len(attempt.calls) > calls else _END)
        counts.update((column, *pair) for column, pair in enumerate(pairwise(path), 1))
    return [Flow(*flow, size) for flow, size in sorted(counts.items())]


def _draw_episode(run: ThesisRun) -> Figure:
    name, title = "episode", "Calls of one episode"
    called = [each for each in run.attempts if each.calls]
    if not called:
        return Figure(name, title, missing=NO_CALLS)
    repaired = [each for each in called if each.resolved and len(each.calls) <= _SHORT]
    chosen = repaired[-1] if repaired else max(called, key=lambda each: each.reward)
    lanes = list(dict.fromkeys(call.command for call in chosen.calls))
    series = []
    for label, ok, colour in (("succeeded", True, 2), ("failed", False, 1)):
        places = [(at, lanes.index(call.command)) for at, call in enumerate(chosen.calls, 1) if call.ok is ok]
        x, ends, floor = [lane for _, lane in places], [at + 0.4 for at, _ in places], [at - 0.4 for at, _ in places]
        series.append(Series(label, x, ends, colour, floor=floor))
    panel = Panel(chosen.id, series, "call", include=(0.0, len(chosen.calls) + 1), kind="rows", labels=lanes)
    why = f"last resolved one with at most {_SHORT} calls" if repaired else "one with the highest reward"
    caption = (
        f"Episode {chosen.id} of {chosen.task}, step {chosen.step}: the {why}, "
        f"of n = {len(called)} attempts with calls. Reward {chosen.reward:.3f}, "
        f"{format_count(len(chosen.calls), 'call')}. One episode is an example, without an interval. The CSV has the "
        "command lines."
    )
    rows = [(chosen.id, at, *call) for at, call in enumerate(chosen.calls, 1)]
    return Figure(name, title, caption, ("id", "position", *Call._fields), rows, draw_panels(panel))
