"""LoRA adapters through peft, and the frozen 4-bit linear layers below them.

A folder with the decoded weights is the same model, bit for bit; quantising that folder again changes nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from transformers import PreTrainedModel

from coderepairrl.config.schema import Lora
from coderepairrl.errors import UsageError
from coderepairrl.learn import loading
from coderepairrl.learn.settings import LINEAR_ATTENTION, NF4_BLOCK
from coderepairrl.processes.installs import require_extra
from coderepairrl.sync.weights import ADAPTER_CONFIG

if TYPE_CHECKING:  # a learner of full weights starts a second sooner without peft
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

_PER_HEAD = ("in_proj_a", "in_proj_b", "in_proj_ba")
"""Layers of linear attention with one output per head, kept exact."""
Codes = dict[str, Tensor]
"""bitsandbytes' tensors of a weight; the empty `like` holds its dtype."""


class QuantisedLinear(nn.Linear):
    """Linear layer with quantised, frozen weights."""

    def __init__(self, shape: torch.Size, codes: Codes, dtype: torch.dtype, bias: Tensor | None) -> None:
        """Hold the codes of weights of `shape`, decoded in `dtype`."""
        nn.Module.__init__(self)
        self.out_features, self.in_features = shape
        self.codes, self.dtype = _freeze_codes(codes), dtype
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Decoded weights."""
        count = self.out_features * self.in_features
        return _dequantise(self.codes)[:count].view(self.out_features, self.in_features).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        y = cast(Tensor, cast(Any, _FrozenMatmul).apply(x, self))
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantisedLinear:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # `fn` may also change dtypes, which codes keep
        device = fn(next(iter(self.codes.values())).new_empty(0)).device
        self.codes = _freeze_codes({name: part.to(device) for name, part in self.codes.items()})
        return self


def _freeze_codes(codes: Codes) -> Codes:
    # frozen parameters, which `learn.offload` copies to the host only once
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
            codes = _quantise(weight.to(device, dtype))
            bias = None if module.bias is None else module.bias.data.to(device)
            setattr(model.get_submodule(owner), leaf, QuantisedLinear(weight.shape, codes, dtype, bias))


def read_checkpoint_dtype(folder: Path, loaded: torch.dtype) -> torch.dtype:
    """Dtype of the files, to which an engine rounds, unless `loaded` is 16-bit."""
    config: Mapping[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return getattr(torch, name) if loaded == torch.float32 and name in ("bfloat16", "float16") else loaded


def _quantise(weight: Tensor) -> Codes:
    packed, state = _import_bitsandbytes().quantize_4bit(weight, blocksize=NF4_BLOCK, quant_type="nf4")
    return {"packed": packed, "absmax": state.absmax, "code": state.code, "like": weight.new_empty(0)}


def _dequantise(codes: Codes) -> Tensor:
    bnb = _import_bitsandbytes()
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


def _import_bitsandbytes() -> Any:
    require_extra("bitsandbytes", "model.quantise=nf4")
    from bitsandbytes import functional

    return functional


_ADAPTER = ".default."  # peft's name of the adapter
_BASE_LAYER = ".base_layer"  # peft's name of the layer below adapters
_PREFIX = "base_model.model."  # before each name in peft's files
_OPTIONS = frozenset(("r", "lora_alpha", "target_modules", "base_model_name_or_path", "revision", "peft_version",
                      "auto_mapping", "inference_mode", "lora_dropout", "task_type", "eva_config"))  # fmt: skip
"""Supported options of peft, and those without effect."""
_NEUTRAL_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that keep base weights."""


