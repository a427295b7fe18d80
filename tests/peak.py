"""Peak memory of tensors, counted exactly by storage."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class Peak(TorchDispatchMode):
    """``with Peak() as peak: ...``, then `peak.bytes`: counts tensors that are created in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._now = 0
        self._live: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {tensor.untyped_storage()._cdata for tensor in tree_flatten((args, kwargs))[0] if _is_real(tensor)}
        out = function(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            if _is_real(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._live and storage._cdata not in inputs:
                    self._add(storage)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._live.add(key)
        self._now += size
        self.bytes = max(self.bytes, self._now)

        def free() -> None:
            self._live.discard(key)
            self._now -= size

        weakref.finalize(storage, free)


def _is_real(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.device.type != "meta"
