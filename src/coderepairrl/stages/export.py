"""``crrl export``: a run's model, episodes, or metrics, for use elsewhere."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from pathlib import Path
from typing import Literal

from coderepairrl import config as configs
from coderepairrl import models
from coderepairrl.errors import CodeRepairError, RunError, UsageError
from coderepairrl.learn import check_weights, extract_language_model, merge_adapter
from coderepairrl.plan import require_trackers
from coderepairrl.plan.tasks import read_tasks_learned_by_model
from coderepairrl.processes.scratch import scratch
from coderepairrl.report import trackers, trajectories
from coderepairrl.runs import logged_episodes, open_run, write_learned

_OF_THE_LEARNER = ("learner.", "optimizer.", "value_head.")
"""Prefixes of a checkpoint's files that only training needs."""


async def export_model(source: str, target: Path, precision: Literal["fp32", "bf16"] | None = None) -> None:
    """Write the model that `source` names (`resolve_model`) to the folder `target`, which must be new or empty.

    Adapters are merged in float32; `precision` defaults to the run's, or that of the model below foreign adapters.
    Experts of a run get the tensor names of published files; of a multimodal model only the language model is written.
    A failure leaves an empty folder.

    Raises `UsageError`, `LearnerFault` and `RunError`.
    """
    named_model = models.resolve_model(source)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} already exists", fix="name a new folder")
    if named_model.adapter is None and precision is not None:
        raise UsageError(f"{named_model.folder} has full weights, which are copied", fix="leave --precision out")
    try:
        target.mkdir(parents=True, exist_ok=True)
        await _write_model(named_model, target, precision)
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
    facts, judged = folder.about(), logged_episodes(folder.records())
    name = str(facts.get("name") or run.name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if form == "parquet":
            return trajectories.write_parquet(name, judged, target)
        config = facts.get("config") or configs.load_run(run).model_dump(mode="json")
        kinds = {kind: settings["agent"] for kind, settings in config.get("kinds", {}).items() if settings.get("agent")}
        agents = {kind: Path(agent["name"]).name for kind, agent in ({"": config["agent"]} | kinds).items()}
        path = config["model"]["path"]
        model = path if path.startswith("builtin:") else "" if "://" in path else Path(path).name
        return trajectories.write_atif(
            trajectories.ExportSource(name, agents, facts["coderepairrl"], model), judged, target
        )
    except OSError as error:
        raise RunError(f"cannot write {target}: {error}", fix="free some space, or name another place") from error


def export_metrics(run: Path, tracker: str) -> int:
    """Send `tracker` the steps and evaluations of `run` that it lacks; return their number.

    Raises `PrerequisiteError` if it is not installed, `UsageError` for no run or a concurrent transfer, `RunError` if
    the tracker fails.
    """
    require_trackers([tracker])
    try:
        with contextlib.redirect_stdout(sys.stderr):  # trackers print a lot
            return trackers.send_metrics(run, tracker)
    except CodeRepairError:
        raise
    except Exception as error:  # whatever its package raises
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
    for file in models.list_model_files(model.folder):  # parts of a tokenizer that saving it does not write
        if (
            file.suffix != ".safetensors"
            and not file.name.endswith((".index.json", models.QUANTISED))
            and not (target / file.name).exists()
        ):
            shutil.copyfile(file, target / file.name)


def list_exported_files(folder: Path) -> list[Path]:
    """Files of a model, without the learner's state."""
    return [file for file in models.list_model_files(folder) if not file.name.startswith(_OF_THE_LEARNER)]


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
    return "bf16" if dtype.endswith("16") else "fp32"
