"""Low-rank adapters on the experts of a mixture, whose weights are one tensor a layer for all of them.

Each expert has small matrices of its own, in the layout of peft's ``target_parameters``, which makes them and names
them in files. What is computed is ours: peft adds their product to the whole tensor, which takes as much memory as the
layer's experts, and again for a gradient; here tokens go through the small matrices, in groups by expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.moe import _grouped_linear

from coderepairrl.errors import UsageError
from coderepairrl.learn.settings import ALIGNED

_UP, _DOWN = "gate_up_proj", "down_proj"
TARGETS = (f"experts.{_UP}", f"experts.{_DOWN}")
"""What adapter_config.json calls the tensors of all layers (``target_parameters``)."""
PREFIX = "base_model.model."
"""What peft's own wrapper puts before a name."""


class Adapted(ParamWrapper):  # type: ignore[misc]
    """peft's adapters on one of the two tensors of a layer's experts. The outer of two computes the layer."""

    def forward(self, hidden_TD: Tensor, chosen_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """What transformers' ``grouped_mm_experts_forward`` computes, step by step, with the adapters' part added."""
        experts, up = cast(Any, self.get_base_layer()), cast(Adapted, self.base_layer)
        chosen = chosen_TK.shape[1]
        expert_S, order_S = torch.sort(chosen_TK.reshape(-1))
        of_cpu = expert_S.float() if expert_S.device.type == "cpu" else expert_S.int()  # what has a kernel there
        count_E = torch.histc(of_cpu, bins=self.num_experts, min=0, max=self.num_experts - 1)
        ends_E = torch.cumsum(count_E, dim=0, dtype=torch.int32)
        inner_SF = experts._apply_gate(up._product(hidden_TD[order_S // chosen], ends_E, expert_S))
        out_SD = self._product(inner_SF, ends_E, expert_S) * weight_TK.reshape(-1)[order_S].unsqueeze(-1)
        back_S = torch.empty_like(order_S)
        back_S[order_S] = torch.arange(len(order_S), device=order_S.device)
        result: Tensor = out_SD[back_S].view(*chosen_TK.shape, -1).sum(dim=1).to(hidden_TD.dtype)
        return result

    def _product(self, x_SI: Tensor, ends_E: Tensor, expert_S: Tensor) -> Tensor:
        """Tokens that are sorted by expert, each times the weights and adapters of its own."""
        experts = cast(Any, self.get_base_layer())
        weight = getattr(experts, self.parameter_name)
        bias = getattr(experts, f"{self.parameter_name}_bias")[expert_S] if experts.has_bias else None
        a_ERI, b_EOR = (part.to(weight.dtype) for part in self.factors())
        if more := -a_ERI.shape[1] % ALIGNED:
            a_ERI, b_EOR = pad(a_ERI, (0, 0, 0, more)), pad(b_EOR, (0, more))
        low_SR = _grouped_linear(x_SI, a_ERI, ends_E)
        delta_SO: Tensor = _grouped_linear(low_SR, b_EOR, ends_E) * self.scaling["default"]
        whole: Tensor = _grouped_linear(x_SI, weight, ends_E, bias=bias, is_transposed=experts.is_transposed)
        return whole + delta_SO

    def factors(self, whole: Callable[[nn.Parameter], Tensor] = lambda parameter: parameter) -> tuple[Tensor, Tensor]:
        """The two matrices of each expert, ``(experts, rank, in)`` and ``(experts, out, rank)``; `whole` gathers what
        processes share."""
        a, b = (whole(part["default"].weight) for part in (self.lora_A, self.lora_B))
        return _first(a, self.num_experts), _second(b, self.num_experts)

    def added(self, tensor: Tensor, whole: Callable[[nn.Parameter], Tensor]) -> Tensor:
        """`tensor`, the experts' weights, with the product added in float32, expert by expert."""
        a_ERI, b_EOR = (part.float() for part in self.factors(whole))
        result = tensor.detach().clone()
        for number, (a, b) in enumerate(zip(a_ERI, b_EOR, strict=True)):
            result[number] = result[number].float() + self._oriented(b @ a)
        return result

    def delta(self) -> Tensor:
        """The whole product in float32, in the shape of the weights."""
        a_ERI, b_EOR = (part.detach().float() for part in self.factors())
        return self._oriented(b_EOR @ a_ERI)

    def _oriented(self, product: Tensor) -> Tensor:
        product = product * self.scaling["default"]
        return product.transpose(-2, -1) if cast(Any, self.get_base_layer()).is_transposed else product


def _first(a: Tensor, experts: int) -> Tensor:
    """peft's first matrix of a layer, ``(experts * rank, in)``, as ``(experts, rank, in)``."""
    return a.reshape(experts, -1, a.shape[1])


def _second(b: Tensor, experts: int) -> Tensor:
    """peft's second matrix of a layer, ``(out, rank * experts)``, as ``(experts, out, rank)``."""
    return b.reshape(b.shape[0], -1, experts).permute(2, 0, 1).contiguous()


def require(model: nn.Module) -> None:
    """Raise `UsageError` unless `model` has experts that can get adapters here, in the learner and in files."""
    found = [(name, m) for name, m in model.named_modules() if name.endswith("experts") and _stacked(m)]
    if not found:
        raise UsageError(
            f"train.lora.experts: {type(model).__name__} has no experts",
            fix="leave train.lora.experts out, which is for mixtures of experts",
        )
    name, module = found[0]
    own = all(hasattr(module, part) for part in ("has_gate", "has_bias", "is_transposed", "_apply_gate", _UP, _DOWN))
    if not own or not cast(Any, module).has_gate:
        raise UsageError(
            f"train.lora.experts: the experts of {type(model).__name__} ({type(module).__name__}) compute in a way of"
            " their own",
            fix="leave train.lora.experts out: attention gets adapters (docs/reference/models.md lists families)",
        )
    shapes = {f"{name}.{part}": torch.zeros(2, 2, 1) for part in (_UP, _DOWN)}
    files = dict(published(model, shapes.items()))
    if files.keys() != shapes.keys() and not all(_number(each) for each in files):
        raise UsageError(
            f"train.lora.experts: files of {type(model).__name__} have its experts as {min(files)}, where no engine"
            " takes adapters",
            fix="leave train.lora.experts out",
        )


def _stacked(module: nn.Module) -> bool:
    return any(p.ndim == 3 for p in module.parameters(recurse=False))


def _number(name: str) -> bool:
    """Whether a tensor is of one expert: ``...experts.7.w1.weight``."""
    owner, _, number = name.removesuffix(".weight").rpartition(".")[0].rpartition(".")
    return number.isdigit() and owner.endswith("experts")


def take_over(model: nn.Module) -> None:
    """Make peft's adapters on experts compute as described above."""
    for module in model.modules():
        if type(module) is ParamWrapper:
            module.__class__ = Adapted  # peft decides on the class by itself


def published(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of `model` as files of its architecture have them, which engines read: experts, for one, each alone."""
    cast(Any, model)._weight_conversions = None  # those of the files that it was read from, such as a checkpoint's
    for name, tensor in tensors:
        yield from revert_weight_conversion(cast(PreTrainedModel, model), {name: tensor}).items()


def served(model: nn.Module, tensors: Iterable[tuple[str, Tensor]], rank: int) -> Iterator[tuple[str, Tensor]]:
    """Adapters on `model` by peft's names, as vLLM 0.32 reads them: of experts two matrices for each weight of one that
    files of the architecture have. Those of which files have all in one tensor (gpt-oss) stay as they are.

    What two weights share, as gate and up share the first matrix, both get.
    """
    for name, tensor in tensors:
        owner, matrix, _ = name.removeprefix(PREFIX).rpartition(".lora_A" if ".lora_A." in name else ".lora_B")
        above, found, rest = owner.rpartition(".experts")
        if not found or rest not in ("", ".base_layer"):
            (written,) = dict(published(model, [(f"{owner}.weight", tensor)]))
            yield f"{PREFIX}{written.removesuffix('.weight')}{matrix}.weight", tensor
            continue
        up, first = bool(rest), matrix == ".lora_A"
        each = _first(tensor, len(tensor) // rank) if first else _second(tensor, tensor.shape[1] // rank)
        each = torch.cat([each, each], dim=1) if up and first else each
        stacked = f"{above}.experts.{_UP if up else _DOWN}"
        parts = dict(published(model, [(stacked, each)]))
        if parts.keys() == {stacked}:
            yield name, tensor
            continue
        for part, value in parts.items():
            # chunks of one tensor share its memory, which safetensors refuses
            yield f"{PREFIX}{part.removesuffix('.weight')}{matrix}.weight", value.clone()
