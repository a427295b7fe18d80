"""Does a server with a quantised base compute the same logprobs as the learner?

    python benchmarks/gpu/quantised.py --model Qwen/Qwen3-0.6B [--python ~/vllm/bin/python]
    python benchmarks/gpu/quantised.py            (the shipped policy of 1.4 M parameters, on a CPU too)

Prints a line for `plain` weights and for `nf4`: the largest and the mean absolute difference between the logprobs of
sampled tokens, in nats, and the effect of rounding itself (learner with quantised weights against learner without).
Exits with 1 if a server refused a format.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging as hf_logging

from coderepairrl import models
from coderepairrl.config.schema import Lora
from coderepairrl.engines.tiny import Tiny
from coderepairrl.engines.vllm import Vllm
from coderepairrl.errors import CodeRepairError
from coderepairrl.learn import LearnSettings
from coderepairrl.learn.learner import round_model
from coderepairrl.learn.trainer import Trainer
from coderepairrl.protocols import EngineSpec
from coderepairrl.sync import weights
from coderepairrl.types import Sampling

FORMATS = ("plain", "nf4")


async def sampled(engine: EngineSpec, model: Path, vocabulary: int, work: Path) -> tuple[list[list[int]], list[Any]]:
    """Sample from the engine: rows of prompt and reply, and the logprobs of the replies."""
    server = await engine.start(model, log_dir=work)

    async def one(number: int) -> tuple[list[int], list[float]]:
        prompt = [(7 * i * i + 3 * i + number) % vocabulary for i in range(32)]
        ids, logprobs = [], []
        async for part in server.generate(prompt, Sampling(max_tokens=64, temperature=1.0), seed=number):
            ids += part.ids
            logprobs += part.logprobs
        return prompt + ids, logprobs

    try:
        rows, logprobs_by_row = zip(*await asyncio.gather(*(one(number) for number in range(16))), strict=True)
    finally:
        await server.close()
    return list(rows), list(logprobs_by_row)


def compared(form: str, source: Path, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Compare engine and learner on one format, and the learner with quantised weights and without."""
    precision = "fp32" if options.engine == "tiny" else "bf16"
    served, quantise = (work / form, "nf4") if form == "nf4" else (source, "none")
    if form == "nf4":
        round_model(source, served, "nf4", precision)  # type: ignore[arg-type]
    engine: EngineSpec = Tiny()
    if options.engine == "vllm":
        args = () if options.share is None else ("--gpu-memory-utilization", str(options.share))
        engine = Vllm(slots=16, context=512, dtype="bfloat16", python=options.python, args=args)
    vocabulary = json.loads((source / "config.json").read_text())["vocab_size"]
    logs = work / f"{form}-logs"
    logs.mkdir()
    rows, theirs = asyncio.run(sampled(engine, served, vocabulary, logs))

    def scored(model: Path, form: str) -> Tensor:
        learn = LearnSettings(lora=Lora(), precision=precision, quantise=form)  # type: ignore[arg-type]
        found = Trainer(model, learn).logprobs(rows, 1.0)
        return torch.tensor([p for row, by in zip(found, theirs, strict=True) for p in row[-len(by) :]])

    ours = scored(served, quantise)
    apart = (ours - torch.tensor([p for by in theirs for p in by])).abs()
    rounding = (ours - scored(source, "none")).abs()
    return {
        "format": form,
        "tokens": len(ours),
        "max": apart.max().item(),
        "mean": apart.mean().item(),
        "rounding_mean": rounding.mean().item(),
        "bytes": weights.count_bytes(served),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--engine", choices=["vllm", "tiny"], default="vllm")
    parser.add_argument("--python", default="", help="the interpreter that has vLLM")
    parser.add_argument("--share", type=float, help="of a GPU's memory that the server takes")
    parser.add_argument("--scratch", type=Path, help="where models are written")
    options = parser.parse_args()
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    source, failed = models.find_model_folder(options.model, weights=True), False
    for form in options.formats:
        with tempfile.TemporaryDirectory(dir=options.scratch) as work:
            try:
                print(json.dumps(compared(form, source, Path(work), options)), flush=True)
            except CodeRepairError as error:
                print(json.dumps({"format": form, "failed": str(error)[-1500:]}), flush=True)
                failed = True
    sys.exit(failed)


if __name__ == "__main__":
    main()
