"""The policy: a Hugging Face causal language model that scores packed rows.

Attention runs row by row over a packed sequence, which on a CPU is exact and several times faster than one block
mask over all of it. The architecture is probed when it is loaded: a model whose rows leak into each other, or
whose logits are more than a linear head on the last hidden state, is refused.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coderepairrl.errors import UsageError
from coderepairrl.learn.pack import MicroBatch, pack, scored

ATTENTION = "coderepairrl_rows"
WEIGHTS = "model.safetensors"
LOGITS = 1 << 26
"""Logits (tokens times vocabulary) that are held at once: 256 MiB in float32."""
_PROBE_TOLERANCE = 1e-4  # of the largest value, in float32


def rows_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    row_lengths: tuple[int, ...] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row of a packed sequence: ``(1, heads, T, d)`` in, ``(1, T, heads, d)`` out.

    Without `row_lengths` the sequence is one row. On a GPU a variable-length FlashAttention kernel takes its place.
    """
    if attention_mask is not None or sliding_window is not None or dropout:
        raise UsageError("packed training knows full causal attention only: no mask, sliding window or dropout")
    lengths = list(row_lengths or (query.shape[2],))
    grouped = query.shape[1] != key.shape[1]
    rows = zip(*(torch.split(tensor, lengths, 2) for tensor in (query, key, value)), strict=True)
    parts = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped) for q, k, v in rows
    ]
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, rows_attention)


class Policy:
    """A model in evaluation mode (no dropout) with trainable weights."""

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        """`folder` holds the config and the tokenizer that `save` copies."""
        self.model: PreTrainedModel = model
        model.train(False)  # no dropout
        self.folder = folder
        self._probe()

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype = torch.float32) -> Policy:
        """The model in `folder`. Raises `UsageError` when there is none or it cannot be trained packed."""
        if not (folder / "config.json").is_file():
            raise UsageError(f"{folder} holds no model: config.json is missing")
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation=ATTENTION, local_files_only=True
            )
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise UsageError(f"cannot load the model in {folder}: {error}") from error
        return cls(model, folder)

    def logprobs(self, batch: MicroBatch, temperature: float, logits: int = LOGITS) -> Tensor:
        """``log softmax(logits / temperature)`` of the trained tokens (N), in float32.

        No more than about `logits` of them exist at a time, in the backward pass too, which then computes them again.
        """
        hidden_TD = self._hidden(batch)
        hidden_ND = hidden_TD[batch.at_N]
        chunk = max(1, logits // self.model.config.get_text_config().vocab_size)
        if len(hidden_ND) <= chunk:
            return self._score(hidden_ND, batch.target_N, temperature)
        return torch.cat(
            [
                cast(Tensor, checkpoint(self._score, hidden, target, temperature, use_reentrant=False))
                for hidden, target in zip(
                    torch.split(hidden_ND, chunk), torch.split(batch.target_N, chunk), strict=True
                )
            ]
        )

    def state(self) -> dict[str, Tensor]:
        """Weights by their Hugging Face names, tied ones once, sharing memory with the model."""
        seen: set[int] = set()
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.model.state_dict().items():
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                tensors[name] = tensor
        return tensors

    def load_state(self, file: Path) -> None:
        """Take the weights in `file`. Raises `UsageError`, and changes nothing, unless names and shapes are ours."""
        ours, theirs = self.state(), safetensors.torch.load_file(file)
        if {n: t.shape for n, t in ours.items()} != {n: t.shape for n, t in theirs.items()}:
            raise UsageError(f"{file} holds the weights of another model")
        with torch.no_grad():
            for name, tensor in ours.items():
                tensor.copy_(theirs[name])

    def save(self, folder: Path) -> None:
        """Write config, tokenizer and weights in Hugging Face layout."""
        folder.mkdir(parents=True, exist_ok=True)
        for file in self.folder.iterdir():
            if file.is_file() and file.suffix in (".json", ".txt", ".jinja", ".model") and ".index." not in file.name:
                shutil.copyfile(file, folder / file.name)
        safetensors.torch.save_file(self.state(), folder / WEIGHTS, metadata={"format": "pt"})

    def _hidden(self, batch: MicroBatch) -> Tensor:
        out = self.model.base_model(
            input_ids=batch.ids_T[None],
            position_ids=batch.positions_T[None],
            row_lengths=batch.lengths,
            use_cache=False,
        )
        return cast(Tensor, out.last_hidden_state[0])

    def _score(self, hidden_ND: Tensor, target_N: Tensor, temperature: float) -> Tensor:
        logits_NV = self._head(hidden_ND)
        if temperature != 1.0:
            logits_NV = logits_NV / temperature
        return -cross_entropy(logits_NV, target_N, reduction="none")

    def _head(self, hidden_ND: Tensor) -> Tensor:
        head = cast(nn.Module, self.model.get_output_embeddings())  # type: ignore[no-untyped-call]
        return cast(Tensor, head(hidden_ND)).float()

    @torch.no_grad()
    def _probe(self) -> None:
        """Packed rows give the hidden states and logits of the plain model on each row. Raises `UsageError` if not."""
        vocabulary = self.model.config.get_text_config().vocab_size
        rows = [[(7 * i * i + 3 * i + n) % vocabulary for i in range(n)] for n in (5, 9, 6)]
        plain = [self.model(input_ids=torch.tensor([row]), output_hidden_states=True) for row in rows]
        hidden_TD = self._hidden(pack(scored(rows)))
        pairs = (
            (hidden_TD, torch.cat([out.hidden_states[-1][0] for out in plain])),
            (self._head(hidden_TD), torch.cat([out.logits[0] for out in plain]).float()),
        )
        error = max(((ours - theirs).abs().max() / theirs.abs().max()).item() for ours, theirs in pairs)
        if not error <= _PROBE_TOLERANCE:
            raise UsageError(
                f"{type(self.model).__name__} cannot be trained on packed rows: they change by a fraction {error:.2g}",
                fix="use an architecture of plain causal attention, such as Qwen3, Qwen2, Llama or Mistral.",
            )


def init_random(source: Path, target: Path, seed: int) -> None:
    """Write a model with random weights to `target`, from the config.json and tokenizer in `source`.

    The same seed gives the same bits. Raises `UsageError` when `source` has no usable config.json.
    """
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError, json.JSONDecodeError) as error:
        raise UsageError(f"cannot read the model configuration in {source}: {error}") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=ATTENTION, dtype=torch.float32
        )
    Policy(model, source).save(target)
    config.architectures = [type(model).__name__]
    config.save_pretrained(target)
