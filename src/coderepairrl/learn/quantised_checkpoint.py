"""Models whose files have codes in the place of weights: AWQ, FP8 and compressed-tensors, read as vLLM reads them.

A layer keeps the tensors of its file and computes with the numbers that they stand for (`quantised.QuantisedLinear`).
Scales are rounded to the type of the computation first, as vLLM does, so that of formats that quantise weights alone
the numbers are the engine's. Where activations are quantised, too (FP8, W8A8), the engine's logits are others than the
learner's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coderepairrl.errors import EngineFault, UsageError
from coderepairrl.learn.quantised import Codes, QuantisedLinear
from coderepairrl.sync import weights

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which four bits of a 32-bit number are of the 1st, 2nd, ... column."""


_OF_ACTIVATIONS = {"input_scale", "input_zero_point"}
"""Parts of a layer in files that say nothing of its weights: how an engine rounds what comes in."""


def load(folder: Path, about: Mapping[str, Any], dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """The model in `folder`, whose ``quantization_config`` is `about` (`models.quantisation_config`, which knows
    the format). What has no codes, and the numbers that codes stand for, are of type `dtype`.

    Raises `UsageError` where files and format differ, OSError and SafetensorError for what cannot be read.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    del config.quantization_config
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)  # type: ignore[no-untyped-call]
    model.tie_weights()
    tensors = _tensors(folder)
    parts: dict[str, set[str]] = {}
    for name in tensors:
        owner, _, leaf = name.rpartition(".")
        parts.setdefault(owner, set()).add(leaf)
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear:
            continue
        found = _layer(name, tensors, about, dtype)
        known = {"weight"} if found is None else {*found[0], "weight_shape"}
        biased = {"bias"} if module.bias is not None else set()
        # what nothing reads may change what the codes stand for, such as the order of columns
        if (rest := parts.get(name, set()) - known - biased - _OF_ACTIVATIONS) or biased - parts.get(name, set()):
            which = f"{name}.{min(rest)} is read by nothing" if rest else f"{name}.bias is not in its files"
            raise _unread(folder, which)
        if found is None:
            continue
        codes, read = found
        shape = torch.Size((module.out_features, module.in_features))
        try:  # of shapes alone
            count = read({part: value.to("meta") for part, value in codes.items()}).numel()
        except (RuntimeError, IndexError) as error:
            raise _unread(folder, f"the codes and scales of {name} have shapes that do not fit: {error}") from error
        if count != shape.numel():
            raise _unread(folder, f"{name} has {shape.numel()} weights, and codes for {count}")
        bias = tensors[f"{name}.bias"].to(dtype) if biased else None
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, QuantisedLinear(shape, codes, read, dtype, bias))
    for name, parameter in list(model.named_parameters()):
        if parameter.device.type != "meta":
            continue
        if name not in tensors or tensors[name].shape != parameter.shape:
            raise _unread(
                folder,
                f"{name} is not in its files as a plain tensor, nor as codes of the format that its"
                " quantization_config names",
            )
        owner, _, leaf = name.rpartition(".")
        plain = nn.Parameter(tensors[name].to(dtype), requires_grad=False)
        setattr(model.get_submodule(owner), leaf, plain)
    model.tie_weights()
    return model


def _unread(folder: Path, why: str) -> UsageError:
    return UsageError(
        f"{folder} is quantised in a way that the learner does not read: {why}",
        fix="the model as it was published, with model.quantise=nf4 or int8",
    )


def _tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the files by name; their values are read when they are used."""
    found: dict[str, Tensor] = {}
    try:
        for file in weights.files(folder):
            with safe_open(file, framework="pt") as opened:
                found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    except EngineFault as fault:
        raise UsageError(str(fault)) from None
    return found


def _layer(
    name: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any], dtype: torch.dtype
) -> tuple[Codes, Callable[[Codes], Tensor]] | None:
    """The codes of a linear layer, and what reads them; None where its weights are plain."""

    def take(packed: str, scale: str, scales: torch.dtype, *more: str) -> Codes:
        codes = {part: tensors[f"{name}.{part}"].clone() for part in (packed, *more)}
        return codes | {scale: tensors[f"{name}.{scale}"].to(scales, copy=True)}

    if f"{name}.qweight" in tensors and about["quant_method"] == "awq":
        return take("qweight", "scales", dtype, "qzeros"), _read_awq
    if all(f"{name}.{part}" in tensors for part in ("weight_packed", "weight_scale", "weight_shape")):
        width = take("weight_packed", "weight_scale", dtype)
        columns = int(tensors[f"{name}.weight_shape"][1])
        bits = 32 * width["weight_packed"].shape[1] // columns
        return width, lambda codes: _read_packed(codes, bits, columns)
    scale = next((part for part in ("weight_scale_inv", "weight_scale") if f"{name}.{part}" in tensors), None)
    if scale is None or f"{name}.weight" not in tensors:
        return None
    block = about.get("weight_block_size") if scale == "weight_scale_inv" else None
    codes = take("weight", scale, torch.float32)
    return codes, lambda codes: _read_scaled(codes["weight"], codes[scale], block)


def _read_awq(codes: Codes) -> Tensor:
    scales = codes["scales"]

    def unpacked(packed: Tensor) -> Tensor:
        shifts = 4 * torch.tensor(_AWQ_ORDER, device=packed.device, dtype=torch.int32)
        return ((packed[:, :, None] >> shifts) & 15).to(torch.int8).view(len(packed), -1)

    zeros, numbers = unpacked(codes["qzeros"]), unpacked(codes["qweight"])
    groups = numbers.view(len(zeros), -1, numbers.shape[1]) - zeros[:, None]
    return (groups.to(scales.dtype) * scales[:, None]).view(numbers.shape).t().contiguous()


def _read_packed(codes: Codes, bits: int, columns: int) -> Tensor:
    packed, scales = codes["weight_packed"], codes["weight_scale"]
    shifts = torch.arange(0, 32, bits, device=packed.device, dtype=torch.int32)
    numbers = ((packed[:, :, None] >> shifts) & ((1 << bits) - 1)).view(len(packed), -1)[:, :columns]
    groups = (numbers - (1 << (bits - 1))).view(len(packed), scales.shape[1], -1)
    return (groups.to(scales.dtype) * scales[:, :, None]).view(len(packed), columns)


def _read_scaled(numbers: Tensor, scales: Tensor, block: tuple[int, int] | None) -> Tensor:
    """Numbers of 8 bits times a scale for all, for a row, or for a block."""
    if block is not None:
        scales = scales.repeat_interleave(block[0], 0)[: len(numbers)]
        scales = scales.repeat_interleave(block[1], 1)[:, : numbers.shape[1]]
    return numbers.to(scales.dtype) * (scales if scales.ndim == 2 else scales.view(-1, 1))
