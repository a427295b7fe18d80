"""Learner process: ``python -m coderepairrl.learn.learner``, driven by frames (`processes/children.py`).

A request ``{"op": NAME, ...arguments}`` gets ``{"ok": result, "version": n}``, or ``{"error": message, "kind": KIND,
"fix": hint}``, KIND ``usage``, ``prerequisite``, ``storage`` or ``refused``. Any other exception ends the process.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from coderepairrl.errors import CodeRepairError, PrerequisiteError
from coderepairrl.learn.conversions import init_random, language_model, merge, rounded, survived
from coderepairrl.learn.loading import check_weights
from coderepairrl.learn.settings import LearnSettings
from coderepairrl.learn.trainer import Trainer
from coderepairrl.printable import logged
from coderepairrl.processes.children import Frame, Parent
from coderepairrl.types import Sample

_ON_FOLDERS = (check_weights, init_random, language_model, merge, rounded, survived)
ON_FOLDERS: dict[str, Callable[..., Any]] = {operation.__name__: operation for operation in _ON_FOLDERS}
"""Operations that need no trainer."""
OF_TRAINER = frozenset(
    ("step", "measure", "logprobs", "publish", "offer", "send", "save", "restore", "put_away", "take_back")
)
"""Methods of `Trainer` that a request may name."""
_PATHS = ("model", "base", "adapter", "source", "target", "result", "folder", "offer")


class Service:
    """Handler of requests."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None

    def answer(self, frame: Frame) -> Frame:
        """Carry out one request."""
        try:
            operation = self._operation(frame.pop("op"))
            result = operation(**{name: _argument(name, value) for name, value in frame.items()})
            return {"ok": _plain(result), "version": self._trainer.version if self._trainer else 0}
        except CodeRepairError as error:
            return _refusal("prerequisite" if isinstance(error, PrerequisiteError) else "usage", error)
        except (OSError, SafetensorError) as error:
            return _refusal("storage", error)
        except ValueError as error:
            return _refusal("refused", error)

    def _operation(self, name: str) -> Callable[..., Any]:
        if name == "start":
            return self._start
        if name in ON_FOLDERS:
            return ON_FOLDERS[name]
        if name not in OF_TRAINER:
            raise ValueError(f"the learner has no operation {name!r}")
        if self._trainer is None:
            raise ValueError("the learner was given no model yet")
        method: Callable[..., Any] = getattr(self._trainer, name)
        return method

    def _start(self, model: Path, settings: dict[str, Any], gpu: bool) -> list[str]:
        if gpu and not torch.cuda.is_available():
            built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
            raise PrerequisiteError(
                f"train.devices names GPUs, and torch {torch.__version__} sees none: it {built}",
                fix="install torch with CUDA (pip takes it from PyPI) and a driver that is as new, or leave"
                " train.devices out to learn on the CPU",
            )
        self._trainer = Trainer(model, LearnSettings(**settings))
        for notice in self._trainer.notices:
            print(logged(notice), file=sys.stderr, flush=True)
        return self._trainer.notices


def _refusal(kind: str, error: Exception) -> Frame:
    traceback.print_exception(error)
    return {"error": str(error), "kind": kind, "fix": getattr(error, "fix", "")}


def _argument(name: str, value: Any) -> Any:
    if name in _PATHS:
        return Path(value)
    return [_sample(each) for each in value] if name == "samples" else value


def _plain(result: Any) -> Any:
    # results of `publish` and `offer` begin with a path
    return [str(result[0]), *result[1:]] if isinstance(result, tuple) else result


def _sample(data: dict[str, Any]) -> Sample:
    columns: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    return Sample(**columns)


def main() -> None:
    """Answer requests until the connection closes."""
    service, parent = Service(), Parent.connect()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    while True:
        try:
            frame = parent.receive()
            assert frame is not None  # it blocks
            parent.send(service.answer(frame))
        except (EOFError, BrokenPipeError):
            sys.exit(0)


if __name__ == "__main__":
    main()
