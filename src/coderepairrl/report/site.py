"""Pages about runs, by path: report, lists of episodes, each episode. Written to a folder, or rendered on request."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from coderepairrl.errors import UsageError
from coderepairrl.report.analysis import Report, compare_runs, list_differences
from coderepairrl.report.charts import make_curve_panel
from coderepairrl.report.episodes import render_episode
from coderepairrl.report.kit import ASSETS, PageContext, embed_json, read_asset
from coderepairrl.report.page import render_report
from coderepairrl.report.plots import draw_figure
from coderepairrl.report.plots.panels import Baseline
from coderepairrl.report.reading import to_plain_data
from coderepairrl.report.rows import file_name
from coderepairrl.report.run import RunPages, find_episode
from coderepairrl.runs.storage import replace_file


class PageMissing(Exception):
    """No page of the site has the address."""


class Site:
    """Pages about the runs at `paths`: run folders, or folders that contain some. Raises `UsageError` without a run."""

    def __init__(self, paths: Sequence[Path], *, live: bool = False) -> None:
        folders = [run for path in paths for run in _find_runs(path)]
        self.runs: dict[str, RunPages] = {}
        for run in map(RunPages, {path.resolve(): path for path in folders}.values()):
            name, number = file_name(run.name), 2
            while name in self.runs or name == "assets":
                name, number = f"{file_name(run.name)}-{number}", number + 1
            self.runs[name] = run
        self.live = live
        self._names: dict[tuple[str, str], dict[str, str]] = {}
        self.update()

    def update(self) -> None:
        """Read new log records."""
        for run in self.runs.values():
            run.rows.update()

    def reports(self) -> list[Report]:
        """Analyse the runs, with distinct names, and note rewards whose versions differ."""
        reports = [run.report() for run in self.runs.values()]
        names, paths = [each.name for each in reports], [Path(each.path).resolve() for each in reports]
        longest = max(len(path.parts) for path in paths)
        # runs of the same name get the shortest ends of their paths that differ
        depths = (depth for depth in range(2, longest) if len({path.parts[-depth:] for path in paths}) == len(paths))
        depth = next(depths, longest)
        reports = [
            replace(each, name="/".join(path.parts[-depth:])) if names.count(each.name) > 1 else each
            for each, path in zip(reports, paths, strict=True)
        ]
        return [replace(each, notices=[*each.notices, *_compare_versions(each, reports[0])]) for each in reports]

    def numbers(self) -> dict[str, Any]:
        """Numbers of the report, for ``--json``."""
        reports = self.reports()
        return {
            "runs": to_plain_data(reports),
            "between_runs": [to_plain_data(compare_runs(reports[0], other)) for other in reports[1:]],
            "differences": to_plain_data(list_differences(reports)),
        }

    def page(self, path: str) -> str:
        """Page at `path`. Raises `PageMissing`."""
        return self.find_renderer(path, {})()

    def find_renderer(self, path: str, query: Mapping[str, str]) -> Callable[[], str]:
        """Find the function that renders the page or JSON at `path`. Raises `PageMissing`."""
        try:
            return self._find_json(path, query) if path.endswith(".json") else self._find_page(path)
        except (KeyError, ValueError) as error:  # an unknown name, or a malformed number
            raise PageMissing(path) from error

    def _find_page(self, path: str) -> Callable[[], str]:
        if path == "index.html":
            return lambda: render_report(self.reports(), list(self.runs), PageContext(folder=".", live=self.live))
        folder, _, rest = path.partition("/")
        if folder == "assets" and rest in ASSETS:
            return partial(read_asset, rest)
        run = self.runs[folder]
        context = PageContext(run.name, folder, self.live)
        if rest == "index.html":
            return partial(run.render_list_page, context)
        if rest == "text.js" and not self.live:
            return lambda: "".join(
                f"found({embed_json(name)},{embed_json(text)});\n" for name, text in run.list_searchable_texts()
            )
        kind, _, page = rest.partition("/")
        name = self._find_name(folder, kind, page.removesuffix(".html"))
        renderers = {"episode": run.render_episode_page, "group": run.render_group_page, "task": run.render_task_page}
        return partial(renderers[kind], name, context)

    def _find_json(self, path: str, query: Mapping[str, str]) -> Callable[[], str]:
        # RUN/rows.json?since=STATE, RUN/state.json?page=EPISODE, RUN/search.json?text=TEXT
        folder, _, request = path.partition("/")
        run = self.runs[folder]
        match request:
            case "rows.json":
                since = int(query["since"])
                return lambda: json.dumps(run.list_changed_rows(since))
            case "state.json":
                row = run.rows.by_id[self._find_name(folder, "episode", query["page"])]
                return lambda: json.dumps({"ending": row.ending, "turns": row.turns})
            case "search.json":
                text = query["text"]
                return lambda: json.dumps({"found": run.rows.follower.search(text)})
        raise KeyError(path)

    def paths(self) -> Iterator[str]:
        """Paths of all pages, linked ones first."""
        yield from (f"assets/{name}" for name in ASSETS)
        for folder, run in self.runs.items():
            for group, names in run.rows.groups.items():  # each page reads the episodes of its group
                yield from (f"{folder}/episode/{file_name(name)}.html" for name in names)
                yield f"{folder}/group/{file_name(group)}.html"
            yield from (f"{folder}/task/{file_name(name)}.html" for name in run.rows.tasks)
            yield from (f"{folder}/text.js", f"{folder}/index.html")
        yield "index.html"

    def choose_first_path(self, episode: str | None = None) -> str:
        """Choose the page to show first: the report, or an `episode` of the first run. Raises `UsageError`."""
        if episode is None:
            return "index.html"
        folder, run = next(iter(self.runs.items()))
        return f"{folder}/episode/{file_name(find_episode(run, episode))}.html"

    def write(self, output: Path | None = None, advance: Callable[[int, int], None] = lambda done, of: None) -> Path:
        """Write all pages below `output`, each atomically; return the first. `advance` gets pages written and total.

        `output` defaults to ``report`` in the run, and for several runs to ``report/compare`` in the first. A ``.html``
        file gets only the report. Raises `UsageError` if writing fails; old pages stay.
        """
        home = next(iter(self.runs.values())).folder.path / "report"
        output = output or (home if len(self.runs) == 1 else home / "compare")
        if output.suffix == ".html":
            return write_page(output, render_report(self.reports(), list(self.runs), PageContext()))
        paths = list(self.paths())
        for done, path in enumerate(paths):
            write_page(output / path, self.page(path))
            advance(done + 1, len(paths))
        return output / "index.html"

    def write_episode(self, episode: str, output: Path | None = None) -> Path:
        """Write a standalone page of an episode of the first run (default: in its ``report``). Raises `UsageError`."""
        run = next(iter(self.runs.values()))
        view = run.view_episode(find_episode(run, episode))
        path = output or run.folder.path / "report" / f"{file_name(view.episode.id)}.html"
        return write_page(path, render_episode(view, PageContext(run.name, notice=view.notice)))

    def write_figure(self, output: Path, baselines: Sequence[str] = ()) -> Path:
        """Write reward and passing tests over steps as SVG.

        `baselines` are ``NAME=VALUE``; one per run takes that run's colour. Raises `UsageError`.
        """
        reports, lines = self.reports(), [_parse_baseline(text) for text in baselines]
        if len(lines) == len(reports) > 1:
            lines = [Baseline(line.name, line.value, at) for at, line in enumerate(lines)]
        panels = [make_curve_panel(reports, "reward", lines), make_curve_panel(reports, "tests")]
        return write_page(output, draw_figure(panels, columns=2, standalone=True))

    def _find_name(self, folder: str, kind: str, page: str) -> str:
        """Name behind a file name. Raises KeyError."""
        names = self._names.setdefault((folder, kind), {})
        if page not in names:  # perhaps new since the last request
            rows = self.runs[folder].rows
            kinds: dict[str, Mapping[str, object]] = {"episode": rows.by_id, "group": rows.groups, "task": rows.tasks}
            names |= {file_name(name): name for name in kinds[kind]}
        return names[page]


def write_page(path: Path, content: str | bytes) -> Path:
    """Write a file atomically; return `path`. Raises `UsageError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path, synced=False) as temporary:  # thousands of pages, which can be rendered again
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", fix="name another folder") from error
    return path


def _find_runs(path: Path) -> list[Path]:
    if path.is_dir() and not (path / "run.json").exists():
        return sorted(each.parent for each in path.glob("*/run.json")) or [path]
    return [path]


def _compare_versions(report: Report, first: Report) -> list[str]:
    # runs from before versions were recorded have version 1
    versions, first_versions = (each.about.get("rewards") or {} for each in (report, first))
    return [
        f"{name} is version {versions.get(name, 1)} here and version {first_versions.get(name, 1)} in {first.name}: "
        "their values are not comparable."
        for name in report.scores
        if name in first.scores and versions.get(name, 1) != first_versions.get(name, 1)
    ]


def _parse_baseline(text: str) -> Baseline:
    name, _, value = text.rpartition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"baseline {text!r} is not NAME=VALUE", fix='write for example "junk edit=0.04"')
    return Baseline(name.strip(), number)
