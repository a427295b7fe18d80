"""Linear layers with frozen 4-bit weights: the base below adapters.

A folder with the decoded values is the same model, bit for bit; quantising it again changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from transformers import PreTrainedModel

from coderepairrl.errors import UsageError
from coderepairrl.learn.settings import NF4_BLOCK
from coderepairrl.processes.extras import require_extra

_PER_HEAD = ("in_proj_a", "in_proj_b", "in_proj_ba")
"""Per-head numbers of linear attention."""
Codes = dict[str, Tensor]


class QuantisedLinear(nn.Linear):
    """Linear layer with quantised, frozen weights."""

    def __init__(self, shape: torch.Size, codes: Codes, dtype: torch.dtype, bias: Tensor | None) -> None:
        """Hold `codes` of weights of `shape`, rounded to `dtype`."""
        nn.Module.__init__(self)
        self.out_features, self.in_features = shape
        self.codes, self.dtype = _frozen(codes), dtype
        fixed = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.register_parameter("bias", fixed)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Decoded weights."""
        count = self.out_features * self.in_features
        return _read(self.codes)[:count].view(self.out_features, self.in_features).to(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(part.nbytes for part in self.codes.values())

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        y = cast(Tensor, cast(Any, _FrozenMatmul).apply(x, self))
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantisedLinear:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = fn(next(iter(self.codes.values())).new_empty(0)).device  # codes keep their types
        self.codes = _frozen({name: part.to(device) for name, part in self.codes.items()})
        return self


def _frozen(codes: Codes) -> Codes:
    # as parameters `learn.offload` copies them once
    return {name: nn.Parameter(part, requires_grad=False) for name, part in codes.items()}


class _FrozenMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        with torch.autocast(x.device.type, enabled=False):
            return linear(x, layer.weight.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with torch.autocast(gradient.device.type, enabled=False):
            return gradient @ ctx.layer.weight.to(gradient.dtype), None


def quantise(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> None:
    """Replace the linear layers except the head, one by one on `device`.

    Raises `UsageError` for other weights, such as experts', `PrerequisiteError` without bitsandbytes.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3 and min(parameter.shape) > 1:
            raise UsageError(
                f"model.quantise=nf4 quantises linear layers, and {type(model).__name__} has experts in one tensor"
                f" ({name})",
                fix="model.quantise=none, or a dense model",
            )
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    for name, module in list(model.named_modules()):
        owner, _, leaf = name.rpartition(".")
        if type(module) is nn.Linear and module is not head and leaf not in _PER_HEAD:
            weight = module.weight.data
            codes = _pack(weight.to(device, dtype))
            bias = None if module.bias is None else module.bias.data.to(device)
            setattr(model.get_submodule(owner), leaf, QuantisedLinear(weight.shape, codes, dtype, bias))


def checkpoint_dtype(folder: Path, loaded: torch.dtype) -> torch.dtype:
    """Dtype of the files, to which an engine rounds."""
    raw: Mapping[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    named = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    return getattr(torch, named) if loaded == torch.float32 and named in ("bfloat16", "float16") else loaded


def _pack(weight: Tensor) -> Codes:
    packed, state = _bitsandbytes().quantize_4bit(weight, blocksize=NF4_BLOCK, quant_type="nf4")
    return {"packed": packed, "absmax": state.absmax, "code": state.code, "like": weight.new_empty(0)}


def _read(codes: Codes) -> Tensor:
    bnb = _bitsandbytes()
    count = 2 * codes["packed"].numel()
    state = bnb.QuantState(
        absmax=codes["absmax"],
        shape=torch.Size((count,)),
        code=codes["code"],
        blocksize=NF4_BLOCK,
        quant_type="nf4",
        dtype=codes["like"].dtype,
    )
    return cast(Tensor, bnb.dequantize_4bit(codes["packed"], state))


def _bitsandbytes() -> Any:
    require_extra("bitsandbytes", "model.quantise=nf4")
    from bitsandbytes import functional

    return functional
