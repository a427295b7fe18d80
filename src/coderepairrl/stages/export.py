"""``crrl export``: a run's model, episodes, metrics, or all that its release needs, for use elsewhere."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from coderepairrl import config as configs
from coderepairrl import models
from coderepairrl.errors import CodeRepairError, RunError, UsageError
from coderepairrl.learn import check_weights, extract_language_model, merge_adapter
from coderepairrl.plan import require_trackers
from coderepairrl.plan.tasks import read_tasks_learned_by_model
from coderepairrl.printable import printable
from coderepairrl.processes.scratch import scratch
from coderepairrl.report import Site, trackers, trajectories
from coderepairrl.report.jobs import is_jobs_folder, read_jobs_folder, write_jobs_page
from coderepairrl.runs import RunFolder, logged_episodes, open_run, write_learned
from coderepairrl.runs.storage import SUMS, hash_concatenated
from coderepairrl.stats.intervals import Interval
from coderepairrl.version import __version__

_TRAINING_PREFIXES = ("learner.", "optimizer.", "value_head.")
"""Prefixes of a checkpoint's files that only training needs."""
LOG_SUMS = "LOGS.sha256"
"""Checksums of the logs, which are not in the bundle."""
_RUN_FILES = ("config.toml", "run.json", "metrics.jsonl", "examples.json")
_SHOWN_RESULTS = ("resolved", "reward")


async def export_model(source: str, target: Path, precision: Literal["fp32", "bf16"] | None = None) -> None:
    """Write the model that `source` names (`resolve_model`) to the folder `target`, which must be new or empty.

    Adapters are merged in float32, then stored in `precision`: by default the run's, or the base model's if no run
    trained them. Fused experts of a run get the tensor names of published files. Of a multimodal model only the
    language model is written. A failure leaves an empty folder.

    Raises `UsageError`, `LearnerFault` and `RunError`.
    """
    model = models.resolve_model(source)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} already exists", fix="name a new folder")
    if model.adapter is None and precision is not None:
        raise UsageError(f"{model.folder} has full weights, which are copied", fix="leave --precision out")
    try:
        target.mkdir(parents=True, exist_ok=True)
        await _write_model(model, target, precision)
        write_learned(target, read_tasks_learned_by_model(source))
    except BaseException as error:
        for file in target.glob("*"):  # an incomplete model looks like a whole one
            file.unlink()
        if isinstance(error, OSError):
            raise RunError(f"cannot write {target}: {error}", fix="free some space, or name another folder") from error
        raise


