"""Reports and figures agree with the log, also with one that is unfinished, torn or hostile."""

from __future__ import annotations

import csv
import json
import math
import re
import resource
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from coderepairrl.cli import app
from coderepairrl.config import load_config
from coderepairrl.errors import UsageError
from coderepairrl.report import Site, export_figures, format_csv
from coderepairrl.report.analysis import Report, compare_runs, list_differences
from coderepairrl.report.charts import make_curve_panel, make_outcome_panels
from coderepairrl.report.kit import PageContext
from coderepairrl.report.page import render_report
from coderepairrl.report.plots import convert_to_pdf, draw_figure
from coderepairrl.report.plots.panels import Baseline, Panel, Series
from coderepairrl.report.reading import to_plain_data
from coderepairrl.report.site import write_page
from coderepairrl.runs import RunFolder, logged_episodes
from coderepairrl.stages.hello import MEASURES, compare_first_and_last
from coderepairrl.stats.measures import pair_measures
from coderepairrl.tasks import make_source, write_jsonl
from coderepairrl.types import Ending, Episode, Score
from pages import Page

from .runs import FUNCTIONS, RunMaker, write_hostile_run, write_run

EVIL = "</style></svg><script>alert(1)</script><img src=x onerror=alert(1)>\u202e\x1b[31m\"' {{ 7*7 }}"


def render_reports(reports: Sequence[Report]) -> str:
    return render_report(reports, [], PageContext())


def read_page(runs: Sequence[Path]) -> Page:
    page = render_reports(Site(runs).reports())
    reader = Page(page)
    assert reader.elements.isdisjoint({"script", "img", "iframe", "link", "object", "embed"})
    assert not any(name.startswith("on") for name in reader.attributes)
    assert reader.links == [] and "url(" not in page and "@import" not in page
    assert "default-src 'none'" in page
    assert "nan" not in re.sub(r"[a-z]*nan[a-z]+|[a-z]+nan", "", reader.text.lower())
    return reader


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "first", steps=6, evaluations=(0, 3, 6))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "second"
    return write_run(path, steps=4, seed=7, train={"lr": 5e-4}, agent={"name": "nano", "options": {"nudge": False}})


def test_before_and_after_is_the_clustered_paired_comparison(run: Path) -> None:
    episodes = [e for e in logged_episodes(RunFolder(run).records()) if e.phase == "eval"]
    before, after = ([e for e in episodes if e.step == step] for step in (0, 6))
    expected = {name: pairs.change for name, pairs in pair_measures(before, after).items()}
    whole, *slices = Site([run]).reports()[0].comparisons
    assert {name: change.change for name, change in whole.changes.items()} == expected
    assert whole.clusters == len(FUNCTIONS)
    assert whole.early["reward"].value == pytest.approx(sum(e.reward for e in before) / len(before))
    for part in (whole, *slices):  # also measures that only some episodes have
        for name, change in part.changes.items():
            assert part.late[name].value - part.early[name].value == pytest.approx(change.change.value), name
    shown = compare_first_and_last(RunFolder(run), load_config(run))
    for name, measure in MEASURES.items():
        if name in shown:
            told = (whole.early[measure].value, whole.late[measure].value, whole.changes[measure].change.value)
            assert told == tuple(shown[name][column] for column in ("before", "after", "delta")), name
    assert [part.slice for part in slices] == ["quoted issues", "unquoted issues"]
    tests = whole.changes["tests"]
    by_task = {e.task_id: e.scores[1].value for e in after}
    gains = [by_task[e.task_id] - e.scores[1].value for e in before]
    assert (tests.better, tests.worse) == (sum(g > 0 for g in gains), sum(g < 0 for g in gains))
    assert 0 < tests.p <= 1


class Again(RunMaker):
    """Four tasks come in every step, two in Python, which get better, and two in Go, which do not."""

    def attempt(self, group: str, attempt: int, phase: str, step: int, task: str, ending: Ending = Ending.DONE) -> Any:
        return super().attempt(group, attempt, phase, step, f"toy/{int(group[-3:])}", ending)

    def _episode(self, id: str, task: str, ending: Ending, step: int) -> Episode:
        go = int(task[-1]) % 2
        made = super()._episode(id, task, ending, step)
        score = Score("patch_lines", 0.5 if go else step / 10)
        return replace(made, language="go" if go else "python", scores=() if ending is Ending.VOID else (score,))


