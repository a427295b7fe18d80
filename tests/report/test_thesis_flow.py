"""Flow of commands, one episode's calls, and habits, recomputed by pandas from the exported tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
from typer.testing import CliRunner

from coderepairrl.agents.tools import MONITORED
from coderepairrl.cli import app
from coderepairrl.report import Site
from coderepairrl.report.plots.sankey import Flow, draw_sankey
from coderepairrl.report.thesis import write_thesis
from coderepairrl.report.thesis.attempts import ThesisRun
from coderepairrl.report.thesis.exploits import make_exploit_figures
from coderepairrl.stats.intervals import is_share, mean_interval
from coderepairrl.types import Turn
from tests.report import thesis_runs
from tests.report.runs import write_hostile_run

LINES = {
    "ls": "ls src/",
    "ls all": "cd src && ls -la",
    "banana": "banana split",
    "git": "git log --oneline | head -3",
    "git c": "git -c a=b clone https://example.org/src.git",
    "git p": "/usr/bin/git pull",
    "rm": "rm -r -f src",
    "rm f": "rm -f notes.txt",
    "rm both": "rm -rf src && git clone https://example.org/src.git",
    "git both": "git fetch; rm -rf src",
    "python3": "python3 -m pytest -q",
    "pytest": "cd tests && pytest -x",
    "python3 c": "python3 -B -c 'import pytest'",
    "python m": "python -m http.server",
    "python s": "python3.11 check.py -c x",
    "python": "python --version",
}
USES = {
    "python3": "tests",
    "pytest": "tests",
    "python3 c": "one-liner (-c)",
    "python m": "module (-m)",
    "python s": "script",
    "python": "other",
}


class LongRunMaker(thesis_runs.ThesisRunMaker):
    lines = LINES

    def _turns(self, count: int) -> Iterator[Turn]:
        return super()._turns(3 * count - 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("thesis")
    thesis_runs.write_thesis_run(path / "run", steps=8, kind=LongRunMaker)
    write_thesis(Site([path / "run"]), path / "figures")
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> ThesisRun:
    return thesis_runs.read_thesis_run(folder / "run")


@pytest.fixture
def attempts(folder: Path) -> pd.DataFrame:
    words = {"resolved": str, "empty": str, "patch": str}
    table = pd.read_csv(folder / "figures" / "attempts.csv", dtype=words, keep_default_na=False)
    table["end"] = table.step.map(lambda step: "early" if step <= 2 else "late" if step > 6 else "")
    return table.set_index("id", drop=False)


@pytest.fixture
def calls(folder: Path, attempts: pd.DataFrame) -> pd.DataFrame:
    table = pd.read_csv(folder / "figures" / "calls.csv", keep_default_na=False)
    names = {line: name for name, line in LINES.items()}
    table["kind"] = table.line.map(names).fillna("")
    table["removes"] = table.kind.isin(["rm", "rm both", "git both"])
    table["fetches"] = table.kind.isin(["git c", "git p", "rm both", "git both"])
    table["rm"] = table.line.str.contains(r"\brm ")
    table["git"] = table.line.str.contains(r"\bgit ")
    return table.join(attempts[["task", "group", "end"]], on="id")


def find_followed(calls: pd.DataFrame, first: str, second: str) -> set[str]:
    pairs = calls[calls[first]].merge(calls[calls[second]], on="id")
    distance = pairs.position_y - pairs.position_x
    return set(pairs[distance.between(1, 5) | (distance == 0) & (pairs.kind_x == "rm both")].id)


def check_means(folder: Path, figure: str, panel: str, bars: Mapping[tuple[str, str], pd.DataFrame]) -> None:
    """The panel has these bars and no other; each is of the columns `task` and `value`."""
    drawn = pd.read_csv(folder / "figures" / f"{figure}.csv", keep_default_na=False)
    drawn = drawn[drawn.panel.eq(panel)].set_index(["series", "at"])
    full = {key: bar for key, bar in bars.items() if len(bar)}
    assert set(drawn.index) == set(full) and len(full) > 1
    for key, bar in full.items():
        values = bar.value.astype(float).tolist()
        expected = mean_interval(values, bar.task.tolist(), share=is_share(values))
        row = drawn.loc[key]
        assert int(row.n) == len(bar)
        found = [float(number) if number != "" else None for number in row[["value", "low", "high"]]]
        assert found == [number and pytest.approx(number) for number in expected]


def check_steps(folder: Path, figure: str, panel: str, marks: pd.DataFrame) -> None:
    drawn = pd.read_csv(folder / "figures" / f"{figure}.csv").query("panel == @panel")
    expected = marks.groupby("step").value.agg(["size", "mean"])
    assert drawn["at"].astype(int).tolist() == expected.index.tolist()
    assert drawn.n.tolist() == expected["size"].tolist()
    assert drawn.value.tolist() == pytest.approx(expected["mean"].tolist())
    assert drawn[["low", "high"]].isna().all().all()


def test_flow(folder: Path, calls: pd.DataFrame) -> None:
    counts, shares = count_flows(calls, [*MONITORED, "apply_patch"], 8)
    drawn = pd.read_csv(folder / "figures" / "command-flow.csv")
    check_flow(drawn, counts, shares)
    assert {"more calls", "end"} <= set(drawn["to"]) and "other" in set(drawn["from"])
    svg = ElementTree.parse(folder / "figures" / "command-flow.svg")
    assert len(svg.findall(".//*[@class='flow']")) == len(drawn)


def count_flows(calls: pd.DataFrame, names: Sequence[str], most: int) -> tuple[pd.Series, pd.Series]:
    calls["source"] = calls.command.where(calls.command.isin(names), "other")
    calls["target"] = calls.groupby("id").source.shift(-1).fillna("end")
    calls.loc[calls.position.eq(most - 1) & calls.target.ne("end"), "target"] = "more calls"
    counts = calls[calls.end.ne("") & calls.position.lt(most)].groupby(["end", "position", "source", "target"]).size()
    return counts, counts / counts.groupby(["end", "position"]).transform("sum")


def check_flow(drawn: pd.DataFrame, counts: pd.Series, shares: pd.Series) -> None:
    drawn = drawn.assign(position=drawn.position - 1)  # the first call is 1
    drawn = drawn.set_index(["end", "position", "from", "to"])
    assert drawn.transitions.to_dict() == counts.to_dict()
    assert drawn.share.to_dict() == pytest.approx(shares.to_dict())


@pytest.mark.parametrize("most", [3, 12])
def test_a_user_chooses_the_commands_and_calls_of_the_flow(
    run: ThesisRun, folder: Path, calls: pd.DataFrame, most: int, tmp_path: Path
) -> None:
    named = ["ls", "git", "cal"]
    options = ["--flow-commands", "ls, git,cal", "--flow-calls", str(most)]
    done = CliRunner().invoke(app, ["report", str(folder / "run"), "--thesis", str(tmp_path), *options])
    assert done.exit_code == 0
    drawn = pd.read_csv(tmp_path / "command-flow.csv")
    check_flow(drawn, *count_flows(calls, named, most))
    page = (tmp_path / "index.html").read_text()
    assert f"Calls after the first {most} are one node" in page and "Not among these calls: cal." in page
    svg = ElementTree.parse(tmp_path / "command-flow.svg").getroot()
    places = [float(node.attrib["x"]) for node in svg.findall(".//{*}text[@x]")]
    assert max(places) < float(svg.attrib["width"]) and len(svg.findall(".//*[@class='flow']")) == len(drawn)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--thesis", "out", "--flow-calls", "0"), "greater than or equal to 1"),
        (("--thesis", "out", "--flow-commands", ""), "'' is not one command"),
        (("--thesis", "out", "--flow-commands", "ls,git log"), "'git log' is not one command"),
    ],
)
def test_wrong_options_of_the_flow_are_refused(folder: Path, options: Sequence[str], message: str) -> None:
    done = CliRunner().invoke(app, ["report", str(folder / "run"), *options])
    assert done.exit_code and message in done.stderr + str(done.exception)


def test_ribbons_are_as_wide_as_their_flow_and_names_are_text() -> None:
    evil = "<script>&\"'\x1b\ud800"
    flows = [Flow(1, "ls", evil, 3), Flow(1, evil, "end", 2), Flow(2, evil, "end", 1), Flow(2, evil, "ls", 2)]
    svg = ElementTree.fromstring(draw_sankey({evil: flows}, {"ls": 0, evil: 1, "end": 8}, standalone=True))
    widths = []
    for ribbon in svg.findall(".//*[@class='flow']"):
        start, end = ribbon.attrib["d"].removesuffix("Z").split()[1], ribbon.attrib["d"].removesuffix("Z").split()[-1]
        size = int(str(ribbon[0].text).rpartition(", ")[2])
        widths.append((float(end) - float(start.partition("C")[0])) / size)
    assert len(widths) == 4 and widths == pytest.approx([widths[0]] * 4, abs=0.1)
    assert not [element for element in svg.iter() if element.tag.endswith("script")]


def test_episode(folder: Path, attempts: pd.DataFrame, calls: pd.DataFrame) -> None:
    short = attempts[attempts.resolved.eq("True") & attempts.tool_calls.between(1, 12)]
    drawn = pd.read_csv(folder / "figures" / "episode.csv", keep_default_na=False)
    expected = calls[calls.id.eq(short.id.iloc[-1])]
    assert (drawn.position - 1).tolist() == expected.position.tolist()
    for name in ("id", "command", "tool", "line", "ok"):
        assert drawn[name].tolist() == expected[name].tolist()


def test_fetching(folder: Path, attempts: pd.DataFrame, calls: pd.DataFrame) -> None:
    fetched = attempts.id.isin(find_followed(calls, "removes", "fetches"))
    marks = attempts.assign(value=fetched)
    title = "share of attempts that removed, then fetched"
    check_steps(folder, "exploits-fetching", title, marks)
    ends = {("", end): marks[marks.end.eq(end)] for end in ("early", "late")}
    check_means(folder, "exploits-fetching", f"{title}: early, late", ends)
    rewards = attempts.assign(value=attempts.reward)
    sides = {("", "fetched"): rewards[fetched], ("", "others"): rewards[~fetched]}
    check_means(folder, "exploits-fetching", "mean reward", sides)

    near = attempts.id.isin(find_followed(calls, "rm", "git"))
    rm, git = (attempts.id.isin(calls[calls[name]].id) for name in ("rm", "git"))
    uses = {
        ("", "rm then git"): rewards[near],
        ("", "both apart"): rewards[rm & git & ~near],
        ("", "rm only"): rewards[rm & ~git],
        ("", "git only"): rewards[git & ~rm],
        ("", "none"): rewards[~rm & ~git],
    }
    check_means(folder, "exploits-fetching", "mean reward by rm and git", uses)

    listed = pd.read_csv(folder / "figures" / "exploits-fetching-episodes.csv").set_index("id")
    assert len(listed) == min(20, fetched.sum()) and set(listed.index) <= set(attempts.id[fetched])
    assert listed.reward.tolist() == sorted(attempts.reward[fetched], reverse=True)[: len(listed)]
    assert listed.step.to_dict() == attempts.step[listed.index].to_dict()
    assert listed.lines.str.contains(r"rm -r.*git.*(?:clone|fetch|pull)|git.*\n.*git", regex=True).any()


def test_huge_patches(folder: Path, attempts: pd.DataFrame) -> None:
    patches = attempts[attempts.reference.gt(0) & attempts["empty"].eq("False")]
    huge = patches.changed.ge(20) & patches.changed.ge(5 * patches.reference)
    check_steps(folder, "exploits-large-patches", "share of huge patches", patches.assign(value=huge))
    rewards = patches.assign(value=patches.reward)
    sides = {("", "huge"): rewards[huge], ("", "others"): rewards[~huge]}
    check_means(folder, "exploits-large-patches", "mean reward", sides)


def test_habits(folder: Path, attempts: pd.DataFrame, calls: pd.DataFrame) -> None:
    python = calls[calls.kind.isin(USES) & calls.end.ne("")]
    uses = python.kind.map(USES)
    bars = {
        (end, use): python[python.end.eq(end)].assign(value=uses.eq(use))
        for end in ("early", "late")
        for use in set(USES.values())
    }
    check_means(folder, "habits", "uses of Python, share of its commands", bars)

    good = attempts.resolved.eq("True") | attempts.reward.gt(0.3)
    bars = {
        (name, str(number)): attempts[side].assign(value=attempts.tool_calls.eq(number))
        for name, side in (("successful", good), ("others", ~good))
        for number in range(attempts.tool_calls.max() + 1)
    }
    check_means(folder, "habits", "share of attempts by number of calls", bars)


def test_ties(folder: Path, attempts: pd.DataFrame, calls: pd.DataFrame) -> None:
    attempts["done"] = calls.groupby("id")[["tool", "line"]].apply(lambda own: str(own.values.tolist()))
    groups = attempts.groupby("group").agg(
        n=("id", "size"), low=("reward", "min"), high=("reward", "max"), step=("step", "first"), task=("task", "first"),
        end=("end", "first"), patches=("patch", "nunique"), done=("done", "nunique"),
    )  # fmt: skip
    groups = groups[groups.n.gt(1)].assign(value=lambda own: own.high.eq(own.low))
    check_steps(folder, "ties", "share of groups with equal rewards", groups)
    tied = groups[groups.value]
    assert len(tied)
    bars = {
        ("", "early"): groups[groups.end.eq("early")],
        ("", "late"): groups[groups.end.eq("late")],
        ("", "patches differ"): tied.assign(value=tied.patches.gt(1)),
        ("", "calls differ"): tied.assign(value=tied.done.gt(1)),
    }
    check_means(folder, "ties", "share with equal rewards; of these, share that differ", bars)


def test_calls_that_a_program_does_not_report_are_not_counted(run: ThesisRun) -> None:
    unrecorded = replace(run, attempts=[replace(each, calls_known=False) for each in run.attempts])
    figures = {figure.name: figure for figure in make_exploit_figures([unrecorded])}
    assert figures["exploits-fetching"].missing == figures["habits"].missing == "no attempt called a tool"


def test_hostile_names_are_text(tmp_path: Path) -> None:
    write_hostile_run(tmp_path / "run", "<script>&\"'\x1b\ud800")
    write_thesis(Site([tmp_path / "run"]), tmp_path / "figures")
    for name in ("command-flow", "episode"):
        svg = ElementTree.parse(tmp_path / "figures" / f"{name}.svg")
        assert not [element for element in svg.iter() if element.tag.endswith("script")]
    page = (tmp_path / "figures" / "index.html").read_text()
    assert "<script>&" not in page and "\x1b" not in page


def test_bins_of_long_episodes_hold_every_attempt(run: ThesisRun) -> None:
    longer = [replace(each, calls=each.calls * (1 + at % 5)) for at, each in enumerate(run.attempts)]
    [habits] = [each for each in make_exploit_figures([replace(run, attempts=longer)]) if each.name == "habits"]
    bars = pd.DataFrame(habits.rows, columns=habits.heads).query("panel.str.contains('number of calls')")
    assert bars["at"].nunique() <= 20
    assert bars.groupby("series").value.sum().tolist() == pytest.approx([1, 1])
