"""Exported figures and tables say what the report says."""

from __future__ import annotations

import csv
import json
import re
import zlib
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from coderepairrl import report
from coderepairrl.cli import app
from coderepairrl.report import view
from coderepairrl.report.plots import Panel, Series, figure, pdf
from coderepairrl.report.tables import _csv
from coderepairrl.types import Ending
from pages import Page

from .runs import Maker, written


def objects(page: bytes) -> dict[int, bytes]:
    """The objects of a PDF by number, each found where its table says that it is."""
    start = int(page.rsplit(b"startxref\n", 1)[1].split()[0])
    places = re.findall(rb"(\d{10}) 00000 n ", page[start:])
    found = {}
    for number, place in enumerate(map(int, places), 1):
        head, body = page[place:].split(b" 0 obj\n", 1)
        assert int(head) == number
        found[number] = body.split(b"\nendobj", 1)[0]
    return found


def content(page: bytes) -> str:
    return zlib.decompress(objects(page)[4].split(b"stream\n", 1)[1].rsplit(b"\nendstream", 1)[0]).decode("latin-1")


def texts(page: bytes) -> str:
    return "".join(bytes.fromhex(found).decode("cp1252") for found in re.findall("<([0-9a-f]*)> Tj", content(page)))


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_every_figure_is_there_three_times_and_every_number_once(tmp_path: Path) -> None:
    runs = [
        written(tmp_path / "one", steps=5, evaluations=(0, 5)),
        written(tmp_path / "two", steps=3, evaluations=(0, 3), seed=4),
    ]
    done = CliRunner().invoke(app, ["report", *map(str, runs), "--export", str(tmp_path / "out")])
    assert done.exit_code == 0 and done.stdout.strip() == str(tmp_path / "out")
    loaded = report.load(runs)
    figures = {path.stem for path in (tmp_path / "out").glob("*.svg")}
    assert len(figures) > 20
    for name in figures:
        drawn = ElementTree.parse(tmp_path / "out" / f"{name}.svg").getroot()
        said = "".join(text.text or "" for text in drawn.iter("{http://www.w3.org/2000/svg}text"))
        page = (tmp_path / "out" / f"{name}.pdf").read_bytes()
        assert len(texts(page)) == len(said), name
        assert page == pdf(ElementTree.tostring(drawn, encoding="unicode"))
    reward = [row for row in rows(tmp_path / "out" / "01-reward.csv") if row["curve"] == "one"]
    assert [(int(row["step"]), float(row["value"])) for row in reward] == [
        (step["step"], step["reward"]) for step in loaded[0].steps
    ]
    evaluated = {
        (row["run"], row["step"], row["measure"]): (row["value"], row["low"], row["high"])
        for row in rows(tmp_path / "out" / "evaluations.csv")
    }
    for each in loaded:
        for evaluation in each.evaluations:
            for measure, value in evaluation.values.items():
                said = evaluated[each.name, str(evaluation.step), measure]
                assert [float(end) if end else None for end in said] == list(value)
    compared = rows(tmp_path / "out" / "comparisons.csv")
    [change] = [row for row in compared if (row["run"], row["measure"], row["tasks of"]) == ("one", "tests", "all")]
    assert float(change["change"]) == loaded[0].comparisons[0].changes["tests"].change.value
    assert {row["run"] for row in compared} == {"one", "two", "two - one"}


def test_a_page_draws_what_the_figure_has_in_the_same_places() -> None:
    series = Series("it", [1, 2], [0.25, 1.0], low=[0.1, None], high=[0.5, None])
    panel = Panel("\N{GREEK CAPITAL LETTER DELTA} of it", [series])
    drawn = figure([panel], standalone=True)
    page = content(pdf(drawn))
    places = re.findall(r'd="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', drawn)
    assert len(places) == 1
    assert "{} {} m {} {} l S".format(*(f"{float(number):g}" for number in places[0])) in page
    assert page.count(" c B") == 3, "two dots, and one in the legend"
    assert "/F2 13 Tf <44> Tj" in page, "a delta is a D of the font Symbol"


def test_what_a_model_called_things_breaks_no_file() -> None:
    evil = "=cmd|'/C calc'!A0</text><script>(\\) ☃"
    drawn = figure([Panel(evil, [Series(evil, [1], [1.0])])], standalone=True)
    assert texts(pdf(drawn)).count("=cmd|'/C calc'!A0</text><script>(\\) ?") == 2
    [_, row] = csv.reader(_csv(("name", "value"), [(evil, -1.0)]).decode().splitlines())
    assert row == [f"'{evil}", "-1.0"]


@pytest.mark.parametrize("other", [["--json"], ["--figure", "x.svg"], ["-o", "x.html"]])
def test_one_thing_at_a_time(tmp_path: Path, other: list[str]) -> None:
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--export", "out", *other])
    assert "different things" in str(done.exception)


def test_evaluations_of_several_sources_stand_side_by_side(tmp_path: Path) -> None:
    also = {"java": {"source": "quixbugs"}}
    maker = Maker(tmp_path / "run", run={"steps": 1}, eval={"source": "mutants", "also": also})
    maker.start()
    for phase in ("eval", "java"):
        maker.evaluate(0, phase)
    maker.log.close()
    [loaded] = report.load([maker.folder.path])
    page = " ".join(Page(report.render([loaded])).text.split())
    assert "eval after step 0 mutants" in page and "java after step 0 quixbugs" in page
    before_and_after = report.render(report.load([written(tmp_path / "other")]))
    assert "<h2>Evaluations</h2>" not in before_and_after, "what a comparison says is not said twice"


def test_why_episodes_are_void_is_counted_by_kind(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "run", run={"steps": 1})
    maker.start()
    for number in range(3):
        maker.attempt(f"train-{number}", 0, "train", 1, "t", ending=Ending.VOID)
    maker.log.close()
    loaded = report.load([maker.folder.path])
    found = json.loads(json.dumps(report.numbers(loaded)))["runs"][0]["void"]
    assert found == [{"end": "engine: EngineFault: gone", "count": 3, "example": "train-0-00"}]
    assert "engine: EngineFault: gone" in Page(report.render(loaded)).text


def test_a_report_links_to_the_pages_that_are_there(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "my run", run={"name": "mine", "steps": 1})
    maker.start()
    maker.attempt("train-0", 0, "train", 1, "t", ending=Ending.VOID)
    maker.log.close()
    run = maker.folder.path
    loaded = report.load([run])
    for output in (None, tmp_path / "elsewhere" / "report.html"):
        assert Page(report.write_page(loaded, output).read_text()).links == []
    pages = run / "report" / "view"
    index = view.Site([run]).write(pages)
    wanted = [index, index.parent / "episode" / "train-0-00.html"]
    for output in (None, tmp_path / "elsewhere" / "report.html"):
        written_to = report.write_page(loaded, output)
        links = Page(written_to.read_text()).links
        assert [(written_to.parent / unquote(link)).resolve() for link in links] == wanted
        assert not any(link.startswith("/") for link in links), "both move together"
