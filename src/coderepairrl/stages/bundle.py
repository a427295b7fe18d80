"""``crrl export --to bundle``: what others need to check a run or a study, and to evaluate its policies again.

A bundle has the folders of its runs without logs, episodes and optimizer state. Each is a policy like any other run
(`coderepairrl.models.resolve_model`).
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from coderepairrl import models
from coderepairrl.errors import RunError, UsageError
from coderepairrl.report import Site
from coderepairrl.report.jobs import is_jobs_folder, read_jobs_folder, write_jobs_page
from coderepairrl.runs import RunFolder, open_run
from coderepairrl.runs.storage import SUMS, hash_concatenated
from coderepairrl.stages.export import list_exported_files
from coderepairrl.stats import Interval
from coderepairrl.version import __version__

LOG_SUMS = "LOGS.sha256"
"""Checksums of the logs, which are not in the bundle."""
_FILES = ("config.toml", "run.json", "metrics.jsonl", "examples.json")
_RESULTS = ("resolved", "reward")


def export_bundle(source: Path, target: Path) -> int:
    """Write the bundle of the run or study `source` to `target`, which must be new; return the number of runs.

    A study's bundle has its finished jobs. A failure leaves no folder. Raises `UsageError` and `RunError`.
    """
    if target.exists():
        raise UsageError(f"{target} already exists", fix="name a new folder")
    is_study = is_jobs_folder(source)
    if is_study:
        finished = [source / job.name for job in read_jobs_folder(source)[1] if not job.missing]
        runs = [open_run(folder) for folder in finished if (folder / "run.json").is_file()]
    else:
        runs = [open_run(source)]
    if not runs:
        raise UsageError(f"no job of {source} has finished", fix=f"crrl report {source} shows what is missing")
    try:
        target.mkdir(parents=True)
        copies = [_copy_run(run, target / run.path.relative_to(source)) for run in runs]
        if is_study:
            _copy_files([source / "jobs.json", *source.rglob("*.job.json")], source, target)
            write_jobs_page(source, target / "report.html")
        else:
            Site([source]).write(target / "report.html")
        title = source.resolve().name
        (target / LOG_SUMS).write_text(_format_sums((run.log for run in runs), source))
        _write_lines(target / "README.md", _describe_bundle(title, copies, target))
        _write_lines(target / "CITATION.cff", _describe_citation(title, copies))
        (target / SUMS).write_text(_format_sums(sorted(target.rglob("*")), target))
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, OSError):
            raise RunError(f"cannot write {target}: {error}", fix="free some space, or name another place") from error
        raise
    return len(runs)


def _copy_run(run: RunFolder, target: Path) -> RunFolder:
    files = [*(run.path / name for name in _FILES), *run.path.glob("eval/**/*"), *run.path.glob("model/*")]
    _copy_files(files, run.path, target)
    if checkpoints := run.list_checkpoints():
        step = max(checkpoints)
        _copy_files(list_exported_files(checkpoints[step]), run.path, target)
        _write_lines(target / "checkpoints" / checkpoints[step].name / "README.md", _describe_model(run, step))
    return RunFolder(target)


def _copy_files(files: Iterable[Path], home: Path, target: Path) -> None:
    for file in filter(Path.is_file, files):
        copy = target / file.relative_to(home)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines))


def _format_sums(files: Iterable[Path], home: Path) -> str:
    return "".join(f"{hash_concatenated([file])}  {file.relative_to(home)}\n" for file in files if file.is_file())


def _describe_bundle(title: str, runs: Iterable[RunFolder], home: Path) -> Iterator[str]:
    yield f"# {title}\n"
    yield f"Made with CodeRepairRL {__version__}. `report.html` shows the results."
    yield f"`sha256sum -c {SUMS}` checks the files. `{LOG_SUMS}` has the checksums of the logs, which are not here."
    for run in runs:
        about = run.about()
        place = run.path.relative_to(home)
        yield f"\n## {about.get('name') or title}\n"
        yield f"Commit {about.get('commit') or 'unknown'}, seed {about.get('seed', 'unknown')}. The command was:\n"
        yield f"    crrl {shlex.join(about.get('argv', ['crrl'])[1:])}\n"
        yield from _describe_results(run)
        if run.list_checkpoints():
            yield "\nEvaluate it again, without training:\n"
            yield f"    crrl eval {place / 'config.toml'} --policy {place}"


def _describe_results(run: RunFolder) -> Iterator[str]:
    for summary in sorted(run.path.glob("eval/*/summary.json")):
        result = json.loads(summary.read_text("utf-8"))
        intervals = result["values"] | result["outcomes"]
        means = ", ".join(f"{name} {Interval(**intervals[name])}" for name in _RESULTS if name in intervals)
        yield f"- {summary.parent.name}: {result['tasks']:,} tasks, {result['episodes']:,} attempts: {means}"


def _describe_model(run: RunFolder, step: int) -> Iterator[str]:
    """Model card with metadata for the Hugging Face hub."""
    about = run.about()
    base = about["config"]["model"]["path"]
    yield "---"
    yield f"library_name: {'peft' if about['config']['train'].get('lora') else 'transformers'}"
    if models.is_hub_name(base):
        yield f"base_model: {json.dumps(base.partition('@')[0])}"
    yield "tags: [code-repair, reinforcement-learning]"
    yield "---"
    yield f"# {about.get('name') or run.path.name}\n"
    yield f"{base} after {step:,} steps of `crrl {run.command()}`. Its licence is that of the base model."
    yield "Intended use: to repair code in a sandbox. The results say how often that succeeds.\n"
    yield "SHA-256 of the base model's files:\n"
    yield from (f"    {digest}  {name}" for name, digest in about.get("model", {}).items())
    yield ""
    yield from _describe_results(run)


def _describe_citation(title: str, runs: Iterable[RunFolder]) -> Iterator[str]:
    yield "cff-version: 1.2.0"
    yield "message: If you use these results, please cite them and CodeRepairRL."
    yield "type: dataset"
    yield f"title: {json.dumps(title)}"
    yield "authors: [{name: FILL IN}]"
    yield "references:"
    yield f"  - {{type: software, title: CodeRepairRL, version: {__version__}, authors: [{{name: CodeRepairRL}}]}}"
    if commits := sorted({run.about().get("commit") or "" for run in runs} - {""}):
        yield f"identifiers: [{', '.join(f'{{type: other, value: {commit}}}' for commit in commits)}]"
