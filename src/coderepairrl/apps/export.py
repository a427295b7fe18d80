"""``crrl export``: a checkpoint, or adapters merged into their model, as a plain folder in Hugging Face layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Literal

from coderepairrl import config as configs
from coderepairrl import models
from coderepairrl.errors import RunError, UsageError
from coderepairrl.learn import merge
from coderepairrl.processes.scratch import scratch

_OF_THE_LEARNER = ("learner.", "optimizer.")
"""What files of a checkpoint are called that only training needs."""


async def export(model: str, target: Path, precision: Literal["fp32", "bf16"] | None = None) -> Path:
    """Write the model that `model` names (`models.named`) to the folder `target`, which must be new or empty.

    Adapters are merged, added in float32; the weights have `precision`, by default that of the run that trained them,
    or of the model below adapters of others. Full weights are copied as they are. What fails leaves an empty folder.
    Raises `UsageError` for a model or folder that cannot be used, `LearnerFault` and `RunError` where merging or
    writing fails.
    """
    found = models.named(model)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} is there already", fix="name a new folder")
    if found.adapter is None and precision is not None:
        raise UsageError(f"{found.folder} has full weights, which are copied as they are", fix="no --precision")
    try:
        target.mkdir(parents=True, exist_ok=True)
        await _write(found, target, precision)
    except BaseException as error:
        for file in target.glob("*"):  # half a model looks like one
            file.unlink()
        if isinstance(error, OSError):
            raise RunError(f"cannot write {target}: {error}", fix="free some space, or name another folder") from error
        raise
    return target


async def _write(found: models.Named, target: Path, precision: Literal["fp32", "bf16"] | None) -> None:
    if found.adapter is None:
        return _copy(found.folder, target)
    if precision is None:
        precision = configs.load(found.run).train.precision if found.run else _precision_of(found.folder)
    with scratch("export") as logs:
        await merge(found.folder, found.adapter, target, precision, log_dir=logs)
    for file in models.files(found.folder):  # a tokenizer's parts that loading it does not write again
        if (
            file.suffix != ".safetensors"
            and not file.name.endswith(".index.json")
            and not (target / file.name).exists()
        ):
            shutil.copyfile(file, target / file.name)


def _copy(folder: Path, target: Path) -> None:
    kept = [file for file in models.files(folder) if not file.name.startswith(_OF_THE_LEARNER)]
    if not any(file.suffix == ".safetensors" for file in kept):
        raise UsageError(f"{folder} holds no weights", fix="a model has a *.safetensors")
    for file in kept:
        shutil.copyfile(file, target / file.name)


def _precision_of(folder: Path) -> Literal["fp32", "bf16"]:
    about = json.loads((folder / "config.json").read_text("utf-8"))
    return "bf16" if str(about.get("dtype") or about.get("torch_dtype") or "float32").endswith("16") else "fp32"
