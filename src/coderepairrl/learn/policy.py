"""Policy: a causal language model that scores packed rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from coderepairrl import models
from coderepairrl.errors import UsageError
from coderepairrl.learn import adapters, loading, recurrence
from coderepairrl.learn.loading import load_model
from coderepairrl.learn.pack import MicroBatch
from coderepairrl.learn.packed import ComparedModel, PackedModel, TokenScores
from coderepairrl.learn.probe import probe_layers
from coderepairrl.learn.settings import MAX_LOGITS, Form, LearnSettings
from coderepairrl.learn.values import VALUE_HEAD

FULL_MODEL_FILES = ("config.json", "generation_config.json")  # next to these, transformers looks for full weights
DEFAULTS = LearnSettings()
CPU = torch.device("cpu")


class Policy:
    """Model in evaluation mode, with trainable weights or adapters."""

    def __init__(
        self,
        model: PreTrainedModel,
        folder: Path,
        settings: LearnSettings = DEFAULTS,
        device: torch.device = CPU,
    ) -> None:
        """Wrap `model`; `save` copies config and tokenizer from `folder`."""
        if settings.lora is not None:
            settings = settings.with_changes(lora=adapters.resolve_targets(model, settings.lora))
        self.settings = settings
        self.folder = folder
        self.device = device
        self.model: PreTrainedModel = model.to(device)  # type: ignore[arg-type]
        model.train(False)  # no dropout
        self._packed = PackedModel(model, bf16=settings.precision == "bf16", values=settings.value_head).to(device)
        recurrence.install_tree_functions(model)
        self.probe_result = probe_layers(model, self._packed.hidden, self._packed.head)
        self._packed.rows_only = self.probe_result.way == "rows"
        self.model.set_attn_implementation(self.probe_result.attention)
        if settings.lora is not None:
            adapters.attach_adapters(model, settings.lora, settings.seed)
        if settings.gradient_checkpointing:
            self._checkpoint_layers()
        self.module: nn.Module = self._packed
        """Packed model, or its wrapper where processes share it."""
        self.gather_tensor: Callable[[Tensor], Tensor] = Tensor.detach
        """Gathers shards (`strategy.SingleProcess.gather_tensor`)."""

    @classmethod
    def load(
        cls,
        folder: Path,
        settings: LearnSettings = DEFAULTS,
        device: torch.device = CPU,
        *,
        frozen: bool = False,
    ) -> Policy:
        """Load the model in `folder`; a `frozen` one has no adapters.

        Raises as `load_model`, and `UsageError` if it cannot be trained packed.
        """
        if frozen:
            settings = settings.with_changes(
                lora=None, beta=0.0, value_head=False, gradient_checkpointing=False, quantise="none"
            )
        is_half = settings.precision == "bf16" and (frozen or settings.lora is not None)
        model = load_model(folder, torch.bfloat16 if is_half else torch.float32)
        if settings.quantise == "nf4":
            adapters.quantise(model, adapters.read_checkpoint_dtype(folder, model.dtype), device)
        if frozen:
            model.requires_grad_(False)
        return cls(model, folder, settings, device)

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name; tied weights once."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def values(self) -> dict[str, nn.Parameter]:
        """Value head parameters; never sent to an engine."""
        head = self._packed.value_head
        return {} if head is None else {f"{VALUE_HEAD}.{name}": p for name, p in head.named_parameters()}

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All trainable parameters."""
        return self.weights | self.values

    def logprobs(self, batch: MicroBatch, temperature: float, max_logits: int = MAX_LOGITS) -> Tensor:
        """Logprobs of the trained tokens (N), float32."""
        return self.score(batch, temperature, max_logits=max_logits).logp_N

    def score(
        self,
        batch: MicroBatch,
        temperature: float,
        others: Mapping[str, ComparedModel] | None = None,
        *,
        with_entropy: bool = False,
        max_logits: int = MAX_LOGITS,
    ) -> TokenScores:
        """Logprobs and values; with `others` also likeliest tokens, divergences and entropy."""
        inputs = batch.to(self.device), temperature, max_logits, others
        return cast(TokenScores, self.module(*inputs, with_entropy=with_entropy))

    @torch.no_grad()
    def compute_states(self, batch: MicroBatch) -> Tensor:
        """Hidden states that predict the trained tokens (ND)."""
        return cast(Tensor, self.module(batch.to(self.device), states=True))

    def compute_compared(self, batch: MicroBatch, *, reverse: bool) -> ComparedModel:
        """This model, for `score`'s `others`."""
        return ComparedModel(self.compute_states(batch), self._packed.head, reverse)

    @property
    def can_chunk(self) -> bool:
        """Whether trees can be computed in chunks."""
        config = self.model.config.get_text_config()
        is_windowed = getattr(config, "sliding_window", None) is not None
        return self.probe_result.chunked and not is_windowed and self.device.type == "cpu"

    def use_initial_weights(self) -> AbstractContextManager[None]:
        """Switch to the untrained model. Needs adapters."""
        return adapters.disable_adapters(self.model)

    def file_name(self, name: str) -> str:
        """Parameter's name in files."""
        return name if self.settings.lora is None else adapters.make_peft_name(name)

    @property
    def stem(self) -> str:
        """Stem of the file with `weights`."""
        return loading.MODEL if self.settings.lora is None else loading.ADAPTER

    def save(self, folder: Path, *, is_writer: bool = True) -> None:
        """Write a model or adapter; without `is_writer`, only take part in gathering."""
        for stem, parameters in self.parameters_by_stem.items():
            tensors = ((name, self.gather_tensor(parameter)) for name, parameter in parameters.items())
            constants = find_constants(self.model) if stem == loading.MODEL else {}
            loading.write_tensors(folder, stem, chain(tensors, constants.items()), is_writer=is_writer)
        if is_writer:
            self._write_model_files(folder, self.stem, torch.float32)

    @property
    def parameters_by_stem(self) -> dict[str, dict[str, nn.Parameter]]:
        """Parameters by file stem and name."""
        named = {self.file_name(name): p for name, p in self.weights.items()}
        return {self.stem: named} | ({VALUE_HEAD: self.values} if self.values else {})

    def export(self, folder: Path, form: Form, *, is_writer: bool = True) -> None:
        """Write weights for an engine, in the run's precision."""
        stem = loading.MODEL if form == "model" else loading.ADAPTER
        loading.write_tensors(folder, stem, self.iter_exported(form), is_writer=is_writer)
        if is_writer:
            self._write_model_files(folder, stem, self._export_dtype)

    def iter_exported(self, form: Form) -> Iterator[tuple[str, Tensor]]:
        """Tensors of `export`; all processes must iterate. Raises ValueError without adapters."""
        if form == "adapter" and self.settings.lora is None:
            raise ValueError("there are no adapters: all weights are trained")
        trained = ((self.file_name(name), self.gather_tensor(p)) for name, p in self.weights.items())
        tensors: Iterator[tuple[str, Tensor]] = trained
        if form == "adapter":
            tensors = adapters.iter_served_tensors(self.model, trained)
        elif self.settings.lora is not None:
            tensors = adapters.iter_merged_tensors(self.model, self.gather_tensor)
        rounded = ((name, tensor.to(self._export_dtype)) for name, tensor in tensors)
        if form == "adapter":
            return rounded
        # constants keep their dtype: a router's bias may be float32 in a bfloat16 model
        return loading.convert_to_file_layout(self.model, chain(rounded, find_constants(self.model).items()))

    @property
    def _export_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.settings.precision == "bf16" else torch.float32

    def _write_model_files(self, folder: Path, stem: str, dtype: torch.dtype) -> None:
        is_adapter = stem == loading.ADAPTER
        copy_model_files(self.folder, folder, without=FULL_MODEL_FILES if is_adapter else ())
        if not is_adapter:
            _write_dtype(folder / "config.json", dtype)
        elif self.settings.lora is not None:
            adapters.write_config(folder, self.settings.lora, self.folder)

    def _checkpoint_layers(self) -> None:
        # layers checkpoint only in training mode, where some apply dropout: it is off while they compute
        layers = [module for module in self.model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers or not self.model.supports_gradient_checkpointing:
            raise UsageError(
                f"{type(self.model).__name__} has no gradient checkpointing", fix="train.gradient_checkpointing=false"
            )
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in layers:
            layer.training = True
            layer.register_forward_pre_hook(lambda each, _: setattr(each, "training", False))
            layer.register_forward_hook(lambda each, *_: setattr(each, "training", True), always_call=True)


def find_constants(model: nn.Module) -> dict[str, Tensor]:
    """Buffers stored in model files, such as a router's biases."""
    saved_names = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved_names}


def _write_dtype(file: Path, dtype: torch.dtype) -> None:
    # the dtype in config.json is the one to which engines round weights
    config = json.loads(file.read_text("utf-8"))
    for part in (config, config.get("text_config") or {}):
        part |= {key: str(dtype).removeprefix("torch.") for key in ("dtype", "torch_dtype") if key in part}
    file.write_text(json.dumps(config, indent=2) + "\n")


def copy_model_files(source: Path, target: Path, *, without: tuple[str, ...] = ()) -> None:
    """Copy configs, tokenizer and templates."""
    for file in source.iterdir():
        has_no_weights = file.suffix in (".json", ".txt", ".jinja", ".model") and ".index." not in file.name
        if file.is_file() and has_no_weights and file.name not in (*without, models.QUANTISED):
            shutil.copyfile(file, target / file.name)
