"""Pages of runs by path, written to a folder or on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coderepairrl.errors import UsageError
from coderepairrl.report.view.page import ASSETS, Around, asset, embedded, render_episode, render_runs
from coderepairrl.report.view.rows import file_name
from coderepairrl.report.view.run import Run, find


class Site:
    """Pages of `paths`: run folders, or folders of these. Raises `UsageError` without a run."""

    def __init__(self, paths: Sequence[Path], *, live: bool = False) -> None:
        folders = [run for path in paths for run in _runs(path)]
        self.runs: dict[str, Run] = {}
        for run in map(Run, {path.resolve(): path for path in folders}.values()):
            name, number = file_name(run.name), 2
            while name in self.runs or name == "assets":
                name, number = f"{file_name(run.name)}-{number}", number + 1
            self.runs[name] = run
        self.live = live
        self._names: dict[tuple[str, str], dict[str, str]] = {}
        for run in self.runs.values():
            run.update()

    def page(self, path: str) -> str:
        """Page at `path`. Raises KeyError."""
        if path == "index.html":
            runs = [{**run.about(), "page": name} for name, run in self.runs.items()]
            return render_runs(runs, live=self.live)
        folder, _, rest = path.partition("/")
        if folder == "assets" and rest in ASSETS:
            return asset(rest)
        run = self.runs[folder]
        around = Around(run.name, folder, self.live, len(self.runs) == 1)
        if rest == "index.html":
            return run.index(around)
        if rest == "text.js" and not self.live:
            return "".join(f"found({embedded(name)},{embedded(text)});\n" for name, text in run.searched())
        kind, _, page = rest.partition("/")
        name = self._name(folder, kind, page.removesuffix(".html"))
        pages: dict[str, Callable[[str, Around], str]] = {
            "episode": run.episode,
            "group": run.group,
            "task": run.of_task,
        }
        return pages[kind](name, around)

    def answer(self, path: str, asked: Mapping[str, str]) -> dict[str, Any]:
        """Answer ``RUN/rows.json?since=STATE``, ``RUN/state.json?page=EPISODE``, ``RUN/search.json?text=TEXT``.

        Raises KeyError and ValueError for unknown ones.
        """
        folder, _, request = path.partition("/")
        run = self.runs[folder]
        match request:
            case "rows.json":
                return run.changed(int(asked["since"]))
            case "state.json":
                row = run.rows.by_id[self._name(folder, "episode", asked["page"])]
                return {"ending": row.ending, "turns": row.turns}
            case "search.json":
                return {"found": run.search(asked["text"])}
        raise KeyError(path)

    def paths(self) -> Iterator[str]:
        """Paths of all pages, linked ones first."""
        yield from (f"assets/{name}" for name in ASSETS)
        for folder, run in self.runs.items():
            for group, names in run.rows.groups.items():  # which reads the same episodes
                yield from (f"{folder}/episode/{file_name(name)}.html" for name in names)
                yield f"{folder}/group/{file_name(group)}.html"
            yield from (f"{folder}/task/{file_name(name)}.html" for name in run.rows.tasks)
            yield from (f"{folder}/text.js", f"{folder}/index.html")
        yield "index.html"

    def first(self, episode: str | None = None) -> str:
        """Starting path: list of runs, the only run, or an `episode`. Raises `UsageError`."""
        if len(self.runs) > 1 and episode is None:
            return "index.html"
        [(folder, run)] = list(self.runs.items())[:1]
        if episode is None:
            return f"{folder}/index.html"
        return f"{folder}/episode/{file_name(find(run, episode))}.html"

    def write(self, output: Path, advance: Callable[[int, int], None] = lambda done, of: None) -> Path:
        """Write all pages below `output`, each atomically; return the first. `advance` gets pages written and total.

        Raises `UsageError` if writing fails; old pages stay.
        """
        paths = list(self.paths())
        for done, path in enumerate(paths):
            _write(output / path, self.page(path))
            advance(done + 1, len(paths))
        return output / self.first()

    def _name(self, folder: str, kind: str, page: str) -> str:
        names = self._names.setdefault((folder, kind), {})
        if page not in names:
            names |= {file_name(name): name for name in _kinds(self.runs[folder])[kind]}
        return names[page]


def write_one(run: Path, episode: str, output: Path | None) -> Path:
    """Write a standalone page of an episode to `output` (default: the run's ``report/``). Raises `UsageError`."""
    [opened] = Site([run]).runs.values()
    view = opened.shown(find(opened, episode))
    path = output or opened.folder.path / "report" / f"{file_name(view.episode.id)}.html"
    return _write(path, render_episode(view, Around(opened.name, notice=view.notice)))


def _write(path: Path, text: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.partial")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)  # unsynced: pages are made anew from the run, and there are thousands
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", fix="name another place with -o") from error
    return path


def _kinds(run: Run) -> dict[str, list[str]]:
    return {"episode": list(run.rows.by_id), "group": list(run.rows.groups), "task": list(run.rows.tasks)}


def _runs(path: Path) -> list[Path]:
    if path.is_dir() and not (path / "run.json").exists():
        return sorted(each.parent for each in path.glob("*/run.json")) or [path]
    return [path]
