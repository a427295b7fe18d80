"""What a learner holds on its device, in the host's memory for a while, so that an engine can have the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from coderepairrl.learn.quantised import Frozen

Place = tuple[object, ...]


class Shelf:
    """Moves weights, gradients, buffers and moments off a device and back, bit for bit.

    Tensors stay the objects that they are, and what they hold is moved (`Tensor.data`): parameters that are tied, the
    optimiser's state and hooks know nothing of it. The host's copies are page-locked and kept from turn to turn, since
    to lock pages takes longer than to copy them. Of a parameter that is not trained the copy is made once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._away: list[Tensor] = []
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        """By the identity of a tensor: itself, and its copy."""

    @property
    def used(self) -> bool:
        """Whether anything lies there."""
        return bool(self._away)

    def put(self, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> int:
        """Move all that these hold on the device to the host; returns its bytes. Nothing to do the second time."""
        if self.used:
            return 0
        found = [tensor for tensor in _held(modules, optimizer) if tensor.device.type == self.device.type]
        copies, twins = dict[int, tuple[Tensor, Tensor]](), dict[Place, Tensor]()
        for tensor in found:
            if (twin := twins.get(_place(tensor))) is None:
                known, copy = self._copies.get(id(tensor), (None, None))
                if copy is None or known is not tensor or copy.shape != tensor.shape:
                    copy = torch.empty_like(tensor.data, device="cpu", pin_memory=self.device.type == "cuda")
                    copy.copy_(tensor.data, non_blocking=True)
                elif tensor.requires_grad or not isinstance(tensor, nn.Parameter):
                    copy.copy_(tensor.data, non_blocking=True)
                twins[_place(tensor)] = twin = copy
            copies[id(tensor)] = tensor, twin
        self._settle()
        for tensor, copy in copies.values():
            tensor.data = copy
        self._away, self._copies = found, copies
        self._settle()
        return sum(copy.nbytes for copy in twins.values())

    def take(self) -> int:
        """Move everything back; returns its bytes."""
        twins = dict[Place, Tensor]()
        for tensor in self._away:
            place = _place(tensor)
            if place not in twins:
                twins[place] = torch.empty_like(tensor.data, device=self.device).copy_(tensor.data, non_blocking=True)
            tensor.data = twins[place]
        self._away = []
        self._settle()
        return sum(each.nbytes for each in twins.values())

    def _settle(self) -> None:
        """Wait for copies, and give back what torch keeps of the device for tensors to come."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()


def _held(modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for module in modules:
        for parameter in module.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from module.buffers()
        for layer in module.modules():
            if isinstance(layer, Frozen):
                yield from layer.codes.values()
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _place(tensor: Tensor) -> Place:
    """Where a tensor's values are: those of tied ones are in one place."""
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