def export_episodes(run: Path, target: Path, form: Literal["parquet", "atif"]) -> int:
    """Write the judged episodes of `run` to `target`, which must be new; return their number.

    A killed process leaves no partial output. Raises `UsageError` and `RunError`.
    """
    folder = open_run(run)
    if target.exists() and (not target.is_dir() or form == "parquet" or any(target.iterdir())):
        raise UsageError(f"{target} already exists", fix="name a new folder")
    about, judged = folder.about(), logged_episodes(folder.records())
    name = str(about.get("name") or run.name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if form == "parquet":
            return trajectories.write_parquet(name, judged, target)
        config = about.get("config") or configs.load_run(run).model_dump(mode="json")
        kinds = {kind: settings["agent"] for kind, settings in config.get("kinds", {}).items() if settings.get("agent")}
        agents = {kind: Path(agent["name"]).name for kind, agent in ({"": config["agent"]} | kinds).items()}
        path = config["model"]["path"]  # folders and addresses of this machine are not exported
        model = path if path.startswith("builtin:") else "" if "://" in path else Path(path).name
        source = trajectories.ExportSource(name, agents, about["coderepairrl"], model)
        return trajectories.write_atif(source, judged, target)
    except OSError as error:
        raise RunError(f"cannot write {target}: {error}", fix="free some space, or name another place") from error


def export_metrics(run: Path, tracker: str) -> int:
    """Send `tracker` the steps and evaluations of `run` that it lacks; return their number.

    Raises `PrerequisiteError` if `tracker` is not installed, `UsageError` for no run or a concurrent transfer,
    `RunError` if the tracker fails.
    """
    require_trackers([tracker])
    try:
        with contextlib.redirect_stdout(sys.stderr):  # trackers print a lot
            return trackers.send_metrics(run, tracker)
    except CodeRepairError:
        raise
    except Exception as error:  # its package may raise anything
        raise RunError(f"{tracker}: {error}", fix="remove the cause, and repeat the command for the rest") from error


async def _write_model(model: models.ResolvedModel, target: Path, precision: Literal["fp32", "bf16"] | None) -> None:
    with scratch("export") as logs:
        if model.adapter is None:
            if models.has_separate_language_model(model.folder) or (model.run and _is_fused(model.folder)):
                await extract_language_model(model.folder, target, log_dir=logs)
                return
            if not model.run:
                await check_weights(model.folder, log_dir=logs)
            _copy_model(model.folder, target)
            return
        if precision is None:
            precision = configs.load_run(model.run).train.precision if model.run else _read_precision(model.folder)
        await merge_adapter(model.folder, model.adapter, target, precision, log_dir=logs)
    for file in models.list_model_files(model.folder):  # that merging does not write, such as parts of the tokenizer
        if (
            file.suffix != ".safetensors"
            and not file.name.endswith((".index.json", models.QUANTISED))
            and not (target / file.name).exists()
        ):
            shutil.copyfile(file, target / file.name)


def list_exported_files(folder: Path) -> list[Path]:
    """Files of a model, without the learner's state."""
    return [file for file in models.list_model_files(folder) if not file.name.startswith(_TRAINING_PREFIXES)]


def _copy_model(folder: Path, target: Path) -> None:
    model_files = list_exported_files(folder)
    if not any(file.suffix == ".safetensors" for file in model_files):
        raise UsageError(f"{folder} has no weights", fix="name a folder with *.safetensors")
    for file in model_files:
        shutil.copyfile(file, target / file.name)


def _is_fused(folder: Path) -> bool:
    """Whether a checkpoint has fused experts, which some engines cannot read."""
    index = folder / "model.safetensors.index.json"
    return index.is_file() and any(".experts." in name for name in json.loads(index.read_text("utf-8"))["weight_map"])


def _read_precision(folder: Path) -> Literal["fp32", "bf16"]:
    model_config = json.loads((folder / "config.json").read_text("utf-8"))
    dtype = str(model_config.get("dtype") or model_config.get("torch_dtype"))
    return "bf16" if dtype.endswith("bfloat16") else "fp32"  # fp32 for float16, too, which bf16 would round


# -- bundles


def export_bundle(source: Path, target: Path) -> int:
    """Write to `target` what others need to check the run or study `source`, and to evaluate its policies again.

    It holds the run's folder, or those of the study's finished jobs, without logs, episodes and optimizer state. Each
    can be named as a policy (`resolve_model`). A failure leaves no folder. Returns the number of runs. Raises
    `UsageError` and `RunError`.
    """
    if target.exists():
        raise UsageError(f"{target} already exists", fix="name a new folder")
    if target.resolve().is_relative_to(source.resolve()):
        raise UsageError(f"{target} is in {source}, so it would contain itself", fix="name a folder outside")
    is_study = is_jobs_folder(source)
    if is_study:
        done = [source / job.name for job in read_jobs_folder(source)[1] if not job.missing]
        runs = [open_run(folder) for folder in done if (folder / "run.json").is_file()]
    else:
        runs = [open_run(source)]
    if not runs:
        raise UsageError(
            f"no job of {source} has finished", fix=f"crrl report {shlex.quote(str(source))} shows what is missing"
        )
    try:
        target.mkdir(parents=True)
        for run in runs:
            _copy_run(run, target / run.path.relative_to(source))
        if is_study:
            _copy_files([source / "jobs.json", *source.rglob("*.job.json")], source, target)
            write_jobs_page(source, target / "report.html")
        else:
            Site([source]).write(target / "report.html")
        title = source.resolve().name
        if (source / LOG_SUMS).is_file():  # the source is a bundle, without logs
            shutil.copyfile(source / LOG_SUMS, target / LOG_SUMS)
        else:
            (target / LOG_SUMS).write_text(_format_sums([run.log for run in runs], source))
        _write_lines(target / "README.md", _describe_bundle(title, runs, source))
        _write_lines(target / "CITATION.cff", _describe_citation(title, runs))
        (target / SUMS).write_text(_format_sums(sorted(target.rglob("*")), target))
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, OSError):
            raise RunError(f"cannot write {target}: {error}", fix="free some space, or name another place") from error
        raise
    return len(runs)


