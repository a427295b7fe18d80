"""Implementation of `crrl report`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from coderepairrl.errors import UsageError
from coderepairrl.report.analysis import Report, analyse, as_json, compare_runs, differences
from coderepairrl.report.charts import curve
from coderepairrl.report.page import render
from coderepairrl.report.plots import Baseline, figure
from coderepairrl.report.reading import read
from coderepairrl.runs.storage import replace_file


def load(runs: Sequence[Path]) -> list[Report]:
    """Load the reports of `runs`. Raises `UsageError`."""
    reports = _told_apart([analyse(read(run)) for run in runs])
    return [replace(each, notices=[*each.notices, *_other_versions(each, reports[0])]) for each in reports]


def write_page(reports: Sequence[Report], output: Path | None) -> Path:
    """Write the page to `output` (default: ``report/index.html`` of the first run)."""
    if output is None:
        name = "index" if len(reports) == 1 else "compare"
        output = Path(reports[0].path) / "report" / f"{name}.html"
    return write(output, render(reports, output.parent))


def write_figure(reports: Sequence[Report], baselines: Sequence[str], output: Path) -> Path:
    """Write reward and passing tests over steps as SVG.

    `baselines` are ``NAME=VALUE``; one per run takes that run's colour.
    """
    lines = [_baseline(text) for text in baselines]
    if len(lines) == len(reports) > 1:
        lines = [Baseline(line.name, line.value, at) for at, line in enumerate(lines)]
    panels = [curve(reports, "reward", lines), curve(reports, "tests")]
    return write(output, figure(panels, columns=2, standalone=True))


def numbers(reports: Sequence[Report]) -> dict[str, Any]:
    """Numbers of the page, for ``--json``."""
    return {
        "runs": as_json(reports),
        "between_runs": [as_json(compare_runs(reports[0], other)) for other in reports[1:]],
        "differences": as_json(differences(reports)),
    }


def _told_apart(reports: Sequence[Report]) -> list[Report]:
    names = [each.name for each in reports]
    return [
        replace(each, name=f"{Path(each.path).parent.name}/{each.name}") if names.count(each.name) > 1 else each
        for each in reports
    ]


def _other_versions(report: Report, first: Report) -> list[str]:
    # runs without versions are at 1
    versions, first_versions = (each.about.get("rewards", {}) for each in (report, first))
    return [
        f"{name} is version {versions.get(name, 1)} here and version {first_versions.get(name, 1)} in {first.name}: "
        "their values do not compare."
        for name in report.scores
        if name in first.scores and versions.get(name, 1) != first_versions.get(name, 1)
    ]


def _baseline(text: str) -> Baseline:
    name, equals, value = text.rpartition("=")
    try:
        return Baseline(name.strip(), float(value)) if equals else Baseline("", float(value))
    except ValueError:
        raise UsageError(f"baseline {text!r} is not NAME=VALUE", fix='write for example "junk edit=0.04"') from None


def write(path: Path, text: str) -> Path:
    """Write text and return `path`. Raises `UsageError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as temporary:  # a page that is there stays whole when the disk is full
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error}", fix="name another file") from error
    return path
