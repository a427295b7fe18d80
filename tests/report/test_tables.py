"""Exported figures and tables say what the report says."""

from __future__ import annotations

import csv
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from coderepairrl.cli import app
from coderepairrl.report import Site, _csv
from coderepairrl.report.plots import pdf

from .runs import written

pdfium = pytest.importorskip("pypdfium2")
pytest.importorskip("svglib")


def texts(page: bytes) -> str:
    """Without spaces; the font Symbol has an increment for a delta."""
    [only] = pdfium.PdfDocument(page)
    found = "".join(only.get_textpage().get_text_bounded().split())
    return found.replace("\N{INCREMENT}", "\N{GREEK CAPITAL LETTER DELTA}")


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
    loaded = Site(runs).reports()
    figures = {path.stem for path in (tmp_path / "out").glob("*.svg")}
    assert len(figures) > 20
    for name in figures:
        drawn = ElementTree.parse(tmp_path / "out" / f"{name}.svg").getroot()
        shown = "".join(text.text or "" for text in drawn.iter("{http://www.w3.org/2000/svg}text"))
        page = (tmp_path / "out" / f"{name}.pdf").read_bytes()
        assert sorted(texts(page)) == sorted("".join(shown.split())), name
        assert page == pdf((tmp_path / "out" / f"{name}.svg").read_text()), "the same bytes each time"
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


def test_a_name_that_a_model_chose_is_no_formula() -> None:
    evil = "=cmd|'/C calc'!A0"
    assert list(csv.reader(_csv(("name", "value"), [(evil, -1.0)]).decode().splitlines()))[1] == [f"'{evil}", "-1.0"]