def resolve_targets(model: nn.Module, settings: Lora) -> Lora:
    """Resolve the targets to linear layers of `model`, by name or the end of one, as peft does. Raises `UsageError`."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]

    def find_layers(target: str) -> list[str]:
        return [name for name in linear if f".{name}".endswith(f".{target}")]

    targets = settings.targets
    if targets == Lora().targets:  # the default: adds those of linear attention, each if the model has it
        targets = tuple(name for name in (*targets, *LINEAR_ATTENTION) if find_layers(name))
    if missing := [target for target in targets or settings.targets if not find_layers(target)]:
        raise UsageError(
            f"train.lora.targets: the model has no linear layer {missing[0]!r}",
            fix=f"it has {', '.join(sorted({name.rpartition('.')[2] for name in linear}))}",
        )
    weights = {name: id(each) for name, each in model.named_parameters(remove_duplicate=False)}
    uses = Counter(weights.values())
    for name in (name for target in targets for name in find_layers(target)):
        if uses[weights.get(f"{name}.weight", 0)] > 1:
            raise UsageError(
                f"train.lora.targets: {name} shares its weight with another layer, and engines cannot adapt only one",
                fix=f"leave {name} out of the targets",
            )
    return settings.model_copy(update={"targets": targets})


def attach_adapters(model: nn.Module, settings: Lora, seed: int = 0) -> None:
    """Add adapters that add zero, and freeze the rest. `settings`: from `resolve_targets`."""
    from peft import inject_adapter_in_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # in a ModuleList: for families whose layers differed in transformers 4, peft would replace the targets
        inject_adapter_in_model(_make_peft_config(settings), nn.ModuleList([model]))
    for layer in _find_adapted_layers(model).values():
        layer.cast_input_dtype_enabled = False  # else it upcasts its input, and autocast downcasts it again
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def write_config(folder: Path, settings: Lora, base: Path) -> None:
    """Write ``adapter_config.json`` for the model in `base`."""
    config = _make_peft_config(settings)
    config.base_model_name_or_path = str(base.resolve())
    config.inference_mode = True
    config.target_modules = sorted(settings.targets)  # peft has a set, whose order differs between processes
    config.save_pretrained(folder)


def read_config(folder: Path) -> Lora:
    """Read ``adapter_config.json``; a target pattern becomes the layers in the weights' file.

    Raises `UsageError` for an unsupported option.
    """
    from peft import LoraConfig

    config = json.loads((folder / ADAPTER_CONFIG).read_text("utf-8"))
    defaults = LoraConfig().to_dict()
    for name, value in config.items():
        is_neutral = name == "init_lora_weights" and value in _NEUTRAL_STARTS
        is_supported = name in _OPTIONS or not value or value == defaults.get(name) or is_neutral
        if not is_supported:
            raise UsageError(
                f"{folder / ADAPTER_CONFIG} has {name}={value!r}, which is not supported",
                fix="merge the adapters with peft (merge_and_unload, save_pretrained), and name the merged model",
            )
    targets = config["target_modules"]
    if isinstance(targets, str):  # a regular expression, or all-linear
        with loading.TensorFiles(folder, loading.ADAPTER) as files:
            targets = sorted({name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in files})
    return Lora(rank=config["r"], alpha=config["lora_alpha"], targets=tuple(targets))


def make_peft_name(name: str) -> str:
    """Parameter's name in peft's files.

    >>> make_peft_name("model.layers.0.self_attn.q_proj.lora_A.default.weight")
    'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    return _PREFIX + name.replace(_ADAPTER, ".")


def iter_served_tensors(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Rename adapters by the layers' names in files, as engines read them."""
    for name, tensor in tensors:
        layer, matrix, _ = name.removeprefix(_PREFIX).rpartition(".lora_A" if ".lora_A." in name else ".lora_B")
        (layer_in_file,) = dict(loading.convert_to_file_layout(model, [(f"{layer}.weight", tensor)]))
        yield f"{_PREFIX}{layer_in_file.removesuffix('.weight')}{matrix}.weight", tensor


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Compute with the base model alone, bit for bit."""
    layers = _find_adapted_layers(model).values()
    for layer in layers:
        layer.scale_layer(0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.unscale_layer()


def iter_merged_tensors(model: nn.Module, gather: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors by name, adapters merged in float32; all processes must iterate."""
    layers = {f"{name}.weight": layer for name, layer in _find_adapted_layers(model).items()}

    def add_delta(weight: str, tensor: Tensor) -> Tensor:
        layer = layers[weight]
        a, b = (gather(part["default"].weight).float() for part in (layer.lora_A, layer.lora_B))
        return cast(Tensor, (tensor.float() + (b @ a) * layer.scaling["default"]).to(tensor.dtype))

    for name, module in model.named_modules():
        if isinstance(module, QuantisedLinear):
            weight, tensor = f"{name.removesuffix(_BASE_LAYER)}.weight", module.weight.detach()
            yield weight, add_delta(weight, tensor.float()) if weight in layers else tensor
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        tensor, weight = gather(parameter), name.replace(_BASE_LAYER, "")
        yield weight, add_delta(weight, tensor) if weight in layers else tensor


def _find_adapted_layers(model: nn.Module) -> dict[str, LoraLayer]:
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _make_peft_config(settings: Lora) -> LoraConfig:
    from peft import LoraConfig

    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=list(settings.targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
