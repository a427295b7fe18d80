"""Low-rank adapters through peft: attached to a model, switched off, named as peft's files name them, merged."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from coderepairrl.config.sections.train import Lora
from coderepairrl.errors import UsageError
from coderepairrl.learn import shards
from coderepairrl.learn.quantised import QuantisedLinear
from coderepairrl.learn.settings import LINEAR_ATTENTION

FILE = shards.ADAPTER
CONFIG = "adapter_config.json"
_ADAPTER = ".default."
_BELOW = ".base_layer"
_PREFIX = "base_model.model."
"""What peft's own wrapper puts before a name."""


def resolved(model: nn.Module, settings: Lora) -> Lora:
    """`settings` with the names of linear layers of `model`. Raises `UsageError` when a target names none.

    The default names those that the model has: not experts, which are no linear layers but one tensor for all.
    """
    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    targets = settings.targets
    if targets == Lora().targets:
        targets = tuple(name for name in (*targets, *LINEAR_ATTENTION) if name in linear)
    if missing := [target for target in targets or settings.targets if target not in linear]:
        raise UsageError(
            f"train.lora.targets: the model has no linear layer {missing[0]!r}",
            fix=f"it has {', '.join(sorted(linear))}",
        )
    return settings.model_copy(update={"targets": targets})


def attach(model: nn.Module, settings: Lora, seed: int = 0) -> None:
    """Add float32 adapters to `model`, initially without effect, and freeze everything else.

    The same model and seed give the same adapters. `settings` are `resolved`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # in a shell: of families that transformers 4 had other layers for, peft takes other targets than it is told
        inject_adapter_in_model(_config(settings), nn.ModuleList([model]))
    for module in model.modules():
        if isinstance(module, LoraLayer):  # else every layer upcasts its input, and autocast downcasts it again
            module.cast_input_dtype_enabled = False
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def write_config(folder: Path, settings: Lora, base: Path) -> None:
    """Write ``adapter_config.json`` for adapters on the model in `base`."""
    config = _config(settings)
    config.base_model_name_or_path = str(base.resolve())
    config.inference_mode = True
    config.target_modules = sorted(settings.targets)  # peft has a set, whose order is another in each process
    config.save_pretrained(folder)


def read_config(folder: Path) -> Lora:
    """The settings in ``adapter_config.json``. Raises OSError, ValueError, KeyError, TypeError for what is none, and
    for adapters on experts."""
    config = json.loads((folder / CONFIG).read_text("utf-8"))
    if config.get("target_parameters"):
        raise ValueError(f"{CONFIG} has target_parameters, adapters on experts, which are not supported")
    return Lora(rank=config["r"], alpha=config["lora_alpha"], targets=tuple(config["target_modules"]))


def peft_name(name: str) -> str:
    """The name in peft's files of a parameter.

    >>> peft_name("model.layers.0.self_attn.q_proj.lora_A.default.weight")
    'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    return _PREFIX + name.replace(_ADAPTER, ".")


def served(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Adapters on `model` by peft's names, as engines read them: with the names that files of its architecture have."""
    for name, tensor in tensors:
        owner, matrix, _ = name.removeprefix(_PREFIX).rpartition(".lora_A" if ".lora_A." in name else ".lora_B")
        (written,) = dict(shards.published(model, [(f"{owner}.weight", tensor)]))
        yield f"{_PREFIX}{written.removesuffix('.weight')}{matrix}.weight", tensor


@contextmanager
def off(model: nn.Module) -> Iterator[None]:
    """Within, the model without its adapters: exactly, since they add zero."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.scale_layer(0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.unscale_layer()


def deltas(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What adapters add to each weight that has some, in its shape, by its name, in float32."""
    for name, layer in _layers(model):
        a, b = (part["default"].weight.detach().float() for part in (layer.lora_A, layer.lora_B))
        yield name, (b @ a) * layer.scaling["default"]


def below(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights below adapters, in the order of `deltas`."""
    for name, layer in _layers(model):
        yield name, layer.get_base_layer().weight.detach()


def _layers(model: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    """Adapters by the name of the weight that they are on."""
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            yield f"{name}.weight", layer


def merged(model: nn.Module, whole: Callable[[nn.Parameter], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors by name with the adapters' product added in float32; the model is not changed.

    `whole` gathers a parameter that processes share; all of them must iterate.
    """
    layers = dict(_layers(model))

    def sum_of(weight: str, tensor: Tensor) -> Tensor:
        layer = layers[weight]
        a, b = (whole(part["default"].weight).float() for part in (layer.lora_A, layer.lora_B))
        return cast(Tensor, (tensor.float() + (b @ a) * layer.scaling["default"]).to(tensor.dtype))

    for name, module in model.named_modules():
        if isinstance(module, QuantisedLinear):
            weight, tensor = f"{name.removesuffix(_BELOW)}.weight", module.weight.detach()
            yield weight, sum_of(weight, tensor.float()) if weight in layers else tensor
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        tensor, weight = whole(parameter), name.replace(_BELOW, "")
        yield weight, sum_of(weight, tensor) if weight in layers else tensor


def _config(settings: Lora) -> LoraConfig:
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=list(settings.targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