def test_the_same_training_tasks_are_compared_by_language(tmp_path: Path) -> None:
    """First and last time, whatever other tasks a step has; on the page, in the JSON and in the tables."""
    again = Again(tmp_path / "again", tests=False).run(4).folder.path
    found = Site([again]).reports()
    whole, *parts = found[0].repeated
    assert (whole.before, whole.after, whole.slice) == ("first time", "last time", "")
    gains = {part.slice: part.changes["reward"].change.value for part in (whole, *parts)}
    assert gains == pytest.approx({"": 0.15, "language python": 0.3, "language go": 0.0})
    assert {part.slice: part.changes["reward"].tasks for part in parts} == {"language python": 2, "language go": 2}
    assert set(whole.changes) == {"reward", "patch_lines", "patch_lines_per_patch"}
    page = render_reports(found)
    assert "Training tasks visited again, first and last time, language go only" in page
    assert len(to_plain_data(found[0])["repeated"]) == 3
    assert not Site([RunMaker(tmp_path / "once").run(2).folder.path]).reports()[0].repeated


def test_the_verdict_comes_first_then_the_table_then_a_chart_for_each_score(run: Path) -> None:
    [found] = Site([run]).reports()
    change = found.comparisons[0].changes["tests"]
    text = read_page([run]).text
    claimed = (change.change.is_all_above(0) or change.change.is_all_below(0)) and change.p <= 0.05
    verdict = "(step 6); step 6 is above step 0 on tests: " if claimed else "(step 6); No difference can be claimed"
    places = [text.index(part) for part in (verdict, "Held-out tasks, before and after", "What is learned")]
    assert places == sorted(places) and f"{100 * change.change.value:+.1f} points" in text
    titles = [panel.title for panel in make_outcome_panels([found])]
    assert titles.count("tests passing") == titles.count("patch_lines") == 1
    assert not any("non-empty patch" in title for title in titles)
    assert text.count("per non-empty patch") > 2 and "empty patches" in text


def test_counts_are_those_of_the_log(run: Path) -> None:
    records = list(RunFolder(run).records())
    verdicts = [record["verdict"] for record in records if record["type"] == "verdict"]
    void = sum(verdict["ending"] == "void" for verdict in verdicts)
    found = Site([run]).reports()[0]
    assert found.episodes["train"] + found.episodes["eval"] == len(verdicts)
    assert found.episodes["void"] == found.episodes["retried"] == sum(found.faults.values()) == void > 0
    assert sum(found.endings.values()) == len(verdicts) - void
    crashed = sum(verdict["ending"] == "crash" for verdict in verdicts)
    assert set(found.endings) == {"done", "limit: calls", "crash: exit 1"} and found.endings["crash: exit 1"] == crashed
    last = found.evaluations[-1]
    ended = [v["ending"] for v in verdicts if (v["phase"], v["step"]) == ("eval", last.step)]
    assert last.values["crash"].value == pytest.approx(ended.count("crash") / len(ended))
    sampled = sum(
        len(record["turn"]["output"]["ids"]) + len(record["turn"]["tail"]["ids"])
        for record in records
        if record["type"] == "turn"
    )
    assert found.account["sampled"] == sampled and found.account["balanced"]
    assert f"{sampled:,}" in read_page([run]).text


def test_evaluation_time_counts_only_the_process_that_spent_it(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path / "resumed")
    maker.start()
    maker.evaluate(0)
    maker.log.close()
    lines = maker.folder.log.read_text().splitlines()
    spent = json.loads(lines[-1])["time"] - json.loads(lines[1])["time"]
    assert Site([maker.folder.path]).reports()[0].ledger["evaluation"] == pytest.approx(spent, abs=1e-3)
    # Killed just before the `eval` record, then resumed: all episodes are logged, so the evaluation ends at once.
    maker.folder.log.write_text("\n".join([*lines[:-1], lines[0], lines[-1]]) + "\n")
    found = Site([maker.folder.path]).reports()[0]
    assert [e.step for e in found.evaluations] == [0] and found.ledger["evaluation"] == 0
    assert found.episodes["starts"] == 2


def test_runs_side_by_side(run: Path, other: Path) -> None:
    first, second = Site([run, other]).reports()
    text = read_page([run, other]).text
    assert "second \N{MINUS SIGN} first" in text and "What differs between the runs" in text
    changed = list_differences([first, second])
    assert changed["train.lr"] == [1e-4, 5e-4] and changed["run.seed"] == [0, 7]
    assert changed["agent.options.nudge"] == [None, False]
    assert set(changed) == {"train.lr", "run.seed", "run.steps", "agent.options.nudge"}
    (between,) = compare_runs(first, second)
    for side, alone in ((between.early, first.comparisons[0].late), (between.late, second.comparisons[0].late)):
        everywhere = [name for name in side if not name.endswith("_per_patch")]  # whose tasks may differ
        assert "tests" in everywhere and all(side[name] == alone[name] for name in everywhere)