def _copy_run(run: RunFolder, target: Path) -> None:
    files = [*(run.path / name for name in _RUN_FILES), *run.path.glob("eval/**/*"), *run.path.glob("model/*")]
    _copy_files(files, run.path, target)
    if checkpoints := run.list_checkpoints():
        step = max(checkpoints)
        model_files = list_exported_files(checkpoints[step])
        if not any(file.suffix == ".safetensors" for file in model_files):
            raise RunError(f"{checkpoints[step]} has no weights", fix="delete it: the one before is used instead")
        _copy_files(model_files, run.path, target)
        if deleted := [file.name for file in model_files if not (target / file.relative_to(run.path)).is_file()]:
            raise RunError(f"{deleted[0]} of {checkpoints[step]} was deleted meanwhile", fix="try again")
        card = target / "checkpoints" / checkpoints[step].name / "README.md"
        _write_lines(card, _describe_model(run, step))


def _copy_files(files: Iterable[Path], home: Path, target: Path) -> None:
    for file in filter(Path.is_file, files):
        copy = target / file.relative_to(home)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def _write_lines(file: Path, lines: Iterable[str]) -> None:
    file.write_text("".join(f"{printable(line)}\n" for line in lines), "utf-8")


def _format_sums(files: Iterable[Path], home: Path) -> str:
    return "".join(f"{hash_concatenated([file])}  {file.relative_to(home)}\n" for file in files if file.is_file())


def _describe_bundle(title: str, runs: Iterable[RunFolder], home: Path) -> Iterator[str]:
    yield f"# {title}"
    yield ""
    yield f"Made with CodeRepairRL {__version__}. `report.html` shows the results."
    yield f"`sha256sum -c {SUMS}` checks the files. `{LOG_SUMS}` has the checksums of the logs, which are not here."
    for run in runs:
        about = run.about()
        place = run.path.relative_to(home)
        yield ""
        yield f"## {about.get('name') or title if place == Path() else place}"
        yield ""
        yield f"Commit {about.get('commit') or 'unknown'}, seed {about.get('seed', 'unknown')}. The command was:"
        yield ""
        yield f"    crrl {shlex.join((about.get('argv') or ['crrl'])[1:])}"
        yield ""
        yield from _describe_results(run)
        if run.list_checkpoints():
            yield ""
            yield "Evaluate it again, without training:"
            yield ""
            yield f"    crrl eval {place / 'config.toml'} --policy {place}"
            base = _find_base(about)
            if not (models.is_hub_name(base) or base.startswith(models.BUILTIN) or (run.path / "model").is_dir()):
                yield ""
                yield f"Its base model was in {base}: put your folder's path into `{place / 'config.toml'}`."


def _find_base(about: Mapping[str, Any]) -> str:
    return str((about.get("config") or {}).get("model", {}).get("path", "an unknown model"))


def _describe_results(run: RunFolder) -> Iterator[str]:
    summaries = sorted(run.path.glob("eval/*/summary.json"))
    if not summaries:
        yield "- no evaluation is finished"
    for summary in summaries:
        try:
            result = json.loads(summary.read_text("utf-8"))
            intervals = result["values"] | result["outcomes"]
            shown = ", ".join(f"{name} {Interval(**intervals[name])}" for name in _SHOWN_RESULTS if name in intervals)
            yield f"- {summary.parent.name}: {result['tasks']:,} tasks, {result['episodes']:,} attempts: {shown}"
        except (ValueError, LookupError, TypeError) as error:
            raise RunError(f"{summary} is damaged: {error!r}", fix="restore it from a copy, or remove it") from error


def _describe_model(run: RunFolder, step: int) -> Iterator[str]:
    """Model card, with the metadata that the Hugging Face hub reads."""
    about = run.about()
    config, base = about.get("config") or {}, _find_base(about)
    yield "---"
    yield f"library_name: {'peft' if config.get('train', {}).get('lora') else 'transformers'}"
    if models.is_hub_name(base):
        yield f"base_model: {json.dumps(base.partition('@')[0])}"
    yield "tags: [code-repair, reinforcement-learning]"
    yield "---"
    yield f"# {about.get('name') or run.path.name}"
    yield ""
    yield f"{base} after {step:,} steps of `crrl {run.command()}`. Its licence is that of the base model."
    yield "Intended use: to repair code in a sandbox. The results say how often that succeeds."
    yield ""
    yield "SHA-256 of the base model's files:"
    yield ""
    yield from (f"    {digest}  {name}" for name, digest in (about.get("model") or {}).items())
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
        yield f"identifiers: [{', '.join(f'{{type: other, value: {json.dumps(commit)}}}' for commit in commits)}]"
