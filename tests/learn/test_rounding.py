"""In bf16, rounding alone moves GSPO's ratios of learner to engine: why `old_logprobs` is "recomputed" there."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

ROWS, LENGTH = 8, 160
LOW, HIGH = 1 - 2e-5, 1 + 4e-4
"""GSPO's range, as in the presets."""


def row_means(dtype: torch.dtype, attention: str) -> torch.Tensor:
    """Mean logprob of each row by one of transformers' programs for attention."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"vocab_size": 2000, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1)
    ids = torch.randint(0, 2000, (ROWS, LENGTH + 1))
    model = Qwen3ForCausalLM(config).to(dtype)
    model.set_attn_implementation(attention)
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits.float()
    return logits.log_softmax(-1).gather(2, ids[:, 1:, None]).mean((1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ratios_between_two_attention_programs(dtype: torch.dtype) -> None:
    """No update was made, so every ratio should be 1; `-rP` prints the numbers of docs/guides/memory.md."""
    difference = row_means(dtype, "sdpa") - row_means(dtype, "eager")
    ratios = difference.exp()
    outside = ((ratios < LOW) | (ratios > HIGH)).float().mean().item()
    print(f"{dtype}: rows differ by {difference.abs().mean():.1e}, {outside:.0%} of the ratios are out of range")
    assert outside == 0 if dtype == torch.float32 else outside > 0.5