def test_the_json_holds_the_numbers_of_the_page(run: Path, other: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(run), str(other), "--json"])
    assert result.exit_code == 0
    data = json.loads(result.stdout, parse_constant=pytest.fail)  # NaN is not JSON
    first = data["runs"][0]
    assert first["status"] == "finished" and len(first["steps"]) == 6 and "last" not in first
    change = first["comparisons"][0]["changes"]["tests"]["change"]
    assert change["low"] <= change["value"] <= change["high"]
    text = read_page([run, other]).text
    assert f"{change['value']:+.3f}".replace("-", "\N{MINUS SIGN}") in text
    assert data["between_runs"][0][0]["after"] == "second"


def test_numbers_that_are_not_finite_become_null_and_gaps(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path / "broken-numbers")
    maker.start()
    maker.step(1)
    maker.log.close()
    log = maker.folder.log
    text = re.sub(r',"sum":"\w+"', "", log.read_text())  # as older versions wrote it
    log.write_text(re.sub(r'"learn/(loss|grad_norm)":[-\d.e]+', r'"learn/\1":NaN', text))
    data = json.loads(json.dumps(Site([maker.folder.path]).numbers(), allow_nan=False))
    assert data["runs"][0]["steps"][0]["learn/loss"] is None
    read_page([maker.folder.path])


def test_a_run_that_never_started(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path / "new")
    maker.log.close()
    text = read_page([maker.folder.path]).text
    for said in ("never started", "No step is finished", "No evaluation", "nothing was sampled", "no time was logged"):
        assert said in text
    maker.folder.log.unlink()
    maker.folder.config.write_text("= broken")
    text = read_page([maker.folder.path]).text
    assert "There is no log.jsonl" in text and "configuration cannot be read" in text


def test_an_unfinished_run_with_a_torn_log(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path / "torn")
    maker.start()
    maker.evaluate(0)
    maker.step(1)
    maker.record("episode", id="x", phase="train", step=2, group="g", attempt=0, task="t", seed=1)
    maker.log.close()
    with maker.folder.log.open("a") as file:
        file.write('{"type":"turn","ti')
    (found,) = Site([maker.folder.path]).reports()
    assert found.status == "unfinished" and found.episodes["interrupted"] == 1
    text = read_page([maker.folder.path]).text
    for said in ("last line is incomplete", "1 of 6 steps", "Only one evaluation", "has not ended"):
        assert said in text


def test_a_log_damaged_inside_is_read_up_to_there(tmp_path: Path) -> None:
    path = write_run(tmp_path / "damaged", steps=3, evaluations=())
    log = RunFolder(path).log
    lines = log.read_text().splitlines()
    second = [at for at, line in enumerate(lines) if line.startswith('{"type":"step"')][1]
    log.write_text("\n".join([*lines[: second + 1], "garbage", *lines[second + 1 :]]) + "\n")
    (found,) = Site([path]).reports()
    assert len(found.steps) == 2 and found.account["balanced"]
    assert f"damaged at line {second + 2}; what follows" in read_page([path]).text


def test_alarms_and_changed_settings_are_shown(tmp_path: Path) -> None:
    path = write_run(tmp_path / "alarmed", steps=3, evaluations=())
    records = list(RunFolder(path).records())
    for record in records:
        if record["type"] == "step":
            gate = "kl" if record["step"] == 3 else "perplexity"
            record["alarms"] = [{"gate": gate, "text": f"{gate} in step {record['step']}"}]
    changed = {"type": "change", "time": records[-1]["time"], "step": 3, "key": "train.lr", "old": 1e-4, "new": 1e-5}
    RunFolder(path).log.write_text("".join(json.dumps(record) + "\n" for record in [*records, changed]))
    text = read_page([path]).text
    assert "Alarm: perplexity in step 2. This is the last of 2 such alarms." in text
    assert "Alarm: kl in step 3." in text and text.count("Alarm:") == 2
    assert "Resumed with other settings: train.lr from 0.0001 to 1e-05 after step 3." in text


def test_a_notice_names_rewards_whose_versions_differ_between_runs(tmp_path: Path) -> None:
    runs = [RunMaker(tmp_path / name).run(1).folder.path for name in ("first", "same", "newer")]
    about = json.loads((runs[2] / "run.json").read_text())
    (runs[2] / "run.json").write_text(json.dumps({**about, "rewards": {"patch_lines": 2, "tests": 1}}))
    first, same, newer = Site(runs).reports()
    said = "patch_lines is version 2 here and version 1 in first: their values are not comparable."
    assert said in newer.notices
    assert not any("version" in notice for notice in (*first.notices, *same.notices))
    assert said in Site([runs[0], runs[2]]).write(tmp_path / "page.html").read_text()


