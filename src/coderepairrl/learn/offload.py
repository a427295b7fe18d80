"""Moves training tensors to the host while an engine samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from coderepairrl.learn.adapters import QuantisedLinear

Location = tuple[object, ...]


class Offloader:
    """Moves weights, gradients, buffers and optimiser state to the host and back."""

    # only `Tensor.data` is replaced, so tied parameters, optimiser state and hooks are unaffected; host copies are
    # kept, since locking their pages takes longer than copying

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tensors: list[Tensor] = []
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        """Tensor and host copy, by the tensor's identity."""

    @property
    def is_offloaded(self) -> bool:
        """Whether tensors are on the host."""
        return bool(self._tensors)

    def offload(self, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> int:
        """Move everything to the host; returns bytes."""
        if self.is_offloaded:
            return 0
        tensors = [tensor for tensor in _iter_tensors(modules, optimizer) if tensor.device.type == self.device.type]
        copies: dict[int, tuple[Tensor, Tensor]] = {}
        by_location: dict[Location, Tensor] = {}
        for tensor in tensors:
            location = _storage_location(tensor)
            if location not in by_location:
                by_location[location] = self._copy_to_host(tensor)
            copies[id(tensor)] = tensor, by_location[location]
        self._synchronise()
        for tensor, copy in copies.values():
            tensor.data = copy
        self._tensors, self._copies = tensors, copies
        self._synchronise()
        return sum(copy.nbytes for copy in by_location.values())

    def restore(self) -> int:
        """Move everything back; returns bytes."""
        by_location: dict[Location, Tensor] = {}
        for tensor in self._tensors:
            location = _storage_location(tensor)
            if location not in by_location:
                restored = torch.empty_like(tensor.data, device=self.device)
                by_location[location] = restored.copy_(tensor.data, non_blocking=True)
            tensor.data = by_location[location]
        self._tensors = []
        self._synchronise()
        return sum(each.nbytes for each in by_location.values())

    def _copy_to_host(self, tensor: Tensor) -> Tensor:
        copied_tensor, copy = self._copies.get(id(tensor), (None, None))
        if copy is None or copied_tensor is not tensor or copy.shape != tensor.shape:
            copy = torch.empty_like(tensor.data, device="cpu", pin_memory=self.device.type == "cuda")
        elif isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            return copy  # frozen: the copy still holds its values
        return copy.copy_(tensor.data, non_blocking=True)

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()


def _iter_tensors(modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for module in modules:
        for parameter in module.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from module.buffers()
        for layer in module.modules():
            if isinstance(layer, QuantisedLinear):
                yield from layer.codes.values()
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _storage_location(tensor: Tensor) -> Location:
    # tied tensors share a location
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
