"""The diagrams of the documentation, one function each, as SVG for light and dark pages.

python -m workshop.docs.diagrams docs/pictures
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path

from workshop.docs.picture import STYLE

WIDTH = 760
LINE = 17  # Pixels between lines of text.

DIAGRAM_STYLE = """
text.t { font: 13px system-ui, "Segoe UI", "Helvetica Neue", "DejaVu Sans", sans-serif; }
text.s { font: 12px system-ui, "Segoe UI", "Helvetica Neue", "DejaVu Sans", sans-serif; fill: var(--soft); }
text.i { fill: var(--ink); } text.b { font-weight: 600; } text.m { text-anchor: middle; } text.e { text-anchor: end; }
text.f { font: 12px ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.box { fill: var(--given); stroke: var(--edge); } .model { fill: var(--policy); stroke: var(--edge); }
.again { fill: var(--card); stroke: var(--policy); stroke-width: 2; }
.frame { fill: none; stroke: var(--soft); stroke-dasharray: 4 4; }
.arrow { fill: none; stroke: var(--soft); stroke-width: 1.5; } .head { fill: var(--soft); }
"""


class Drawing:
    """Shapes on a card of `WIDTH` x `height` pixels, with a title in its first line."""

    def __init__(self, title: str, height: int) -> None:
        self.title, self.height = title, height
        self.parts: list[str] = []
        self.text(20, 28, title, "t b")

    def text(self, x: float, y: float, text: str, css: str = "s") -> None:
        """Write one line: `t` is text, `s` a remark, `f` a file; `b` bold, `m` centred, `e` ends at `x`."""
        self.parts.append(f'<text class="{css}" x="{x:g}" y="{y:g}">{escape(text)}</text>')

    def rect(self, x: float, y: float, width: float, height: float, css: str = "box", radius: int = 6) -> None:
        """Draw a rectangle."""
        size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.parts.append(f'<rect class="{css}" {size} rx="{radius}"/>')

    def box(self, x: float, y: float, width: float, name: str, *remarks: str, css: str = "box") -> None:
        """Draw a box with a name and remarks."""
        height = 14 + LINE * (1 + len(remarks))
        self.rect(x, y, width, height, css)
        self.text(x + 10, y + 20, name, "t b")
        for line, remark in enumerate(remarks, 1):
            self.text(x + 10, y + 20 + LINE * line, remark, "s i" if css == "model" else "s")

    def arrow(self, *points: tuple[float, float], both: bool = False) -> None:
        """Draw a line through `points` with a head at its end; with `both` also at its beginning."""
        self.parts.append(f'<path class="arrow" d="M{" L".join(f"{x:g} {y:g}" for x, y in points)}"/>')
        ends = [(points[-2], points[-1])] + ([(points[1], points[0])] if both else [])
        for (x0, y0), (x, y) in ends:
            dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
            left, right = (x - 7 * dx - 4 * dy, y - 7 * dy - 4 * dx), (x - 7 * dx + 4 * dy, y - 7 * dy + 4 * dx)
            self.parts.append(
                f'<path class="head" d="M{x:g} {y:g} L{left[0]:g} {left[1]:g} L{right[0]:g} {right[1]:g}Z"/>'
            )

    def cells(self, x: float, y: float, kinds: Iterable[str], size: float = 16) -> float:
        """Draw tokens as squares, one per css class in `kinds`; return the x behind them."""
        for kind in kinds:
            self.rect(x + 1, y + 1, size - 2, size - 2, kind, 3)
            x += size
        return x

    def legend(self, y: float, *entries: tuple[str, str, float]) -> None:
        """Explain colours: css class, text and x of each."""
        for css, text, x in entries:
            self.rect(x, y - 11, 14, 14, css, 3)
            self.text(x + 21, y, text)

    def svg(self) -> str:
        """The card as an SVG document."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{self.height}" '
            f'viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{escape(self.title)}">'
            f"<style>{STYLE}{DIAGRAM_STYLE}</style>"
            f'<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{self.height - 1}" rx="10"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def loop() -> Drawing:
    """Draw the flow of data from tasks to new weights."""
    d = Drawing("The loop: from a task to new weights", 382)
    d.box(20, 60, 128, "Task source", "repository, issue,", "checks, reference")
    d.box(212, 60, 128, "Sandbox", "unmodified agent", "edits the code")
    d.box(412, 60, 128, "Gateway", "a key per session,", "records each call")
    d.box(612, 60, 128, "Engine", "samples tokens", "with logprobs", css="model")
    d.box(212, 200, 128, "Rewards", "fresh sandboxes:", "tests, similarity")
    d.box(412, 200, 128, "Group", "attempts at one", "task: advantages")
    d.box(612, 200, 128, "Learner", "prefix trees,", "loss, AdamW", css="model")
    d.arrow((148, 92), (212, 92))
    d.text(180, 84, "task", "s m")
    d.arrow((340, 92), (412, 92), both=True)
    d.text(376, 84, "HTTP", "s m")
    d.arrow((540, 92), (612, 92), both=True)
    d.text(576, 84, "token ids", "s m")
    d.arrow((276, 125), (276, 200))
    d.text(284, 167, "git diff")
    d.arrow((476, 125), (476, 200))
    d.text(484, 159, "turns: ids,")
    d.text(484, 174, "logprobs, version")
    d.arrow((340, 232), (412, 232))
    d.text(376, 224, "reward", "s m")
    d.arrow((540, 232), (612, 232))
    d.text(576, 224, "rows", "s m")
    d.arrow((676, 200), (676, 125))
    d.text(668, 159, "weights,", "s e")
    d.text(668, 174, "version + 1", "s e")
    d.box(
        20,
        312,
        720,
        "Run folder",
        "every turn, verdict and step is logged before anything depends on it: reports, comparisons, resume",
    )
    for x in (276, 476, 676):
        d.arrow((x, 265), (x, 312))
    return d


def turns() -> Drawing:
    """Draw a session whose client rewrote its history once."""
    d = Drawing("A session: turns form a tree, each leaf is a row", 352)
    d.legend(
        54,
        ("box", "given: prompt, tool results", 20),
        ("model", "sampled, trained", 226),
        ("again", "sampled, not trained here", 370),
    )
    given, new, again = "box", "model", "again"
    size = 15
    start = 110

    def bar(y: float, x: float, name: str, *parts: tuple[str, int]) -> float:
        d.text(x + 2, y - 6, name)
        for kind, n in parts:
            x = d.cells(x, y, [kind] * n, size)
        return x

    y = 92
    d.text(20, y + 12, "turns", "t b")
    x1 = bar(y, start, "turn 0: system, issue", (given, 10), (new, 4))
    x2 = bar(y, x1 + 14, "turn 1 extends turn 0", (given, 3), (new, 6))
    bar(y, x2 + 14, "turn 2 extends turn 1", (given, 3), (new, 4))
    fork = x1 + 14 + 7 * size
    d.arrow((fork, y + 17), (fork, y + 53), (x2 + 14, y + 53))
    bar(y + 45, x2 + 14, "turn 3 forks inside turn 1", (given, 4), (new, 5))
    d.text(x2 + 14, y + 77, "the client shortened its history")
    bar(y + 45, start, "turn 4, a title: beside the main conversation", (given, 5), (again, 2))
    y = 220
    d.text(20, y, "rows of the learner", "t b")
    row = [given] * 10 + [new] * 4 + [given] * 3 + [new] * 6 + [given] * 3 + [new] * 4
    d.text(20, y + 30, "row 1")
    end = d.cells(start, y + 18, row, size)
    d.text(end + 10, y + 30, "turns 0, 1, 2")
    row = [given] * 10 + [again] * 4 + [given] * 3 + [again] * 4 + [given] * 4 + [new] * 5
    d.text(20, y + 60, "row 2")
    end = d.cells(start, y + 48, row, size)
    d.text(end + 10, y + 60, "turns 0, part of 1, 3")
    d.text(
        20,
        y + 98,
        "Recorded ids are extended, never tokenized again. Each sampled token is trained in one row at most;",
    )
    d.text(20, y + 98 + LINE, "the rows of an episode share its weight. Turn 4 is recorded and not trained.")
    return d


def prefix_tree() -> Drawing:
    """Draw four rows with a common prefix, one by one and as a tree."""
    d = Drawing("A prefix tree: rows that begin alike are computed once", 262)
    size = 15
    d.legend(54, ("box", "given", 20), ("model", "sampled, trained", 100))
    prompt = ["box"] * 8
    d.text(20, 88, "four attempts as rows: 4 x 14 = 56 tokens", "t")
    for row in range(4):
        d.cells(20, 100 + 26 * row, prompt + ["model"] * 6, size)
    left = 400
    d.text(left, 88, "as one tree: 8 + 2 + 4 + 4 + 6 + 6 = 30 tokens", "t")
    middle = 100 + 39
    x = d.cells(left, middle, prompt, size)
    y0 = middle + size / 2
    pair = d.cells(x + 24, 113, ["model"] * 2, size)
    for y, at, n in ((100, pair, 4), (126, pair, 4)):
        d.arrow((pair, 113 + size / 2), (at + 12, 113 + size / 2), (at + 12, y + size / 2), (at + 24, y + size / 2))
        d.cells(at + 24, y, ["model"] * n, size)
    d.arrow((x, y0), (x + 12, y0), (x + 12, 113 + size / 2), (x + 24, 113 + size / 2))
    for y in (152, 178):
        d.arrow((x, y0), (x + 12, y0), (x + 12, y + size / 2), (x + 24, y + size / 2))
        d.cells(x + 24, y, ["model"] * 6, size)
    d.text(
        20,
        228,
        "A token attends to its own branch back to the root, at the positions of its row: logprobs and gradients",
    )
    d.text(
        20,
        228 + LINE,
        "equal those of each row alone. Two attempts that sampled the same first tokens share these, too.",
    )
    return d


def run_folder() -> Drawing:
    """Draw which files are written when, and which commands read them."""
    d = Drawing("A run folder: what is written when", 359)
    columns = (
        (20, "at the start", ("config.toml", "run.json", "tasks.jsonl", "model/"), "start"),
        (204, "while agents work", ("logs/",), "episode, turn, verdict"),
        (388, "after a step", ("episodes/", "  train-STEP.jsonl", "metrics.jsonl"), "step"),
        (
            572,
            "when due",
            ("checkpoints/STEP/", "eval/NAME-STEP/", "episodes/", "  eval-STEP.jsonl"),
            "checkpoint, eval",
        ),
    )
    d.rect(20, 195, 720, 50, "model")
    d.text(30, 215, "log.jsonl", "f b")
    for x, name, files, records in columns:
        width = 168
        d.rect(x, 50, width, 101)
        d.text(x + 10, 70, name, "t b")
        for line, file in enumerate(files, 1):
            d.text(x + (24 if file.startswith(" ") else 10), 70 + LINE * line, file.strip(), "f")
        d.text(x + 10, 234, records, "f")
        d.arrow((x + width / 2, 151), (x + width / 2, 195))
    for x in (188, 372, 556):
        d.arrow((x, 94), (x + 16, 94))
    d.arrow((700, 151), (700, 173), (250, 173), (250, 151))
    d.text(380, 168, "next step", "s m")
    d.box(
        20,
        283,
        352,
        "crrl train RUN --resume",
        "reads the log and the newest checkpoint, and",
        "mends the files that a kill cut off",
    )
    d.box(
        388,
        283,
        352,
        "report, compare, collect, export",
        "read these files, also during a run:",
        "JSON lines, TOML, safetensors",
    )
    for x in (196, 564):
        d.arrow((x, 245), (x, 283))
    return d


def training() -> Drawing:
    """Draw the life cycle of a run of `crrl train`."""
    d = Drawing("A run of crrl train, from start to end", 384)
    d.box(20, 56, 150, "Plan", "all mistakes at once,", "memory, time")
    d.box(216, 56, 150, "Evaluate", "before the first step,", "then every N steps")
    d.box(412, 56, 150, "Sample", "attempts in groups,", "each one rewarded")
    d.box(412, 176, 150, "Update", "advantages, loss,", "new weights", css="model")
    d.box(216, 176, 150, "Go live", "the engine loads", "version + 1", css="model")
    d.box(20, 176, 150, "Commit", "step in the log;", "checkpoint if due")
    d.arrow((170, 88), (216, 88))
    d.arrow((366, 88), (412, 88))
    d.arrow((487, 121), (487, 176))
    d.arrow((412, 208), (366, 208))
    d.arrow((216, 208), (170, 208))
    d.arrow((95, 176), (95, 148), (291, 148), (291, 121))
    d.text(193, 142, "next step", "s m")
    d.box(590, 56, 150, "End", "last evaluation,", "verdict, exit code 0")
    d.box(590, 176, 150, "Health gate", "no learning: ALARM,", "then exit code 4")
    d.arrow((291, 56), (291, 42), (665, 42), (665, 56))
    d.text(478, 37, "after the last step", "s m")
    d.arrow((95, 241), (95, 268), (665, 268), (665, 241))
    d.text(380, 262, "a gate holds for 10 steps", "s m")
    d.box(
        20,
        300,
        346,
        "Killed anywhere, then --resume",
        "newest checkpoint, replay of the logged steps,",
        "weights compared by SHA-256",
    )
    d.arrow((366, 332), (577, 332), (577, 88), (562, 88))
    d.text(590, 329, "finished attempts stay,")
    d.text(590, 329 + LINE, "others are made again")
    return d


def serving() -> Drawing:
    """Draw the life cycle of a session of `crrl serve`, as a sequence diagram."""
    d = Drawing("A session of crrl serve", 452)
    host, server, agent = 110, 380, 650
    for x, name, css in ((host, "your trainer", "box"), (server, "crrl serve", "model"), (agent, "any agent", "box")):
        d.rect(x - 75, 46, 150, 28, css)
        d.text(x, 65, name, "t b m")
        d.parts.append(f'<path class="frame" d="M{x} 74V436"/>')
    steps = (
        (host, server, "POST /sessions", "seed, limits, sampling"),
        (server, host, "id, base_url, key", ""),
        (host, agent, "base_url and key", ""),
        (agent, server, "model calls, any dialect", "each one becomes a turn"),
        (server, agent, "replies; at a limit, an error 400", ""),
        (host, server, "DELETE /sessions/ID", ""),
        (server, host, "turns, rows, account", "ids, logprobs, versions"),
        (host, host, "your update", ""),
        (host, server, "POST /weights: file, version + 1", "calls go on meanwhile"),
        (server, host, "200: later tokens are theirs", ""),
    )
    y = 104
    for source, target, text, remark in steps:
        if source == target:
            d.rect(source - 55, y - 16, 110, 24, "model")
            d.text(source, y, text, "t m")
        else:
            middle = (host + server) / 2 if host in (source, target) else (server + agent) / 2
            d.text(middle, y - 5, text, "t m")
            if remark:
                d.text(middle, y + 14, remark, "s m")
            d.arrow((source, y), (target, y))
        y += 40 if remark else 31
    return d


DIAGRAMS: dict[str, Callable[[], Drawing]] = {
    "loop": loop,
    "turns": turns,
    "prefix-tree": prefix_tree,
    "run-folder": run_folder,
    "training": training,
    "serving": serving,
}


def main() -> None:
    """Write every diagram into a folder."""
    parser = argparse.ArgumentParser(description="draw the diagrams of the documentation")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for name, draw in DIAGRAMS.items():
        (folder / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