def test_hostile_text_of_a_run_stays_text(tmp_path: Path) -> None:
    reader = read_page([write_hostile_run(tmp_path / "evil", EVIL)])
    assert "alert(1)" in reader.text and "49" not in re.findall(r"\{\{.*?\}\}", reader.text)
    assert "\x1b" not in reader.text and "\u202e" not in reader.text


def test_the_figure_is_a_file_of_its_own(run: Path, other: Path, tmp_path: Path) -> None:
    output = tmp_path / "figure.svg"
    arguments = ["report", str(run), str(other), "--figure", str(output)]
    result = CliRunner().invoke(app, [*arguments, "--baseline", "junk a=0.04", "--baseline", "junk b=0.7"])
    assert result.exit_code == 0 and result.stdout.strip() == str(output)
    said = [each.text for each in ElementTree.parse(output).getroot().iter("{http://www.w3.org/2000/svg}text")]
    assert {"reward", "tests passing", "first", "second", "junk a", "junk b"} <= set(said)
    for wrong, message in (
        (["--baseline", "high"], "high"),
        (["--baseline", "junk=nan"], "'junk=nan' is not NAME=VALUE"),
        (["--json"], "exclude each other"),
        (["--episode", "train-00001-000-00"], "takes only --output or --serve"),
    ):
        assert message in str(CliRunner().invoke(app, [*arguments[:2], *arguments[3:], *wrong]).exception)


def test_a_panel_speaks_of_dots_only_if_it_has_some(tmp_path: Path) -> None:
    made = RunMaker(tmp_path / "run")
    made.start()
    made.step(1)
    made.evaluate(1, "greedy")
    assert "dots" not in make_curve_panel(Site([made.folder.path]).reports(), "reward").note
    made.evaluate(1)
    assert "dots: held-out tasks" in make_curve_panel(Site([made.folder.path]).reports(), "reward").note
    made.log.close()


@pytest.mark.parametrize(
    ("option", "other"),
    [("--baseline=junk=0.04", "--figure"), ("--port=8000", "--serve"), ("--flow-calls=2", "--thesis")],
)
def test_an_option_without_the_one_it_belongs_to_is_refused(run: Path, option: str, other: str) -> None:
    error = CliRunner().invoke(app, ["report", str(run), option]).exception
    assert f"{option.partition('=')[0]} is an option of {other}" in str(error)


def test_a_full_disk_leaves_the_page_that_is_there_whole(tmp_path: Path) -> None:
    """Task files, too. A file size limit fails a write half way, as a full disk does."""
    page, tasks = tmp_path / "index.html", tmp_path / "tasks.jsonl"
    write_page(page, "before")
    write_jsonl(make_source("handmade"), tasks)
    before = tasks.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(UsageError, match="cannot write"):
            write_page(page, "x" * 5000)
        with pytest.raises(OSError):
            write_jsonl(make_source("handmade"), tasks)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert page.read_text() == "before" and tasks.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"index.html", "tasks.jsonl"}


numbers = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e12, max_value=1e12)
SVG = "{http://www.w3.org/2000/svg}"


def parse_svg(svg: str) -> ElementTree.Element:
    assert "nan" not in svg and "inf" not in svg
    return ElementTree.fromstring(svg)


def list_svg_texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


@example([5e-324], "line", None)
@given(st.lists(numbers, max_size=40), st.sampled_from(["line", "stack"]), st.none() | st.floats(0.01, 1))
def test_any_values_make_a_figure(values: list[float], kind: str, alpha: float | None) -> None:
    ys = [None if at % 7 == 3 else abs(value) if kind == "stack" else value for at, value in enumerate(values)]
    series = Series("a", range(len(ys)), ys, alpha=alpha)
    panel = Panel("title", [series, Series("none", [0.0], [math.nan])], kind=kind)  # type: ignore[arg-type]
    for standalone in (False, True):
        root = parse_svg(draw_figure([panel, panel, panel], columns=2, standalone=standalone))
        assert "title" in list_svg_texts(root)
        assert ("not measured" in list_svg_texts(root)) == (not series.points)


def test_hostile_names_are_text_in_figures() -> None:
    evil = "</svg><script>alert(1)</script>\x00\x1b\u202e&\"'"
    panel = Panel(evil, [Series(evil, [1], [1.0])], note=evil, baselines=[Baseline(evil, 0.5)])
    svg = draw_figure([panel], standalone=True)
    assert "<script" not in svg and "\u202e" not in svg
    assert sum("<script>" in text for text in list_svg_texts(parse_svg(svg))) == 4


