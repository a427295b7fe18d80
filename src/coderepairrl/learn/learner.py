"""Learner process: ``python -m coderepairrl.learn.learner``, driven by frames (`processes/children.py`).

A request ``{"op": NAME, ...arguments}`` gets ``{"ok": result, "version": n}``, or ``{"error": message, "kind": KIND,
"fix": hint}``, KIND ``usage``, ``prerequisite``, ``storage`` or ``refused``. Any other exception ends the process.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM

from coderepairrl import models
from coderepairrl.config.schema import Lora, Precision, Quantise
from coderepairrl.errors import CodeRepairError, PrerequisiteError, UsageError
from coderepairrl.learn import adapters, loading
from coderepairrl.learn.loading import UNREADABLE, check_weights, load_model
from coderepairrl.learn.policy import Policy, copy_model_files, find_constants
from coderepairrl.learn.probe import EAGER
from coderepairrl.learn.settings import LearnSettings
from coderepairrl.learn.trainer import Trainer
from coderepairrl.printable import logged
from coderepairrl.processes.children import Frame, Parent
from coderepairrl.runs.storage import write_checksums
from coderepairrl.types import Sample


def init_random(source: Path, target: Path, seed: int) -> None:
    """Write a model of the architecture in `source` with random weights. Raises `UsageError`."""
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
    except UNREADABLE as error:
        raise UsageError(f"cannot read the model configuration in {source}: {error}") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=EAGER, dtype=torch.float32
        )
    target.mkdir(parents=True, exist_ok=True)
    Policy(model, source).export(target, "model")
    config.architectures = [type(model).__name__]
    config.dtype = torch.float32
    config.save_pretrained(target)
    write_checksums(target)


def extract_language_model(source: Path, target: Path) -> None:
    """Write the language model of a multimodal model. Raises as `load_model`."""
    # a checkpoint of full weights is float32, whatever dtype its config.json names
    model = load_model(source, torch.float32 if (source / "learner.json").is_file() else "auto")
    target.mkdir(parents=True, exist_ok=True)
    tensors = chain(model.named_parameters(), find_constants(model).items())
    loading.write_tensors(target, loading.MODEL, loading.convert_to_file_layout(model, tensors))
    copy_model_files(source, target)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(target)


def round_model(source: Path, target: Path, form: Quantise, precision: Precision) -> None:
    """Write the model with weights rounded to `form`. Raises `UsageError`, `PrerequisiteError`."""
    policy = Policy.load(source, LearnSettings(lora=Lora(), quantise=form, precision=precision))
    target.mkdir(parents=True, exist_ok=True)
    policy.export(target, "model")  # adapters add nothing yet
    copy_model_files(source, target)  # config.json names the dtype that weights have when they are quantised again
    (target / models.QUANTISED).write_text(json.dumps({"form": form}) + "\n")
    write_checksums(target)


def merge_adapter(base: Path, adapter: Path, target: Path, precision: Precision) -> None:
    """Write `base` with `adapter` merged in, the weights that the run's engine served. Raises `UsageError`."""
    try:
        lora = adapters.read_config(adapter)
        policy = Policy.load(base, LearnSettings(lora=lora, precision=precision))
        with loading.TensorFiles(adapter, loading.ADAPTER) as files:
            files.check({policy.file_name(name): value.shape for name, value in policy.parameters.items()})
            for name, parameter in policy.parameters.items():
                parameter.data.copy_(files[policy.file_name(name)])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UsageError(f"{adapter} cannot be merged into {base}: {error}") from error
    target.mkdir(parents=True, exist_ok=True)
    policy.export(target, "model")


FOLDER_OPERATIONS: dict[str, Callable[..., Any]] = {
    "check_weights": check_weights,
    "init_random": init_random,
    "extract_language_model": extract_language_model,
    "merge": merge_adapter,
    "round": round_model,
}
"""Operations on model folders, without a trainer."""
TRAINER_METHODS = frozenset(
    ("step", "measure", "logprobs", "publish", "offer", "send", "save", "restore", "offload", "reload")
)
"""Methods of `Trainer` that a request may name."""
_PATH_ARGUMENTS = ("model", "base", "adapter", "source", "target", "folder", "offer")


class LearnerService:
    """Requests of one learner process, with one trainer at most."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None

    def answer(self, frame: Frame) -> Frame:
        """Carry out a request, and return the reply."""
        try:
            operation = self._find_operation(frame.pop("op"))
            result = operation(**{name: _decode_argument(name, value) for name, value in frame.items()})
            if isinstance(result, tuple):  # `publish` and `offer` return tuples that begin with a path
                result = str(result[0]), *result[1:]
            return {"ok": result, "version": self._trainer.version if self._trainer else 0}
        except CodeRepairError as error:
            return _encode_error("prerequisite" if isinstance(error, PrerequisiteError) else "usage", error)
        except (OSError, SafetensorError) as error:
            return _encode_error("storage", error)
        except ValueError as error:
            return _encode_error("refused", error)

    def _find_operation(self, name: str) -> Callable[..., Any]:
        if name == "start":
            return self._start_trainer
        if name in FOLDER_OPERATIONS:
            return FOLDER_OPERATIONS[name]
        if name not in TRAINER_METHODS:
            raise ValueError(f"the learner has no operation {name!r}")
        if self._trainer is None:
            raise ValueError(f"{name!r} came before 'start'")
        method: Callable[..., Any] = getattr(self._trainer, name)
        return method

    def _start_trainer(self, model: Path, settings: dict[str, Any], gpu: bool) -> list[str]:
        if gpu and not torch.cuda.is_available():
            build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
            raise PrerequisiteError(
                f"train.devices names GPUs, and torch {torch.__version__}, built {build}, sees none",
                fix="install torch with CUDA (pip takes it from PyPI) and a driver that supports this CUDA, or leave"
                " train.devices out to learn on the CPU",
            )
        self._trainer = Trainer(model, LearnSettings(**settings))
        for notice in self._trainer.notices:
            print(logged(notice), file=sys.stderr, flush=True)
        return self._trainer.notices


def _encode_error(kind: str, error: Exception) -> Frame:
    traceback.print_exception(error)
    return {"error": str(error), "kind": kind, "fix": getattr(error, "fix", "")}


def _decode_argument(name: str, value: Any) -> Any:
    if name in _PATH_ARGUMENTS:
        return Path(value)
    if name == "samples":
        # frames turn tuples into lists
        rows: list[dict[str, Any]] = [
            {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()} for row in value
        ]
        return [Sample(**row) for row in rows]
    return value


def main() -> None:
    """Answer requests until the connection closes."""
    service, parent = LearnerService(), Parent.connect()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    while True:
        try:
            frame = parent.receive()
            assert frame is not None  # `receive` blocks
            parent.send(service.answer(frame))
        except (EOFError, BrokenPipeError):
            sys.exit(0)


if __name__ == "__main__":
    main()
