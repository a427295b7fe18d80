"""The size of vLLM's cache by its own functions, as JSON: run by vLLM's Python with a JSON list of cases on stdin.

A case has ``layers`` (a list of specs) and ``context``. For each it prints the bytes of a sequence of that length while
it is decoded, with one token in flight.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

PAGE = 16


def spec(layer: dict[str, Any], block: int, page: int) -> Any:
    """The spec of a layer, with pages of `block` tokens, or of `page` bytes if it holds a state."""
    if layer["kind"] == "state":
        return MambaSpec(
            block_size=block,
            shapes=tuple(map(tuple, layer["shapes"])),
            dtypes=(torch.bfloat16, torch.float32),
            page_size_padded=page,
            mamba_cache_mode="align",
        )
    return FullAttentionSpec(
        block_size=block, num_kv_heads=layer["heads"], head_size=layer["width"], dtype=torch.bfloat16
    )


def needed(case: dict[str, Any]) -> int:
    """Bytes of a sequence of the case."""
    layers = case["layers"]
    one = next(spec(layer, 1, 0).page_size_bytes for layer in layers if layer["kind"] != "state")
    states = [spec(layer, 1, 0) for layer in layers if layer["kind"] == "state"]
    largest = max((state.real_page_size_bytes for state in states), default=1)
    block = PAGE * -(-largest // (PAGE * one))  # as platforms.interface.update_block_size_for_backend
    specs = {str(number): spec(layer, block, block * one) for number, layer in enumerate(layers)}
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(
            mamba_cache_mode="align",
            get_resolved_kv_cache_layout=lambda: SimpleNamespace(is_block_outermost=False),
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        model_config=SimpleNamespace(max_model_len=case["context"]),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        max_in_flight_tokens=1,
    )
    groups = kv_cache_utils.get_kv_cache_groups(config, specs)
    return kv_cache_utils._max_memory_usage_bytes_from_groups(config, groups)


if __name__ == "__main__":
    print(json.dumps([needed(case) for case in json.load(sys.stdin)]))