def test_intervals_baselines_and_both_schemes_are_drawn() -> None:
    training = Series("training", range(11), [0.1 * x for x in range(11)], alpha=0.3)
    held = Series("held out", [0, 10], [0.2, 0.7], 1, low=[None, 0.6], high=[None, 0.8])
    panel = Panel("reward", [training, held], baselines=[Baseline("junk edit", 0.7, 0)])
    svg = draw_figure([panel], standalone=True)
    root = parse_svg(svg)
    assert "prefers-color-scheme: dark" in svg and root.get("width") and "junk edit" in list_svg_texts(root)
    assert len([e for e in root.iter(f"{SVG}circle") if e.get("class") == "dot"]) == 3, "two points, and the legend's"
    kinds = [e.get("class") for e in root.iter(f"{SVG}path")]
    assert kinds.count("whisker") == kinds.count("base") == 1, "a point with too few attempts has no whisker"


def read_pdf_text(page: bytes) -> str:
    """Text of a page without spaces; the font Symbol writes a delta as an increment."""
    [only] = pytest.importorskip("pypdfium2").PdfDocument(page)
    found = "".join(only.get_textpage().get_text_bounded().split())
    return found.replace("\N{INCREMENT}", "\N{GREEK CAPITAL LETTER DELTA}")


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_every_figure_is_there_three_times_and_every_number_once(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "one", steps=5, evaluations=(0, 5)),
        write_run(tmp_path / "two", steps=3, evaluations=(0, 3), seed=4),
    ]
    pytest.importorskip("svglib")
    done = CliRunner().invoke(app, ["report", *map(str, runs), "--export", str(tmp_path / "out")])
    assert done.exit_code == 0 and done.stdout.strip() == str(tmp_path / "out")
    loaded = Site(runs).reports()
    figures = {path.stem for path in (tmp_path / "out").glob("*.svg")}
    assert len(figures) > 20
    for name in figures:
        drawn = ElementTree.parse(tmp_path / "out" / f"{name}.svg").getroot()
        shown = "".join(text.text or "" for text in drawn.iter("{http://www.w3.org/2000/svg}text"))
        page = (tmp_path / "out" / f"{name}.pdf").read_bytes()
        assert sorted(read_pdf_text(page)) == sorted("".join(shown.split())), name
        assert page == convert_to_pdf((tmp_path / "out" / f"{name}.svg").read_text()), "the same bytes each time"
    reward = [row for row in read_csv(tmp_path / "out" / "01-reward.csv") if row["curve"] == "one"]
    assert [(int(row["step"]), float(row["value"])) for row in reward] == [
        (step["step"], step["reward"]) for step in loaded[0].steps
    ]
    evaluated = {
        (row["run"], row["step"], row["measure"]): (row["value"], row["low"], row["high"])
        for row in read_csv(tmp_path / "out" / "evaluations.csv")
    }
    for each in loaded:
        for evaluation in each.evaluations:
            for measure, value in evaluation.values.items():
                said = evaluated[each.name, str(evaluation.step), measure]
                assert [float(end) if end else None for end in said] == list(value)
    compared = read_csv(tmp_path / "out" / "comparisons.csv")
    [change] = [row for row in compared if (row["run"], row["measure"], row["tasks of"]) == ("one", "tests", "all")]
    assert float(change["change"]) == loaded[0].comparisons[0].changes["tests"].change.value
    assert {row["run"] for row in compared} == {"one", "two", "two - one"}


def test_an_export_replaces_the_earlier_one_and_no_file_of_others(tmp_path: Path) -> None:
    pytest.importorskip("svglib")
    trained, short, out = write_run(tmp_path / "one", steps=3, evaluations=(0, 3)), tmp_path / "two", tmp_path / "out"
    write_run(short, steps=0, evaluations=(0,))
    fresh = tmp_path / "fresh"
    export_figures(Site([trained]).reports(), out)
    (out / "01-mine.csv").write_text("mine")
    for folder in (out, fresh):
        export_figures(Site([short]).reports(), folder)
    assert {each.name for each in out.iterdir()} == {"01-mine.csv", *(each.name for each in fresh.iterdir())}


def test_a_name_chosen_by_a_model_is_no_spreadsheet_formula() -> None:
    evil = "=cmd|'/C calc'!A0"
    assert list(csv.reader(format_csv(("name", "value"), [(evil, -1.0)]).decode().splitlines()))[1] == [
        f"'{evil}",
        "-1.0",
    ]
