"""The learner's process: ``python -m coderepairrl.learn.learner``, driven by frames (`processes/children.py`).

A request is ``{"op": NAME, ...arguments}`` and gets one reply: ``{"ok": result, "version": n}``, or ``{"error":
message, "kind": KIND, "fix": hint}`` after which the process serves the next request. KIND is ``usage`` (a bad
model or checkpoint), ``prerequisite`` (a package or device is missing), ``storage`` (could not read or write) or
``refused`` (a bad batch). Any other exception ends the process, with a traceback in its log.

Where several processes share the work, each gets every request, and all give the same answer.
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

from coderepairrl.config.sections.episodes import Route
from coderepairrl.errors import CodeRepairError, PrerequisiteError
from coderepairrl.learn.conversions import engine_form, init_random, language_model, merge, rounded, survived
from coderepairrl.learn.settings import Form, LearnSettings
from coderepairrl.learn.shared_model import ProvideModel
from coderepairrl.learn.trainer import Trainer
from coderepairrl.printable import logged
from coderepairrl.processes.children import Frame, Parent
from coderepairrl.types import Sample


class Service:
    """The operations, by name. `start` comes first; `init_random`, `engine_form`, `language_model`, `merge`, `rounded`
    and `survived` need no trainer."""

    def __init__(self, provide: ProvideModel | None = None) -> None:
        """`provide` gives a frozen model that other runs have, too."""
        self._provide = provide
        self._trainer: Trainer | None = None
        self.operations: dict[str, Callable[..., Any]] = {
            "start": self._start,
            "init_random": self._init_random,
            "engine_form": lambda base, adapter, target: engine_form(Path(base), Path(adapter), Path(target)),
            "language_model": lambda source, target: language_model(Path(source), Path(target)),
            "merge": lambda base, adapter, target, precision: merge(Path(base), Path(adapter), Path(target), precision),
            "rounded": lambda source, target, **how: rounded(Path(source), Path(target), **how),
            "survived": lambda base, adapter, result, precision: survived(
                Path(base), Path(adapter), Path(result), precision
            ),
            "step": lambda samples, **of: self._started.step([_sample(data) for data in samples], **of),
            "measure": lambda samples: self._started.measure([_sample(data) for data in samples]),
            "logprobs": lambda rows, temperature: self._started.logprobs(rows, temperature),
            "publish": self._publish,
            "offer": self._offer,
            "send": lambda path, **arguments: self._started.send(Path(path), **arguments),
            "put_away": lambda: self._started.put_away(),
            "take_back": lambda: self._started.take_back(),
            "save": self._save,
            "restore": self._restore,
        }

    def answer(self, frame: Frame) -> Frame:
        """Carry out one request."""
        try:
            result = self.operations[frame.pop("op")](**frame)
            return {"ok": result, "version": self._trainer.version if self._trainer else 0}
        except CodeRepairError as error:
            return _refusal("prerequisite" if isinstance(error, PrerequisiteError) else "usage", error)
        except (OSError, SafetensorError) as error:
            return _refusal("storage", error)
        except ValueError as error:
            return _refusal("refused", error)

    @property
    def _started(self) -> Trainer:
        if self._trainer is None:
            raise ValueError("the learner was given no model yet")
        return self._trainer

    def _start(self, model: str, settings: dict[str, Any], gpu: bool) -> list[str]:
        if gpu and not torch.cuda.is_available():
            built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
            raise PrerequisiteError(
                f"train.devices names GPUs, and torch {torch.__version__} sees none: it {built}",
                fix="install torch with CUDA (pip takes it from PyPI) and a driver that is as new, or leave"
                " train.devices out to learn on the CPU",
            )
        self._trainer = Trainer(Path(model), LearnSettings(**settings), self._provide)
        for notice in self._trainer.notices:
            print(logged(notice), file=sys.stderr, flush=True)
        return self._trainer.notices

    def _init_random(self, source: str, target: str, seed: int) -> None:
        init_random(Path(source), Path(target), seed)

    def _publish(self, folder: str, form: Form) -> list[Any]:
        path, version, checksum = self._started.publish(Path(folder), form)
        return [str(path), version, checksum]

    def _offer(self, folder: str, route: Route) -> list[Any]:
        path, version, checksum = self._started.offer(Path(folder), route)
        return [str(path), version, checksum]

    def _save(self, path: str) -> None:
        self._started.save(Path(path))

    def _restore(self, path: str) -> None:
        self._started.restore(Path(path))


def _refusal(kind: str, error: Exception) -> Frame:
    traceback.print_exception(error)
    return {"error": str(error), "kind": kind, "fix": getattr(error, "fix", "")}


def _sample(data: dict[str, Any]) -> Sample:
    columns: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    return Sample(**columns)


def serve(answer: Callable[[Frame], Frame]) -> None:
    """Answer requests until the parent closes the connection."""
    parent = Parent.connect()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    while True:
        try:
            frame = parent.receive()
            assert frame is not None  # it blocks
            parent.send(answer(frame))
        except (EOFError, BrokenPipeError):
            sys.exit(0)


def main() -> None:
    """Serve the process that started this one."""
    serve(Service().answer)


if __name__ == "__main__":
    main()
