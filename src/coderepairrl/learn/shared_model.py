"""A frozen model below the adapters of several runs, held once.

Each run has modules of its own, hooks, settings and adapters included, as if it had loaded the model itself. Only the
parameters, and the codes of quantised ones, are the same tensors. No run changes them, so that each computes the bits
that it computes alone.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from coderepairrl.errors import UsageError
from coderepairrl.learn.quantised import QuantisedLinear
from coderepairrl.runs.storage import digests
from coderepairrl.sync import weights

Read = Callable[[], PreTrainedModel]
ProvideModel = Callable[[Path, str, Read], PreTrainedModel]
"""``(folder, form, read)``: the model in `folder`, held as `form` says, which `read` loads where nobody has it."""
_ABOUT_THE_FILE = ("_name_or_path", "transformers_version")


@dataclass(frozen=True, slots=True)
class _Source:
    """Which model it is."""

    folder: Path
    form: str
    """What its tensors are, in words."""
    config: dict[str, Any]
    places: tuple[tuple[int, ...], ...]
    """Of its weights' files: device, number, size, time of change."""

    @classmethod
    def of(cls, folder: Path, form: str) -> _Source:
        """Raises OSError and ValueError for files that cannot be read, `EngineFault` where there are none."""
        config = json.loads((folder / "config.json").read_text("utf-8"))
        stats = [file.stat() for file in weights.files(folder)]
        places = tuple((each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns) for each in stats)
        return cls(folder, form, {k: v for k, v in config.items() if k not in _ABOUT_THE_FILE}, places)

    def digests(self) -> dict[str, str]:
        """SHA-256 of the weights' files, by name."""
        return digests(weights.files(self.folder))


class SharedModel:
    """One model, and who has it."""

    def __init__(self) -> None:
        self._model: PreTrainedModel | None = None
        self._source: _Source | None = None
        self._digests: dict[str, str] = {}
        """From when it was read: its files may change."""
        self._users: set[str] = set()

    def acquire(self, user: str, folder: Path, form: str, read: Read) -> PreTrainedModel:
        """The model in `folder` for `user`, until `release`. Its parameters are to stay as they are.

        Raises `UsageError` while others have another model, or the same in another form; and what `read` raises.
        """
        source = _Source.of(folder, form)
        if self._model is not None and (why := self._differs(source)):
            if self._users - {user}:
                raise UsageError(
                    f"the learner that this run shares (train.learner) holds another model: {why}",
                    fix="runs on one model share a learner, of one train.precision and model.quantise; for another one"
                    " start a second: crrl learner SOCKET --share",
                )
            self._model = None
        if self._model is None:
            read_now = source.digests()
            self._model, self._source, self._digests = read(), source, read_now
        self._users.add(user)
        return _copied(self._model)

    def release(self, user: str) -> None:
        """The model stays: those who come next have it at once."""
        self._users.discard(user)

    def _differs(self, other: _Source) -> str:
        """What is other in `other`, or ""."""
        own = self._source
        assert own is not None  # there is a model
        if other.form != own.form:
            return f"{own.form}, and this run's is {other.form}"
        if other.config != own.config:
            return f"{own.folder} and {other.folder} have different config.json"
        if other.places != own.places and other.digests() != self._digests:
            return f"{own.folder} and {other.folder} have different weights"
        return ""


def _copied(model: PreTrainedModel) -> PreTrainedModel:
    """Modules like those of `model`, with the same parameters and codes. Buffers are small, and some change."""
    shared: list[torch.Tensor] = list(model.parameters())
    for module in model.modules():
        if isinstance(module, QuantisedLinear):
            shared += module.codes.values()
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
